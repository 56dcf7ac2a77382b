"""Which kind of network a draft's folder holds, and whether that is the kind that was asked for."""

from pathlib import Path

from forerun.config import EngineConfig
from forerun.errors import ConfigError
from forerun.models.arch import Architecture
from forerun.models.block_folder import BlockFile, holds_block, open_block
from forerun.models.draft_folder import DraftFile, open_draft

AnyDraftFile = DraftFile | BlockFile


def open_draft_file(config: EngineConfig, folder: Path, arch: Architecture) -> AnyDraftFile:
    """The network in a draft's folder, of the kind that the configuration wants.

    Raises ModelError where it cannot be used, ConfigError where it is of another kind.
    """
    method, held = config.algorithm, holds_block(folder)
    if held and not (method.block or method.name == "AUTO"):
        raise ConfigError(
            f"speculative-algorithm is {method.name}, but {folder} holds a block drafter; use "
            "DFLASH."
        )
    if method.block and not held:
        raise ConfigError(
            f"speculative-algorithm is {method.name}, but {folder} holds no block drafter; use "
            "EAGLE for a draft head."
        )
    if held:
        if config.draft_reading is not None:
            raise ConfigError(
                f"draft-reading is {config.draft_reading}, but {folder} holds a block drafter, "
                "whose configuration leaves nothing open; leave it out."
            )
        return open_block(folder, arch)
    head = open_draft(folder, arch, config.draft_reading)
    if method.name == "EAGLE3" and head.head.algorithm != "eagle3":
        raise ConfigError(
            f"speculative-algorithm is EAGLE3, but the head in {folder} is of the first or "
            "second kind; use EAGLE."
        )
    return head
