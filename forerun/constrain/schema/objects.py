"""Rewrites keywords about the keys of objects in keywords that llguidance enforces."""

from itertools import combinations
from typing import Any

from forerun.constrain.schema.logic import NOTES, types
from forerun.constrain.schema.patterns import matching
from forerun.constrain.schema.strings import Unenforceable, lengths, plain_patterns

MAX_BRANCHES = 64
"""Most alternatives that one keyword is rewritten as."""

Schema = dict[str, Any]


def dependencies(schema: Schema) -> dict[str, list[Any]]:
    """Return, by key, the conditions on an object that has this key: lists of required keys, or
    schemas. {} without dependencies.
    """
    by_key: dict[str, list[Any]] = {}
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        given = schema.get(keyword)
        for name, needs in given.items() if isinstance(given, dict) else ():
            by_key.setdefault(name, []).append(needs)
    return by_key


def depending(name: str, needs: Any, required: list[str]) -> Schema:
    """Return one dependency as a schema that must hold in addition to others; {} if it always
    holds.

    name      the key on which `needs` depends
    needs     names of keys, or a rewritten schema
    required  keys that are always present
    """
    if isinstance(needs, str):
        needs = [needs]
    if isinstance(needs, list):
        if set(needs) <= set(required):
            return {}
        if name in required:
            return {"required": needs}
        present: Schema = {"required": [name, *(key for key in needs if key != name)]}
    else:
        if name in required:
            return {"allOf": [needs]}
        present = {"required": [name], "allOf": [needs]}
    return {"anyOf": [{"properties": {name: False}}, present]}


def counted(schema: Schema, alone: bool) -> tuple[Schema, list[str]]:
    """Return a copy with minProperties and maxProperties in a form that llguidance can count, and
    the names of those that it cannot.

    It can count if all properties are required. Repeated keys, which are possible among further
    keys only, count each time.

    alone  no other schema for the same object may list more properties
    """
    out = dict(schema)
    least, most = out.pop("minProperties", None), out.pop("maxProperties", None)
    properties, required = dict(out.get("properties") or {}), list(out.get("required") or [])
    further = out.get("additionalProperties", True)
    closed = further is False and not out.get("patternProperties")
    names = [name for name in properties if properties[name] is not False]
    if isinstance(least, int) and least <= len(set(required)):
        least = None
    if isinstance(most, int) and closed and most >= len({*names, *required}):
        most = None
    if least is None and most is None:
        return out, []
    if not properties and (least is None or least == 1):
        counts = {"minProperties": least, "maxProperties": most}
        return out | {name: value for name, value in counts.items() if value is not None}, []
    faults = [
        name
        for name, value in (("minProperties", least), ("maxProperties", most))
        if value is not None
    ]
    optional = [name for name in names if name not in required]
    choices = _chosen(optional, (least or 0) - len(set(required)), most, len(set(required)))
    if choices is None or not isinstance(least or 0, int) or out.get("patternProperties"):
        return out, faults
    if most is not None:
        out["properties"] = properties | {
            name: further for name in required if name not in properties
        }
        out["additionalProperties"] = False
    elif least == 1 and alone and further is not False:
        absent = {"properties": dict.fromkeys(names, False)} if names else {}
        choices.append({**absent, "minProperties": 1})
    out.setdefault("allOf", [])
    out["allOf"] = [*out["allOf"], {"anyOf": choices}]
    return out, []


def _chosen(optional: list[str], least: int, most: Any, required: int) -> list[Schema] | None:
    """Return alternatives of optional keys that are present, such that the counts hold; None if
    there are too many.
    """
    sizes = range(max(least, 0), len(optional) + 1)
    if most is None:
        sizes = range(least, least + 1)
    elif isinstance(most, int):
        sizes = range(max(least, 0), min(most - required, len(optional)) + 1)
    chosen: list[Schema] = []
    for size in sizes:
        for names in combinations(optional, size):
            absent = {} if most is None else {key: False for key in optional if key not in names}
            branch: Schema = {"required": list(names)} if names else {}
            chosen.append(branch | ({"properties": absent} if absent else {}))
            if len(chosen) > MAX_BRANCHES:
                return None
    return chosen or None


def named(schema: Schema, names: Any) -> Schema | None:  # noqa: PLR0911
    """Return a copy with only the keys that `propertyNames` (`names`) allows; None if that cannot
    be expressed.
    """
    properties = dict(schema.get("properties") or {})
    out = {**schema, "additionalProperties": False}
    kinds = types(names) if isinstance(names, dict) else None
    if names is False or (kinds is not None and "string" not in kinds):
        out.pop("patternProperties", None)
        return {**out, "properties": dict.fromkeys(properties, False)}
    if not isinstance(names, dict) or schema.get("patternProperties"):
        return schema if names is True else None
    rules = {name: names[name] for name in names if name not in NOTES and name != "type"}
    further = schema.get("additionalProperties", True)
    values = [rules["const"]] if "const" in rules else rules.get("enum")
    if isinstance(values, list) and len(rules) == 1:
        known = {name: value for name, value in properties.items() if name in values}
        gone = {name: False for name in properties if name not in values}
        more = {name: further for name in values if isinstance(name, str) and name not in known}
        out["properties"] = gone | known | more
        return out
    pattern = rules.get("pattern")
    if pattern is None and rules and rules.keys() <= {"minLength", "maxLength"}:
        pattern = lengths(rules.get("minLength", 0), rules.get("maxLength"))
    elif len(rules) != 1:
        return schema if not rules else None
    if not isinstance(pattern, str) or (properties and further is not False):
        return None
    if properties:
        matches = matching(pattern, [*properties])
        if matches is None:
            return None
        pairs = zip(properties.items(), matches, strict=True)
        out["properties"] = {name: value if fits else False for (name, value), fits in pairs}
        return out
    try:
        (plain,) = plain_patterns(pattern)
    except (Unenforceable, ValueError):
        return None
    return {**out, "patternProperties": {plain: further}}
