"""Several models of a command line: their names, sizes, and how each is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from forerun.errors import ConfigError
from forerun.hub import catalog, huggingface
from forerun.options.config import EngineConfig
from forerun.serve.models import Source
from forerun.serve.service import Start

OWN = ("speculative_draft_model_path", "speculative_token_map", "draft_reading", "chat_template",
       "revision")  # fmt: skip
"""Options that are of one model."""


def in_folder(folder: Path) -> list[str]:
    """References of all models in a folder: GGUF files, and folders with a config.json. Raises
    ConfigError where there is none.
    """
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir {folder} cannot be read: {error.strerror}.") from error
    found = [
        str(path)
        for path in inside
        if path.suffix == ".gguf" or (path.is_dir() and (path / "config.json").is_file())
    ]
    if not found:
        raise ConfigError(f"--models-dir {folder} holds no .gguf file and no model folder.")
    return found


def sources(
    references: Sequence[str], config: EngineConfig, source: Callable[[EngineConfig], Start]
) -> list[Source]:
    """What serves these models; `source` gives what loads one. Raises ModelError for a name that
    can be none, ConfigError where two have one name, or where an option is of one model.
    """
    plain = EngineConfig()
    for name in OWN:
        if getattr(config, name) != getattr(plain, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is of one model; serve that alone.")
    found: list[Source] = []
    for reference in dict.fromkeys(references):
        catalog.check_reference(reference)
        name = _name(reference)
        if any(one.name == name for one in found):
            raise ConfigError(f"two models are called {name!r}; give one of them another name.")
        others = tuple({reference, reference.rstrip("/").rpartition("/")[2]} - {name})
        load = source(replace(config, model=reference))
        found.append(Source(name, others, size_of(reference), load))
    return found


def _name(reference: str) -> str:
    path = Path(reference)
    return path.name.removesuffix(".gguf") if path.exists() else reference


def size_of(reference: str) -> int:
    """Bytes of a model's files, as far as they are here or known; else 0."""
    if reference in catalog.BUILT_IN:
        return catalog.BUILT_IN[reference].size
    path = Path(reference)
    if path.is_file():
        return path.stat().st_size
    if path.is_dir():
        weights = (one for one in path.iterdir() if one.suffix in (".safetensors", ".bin"))
        return sum(one.stat().st_size for one in weights)
    return sum(
        one.size for one in huggingface.cached() if one.name == reference.split(":", maxsplit=1)[0]
    )
