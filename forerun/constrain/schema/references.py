"""Resolves references in a JSON schema, within the schema itself only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin

from forerun.constrain.schema.paths import children

_NAMED = ("draft-03", "draft-04")


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    """A schema inside the document, and its path (`properties.a.items`)."""

    schema: Any
    path: str


class References:
    """The identifiers, anchors and pointers of one document.

    alone  keywords next to a `$ref` are ignored (JSON Schema up to draft 7)
    """

    def __init__(self, root: dict[str, Any]) -> None:
        dialect = str(root.get("$schema", "2020-12"))
        self.alone = "draft-0" in dialect
        self._id = "id" if any(name in dialect for name in _NAMED) else "$id"
        self._bases: dict[int, str] = {}
        self._named: dict[str, SchemaPlace] = {"": SchemaPlace(root, "")}
        self._anchors: dict[tuple[str, str], SchemaPlace] = {}
        self._dynamic: dict[str, int] = {}
        self._index(root)

    def found(self, schema: dict[str, Any], reference: Any) -> SchemaPlace | None:
        """Return the target of a reference in `schema`, by $id, anchor or JSON pointer; None if it
        is in another document or does not exist.
        """
        if not isinstance(reference, str):
            return None
        base = self._bases.get(id(schema), "")
        address, _, fragment = urljoin(base, reference).partition("#")
        if reference.startswith("#"):
            address, fragment = base, reference[1:]
        resource = self._named.get(address) or self._named.get(address.rstrip("#"))
        if resource is None:
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((address, fragment)) or self._anchors.get(("", fragment))
        return _pointed(resource, fragment) or _pointed(self._named[""], fragment)

    def dynamic(self, schema: dict[str, Any]) -> SchemaPlace | None:
        """Return the target of the schema's `$dynamicRef` or `$recursiveRef`; None if there are
        several possible ones, or none.
        """
        reference = schema.get("$dynamicRef", schema.get("$recursiveRef"))
        if not isinstance(reference, str):
            return None
        name = reference.partition("#")[2]
        return self.found(schema, reference) if self._dynamic.get(name, 0) <= 1 else None

    def _index(self, root: dict[str, Any]) -> None:
        todo: list[tuple[Any, str, str]] = [(root, "", "")]
        while todo:
            schema, path, base = todo.pop()
            if not isinstance(schema, dict) or id(schema) in self._bases:
                continue
            name = schema.get(self._id)
            if isinstance(name, str) and not (self.alone and "$ref" in schema):
                if name.startswith("#"):
                    self._anchors[base, name[1:]] = SchemaPlace(schema, path)
                else:
                    base = urljoin(base, name).partition("#")[0]
                    self._named.setdefault(base, SchemaPlace(schema, path))
            self._bases[id(schema)] = base
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(key), str):
                    self._anchors[base, schema[key]] = SchemaPlace(schema, path)
            if isinstance(schema.get("$dynamicAnchor"), str):
                anchor = schema["$dynamicAnchor"]
                self._dynamic[anchor] = self._dynamic.get(anchor, 0) + 1
            if schema.get("$recursiveAnchor") is True:
                self._dynamic[""] = self._dynamic.get("", 0) + 1
            todo += [(inner, where, base) for where, inner in children(schema, path)]


def _pointed(place: SchemaPlace, pointer: str) -> SchemaPlace | None:
    """Return the target of a JSON pointer from a schema."""
    value, path = place.schema, place.path
    for part in _parts(pointer):
        if isinstance(value, dict) and part in value:
            value, path = value[part], f"{path}.{part}" if path else part
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value, path = value[int(part)], f"{path}[{part}]"
        else:
            return None
    return SchemaPlace(value, path)


def _parts(pointer: str) -> Iterator[str]:
    for part in pointer.split("/")[1:]:
        yield unquote(part).replace("~1", "/").replace("~0", "~")
