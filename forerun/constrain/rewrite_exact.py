"""Integers that llguidance would round, written as patterns.

llguidance reads the numbers of a schema as 64-bit floats. Where a constant or a bound lies beyond
what those count, the value becomes a terminal that spells its digits, and the objects, arrays and
choices around it become rules of a Lark grammar. Everything else in the schema stays JSON schema
inside of that grammar.
"""

import json
from typing import Any

from forerun.constrain.integer_range import integers
from forerun.constrain.limits import WHITESPACE, json_options
from forerun.constrain.rewrite_keys import with_plain_keys
from forerun.constrain.rewrite_number import EXACT, bounded, exact

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_ARRAY = frozenset({"type", "items", "prefixItems", "minItems", "maxItems"})
_OTHERS = ("string", "boolean", "null", "array", "object")
_REFERENCE = "#/$defs/"


class UnwritableError(Exception):
    """Something stands around a large integer that has no rule here."""


def has_large(value: Any) -> bool:
    """Whether a schema, as it was sent, has an integer that would be rounded."""
    if isinstance(value, dict | list):
        return any(map(has_large, value.values() if isinstance(value, dict) else value))
    return not exact(value) or _beyond(value)


def exact_rules(schema: Any, one_line: bool, name: str, plain: bool = True) -> list[str]:
    """Lark rules of a rewritten schema's texts; the first is called `name`. plain: see
    rewritten, which the schema has not been.

    Raises UnwritableError where that cannot be said.
    """
    return _Writer(schema, one_line, name, plain).rules()


class _Writer:
    """The rules of one schema, each written once."""

    def __init__(self, schema: Any, one_line: bool, name: str, plain: bool) -> None:
        self._defined: dict[str, Any] = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._one_line, self._name, self._plain = one_line, name, plain
        self._schema = _without(schema, "$defs")
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        self._count = 0
        self._large_names: set[str] = set()
        known = -1
        while known < len(self._large_names):
            known = len(self._large_names)
            for each, one in self._defined.items():
                if each not in self._large_names and self._large(one):
                    self._large_names.add(each)
        # White space before and behind what stands between two values, or within brackets.
        self._space = "" if one_line else f"{name.upper()}_WS?"

    def rules(self) -> list[str]:
        first = self._value(self._schema)
        head = [f"{self._name}: {first}"]
        if self._space:
            space = WHITESPACE.replace("{0,2}", "{1,2}")
            head.append(f"{self._name.upper()}_WS: /{space}/")
        return head + self._rules

    def _rule(self, body: str) -> str:
        self._count += 1
        self._rules.append(f"{self._name}_{self._count}: {body}")
        return f"{self._name}_{self._count}"

    def _value(self, schema: Any) -> str:
        """The name of a rule, or a terminal."""
        write = self._json
        if self._large(schema):
            kinds, keys = schema.get("type"), schema.keys()
            if "$ref" in keys:
                write = self._reference
            elif "const" in keys or "enum" in keys:
                write = self._choice
            elif keys == {"anyOf"}:
                write = self._any
            elif kinds == "object" and keys <= _OBJECT:
                write = self._object
            elif kinds == "array" and keys <= _ARRAY:
                write = self._array
            else:
                write = self._number
        return write(schema)

    def _any(self, schema: dict[str, Any]) -> str:
        return self._rule(" | ".join(map(self._value, schema["anyOf"])))

    def _large(self, schema: Any) -> bool:
        """Whether a rule is needed here or below."""
        if not isinstance(schema, dict):
            return False
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        if not all(map(exact, values)) or bounds_are_large(schema):
            return True
        if _referred(schema) in self._large_names:
            return True
        inner = [*schema.get("properties", {}).values()]
        inner += schema.get("patternProperties", {}).values()
        for key in ("items", "additionalProperties"):
            inner.append(schema.get(key))
        for key in ("anyOf", "allOf", "prefixItems"):
            inner += schema.get(key, [])
        return any(map(self._large, inner))

    def _json(self, schema: Any) -> str:
        """A rule of a schema that llguidance reads as it is."""
        if schema is True or schema == {}:
            schema = {}
        if not isinstance(schema, dict):
            raise UnwritableError
        needed = self._needed(schema)
        whole = {**schema, "x-guidance": json_options(self._one_line)}
        whole |= {"$defs": needed} if needed else {}
        key = json.dumps(whole, sort_keys=True)
        if key not in self._names:
            if self._plain:
                whole = json.loads(json.dumps(whole))
                with_plain_keys(whole)
            self._names[key] = self._rule(f"%json {json.dumps(whole)}")
        return self._names[key]

    def _needed(self, schema: Any) -> dict[str, Any]:
        """The definitions that a schema refers to, directly or not."""
        needed: dict[str, Any] = {}
        todo = [schema]
        while todo:
            part = todo.pop()
            if isinstance(part, dict):
                todo += part.values()
                name = _referred(part)
                if name in self._defined and name not in needed:
                    needed[name] = self._defined[name]
                    todo.append(needed[name])
            elif isinstance(part, list):
                todo += part
        return needed

    def _reference(self, schema: dict[str, Any]) -> str:
        name = _referred(schema)
        if name is None or schema.keys() != {"$ref"} or name not in self._defined:
            raise UnwritableError
        if name not in self._names:
            self._names[name] = f"{self._name}_of_{name}"
            self._rules.append(f"{self._names[name]}: {self._value(self._defined[name])}")
        return self._names[name]

    def _choice(self, schema: dict[str, Any]) -> str:
        """One of some constants."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if schema.keys() - {"const", "enum", "type"} or {"const", "enum"} <= schema.keys():
            raise UnwritableError
        kinds = schema.get("type", ["integer", "number", *_OTHERS])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        plain = [value for value in values if exact(value)]
        parts = [self._json({**schema, "enum": plain})] if plain and "enum" in schema else []
        for value in values:
            if exact(value):
                continue
            if isinstance(value, dict | list):
                if ("object" if isinstance(value, dict) else "array") in kinds:
                    parts.append(self._value(_as_schema(value)))
            elif {"integer", "number"} & {*kinds}:
                parts.append(f"/{value}/")
        if not parts:
            raise UnwritableError
        return self._rule(" | ".join(parts))

    def _number(self, schema: dict[str, Any]) -> str:
        """Integers within bounds; beside them what else the type allows. Of numbers, integers."""
        kinds = schema.get("type", ["integer", *_OTHERS])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        others = [kind for kind in kinds if kind not in ("integer", "number")]
        bounds = {name: schema[name] for name in _BOUNDS if name in schema}
        rest = _without(schema, *bounds, "type")
        if not bounds or (rest and not others) or "multipleOf" in rest:
            raise UnwritableError
        low = [bounds[name] for name in ("minimum",) if name in bounds]
        low += [bounds[name] + 1 for name in ("exclusiveMinimum",) if name in bounds]
        high = [bounds[name] for name in ("maximum",) if name in bounds]
        high += [bounds[name] - 1 for name in ("exclusiveMaximum",) if name in bounds]
        if not all(isinstance(bound, int) for bound in low + high):
            raise UnwritableError
        pattern = integers(max(low, default=None), min(high, default=None))
        parts = [f"/{pattern}/"] if pattern and len(others) < len(kinds) else []
        if others:
            parts.append(self._value({**rest, "type": others}))
        if not parts:
            raise UnwritableError
        return self._rule(" | ".join(parts))

    def _object(self, schema: dict[str, Any]) -> str:
        """Keys in the schema's order, then further ones."""
        required = schema.get("required", [])
        keys = [(key, one) for key, one in schema.get("properties", {}).items() if one is not False]
        if not {*required} <= {key for key, _ in keys}:
            raise UnwritableError
        further = schema.get("additionalProperties", True)
        more = ""
        if further is not False:
            more = self._pair(self._further_key(schema.get("properties", {})), further)
        # What may follow where nothing has been written yet, and where something has.
        comma = self._comma()
        none = self._rule(f'{more} ({comma} {more})* | ""' if more else '""')
        some = self._rule(f"({comma} {more})*" if more else '""')
        for key, one in reversed(keys):
            pair = self._pair(_text(json.dumps(key, ensure_ascii=False)), one)
            skipped = key not in required
            none = self._rule(f"{pair} {some}" + (f" | {none}" if skipped else ""))
            some = self._rule(f"({comma} {pair}){'?' if skipped else ''} {some}")
        return self._rule(f'"{{" {self._space} {none} {self._space} "}}"')

    def _pair(self, key: str, value: Any) -> str:
        colon = '": "' if self._one_line else f'{self._space} ":" {self._space}'
        return self._rule(f"{key} {colon} {self._value(value)}")

    def _further_key(self, listed: Any) -> str:
        """A terminal for keys that are not listed, without escapes."""
        terminal = f"{self._name.upper()}_KEY{len(self._rules)}"
        known = " | ".join(_text(json.dumps(key, ensure_ascii=False)) for key in listed)
        but = f" & ~({known})" if known else ""
        self._rules.append(f'{terminal}: /"[^"\\\\\\x00-\\x1f\\x7f]*"/{but}')
        return terminal

    def _array(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first = schema.get("prefixItems", [])
        further = schema.get("items", True)
        if most is not None and most <= len(first):
            first, further = first[:most], False
        comma, space = self._comma(), self._space
        left = max(least - len(first), 0)
        if further is False:
            if left:
                raise UnwritableError
            some = none = self._rule('""')
        else:
            item = self._value(further)
            up_to = "" if most is None else most - len(first)
            some = self._rule(f"({comma} {item}){{{left},{up_to}}}")
            fewer = "" if most is None else most - 1
            none = self._rule(
                f"{item} ({comma} {item}){{{max(left - 1, 0)},{fewer}}}"
                + ("" if least else ' | ""')
            )
        for place, one in reversed([*enumerate(first)]):
            end = ' | ""' if place >= least else ""
            value = self._value(one)
            none = self._rule(f"{value} {some}{end}")
            some = self._rule(f"{comma} {value} {some}{end}")
        return self._rule(f'"[" {space} {none} {space} "]"')

    def _comma(self) -> str:
        return '", "' if self._one_line else f'{self._space} "," {self._space}'


def bounds_are_large(schema: dict[str, Any]) -> bool:
    """Whether bounds lie where llguidance cannot tell all integers apart."""
    if not any(_beyond(schema.get(name)) for name in _BOUNDS):
        return False
    kinds = schema.get("type")
    return (
        kinds == "integer"
        or (isinstance(kinds, list) and "number" not in kinds)
        or bool(bounded(schema)[1])
    )


def _beyond(bound: Any) -> bool:
    """A power of two may be written exactly, and what lies beside it still not."""
    return isinstance(bound, int) and abs(bound) > EXACT


def _as_schema(value: Any) -> dict[str, Any]:
    """A schema of this value alone."""
    if isinstance(value, dict):
        inner = {key: _as_schema(one) for key, one in value.items()}
        return {
            "type": "object",
            "properties": inner,
            "required": [*inner],
            "additionalProperties": False,
        }
    if isinstance(value, list):
        parts = [*map(_as_schema, value)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    return {"const": value}


def _referred(schema: dict[str, Any]) -> str | None:
    name = schema.get("$ref")
    return name.removeprefix(_REFERENCE) if isinstance(name, str) else None


def _without(schema: Any, *names: str) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {name: one for name, one in schema.items() if name not in names}


def _text(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)
