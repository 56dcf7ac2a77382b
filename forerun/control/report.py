"""The record of a finished step and its times, for policy and metrics; made once per step
(`step_report` of engine/step.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.speculative.tree import Draft

STAGES = ("draft", "verify", "mask", "accept")
"""Stages whose time is measured; the rest of a step is the host's."""


@dataclass(slots=True)
class StepReport:
    """One finished step, B rows.

    tokens        B lists: what each row emitted; empty if it did not sample
    draft_tokens  B: draft tokens that were verified
    allowed       B: draft tokens that the plan allowed
    nodes         known tokens and draft tokens of all rows
    cached        cached tokens that the nodes see, summed over the nodes
    prompt_tokens  known tokens of rows that ran more than one
    carried       begun before the previous step's outcome was read: the device drafted by itself
    constrained   a row has a grammar: such a step is never carried, with draft tokens or without
    ms            milliseconds by stage, the names of STAGES and "host"; together the whole step
    reason        of the decision
    used_draft_model  whether a draft model proposed
    proposed      B drafts of drafter and grammars, before the selection; () = the device's
    """

    rows: int
    tokens: list[list[int]]
    draft_tokens: list[int]
    allowed: list[int]
    nodes: int
    cached: int
    prompt_tokens: int
    constrained: bool
    ms: dict[str, float]
    carried: bool = False
    reason: str = ""
    used_draft_model: bool = True
    proposed: Sequence[Draft] = ()
