"""Request bodies as dataclasses whose fields check themselves.

A body is declared once:

    class Body(Declaration):
        temperature: float = accept(number(0, 2), 1.0)

`read(Body, value)` returns a Body or raises RequestError naming the field. An unknown field is an
error, and so is a known one that is not supported: no field is ignored silently.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from forerun.errors import RequestError

Reader = Callable[[Any, str], Any]
"""(JSON value, its path) -> the field's value. Raises RequestError."""

Mend = Callable[[Any, str, list[str]], Any]
"""(JSON value, its path, paths left out so far) -> the JSON value without the parts that its reader
rejects, whose paths are added. Raises RequestError if nothing is left that the reader accepts.
"""

Schema = dict[str, Any]
"""A JSON schema. It may allow values that a reader rejects, but forbids none that it accepts."""


class Unused(NamedTuple):
    """A field that is checked and then ignored, because it cannot change an answer here. The answer
    names it if the client sent another value than `default`.
    """

    reader: Reader
    default: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A body, or an object within one. Created by `read`.

    renamed  other servers' names of fields -> ours
    refused  fields that are not supported -> the reason
    unused   fields that have no effect
    blank    values for fields that cannot be read in an earlier turn of a conversation
    ignored  the unused fields that it was given, with their values, as `unused` has them in order;
             of a body behind them those of objects within it, by their paths
    """

    renamed: ClassVar[dict[str, str]] = {}
    refused: ClassVar[dict[str, str]] = {}
    unused: ClassVar[dict[str, Unused]] = {}
    blank: ClassVar[dict[str, Any]] = {}

    ignored: dict[str, Any] = field(default_factory=dict)


Body = TypeVar("Body", bound=Declaration)
Read = TypeVar("Read")

_INNER: ContextVar[list[str]] = ContextVar("_INNER")
"""Paths of unused fields in objects within the body that is being read."""
_NO_NAME = re.compile(r"(\.content)?\[\d+\]")
"""Left out of the path of an unused field: indices of lists, and `content` before them."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_SHOWN = 60
UNKNOWN_FIELD = "There is no field"
"""Beginning of the message about a field whose name the client chose."""
_UNSET: tuple[Any, ...] = (False, 0, "", [], {})
"""Values that an unsupported field may have: clients send them as defaults."""


class DescribedReader(Generic[Read]):
    """A reader with a JSON schema of its values; `mend` reduces a value to what it accepts."""

    def __init__(
        self, reader: Callable[[Any, str], Read], schema: Schema, mend: Mend | None = None
    ) -> None:
        self._reader = reader
        self.schema = schema
        self.mend = mend or _whole(reader)
        self.__doc__ = reader.__doc__

    def __call__(self, value: Any, where: str) -> Read:
        """See Reader."""
        return self._reader(value, where)


def takes(
    schema: Schema, mend: Mend | None = None
) -> Callable[[Callable[[Any, str], Read]], DescribedReader[Read]]:
    """Return a decorator that describes a reader by a JSON schema, for /openapi.json. Without
    `mend` a value is accepted completely or not at all.
    """
    return lambda reader: DescribedReader(reader, schema, mend)


def _whole(reader: Reader) -> Mend:
    def mend(value: Any, where: str, left: list[str]) -> Any:
        reader(value, where)
        return value

    return mend


def mender(reader: Reader) -> Mend:
    """Return the function that mends a value for a reader."""
    return reader.mend if isinstance(reader, DescribedReader) else _whole(reader)


def schema_of(reader: Reader) -> Schema:
    """Return the JSON schema of the values a reader accepts; {} (anything) if it has none."""
    return reader.schema if isinstance(reader, DescribedReader) else {}


def body_schema(kind: type[Declaration]) -> Schema:
    """Return the JSON schema of the values that `read` accepts for a body. Absent and null are the
    same, except for required fields.
    """
    properties, needed, renamed = {}, [], kind.renamed
    for name, item in declared(kind).items():
        found = schema_of(item.reader)
        if item.needed:
            needed.append(name)
        if found and (not item.needed or name in renamed.values()):
            found = {"anyOf": [found, {"type": "null"}]}
        if item.unused:
            found = {**found, "description": "Ignored: it has no effect here."}
        properties[name] = found
    for name, why in kind.refused.items():
        properties[name] = {"enum": [None, *_UNSET], "description": f"Not supported: {why}."}
    for name, own in renamed.items():
        properties[name] = {**properties[own], "description": f"Another name for {own}."}
    schema = {
        "type": "object",
        "properties": properties,
        "additionalProperties": {"type": "null"},
    }
    # A dataclass without a docstring gets its signature for one.
    if kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("):
        schema["description"] = " ".join(kind.__doc__.split())
    single = [name for name in needed if name not in renamed.values()]
    either = [
        {"anyOf": [_given(name), *(_given(other) for other in renamed if renamed[other] == name)]}
        for name in needed
        if name not in single
    ]
    return schema | ({"required": single} if single else {}) | ({"allOf": either} if either else {})


def _given(name: str) -> Schema:
    """Return the schema of objects that have this field with another value than null."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def accept(reader: Reader, default: Any = None) -> Any:
    """Declare an optional field of a body: its reader, and its value if it is absent or null."""
    return dataclasses.field(default=default, metadata={"reader": reader})


def need(reader: Reader) -> Any:
    """Declare a required field of a body: it may not be absent or null."""
    return dataclasses.field(metadata={"reader": reader})


class _Declared(NamedTuple):
    """A field of a declaration. unused: it has no effect, and is not an attribute."""

    reader: Reader
    default: Any
    unused: bool = False

    @property
    def needed(self) -> bool:
        """Whether it may not be absent."""
        return self.default is dataclasses.MISSING


_DECLARED: dict[type[Declaration], dict[str, _Declared]] = {}


def declared(kind: type[Declaration]) -> dict[str, _Declared]:
    """Return the declared fields by name."""
    if kind not in _DECLARED:
        unused = {name: _Declared(*one, unused=True) for name, one in kind.unused.items()}
        own = (item for item in dataclasses.fields(kind) if "reader" in item.metadata)
        used = {item.name: _Declared(item.metadata["reader"], item.default) for item in own}
        _DECLARED[kind] = unused | used
    return _DECLARED[kind]


def read(kind: type[Body], value: Any, where: str = "") -> Body:
    """Read an object of class `kind` from a JSON object at the path `where`. Fields that are null
    are treated as absent. Raises RequestError naming the field.
    """
    if not isinstance(value, dict):
        name = where or "the body"
        raise RequestError(f"{name} must be a JSON object, not {shown(value)}.", where or None)
    known, refused = declared(kind), kind.refused
    inner = _INNER.get([]) if where else []
    _INNER.set(inner)
    given: dict[str, Any] = {}
    for key, content in value.items():
        own, place = kind.renamed.get(key, key), f"{where}.{key}" if where else key
        if content is None or (own in refused and content in _UNSET):
            continue  # Clients send null for what they leave open.
        if own in refused:
            raise RequestError(f"{place} is not supported: {refused[own]}.", place)
        if own not in known:
            raise _unknown(key, place, known)
        found = known[own].reader(content, place)
        if given.get(own, found) != found:
            raise RequestError(f"{place} and another name for {own} disagree.", place)
        given[own] = found
    ignored: dict[str, Any] = {}
    for name, item in known.items():
        if name not in given and item.needed:
            place = f"{where}.{name}" if where else name
            raise RequestError(f"{place} is missing.", place)
        if item.unused and name in given:
            found = given.pop(name)
            if found != item.default:
                ignored[name] = found
    if where:
        inner += (_NO_NAME.sub("", f"{where}.{name}") for name in ignored)
    else:
        ignored |= dict.fromkeys(sorted({*inner}))
    return kind(**given, ignored=ignored)


def mend_object(kind: type[Declaration]) -> Mend:
    """Return the function that mends an object: it leaves out fields that `read` would reject."""

    def mend(value: Any, where: str, left: list[str]) -> Any:
        known = declared(kind)
        found: dict[str, Any] = {}
        for key, content in mapping(value, where).items():
            own, place = kind.renamed.get(key, key), f"{where}.{key}"
            if content is None or (own in kind.refused and content in _UNSET):
                continue
            if own not in known or own in found:
                left.append(f"{where}.{quote(key[:_SHOWN], safe='', errors='replace')}")
                continue
            try:
                found[own] = mender(known[own].reader)(content, place, left)
            except RequestError:
                if known[own].needed and own not in kind.blank:
                    raise
                left.append(place)
        return {**kind.blank, **found}

    return mend


def shown(value: Any) -> str:
    """Return a value as short text for a message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        text = ascii(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
        return f"the string {text}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**_SHOWN:
        return f"a number of {value.bit_length()} bits"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


@takes({})
def whatever(value: Any, where: str) -> Any:
    """Return `value` as it is, unchecked: for fields that change nothing."""
    return value


@takes({"type": "boolean"})
def boolean(value: Any, where: str) -> bool:
    """Read true or false. Raises RequestError that names `where` for anything else, 0 and 1 too."""
    if not isinstance(value, bool):
        raise RequestError(f"{where} must be true or false, not {shown(value)}.", where)
    return value


def integer(low: int, high: int) -> DescribedReader[int]:
    """Return a reader of whole numbers from `low` to `high`; it raises RequestError for anything
    else.
    """

    @takes({"type": "integer", "minimum": low, "maximum": high})
    def reader(value: Any, where: str) -> int:
        integral = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if not integral or isinstance(value, bool) or not low <= value <= high:
            raise RequestError(
                f"{where} must be a whole number from {low} to {high}, not {shown(value)}.", where
            )
        return int(value)

    return reader


def number(low: float, high: float) -> DescribedReader[float]:
    """Return a reader of finite numbers from `low` to `high`; it raises RequestError for anything
    else.
    """

    @takes({"type": "number", "minimum": low, "maximum": high})
    def reader(value: Any, where: str) -> float:
        fine = isinstance(value, int | float) and not isinstance(value, bool)
        fine = fine and math.isfinite(value) if isinstance(value, float) else fine
        if not fine or not low <= value <= high:
            raise RequestError(
                f"{where} must be a number from {low:g} to {high:g}, not {shown(value)}.", where
            )
        return float(value)

    return reader


def text(longest: int, shortest: int = 0) -> DescribedReader[str]:
    """Return a reader of strings of valid Unicode with `shortest` to `longest` characters; it
    raises RequestError for anything else.
    """

    @takes({"type": "string", "minLength": shortest, "maxLength": longest})
    def reader(value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise RequestError(f"{where} must be a string, not {shown(value)}.", where)
        if not shortest <= len(value) <= longest:
            raise RequestError(
                f"{where} has {len(value)} characters, but must have {shortest} to {longest}.",
                where,
            )
        bad = _SURROGATE.search(value)
        if bad:
            raise RequestError(
                f"{where} has a lone surrogate (U+{ord(bad[0]):04X}) at character "
                f"{bad.start()}; send valid Unicode.",
                where,
            )
        return value

    return reader


MAX_TEXT = 2**31 - 1
"""The limit of texts that only the size of the body limits."""

plain_text = text(MAX_TEXT)


def listed(value: Any, where: str, longest: float = math.inf, shortest: int = 0) -> list[Any]:
    """Return `value`, a list of `shortest` to `longest` entries. Raises RequestError that names
    `where` for anything else.
    """
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a list, not {shown(value)}.", where)
    if not shortest <= len(value) <= longest:
        raise RequestError(
            f"{where} has {len(value)} entries, but must have {shortest} to {longest}.", where
        )
    return value


def items(
    each: Callable[[Any, str], Read], longest: int, shortest: int = 0
) -> DescribedReader[tuple[Read, ...]]:
    """Return a reader of lists with `shortest` to `longest` entries, each read by `each`, as a
    tuple; it raises RequestError for anything else.
    """
    bounds = {"minItems": shortest, "maxItems": longest}

    def mend(value: Any, where: str, left: list[str]) -> Any:
        found = []
        for index, item in enumerate(listed(value, where)):
            place = f"{where}[{index}]"
            try:
                found.append(mender(each)(item, place, left))
            except RequestError:
                left.append(place)
        return found

    @takes({"type": "array", "items": schema_of(each), **bounds}, mend)
    def reader(value: Any, where: str) -> tuple[Read, ...]:
        entries = enumerate(listed(value, where, longest, shortest))
        return tuple(each(item, f"{where}[{index}]") for index, item in entries)

    return reader


def one_or_more(
    each: Callable[[Any, str], Read], longest: int
) -> DescribedReader[tuple[Read, ...]]:
    """Return a reader of one string or a list of at most `longest`, each read by `each`, as a
    tuple; it raises RequestError for anything else.
    """
    several = items(each, longest)

    @takes({"anyOf": [schema_of(each), several.schema]})
    def reader(value: Any, where: str) -> tuple[Read, ...]:
        if not isinstance(value, str | list):
            message = f"{where} must be a string or a list of strings, not {shown(value)}."
            raise RequestError(message, where)
        return several(value, where) if isinstance(value, list) else (each(value, where),)

    return reader


def only(*allowed: Read, why: str) -> DescribedReader[Read]:
    """Return a reader of a field that is accepted only if it is one of `allowed`, the values that
    have the server's own behaviour. Otherwise it raises RequestError that lists them and says why.
    """
    several = [one for place, one in enumerate(allowed) if one not in allowed[:place]]
    known = ", ".join(map(json.dumps, several))

    @takes({"enum": list(allowed)})
    def reader(value: Any, where: str) -> Read:
        for one in allowed:
            if value == one and type(value) is type(one):
                return one
        message = f"{where}: {shown(value)} is not supported, only {known}: {why}."
        raise RequestError(message, where)

    return reader


def part(kind: type[Body]) -> DescribedReader[Body]:
    """Return a reader of an object that is itself a declared body; it raises RequestError as
    `read`.
    """

    @takes(body_schema(kind), mend_object(kind))
    def reader(value: Any, where: str) -> Body:
        return read(kind, value, where)

    return reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed(Declaration):
    """An object whose `type` determines its other fields."""

    type: str = need(plain_text)


def tagged(
    kinds: Mapping[str, type[Declaration]], refused: Mapping[str, str] = Declaration.refused
) -> DescribedReader[Any]:
    """Return a reader of an object whose `type` selects a declared body.

    refused  known types that are not supported, and why
    """

    def found(value: Any, where: str) -> type[Declaration]:
        kind, place = mapping(value, where).get("type"), f"{where}.type"
        if isinstance(kind, str) and kind in refused:
            raise RequestError(f"{place}: {shown(kind)} is not supported: {refused[kind]}.", place)
        if not isinstance(kind, str) or kind not in kinds:
            known = ("one of " if len(kinds) > 1 else "") + ", ".join(kinds)
            raise RequestError(f"{place} must be {known}, not {shown(kind)}.", place)
        return kinds[kind]

    def mend(value: Any, where: str, left: list[str]) -> Any:
        return mend_object(found(value, where))(value, where, left)

    @takes({"anyOf": [_of_type(kind, name) for name, kind in kinds.items()]}, mend)
    def reader(value: Any, where: str) -> Any:
        return read(found(value, where), value, where)

    return reader


def _of_type(kind: type[Declaration], name: str) -> Schema:
    found = body_schema(kind)
    needed = sorted({*found.get("required", ()), "type"})
    properties = {**found["properties"], "type": {"const": name}}
    return {**found, "properties": properties, "required": needed}


@takes({"type": "object"})
def mapping(value: Any, where: str) -> dict[str, Any]:
    """Read a JSON object as it is, its keys unchecked. Raises RequestError that names `where`."""
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be a JSON object, not {shown(value)}.", where)
    return value


def _unknown(key: str, place: str, known: Iterable[str]) -> RequestError:
    name = place if len(place) <= _SHOWN else place[:_SHOWN] + "..."
    clean = _SURROGATE.sub("?", name)
    close = get_close_matches(key, known, n=1, cutoff=0.75) if len(key) <= _SHOWN else []
    hint = f"did you mean {close[0]}?" if close else "see /openapi.json."
    return RequestError(f"{UNKNOWN_FIELD} {clean!r} in this request; {hint}", clean)
