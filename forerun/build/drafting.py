"""Which drafter a configuration asks for, and what a draft adds to the memory plan."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from forerun.build.memory import Needs
from forerun.config import EngineConfig
from forerun.control.adaptive import AdaptivePolicy
from forerun.control.cost_model import StepCosts
from forerun.control.policy import FixedPolicy, Lookahead, Policy
from forerun.drafters.combined import CombinedDrafter
from forerun.drafters.guarded import off
from forerun.drafters.model_drafter import ModelDrafter, TreeShape
from forerun.errors import ConfigError, MemoryPlanError, ModelError
from forerun.hub.catalog import shipped_draft
from forerun.interface.draft_model import DraftModel
from forerun.interface.drafter import Drafter
from forerun.interface.executor import ExecutorLimits
from forerun.models.arch import Architecture
from forerun.models.cache_layer import CacheLayer
from forerun.models.draft_folder import DraftFile, open_draft
from forerun.models.ngram_table import FILE as TABLE
from forerun.models.ngram_table import NgramTable, read_ngram_table

LOOKUP_BAR = 0.4
"""A lookup that gives its first draft token this chance is asked instead of the draft head.
(Replayed on answers of SmolLM2-135M: 1.75, 1.80, 1.77, 1.76 and 1.67 tokens a step at .3, .4, .5,
.6 and .7.)"""

NO_DRAFT = "none"
"""A --draft that stands for not even the one that comes with the model."""

Result = TypeVar("Result")


def with_shipped(config: EngineConfig) -> EngineConfig:
    """The configuration with the draft that comes with its model, where none is named and it
    wants one. Raises ConfigError where it wants a head and there is none.

    "auto" takes its n-gram table, not its head: a table costs no arithmetic, and on the machines
    measured a head's draft tokens were not as much better as they are dearer (docs/log.md).
    """
    if config.speculation == "off" or config.draft not in (None, NO_DRAFT):
        return config
    shipped = None if config.draft == NO_DRAFT else shipped_draft(config.model)
    if shipped is not None:
        wanted = "ngram" if config.speculation == "auto" else config.speculation
        return replace(config, draft=str(shipped), speculation=wanted)
    if config.speculation in ("head", "both"):
        raise ConfigError(
            f"speculation is {config.speculation}, but no draft is named and none comes with "
            f"{config.model}; add --draft FOLDER."
        )
    return replace(config, draft=None)


def chosen_speculation(config: EngineConfig, head: bool, fault: str | None) -> str:
    """What drafts, "auto" decided. fault: why a draft that was named cannot be used, which
    means that nothing drafts.
    """
    if fault is not None:
        return "off"
    if config.speculation == "auto":
        return "both" if head else "ngram"
    return config.speculation


@dataclass(frozen=True, slots=True)
class Parts:
    """What a draft's folder holds of what is wanted. Nothing: lookup in the text drafts alone."""

    head: DraftFile | None = None
    table: NgramTable | None = None


def open_drafts(config: EngineConfig, arch: Architecture) -> Parts:
    """The parts of the named draft that the configuration wants. Warns of a head's traps.

    Raises ModelError where the draft cannot be used.
    """
    if config.draft is None or config.speculation == "off":
        return Parts()
    folder, head, table = Path(config.draft), None, None
    if not config.draft or not folder.is_dir():
        raise ModelError(
            f"--draft {config.draft!r} is no folder; name the one that holds the draft"
        )
    tabled = (folder / TABLE).is_file()
    if tabled and config.speculation != "head":
        table = read_ngram_table(folder / TABLE, arch.vocab)
    if config.speculation == "ngram" and table is None:
        raise ModelError(f"{folder} holds no {TABLE}, which is what speculation ngram wants of it")
    alone = tabled and not (folder / "config.json").exists()
    if alone and config.speculation in ("head", "both"):
        raise ModelError(f"{folder} holds an n-gram table and no head; use --speculation ngram")
    if config.speculation != "ngram" and not alone:
        head = open_draft(folder, arch, config.draft_reading)
        for warning in head.warnings:
            warnings.warn(f"draft {config.draft}: {warning}", stacklevel=2)
    return Parts(head, table)


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


def with_draft(
    needs: Needs, parameters: int, cache: tuple[CacheLayer, ...], vocab: int, item: int | None
) -> Needs:
    """The needs with a draft model's: weights, keys and values of all its layers, logits.

    parameters  numbers of weights that run
    cache       what each layer keeps of a position, under the target's page ids
    vocab       Vd
    item        bytes of a number on the torch executor; None on the CPU core, which packs weights
                to 8 bits and keeps keys and values in 16
    """
    weights = parameters * 34 // 32 if item is None else parameters * item
    return replace(
        needs,
        weights=needs.weights + weights,
        per_token=needs.per_token + (item or 2) * sum(layer.numbers for layer in cache),
        per_node=needs.per_node + 4 * (vocab // 4),
    )


def model_drafter(
    config: EngineConfig,
    limits: ExecutorLimits,
    model: DraftModel,
    lookup: Drafter,
    mask: Callable[[int], bytes | None],
) -> Drafter:
    """A draft model, with lookup beside it where the configuration wants both; mask: see
    ModelDrafter.
    """
    shape = TreeShape(config.draft_width, min(config.draft_depth, config.draft_nodes))
    drafter = ModelDrafter(model, limits, shape, mask)
    return CombinedDrafter(lookup, drafter, LOOKUP_BAR) if config.speculation == "both" else drafter


def policy_for(
    config: EngineConfig, costs: StepCosts | None, drafter: Drafter, lookahead: Lookahead
) -> Policy:
    """Who decides how many draft tokens there are; costs None: not measured."""
    if config.speculation == "off":
        return FixedPolicy(0, 0)
    depth = min(config.draft_depth, config.draft_nodes, drafter.traits.max_depth)
    if costs is None or config.policy != "adaptive" or depth == 0:
        return FixedPolicy(config.draft_nodes if depth else 0, depth, lookahead)
    return AdaptivePolicy(costs, config.draft_nodes, depth, drafter.traits.free, lookahead)
