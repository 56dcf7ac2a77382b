"""Uses the built-in model as the draft of a much larger one that comes with none.

Only AUTO chooses it, on the compiled core, if it is on this machine already and fits into memory
without reducing the cached tokens. The policy decides as usual whether and how deep it drafts.
"""

import logging
from dataclasses import replace

from forerun.build.draft_file import open_standalone
from forerun.build.drafting import AUTO, DraftParts, with_draft
from forerun.build.executor_entry import ExecutorEntry
from forerun.build.memory import Needs, plan_memory
from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.errors import MemoryPlanError, ModelError
from forerun.hub.catalog import BUILT_IN, Model, is_here
from forerun.options.config import EngineConfig

log = logging.getLogger("forerun.build")

SMALL = "smollm2-135m"
SMALL_BYTES = BUILT_IN[SMALL].size
RATIO = 16
"""Least size of the target, in multiples of the draft's bytes. (Two cores of an EPYC, AVX-512,
first turns of MT-bench at T=0, n-grams with it and alone, over plain decoding: Qwen2.5 Coder 1.5B
in Q4_K_M, 11 times as large, 1.20 and 1.33 (beside load); in Q8_0, 19 times, 1.50 and 1.50, at .8
1.33 and 1.26; with the products of its steps run four times, in place of 45 times, 1.39 and 1.23.)
"""


def wants_small(config: EngineConfig, weights: int) -> bool:
    """Return whether the built-in model would draft for a target with `weights` bytes of weights,
    if it is on this machine and no draft is named.
    """
    undecided = config.speculative_algorithm == AUTO and config.policy != "fixed"
    here = config.executor == "cpu" and config.tp_size == 1
    return undecided and here and weights >= RATIO * SMALL_BYTES


def missing(requested: EngineConfig, resolved: EngineConfig, weights: int) -> str:
    """Return a note, for the end of the start's sentence, that the built-in model would draft if it
    were on this machine; "" if it is, or would not.

    requested     the configuration before it was resolved
    resolved  the same afterwards
    weights   bytes of the target's
    """
    unnamed = requested.speculative_draft_model_path is None and not resolved.algorithm.model
    decided = replace(resolved, speculative_algorithm=requested.speculative_algorithm)
    if not unnamed or is_here(SMALL) or not wants_small(decided, weights):
        return ""
    return f"; after `forerun pull {SMALL}` that model drafts, too"


def with_small(
    config: EngineConfig, target: Model, parts: DraftParts, needs: Needs, entry: ExecutorEntry
) -> DraftParts:
    """Return the parts with the built-in model as their draft model; unchanged if it is not wanted,
    not on this machine, shares no token with the target or would reduce the cached tokens. Opens
    its file; loads nothing.

    needs  of the target alone
    """
    if parts.model is not None or not wants_small(config, needs.weights) or not is_here(SMALL):
        return parts
    try:
        draft = open_standalone(SMALL, None, target.tokenizer, target.architecture.vocab)
    except ModelError as error:
        log.warning("%s drafts nothing: %s", SMALL, error)
        return parts
    if not fits(config, draft, needs, entry, entry.free_memory(config)):
        log.info("%s drafts nothing: memory is short", SMALL)
        return parts
    return replace(parts, model=draft)


def fits(
    config: EngineConfig, draft: StandaloneDraft, needs: Needs, entry: ExecutorEntry, free: int
) -> bool:
    """Return whether as many tokens can be cached with the draft as without it. free: usable
    bytes.
    """
    with_it = with_draft(needs, draft, entry.draft_item(config), config.max_sequences)
    try:
        plans = [plan_memory(config, each, free) for each in (needs, with_it)]
    except MemoryPlanError:
        return False
    return plans[0].limits == plans[1].limits
