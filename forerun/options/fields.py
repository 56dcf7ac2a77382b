"""Fields of configurations: each knows its help text, its bounds and its spellings."""

import json
from collections.abc import Callable
from dataclasses import Field, field, fields
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

    text       help, half a sentence
    choices    the allowed strings; () = any
    low, high  bounds of a number; None = none
    flag       the flag's name without dashes, where it is not the field's
    spellings  makes a choice, or a member of a tuple, of the other ways to write it
    """
    facts = {"help": text, "choices": choices, "low": low, "high": high, "flag": flag}
    return field(default=default, metadata=facts | {"spellings": spellings})


def spell(config: Any) -> None:
    """Bring every choice of a new configuration into its usual spelling, in place. Raises
    ConfigError, where a field's `spellings` does.
    """
    for item in fields(config):
        value = getattr(config, item.name)
        if item.metadata["choices"] and isinstance(value, str):
            object.__setattr__(config, item.name, item.metadata["spellings"](value))


def validate(config: Any) -> None:
    """Raise ConfigError naming every field whose value is no choice of it, not finite, or out of
    its bounds.
    """
    found = (_problem(item, getattr(config, item.name)) for item in fields(config))
    if problems := [problem for problem in found if problem]:
        raise ConfigError("\n".join(problems))


def _problem(item: "Field[Any]", value: Any) -> str:
    """What is wrong with a field's value, in a sentence; "" = nothing."""
    facts, name = item.metadata, item.name.replace("_", "-")
    if facts.get("choices") and value not in facts["choices"]:
        return f"{name} is {value!r}, but must be one of: {', '.join(facts['choices'])}."
    if value is None or isinstance(value, str | bool | tuple):
        return ""
    if isinstance(value, float) and not isfinite(value):
        return f"{name} is {value}, but must be a finite number."
    low, high = facts.get("low"), facts.get("high")
    if (low is None or value >= low) and (high is None or value <= high):
        return ""
    span = f"at least {low}" if high is None else f"between {low} and {high}"
    return f"{name} is {value}, but must be {span}."


def addresses(text: str) -> tuple[str, ...]:
    """The addresses in `text`: one, several between commas, or a JSON list of strings. Raises
    ConfigError for any other JSON.
    """
    if not text.startswith("["):
        return tuple(one.strip() for one in text.split(",") if one.strip())
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigError(f"this option takes addresses or a JSON list of them, not {text!r}.")
    return tuple(found)
