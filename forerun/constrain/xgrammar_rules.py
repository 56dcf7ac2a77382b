"""What xgrammar honours of a grammar, found by trying.

xgrammar ignores keywords that it does not know, and many that it knows where no `type` stands
beside them. Nothing of that may pass here: a keyword is on these lists, or it is refused.
"""

import json
import re
from typing import Any

from forerun.constrain.grammar import Grammar, Kind
from forerun.constrain.rewrite import rewritten
from forerun.constrain.rewrite_flat import flat
from forerun.constrain.rewrite_origin import Fault
from forerun.constrain.schema import schemas
from forerun.constrain.xgrammar_patterns import settled, unwritable
from forerun.errors import RequestError

_NOTES = frozenset({"$defs"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_LENGTHS = frozenset({"minLength", "maxLength"})
_BY_TYPE = {
    "string": _LENGTHS | {"pattern", "format"},
    "number": _NUMBERS,
    "integer": _NUMBERS | {"multipleOf"},
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
    ),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_PYTHON = {
    "string": str,
    "number": int | float,
    "integer": int,
    "array": list,
    "object": dict,
    "boolean": bool,
    "null": type(None),
}
_FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()  # noqa: SIM905
)
MAX_SOURCE = 64 * 1024
"""Bytes of a grammar's source: xgrammar has no limits of its own on what a step costs."""

_ALONE = ("$ref", "const", "enum", "anyOf", "allOf")
_ATOMS = re.compile(r"\\.|\[(?:\\.|[^\\\]])*\]|\.", re.DOTALL)


def check(grammar: Grammar) -> None:
    """Raise RequestError naming what xgrammar would ignore or read differently."""
    size = len(grammar.source.encode())
    if size > MAX_SOURCE:
        raise RequestError(
            f"{grammar.field} has {size} bytes; xgrammar is given at most {MAX_SOURCE}",
            grammar.field,
        )
    if grammar.kind is Kind.GRAMMAR and "::=" not in grammar.source:
        raise RequestError(
            f"{grammar.field} needs a grammar in Lark, which --grammar-backend xgrammar does not "
            "read (tools and structural tags are written in it); use llguidance, or GBNF for a "
            "grammar of your own.",
            grammar.field,
        )


def honoured(schema: Any, lenient: bool) -> tuple[Any, list[str]]:
    """A schema in what xgrammar honours, and the paths of what is left out of a lenient one.

    Raises ValueError naming the path where a strict one asks for more.
    """
    found = rewritten(schema, plain=False, exact=True)
    faults = list(found.unenforced)

    def fault(path: str, keyword: str, why: str) -> None:
        here = f"{path}.{keyword}" if path else keyword
        faults.append(Fault(found.original(here), why))

    out, done = flat(found.schema, fault), set[int]()
    for path, inner in schemas(out):
        while (told := _fault(inner)) is not None:
            place = inner
            *above, keyword = told[0].split(".", 1)
            for name in above:
                place = place[name]
            _leave_out(place, keyword)
            fault(path, told[0], told[1])
        if id(inner) not in done and isinstance(inner.get("pattern"), str):
            inner["pattern"] = settled(inner["pattern"])
        done.add(id(inner))
    if faults and not lenient:
        raise ValueError(f"{faults[0].path} cannot be honoured by xgrammar: {faults[0].why}")
    return out, list(dict.fromkeys(one.path for one in faults))


def _leave_out(schema: dict[str, Any], keyword: str) -> None:
    """Take a keyword away. Keys that fit a pattern then are further ones."""
    gone = schema.pop(keyword)
    if keyword == "patternProperties" and schema.get("additionalProperties") is False:
        kept = [inner for inner in gone.values() if inner is not False]
        schema["additionalProperties"] = {"anyOf": kept} if kept else False


def plain_dots(pattern: str) -> str:
    """A regex in which `.` is no line break, as everywhere but in xgrammar."""
    return _ATOMS.sub(lambda match: r"[^\n]" if match[0] == "." else match[0], pattern)


def _fault(schema: dict[str, Any]) -> tuple[str, str] | None:
    """The first keyword that is not honoured, and why."""
    rules = [name for name in schema if name not in _NOTES]
    alone = next((name for name in _ALONE if name in schema), None)
    if alone is not None:
        return _fault_alone(schema, alone, rules)
    types = _types(schema)
    known = frozenset[str]().union(*(_BY_TYPE.get(name, frozenset()) for name in types))
    for name in rules:
        if name == "type":
            continue
        if name not in known:
            told = any(name in keywords for keywords in _BY_TYPE.values())
            return name, "a type that has it must stand beside it" if told else "not supported"
    return _fault_in_string(schema) or _fault_in_object(schema)


def _fault_alone(schema: dict[str, Any], name: str, rules: list[str]) -> tuple[str, str] | None:
    """Keywords that xgrammar honours alone. A `type` beside values may repeat theirs."""
    for other in rules:
        values = schema["enum"] if name == "enum" else [schema.get(name)]
        repeats = other == "type" and name in ("const", "enum") and _typed(schema, values)
        if other != name and not repeats:
            return other, f"nothing may stand beside {name}"
    if name == "$ref" and not str(schema[name]).startswith("#"):
        return name, "only references into the same schema"
    if name == "allOf" and not (isinstance(schema[name], list) and len(schema[name]) == 1):
        return name, "more than one schema at once"
    return None


def _fault_in_string(schema: dict[str, Any]) -> tuple[str, str] | None:
    if schema.get("format", "uri") not in _FORMATS:
        return "format", f"unknown format {schema['format']!r}"
    part = unwritable(schema.get("pattern", ""))
    if part:
        return "pattern", f"the character {part} has to be escaped in JSON"
    rules: list[str] = [name for name in ("pattern", "format") if name in schema]
    rules += sorted(_LENGTHS & schema.keys())[:1]
    return (rules[-1], f"not together with {rules[0]}") if len(rules) > 1 else None


def _fault_in_object(schema: dict[str, Any]) -> tuple[str, str] | None:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return None  # What it is instead, the compiler says.
    for name in properties:
        if json.dumps(name, ensure_ascii=False) != f'"{name}"':
            return f"properties.{name}", "names that JSON must escape"
    required = schema.get("required", [])
    absent = [name for name in required if name not in properties]
    return ("required", f"{absent[0]!r} is not among the properties") if absent else None


def _types(schema: dict[str, Any]) -> list[str]:
    given = schema.get("type", [])
    return given if isinstance(given, list) else [given]


def _typed(schema: dict[str, Any], values: Any) -> bool:
    """Whether all values are of the schema's types."""
    kinds = [_PYTHON.get(name, type(None)) for name in _types(schema)]
    return isinstance(values, list) and all(
        any(isinstance(value, kind) for kind in kinds)
        and (not isinstance(value, bool) or bool in kinds)
        for value in values
    )
