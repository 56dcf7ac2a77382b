"""Counts n-gram tables (forerun.drafts.ngram_table), of a target's answers or of any text."""

import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from forerun.drafts.ngram_table import FILE, NgramTable
from forerun.types import AnyArray

SEEN = (1, 2, 2, 2)
"""Least count of contexts of 1, 2, ... tokens to be stored. (Judged as DISCOUNTS: (1, 1, 2, 2) is
.2 % faster and takes a third more, a fifth token brings nothing; (2, 2, 3, 3), with four followers
from .05 on, is .2 % slower at T=0, .5 % at .8, and takes 4.0 MB instead of 7.0.)
"""
FOLLOWERS = 8
"""Most predictions per context."""
MIN_PROB = 0.02
"""Predictions with a lower probability are left out."""
DISCOUNTS = (0.0, 0.7, 1.05, 1.35)
"""Subtracted from a follower's count of 0, 1, 2, and 3 or more. (300 held-out answers of the
default model at T=0 and .8, draft tokens by the cost of nodes on an Intel Xeon, speed over plain:
with one discount of .75 and counts instead of continuations 1.627 and 1.254, with these 1.647 and
1.265; as Chen and Goodman estimate them 1.645 and 1.264.)
"""
CAUTION = 0.5
"""Added to the count of all other tokens. (Judged likewise: 0 is .2 % slower at T=.8.)"""


def count_ngrams(tokens: AnyArray, counted: AnyArray, starts: AnyArray, vocab: int) -> NgramTable:
    """Return the n-gram table of the answers in chats, with contexts of 1 to len(SEEN) tokens:
    modified Kneser-Ney smoothing, interpolated (Chen and Goodman 1999, section 3). After the
    longest contexts it counts followers; after a shorter one, which is used if the longer is
    unknown, the number of different tokens that preceded it before a follower.

    tokens  int[T] all chats
    counted  bool[T] tokens of answers
    starts  int[C+1] where chats begin
    vocab   V
    """
    chat = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    at = np.flatnonzero(counted)  # What is predicted, ...
    context = np.zeros(len(at), np.int64)  # ... and the context it is known to follow so far.
    extensions, earlier, first = [], [np.zeros(1, np.int64)], 0
    nothing = np.zeros(0, np.int64)
    levels = [(np.ones(1), np.zeros(1, np.int64), nothing, np.zeros(0))]
    for order, least in enumerate(SEEN, 1):
        before = at - order
        inside = (before >= 0) & (chat[before] == chat[at])
        at, context = at[inside], context[inside]
        key = (context - first) * vocab + tokens[at - order]
        kinds, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
        frequent = counts >= least
        number = np.cumsum(frequent) - 1
        extensions.append(np.bincount(kinds[frequent] // vocab, minlength=len(earlier[-1])))
        first += len(earlier[-1])
        earlier.append(kinds[frequent] % vocab)
        often = frequent[inverse]
        at, context = at[often], first + number[inverse[often]]
        informative: AnyArray = np.arange(len(at))
        if order < len(SEEN):
            before = at - order - 1
            inside = (before >= 0) & (chat[before] == chat[at])
            informative = _different(context, tokens[at], np.where(inside, tokens[before], vocab))
        levels.append(
            _predict(context[informative] - first, tokens[at[informative]], len(earlier[-1]))
        )
    extensions.append(np.zeros(len(earlier[-1]), np.int64))
    rest, counts, followers, shares = (np.concatenate(part) for part in zip(*levels, strict=True))
    return NgramTable(
        extensions=np.append(1, 1 + np.cumsum(np.concatenate(extensions))).astype(np.int32),
        earlier=np.concatenate(earlier).astype(np.int32),
        rest=rest.astype(np.float16).astype(np.float32),
        predictions=np.append(0, np.cumsum(counts)).astype(np.int32),
        tokens=followers.astype(np.int32),
        shares=shares.astype(np.float16).astype(np.float32),
        vocab=vocab,
    )


def _different(*numbers: AnyArray) -> AnyArray:
    """Return int[.] the index of the first occurrence of every different combination of these
    int[n].
    """
    kind = numbers[0]
    for more in numbers[1:]:
        kind = np.unique(kind, return_inverse=True)[1] * (int(more.max(initial=0)) + 1) + more
    places: AnyArray = np.unique(kind, return_index=True)[1]
    return places


def _predict(
    context: AnyArray, follower: AnyArray, contexts: int
) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray]:
    """Return the predictions after contexts 0, 1, ..., where `follower` came after each `context`:
    rest float[contexts], number of predictions int[contexts], and these, context after context and
    the likeliest first, as tokens int[R] and shares float[R].
    """
    width = int(follower.max(initial=0)) + 1
    kinds, seen = np.unique(context * width + follower, return_counts=True)
    owner, token = kinds // width, kinds % width
    total = np.bincount(context, minlength=contexts) + CAUTION
    discount = np.array(DISCOUNTS)[np.minimum(seen, 3)]
    probability = np.maximum(seen - discount, 0.0) / total[owner]
    taken = np.bincount(owner, np.minimum(discount, seen), contexts)
    rest = (taken + CAUTION) / total
    order = np.lexsort((token, -probability, owner))
    owner, token, probability = owner[order], token[order], probability[order]
    different = np.bincount(owner, minlength=contexts)
    place = np.arange(len(owner)) - np.append(0, np.cumsum(different))[owner]
    selected = (place < FOLLOWERS) & (probability >= MIN_PROB)
    return (
        rest,
        np.bincount(owner[selected], minlength=contexts),
        token[selected],
        probability[selected],
    )


def write_ngrams(table: NgramTable, folder: Path) -> bool:
    """Store the table in a draft's folder (created if missing), atomically. Returns False and
    writes nothing if the table is empty. Raises OSError if the disk refuses.
    """
    if not len(table.tokens):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    write_table(table, folder / FILE)
    return True


def write_table(table: NgramTable, path: Path) -> None:
    """Store the table in a file, atomically. Raises OSError if the disk refuses."""
    tensors = {
        "extensions": _small(np.diff(table.extensions)),
        "earlier": _small(table.earlier),
        "predictions": _small(np.diff(table.predictions)),
        "tokens": _small(table.tokens),
        "vocab": np.array([table.vocab], np.int32),
        "rest": table.rest.astype(np.float16),
        "shares": table.shares.astype(np.float16),
    }
    if not table.answers:
        tensors["answers"] = np.zeros(1, np.int32)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    save_file(tensors, beside)
    beside.chmod(0o644)  # The user that serves it may be another than the one that made it.
    beside.replace(path)


def _small(numbers: AnyArray) -> AnyArray:
    """Convert integers to two bytes each if they suffice, else to four."""
    kind = np.uint16 if int(numbers.max(initial=0)) < 1 << 16 else np.int32
    return np.ascontiguousarray(numbers, kind)
