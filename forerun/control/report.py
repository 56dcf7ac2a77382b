"""What a step was and what it took: made once per step (`step_report` of engine/step.py), read by
policy and metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.speculative.tree import Draft

STAGES = ("draft", "verify", "mask", "accept")
"""Stages whose time is measured; what is left of a step is the host's."""


@dataclass(slots=True)
class StepReport:
    """One step that is over, B rows.

    tokens        B lists: what each row emitted; empty where it did not sample
    draft_tokens  B: draft tokens that were verified
    allowed       B: draft tokens that the plan allowed
    nodes         known tokens and draft tokens of all rows
    cached        cached tokens that the nodes see, summed over the nodes
    prefill       whether some row ran more than one known token
    carried       begun before the one before it was looked at: the device drafted by itself
    constrained   a grammar has a say: such a step is never carried, draft tokens or not
    ms            milliseconds by stage, the names of STAGES and "host"; together the whole step
    reason        of the decision
    modelled      whether a draft model was asked for draft tokens
    proposed      B drafts of drafter and grammars, before any token was left out; () = the device's
    """

    rows: int
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
