"""Reads clients' JSON: with limits, and without repeated keys."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any, NoReturn

MOST_CONTAINERS = 1 << 17
"""Most arrays and objects in one text. No other bytecode runs while an array is created or freed,
and each takes some .6 microseconds of that.
"""

MOST_LEVELS = 400
"""Deepest nesting of arrays and objects. Values are traversed and written by recursive functions,
deeper in the stack than this reader.
"""

_AT_ONCE = 4096
"""Pairs of an object that are added in one call."""

_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or the beginning of one that never ends; it always matches at a quote."""


class JsonFault(ValueError):  # noqa: N818
    """The reason for which a text is rejected as JSON."""


def read_json(text: str, repeated: bool = False) -> Any:
    """Return the value of a JSON text. Raises JsonFault for NaN, infinity, extreme depth, too many
    containers and invalid JSON; also for repeated keys, unless `repeated`: then the last value
    counts.

    A large text may be read on another thread: numbers are parsed in Python, although C would be
    three times as fast, so that the event loop can run between any two of them.
    """
    with _faults(text):
        value = _decoder(repeated).decode(text)
        if text.count("[") + text.count("{") > MOST_LEVELS:
            _check_levels(value)
        return value


def read_first(text: str) -> tuple[Any, int]:
    """Return the value at the beginning of a text, and the index after it; of repeated keys the
    last counts. Raises JsonFault, as `read_json`.
    """
    with _faults(text):
        value, end = _decoder(repeated=True).raw_decode(text)
        return value, end


def _decoder(repeated: bool) -> json.JSONDecoder:
    return json.JSONDecoder(
        parse_constant=_not_json,
        parse_float=_finite,
        parse_int=_integer,
        object_pairs_hook=partial(_object, repeated=repeated),
    )


@contextmanager
def _faults(text: str) -> Iterator[None]:
    """Convert errors in reading a text to JsonFault, as a context manager."""
    try:
        _check_containers(text)
        yield
    except RecursionError:
        raise JsonFault("it is nested too deeply") from None
    except JsonFault:
        raise
    except json.JSONDecodeError as error:
        raise JsonFault(str(error) if text.strip() else "it is empty") from None
    except ValueError:
        digits = sys.get_int_max_str_digits()
        raise JsonFault(f"a number has more than {digits} digits") from None


def _check_containers(text: str) -> None:
    """Raise JsonFault if a text has more than MOST_CONTAINERS arrays and objects outside of
    strings.
    """
    if text.count("[") + text.count("{") <= MOST_CONTAINERS:
        return
    bare = _STRING.sub(lambda _: "", text)  # Calls of Python's again, as in read_json.
    if bare.count("[") + bare.count("{") > MOST_CONTAINERS:
        raise JsonFault(f"it has more than {MOST_CONTAINERS:,} arrays and objects")


def _check_levels(value: Any) -> None:
    """Raise JsonFault if a value has more than MOST_LEVELS levels."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for several in inside for one in several if isinstance(one, dict | list)]
        if not level:
            return
    raise JsonFault("it is nested too deeply")


def _not_json(name: str) -> NoReturn:
    raise JsonFault(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise JsonFault(f"the number {digits[:40]} is out of range")
    return value


def _integer(digits: str) -> int:
    """Parse an integer in Python code, after which another thread may run: see read_json."""
    return int(digits)


def _object(pairs: list[tuple[str, Any]], repeated: bool) -> dict[str, Any]:
    """Return an object. Raises JsonFault for a repeated key, whose value would be lost, unless
    `repeated`.
    """
    made: dict[str, Any] = {}
    for start in range(0, len(pairs), _AT_ONCE):
        made.update(pairs[start : start + _AT_ONCE])
    if len(made) < len(pairs) and not repeated:
        names = Counter(name for name, _ in pairs)
        name, count = names.most_common(1)[0]
        raise JsonFault(f"the key {name[:60]!a} appears {count} times in one object")
    return made
