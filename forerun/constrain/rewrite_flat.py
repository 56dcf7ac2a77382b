"""Schemas without schemas beside one another, for a library that reads one keyword at a time.

xgrammar takes one of `$ref`, `anyOf`, `allOf` where nothing stands beside it, and every other
keyword only beside its `type`. Here what stands side by side is joined into one schema.
"""

from collections.abc import Callable
from typing import Any

from forerun.constrain.rewrite_logic import key, values_of
from forerun.constrain.rewrite_typed import common, listed, typed

MAX_BRANCHES = 64
_DEPTH = 6

Schema = dict[str, Any]

_LARGER = frozenset({"minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"})
_SMALLER = frozenset({"maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"})


class _Apart(Exception):  # noqa: N818
    """Two schemas that cannot be said as one."""


def flat(root: Any, fault: Callable[[str, str, str], None]) -> Any:
    """The schema, every part of which has a type, or is a choice, a reference or a constant.

    fault  told of a keyword that is left out: path of its schema, keyword, why
    """
    if not isinstance(root, dict):
        return root
    flattener = _Flattener(root.get("$defs", {}), fault)
    out = flattener.schema({name: root[name] for name in root if name != "$defs"}, "")
    inner = {name: flattener.definition(name) for name in root.get("$defs", {})}
    found, inner = typed(out, inner)
    return {**found, "$defs": inner} if inner and isinstance(found, dict) else found


class _Flattener:
    def __init__(self, defined: Schema, fault: Callable[[str, str, str], None]) -> None:
        self._fault = fault
        self._defined, self._done = defined, dict[str, Any]()

    def definition(self, name: str) -> Any:
        """One of `$defs`, joined once; as it was sent while that is under way."""
        if name not in self._done:
            self._done[name] = self._defined.get(name, True)
            self._done[name] = self.schema(self._done[name], f"$defs.{name}")
        return self._done[name]

    def schema(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        begin = f"{path}." if path else ""
        out = dict(schema)
        for name in ("properties", "patternProperties"):
            if name in out:
                parts = out[name].items()
                out[name] = {k: self.schema(v, f"{begin}{name}.{k}") for k, v in parts}
        for name in ("anyOf", "allOf", "prefixItems"):
            if name in out:
                parts = enumerate(out[name])
                out[name] = [self.schema(v, f"{begin}{name}[{i}]") for i, v in parts]
        for name in ("items", "additionalProperties"):
            if name in out:
                out[name] = self.schema(out[name], begin + name)
        return self._joined(out, path)

    def _joined(self, schema: Schema, path: str) -> Any:
        """One schema of those that stand side by side."""
        for name in ("allOf", "anyOf", "$ref"):
            if name not in schema or (len(schema) == 1 and name != "allOf"):
                continue
            rest = {other: schema[other] for other in schema if other != name}
            parts = schema[name] if name == "allOf" else [{name: schema[name]}]
            try:
                found: Any = rest
                for part in parts:
                    found = self._both(found, part, 0)
            except _Apart as error:
                self._fault(path, name, str(error))
                found = rest
            if not isinstance(found, dict):
                return found
            return self._joined(found, path) if found.keys() & {"allOf"} else found
        return schema

    def _both(self, one: Any, other: Any, depth: int) -> Any:
        """What both allow. Raises _Apart."""
        if one is False or other is False:
            return False
        if one in (True, {}) or other in (True, {}) or one == other:
            return other if one in (True, {}) else one
        if depth > _DEPTH:
            raise _Apart("it refers to itself beside other keywords")
        for a, b in ((one, other), (other, one)):
            if "$ref" in a:
                target = self.definition(a["$ref"].rpartition("/")[2])
                rest = {name: a[name] for name in a if name != "$ref"}
                return self._both(self._both(target, rest, depth + 1), b, depth + 1)
            if "allOf" in a:
                rest = {name: a[name] for name in a if name != "allOf"}
                found: Any = b
                for part in a["allOf"]:
                    found = self._both(found, part, depth + 1)
                return self._both(found, rest, depth + 1)
            if "anyOf" in a:
                rest = {name: a[name] for name in a if name != "anyOf"}
                beside = self._both(b, rest, depth)
                every = [self._both(part, beside, depth + 1) for part in a["anyOf"]]
                kept = [part for part in every if part is not False]
                if len(kept) > MAX_BRANCHES:
                    raise _Apart("too many alternatives")
                return {"anyOf": kept} if kept else False
        return self._merged(one, other, depth)

    def _merged(self, one: Schema, other: Schema, depth: int) -> Any:
        out = {**one, **other}
        if "type" in one and "type" in other:
            kinds = common(listed(one["type"]), listed(other["type"]))
            if not kinds:
                return False
            out["type"] = kinds[0] if len(kinds) == 1 else kinds
        values = values_of(one), values_of(other)
        if ("const" in out or "enum" in out) and None not in values:
            known = {key(value) for value in values[0] or ()}
            out.pop("const", None)
            out["enum"] = [value for value in values[1] or () if key(value) in known]
            if not out["enum"]:
                return False
        for name in one.keys() & other.keys():
            out[name] = self._word(name, one, other, out, depth)
        if "properties" in out:
            out["properties"] = self._properties(one, other, depth)
        if "prefixItems" in out:
            out["prefixItems"] = self._places(one, other, depth)
        return out

    def _word(self, name: str, one: Schema, other: Schema, out: Schema, depth: int) -> Any:
        a, b = one[name], other[name]
        if name in ("type", "const", "enum", "properties", "prefixItems"):
            return out.get(name, a)
        if name == "required":
            return list(dict.fromkeys([*a, *b]))
        if name in _LARGER:
            return max(a, b)
        if name in _SMALLER:
            return min(a, b)
        if name in ("additionalProperties", "items"):
            return self._both(a, b, depth + 1)
        if a != b:
            raise _Apart(f"two schemas with {name}")
        return a

    def _places(self, one: Schema, other: Schema, depth: int) -> list[Any]:
        first = [side.get("prefixItems", []) for side in (one, other)]
        rest = [side.get("items", True) for side in (one, other)]
        found = []
        for index in range(max(map(len, first))):
            a, b = (
                begin[index] if index < len(begin) else further
                for begin, further in zip(first, rest, strict=True)
            )
            found.append(self._both(a, b, depth + 1))
        return found

    def _properties(self, one: Schema, other: Schema, depth: int) -> dict[str, Any]:
        sides = one, other
        if "patternProperties" in one or "patternProperties" in other:
            raise _Apart("patternProperties beside other objects")
        names = dict.fromkeys([*one.get("properties", ()), *other.get("properties", ())])
        found = {}
        for name in names:
            a, b = (
                side.get("properties", {}).get(name, side.get("additionalProperties", True))
                for side in sides
            )
            found[name] = self._both(a, b, depth + 1)
        return found
