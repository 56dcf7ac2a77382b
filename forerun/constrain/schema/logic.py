"""Tests whether schemas are disjoint (have no value in common), and computes what remains of one
without another. In doubt the result is the safe one: two schemas count as disjoint only if that is
certain, and the remainder may be smaller than possible.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise, product
from math import floor, inf
from typing import Any

from forerun.constrain.schema.numbers import exact
from forerun.constrain.schema.strings import other_than

Schema = dict[str, Any]
Resolve = Callable[[Any], Any]
"""Returns a schema, or the target of its reference."""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
NOTES = frozenset(
    "title description $comment default examples deprecated readOnly writeOnly".split()  # noqa: SIM905
)
"""Keywords that do not restrict a value."""

_DEPTH = 4


def types(schema: Schema) -> frozenset[str] | None:
    """Return the JSON types that a schema allows, by `type`, `const` or `enum`; None = all."""
    given = schema.get("type")
    if given is not None:
        return frozenset([given] if isinstance(given, str) else given)
    values = values_of(schema)
    return None if values is None else frozenset(map(type_of, values))


def type_of(value: Any) -> str:
    """Return the JSON Schema type of a JSON value; a float without a fraction is an "integer"."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return names.get(type(value), "null")


_FEW: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
"""Types with few values."""


def values_of(schema: Schema) -> list[Any] | None:
    """Return a list that contains every value the schema allows, possibly more; None if it may
    allow any.
    """
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return _FEW.get(str(schema.get("type")))


def exact_values(schema: Any) -> list[Any] | None:
    """Return exactly the values that the schema allows; None if they cannot be listed."""
    if not isinstance(schema, dict) or schema.keys() - {"type", "const", "enum"} - NOTES:
        return None
    values = values_of(schema)
    if values is None or {"const", "enum"} <= schema.keys():
        return None
    kinds = types(schema) or frozenset()
    names = kinds | {"integer"} if "number" in kinds else kinds
    return [value for value in values if type_of(value) in names]


def key(value: Any) -> Any:
    """Return a hashable that is equal exactly for values that JSON Schema considers equal (1 and
    1.0, but not true).
    """
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, dict):
        return "object", frozenset((name, key(inner)) for name, inner in value.items())
    if isinstance(value, list):
        return "array", tuple(map(key, value))
    return value


def _without_values(values: Iterable[Any], gone: Iterable[Any]) -> list[Any]:
    """Return those of `values` that equal none of `gone`, in order, by JSON's equality (1 equals
    1.0).
    """
    known = {key(value) for value in gone}
    return [value for value in values if key(value) not in known]


def without_types(allowed: frozenset[str] | None, gone: frozenset[str]) -> list[str]:
    """Return the types in `kept` (None = all) that share no value with those in `gone`, in TYPES'
    order.
    """
    names = frozenset(TYPES) - {"integer"} if allowed is None else allowed
    left = [name for name in TYPES if name in names and name not in gone]
    if "integer" in gone and "number" in left:
        left.remove("number")
    if "number" in gone and "integer" in left:
        left.remove("integer")
    return left


def disjoint(one: Any, other: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Return whether certainly no value is valid under both schemas; False if that is not
    certain.
    """
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > _DEPTH:
        return False
    if any(disjoint(a, b, resolve, depth + 1) for a, b in _parts(one, other)):
        return True
    for a, b in ((one, other), (other, one)):
        branches = a.get("anyOf", a.get("oneOf"))
        if isinstance(branches, list) and branches:
            siblings = {name: a[name] for name in a if name not in ("anyOf", "oneOf")}
            if all(disjoint(joined(siblings, x), b, resolve, depth + 1) for x in branches):
                return True
    return _disjoint(one, other, resolve, depth)


def _parts(one: Schema, other: Schema) -> Iterable[tuple[Any, Any]]:
    if not isinstance(one.get("allOf"), list) and not isinstance(other.get("allOf"), list):
        return ()
    sides: list[list[Any]] = []
    for side in (one, other):
        alone = {name: value for name, value in side.items() if name != "allOf"}
        parts = side.get("allOf")
        sides.append([alone, *(parts if isinstance(parts, list) else [])])
    return product(*sides)


def joined(base: Schema, branch: Any) -> Any:
    """Return a schema that allows at least the values valid under both `base` and `branch`: the
    branch with the keywords of `base`, merged only as far as `disjoint` needs.
    """
    if not isinstance(branch, dict) or "$ref" in branch:
        return branch
    both = {**base, **branch}
    if "required" in base and "required" in branch:
        both["required"] = [*base["required"], *branch["required"]]
    for name in ("properties", "patternProperties"):
        if name in base and name in branch:
            both[name] = {**base[name], **branch[name]}
    return both


def _disjoint(one: Schema, other: Schema, resolve: Resolve, depth: int) -> bool:
    kinds = types(one), types(other)
    if kinds[0] is not None and kinds[1] is not None:
        common = set(kinds[0]) & set(kinds[1])
        if {"integer", "number"} <= kinds[0] | kinds[1] and all(
            side & {"integer", "number"} for side in kinds if side
        ):
            common.add("integer")
        if not common:
            return True
    values = values_of(one), values_of(other)
    if values[0] is not None and values[1] is not None:
        return len(_without_values(values[0], values[1])) == len(values[0])
    only = next((kind for kind in kinds if kind is not None and len(kind) == 1), None)
    if only is None:
        return False
    (name,) = only
    if name == "object":
        return _disjoint_objects(one, other, resolve, depth)
    ranges = {
        "string": ("minLength", "maxLength"),
        "array": ("minItems", "maxItems"),
        "integer": ("minimum", "maximum"),
        "number": ("minimum", "maximum"),
    }
    return name in ranges and _apart(one, other, *ranges[name])


def _apart(one: Schema, other: Schema, least: str, most: str) -> bool:
    pairs = (one.get(most), other.get(least)), (other.get(most), one.get(least))
    return any(_number(high, inf) < _number(low, -inf) for high, low in pairs)


def _number(value: Any, otherwise: float) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return value if known else otherwise


def _disjoint_objects(one: Schema, other: Schema, resolve: Resolve, depth: int) -> bool:
    mine, theirs = _names(one), _names(other)
    if any(_forbids(b, name) for a, b in ((mine, other), (theirs, one)) for name in a):
        return True
    shared = [name for name in mine if name in theirs]
    pairs = [
        (_properties(one).get(name, True), _properties(other).get(name, True)) for name in shared
    ]
    return any(disjoint(a, b, resolve, depth + 1) for a, b in pairs)


def _names(schema: Schema) -> list[str]:
    given = schema.get("required")
    return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []


def _properties(schema: Schema) -> dict[str, Any]:
    given = schema.get("properties")
    return given if isinstance(given, dict) else {}


def _forbids(schema: Schema, name: str) -> bool:
    """Return whether a schema allows no object with this property."""
    if name in _properties(schema):
        return _properties(schema)[name] is False
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def beside(base: Schema, branch: Any) -> Any:
    """Return a branch of a choice, joined with the type, keys and properties of `base`, the schema
    that contains the choice.
    """
    if not isinstance(branch, dict):
        return branch
    names = ("type", "required", "properties", "patternProperties", "additionalProperties")
    return joined({name: base[name] for name in names if name in base}, branch)


def narrowed(one: Any, other: Any, resolve: Resolve) -> Schema | None:  # noqa: PLR0911
    """Return a schema that excludes from `one` all values of `other` if both must hold; {} if they
    are disjoint already, None if none can be expressed.
    """
    if disjoint(one, other, resolve):
        return {}
    one, other = resolve(one), resolve(other)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    mine, theirs = _names(one), _names(other)
    for name in sorted(theirs, key=lambda name: name in _properties(one)):
        if name not in mine and types(one) == frozenset({"object"}):
            return {"properties": {name: False}}
        if name not in mine and types(one) is None:
            return {"type": "object", "properties": {name: False}}
    values, gone = values_of(one), values_of(other)
    if values is not None and gone is not None:
        return {"enum": left} if (left := _without_values(values, gone)) else None
    kinds = types(other)
    if kinds is not None and (remaining := without_types(types(one), kinds)):
        return {"type": remaining}
    return None


def other_values(gone: list[Any], known: Any) -> Any:
    """Return a schema of values that are none of `gone`; False if there are none, None if it cannot
    be expressed.

    known  a schema that the values also satisfy
    """
    schema = known if isinstance(known, dict) else {}
    values = values_of(schema)
    if values is not None:
        left = _without_values(values, gone)
        return {"enum": left} if left else False
    if not gone:
        return {}
    kinds = frozenset(map(type_of, gone))
    branches: list[Any] = []
    allowed = types(schema)
    texts = [value for value in gone if isinstance(value, str)]
    if texts and (allowed is None or "string" in allowed):
        longer = {"type": "string", "minLength": max(map(len, texts)) + 1}
        branches += [longer, {"type": "string", "pattern": other_than(texts)}]
    if "boolean" in kinds and (allowed is None or "boolean" in allowed):
        left = _without_values([False, True], gone)
        branches += [{"enum": left}] if left else []
    if rest := without_types(allowed, kinds):
        branches.append({"type": rest})
    if kinds & _NUMBERS and (allowed is None or allowed & _NUMBERS) and all(map(exact, gone)):
        branches += _between(gone, allowed is None or "number" in allowed)
    if not branches:
        return None
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


_NUMBERS = frozenset({"integer", "number"})


def _between(gone: list[Any], fractions: bool) -> list[Schema]:
    """Return schemas of the numbers before, between and after those in `gone`."""
    numbers = sorted({value for value in gone if type_of(value) in _NUMBERS})
    kind = "number" if fractions else "integer"
    places = [None, *numbers, None]
    values = []
    for low, high in pairwise(places):
        part: Schema = {"type": kind}
        part |= {} if low is None else {"exclusiveMinimum": low}
        part |= {} if high is None else {"exclusiveMaximum": high}
        if fractions or low is None or high is None or floor(low) + 1 < high:
            values.append(part)
    return values
