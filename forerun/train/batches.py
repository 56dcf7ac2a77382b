"""Builds padded batches from pieces of the corpus, with features from disk or computed on the
fly.
"""

from collections.abc import Callable

import numpy as np
import torch

from forerun.errors import ConfigError
from forerun.train.corpus import ChatPiece, Corpus
from forerun.train.loss import DenseTargets, LikeliestTargets, TrainingBatch
from forerun.train.target import DenseTarget
from forerun.types import AnyArray


def _padded(array: AnyArray, pieces: list[ChatPiece]) -> torch.Tensor:
    """Return the rows of `array` [T, ...] for each piece, zero-padded at the end to the longest."""
    length = max(piece.end - piece.begin for piece in pieces)
    out = np.zeros((len(pieces), length, *array.shape[1:]), array.dtype)
    for row, piece in zip(out, pieces, strict=True):
        row[: piece.end - piece.begin] = array[piece.begin : piece.end]
    return torch.from_numpy(out)


def stored_reader(corpus: Corpus) -> Callable[[list[ChatPiece]], TrainingBatch]:
    """Return a function from pieces to batches that reads the features stored by `write_features`,
    so that several epochs cost one pass of the target. On the CPU. Raises OSError if features are
    missing.
    """
    stored = {
        name: np.load(corpus.folder / f"{name}.npy", mmap_mode="r")
        for name in ("features", "choice", "likely", "chance")
    }

    def read(pieces: list[ChatPiece]) -> TrainingBatch:
        got = {name: _padded(array, pieces) for name, array in stored.items()}
        return TrainingBatch(
            tokens=_padded(corpus.tokens, pieces).long(),
            loss_mask=_padded(corpus.loss_mask, pieces),
            features=got["features"].view(torch.bfloat16).float(),
            choice=got["choice"].long(),
            teacher=LikeliestTargets(
                got["likely"].flatten(0, 1).long(), got["chance"].flatten(0, 1).float()
            ),
        )

    return read


def online_reader(
    corpus: Corpus, target: DenseTarget, features: tuple[int, ...], rows: torch.Tensor
) -> Callable[[list[ChatPiece]], TrainingBatch]:
    """Return a function from pieces to batches that computes the features with `target`, on its
    device; uses no disk, for a fast device.

    features  hidden states to keep, as transformers numbers them
    rows      [Vd,H] the target's output rows of the draft vocabulary

    Raises ConfigError for a target with a logit cap, since the teacher is computed from `rows`
    alone.
    """
    if target.arch.final_softcap is not None:
        raise ConfigError(
            f"this {target.arch.family} target caps its logits, which training on a GPU does not "
            "know; use --train-device cpu, where features and logits are written first"
        )

    def read(pieces: list[ChatPiece]) -> TrainingBatch:
        tokens = _padded(corpus.tokens, pieces).long().to(target.device)
        found, last = target.run(tokens, features)
        return TrainingBatch(
            tokens,
            _padded(corpus.loss_mask, pieces),
            found,
            target.choices(last),
            DenseTargets(last.flatten(0, 1), rows),
        )

    return read
