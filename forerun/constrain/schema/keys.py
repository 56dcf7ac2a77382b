r"""Prevents a second spelling of keys of objects.

Where an object may have further keys, llguidance accepts the escape of a listed key (`"\u0061"` for
`a`) as a further one, so its value need not follow the schema. A pattern without escapes for
further keys prevents that. Merged schemas must have no such pattern, because llguidance cannot
merge patterns.
"""

from typing import Any

from forerun.constrain.schema.paths import children
from forerun.constrain.schema.strings import other_than

Schema = dict[str, Any]
_MERGING = ("anyOf", "allOf", "$ref")


def with_plain_keys(root: Schema) -> None:
    """Forbid, in place, keys with escapes in every object schema that is not merged with another:
    its further keys then match a pattern of unescaped characters.
    """
    definitions = root.get("$defs", {})
    merged: set[int] = set()
    every = _all(root)
    for schema in every:
        if _merges(schema):
            _mark(schema, definitions, merged)
    for schema in every:
        if id(schema) not in merged:
            _plain(schema)


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


def _plain(schema: Schema) -> None:
    properties = schema.get("properties")
    further = schema.get("additionalProperties", True)
    if not properties or further is False or schema.get("patternProperties"):
        return
    required = schema.get("required", [])
    schema["properties"] = properties | dict.fromkeys(
        (name for name in required if name not in properties), further
    )
    schema["patternProperties"] = {other_than(schema["properties"]): further}
    schema["additionalProperties"] = False
