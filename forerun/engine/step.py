"""One step of speculative decoding: the page to read first.

draft    propose a small tree of continuations for each sequence, and select what pays
verify   let the target score every node of every tree in one forward pass
accept   choose one root-to-node path per tree, plus one token of the target's own, and make its
         keys and values permanent

So every planned sequence advances by at least one token. The step has two halves because a device
may run between them, with the host free for something else: `begin` returns once the forward
pass has been handed over, `finish` waits for it first (see engine/overlap.py).
"""

from dataclasses import dataclass, replace
from operator import add, mul
from time import perf_counter

from forerun.control.report import STAGES, StepReport
from forerun.engine.parts import Parts
from forerun.engine.scheduler import Schedule
from forerun.engine.sequence import Sequence
from forerun.interface.plan import Outcome, Plan, Round
from forerun.speculative.tree import Draft, batch


class StageTimer:
    """Measures the time of the stages of one step, in milliseconds; speculation uses no other
    clock.

    ms        by the names of STAGES
    known_ms  from the end of the step before it until its outcome was known
    """

    def __init__(self) -> None:
        self.ms = dict.fromkeys(STAGES, 0.0)
        self._last = perf_counter()
        self.known_ms = 0.0

    def resume(self) -> None:
        """Begin a stage now; the time since the last lap belongs to no stage."""
        self._last = perf_counter()

    def lap(self, stage: str) -> None:
        """End the stage that began with the last lap or `resume`."""
        now = perf_counter()
        self.ms[stage] += 1000.0 * (now - self._last)
        self._last = now


@dataclass(frozen=True)
class Step:
    """A step that has begun.

    round     what the executor runs, and its results
    proposed  the host's proposals, a draft per row, before the selection; () = none
    carried   whether it began before the previous step was finished
    """

    schedule: Schedule
    round: Round
    timer: StageTimer
    proposed: list[Draft]
    carried: bool = False

    @property
    def rows(self) -> tuple[Sequence, ...]:
        """The sequences of the step, in row order."""
        return self.schedule.rows


def begin(schedule: Schedule, parts: Parts) -> Step:
    """Draft, and start the verification. Returns the step, which a device may still be running.
    Raises what the executor raises.
    """
    timer, executor, masks = StageTimer(), parts.executor, None
    proposed, select = propose(schedule.plan, parts), schedule.decision.select
    trees = batch(schedule.plan.known, select(proposed) if select and proposed else proposed)
    plan = with_on_device_draft(schedule.plan, parts)
    timer.lap("draft")
    if plan.some_constrained and executor.capabilities.needs_masks_before_forward:
        masks = parts.grammars.masks(plan.slots, trees)
        timer.lap("mask")
    round = executor.begin(plan, trees, masks)
    timer.lap("verify")
    return Step(schedule, round, timer, proposed)


def with_on_device_draft(plan: Plan, parts: Parts) -> Plan:
    """Return the plan with the drafter's request to an executor that can draft
    (Plan.on_device_draft).
    """
    draft = parts.drafter.on_device_draft(plan) if parts.executor.capabilities.drafts else None
    return plan if draft is None else replace(plan, on_device_draft=draft)


def propose(plan: Plan, parts: Parts) -> list[Draft]:
    """Return the proposals of drafter and grammars, one draft per row; empty if no row may
    draft.
    """
    if not any(plan.max_nodes.tolist()):
        return []
    drafts = parts.drafter.propose(plan)
    if plan.some_constrained:
        drafts = parts.grammars.filter_and_extend_drafts(
            plan.slots, drafts, plan.max_nodes, plan.max_depth
        )
    return drafts


def finish(step: Step, parts: Parts) -> Outcome:
    """Wait for the device, accept, and append the emitted tokens to the sequences. Returns the
    outcome. Raises what the executor raises.
    """
    round, timer, masks = step.round, step.timer, None
    timer.resume()
    if round.plan.some_constrained and not parts.executor.capabilities.needs_masks_before_forward:
        masks = parts.grammars.masks(round.plan.slots, round.trees)
        timer.lap("mask")
    outcome = parts.executor.finish(round, masks)
    for sequence, tokens in zip(step.rows, outcome.output_tokens, strict=True):
        sequence.append(tokens)
    timer.lap("accept")
    plan, trees = round.plan, round.trees  # Complete from here on.
    parts.drafter.observe(plan, trees, outcome)
    timer.lap("draft")
    return outcome


def step_report(plan: Plan, outcome: Outcome, stages: dict[str, float], total: float) -> StepReport:
    """Return the report of a step.

    stages  milliseconds by the names of STAGES
    total   milliseconds of the whole step
    """
    draft_tokens, known = outcome.n_draft_tokens.tolist(), plan.known_counts
    nodes = list(map(add, known, draft_tokens))
    return StepReport(
        rows=plan.rows,
        tokens=outcome.output_tokens,
        draft_tokens=draft_tokens,
        allowed=plan.max_nodes.tolist(),
        nodes=sum(nodes),
        cached=sum(map(mul, nodes, plan.kv_len.tolist())),
        prompt_tokens=sum(known) - known.count(1),
        constrained=plan.some_constrained,
        ms=stages | {"host": max(total - sum(stages.values()), 0.0)},
        used_draft_model=plan.model_depth is None or any(plan.model_depth.tolist()),
    )
