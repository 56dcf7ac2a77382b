"""Computes the target's hidden states and distributions at every token of a corpus, and stores them
next to its chats (the files that `corpus` lists).
"""

import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from forerun.errors import ModelError
from forerun.train.corpus import Corpus, write_whole
from forerun.train.teacher import Teacher
from forerun.types import Floats, Ints

LIKELY = 64
"""K, the number of draft ids stored per position, unless the draft vocabulary is smaller."""


class ReadsFeatures(Protocol):
    """The part of a network's description that says which of the target's hidden states it reads:
    `features`, as in DraftHead, each of size `target_hidden`.
    """

    @property
    def features(self) -> tuple[int, ...]:
        """The hidden states that the network reads, as transformers numbers them (see
        DraftHead).
        """
        ...

    @property
    def target_hidden(self) -> int:
        """H, the target's hidden size."""
        ...


def write_features(
    corpus: Corpus,
    head: ReadsFeatures,
    ids: Ints,
    teacher: Teacher,
    progress: Callable[[int, int], None],
) -> None:
    """Run the target once over every chat and store its hidden states and distributions (the files
    that `corpus` lists).

    head      which hidden states the network reads
    ids       int32[Vd] the draft vocabulary
    teacher   runs the target
    progress  called with (tokens done, tokens in all) after each chat

    Resumable: chats that were done for the same vocabulary and hidden states (progress.json) are
    kept. Raises ModelError if the disk has too little space.
    """
    total, width = len(corpus.tokens), head.target_hidden * len(head.features)
    likely = min(LIKELY, len(ids))
    shapes = {
        "features": (np.uint16, (total, width)),
        "choice": (np.int32, (total,)),
        "likely": (np.int32, (total, likely)),
        "chance": (np.float16, (total, likely)),
    }
    note = corpus.folder / "progress.json"
    facts = {
        "features": list(head.features),
        "numbers": "bfloat16",
        "vocabulary": zlib.crc32(ids.tobytes()),
    }
    done = _chats_done(note, facts)
    if not done:
        _check_space(corpus.folder, shapes.values())
    arrays = {
        name: np.lib.format.open_memmap(
            corpus.folder / f"{name}.npy", mode="r+" if done else "w+", dtype=dtype, shape=shape
        )
        for name, (dtype, shape) in shapes.items()
    }
    for chat in range(done, corpus.chats):
        span = corpus.span(chat)
        scored = corpus.scored(chat)
        features, logits = teacher(np.asarray(corpus.tokens[span]), scored)
        narrow = torch.from_numpy(features).bfloat16()
        arrays["features"][span] = narrow.view(torch.uint16).numpy()
        for name, values in zip(
            ("choice", "likely", "chance"), distil(logits, ids, likely), strict=True
        ):
            arrays[name][span.start + scored] = values
        if chat % 50 == 49 or chat == corpus.chats - 1:
            for array in arrays.values():
                array.flush()
            write_whole(note, json.dumps({"chats": chat + 1, **facts}))
        progress(span.stop, total)


def _check_space(folder: Path, shapes: Iterable[tuple[type, tuple[int, ...]]]) -> None:
    """Raise ModelError if the arrays do not fit on the disk, since writing to a mapped file on a
    full disk kills the process.
    """
    needed = sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in shapes)
    if needed > (free := shutil.disk_usage(folder).free):
        raise ModelError(
            f"the features take {needed:,} bytes, {folder} has {free:,} free; free some space and "
            "start the same command again, or choose another --out or fewer --answers"
        )


def _chats_done(note: Path, facts: dict[str, object]) -> int:
    """Return the number of chats that an earlier run finished with the same `facts`."""
    found = json.loads(note.read_text()) if note.exists() else {}
    same = all(found.get(name) == value for name, value in facts.items())
    return int(found["chats"]) if same else 0


def distil(logits: Floats, ids: Ints, likely: int) -> tuple[Ints, Ints, Floats]:
    """Return the stored form of a teacher's logits float32[n,V]: choice int32[n], the argmax over
    the full vocabulary; and for the `likely` best ids of the draft vocabulary ids int32[Vd], their
    draft ids int32[n,K] and their probabilities float32[n,K], which sum to one.
    """
    known = torch.from_numpy(logits)
    best, where = known.index_select(1, torch.from_numpy(ids)).topk(likely)
    return known.argmax(1).int().numpy(), where.int().numpy(), best.softmax(1).numpy()
