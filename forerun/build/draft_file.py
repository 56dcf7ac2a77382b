"""Checks that the network in a draft's folder is of the configured kind."""

from pathlib import Path

from forerun.errors import ConfigError
from forerun.models.block_folder import BlockFile, holds_block, open_block
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_folder import DraftFile, open_draft
from forerun.models.prediction_folder import holds_prediction, open_prediction
from forerun.models.prediction_layers import PredictionLayers
from forerun.options.config import EngineConfig

AnyDraftFile = DraftFile | BlockFile | PredictionLayers


def open_draft_file(config: EngineConfig, folder: Path, target: Checkpoint) -> AnyDraftFile:
    """The network in a draft's folder, of the kind that the configured algorithm wants; EAGLE takes
    prediction layers too, as in SGLang. Weights are mapped, not read.

    Raises ModelError if it cannot be used, ConfigError if it is of another kind.
    """
    method, held, arch = config.algorithm, holds_block(folder), target.architecture
    if holds_prediction(folder):
        if method.name not in ("NEXTN", "EAGLE", "AUTO"):
            raise ConfigError(
                f"speculative-algorithm is {method.name}, but {folder} holds prediction layers; "
                "use NEXTN."
            )
        return open_prediction(folder, target)
    if method.kind == "layers":
        raise ConfigError(
            f"speculative-algorithm is {method.name}, but {folder} holds no prediction layers; "
            "leave speculative-draft-model-path out where the target has layers of its own, or use "
            "EAGLE with a draft head."
        )
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
        return open_block(folder, arch)
    head = open_draft(folder, arch)
    if method.name == "EAGLE3" and head.head.algorithm != "eagle3":
        raise ConfigError(
            f"speculative-algorithm is EAGLE3, but the head in {folder} is an EAGLE-1 or EAGLE-2 "
            "head; use EAGLE."
        )
    return head
