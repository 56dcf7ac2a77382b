"""Fields of configurations, each with its help text, its bounds and its spellings."""

import json
import os
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from math import isfinite
from typing import Any, get_args

import msgspec

from forerun.errors import ConfigError

YES, NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


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
    """Declare a dataclass field with its help text, its bounds (inclusive) and its flag.

    text       help, half a sentence
    choices    the allowed strings; () = any
    low, high  bounds of a number; None = none
    flag       the flag's name without dashes, if it is not the field's
    spellings  converts other spellings of a text, a choice or a member of a tuple; of a whole
               number, None is the default
    """
    facts = {"help": text, "choices": choices, "low": low, "high": high, "flag": flag}
    return field(default=default, metadata=facts | {"spellings": spellings})


def settle(config: Any) -> None:
    """Convert every field of a new configuration to its declared type, in place: texts as the
    command line parses them, choices into their usual spelling. Raises ConfigError naming every
    field whose value has another type, is not one of its choices, not finite, or out of its bounds.
    """
    problems: list[str] = []
    for item in fields(config):
        try:
            value = _converted(item, getattr(config, item.name))
        except (ValueError, ConfigError) as error:
            problems.append(str(error))
            continue
        object.__setattr__(config, item.name, value)
        if problem := _problem(item, value):
            problems.append(problem)
    if problems:
        raise ConfigError("\n".join(problems))


def _converted(item: "Field[Any]", value: Any) -> Any:
    """Convert a field's value to its declared type. Raises ValueError or ConfigError, naming the
    field.
    """
    name = item.name.replace("_", "-")
    if not isinstance(value, str):
        return converted(name, value, item.type)
    if item.metadata["choices"]:
        return item.metadata["spellings"](value)
    return parsed(item, name, value)


def converted(name: str, value: Any, kind: Any) -> Any:
    """Convert a Python value to the type `kind`: paths become texts, NumPy's numbers and arrays
    become Python's. Raises ValueError, with `name`, if it is of another type.
    """
    try:
        simple = msgspec.to_builtins(value, builtin_types=(bytes, bytearray), enc_hook=_simple)
        return msgspec.convert(simple, kind, strict=False)
    except (TypeError, msgspec.ValidationError) as error:
        shown, reason = reprlib.repr(value), str(error)
        raise ValueError(f"{name} is {shown}: {reason[:1].lower()}{reason[1:]}.") from None


def _simple(value: Any) -> Any:
    """Convert a value to Python's own types. Raises TypeError for an unknown type."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"no option holds a {type(value).__name__}")


def _problem(item: "Field[Any]", value: Any) -> str:
    """Return what is wrong with a field's value, as a sentence; "" = nothing."""
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


def parsed(item: "Field[Any]", where: str, text: str) -> Any:
    """Parse a field's value from `text`, without checking its bounds. Raises ConfigError, naming
    `where`, for text of another type.
    """
    kind, choices = kind_of(item), item.metadata["choices"]
    if kind is bool:
        return truth(where, text)
    if kind is int and item.metadata["spellings"](text) is None:
        return item.default
    try:
        value = parse_integer(text) if kind is int else float(text) if kind is float else text
    except (ValueError, OverflowError):  # A number with a unit may be "inf".
        what = "a whole number" if kind is int else "a number"
        units = f"; units are {', '.join(_UNITS)}" if kind is int and text[:1].isdigit() else ""
        raise ConfigError(f"{where} takes {what}, not {text!r}{units}.") from None
    if isinstance(item.default, tuple):
        value = item.metadata["spellings"](text)
        return value if isinstance(value, tuple) else (value,)
    return item.metadata["spellings"](text) if value is text and not choices else value


def parse_integer(text: str) -> int:
    """Parse a whole number; 8k is 8000 and 8K is 8192, likewise m, M, g and G, as in vLLM; 8KB is
    8000 and 8KiB is 8192, likewise MB, GB and TB. Raises ValueError for other text.
    """
    digits = text.rstrip("kKmMgGTiB")
    unit = _UNITS.get(text[len(digits) :].strip())
    return int(text) if unit is None else round(float(digits) * unit)


_UNITS = {"k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}
_UNITS |= {"KB": 1000, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def truth(where: str, text: str) -> bool:
    """Return whether `text` is one of YES. Raises ConfigError, naming `where`, if it is in neither
    YES nor NO.
    """
    if text.lower() not in YES + NO:
        raise ConfigError(f"{where} is on or off (true or false), not {text!r}.")
    return text.lower() in YES


def kind_of(item: "Field[Any]") -> type:
    """Return the type of a field besides None, or of a tuple's items."""
    if isinstance(item.default, tuple):
        return str
    kinds = [kind for kind in (get_args(item.type) or (item.type,)) if kind is not type(None)]
    kind: type = kinds[0]
    return kind


def addresses(text: str) -> tuple[str, ...]:
    """Parse the addresses in `text`: one, several between commas, or a JSON list of strings. Raises
    ConfigError for any other JSON.
    """
    if not text.startswith("["):
        return tuple(one.strip() for one in text.split(",") if one.strip())
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, list) or not all(isinstance(one, str) for one in parsed):
        raise ConfigError(f"this option takes addresses or a JSON list of them, not {text!r}.")
    return tuple(parsed)


def adapters_in(text: str) -> tuple[str, ...]:
    """Return NAME=FOLDER for each adapter in `text`: as written (a folder alone is its own name),
    or vLLM's JSON, an object with name and path or a list of them. Raises ConfigError for other
    text.
    """
    if text[:1] in ("{", "["):
        try:
            parsed = json.loads(text)
            listed = parsed if isinstance(parsed, list) else [parsed]
            named = [(str(one["name"]), str(one["path"])) for one in listed]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"lora-modules takes NAME=FOLDER, or objects with name and path, not {text!r}."
            ) from None
    else:
        name, equals, folder = text.partition("=")
        named = [(name, folder if equals else name)]
    if not all(name and folder for name, folder in named):
        raise ConfigError(f"lora-modules takes NAME=FOLDER, not {text!r}.")
    return tuple(f"{name}={folder}" for name, folder in named)
