r"""Rewrites patterns and formats of JSON schemas as regular expressions with the intended meaning.

llguidance writes a pattern's texts as JSON strings. In a character class that leaves out `"` or `\`
but includes control characters (`[^"]`) it accepts the escape of what was left out as well. Under a
pattern it writes `\u` for control characters only: where one is allowed by accident, a model that
begins `\u2019` ends with a control character. So `.` is rewritten without control characters, and a
pattern that every string matches is dropped.
"""

import re
from collections.abc import Iterable

from forerun.constrain.schema.patterns import ASCII_CLASSES, portable_class, unit_end
from forerun.errors import RequestError

NATIVE = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()  # noqa: SIM905
)
"""Formats that llguidance supports."""

_LAST = 0x10FFFF
_CONTROL = r"\x00-\x1f\x7f"
"""Characters that llguidance writes as `\\u` and four digits, or in another escape."""
_TEXT = r"[A-Za-z0-9._~!$&'()*+,;=@-]"
_PATH = rf"(({_TEXT}|%[0-9A-Fa-f]{{2}})+/)*({_TEXT}|%[0-9A-Fa-f]{{2}})*"
_TAIL = rf"(\?({_TEXT}|[/?:])*)?(#({_TEXT}|[/?:])*)?"
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*:(//[A-Za-z0-9.-]+(:[0-9]{1,4})?/)?"
_POINTER = r"(/([ !#-.0-\[\]-}]|~[01])*)*"
_ATOM = (
    r"([A-Za-z0-9 _,:;/@%&=<>!'~-]|\.|\\[dwsDWS.*+?/^$|()\[\]{}-]"
    r"|\[\^?([A-Za-z0-9_.]|a-z|A-Z|0-9|\\[dws])+\])([*+?]|\{[1-9]\})?"
)
FORMATS = {
    "uri-reference": f"^({_SCHEME})?{_PATH}{_TAIL}$",
    "iri": f"^{_SCHEME}{_PATH}{_TAIL}$",
    "iri-reference": f"^({_SCHEME})?{_PATH}{_TAIL}$",
    "uri-template": rf"^({_SCHEME})?({_TEXT}|/|\{{[A-Za-z0-9_]+\}})*$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
    "regex": rf"^\^?({_ATOM}|\(({_ATOM})+(\|({_ATOM})+)*\)[*+?]?)*\$?$",
    "byte": r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
"""Patterns of formats that llguidance does not support. They match only some valid texts, since a
schema only requires that no invalid ones are written.
"""

_DAY = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))|([0-9]{2}(0[48]|[2468][048]|[13579][26])"
    "|(0[048]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,5}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
RAW_FORMATS = {
    **FORMATS,
    "date": f"^{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY}T{_TIME}$",
    "duration": "^P([0-9]{1,4}D(T[0-9]{1,4}H)?|T[0-9]{1,4}[HMS])$",
    "email": rf"^[A-Za-z0-9_+-]{{1,40}}(\.[A-Za-z0-9_+-]{{1,20}})?@{_HOST}$",
    "hostname": f"^{_HOST}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "ipv6": "^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    "uuid": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
    "uri": rf"^https?://{_HOST}(:[0-9]{{1,4}})?(/[A-Za-z0-9._~-]*)*(\?[A-Za-z0-9=&_-]*)?$",
}
"""Patterns of every format; each matches only some valid texts."""

SECONDS = r":[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?[Zz+-]"
"""Minutes, seconds and the beginning of the offset of a time. llguidance allows second 60 at any
time, JSON Schema only at some; and unlimited decimal places, where a model that expects no offset
writes zeros until max_tokens.
"""

SAME = {"idn-email": "email", "idn-hostname": "hostname"}
NOTED_FORMATS = frozenset(
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float double password binary".split()  # noqa: SIM905
)
"""OpenAPI's formats that do not restrict a value: those of numbers, since JSON Schema has formats
of strings only, and those of strings that are hidden during input or may be anything.
"""


class Unenforceable(Exception):  # noqa: N818
    """Raised for a keyword that cannot be enforced, with the reason."""


def plain_patterns(pattern: str) -> list[str]:
    """Return patterns that together match what `pattern` matches, or less: look-aheads at the
    beginning become patterns of their own. Raises Unenforceable for other look-around, word
    boundaries, back-references and invalid regular expressions.
    """
    parts, start = [], 0
    while pattern.startswith(("^(?=", "(?=") if not start else "(?=", start):
        group = pattern.index("(", start)
        end = _closing(pattern, group)
        if pattern[end : end + 1] in ("*", "+", "?", "{"):
            break
        parts.append("^" + pattern[group + len("(?=") : end - 1])
        start = end
    rest = "^" + pattern[start:] if start else pattern
    return [_plain(part) for part in (*parts, rest)]


def _closing(pattern: str, start: int) -> int:
    """Return the index after the group that begins at `start`."""
    depth, index = 0, start
    while index < len(pattern):
        end = _end(pattern, index)
        depth += {"(": 1, ")": -1}.get(pattern[index:end], 0)
        if not depth:
            return end
        index = end
    raise Unenforceable("it is not a valid regular expression")


_ANY = r"(?:\[(?:\\s\\S|\\S\\s|\\d\\D|\\D\\d|\\w\\W|\\W\\w)\]|\((?:\?:)?\.\|\\n\))"
_ALL = re.compile(rf"\^?{_ANY}\*\$?|\^?\.\*|\.\*\$|\^|\$|")
_SOME = re.compile(rf"\^{_ANY}(?:(\+)|\{{(\d+)(,?)(\d*)\}})\$")


def only_lengths(pattern: str) -> tuple[int, int | None] | None:
    """Return (least, most) characters of the texts that a pattern matches, if it restricts only
    their length; else None.
    """
    if _ALL.fullmatch(pattern):
        return 0, None
    match = _SOME.fullmatch(pattern)
    if match is None:
        return None
    if match[1]:
        return 1, None
    least = int(match[2])
    return least, int(match[4]) if match[4] else None if match[3] else least


def _end(pattern: str, index: int) -> int:
    try:
        return unit_end(pattern, index, "pattern")
    except RequestError as error:
        raise Unenforceable(str(error).splitlines()[0]) from error


_NAMED = re.compile(r"\\(?:[pPu]\{\w+\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2})")
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")


def _plain(pattern: str) -> str:
    out: list[str] = []
    index = 0
    while index < len(pattern):
        if pattern.startswith(_LOOKS, index):
            raise Unenforceable("look-around in a pattern is not supported")
        named = _NAMED.match(pattern, index)
        end = named.end() if named else _end(pattern, index)
        out.append(pattern[index:end] if named else _unit(pattern[index:end]))
        index = end
    return "".join(out)


def _unit(unit: str) -> str:
    if unit == ".":
        return f"[^{_CONTROL}]"
    if unit[0] == "[":
        return _class(unit)
    if unit in ("{", "}", "]"):
        return "\\" + unit
    if unit[0] == "\\":
        if unit[1] in "bBAzZG":
            raise Unenforceable(f"{unit} in a pattern is not supported")
        if unit[1] in "123456789k":
            raise Unenforceable("back-references in a pattern are not supported")
        if not unit[1].isalnum():
            return re.escape(unit[1])
        if unit in ASCII_CLASSES:
            return _class(ASCII_CLASSES[unit])
    return unit


def _class(text: str) -> str:
    """Return a character class without control characters, if it excludes the characters that JSON
    escapes.
    """
    text = portable_class(text)
    negated = text.startswith("[^")
    inside = text[2 if negated else 1 : -1]
    try:
        known = re.compile(re.sub(r"\\p\{\w+\}", "", text) if "\\p" in text else text)
    except re.error:
        known = re.compile('[^"\\\\]' if negated else "[a]")
    has = [known.match(character) is not None for character in ('"', "\\", "\n", "\x01", "é")]
    if all(has[:2]) or not any(has[2:4]) or not has[4]:
        return text
    if negated:
        return f"[^{inside}{_CONTROL}]"
    allowed = [chr(code) for code in range(32, 127) if known.match(chr(code))]
    return "[" + "".join(map(re.escape, allowed)) + _range(0x80, _LAST) + "]"


def other_than(words: Iterable[str]) -> str:
    r"""Return a pattern of texts without `"`, backslash and control characters that are none of
    `words`.
    """
    trie: dict[str, dict[str, object]] = {}
    for word in words:
        if all(ord(character) >= 32 and character not in '"\\' for character in word):
            place: dict[str, object] = trie  # type: ignore[assignment]
            for character in word:
                place = place.setdefault(character, {})  # type: ignore[assignment]
            place[""] = {}
    return f"^{_otherwise(trie)}$"


def _otherwise(trie: dict[str, dict[str, object]]) -> str:
    """Return a pattern of what may follow a common beginning without completing a word."""
    inner = {key: below for key, below in trie.items() if key}
    parts = [f"{_but(inner)}{_but(())}*"]
    parts += [re.escape(key) + _otherwise(below) for key, below in inner.items()]  # type: ignore[arg-type]
    return f"({'|'.join(parts)}){'' if '' in trie else '?'}"


def _but(characters: Iterable[str]) -> str:
    """Return a class of the characters that need no escape in JSON, except these."""
    out, at = "[", 32
    for code in sorted({ord('"'), ord("\\"), 0x7F, *map(ord, characters)}):
        out += _range(at, code - 1)
        at = code + 1
    return out + _range(at, _LAST) + "]"


def _range(first: int, last: int) -> str:
    """Return a range of characters without surrogates, which texts cannot contain."""
    if first <= 0xDFFF and last >= 0xD800:
        return _range(first, 0xD7FF) + _range(0xE000, last)
    if first > last:
        return ""
    ends = [re.escape(chr(first)), re.escape(chr(last))]
    return ends[0] if first == last else "-".join(ends)


def lengths(least: int, most: int | None) -> str:
    """Return a pattern of the texts of at least `least` and at most `most` characters; None = any
    number.
    """
    return rf"^[\s\S]{{{least},{'' if most is None else most}}}$"
