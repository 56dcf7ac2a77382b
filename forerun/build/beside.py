"""Finds Gemma 4's assistant (drafts/assistant.py): named as a draft, or beside the model."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

from forerun.drafts.assistant import holds_assistant, open_assistant
from forerun.errors import ConfigError, ModelError
from forerun.hub import huggingface
from forerun.hub.reference import hub_reference
from forerun.hub.well_known import known_assistant
from forerun.networks.arch import Architecture
from forerun.options.config import EngineConfig

ALGORITHM = "FROZEN_KV_MTP"
MEANS_IT = ("AUTO", "EAGLE", "NEXTN", "STANDALONE", ALGORITHM)
"""Algorithms that mean an assistant if the draft is one: what users of other servers write."""
_NUMBERS = re.compile(r"[-._](ud-)?(i?q\d\w*|f16|bf16|f32|mxfp4\w*)$")
"""The end of a GGUF file's name that says how its numbers are stored."""


def with_assistant(
    config: EngineConfig, layered: bool = False, target: Architecture | None = None
) -> EngineConfig:
    """Return the configuration with the assistant that it names, or that lies beside its model if
    it names no draft and wants one, or AUTO chooses; else as it is.

    layered  the model has prediction layers of its own, which AUTO takes
    target   AUTO leaves out, with a warning, an assistant that does not open for it: a draft that
             was not named may not cost the ones that would have been taken. None = not opened

    Raises ConfigError for an assistant under another algorithm.
    """
    method, named = config.algorithm, config.speculative_draft_model_path
    if not config.speculates or config.toy:
        return config
    if named is not None:
        path = Path(named)
        return _chosen(config, path) if holds_assistant(path) else config
    wanted = method.kind == "assistant" or (method.name == "AUTO" and not layered and _runs(config))
    found = assistant_beside(config.model) if wanted else None
    if found is None or (method.name == "AUTO" and not _opens(found, target)):
        return config
    return _chosen(config, found)


def check_meant(config: EngineConfig, path: Path) -> None:
    """Raise ConfigError if the algorithm means another kind of draft than the assistant there."""
    if config.algorithm.name not in MEANS_IT:
        raise ConfigError(
            f"speculative-algorithm is {config.algorithm.name}, but {path} holds an assistant; use "
            f"{ALGORITHM}."
        )


def _opens(path: Path, target: Architecture | None) -> bool:
    try:
        if target is not None:
            open_assistant(path, target)
    except ModelError as error:
        warnings.warn(f"the assistant beside the model is left out: {error}", stacklevel=4)
        return False
    return True


def _chosen(config: EngineConfig, path: Path) -> EngineConfig:
    check_meant(config, path)
    return replace(config, speculative_algorithm=ALGORITHM, speculative_draft_model_path=str(path))


def _runs(config: EngineConfig) -> bool:
    """Return whether the chosen executor runs assistants."""
    eager = config.device == "cpu" or config.disable_cuda_graph
    return config.executor == "cpu" or (
        config.executor == "torch" and eager and config.tp_size == 1
    )


def assistant_beside(reference: str) -> Path | None:
    """Return the assistant beside a model: beside the folder NAME the folder NAME-assistant; beside
    a file also NAME-assistant*.gguf; for a hub id the one published for that model, if it is on
    this machine. None if there is none. Contacts no host.
    """
    try:
        path = Path(reference).expanduser()
        here = path.exists()
    except (OSError, RuntimeError, ValueError):
        return None
    if not here:
        known = known_assistant(reference) if hub_reference(reference) is not None else None
        folder = huggingface.here(known) if known is not None else None
        return folder if folder is not None and holds_assistant(folder) else None
    # A link's own name says which model it is; "." and ".." have none.
    path = path.resolve() if path.name in ("", "..") else path.absolute()
    name = _NUMBERS.sub("", path.stem.lower()) if path.is_file() else path.name.lower()
    alike = [each for each in _siblings(path) if _named_for(each, name)]
    return next((each for each in alike if holds_assistant(each)), None)


def _siblings(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.parent.iterdir() if each != path)
    except OSError:
        return []


def _named_for(path: Path, name: str) -> bool:
    """Return whether a folder or file is named as the assistant of the model `name`, which is in
    small letters.
    """
    own = path.name.lower()
    if path.suffix == ".gguf":
        own = _NUMBERS.sub("", own.removesuffix(".gguf"))
    return own == f"{name}-assistant"
