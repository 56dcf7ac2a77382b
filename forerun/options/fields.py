"""Fields of configurations: each knows its help text, its bounds and its spellings."""

import json
from collections.abc import Callable
from dataclasses import field, fields
from math import isfinite
from typing import Any

from forerun.errors import ConfigError


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    flag: str | None = None,
    spellings: Callable[[str], Any] = str,
) -> Any:
    """A dataclass field that knows its help text, its bounds (inclusive) and its flag.

    `choices` lists the allowed strings; `flag` overrides the flag's name, which is otherwise
    the field's; `spellings` makes a choice of the other ways to write it.
    """
    facts = {"help": text, "choices": choices, "low": low, "high": high, "flag": flag}
    return field(default=default, metadata=facts | {"spellings": spellings})


def spell(config: Any) -> None:
    """Bring every choice of a new configuration into its usual spelling. Raises ConfigError."""
    for item in fields(config):
        value = getattr(config, item.name)
        if item.metadata["choices"] and isinstance(value, str):
            object.__setattr__(config, item.name, item.metadata["spellings"](value))


def validate(config: Any) -> None:
    """Hold every field of a configuration to its declared bounds. Raises ConfigError."""
    for item in fields(config):
        value, facts = getattr(config, item.name), item.metadata
        name = item.name.replace("_", "-")
        if facts.get("choices") and value not in facts["choices"]:
            allowed = ", ".join(facts["choices"])
            raise ConfigError(f"{name} is {value!r}, but must be one of: {allowed}.")
        if value is None or isinstance(value, str | bool | tuple):
            continue
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{name} is {value}, but must be a finite number.")
        low, high = facts.get("low"), facts.get("high")
        if not ((low is None or value >= low) and (high is None or value <= high)):
            span = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"{name} is {value}, but must be {span}.")


def addresses(text: str) -> tuple[str, ...]:
    """Web pages: one, several between commas, or a JSON list."""
    if not text.startswith("["):
        return tuple(one.strip() for one in text.split(",") if one.strip())
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigError(f"this option takes addresses or a JSON list of them, not {text!r}.")
    return tuple(found)
