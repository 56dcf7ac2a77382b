"""A chat template in minijinja: with fuel, without files, imports or Python objects.

Fuel limits time. It does not limit memory: doubling a string takes one instruction. Therefore
untrusted templates run in a process of their own (see `rendering`).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import minijinja

from forerun.errors import ModelError, RequestError
from forerun.text.json_text import read_json
from forerun.text.percent import TITLE, with_filters

FUEL = 5_000_000
"""Instructions per rendering: about a quarter of a second."""

_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_LINE_END = re.compile("\r\n?")
_APPEND = re.compile(r"\{%(-?)\s*set\s+\w+\s*=\s*([\w.]+)\.append\(([\w.]+)\)\s*(-?)%\}")
_POP = re.compile(r"\{%(-?)\s*set\s+(\w+)\s*=\s*([\w.]+)\.pop\(0\)\s*(-?)%\}")
_WIDTH = re.compile(r"%(?:\([^()]*+\))?+[^a-zA-Z%]*(\*|\d{4,})")
_ASCII = re.compile("[^\x00-\x7f\ue000-\uf8ff]")


class Template:
    """A compiled template: a Renderer (see `rendering`) in this process. Safe to share between
    threads.

    Raises ModelError if it does not parse.
    """

    waits = False

    def __init__(self, source: str) -> None:
        self._environment = _environment(_plain_statements(source))

    def render(self, names: dict[str, Any]) -> str:
        """Render the template with these names as its variables. Raises RequestError if they cannot
        be rendered or the template rejects them, ModelError if it does not end within FUEL.
        """
        try:
            return self._environment.render_template("chat", **names)
        except minijinja.TemplateError as error:
            reason = error.detail or error.kind
            where = f"line {error.line} of the chat template"
            if "fuel" in str(error).splitlines()[0]:
                raise ModelError(f"the chat template does not end (at {where})") from error
            raise RequestError(
                f"the chat template cannot render these messages: {reason} ({where})", "messages"
            ) from error

    def close(self) -> None:
        """Do nothing: there is no process."""


def _plain_statements(source: str) -> str:
    """Return a template for minijinja: without transformers' `{% generation %}`, which marks
    training text and renders nothing; with Jinja's treatment of line ends; and with replacements
    for statements that minijinja lacks: `'...' % x`, and lists changed in place, which become new
    lists.
    """
    source = _GENERATION.sub(
        lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}",
        _LINE_END.sub("\n", source),
    )
    source = with_filters(source)
    source = _APPEND.sub(r"{%\1 set \2 = \2 + [\3] \4%}", source)
    return _POP.sub(r"{%\1 set \2 = \3[0] %}{% set \3 = \3[1:] \4%}", source)


def _environment(source: str) -> minijinja.Environment:
    environment = minijinja.Environment(
        fuel=FUEL,
        undefined_behavior="lenient",
        auto_escape_callback=lambda name: False,
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
        debug=False,
        filters={
            "tojson": _tojson,
            "from_json": partial(read_json, repeated=True),
            "format": _format,
            "indent": _indent,
            TITLE: lambda value: str(value).title(),
        },
        tests={"iterable": _iterable},
        globals={"raise_exception": _raise, "strftime_now": _strftime_now},
    )
    for name in ("slice", "batch"):
        environment.remove_filter(name)
    try:
        environment.add_template("chat", source)
    except minijinja.TemplateError as error:
        reason = error.detail or error.kind
        raise ModelError(f"the model's chat template, line {error.line}: {reason}") from error
    return environment


def _iterable(value: Any) -> bool:
    """Return whether a value is iterable, as in Jinja: `none` is not (for minijinja it is, and its
    length is an error).
    """
    return isinstance(value, Iterable)


def _raise(message: str) -> None:
    raise RequestError(f"the chat template refuses these messages: {message}", "messages")


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, like transformers' filter: without HTML escapes. Markers are
    unchanged.
    """
    pair = None if separators is None else (separators[0], separators[1])
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=_small(indent),
        separators=pair,
        sort_keys=sort_keys,
    )
    return _ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _format(pattern: str, *values: Any) -> str:
    if _WIDTH.search(pattern):
        raise RequestError("the chat template formats with an absurd width", "messages")
    mapped = len(values) == 1 and isinstance(values[0], Mapping) and "%(" in pattern
    try:
        return str(pattern) % (values[0] if mapped else values)
    except (TypeError, ValueError, KeyError) as error:
        message = f"the chat template cannot format {pattern[:60]!r}: {error}"
        raise RequestError(message, "messages") from error


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    pad = " " * (_small(width) or 0)
    lines = str(text).split("\n")
    return "\n".join(
        pad + line if (line or blank) and (index or first) else line
        for index, line in enumerate(lines)
    )


def _small(width: int | None) -> int | None:
    if width is not None and not 0 <= int(width) <= 64:
        raise RequestError(f"the chat template indents by {width} spaces", "messages")
    return width
