"""Which drafter a configuration asks for, and what a draft head adds to the memory plan."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from forerun.catalog import shipped_draft
from forerun.config import EngineConfig
from forerun.drafters.combined import CombinedDrafter
from forerun.drafters.guarded import off
from forerun.drafters.heads import HeadDrafter
from forerun.drafters.selected import SelectedDrafter
from forerun.engine.drafter import Drafter
from forerun.engine.executor import ExecutorLimits
from forerun.engine.heads import HeadDevice
from forerun.errors import ConfigError, MemoryPlanError, ModelError
from forerun.memory import Needs
from forerun.models.arch import Architecture
from forerun.models.draft_folder import DraftFile, open_draft
from forerun.spec.costs import StepCosts
from forerun.spec.policy import AdaptivePolicy, FixedPolicy, Policy

LOOKUP_BAR = 0.4
"""A lookup that gives its first guess this chance is asked instead of the draft head. (Replayed on
answers of SmolLM2-135M: 1.75, 1.80, 1.77, 1.76 and 1.67 tokens a step at .3, .4, .5, .6 and .7.)"""

Result = TypeVar("Result")


def with_shipped(config: EngineConfig) -> EngineConfig:
    """The configuration with the draft head that comes with its model, where it asks for a head
    and names none. Raises ConfigError where there is none.

    "auto" does not ask: lookup alone is faster on the machines measured (docs/log.md).
    """
    if config.draft is not None or config.speculation not in ("head", "both"):
        return config
    shipped = shipped_draft(config.model)
    if shipped is None:
        raise ConfigError(
            f"speculation is {config.speculation}, but no draft is named and none comes with "
            f"{config.model}; add --draft FOLDER."
        )
    return replace(config, draft=str(shipped))


def chosen_speculation(config: EngineConfig, head: bool) -> str:
    """What drafts, "auto" decided: a draft that was named but cannot be used means nothing."""
    if head:
        return "both" if config.speculation == "auto" else config.speculation
    if config.draft is not None and config.speculation in ("auto", "head", "both"):
        return "off"
    return "ngram" if config.speculation == "auto" else config.speculation


def open_chosen(config: EngineConfig, arch: Architecture) -> DraftFile | None:
    """The draft head that the configuration names. Warns of its traps.

    Raises ModelError where it cannot be used, ConfigError where it is not wanted.
    """
    if config.draft is None or config.speculation == "off":
        return None
    if config.speculation == "ngram":
        raise ConfigError("speculation is ngram, but a draft is named; leave one of the two out.")
    draft = open_draft(Path(config.draft), arch, config.draft_reading)
    for warning in draft.warnings:
        warnings.warn(f"draft {config.draft}: {warning}", stacklevel=2)
    return draft


def excused(config: EngineConfig, action: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """What `action` makes of a draft, or why speculation is off, where the configuration says
    to go on without a draft that cannot be used. Raises what `action` raises where it does not.
    """
    try:
        return action(), None
    except (ModelError, MemoryPlanError) as error:
        if config.draft_on_error != "disable":
            raise
        fault = off(str(error))
    warnings.warn(fault, stacklevel=2)
    return None, fault


def with_draft(needs: Needs, draft: DraftFile, item: int | None) -> Needs:
    """The needs with a draft head's: weights, keys and values of its one layer, logits.

    item  bytes of a number on the torch executor; None on the CPU core, which packs weights to
          8 bits and keeps keys and values in 16
    """
    head = draft.head
    weights = head.parameters * 34 // 32 if item is None else head.parameters * item
    return replace(
        needs,
        weights=needs.weights + weights,
        per_token=needs.per_token + 2 * head.kv_heads * head.head_size * (item or 2),
        per_node=needs.per_node + 4 * (head.vocab // 4),
    )


def head_drafting(
    config: EngineConfig,
    limits: ExecutorLimits,
    costs: StepCosts | None,
    head: tuple[DraftFile, HeadDevice],
    lookup: Drafter,
) -> tuple[Drafter, Policy]:
    """A draft head and its budget. What drafting costs is part of the decision beforehand.

    costs   of steps, the head's included; None = not measured
    lookup  what guesses beside the head, where the configuration wants both
    """
    draft, device = head
    depth = min(config.draft_depth, config.draft_nodes)
    drafter: Drafter = HeadDrafter(device, draft.target_ids, limits, config.draft_width, depth)
    if config.speculation == "both":
        drafter = CombinedDrafter(lookup, drafter, LOOKUP_BAR)
    if costs is not None and config.policy == "adaptive":
        policy = AdaptivePolicy(costs, config.draft_nodes, depth)
        return SelectedDrafter(drafter, policy), policy
    return drafter, FixedPolicy(config.draft_nodes, depth)
