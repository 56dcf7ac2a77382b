"""One step of speculative decoding: the page to read first.

draft    propose a small tree of continuations for each sequence, and keep what pays
verify   let the target score every node of every tree in one forward pass
accept   keep one root-to-node path per tree, plus one token of the target's own
commit   make the kept keys and values permanent, forget the rest

So every planned sequence advances by at least one token. The step has two halves because a device
may be at work between them, with the host free for something else (see engine/overlap.py).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from forerun.control.policy import Policy, off
from forerun.engine.sequence import Sequence
from forerun.engine.timing import StageTimer
from forerun.interface.drafter import Drafter
from forerun.interface.executor import Executor, MaskingExecutor, Scores
from forerun.interface.grammars import Committed, Grammars
from forerun.interface.plan import Outcome, Plan
from forerun.speculative.tree import NO_DRAFT, Draft, TreeBatch, batch
from forerun.text.tokenizer import Tokenizer

log = logging.getLogger("forerun.engine")

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Running:
    """A step that has begun, and of which the host knows the plan.

    rows   its sequences, in row order
    trees  None: of what was a carried step (engine/overlap.py), only the device knows them
    timer  of its stages
    """

    rows: tuple[Sequence, ...]
    plan: Plan
    trees: TreeBatch | None
    scores: Scores
    timer: StageTimer


@dataclass(frozen=True, slots=True)
class StepOver:
    """A step whose outcome is known: its sequences in row order, what it ran, milliseconds."""

    rows: tuple[Sequence, ...]
    plan: Plan
    trees: TreeBatch
    outcome: Outcome
    ms: float


Decided = tuple[int, Committed | None]
"""A row whose tokens are permanent, their news not told, and what its grammar says of them."""


@dataclass(slots=True)
class Parts:
    """What an engine is put together from.

    fault  why nothing is drafted although it should be, in the words of `off`; None = all is well
    """

    executor: Executor
    drafter: Drafter
    policy: Policy
    tokenizer: Tokenizer
    grammars: Grammars
    fault: str | None = None

    def ask_drafter(self, question: Callable[[Drafter], Answer], otherwise: Answer) -> Answer:
        """The drafter's answer, until it raises for the first time: that ends speculation, but no
        request. From then on it is not asked again, since what it knows of the sequences may be
        half written; the answer is `otherwise`.
        """
        if self.fault is not None:
            return otherwise
        try:
            return question(self.drafter)
        except Exception as error:
            name, what = self.drafter.traits.name, f"{type(error).__name__}: {error}"
            self.fault = off(f"the drafter {name} failed with {what}")
            log.exception("%s", self.fault)
            self.policy.disable(self.fault)
            return otherwise


def begin(plan: Plan, parts: Parts, timer: StageTimer) -> tuple[TreeBatch, Scores]:
    """Draft and verify. A device that works by itself may still be at it afterwards."""
    timer.resume()
    trees = batch(plan.known, draft(plan, parts))
    next_draft = parts.ask_drafter(lambda drafter: drafter.draft_request(plan), None)
    timer.lap("draft")
    if not plan.some_constrained or not isinstance(parts.executor, MaskingExecutor):
        scores = parts.executor.verify(plan, trees, next_draft)
    else:
        masks = parts.grammars.masks(plan.slots, trees)
        timer.lap("mask")
        scores = parts.executor.verify_masked(plan, trees, masks, next_draft)
    timer.lap("verify")
    return trees, scores


def draft(plan: Plan, parts: Parts) -> list[Draft]:
    """What the drafter proposes and the grammars know, as far as the policy finds it worth it."""
    nothing = [NO_DRAFT] * plan.rows
    if not any(plan.max_nodes.tolist()):
        return nothing
    drafts = parts.ask_drafter(lambda drafter: drafter.propose(plan), nothing)
    if plan.some_constrained:
        drafts = parts.grammars.guide(plan.slots, drafts, plan.max_nodes, plan.max_depth)
    return parts.policy.select(plan, drafts)


def finish(
    plan: Plan, trees: TreeBatch, scores: Scores, parts: Parts, timer: StageTimer
) -> Outcome:
    """Accept and commit; waits for the device."""
    timer.resume()
    masks = None
    if plan.some_constrained and not isinstance(parts.executor, MaskingExecutor):
        masks = parts.grammars.masks(plan.slots, trees)
    timer.lap("mask")
    accepted = parts.executor.accept(plan, trees, scores, masks)
    timer.lap("accept")
    outcome = parts.executor.commit(plan, trees, scores, accepted)
    timer.lap("commit")
    parts.ask_drafter(lambda drafter: drafter.observe(plan, trees, outcome), None)
    timer.lap("draft")
    return outcome
