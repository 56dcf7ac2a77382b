"""What a step was and what it took. The engine makes one per step; policy and metrics read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, mul

from forerun.interface.plan import Outcome, Plan
from forerun.speculative.tree import Draft

STAGES = ("draft", "verify", "mask", "accept")
"""Stages whose time is measured; what is left of a step is the host's."""


@dataclass(slots=True)
class StepReport:
    """One step that is over, B rows.

    slots         of the B rows
    tokens        B lists: what each row emitted; empty where it did not sample
    draft_tokens  B: draft tokens that were verified
    allowed       B: draft tokens that the plan allowed
    nodes         known tokens and draft tokens of all rows
    cached        cached tokens that the nodes see, summed over the nodes
    prefill       whether some row ran more than one known token
    carried       begun before the one before it was looked at: the device drafted by itself
    constrained   a grammar has a say: such a step is never carried, draft tokens or not
    ms            milliseconds by stage, the names of STAGES and "host"
    reason        of the decision
    modelled      whether a draft model was asked for draft tokens
    proposed      B drafts of drafter and grammars, before any token was left out; () = the device's
    """

    slots: list[int]
    tokens: list[list[int]]
    draft_tokens: list[int]
    allowed: list[int]
    nodes: int
    cached: int
    prefill: bool
    constrained: bool
    ms: dict[str, float]
    carried: bool = False
    reason: str = ""
    modelled: bool = True
    proposed: Sequence[Draft] = ()

    @property
    def rows(self) -> int:
        """B."""
        return len(self.slots)

    @property
    def total_ms(self) -> float:
        """The whole step, host included."""
        return sum(self.ms.values())


def step_report(plan: Plan, outcome: Outcome, stages: dict[str, float], total: float) -> StepReport:
    """What plan and outcome say of a step; milliseconds of its stages, and of the whole."""
    draft_tokens, slots = outcome.n_draft_tokens.tolist(), plan.slots.tolist()
    known = plan.known_counts
    nodes = list(map(add, known, draft_tokens))
    return StepReport(
        slots=slots,
        tokens=outcome.output_tokens,
        draft_tokens=draft_tokens,
        allowed=plan.max_nodes.tolist(),
        nodes=sum(nodes),
        cached=sum(map(mul, nodes, plan.kv_len.tolist())),
        prefill=max(known) > 1,
        constrained=plan.some_constrained,
        ms=stages | {"host": max(total - sum(stages.values()), 0.0)},
        modelled=plan.model_depth is None or any(plan.model_depth.tolist()),
    )
