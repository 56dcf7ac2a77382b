"""Bounds and values of numbers, as far as llguidance can count."""

import math
from decimal import Decimal
from typing import Any

EXACT = 2**53
"""llguidance reads numbers as 64-bit floats: larger integers are rounded."""

LARGE_BOUND = (
    "a bound beyond 2**53 is honoured up to 2**63 for integers and 10**18 for other numbers, and "
    "where a 64-bit float lies within the bounds"
)
"""Why `bounded` leaves a bound out."""

_INTEGERS = 2**63 - 1024
"""The largest integer below 2**63 that a float can be."""

_PLACES = 6
"""Most digits behind the point of a multiple that is written with fewer, too."""

_DIGITS = 10**18
"""Digits of numbers with fractions that llguidance makes a pattern for."""


def exclusive(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with the bounds of draft 4, where `exclusiveMinimum` is true or false, in
    today's form.
    """
    out = dict(schema)
    for bound, name in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(out.get(name), bool) and out.pop(name) and bound in out:
            out[name] = out.pop(bound)
    return out


def with_fewer_digits(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy under which a multiple may be written with fewer digits behind the point than
    `multipleOf` has: llguidance takes 2.50 for a multiple of .25 and refuses 2.5 (so it does of all
    factors of two digits and more).
    """
    factor = schema.get("multipleOf")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        return schema
    _, digits, exponent = Decimal(repr(factor)).normalize().as_tuple()
    if len(digits) < 2 or not isinstance(exponent, int) or not -_PLACES <= exponent < -1:
        return schema
    least = int("".join(map(str, digits)))
    shared = (math.lcm(least, 10**fewer) for fewer in range(-exponent))
    every = [float(Decimal(one).scaleb(exponent)) for one in shared]
    out = {name: schema[name] for name in schema if name != "multipleOf"}
    choice = {"anyOf": [{"multipleOf": one} for one in every]}
    if out.keys() & {"anyOf", "allOf"}:
        return {**out, "allOf": [*out.get("allOf", []), choice]}
    return out | choice


def bounded(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy with bounds that llguidance does not round, the same or narrower, and the names
    of those that have none (see LARGE_BOUND).
    """
    out, faults, narrowed = dict(schema), list[str](), list[str]()
    for name, sign in (
        ("minimum", 1),
        ("exclusiveMinimum", 1),
        ("maximum", -1),
        ("exclusiveMaximum", -1),
    ):
        value = out.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if abs(value) <= EXACT:
            continue
        del out[name]
        limit = _INTEGERS if schema.get("type") == "integer" else _DIGITS
        inside = _inside(value, sign, name.startswith("exclusive"), limit)
        if inside is None:
            faults.append(name)
            continue
        plain = "minimum" if sign > 0 else "maximum"
        out[plain] = max(out.get(plain, inside) * sign, inside * sign) * sign
        narrowed.append(name)
    if narrowed and out.get("minimum", -math.inf) > out.get("maximum", math.inf):
        for name in narrowed:
            out.pop("minimum" if "inimum" in name else "maximum", None)
        faults += narrowed
    return out, faults


def _inside(value: float, sign: int, exclusive: bool, limit: int) -> int | None:
    """Return a bound at or beyond `value` in the direction of `sign` that is exact."""
    at = sign * (math.ceil(value * sign) if isinstance(value, float) else value * sign)
    at += sign if exclusive else 0
    if at * sign > limit:
        return None
    if at * sign < -limit:
        return -limit * sign
    rounded = float(at)
    if int(rounded) * sign < at * sign:
        rounded = math.nextafter(rounded, math.inf * sign)
    return int(rounded)


def exact(value: Any) -> bool:
    """Return whether llguidance writes this constant, numbers within it included, unchanged. From
    2**63 on it writes the shortest decimal of the same float.
    """
    if isinstance(value, dict):
        return all(map(exact, value.values()))
    if isinstance(value, list):
        return all(map(exact, value))
    if isinstance(value, int) and abs(value) > EXACT:
        return abs(value) < 2**63 and int(float(value)) == value
    return True
