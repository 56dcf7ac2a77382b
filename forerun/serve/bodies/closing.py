"""Closes JSON schemas: their objects may only have the named keys.

JSON Schema allows further keys in an object, and a small model invents some.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.constrain.grammar import Grammar, Kind
from forerun.constrain.grammar.calls import Rules

_CHOICES = ("anyOf", "oneOf")
_MAPS = ("properties", "patternProperties")
_DEFINED = ("$defs", "definitions")
_SINGLE = ("additionalItems", "additionalProperties")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref")
"""Keywords of an object schema that define its further keys, or combine it with another schema
whose keys it must not forbid.
"""

_PARTS = (
    *("allOf", "anyOf", "oneOf", "if", "then", "else", "not", "contains"),
    *("dependentSchemas", "dependencies"),
)
_ABOUT_OBJECTS = frozenset((*_OPEN, *_PARTS, "properties", "required", "propertyNames"))


def closed(schema: Any) -> Any:
    """Set additionalProperties to false in every object schema that names properties and says
    nothing of others. What describes an object together with other schemas stays: parts of allOf,
    if, then, else and not, choices that stand beside properties, what any of these refers to, and
    an object that such parts give further keys.
    """
    shared = _Shared()
    _closed(schema, shared)
    shared.follow()
    return schema if "" in shared.names else _closed(schema, shared)


@dataclass(slots=True)
class _Shared:
    """References into what describes an object together with other schemas.

    names    the definitions that they name, as `_defined` gives them
    defined  every definition that was seen outside of such schemas, by name
    """

    names: set[str] = field(default_factory=set)
    defined: dict[str, list[Any]] = field(default_factory=dict)

    def follow(self) -> None:
        """Add what the definitions that are shared refer to, and so on."""
        todo = [*self.names]
        while todo:
            within = _Shared()
            for definition in self.defined.pop(todo.pop(), ()):
                _apart(definition, within)
            todo += within.names - self.names
            self.names |= within.names


def _closed(schema: Any, shared: _Shared) -> Any:
    """See closed. Adds what it sees to `shared`; definitions that are shared already stay."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    alone = len(_ABOUT_OBJECTS & schema.keys()) == 1
    for key, value in schema.items():
        found[key] = value
        if key in _DEFINED and isinstance(value, dict):
            found[key] = {}
            for name, one in value.items():
                place = f"{key}/{name}"
                shared.defined.setdefault(place, []).append(one)
                found[key][name] = one if place in shared.names else _closed(one, shared)
        elif key in ("items", "prefixItems") or (alone and _free(key, value)):
            several = isinstance(value, list)
            parts = [_closed(one, shared) for one in (value if several else [value])]
            found[key] = parts if several else parts[0]
        elif key in _MAPS and isinstance(value, dict):
            found[key] = {name: _closed(one, shared) for name, one in value.items()}
        elif key in _SINGLE:
            found[key] = _closed(value, shared)
        elif key in _PARTS:
            _apart(value, shared)
    if isinstance(schema.get("$ref"), str) and not alone:
        shared.names.add(_defined(schema["$ref"]))
    names = schema.get("properties")
    if not isinstance(names, dict) or any(key in schema for key in _OPEN):
        return found
    beside = {key: schema[key] for key in _PARTS if key in schema}
    return {**found, "additionalProperties": False} if _names_only(names, beside) else found


def _free(key: str, value: Any) -> bool:
    """Return whether the schemas under `key` describe objects by themselves, where nothing stands
    beside it.
    """
    return key in _CHOICES or (key == "allOf" and isinstance(value, list) and len(value) == 1)


def _apart(part: Any, shared: _Shared) -> None:
    """Add what a schema that stays as it is refers to: that stays, too."""
    todo = [part]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                shared.names.add(_defined(value["$ref"]))
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _defined(reference: str) -> str:
    """Return `$defs/x` for the reference `#/$defs/x`; empty if it is not a definition."""
    *_, kind, name = ("", "", *reference.split("/"))
    plain = name.replace("~1", "/").replace("~0", "~")
    return f"{kind}/{plain}" if kind in _DEFINED else ""


def _names_only(names: dict[str, Any], parts: dict[str, Any]) -> bool:
    """Return whether parts of a schema give its objects no keys but these."""
    todo: list[Any] = [parts]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            if "$ref" in value or "patternProperties" in value:
                return False
            for key in ("properties", "required"):
                given = value.get(key)
                if isinstance(given, dict | list) and any(str(name) not in names for name in given):
                    return False
            for key in _PARTS:
                inner = value.get(key)
                by_name = key.startswith("depend")
                todo += inner.values() if by_name and isinstance(inner, dict) else [inner]
    return True


def closed_grammar(grammar: Grammar) -> Grammar:
    """Return a grammar of the schema that `closed` makes of it; one that is no schema stays as it
    is.
    """
    if grammar.kind is not Kind.JSON_SCHEMA:
        return grammar
    source = json.dumps(closed(json.loads(grammar.source)), ensure_ascii=False)
    return replace(grammar, source=source)


def closed_rules(rules: Rules) -> Rules:
    """Close the grammar of an answer without tools, as `closed_grammar` does."""
    return replace(rules, grammar=closed_grammar(rules.grammar))
