"""The n-gram table: a back-off n-gram model of the target's own answers, used as a draft.

Modified Kneser-Ney smoothing (Chen and Goodman 1999): a discount is subtracted from every
follower's count and given to the shorter contexts, which count how many different tokens preceded
them before a follower (forerun/drafts/ngram_counts.py). As a drafter it needs no arithmetic, and
its drafts improve with the number of counted answers; lookup of a text's own repetitions is added
to it. (Storing a model's continuations of n-grams: arXiv 2411.03786; retrieving them from a corpus:
REST, arXiv 2311.08252.)
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from forerun.checkpoints.checkpoint import shortened
from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.shard import MAPS, read_shard
from forerun.errors import ModelError
from forerun.types import AnyArray, Floats, Ints

FILE = "ngrams.safetensors"
"""The table's name in the folder of a draft."""

_COUNTS = ("extensions", "earlier", "predictions", "tokens", "vocab")
_CHANCES = ("rest", "shares")
_ANSWERS = "answers"
"""Flag of a table without answers; older files, which lack it, have answers."""
_INTEGERS = {"U16": "<u2", "I32": "<i4"}


Level = tuple[float, list[tuple[int, float]]]
"""The estimate of one context: (the probability left to shorter contexts, tokens with their
own).
"""


def interpolated(*sources: Iterable[Level]) -> dict[int, float]:
    """Return the probabilities, at most 1 in sum, of the tokens that may come next.

    sources  each yields the estimates of contexts of 1, 2, ... tokens; longer contexts weigh more,
             and of the same length the later source
    """
    chances: dict[int, float] = {}
    for levels in zip_longest(*sources):
        for level in levels:
            if level is not None:
                rest, shares = level
                for known in chances:
                    chances[known] *= rest
                for token, share in shares:
                    chances[token] = chances.get(token, 0.0) + share
    return chances


@dataclass(frozen=True, slots=True)
class NgramTable:
    """A trie of contexts, read from the last token backwards, and their followers.

    Context 0 is the empty one. Those that are one token longer than context c have the numbers
    extensions[c] to extensions[c + 1] and ascend by that token. C contexts, R predictions.

    extensions   int32[C+1]
    earlier      int32[C]    the first token of a context, by which it is longer; 0 for context 0
    rest         float32[C]  probability left to the predictions of shorter contexts
    predictions  int32[C+1]  the predictions of context c, most probable first, have the numbers
                             predictions[c] to predictions[c + 1]
    tokens       int32[R]
    shares       float32[R]  probability of each; with `rest` at most 1 in a context
    vocab        V of the target
    answers      whether the target's own answers were counted; else other text was, and answers
                 that are counted while serving add to it
    """

    extensions: Ints
    earlier: Ints
    rest: Floats
    predictions: Ints
    tokens: Ints
    shares: Floats
    vocab: int
    answers: bool = True

    @property
    def contexts(self) -> int:
        """C, the number of contexts, including the empty one."""
        return len(self.earlier)

    def follow(self, text: Sequence[int]) -> dict[int, float]:
        """Return the probabilities, at most 1 in sum, of tokens that may come after `text`, of
        which only the end is read.
        """
        return interpolated(self.levels(text))

    def levels(self, text: Sequence[int]) -> Iterator[Level]:
        """Yield the estimates of the token after `text` by its last token, its last two, and so on,
        as far as there are such contexts.
        """
        context = 0
        for token in reversed(text):
            end = int(self.extensions[context + 1])
            at = bisect_left(self.earlier, token, int(self.extensions[context]), end)
            if at == end or self.earlier[at] != token:
                break
            context, mine = at, slice(self.predictions[at], self.predictions[at + 1])
            pairs = zip(self.tokens[mine].tolist(), self.shares[mine].tolist(), strict=True)
            yield float(self.rest[at]), list(pairs)


def read_ngram_table(path: Path, vocab: int) -> NgramTable:
    """Read the table in a file, for a target of `vocab` tokens. Raises ModelError if it is damaged,
    incomplete, or for another target.
    """
    file = read_shard(path, MAPS)
    wrong = set(file.tensors) - {_ANSWERS} ^ {*_COUNTS, *_CHANCES}
    if wrong:
        raise ModelError(f"{path}: missing or unexpected tensors: {shortened(sorted(wrong))}")
    counts = {name: _integers(file, name) for name in _COUNTS}
    chances = {name: file.floats(name).reshape(-1) for name in _CHANCES}
    if counts["vocab"].tolist() != [vocab]:
        made_for = ", ".join(map(str, counts["vocab"].tolist()))
        raise ModelError(
            f"{path} was made for a vocabulary of {made_for} tokens, the target has {vocab}; make "
            "one with `forerun train`"
        )
    table = NgramTable(
        extensions=_ends(counts["extensions"], first=1),
        earlier=counts["earlier"],
        rest=chances["rest"],
        predictions=_ends(counts["predictions"], first=0),
        tokens=counts["tokens"],
        shares=chances["shares"],
        vocab=vocab,
        answers=_ANSWERS not in file.tensors or bool(_integers(file, _ANSWERS).any()),
    )
    fault = _fault(table)
    if fault:
        raise ModelError(f"{path}: {fault}; the table is damaged")
    return table


def _integers(file: TensorFile, name: str) -> Ints:
    kind = file.tensors[name].kind
    if kind not in _INTEGERS:
        raise ModelError(f"{file.path}: {name} is stored as {kind}; it must be U16 or I32")
    numbers: Ints = file.rows(name).view(_INTEGERS[kind]).reshape(-1).astype(np.int32)
    return numbers


def _ends(counts: Ints, first: int) -> Ints:
    """Return int32[C+1], the index where each context's items begin, from their counts."""
    ends = np.append(first, first + np.cumsum(counts, dtype=np.int64))
    held: Ints = np.minimum(ends, np.iinfo(np.int32).max).astype(np.int32)
    return held


def _fault(table: NgramTable) -> str | None:
    """Return the error of an invalid table, with the tensor's name; None if it is valid."""
    count, begins = table.contexts, table.extensions[:-1]
    if len(table.extensions) != count + 1 or table.extensions[-1] != count:
        return "extensions do not number the contexts"
    if np.any(np.diff(table.extensions) < 0) or np.any(begins <= np.arange(count)):
        return "extensions do not come after the contexts they extend"
    # A context that is not the first of its siblings comes after one with a lower token.
    follows = np.ones(count, np.bool_)
    follows[np.append(begins[begins < count], 0)] = False
    later = np.flatnonzero(follows)
    if np.any(table.earlier[later] <= table.earlier[later - 1]):
        return "earlier does not ascend among the extensions of one context"
    return _strange(table) or _unlikely(table)


def _strange(table: NgramTable) -> str | None:
    if len(table.predictions) != table.contexts + 1 or np.any(np.diff(table.predictions) < 0):
        return "predictions do not belong to the contexts"
    if table.predictions[-1] != len(table.tokens) or len(table.tokens) != len(table.shares):
        return "predictions, tokens and shares are not of one length"
    for name, tokens in (("earlier", table.earlier), ("tokens", table.tokens)):
        if np.any((tokens < 0) | (tokens >= table.vocab)):
            return f"{name} holds ids outside 0..{table.vocab - 1}"
    return None


def _unlikely(table: NgramTable) -> str | None:
    if len(table.rest) != table.contexts or not _within(table.rest, 0.0):
        return "rest does not have one probability for every context"
    if not _within(table.shares, 1e-9):
        return "shares are not probabilities"
    ends = np.append(0.0, np.cumsum(table.shares, dtype=np.float64))[table.predictions]
    # What a half float loses is no fault.
    if np.any(np.diff(ends) + table.rest[: table.contexts] > 1.01):
        return "shares and rest of a context add up to more than 1"
    return None


def _within(chances: AnyArray, low: float) -> bool:
    return bool(np.all((chances >= low) & (chances <= 1.0)))
