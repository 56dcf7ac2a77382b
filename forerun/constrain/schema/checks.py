"""Checks of a JSON schema that need no compiler, and bounds as 64-bit floats."""

import sys
from math import copysign, isinf
from typing import Any

from forerun.constrain.schema.paths import schemas
from forerun.constrain.schema.patterns import portable, regex_error
from forerun.constrain.schema.regex_faults import regex_fault
from forerun.errors import RequestError

MAX_LEVELS = 250
"""Deepest nesting of a JSON schema."""


def check_depth(value: Any, field: str) -> None:
    """Raise RequestError if a value is nested deeper than MAX_LEVELS; iterative, so any depth is
    safe.
    """
    level = [value]
    for _ in range(MAX_LEVELS):
        parts = [part for part in level if isinstance(part, dict | list)]
        if not parts:
            return
        level = [
            inner for part in parts for inner in (part.values() if isinstance(part, dict) else part)
        ]
    raise RequestError(f"{field} is nested deeper than {MAX_LEVELS} levels", field)


def check_size(value: Any, max_bytes: int, field: str) -> None:
    """Raise RequestError if the JSON text of a value certainly has more than `max_bytes` bytes;
    stops reading the value at that size.
    """
    size, todo = 0, [value]
    while todo and size <= max_bytes:
        part = todo.pop()
        if isinstance(part, dict):
            size += 2 + sum(len(key) + 4 for key in part if isinstance(key, str))
            todo += part.values()
        elif isinstance(part, list):
            size += 2 + len(part)
            todo += part
        else:
            size += len(part) + 2 if isinstance(part, str) else 1
    if size > max_bytes:
        raise RequestError(
            f"{field} has more than {max_bytes} bytes, which is the most taken", field
        )


def check_patterns(schema: Any, field: str) -> None:
    """Raise RequestError, naming the path, for the first `pattern` that `portable` rejects."""
    for path, inner in schemas(schema):
        if isinstance(inner.get("pattern"), str):
            try:
                portable(inner["pattern"], f"{path}.pattern" if path else "pattern")
            except RequestError as error:
                raise RequestError(f"{field}: {error}", field) from error


def check_regexes(schema: Any, field: str) -> None:
    """Raise RequestError, naming the path and pointing at the character, for the first pattern, of
    values or of keys, that is invalid in every dialect of regular expressions (regex_faults.py).
    """
    for path, inner in schemas(schema):
        keys = inner.get("patternProperties")
        named = [("patternProperties", key) for key in keys] if isinstance(keys, dict) else []
        for keyword, pattern in [("pattern", inner.get("pattern")), *named]:
            fault = regex_fault(pattern) if isinstance(pattern, str) else None
            if fault:
                place = f"{path}.{keyword}" if path else keyword
                raise RequestError(f"{field}: {regex_error(pattern, *fault, place)}", field)


def check_members(schema: Any, field: str) -> None:
    """Raise RequestError, naming the path, for the first property or definition that is no
    schema.
    """
    for path, inner in schemas(schema):
        for keyword in ("properties", "patternProperties", "$defs", "definitions"):
            members = inner.get(keyword)
            for name, member in members.items() if isinstance(members, dict) else ():
                if not isinstance(member, dict | bool):
                    place = ".".join(filter(None, (path, keyword, str(name))))
                    message = f"{field}: {place} must be a schema: an object, true or false"
                    raise RequestError(message, field)


def finite(value: Any, bound: bool = False) -> Any:
    """Return a copy of a schema in which bounds beyond 64-bit floats (`1.8e308`) are the largest
    float.

    bound  the value itself is a bound
    """
    if isinstance(value, dict):
        return {key: finite(inner, key in _BOUNDS) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    if bound and isinstance(value, float) and isinf(value):
        return copysign(sys.float_info.max, value)
    return value


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
