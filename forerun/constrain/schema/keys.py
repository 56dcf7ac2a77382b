r"""Rewrites which keys an object may have, and in which order.

llguidance takes listed keys in the schema's order and further keys after them. A model that writes
a listed key late has begun what can only be a further one, and must go on until the key is none of
the listed; where there are no further keys, what it has left to say is lost. So optional keys
behind the last required one become patterns, which come in any order, and may repeat.

It accepts the escape of a listed key (`"\u0061"` for `a`) as a further one as well, so its value
need not follow the schema. A pattern without escapes for further keys prevents that.

Merged schemas must have no such patterns, because llguidance cannot merge them.
"""

import json
import re
from typing import Any, Literal

from forerun.constrain.schema.paths import children
from forerun.constrain.schema.strings import other_than

Schema = dict[str, Any]
Free = Literal["never", "open", "always"]
"""Whether optional keys come in any order: never, where further keys are allowed, or always."""

MOST_FREE = 32
"""Most keys of an object that come in any order: llguidance compares their patterns in pairs."""

_MERGING = ("anyOf", "allOf", "$ref")


def with_free_keys(root: Schema, plain: bool, free: Free) -> None:
    """Allow, in place, the optional keys after the last required one in any order, in object
    schemas that are not merged with others.

    plain  forbid keys with escapes: further keys match a pattern of unescaped characters
    """
    definitions = root.get("$defs", {})
    merged: set[int] = set()
    every = _all(root)
    for schema in every:
        if _merges(schema):
            _mark(schema, definitions, merged)
    for schema in every:
        if id(schema) not in merged:
            _free(schema, plain, free)


def _merges(schema: Schema) -> bool:
    rules = [name for name in schema if name != "$defs"]
    if not any(name in _MERGING for name in rules):
        return False
    return len(rules) > 1 or len(schema.get("allOf", ())) > 1


def _mark(schema: Schema, definitions: dict[str, Any], merged: set[int]) -> None:
    """Mark everything below a schema, and everything it refers to."""
    todo: list[Any] = [schema]
    while todo:
        one = todo.pop()
        if not isinstance(one, dict) or id(one) in merged:
            continue
        merged.add(id(one))
        if "$ref" in one:
            todo.append(definitions.get(one["$ref"].rpartition("/")[2]))
        inside = {name: value for name, value in one.items() if name != "$defs"}
        todo += [inner for _, inner in children(inside, "")]


def _all(root: Schema) -> list[Schema]:
    nodes, todo = [], [root]
    seen: set[int] = set()
    while todo:
        schema = todo.pop()
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            nodes.append(schema)
            todo += [inner for _, inner in children(schema, "")]
    return nodes


def _free(schema: Schema, plain: bool, free: Free) -> None:
    properties = schema.get("properties")
    further = schema.get("additionalProperties", True)
    closed = further is False
    if not properties or schema.get("patternProperties") or (closed and free != "always"):
        return
    required = schema.get("required", [])
    *_, last = [-1, *(at for at, name in enumerate(properties) if name in required)]
    late = {name: properties[name] for name in [*properties][last + 1 :] if _movable(name)}
    late = {name: value for name, value in late.items() if value is not False}
    late = late if free != "never" and len(late) <= MOST_FREE else {}
    patterns = {f"^{re.escape(name)}$": value for name, value in late.items()}
    listed = {name: value for name, value in properties.items() if name not in late}
    if plain and not closed:
        listed |= {name: further for name in required if name not in properties}
        patterns[other_than([*properties, *required])] = further
        schema["additionalProperties"] = False
    if patterns:
        schema |= {"properties": listed, "patternProperties": patterns}


def _movable(name: str) -> bool:
    """Return whether a pattern can match a key: it is written without escapes."""
    return json.dumps(name, ensure_ascii=False) == f'"{name}"' and "\x7f" not in name
