"""Rewrites keywords about the items of arrays in keywords that llguidance enforces."""

from collections.abc import Iterator
from itertools import combinations, permutations
from typing import Any

from forerun.constrain.schema.logic import Resolve, exact_values, key, types, without_types

MAX_ORDERED = 4
"""Most values of which every order is allowed if items must differ."""

MAX_VALUES = 6
"""Most values of which the schema's own order is allowed."""

Schema = dict[str, Any]


def arrays(out: Schema, raw: Schema, contains: Any, resolve: Resolve) -> tuple[Schema, list[str]]:
    """Return a copy of `out` with `uniqueItems`, `contains` and `unevaluatedItems` of `raw` in
    keywords that llguidance enforces, and the names of those that it cannot enforce.

    out       rewritten so far
    raw       the same schema as the client sent it
    contains  the rewritten `contains`; None = there is none
    """
    faults: list[str] = []
    if raw.get("uniqueItems") is True:
        out = _unique(out, raw, resolve, faults)
    if contains is not None:
        out = _containing(out, raw, contains, faults)
    if raw.get("unevaluatedItems", True) not in (True, {}):
        if raw["unevaluatedItems"] is False and not any(
            name in raw for name in ("allOf", "anyOf", "oneOf", "$ref", "if", "contains")
        ):
            out = {**out, "items": out.get("items", False)}
        else:
            faults.append("unevaluatedItems")
    return out, faults


def _unique(out: Schema, raw: Schema, resolve: Resolve, faults: list[str]) -> Schema:
    most = raw.get("maxItems")
    if isinstance(most, int) and most <= 1:
        return out
    values = exact_values(out.get("items"))  # Without keywords that were left out.
    if values is None:
        values = exact_values(resolve(raw.get("items")))
    if values is None or raw.get("prefixItems") or len(values) > MAX_VALUES:
        faults.append("uniqueItems")
        return out
    values = list({key(value): value for value in values}.values())
    least = raw.get("minItems", 0)
    branches: list[Schema] = [
        {"type": "array", "prefixItems": [{"const": value} for value in chosen], "items": False,
         "minItems": len(chosen), "maxItems": len(chosen)}
        for chosen in _chosen(values)
        if least <= len(chosen) <= (most if isinstance(most, int) else len(values))
    ]  # fmt: skip
    rest = {
        name: out[name] for name in out if name not in ("items", "minItems", "maxItems", "type")
    }
    others = without_types(types(raw), frozenset({"array"}))
    branches += [{"type": others}] if others else []
    return {**rest, "allOf": [*rest.get("allOf", []), {"anyOf": branches}]}


def _chosen(values: list[Any]) -> Iterator[tuple[Any, ...]]:
    arrange = permutations if len(values) <= MAX_ORDERED else combinations
    for size in range(len(values) + 1):
        yield from arrange(values, size)


def _containing(out: Schema, raw: Schema, contains: Any, faults: list[str]) -> Schema:
    """Return the schema with the items that must be contained as the first ones."""
    least = raw.get("minContains", 1)
    if "maxContains" in raw:
        faults.append("maxContains")
    if least == 0:
        return out
    if raw.get("prefixItems") or isinstance(raw.get("items"), list) or not isinstance(least, int):
        faults.append("contains")
        return out
    items = out.get("items", True)
    first = contains if items is True else {"allOf": [items, contains]}
    enough = max(least, out.get("minItems", 0))
    return {**out, "prefixItems": [first] * least, "items": items, "minItems": enough}
