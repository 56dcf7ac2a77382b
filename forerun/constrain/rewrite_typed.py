"""Schemas whose every part has the types that its keywords are for, and some value.

xgrammar ignores keywords without their `type`, and refuses a schema of no value wherever it stands
but in `additionalProperties`.
"""

from typing import Any

from forerun.constrain.rewrite_logic import type_of, values_of

Schema = dict[str, Any]

KEYWORDS = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "minProperties",
         "maxProperties"}
    ),
}  # fmt: skip
"""Keywords of each type."""


def typed(schema: Any, defined: Schema) -> tuple[Any, Schema]:
    """The schema and what it refers to by name, with types and without parts that have no value.
    False, or a name that is missing: no value is valid.
    """
    while True:
        found = {name: _typed(one, defined) for name, one in defined.items()}
        kept = {name: one for name, one in found.items() if one is not False}
        if len(kept) == len(defined):
            return _typed(schema, kept), kept
        defined = kept


def _typed(schema: Any, defined: Schema) -> Any:
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return schema if schema["$ref"].rpartition("/")[2] in defined else False
    out = dict(schema)
    for name in ("properties", "patternProperties"):
        if isinstance(out.get(name), dict):
            out[name] = {inner: _typed(one, defined) for inner, one in out[name].items()}
    if isinstance(out.get("prefixItems"), list):
        out["prefixItems"] = [_typed(one, defined) for one in out["prefixItems"]]
    for name in ("items", "additionalProperties"):
        if name in out:
            out[name] = _typed(out[name], defined)
    if isinstance(out.get("anyOf"), list):
        every = [_typed(one, defined) for one in out["anyOf"]]
        out["anyOf"] = [one for one in every if one is not False]
        return out if out["anyOf"] else False
    if "const" in out or "enum" in out:
        return _constant(out)
    return _of_types(out)


def _of_types(schema: Schema) -> Any:
    """With the types that its keywords are for, less those of which no value is valid."""
    if "type" not in schema:
        kinds = [kind for kind, names in KEYWORDS.items() if names & schema.keys()]
        if len(kinds) != 1:
            return schema
        schema = {"type": kinds[0], **schema}
    for kind, rule in (("object", _object), ("array", _array)):
        if kind in listed(schema["type"]):
            found = rule(schema)
            left = [other for other in listed(schema["type"]) if other != kind]
            schema = {**schema, "type": left} if found is None else found
    if schema["type"] == []:
        return False
    kinds = ["number" if kind == "integer" else kind for kind in listed(schema["type"])]
    known = frozenset({"type"}).union(*(KEYWORDS.get(kind, frozenset()) for kind in kinds))
    foreign = frozenset().union(*KEYWORDS.values()) - known
    return {name: schema[name] for name in schema if name not in foreign}


def _object(schema: Schema) -> Schema | None:
    """Every required name is a property, and every property has a value; None = no object."""
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return schema
    further = schema.get("additionalProperties", True)
    required = schema.get("required", [])
    every = {**properties, **{name: further for name in required if name not in properties}}
    if any(every[name] is False for name in required):
        return None if "patternProperties" not in schema else schema
    if False in [value for value in every.values() if isinstance(value, bool)]:
        schema = {**schema, "additionalProperties": False}
    kept = {name: value for name, value in every.items() if value is not False}
    return {**schema, "properties": kept} if kept or properties else schema


def _array(schema: Schema) -> Schema | None:
    """As long as its items have values; None = no array."""
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if not isinstance(first, list):
        return schema
    places = [*first, rest]
    if False not in [value for value in places if isinstance(value, bool)]:
        return schema
    end = next(index for index, value in enumerate(places) if value is False)
    out = {name: schema[name] for name in schema if name not in ("items", "prefixItems")}
    out["maxItems"] = min(end, schema.get("maxItems", end))
    if out.get("minItems", 0) > out["maxItems"]:
        return None
    return {**out, "prefixItems": first[:end]} if end else out


def _constant(schema: Schema) -> Any:
    """Only the constants that the keywords beside them allow, as far as that is by type."""
    values = values_of(schema) or []
    if "type" in schema:
        kinds = listed(schema["type"])
        values = [value for value in values if common([type_of(value)], kinds)]
    rest = {name: schema[name] for name in schema if name not in ("const", "enum", "type")}
    return {"enum": values, **rest} if values else False


def listed(value: Any) -> list[str]:
    """Types, of which one may stand without a list."""
    return value if isinstance(value, list) else [value]


def common(one: list[str], other: list[str]) -> list[str]:
    """Types that both allow: integers are numbers."""
    found = [kind for kind in one if kind in other]
    if ("number" in one and "integer" in other) or ("integer" in one and "number" in other):
        found += [] if "integer" in found or "number" in found else ["integer"]
    return found
