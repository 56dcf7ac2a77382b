"""Several models on a command line, in a folder or in a file: their names, sizes and loaders."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from forerun.cache_dir import seen
from forerun.checkpoints.gguf.parts import parts_of
from forerun.cli.layers import entries
from forerun.cli.yaml_file import mapping
from forerun.errors import ConfigError
from forerun.hub import catalog, huggingface
from forerun.hub.reference import is_model_file
from forerun.options.config import EngineConfig
from forerun.options.flags import Option, gather
from forerun.serve.answers.service import Start
from forerun.serve.models import Source

OWN = (
    *("speculative_draft_model_path", "speculative_token_map", "chat_template", "revision"),
    "lora_modules",
)
"""Options that belong to a single model."""


def in_folder(folder: Path) -> list[str]:
    """Return the references of all models in a folder: GGUF files (see is_model_file) and
    subfolders with a config.json. Broken links are skipped. Raises ConfigError if there is none.
    """
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir {folder} cannot be read: {error.strerror}.") from error
    references = [
        str(path)
        for path in inside
        if (is_model_file(path.name) and seen(path) is not None)
        or seen(path / "config.json") is not None
    ]
    if not references:
        raise ConfigError(f"--models-dir {folder} holds no .gguf file and no model folder.")
    return references


@dataclass(frozen=True, slots=True)
class Named:
    """A model to serve.

    name   its name in requests
    also   its other names
    """

    name: str
    config: EngineConfig
    also: tuple[str, ...] = ()


def on_the_line(references: Sequence[str], config: EngineConfig) -> list[Named]:
    """Return the models named on the command line, which share all options. A file keeps its
    `.gguf` where a folder has the name without it. Raises ConfigError for an option that belongs to
    a single model.
    """
    plain = EngineConfig()
    for name in OWN if references else ():
        if getattr(config, name) != getattr(plain, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} applies to one model; serve that alone, or use --models-file."
            )
    each = [*dict.fromkeys(references)]
    short = Counter(map(_name, each))
    names = [_name(one) if short[_name(one)] == 1 else Path(one).name for one in each]
    return [Named(name, replace(config, model=one)) for name, one in zip(names, each, strict=True)]


def in_file(path: Path, options: Mapping[str, Option], config: EngineConfig) -> list[Named]:
    """Return the models of a YAML file: names, each with options of its own by any name that
    `forerun serve` takes; other options are as in `config`. Without `model` the name is the
    reference. Raises ConfigError naming file, model and option.
    """
    own = {item.name for item in fields(EngineConfig)} | {"served_name"}
    found = []
    for name, value in mapping(path, 2).items():
        where = f"{path}, {name}"
        if not isinstance(value or {}, dict):
            raise ConfigError(f"{where}: options of a model are lines such as `context: 4096`.")
        given = list(entries(where, value or {}, options, "serve"))
        for one in given:
            if not set(one.option.fields) <= own:
                raise ConfigError(f"{one.where} is a server option; give it on the command line.")
        values: dict[str, Any] = {"model": name} | gather(given)
        also = values.pop("served_name", ())
        try:
            found.append(Named(name, replace(config, **values), also))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    if not found:
        raise ConfigError(f"--models-file {path} names no model.")
    return found


def sources(models: Sequence[Named], source: Callable[[EngineConfig], Start]) -> list[Source]:
    """Return the sources of these models for the server; `source` returns the loader of one. Raises
    ModelError for an invalid reference, ConfigError if two models have the same name.
    """
    loaded: list[Source] = []
    taken: set[str] = set()
    for one in models:
        reference = one.config.model
        catalog.check_reference(reference, one.config.revision)
        adapters = one.config.adapters
        for name in (*{one.name, *one.also}, *(name for name, _ in adapters)):
            if name in taken:
                raise ConfigError(
                    f"two models or adapters are called {name!r}; give one another name."
                )
            taken.add(name)
        # Clients may also name a model by its reference or the last part of it.
        others = (*one.also, reference, reference.rstrip("/").rpartition("/")[2])
        others = tuple(dict.fromkeys(name for name in others if name != one.name))
        load = source(one.config)
        loaded.append(Source(one.name, others, size_of(reference), load, adapters))
    return loaded


def _name(reference: str) -> str:
    path = Path(reference)
    return path.name.removesuffix(".gguf") if path.exists() else reference


def size_of(reference: str) -> int:
    """Return the bytes of a model's files, if they are on this machine or known; else 0."""
    if reference in catalog.BUILT_IN:
        return catalog.BUILT_IN[reference].size
    path = Path(reference)
    if path.is_file():
        return sum(one.stat().st_size for one in parts_of(path) if one.is_file())
    if path.is_dir():
        weights = (one for one in path.iterdir() if one.suffix in (".safetensors", ".bin"))
        return sum(one.stat().st_size for one in weights if one.is_file())
    return sum(
        one.size for one in huggingface.cached() if one.name == reference.split(":", maxsplit=1)[0]
    )
