"""Pieces of the corpus -> padded batches, from features on disk or computed on the way."""

from collections.abc import Callable

import numpy as np
import torch

from forerun.train.corpus import Corpus, Piece
from forerun.train.loss import Batch
from forerun.train.target import DenseTarget
from forerun.types import AnyArray


def _padded(array: AnyArray, pieces: list[Piece]) -> AnyArray:
    """Rows of `array` [T, ...] for each piece, zero-padded at the end to the longest."""
    length = max(piece.end - piece.begin for piece in pieces)
    out = np.zeros((len(pieces), length, *array.shape[1:]), array.dtype)
    for row, piece in zip(out, pieces, strict=True):
        row[: piece.end - piece.begin] = array[piece.begin : piece.end]
    return out


def stored_reader(corpus: Corpus, dtype: torch.dtype) -> Callable[[list[Piece]], Batch]:
    """Batches from the features that `write_features` stored: several epochs, one target pass."""
    stored = {
        name: np.load(corpus.folder / f"{name}.npy", mmap_mode="r")
        for name in ("features", "last", "choice")
    }

    def read(pieces: list[Piece]) -> Batch:
        return Batch(
            tokens=torch.from_numpy(_padded(corpus.tokens, pieces)).long(),
            wanted=torch.from_numpy(_padded(corpus.wanted, pieces)),
            features=torch.from_numpy(_padded(stored["features"], pieces)).to(dtype),
            last=torch.from_numpy(_padded(stored["last"], pieces)).to(dtype),
            choice=torch.from_numpy(_padded(stored["choice"], pieces)).long(),
        )

    return read


def online_reader(
    corpus: Corpus, target: DenseTarget, features: tuple[int, ...]
) -> Callable[[list[Piece]], Batch]:
    """Batches whose features the target computes now: no disk, for a fast device."""

    def read(pieces: list[Piece]) -> Batch:
        tokens = torch.from_numpy(_padded(corpus.tokens, pieces)).long().to(target.device)
        wanted = torch.from_numpy(_padded(corpus.wanted, pieces))
        found, last = target.run(tokens, features)
        return Batch(tokens, wanted, found, last, target.choices(last))

    return read
