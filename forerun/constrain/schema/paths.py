"""Paths of keywords in a JSON schema, for errors."""

import json
from collections.abc import Iterator
from typing import Any

from forerun.constrain.schema.patterns import portable
from forerun.errors import RequestError

IN_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Keywords that hold a list of schemas."""
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords that hold schemas by name."""
SINGLE = frozenset(
    "items additionalItems additionalProperties contains if then else not "  # noqa: SIM905
    "propertyNames unevaluatedItems unevaluatedProperties".split()
)
"""Keywords that hold a schema."""
_IN_MAP = BY_NAME | {"dependentSchemas", "dependencies"}
_LONGEST = 100
"""Most characters of a name in a path: every schema below it has a copy of them."""


def schemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object schema inside `schema`, itself first, with its path
    (`properties.a.items`), which begins with `path`. Long names are cut.
    """
    if not isinstance(schema, dict):
        return
    yield path, schema
    for here, inner in children(schema, path):
        yield from schemas(inner, here)


def children(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly below one, including booleans and malformed ones, with their
    paths, which begin with `path`.
    """
    for key, value in schema.items():
        here = below(path, key)
        if key in IN_LIST or (key == "items" and isinstance(value, list)):
            for index, inner in enumerate(value if isinstance(value, list) else []):
                yield f"{here}[{index}]", inner
        elif key in _IN_MAP and isinstance(value, dict):
            for name, inner in value.items():
                yield f"{here}.{name[:_LONGEST]}", inner
        elif key in SINGLE:
            yield here, value


def forbid_references(schema: Any, target: str) -> None:
    """Replace, in place, every schema within `schema` whose "$ref" is the string `target` by one
    that no value satisfies.
    """
    for _, inner in list(schemas(schema)):
        if inner.get("$ref") == target:
            inner.clear()
            inner["type"] = []


def locate(source: str, message: str) -> str | None:
    """Return the path of the first keyword, reference or value in a schema (`source`, JSON) that a
    compiler's message quotes; None if there is none.
    """
    path = _located(json.loads(source), message)
    return None if path is None else below(path[0], path[2])


def without(schema: Any, message: str) -> str | None:
    """Remove from `schema`, in place, the keyword that a compiler's message is about, and return
    its path; returns None, and changes nothing, if it is not found.
    """
    found = _located(schema, message)
    if found is None:
        return None
    path, inner, key = found
    del inner[key]
    return below(path, key)


def below(path: str, key: str) -> str:
    """Return the path of `key` within the schema at `path`; "" is the path of the whole."""
    return f"{path}.{key}" if path else key


def _located(schema: Any, message: str) -> tuple[str, dict[str, Any], str] | None:
    """Return (path of its schema, the schema, the keyword) for the keyword that a message is
    about.
    """
    nodes, quoted = list(schemas(schema)), _quoted(message)
    apart, read = "not disjoint" in message, _patterns(message)
    for path, inner in nodes if apart or read else ():
        patterns = inner.get("patternProperties") or {}
        for name in reversed(patterns):
            if f"/{name}/" in message if apart else _is_named(name, read):
                return below(path, "patternProperties"), patterns, name
    for path, inner in nodes if read else ():
        if _is_named(inner.get("pattern"), read):
            return path, inner, "pattern"
    for path, inner in nodes:
        for key in inner:
            if key in quoted:
                return path, inner, key
    for path, inner in nodes:
        for key, value in inner.items():
            if isinstance(value, str) and value.lstrip("#") and value.lstrip("#") in message:
                return path, inner, key
    return None


def _patterns(message: str) -> list[str]:
    """Return the lines of a message about an invalid pattern, one of which is the pattern; [] for
    any other message.
    """
    lines = [line.strip() for line in message.splitlines()]
    if "regex parse error" in message or not lines:
        return lines
    quoted = lines[0].partition(" in regex /")[2]
    return [quoted[:-1].replace("\\/", "/")] if quoted.endswith("/") else []


def _is_named(pattern: Any, read: list[str]) -> bool:
    """Return whether a pattern is one of these lines, in the client's form or in the engine's."""
    if not isinstance(pattern, str) or not read:
        return False
    try:
        return pattern in read or portable(pattern, "pattern") in read
    except RequestError:
        return False


def _quoted(message: str) -> set[str]:
    """Return the names that the message quotes, and its keywords without quotes."""
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
