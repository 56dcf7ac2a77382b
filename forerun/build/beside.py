"""Finds a draft next to the model's files, or one that is named: Gemma 4's assistant
(drafts/assistant.py), or prediction layers in a GGUF file of their own (drafts/gguf_prediction.py).
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.gguf.header import is_gguf
from forerun.drafts.assistant import holds_assistant, open_assistant
from forerun.drafts.gguf_prediction import holds_layers_alone, open_layers_alone
from forerun.errors import ConfigError, ModelError
from forerun.hub import huggingface
from forerun.hub.known_drafts import known_draft
from forerun.hub.reference import hub_reference, plain_name
from forerun.options.algorithms import algorithm
from forerun.options.config import EngineConfig

ALGORITHM = "FROZEN_KV_MTP"
MEANS_IT = ("AUTO", "EAGLE", "NEXTN", "NEXTN+NGRAM", "STANDALONE", "STANDALONE+NGRAM", ALGORITHM)
"""Algorithms that select an assistant if the draft is one: the names that users of other servers
write.
"""


def with_beside(
    config: EngineConfig, layered: bool = False, target: Checkpoint | None = None
) -> EngineConfig:
    """Return the configuration with the assistant or the file of prediction layers that it names.
    If it names no draft, with the one next to its model, if the algorithm needs one or AUTO chooses
    it; else unchanged.

    layered  the model has prediction layers of its own, which AUTO prefers
    target   with it, AUTO skips a draft that cannot be opened for this target, with a warning, so
             that other drafts are still used. None = the target is not opened

    Raises ConfigError for an assistant under another algorithm.
    """
    method, named = config.algorithm, config.speculative_draft_model_path
    if not config.speculates:
        return config
    auto = method.name == "AUTO"
    if named is not None:
        path = Path(named)
        if holds_assistant(path):
            return _chosen(config, path)
        alone = auto and holds_layers_alone(path)
        return replace(config, speculative_algorithm=meant(config, "NEXTN")) if alone else config
    auto = auto and not layered
    if method.kind == "assistant" or (auto and _runs(config)):
        found = assistant_beside(config.model)
        if found is not None and (not auto or _opens(config, found, target)):
            return _chosen(config, found)
    unlayered = method.kind == "layers" and not layered
    if unlayered or auto:
        # A file of the hub is among those downloaded with it.
        here = config.model if target is None or _path(config.model) else str(target.path)
        found = _beside(here, "mtp-{}", is_gguf)
        if found is not None and (not auto or _opens(config, found, target)):
            beside = replace(config, speculative_draft_model_path=str(found))
            return replace(beside, speculative_algorithm=meant(config, "NEXTN"))
    return config


def meant(config: EngineConfig, name: str) -> str:
    """Return the algorithm `name` for a kind of draft, with n-grams if the configured one has them:
    AUTO has them on a CPU only, because n-grams draft outside the rounds that a GPU captures.
    """
    method = config.algorithm
    lookup = method.lookup and (method.name != "AUTO" or config.device == "cpu")
    return f"{name}+NGRAM" if lookup else name


def check_meant(config: EngineConfig, path: Path) -> None:
    """Raise ConfigError if the algorithm is for another kind of draft than the assistant at
    `path`.
    """
    if config.algorithm.name not in MEANS_IT and config.algorithm.kind != "assistant":
        raise ConfigError(
            f"speculative-algorithm is {config.algorithm.name}, but {path} holds an assistant; use "
            f"{ALGORITHM}."
        )


def runs_layers(config: EngineConfig, count: int) -> bool:
    """Return whether the chosen executor drafts with the `count` prediction layers that the
    configured depth uses. (The jax executor supports one, which drafts all depths.)
    """
    count = min(count, config.speculative_num_steps or count)
    return config.executor in ("cpu", "torch") or (config.executor == "jax" and count == 1)


def _opens(config: EngineConfig, path: Path, target: Checkpoint | None) -> bool:
    """Return whether AUTO can use the draft next to a model; warns if it cannot be opened."""
    if target is None:
        return True
    try:
        if holds_assistant(path):
            open_assistant(path, target.architecture)
        else:
            return runs_layers(config, open_layers_alone(path, target).count)
    except ModelError as error:
        warnings.warn(f"the draft beside the model is left out: {error}", stacklevel=4)
        return False
    return True


def _chosen(config: EngineConfig, path: Path) -> EngineConfig:
    check_meant(config, path)
    chosen = replace(config, speculative_draft_model_path=str(path))
    return replace(chosen, speculative_algorithm=meant(config, ALGORITHM))


def _runs(config: EngineConfig) -> bool:
    """Return whether the chosen executor runs assistants."""
    eager = config.device == "cpu" or config.disable_cuda_graph
    return config.executor in ("cpu", "jax") or (
        config.executor == "torch" and eager and config.tp_size == 1
    )


def assistant_beside(reference: str) -> Path | None:
    """Return the assistant next to a model: for a folder NAME the folder NAME-assistant; for a file
    also NAME-assistant*.gguf; for a hub id the one published for that model, if it is on this
    machine. None if there is none. Uses no network.
    """
    found = _beside(reference, "{}-assistant", holds_assistant)
    if found is not None or hub_reference(reference) is None or _path(reference) is not None:
        return found
    known = known_draft(reference, algorithm(ALGORITHM))
    if known is None:
        return None
    folder = huggingface.here(known)
    return folder if folder is not None and holds_assistant(folder) else None


def _path(reference: str) -> Path | None:
    """Return a reference as a path, None if nothing exists there."""
    try:
        path = Path(reference).expanduser()
        here = path.exists()
    except (OSError, RuntimeError, ValueError):
        return None
    if not here:
        return None
    # A link's own name names the model; "." and ".." have none.
    return path.resolve() if path.name in ("", "..") else path.absolute()


def _beside(reference: str, form: str, holds: Callable[[Path], bool]) -> Path | None:
    """Return the path next to a model whose name is the model's in `form`, without number formats,
    and for which `holds` is true; None if there is none.
    """
    path = _path(reference)
    if path is None:
        return None
    name = form.format(_named(path))
    return next((each for each in _siblings(path) if _named(each) == name and holds(each)), None)


def _siblings(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.parent.iterdir() if each != path)
    except OSError:
        return []


def _named(path: Path) -> str:
    """Return the name of a folder or file in lower case, without its number format."""
    return plain_name(path.name) if path.suffix == ".gguf" else path.name.lower()
