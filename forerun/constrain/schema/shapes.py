"""Removes keywords of a JSON schema whose values are invalid."""

from collections.abc import Callable
from typing import Any

from forerun.constrain.schema.logic import TYPES
from forerun.constrain.schema.paths import BY_NAME, IN_LIST, SINGLE, below, schemas

Schema = dict[str, Any]
Report = Callable[[str, str, str], None]
"""Called for each keyword that is left out, with (path of its schema, keyword, reason)."""

ANY = "any"
_COUNTS = frozenset(
    "minLength maxLength minItems maxItems minProperties maxProperties "  # noqa: SIM905
    "minContains maxContains".split()
)
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_TEXTS = frozenset({"pattern", "format"})
_NEEDS = frozenset({"dependentRequired", "dependentSchemas", "dependencies"})


def check_types(root: Schema) -> None:
    """Raise ValueError, naming the path, if a `type` is not one of JSON's. `any`, which tools of
    agents use, is ignored: it restricts nothing.
    """
    for path, schema in schemas(root):
        named = schema.get("type", [])
        for name in named if isinstance(named, list) else [named]:
            if name not in TYPES and name != ANY:
                where = below(path, "type")
                raise ValueError(f"{where} is {name!r}; JSON has {', '.join(TYPES)}")


def well_formed(schema: Any, report: Report, path: str = "") -> Any:
    """Return a copy without keywords that have invalid values; `report` is called for each. Counts
    with a fraction of zero (`2.0`) become integers.

    path  of the schema
    """
    if not isinstance(schema, dict):
        return schema
    out = {}
    for name, value in schema.items():
        if name == "type" and (value == ANY or (isinstance(value, list) and ANY in value)):
            continue
        here = below(path, name)
        found, requirement = _value(name, value, report, here)
        if requirement:
            report(path, name, f"it must be {requirement}")
        else:
            out[name] = found
    return out


def _value(name: str, value: Any, report: Report, path: str) -> tuple[Any, str]:  # noqa: PLR0911
    """Return (a keyword's value, ""), or, if it has the wrong type, the expected type as the
    second.
    """
    if name in _COUNTS:
        is_integer = (
            isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
        )
        return (int(value), "") if is_integer and value >= 0 else (None, "an integer of 0 or more")
    if name in _BOUNDS:
        old = isinstance(value, bool) and name.startswith("exclusive")
        return value, "" if old or _number(value) else "a number"
    if name == "multipleOf":
        return value, "" if _number(value) and value > 0 else "a number above 0"
    if name in _TEXTS:
        return value, "" if isinstance(value, str) else "a string"
    if name == "required":
        return value, "" if _names(value) else "a list of names"
    if name == "enum":
        return value, "" if isinstance(value, list) else "a list"
    if name == "uniqueItems":
        return value, "" if isinstance(value, bool) else "true or false"
    return _schemas(name, value, report, path)


def _schemas(name: str, value: Any, report: Report, path: str) -> tuple[Any, str]:
    """Return the same for keywords that contain schemas."""
    if name in SINGLE and not (name == "items" and isinstance(value, list)):
        return well_formed(value, report, path), "" if _schema(value) else "a schema"
    if name in IN_LIST or name == "items":
        allows_empty = value != [] or name not in ("anyOf", "oneOf")
        if not isinstance(value, list) or not all(map(_schema, value)) or not allows_empty:
            return None, "a list of schemas" if allows_empty else "a list of at least one schema"
        return [well_formed(one, report, f"{path}[{i}]") for i, one in enumerate(value)], ""
    if name in BY_NAME or name in _NEEDS:
        if not isinstance(value, dict):
            return None, "an object of schemas"
        out = {}
        for key, one in value.items():
            listed = name in _NEEDS and (_names(one) or isinstance(one, str))
            if listed or (_schema(one) and name != "dependentRequired"):
                out[key] = one if listed else well_formed(one, report, f"{path}.{key}")
            else:
                report(path, key, "it must be a schema")
        return out, ""
    return value, ""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
