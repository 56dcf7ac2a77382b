"""JSON schemas whose objects have no keys but those that are named.

JSON Schema lets an object have any further keys, and a small model invents some.
"""

import json
from dataclasses import replace
from typing import Any

from forerun.constrain.calls import Rules
from forerun.constrain.grammar import Grammar, Kind

_LISTS = ("anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref")
"""An object schema with one of these says itself what further keys there are, or shares the
object with another schema, whose keys it must not forbid."""


def closed(schema: Any) -> Any:
    """The schema with additionalProperties false in every object schema that names properties and
    says nothing of others. Parts of allOf, if, then, else and not stay: they describe an object
    together with what stands around them.
    """
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _LISTS and isinstance(value, list):
            found[key] = [closed(one) for one in value]
        elif key in _MAPS and isinstance(value, dict):
            found[key] = {name: closed(one) for name, one in value.items()}
        else:
            found[key] = closed(value) if key in _SINGLE else value
    if isinstance(schema.get("properties"), dict) and not any(key in schema for key in _OPEN):
        found["additionalProperties"] = False
    return found


def closed_grammar(grammar: Grammar) -> Grammar:
    """The same for a grammar; one that is no schema stays as it is."""
    if grammar.kind is not Kind.JSON_SCHEMA:
        return grammar
    source = json.dumps(closed(json.loads(grammar.source)), ensure_ascii=False)
    return replace(grammar, source=source)


def closed_rules(rules: Rules) -> Rules:
    """The same for the rules of an answer without tools."""
    return replace(rules, grammar=closed_grammar(rules.grammar))
