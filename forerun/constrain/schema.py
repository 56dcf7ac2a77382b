"""Where in a JSON schema a keyword stands, so that an error can name its path."""

import json
from collections.abc import Iterator
from typing import Any

_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_IN_MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)


def schemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object schema inside `schema`, itself first, with its path (`properties.a.items`)."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key, value in schema.items():
        here = f"{path}.{key}" if path else key
        if key in _IN_LIST or (key == "items" and isinstance(value, list)):
            for index, inner in enumerate(value if isinstance(value, list) else []):
                yield from schemas(inner, f"{here}[{index}]")
        elif key in _IN_MAP and isinstance(value, dict):
            for name, inner in value.items():
                yield from schemas(inner, f"{here}.{name}")
        elif key in _SINGLE:
            yield from schemas(value, here)


def locate(source: str, message: str) -> str | None:
    """Path of the first keyword, reference or value that a compiler's message quotes."""
    found = list(schemas(json.loads(source)))
    quoted = _quoted(message)
    for path, schema in found:
        for key in schema:
            if key in quoted:
                return f"{path}.{key}" if path else key
    for path, schema in found:
        for key, value in schema.items():
            if isinstance(value, str) and value.lstrip("#") and value.lstrip("#") in message:
                return f"{path}.{key}" if path else key
    return None


def _quoted(message: str) -> set[str]:
    """Names that the message puts in quotes, and the keywords it writes bare."""
    parts = message.split('"')
    bare = message.replace("(", " ").replace(":", " ").split()
    return {*parts[1::2], *(word for word in bare if word in _BARE)}


_BARE = frozenset(
    {
        "oneOf",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "multipleOf",
        "anyOf",
    }
)
