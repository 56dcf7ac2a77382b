"""Closes JSON schemas: objects may only have the listed keys. JSON Schema allows further keys by
default, and a small model invents some.
"""

import json
import re
from dataclasses import replace
from typing import Any

from forerun.constrain.grammar import Grammar, Kind
from forerun.constrain.grammar.calls import Rules

_CHOICES = ("anyOf", "oneOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_DEFINED = ("$defs", "definitions")
_SINGLE = ("additionalItems", "additionalProperties")
_FURTHER = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties"))
_BESIDE = frozenset(
    "$ref allOf anyOf oneOf if then else not contains dependentSchemas dependencies".split()  # noqa: SIM905
)
"""Keywords that combine an object schema with others, whose keys it must not forbid."""
_ABOUT_OBJECTS = _FURTHER | _BESIDE | {"properties", "required", "propertyNames"}


_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')


def closed(schema: Any) -> Any:
    """Return a copy with additionalProperties false in every object schema that lists properties,
    has no keyword for other keys, and is not combined with other schemas. Schemas inside such a
    combination stay unchanged; so do all definitions if it refers to another schema, and the whole
    document if it refers to anything else in it.
    """
    combined: list[Any] = []
    found = _closed(schema, combined, _DEFINED)
    if not _REFERENCE.search(json.dumps(combined)):
        return found
    every = _REFERENCE.findall(json.dumps(schema))
    defined = all(one.startswith(("#/$defs/", "#/definitions/")) for one in every)
    return _closed(schema, [], ()) if defined else schema


def _closed(schema: Any, combined: list[Any], defined: tuple[str, ...]) -> Any:
    """Implement `closed`. Adds to `combined` what is combined with other schemas; `defined` are the
    keywords whose definitions are closed.
    """
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {**schema}
    alone = len(_ABOUT_OBJECTS & schema.keys()) == 1
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            if key in defined or key not in _DEFINED:
                found[key] = {name: _closed(one, combined, defined) for name, one in value.items()}
        elif key in ("items", "prefixItems") or (alone and _free(key, value)):
            several = isinstance(value, list)
            parts = [_closed(one, combined, defined) for one in (value if several else [value])]
            found[key] = parts if several else parts[0]
        elif key in _SINGLE:
            found[key] = _closed(value, combined, defined)
        elif key in _BESIDE and not (alone and key == "$ref"):
            combined.append({key: value})
    if isinstance(schema.get("properties"), dict) and not (_FURTHER | _BESIDE) & schema.keys():
        found["additionalProperties"] = False
    return found


def _free(key: str, value: Any) -> bool:
    """Return whether the schemas under `key` describe objects by themselves, if no keyword next to
    it combines them.
    """
    return key in _CHOICES or (key == "allOf" and isinstance(value, list) and len(value) == 1)


def closed_grammar(grammar: Grammar) -> Grammar:
    """Return the grammar with its schema `closed`; a grammar that is no schema is returned
    unchanged.
    """
    if grammar.kind is not Kind.JSON_SCHEMA:
        return grammar
    source = json.dumps(closed(json.loads(grammar.source)), ensure_ascii=False)
    return replace(grammar, source=source)


def closed_rules(rules: Rules) -> Rules:
    """Close the grammar of an answer without tools, as `closed_grammar` does."""
    return replace(rules, grammar=closed_grammar(rules.grammar))
