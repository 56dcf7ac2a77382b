"""The output of one row of a step: the tokens that count, their text, and the sequence's end."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forerun.engine.pooling import PooledPrompt
from forerun.engine.request import GRAMMAR_LIMIT, Finish
from forerun.engine.sequence import Sequence
from forerun.engine.step import Step
from forerun.engine.trace import StepTrace, bounded, draft_row
from forerun.interface.grammars import Committed, Grammars
from forerun.interface.plan import Outcome, Reports
from forerun.speculative.tree import DraftSource, TreeBatch
from forerun.types import Ints, RequestId

log = logging.getLogger("forerun.engine")


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ends; the fields are those of the same names in Delta (`reason`:
    stop_reason).
    """

    finish: Finish
    reason: str | int | None = None
    error: str | None = None
    code: str | None = None
    embedding: bytes = b""


class RowOutput(NamedTuple):
    """The output of a step for one sequence.

    tokens  up to and including the one that ended the sequence, if one did
    text    newly final text
    """

    tokens: tuple[int, ...]
    text: str
    ending: Ending | None = None


class PendingRows(NamedTuple):
    """Rows of a step whose tokens are committed but not reported yet.

    rows       ascending
    committed  by row, the result of committing the tokens to the row's grammar
    """

    rows: list[int]
    committed: dict[int, Committed]


def advance_grammar(
    grammars: Grammars,
    sequence: Sequence,
    tokens: list[int],
    end: Callable[[RequestId, Ending], None],
) -> Committed | None:
    """Advance a sequence's grammar over decided tokens; None if it failed, which ends its request
    through `end`, or has no slot.
    """
    if sequence.slot is None:
        return None
    try:
        return grammars.commit(sequence.slot, tokens)
    except Exception as error:
        log.exception("request %s failed", sequence.request.id)
        end(sequence.request.id, failed(error))
        return None


def finish_by_grammar(sequence: Sequence, output: RowOutput, committed: Committed) -> RowOutput:
    """Return the output, with an ending if the grammar is complete or cannot be followed."""
    if output.ending is not None or not (committed.complete or committed.error):
        return output
    ending = Ending(Finish.STOP) if committed.complete else grammar_ended(sequence, committed)
    return RowOutput(output.tokens, output.text + sequence.stream.finish(), ending)


def held_text(sequence: Sequence) -> str:
    """Return the text that an ending sequence's stream holds back; "" if decoding it fails."""
    try:
        return sequence.stream.finish()
    except Exception:
        log.exception("request %s ends without its last text", sequence.request.id)
        return ""


def failed(error: Exception) -> Ending:
    """Return the ending of a sequence whose step or part failed with `error`."""
    text = f"The engine failed while it ran this request: {error or type(error).__name__}"
    return Ending(Finish.ERROR, error=text)


def pooled_ending(pooled: PooledPrompt) -> Ending:
    """Return the ending of a sequence whose prompt has run for an embedding."""
    vector = pooled.vector()
    if not np.isfinite(vector).all():
        return Ending(Finish.ERROR, error="The model's hidden states were not finite.")
    return Ending(Finish.STOP, embedding=vector.tobytes())


def grammar_ended(sequence: Sequence, committed: Committed) -> Ending:
    """Return the ending of a sequence whose grammar cannot be followed any further, with the
    matcher's message: a limit of the grammar was reached, or the matcher was lost.
    """
    text = (
        f"The answer ended after {sequence.reported} tokens: its grammar cannot be followed any "
        f"further. {committed.error.strip().rstrip('.')}. "
    )
    if committed.worker_lost:
        return Ending(Finish.ERROR, error=f"{text}Ask again.")
    text += "A simpler grammar, or one that leaves fewer ways to read the same text, gets further."
    return Ending(Finish.ERROR, error=text, code=GRAMMAR_LIMIT)


def step_trace(
    sequence: Sequence, output: RowOutput, step: Step, row: int, outcome: Outcome
) -> StepTrace:
    """Return the trace of the sequence's last counted step."""
    drafted = draft_row(step.round.trees, row, outcome.paths[row])
    nodes = bounded(drafted)
    return StepTrace(
        number=len(sequence.counts.accepted) - 1,
        position=sequence.reported - len(output.tokens),
        tokens=output.tokens,
        nodes=nodes,
        left_out=len(drafted.tokens) - len(nodes.tokens),
        allowed=int(step.round.plan.max_nodes[row]),
        reason=sequence.counts.reason,
        ms=step.timer.known_ms,
    )


def add_predicted(sequence: Sequence, trees: TreeBatch, row: int, path: Ints) -> None:
    """Count the draft tokens of one step that came from the request's prediction.

    path  int32[.] the accepted nodes of the row
    """
    if trees.drafts:
        sources, root = trees.drafts[row].sources(), trees.root(row)
        right = [sources[node - root - 1] for node in path.tolist()]
        counted = [each.count(DraftSource.PREDICTION) for each in (sources, right)]
        before = sequence.counts.predicted
        sequence.counts.predicted = before[0] + counted[0], before[1] + counted[1]


def append_prompt_logprobs(sequence: Sequence, entries: Reports) -> None:
    """Append log-probabilities of prompt tokens, of which the first follows position table.length.
    Skips those that a resumed sequence has already. Call it before the step is committed.
    """
    known = sequence.prompt_logprobs
    seen, room = len(known) - sequence.table.length, sequence.prompt_len - 1 - len(known)
    known += entries[seen : seen + max(room, 0)]
