"""Which draft head a configuration asks for, and what it adds to the memory plan."""

import warnings
from dataclasses import replace
from pathlib import Path

from forerun.config import EngineConfig
from forerun.errors import ConfigError, ModelError
from forerun.memory import Needs
from forerun.models.arch import Architecture
from forerun.models.draft_folder import DraftFile, open_draft


def open_chosen(config: EngineConfig, arch: Architecture) -> DraftFile | None:
    """The draft head that the configuration names. Warns of its traps.

    Raises ModelError where it cannot be used, unless the configuration says to go on without.
    """
    if config.draft is None or config.speculation == "off":
        return None
    if config.speculation == "ngram":
        raise ConfigError("speculation is ngram, but a draft is named; leave one of the two out.")
    try:
        if config.executor != "cpu":
            raise ModelError("draft heads run on the CPU core only yet, not on torch")
        draft = open_draft(Path(config.draft), arch)
    except ModelError as error:
        if config.draft_on_error != "disable":
            raise
        warnings.warn(f"speculation is off: {error}", stacklevel=2)
        return None
    for warning in draft.warnings:
        warnings.warn(f"draft {config.draft}: {warning}", stacklevel=2)
    return draft


def with_draft(needs: Needs, draft: DraftFile) -> Needs:
    """The needs with a draft head's: 8-bit weights, and keys and values of its one layer."""
    head = draft.head
    return replace(
        needs,
        weights=needs.weights + head.parameters * 34 // 32,
        per_token=needs.per_token + 4 * head.kv_heads * head.head_size,
    )
