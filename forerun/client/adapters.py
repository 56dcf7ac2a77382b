"""LoRA adapters by name, as requests select them."""

from collections.abc import Mapping
from typing import Any

from forerun.errors import ConfigError, RequestError
from forerun.options.config import EngineConfig


def adapter_names(info: Mapping[str, Any]) -> list[str]:
    """Return the names of a loaded model's adapters, in the order of their numbers. info:
    Loaded.info.
    """
    return [str(one["name"]) for one in info.get("adapters", ())]


def adapter_number(info: Mapping[str, Any], name: str, field: str) -> int:
    """Return the number of the adapter `name`, its index in `adapter_names`. Raises RequestError,
    naming the request's `field`, if the model has no such adapter. info: Loaded.info.
    """
    names = adapter_names(info)
    if name not in names:
        known = ", ".join(map(repr, names)) or "none; name them at the start with lora-modules"
        raise RequestError(f"{field}: there is no adapter {name!r}. There are: {known}.", field)
    return names.index(name)


def only_adapter(config: EngineConfig) -> int:
    """Return the number of the adapter for requests that name none: 0 if there is exactly one, -1
    without any. Raises ConfigError for several.
    """
    if len(config.adapters) > 1:
        names = ", ".join(name for name, _ in config.adapters)
        raise ConfigError(
            f"lora-modules names {names}, but one adapter answers here: give one, or let requests "
            "to `forerun serve` choose."
        )
    return len(config.adapters) - 1
