"""What becomes of decided tokens: stop conditions, text, and the deltas that report them."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from forerun.engine.request import Delta, Finish
from forerun.engine.sequence import Sequence
from forerun.interface.grammars import Committed
from forerun.interface.plan import Outcome, TokenLogprobs

News = tuple[int, Committed | None]
"""A row whose tokens are permanent and not told yet, and what its grammar says of them."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ends: see the fields of the same names of Delta."""

    finish: Finish
    reason: str | int | None = None
    error: str | None = None
    code: str | None = None


class Kept(NamedTuple):
    """What of a step's tokens counts.

    tokens  up to and with the one that ended the sequence, if one did
    text    newly final text
    """

    tokens: tuple[int, ...]
    text: str
    ending: Ending | None = None


def keep(sequence: Sequence, tokens: Collection[int], eos_ids: Collection[int]) -> Kept:
    """Push decided tokens through the stop conditions and the text stream, one by one.

    An end-of-text id is no `reason`; any other stop is, but before min_tokens a token is text.
    """
    stopping, text, told = sequence.request.stopping, "", sequence.reported
    kept: list[int] = []
    room, early = stopping.max_tokens - told, sequence.sampling.min_tokens - told
    ending = Ending(Finish.LENGTH) if room <= 0 else None
    for token in tokens:
        if ending is not None:
            break
        kept.append(token)
        is_stop = token in stopping.stop_tokens and (len(kept) > early or token in eos_ids)
        if not is_stop or stopping.include_stop:
            piece = sequence.stream.push(token)
            text += piece.text
            if piece.stopped is not None:
                return _kept(sequence, kept, text, Ending(Finish.STOP, piece.stopped))
        if is_stop:
            ending = Ending(Finish.STOP, None if token in eos_ids else token)
        elif len(kept) == room:
            ending = Ending(Finish.LENGTH)
    if ending is not None:
        text += sequence.stream.finish()
    return _kept(sequence, kept, text, ending)


def _kept(sequence: Sequence, kept: list[int], text: str, ending: Ending | None) -> Kept:
    sequence.reported += len(kept)
    return Kept(tuple(kept), text, ending)


def parted(
    rows: tuple[Sequence, ...], outcome: Outcome, news: list[News]
) -> tuple[list[News], list[News]]:
    """The rows that end whatever their text says, or are decided again, and need not run on; and
    the others.
    """
    parts: tuple[list[News], list[News]] = [], []
    for row, committed in news:
        stops, tokens = rows[row].request.stopping.stop_tokens, outcome.output_tokens[row]
        runs_on = rows[row].remaining > 0 and not any(token in stops for token in tokens)
        runs_on = runs_on and (committed is None or not committed.ends)
        parts[runs_on].append((row, committed))
    return parts


def ended(sequence: Sequence, kept: Kept, ending: Ending) -> Kept:
    """The same, but the sequence ends here."""
    return Kept(kept.tokens, kept.text + sequence.stream.finish(), ending)


def delta(sequence: Sequence, kept: Kept, logprobs: tuple[TokenLogprobs, ...]) -> Delta | None:
    """News of a step, or None while there is none to tell.

    Tokens whose text is held back (half a character, the beginning of a stop string) wait
    with their log-probabilities until text is released.
    """
    sequence.unsent += kept.tokens
    sequence.unsent_logprobs += logprobs[: len(kept.tokens)]
    ending = kept.ending
    if not kept.text and ending is None:
        return None
    first, sequence.news_sent = not sequence.news_sent, True
    tokens, reports = tuple(sequence.unsent), tuple(sequence.unsent_logprobs)
    trace = tuple(sequence.unsent_trace)
    for unsent in (sequence.unsent, sequence.unsent_logprobs, sequence.unsent_trace):
        unsent.clear()
    return Delta(
        request=sequence.request.id,
        index=sequence.index,
        text=kept.text,
        tokens=tokens,
        logprobs=reports,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if first else (),
        finish=ending.finish if ending else None,
        stop_reason=ending.reason if ending else None,
        stats=sequence.tally.stats() if ending else None,
        cached_tokens=(sequence.cached_tokens or 0) if first else 0,
        error=ending.error if ending else None,
        trace=trace,
        code=ending.code if ending else None,
    )
