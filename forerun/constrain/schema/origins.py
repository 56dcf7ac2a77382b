"""Records where the parts of a rewritten schema came from, so that an error or a left-out keyword
can be named by its path in the client's schema.
"""

import re
from dataclasses import dataclass, field
from typing import Any

_SAYS = {
    "pattern": ("format", "not"),
    "properties": ("propertyNames", "not"),
    "patternProperties": ("propertyNames",),
    "additionalProperties": ("unevaluatedProperties", "propertyNames", "not"),
    "prefixItems": ("items", "uniqueItems", "contains"),
    "items": ("additionalItems", "contains"),
    "enum": ("not",),
    "type": ("not",),
}
"""Keyword -> keywords of the client's schema that may have been rewritten as it."""
_CHOICES = (
    "oneOf", "if", "not", "dependentSchemas", "dependentRequired", "dependencies", "contains",
    "uniqueItems", "minProperties", "maxProperties", "pattern", "format", "propertyNames",
)  # fmt: skip
"""Keywords that may be rewritten as choices, or as several schemas that must all hold."""


@dataclass(frozen=True, slots=True)
class UnenforcedKeyword:
    """A keyword that is left out.

    path  of the keyword, itself included
    why   the reason, as text for users
    """

    path: str
    why: str

    def __str__(self) -> str:
        """Return the keyword as text for an error."""
        return f"{self.path} cannot be honoured: {self.why}"


@dataclass(frozen=True, slots=True)
class _Origin:
    """made: a rewritten schema; path: of `raw`, the schema in the client's document that it came
    from.
    """

    made: dict[str, Any]
    path: str
    raw: dict[str, Any]


class Origins:
    """The schemas of one rewritten document, and where each came from in the client's."""

    def __init__(self) -> None:
        self._known: dict[int, _Origin] = {}  # By identity: equal schemas occur in many places.

    def note(self, made: Any, path: str, raw: dict[str, Any]) -> None:
        """Record that `made` was rewritten from `raw`, the schema at `path` of the client's
        document.
        """
        if isinstance(made, dict):
            self._known[id(made)] = _Origin(made, path, raw)

    def original(self, root: Any, path: str) -> str:
        """Return the path in the client's document that corresponds best to `path` in the rewritten
        `root`. A part without an origin gets the keyword that it was written for.
        """
        node, left, tail = root, path, list[str]()
        origin = self._known.get(id(root))
        while left:
            found = _step(node, left, root)
            if found is None:
                tail.append(left)
                break
            step, node, left = found
            tail.append(step)
            known = self._known.get(id(node))
            if known is not None:
                origin, tail = known, []
        if origin is None:
            return path
        return _joined(origin.path, _named(_joined(*tail), origin.raw))


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts)).replace(".[", "[")


def _named(path: str, raw: dict[str, Any]) -> str:
    """Translate a path in a rewritten schema to one in the client's schema: a choice on the path
    may have been added by rewriting, and a keyword may have another name.
    """
    inner: str | None = path
    while inner:
        if _stands(raw, inner):
            return inner
        choice = re.match(r"(?:anyOf|allOf)\[\d+\]\.", inner)
        inner = inner[choice.end() :] if choice else None
    keyword = re.split(r"[.\[]", path)[0]
    names = (keyword, *_SAYS.get(keyword, ()), *_CHOICES)
    return next((name for name in names if name in raw), "")


def _stands(schema: Any, path: str) -> bool:
    """Return whether a path exists in a schema, without passing through a schema that is joined
    with it.
    """
    while path:
        step = _step(schema, path, None)
        if step is None or not step[0]:
            return False
        _, schema, path = step
    return True


def _step(node: Any, path: str, root: Any) -> tuple[str, Any, str] | None:
    """Return (first step of a path, the value there, the rest of the path); None if it does not
    exist. Schemas joined by `allOf` or `$ref` count as part of the schema.
    """
    if isinstance(node, list) and path.startswith("["):
        index, _, rest = path[1:].partition("]")
        if index.isdecimal() and int(index) < len(node):
            return f"[{index}]", node[int(index)], rest.removeprefix(".")
    if not isinstance(node, dict):
        return None
    names = [name for name in node if path == name or path.startswith((f"{name}.", f"{name}["))]
    if names:
        name = max(names, key=len)
        return name, node[name], path[len(name) :].removeprefix(".")
    parts = node.get("allOf") or []
    if "$ref" in node and isinstance(root, dict):
        parts = [*parts, root.get("$defs", {}).get(str(node["$ref"]).rpartition("/")[2])]
    part = next((part for part in parts if _has(part, path)), None)
    return None if part is None else ("", part, path)


def _has(part: Any, path: str) -> bool:
    return isinstance(part, dict) and _step(part, path, None) is not None


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema rewritten in fewer keywords.

    unenforced  the keywords that are left out
    origins     where its parts came from
    """

    schema: Any
    unenforced: tuple[UnenforcedKeyword, ...] = ()
    origins: Origins = field(default_factory=Origins)

    def original(self, path: str) -> str:
        """Return the path in the client's document that corresponds best to `path` in the rewritten
        schema.
        """
        return self.origins.original(self.schema, path)
