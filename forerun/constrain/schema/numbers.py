"""Rewrites bounds and values of numbers within the precision of llguidance."""

import math
from decimal import Decimal
from typing import Any

EXACT = 2**53
"""llguidance reads numbers as 64-bit floats: larger integers are rounded."""

LARGE_BOUND = (
    "a bound beyond 2**53 is honoured up to 2**63 for integers and 10**18 for other numbers, and "
    "where a 64-bit float lies within the bounds"
)
"""Reason for which `bounded` leaves a bound out."""

_INTEGERS = 2**63 - 1024
"""The largest integer below 2**63 that a 64-bit float holds exactly."""

_PLACES = 6
"""Most decimal places of a multiple that may be written with fewer, too."""

_DIGITS = 10**18
"""Largest number with a fraction for which llguidance makes a pattern."""


def exclusive(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which bounds of draft 4, where `exclusiveMinimum` is true or false, have
    today's form.
    """
    out = dict(schema)
    for bound, name in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(out.get(name), bool) and out.pop(name) and bound in out:
            out[name] = out.pop(bound)
    return out


def with_fewer_digits(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy under which a multiple may be written with fewer decimal places than
    `multipleOf` has: llguidance accepts 2.50 as a multiple of .25 and rejects 2.5 (likewise for all
    factors of two or more places).
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
    """Return a copy with bounds that llguidance does not round, the same or narrower ones, and the
    names of the bounds that are left out (see LARGE_BOUND).
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
    """Return the nearest exact bound at or beyond `value` in the direction of `sign`; None if it
    exceeds `limit`.
    """
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
    """Return whether llguidance writes this constant, including numbers inside it, unchanged. From
    2**63 on it writes the shortest decimal of the same float.
    """
    if isinstance(value, dict):
        return all(map(exact, value.values()))
    if isinstance(value, list):
        return all(map(exact, value))
    if isinstance(value, int) and abs(value) > EXACT:
        return abs(value) < 2**63 and int(float(value)) == value
    return True
