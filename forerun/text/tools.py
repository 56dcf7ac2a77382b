r"""Tool calls in a model's own words: which words they are, and reading them as they come.

A format is a way of writing calls that models were trained on. All of them have a text that
begins calls; what precedes it is ordinary content.

    hermes   <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>     Hermes, Qwen
    llama3   {"name": "f", "parameters": {...}}, the whole answer           Llama 3
    mistral  [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]           Mistral
    glm      <tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forerun.text.reasoning import overlap

Tools = Sequence[Mapping[str, Any]]
"""OpenAI's: [{"type": "function", "function": {"name", "description", "parameters"}}]."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """News of one call of an answer: first its name, then its arguments, JSON text in pieces."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    opener     begins one call or a list of them; "" = calls are an answer that begins with `{`
    closer     ends what the opener began; "" = the end of the answer does
    arguments  the key that holds the arguments, where calls are JSON
    """

    name: str
    opener: str
    closer: str
    arguments: str


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments")
LLAMA3 = ToolFormat("llama3", "", "", "parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "]", "arguments")
GLM = ToolFormat("glm", "<tool_call>", "</tool_call>", "")

FORMATS = {format.name: format for format in (HERMES, LLAMA3, MISTRAL, GLM)}

_SIGNS = (("<arg_key>", GLM), ("[TOOL_CALLS]", MISTRAL), ("<tool_call>", HERMES))


def takes_tools(template: str) -> bool:
    """Whether a chat template tells the model about tools."""
    return re.search(r"\btools\b", template) is not None


def format_of(template: str) -> ToolFormat:
    """The format that a chat template shows; Hermes where it shows none."""
    for sign, format in _SIGNS:
        if sign in template:
            return format
    llama = takes_tools(template) and "parameters" in template and "ipython" in template
    return LLAMA3 if llama else HERMES


class ToolReader:
    """Reads the text of one answer, however it is cut, into content and calls.

    What is no call after all is content, word for word. White space around calls is dropped.
    """

    def __init__(self, format: ToolFormat, tools: Tools) -> None:
        self._format = format
        self._body: _Body = _GlmCalls(tools) if format is GLM else _JsonCalls(format)
        self._inside = False
        self._spoke = False
        self._held = ""
        self._unread: list[str] = []
        self._read = False

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._body.count > 0

    def push(self, text: str) -> Said:
        """What `text` makes certain."""
        content, calls = "", list[CallPiece]()
        self._held += text
        while self._held:
            before = self._inside
            if self._inside:
                calls += self._within()
                content += "" if self._inside else self._no_call()
            else:
                content += self._outside()
            if self._inside == before:
                break
        self._spoke = self._spoke or bool(content)
        return Said(content, tuple(calls))

    def finish(self) -> Said:
        """What was held back, once no text will follow."""
        held, self._held = self._held, ""
        if self._inside:
            return Said(self._no_call() + (held if not self._read else ""))
        return Said(held.rstrip() if self.called else held)

    def _enter(self, opener: str, rest: str) -> None:
        self._inside, self._read, self._unread = True, False, [opener]
        self._held = rest

    def _within(self) -> Sequence[CallPiece]:
        """Let the body read. What it reads before it finds a call may be none."""
        text = self._held
        calls, self._held, self._inside = self._body.push(text)
        self._read = self._read or bool(calls)
        if self._read:
            self._unread.clear()
        else:
            self._unread.append(text[: len(text) - len(self._held)])
        return calls

    def _no_call(self) -> str:
        """The text of a body, opener included, that had no call in it."""
        text = "".join(self._unread)
        self._unread.clear()
        return text

    def _outside(self) -> str:
        """Move content out; hold back white space and what may begin a call."""
        text, opener = self._held, self._format.opener
        if not opener:
            return self._outside_llama()
        at = text.find(opener)
        if at >= 0:
            content = text[:at].rstrip()
            self._enter(text[len(content) : at] + opener, text[at + len(opener) :])
            return content
        cut = len(text[: len(text) - overlap(text, opener)].rstrip())
        self._held = text[cut:]
        return text[:cut]

    def _outside_llama(self) -> str:
        """Only an answer that begins with a brace is a call."""
        text = self._held
        if not self._spoke and not text.strip():
            return ""
        if (not self._spoke or self.called) and text.lstrip().startswith("{"):
            self._enter("", text)
            return ""
        self._held = ""
        return text


class _Body(Protocol):
    """Reads what stands between opener and closer. count = calls begun so far."""

    count: int

    def push(self, text: str) -> tuple[Sequence[CallPiece], str, bool]:
        """What is certain, the text that is left over, and whether the body goes on."""
        ...


class _JsonCalls:
    """Objects with a name and arguments, whatever stands between them."""

    def __init__(self, format: ToolFormat) -> None:
        self.count = 0
        self._closer = format.closer
        self._call: _JsonCall | None = None
        self._between = ""

    def push(self, text: str) -> tuple[Sequence[CallPiece], str, bool]:
        calls: list[CallPiece] = []
        for place, character in enumerate(text, 1):
            if self._call is not None:
                self._call.feed(character)
                calls += self._news(self._call)
                self._call = None if self._call.ended else self._call
            elif character == "{":
                self._call, self._between = _JsonCall(), ""
                self._call.feed(character)
            elif self._closed(character):
                return _merged(calls), text[place:], False
        return _merged(calls), "", True

    def _closed(self, character: str) -> bool:
        """Whether a character between calls completes the closer."""
        self._between = (self._between + character)[-len(self._closer) :]
        return bool(self._closer) and self._between == self._closer

    def _news(self, call: "_JsonCall") -> list[CallPiece]:
        if call.name is None:
            return []
        news: list[CallPiece] = []
        if not call.told:
            call.told = True
            news.append(CallPiece(self.count, call.name))
            self.count += 1
        if call.arguments:
            news.append(CallPiece(self.count - 1, None, call.arguments))
            call.arguments = ""
        return news


class _JsonCall:
    """One object, character by character.

    name       None until it is known; told = somebody has heard it
    arguments  certain and not yet told
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.told = False
        self.arguments = ""
        self.ended = False
        self._depth = 0
        self._quoted = self._escaped = False
        self._key: Any = None
        self._word: list[str] = []
        self._blank = ""

    def feed(self, character: str) -> None:
        """Take in one more character of the object, its first brace included."""
        if self._quoted:
            self._add(character)
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return
        self._depth -= character in "}]"
        at_end = self._depth == 0 and character == "}"
        if at_end or (self._depth == 1 and character == ","):
            self._end_value()
            self.ended = at_end
        elif self._depth == 1 and character == ":" and self._key is None:
            self._key = _loads("".join(self._word))
            self._word.clear()
            self._blank = ""
        elif self._depth >= 1:
            self._add(character)
        self._quoted = character == '"'
        self._depth += character in "{["

    def _add(self, character: str) -> None:
        """One more character of a key or value; white space only where it is inside."""
        if character.isspace() and not self._quoted:
            self._blank += character if self._word else ""
            return
        piece, self._blank = self._blank + character, ""
        self._word.append(piece)
        if self._holds_arguments and self._word[0] != '"':
            self.arguments += piece

    @property
    def _holds_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _end_value(self) -> None:
        value = "".join(self._word)
        if self._key == "name":
            name = _loads(value)
            self.name = name if isinstance(name, str) and name else None
        elif self._holds_arguments and value.startswith('"'):
            self.arguments = str(_loads(value) or "")  # JSON inside a string.
        self._key, self._blank = None, ""
        self._word.clear()


class _GlmCalls:
    """A name, then pairs of key and value in tags; strings stand there without quotes."""

    def __init__(self, tools: Tools) -> None:
        self.count = 0
        self._types = {
            tool["function"]["name"]: _properties(tool["function"].get("parameters"))
            for tool in tools
        }
        self._name: str | None = None
        self._pairs = 0

    def push(self, text: str) -> tuple[Sequence[CallPiece], str, bool]:
        calls: list[CallPiece] = []
        if self._name is None:
            end = _NAME_END.search(text)
            if end is None:
                return (), text, True
            self._name, text = text[: end.start()].strip(), text[end.start() :]
            calls.append(CallPiece(self.count, self._name))
            self.count += 1
        while "</arg_value>" in text and (pair := _PAIR.match(text)):
            opening = ", " if self._pairs else "{"
            argument = f"{opening}{json.dumps(pair[1])}: {self._value(pair[1], pair[2])}"
            calls.append(CallPiece(self.count - 1, None, argument))
            self._pairs += 1
            text = text[pair.end() :]
        closer = GLM.closer
        if text.lstrip().startswith(closer):
            calls.append(CallPiece(self.count - 1, None, "}" if self._pairs else "{}"))
            self._name, self._pairs = None, 0
            return _merged(calls), text.lstrip()[len(closer) :], False
        return _merged(calls), text, True

    def _value(self, key: str, text: str) -> str:
        """A value as JSON: as it stands, unless it is to be a string."""
        kind = self._types.get(self._name or "", {}).get(key)
        if kind == "string" or _loads(text, _NOTHING) is _NOTHING:
            return json.dumps(text, ensure_ascii=False)
        return text.strip()


_NAME_END = re.compile(r"\n|<arg_key>|</tool_call>")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", flags=re.DOTALL)
_NOTHING = object()


def _merged(calls: list[CallPiece]) -> tuple[CallPiece, ...]:
    """Neighbouring pieces of one call's arguments in one."""
    merged: list[CallPiece] = []
    for piece in calls:
        last = merged[-1] if merged else None
        if last is not None and last.name is None is piece.name and last.index == piece.index:
            merged[-1] = CallPiece(last.index, None, last.arguments + piece.arguments)
        else:
            merged.append(piece)
    return tuple(merged)


def _loads(text: str, otherwise: Any = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _properties(schema: Any) -> dict[str, Any]:
    """Name -> declared type of an object's properties."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: item.get("type") for name, item in properties.items() if isinstance(item, dict)}
