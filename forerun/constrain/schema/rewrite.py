"""Rewrites JSON schemas in the keywords that llguidance enforces.

A keyword that llguidance lacks can often be expressed by others: a `oneOf` whose branches exclude
each other is an `anyOf`, a dependency is a choice of two objects, a format is a pattern. Every
rewriting allows the same values or fewer, never more. Keywords that cannot be expressed are left
out and reported, with their paths.
"""

import re
from collections.abc import Callable
from typing import Any

from forerun.constrain.schema.arrays import arrays
from forerun.constrain.schema.choices import conditional, exclusive_choice, negated
from forerun.constrain.schema.keys import Free, with_free_keys
from forerun.constrain.schema.logic import NOTES, type_of
from forerun.constrain.schema.numbers import (
    LARGE_BOUND,
    bounded,
    exact,
    exclusive,
    with_fewer_digits,
)
from forerun.constrain.schema.objects import counted, dependencies, depending, named
from forerun.constrain.schema.origins import Origins, Rewritten, UnenforcedKeyword
from forerun.constrain.schema.paths import below
from forerun.constrain.schema.references import References, SchemaPlace
from forerun.constrain.schema.shapes import check_types, well_formed
from forerun.constrain.schema.strings import (
    FORMATS,
    NATIVE,
    NOTED_FORMATS,
    SAME,
    SECONDS,
    Unenforceable,
    only_lengths,
    plain_patterns,
)

HOISTED = 20
"""Levels below which a schema is moved to `$defs`: llguidance reads at most 128 levels."""

TOO_LARGE = "the schema would be too large with it"
TOO_NARROW = "no text would remain"

_COPIED = (
    "type", "const", "enum", "required", "minProperties", "maxProperties", "minItems", "maxItems",
    "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "additionalProperties",
)  # fmt: skip
_APPLICATORS = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "patternProperties")
_MERGED = re.compile(r"(?:^|\.)(?:(?:all|any|one)Of\[\d+\]|then|else|(?:depend|\$?def)\w+\.[^.]*)$")
"""Matches the end of the path of a schema that may have to hold together with others."""


def rewritten(
    schema: Any, plain: bool = True, brief: bool = False, free: Free = "open"
) -> Rewritten:
    """Rewrite a schema in keywords that llguidance enforces, so that all its values are valid under
    `schema` except for what `unenforced` names.

    plain  forbid keys with escapes, which could hide a listed one (keys.py)
    brief  leave out conditions, negations and `contains`, whose rewriting may grow fast or leave
           no value
    free   whether optional keys come in any order (keys.py)

    Raises ValueError for an unknown `type`, which is an error and is not left out.
    """
    if not isinstance(schema, dict):
        return Rewritten(schema)
    check_types(schema)
    rewriter = Rewriter(schema, brief)
    result = rewriter.schema(rewriter.root, "")
    if rewriter.defined and isinstance(result, dict):
        result = {**result, "$defs": rewriter.defined}
        rewriter.origins.note(result, "", rewriter.root)
    if isinstance(result, dict):
        with_free_keys(result, plain, "never" if brief else free)
    return Rewritten(result, tuple(rewriter.faults), rewriter.origins)


class Rewriter:
    """Rewrites one document.

    root     the document, without malformed keywords
    defined  schemas that others refer to, by name
    origins  where the rewritten schemas came from
    faults   the keywords left out so far
    brief    see rewritten
    """

    def __init__(self, root: dict[str, Any], brief: bool) -> None:
        self.brief = brief
        self.defined: dict[str, Any] = {}
        self.origins = Origins()
        self.faults: list[UnenforcedKeyword] = []
        self.root = well_formed(root, self.fault)
        self._references = References(self.root)
        self._names: dict[int, str] = {}
        self._depth = 0

    def fault(self, path: str, keyword: str, why: str) -> None:
        """Record that `keyword` of the schema at `path` is left out, and why; each only once."""
        keyword_fault = UnenforcedKeyword(below(path, keyword), why)
        if keyword_fault not in self.faults:
            self.faults.append(keyword_fault)

    def resolve(self, schema: Any) -> Any:
        """Return the schema that `schema` refers to, in the client's form, together with the
        keywords beside the reference; `schema` itself if it is no reference or refers to another
        document.
        """
        for _ in range(8):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            place = self._references.found(schema, schema["$ref"])
            if place is None:
                break
            beside = {name: schema[name] for name in schema if name != "$ref"}
            if self._references.alone or not isinstance(place.schema, dict) or not beside:
                schema = place.schema
            elif place.schema.keys() & beside.keys() - NOTES:
                return {"allOf": [place.schema, beside]}
            else:
                return {**place.schema, **beside}
        return schema

    def schema(self, raw: Any, path: str) -> Any:
        """Rewrite `raw`, the schema at `path`. Returns False if no value is valid. May add to
        `defined` and `faults`.
        """
        if not isinstance(raw, dict):
            return raw
        self._depth += 1
        try:
            if self._depth % HOISTED == 0:
                return self._reference(SchemaPlace(raw, path), fresh=True)
            return self._rewritten(raw, path)
        finally:
            self._depth -= 1

    def _rewritten(self, raw: dict[str, Any], path: str) -> Any:
        out: dict[str, Any] = {}
        if "$ref" in raw or "$dynamicRef" in raw or "$recursiveRef" in raw:
            out = self._referring(raw, path)
            if self._references.alone:
                self.origins.note(out, path, raw)
                return out
        out |= {name: raw[name] for name in _COPIED if name in raw}
        self._inner(raw, path, out)
        for rule in _RULES:
            result = rule(self, raw, path, out)
            if result is False:
                return False
            out = result
        self.origins.note(out, path, raw)
        return out

    def _referring(self, raw: dict[str, Any], path: str) -> dict[str, Any]:
        name = next(key for key in ("$ref", "$dynamicRef", "$recursiveRef") if key in raw)
        if name == "$ref":
            place = self._references.found(raw, raw[name])
        else:
            place = self._references.dynamic(raw)
        if place is None or not isinstance(place.schema, dict | bool):
            why = f"{raw[name]!r} is not in the schema" if name == "$ref" else "not supported"
            self.fault(path, name, why)
            return {}
        if isinstance(place.schema, bool):
            return {} if place.schema else {"type": []}
        return self._reference(place)

    def _reference(self, place: SchemaPlace, fresh: bool = False) -> dict[str, Any]:
        """Return a reference to a schema, which is rewritten once."""
        name = self._names.get(id(place.schema))
        if name is None or (fresh and name not in self.defined):
            name = self._names[id(place.schema)] = f"d{len(self.defined)}"
            self.defined[name] = True
            depth, self._depth = self._depth, 0
            self.defined[name] = self._rewritten(place.schema, place.path)
            self._depth = depth
        return {"$ref": f"#/$defs/{name}"}

    def under(self, raw: dict[str, Any], path: str, key: str) -> Any:
        """Rewrite the schema under `key` of `raw`, the schema at `path`."""
        return self.schema(raw[key], below(path, key))

    def each(self, raw: dict[str, Any], path: str, key: str) -> list[Any]:
        """Rewrite the schemas in the list under `key` of `raw`."""
        where = below(path, key)
        return [self.schema(one, f"{where}[{i}]") for i, one in enumerate(raw[key])]

    def _inner(self, raw: dict[str, Any], path: str, out: dict[str, Any]) -> None:
        """Rewrite the schemas below this one."""
        if isinstance(raw.get("properties"), dict):
            inner = raw["properties"].items()
            out["properties"] = {
                name: self.schema(one, below(path, f"properties.{name}")) for name, one in inner
            }
        for key in ("anyOf", "allOf", "prefixItems", "items"):
            if isinstance(raw.get(key), list):
                out["prefixItems" if key == "items" else key] = self.each(raw, path, key)
        further = "additionalItems" if isinstance(raw.get("items"), list) else "items"
        if further in raw and not isinstance(raw[further], list):
            out["items"] = self.under(raw, path, further)
        if "additionalProperties" in raw:
            out["additionalProperties"] = self.under(raw, path, "additionalProperties")


Rule = Callable[[Rewriter, dict[str, Any], str, dict[str, Any]], Any]
"""One rewriting step: (rewriter, a schema as the client sent it, its path, the result so far, which
may be changed) -> the new result; False = no value is valid.
"""


def also(out: dict[str, Any], *schemas: Any) -> dict[str, Any]:
    """Return a copy of `out` under which `schemas` must hold too (`allOf`); schemas that always
    hold are dropped.
    """
    more = [schema for schema in schemas if schema not in ({}, True)]
    return {**out, "allOf": [*out.get("allOf", []), *more]} if more else out


def _values(rewriter: Rewriter, raw: dict[str, Any], path: str, out: dict[str, Any]) -> Any:
    if "const" in out and not exact(out["const"]):
        rewriter.fault(path, "const", "integers beyond 2**53 would be rounded")
        out.setdefault("type", type_of(out.pop("const")))
    if isinstance(out.get("enum"), list) and not all(map(exact, out["enum"])):
        rewriter.fault(path, "enum", "integers beyond 2**53 would be rounded")
        kinds = dict.fromkeys(map(type_of, out.pop("enum")))
        out.setdefault("type", [*kinds])
    return out


def _numbers(rewriter: Rewriter, raw: dict[str, Any], path: str, out: dict[str, Any]) -> Any:
    out = exclusive(out)
    out, faults = bounded(out)
    for name in faults:
        rewriter.fault(path, name, LARGE_BOUND)
    return with_fewer_digits(out)


def _strings(rewriter: Rewriter, raw: dict[str, Any], path: str, out: dict[str, Any]) -> Any:
    pattern = raw.get("pattern")
    span = only_lengths(pattern) if isinstance(pattern, str) else None
    if span is not None:
        out = _of_length({name: out[name] for name in out if name != "pattern"}, *span)
    elif isinstance(pattern, str):
        try:
            first, *more = plain_patterns(pattern)
        except Unenforceable as error:
            rewriter.fault(path, "pattern", str(error))
        else:
            out = also({**out, "pattern": first}, *({"pattern": one} for one in more))
    name = raw.get("format")
    name = SAME.get(name, name) if isinstance(name, str) else None
    if name in NATIVE:
        out["format"] = name
        if name in ("date-time", "time"):
            whole = {"pattern": SECONDS if name == "date-time" else f"^..{SECONDS}"}
            out = also(out, whole) if "pattern" in out else out | whole
    elif name in FORMATS:
        format = {"pattern": FORMATS[name]}
        out = also(out, format) if "pattern" in out else out | format
    elif name is not None and name not in NOTED_FORMATS:
        rewriter.fault(path, "format", f"unknown format {name!r}")
    return out


def _of_length(schema: dict[str, Any], least: int, most: int | None) -> dict[str, Any]:
    """Return a copy for strings of at least `least` and at most `most` characters."""
    bounds = {"minLength": max(least, schema.get("minLength", 0))}
    if most is not None:
        bounds["maxLength"] = min(most, schema.get("maxLength", most))
    return schema | {name: bound for name, bound in bounds.items() if bound or name in schema}


def _patterns(rewriter: Rewriter, raw: dict[str, Any], path: str, out: dict[str, Any]) -> Any:
    """Rewrite patterns of keys. If a pattern cannot be parsed, its keys are forbidden, provided
    that further keys are not allowed.
    """
    given = raw.get("patternProperties")
    if not isinstance(given, dict):
        return out
    here = below(path, "patternProperties")
    patterns: dict[str, Any] = {}
    for pattern, inner in given.items():
        try:
            (plain,) = plain_patterns(pattern)
            patterns[plain] = rewriter.schema(inner, f"{here}.{pattern}")
        except (Unenforceable, ValueError) as error:
            if out.get("additionalProperties") is not False:
                why = str(error) if isinstance(error, Unenforceable) else "look-ahead in a key"
                rewriter.fault(here, pattern, why)
    return {**out, "patternProperties": patterns} if patterns else out


def _arrays(rewriter: Rewriter, raw: dict[str, Any], path: str, out: dict[str, Any]) -> Any:
    if rewriter.brief and "contains" in raw:
        rewriter.fault(path, "contains", TOO_NARROW)
        raw = {name: raw[name] for name in raw if name != "contains"}
    contains = rewriter.under(raw, path, "contains") if "contains" in raw else None
    out, faults = arrays(out, raw, contains, rewriter.resolve)
    for name in faults:
        rewriter.fault(path, name, "not supported here")
    return out


def _keys(rewriter: Rewriter, raw: dict[str, Any], path: str, out: dict[str, Any]) -> Any:
    if "unevaluatedProperties" in raw and raw["unevaluatedProperties"] not in (True, {}):
        if any(name in raw for name in _APPLICATORS):
            rewriter.fault(path, "unevaluatedProperties", "not supported beside other schemas")
        elif "additionalProperties" not in out:
            further = rewriter.under(raw, path, "unevaluatedProperties")
            out["additionalProperties"] = further
    if "propertyNames" in raw:
        result = named(out, rewriter.resolve(raw["propertyNames"]))
        if result is None:
            rewriter.fault(path, "propertyNames", "not supported here")
        else:
            out = result
    for name, all_needs in dependencies(raw).items():
        schemas = raw.get("dependentSchemas")
        keyword = "dependentSchemas" if name in (schemas or ()) else "dependencies"
        for needs in all_needs:
            known = rewriter.schema(needs, below(path, f"{keyword}.{name}"))
            always = out.get("required") or [] if out.get("type") == "object" else []
            out = also(out, depending(name, known, always))
    return out


def _count(rewriter: Rewriter, raw: dict[str, Any], path: str, out: dict[str, Any]) -> Any:
    merged = _MERGED.search(path) or any(name in raw for name in (*_APPLICATORS, "not"))
    out, faults = counted(out, alone=not merged and "allOf" not in out)
    for name in faults:
        rewriter.fault(path, name, "properties cannot be counted here")
    return out


def _negation(rewriter: Rewriter, raw: dict[str, Any], path: str, out: dict[str, Any]) -> Any:
    if "not" not in raw:
        return out
    if rewriter.brief:
        rewriter.fault(path, "not", TOO_LARGE)
        return out
    result = negated(rewriter.resolve(raw["not"]), raw, rewriter.resolve)
    if result is None:
        rewriter.fault(path, "not", "not supported here")
        return out
    if isinstance(result, dict) and result.keys() == {"enum"}:
        both = {"enum", "const"} & out.keys()
        return out | result if not both or "enum" in both else also(out, result)
    return False if result is False else also(out, result)


def _condition(rewriter: Rewriter, raw: dict[str, Any], path: str, out: dict[str, Any]) -> Any:
    if "if" not in raw or not ({"then", "else"} & raw.keys()):
        return out
    if rewriter.brief:
        rewriter.fault(path, "if", TOO_LARGE)
        return out
    then, otherwise = (
        rewriter.under(raw, path, name) if name in raw else True for name in ("then", "else")
    )
    result = conditional(rewriter.resolve(raw["if"]), then, otherwise, raw, rewriter.resolve)
    if result is None:
        rewriter.fault(path, "if", "only conditions on constants are supported")
        return out
    return also(out, result)


def _choice(rewriter: Rewriter, raw: dict[str, Any], path: str, out: dict[str, Any]) -> Any:
    if not isinstance(raw.get("oneOf"), list):
        return out
    branches = rewriter.each(raw, path, "oneOf")
    choice = exclusive_choice(raw, branches, rewriter.resolve)
    if choice is None:
        rewriter.fault(path, "oneOf", "its branches do not exclude each other")
        choice = branches
    return also(out, {"anyOf": choice}) if "anyOf" in out else {**out, "anyOf": choice}


_RULES: tuple[Rule, ...] = (
    _values, _numbers, _strings, _patterns, _arrays, _keys, _count, _negation, _condition, _choice,
)  # fmt: skip
