"""Translates GBNF, llama.cpp's grammar language, to llguidance's Lark. Every rule stays a rule and
every character class a lexeme of one character, so nothing is matched greedily: white space never
takes characters that the text after it needs.
"""

import json
import re
from dataclasses import dataclass, field

_SPACE = re.compile(r"(?:[ \t]|#[^\n]*+)*+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*+)*+")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_REPEAT = re.compile(r"[*+?]|\{\s*+(\d*+)\s*+(,?+)\s*+(\d*+)\s*+\}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")
_NEXT_RULE = re.compile(r"[A-Za-z0-9_-]++(?:[ \t]|#[^\n]*+)*+::=")


def lark(source: str) -> str:
    """Translate a GBNF grammar to Lark, for the same language and without greedy matches. Raises
    ValueError, naming the line, if it cannot be parsed or uses an undefined rule; also if `root`
    matches no finite text.
    """
    reader = _Reader(source)
    rules = reader.rules()
    if "root" not in rules:
        raise ValueError("there is no rule named root")
    for name, rule in rules.items():
        for other, line in rule.names:
            if other not in rules:
                raise ValueError(f'unknown rule "{other}" in "{name}" at line {line}')
    _check_ends(rules)
    numbers = {name: f"r{index}" for index, name in enumerate(rules)}
    lines = [f"start: {numbers['root']}"]
    lines += [f"{numbers[name]}: {_text(rule.body, numbers)}" for name, rule in rules.items()]
    return "\n".join(lines)


# Body of a rule: alternatives of sequences of items, each with its repetition.
@dataclass(slots=True)
class _Item:
    """One item of a sequence: a Lark lexeme, the name of a rule, or a group."""

    lexeme: str = ""
    name: str = ""
    group: "list[list[_Item]]" = field(default_factory=list)
    least: int = 1
    most: int | None = 1


_Body = list[list[_Item]]


@dataclass(slots=True)
class _Rule:
    body: _Body
    names: list[tuple[str, int]]


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._names: list[tuple[str, int]] = []

    def rules(self) -> dict[str, _Rule]:
        found: dict[str, _Rule] = {}
        self._skip(_BLANK)
        while self._at < len(self._source):
            match = _NAME.match(self._source, self._at)
            if match is None:
                raise self._error("Expected the name of a rule")
            self._at = match.end()
            self._skip(_SPACE)
            if not self._taken("::="):
                raise self._error("Expected ::=")
            self._names = []
            body = self._alternatives(False)
            if match[0] in found:
                raise self._error(f'rule "{match[0]}" appears twice')
            found[match[0]] = _Rule(body, self._names)
            self._skip(_BLANK)
        return found

    def _alternatives(self, nested: bool) -> _Body:
        alternatives = [self._sequence(nested)]
        while self._taken("|"):
            alternatives.append(self._sequence(nested))
        return alternatives

    def _sequence(self, nested: bool) -> list[_Item]:
        items: list[_Item] = []
        self._skip(_BLANK)
        while self._at < len(self._source):
            if not nested and _NEXT_RULE.match(self._source, self._at):
                break
            item = self._item()
            if item is None:
                break
            items.append(self._repeated(item))
            self._skip(_BLANK)
        return items

    def _item(self) -> _Item | None:
        character = self._source[self._at]
        if character == '"':
            return _Item(lexeme=json.dumps(self._literal(), ensure_ascii=False))
        if character == "[":
            return _Item(lexeme=self._class())
        if character == ".":
            self._at += 1
            return _Item(lexeme=r"/(.|\n)/")
        if character == "(":
            self._at += 1
            group = self._alternatives(True)
            if not self._taken(")"):
                raise self._error("Expected ')'")
            return _Item(group=group)
        match = _NAME.match(self._source, self._at)
        if match is None:
            if character in "|)":
                return None
            raise self._error(f"Unexpected {character!r}")
        self._names.append((match[0], self._line()))
        self._at = match.end()
        return _Item(name=match[0])

    def _repeated(self, item: _Item) -> _Item:
        while match := _REPEAT.match(self._source, self._skip(_SPACE)):
            self._at = match.end()
            signs: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
            if match[0] in signs:
                least, most = signs[match[0]]
            else:
                if not match[1] and not match[3]:
                    raise self._error("Expected a number between { and }")
                least = int(match[1] or 0)
                most = int(match[3]) if match[3] else None if match[2] else least
            if (item.least, item.most) != (1, 1):
                item = _Item(group=[[item]])
            item.least, item.most = least, most
        return item

    def _literal(self) -> str:
        self._at += 1
        out = ""
        while self._at < len(self._source) and self._source[self._at] != '"':
            out += self._character()
        if not self._taken('"'):
            raise self._error("Expected '\"'")
        return out

    def _class(self) -> str:
        self._at += 1
        negated = self._taken("^")
        out = ""
        while self._at < len(self._source) and self._source[self._at] != "]":
            first = last = self._character()
            if self._source[self._at : self._at + 1] == "-" and not self._source.startswith(
                "-]", self._at
            ):
                self._at += 1
                last = self._character()
            out += f"\\u{{{ord(first):x}}}" + (f"-\\u{{{ord(last):x}}}" if last != first else "")
        if not self._taken("]"):
            raise self._error("Expected ']'")
        if not out:
            raise self._error("An empty character class matches nothing")
        return f"/[{'^' if negated else ''}{out}]/"

    def _character(self) -> str:
        if self._source[self._at] != "\\":
            self._at += 1
            return self._source[self._at - 1]
        code = _CODE.match(self._source, self._at)
        if code is not None:
            self._at = code.end()
            return chr(int(code[1] or code[2] or code[3], 16))
        escaped = self._source[self._at + 1 : self._at + 2]
        if escaped not in (*_ESCAPES, '"', "\\", "[", "]", "-", "^", "/"):
            raise self._error(f"Unknown escape \\{escaped}")
        self._at += 2
        return _ESCAPES.get(escaped, escaped)

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._source, self._at)
        self._at = match.end() if match else self._at
        return self._at

    def _taken(self, text: str) -> bool:
        matches = self._source.startswith(text, self._at)
        self._at += len(text) if matches else 0
        return matches

    def _line(self) -> int:
        return self._source.count("\n", 0, self._at) + 1

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{message} at line {self._line()}")


def _text(body: _Body, numbers: dict[str, str]) -> str:
    return " | ".join(" ".join(_one(item, numbers) for item in items) or '""' for items in body)


def _one(item: _Item, numbers: dict[str, str]) -> str:
    if item.most == 0:
        return '""'
    text = item.lexeme or (numbers[item.name] if item.name else f"({_text(item.group, numbers)})")
    if (item.least, item.most) == (1, 1):
        return text
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    most = "" if item.most is None else item.most
    return text + signs.get((item.least, item.most), f"{{{item.least},{most}}}")


def _check_ends(rules: dict[str, _Rule]) -> None:
    """Raise ValueError if `root` matches no finite text."""
    ending: set[str] = set()

    def ends(items: list[_Item]) -> bool:
        return all(
            item.least == 0
            or bool(item.lexeme)
            or item.name in ending
            or any(map(ends, item.group))
            for item in items
        )

    while more := {
        name for name in rules if name not in ending and any(map(ends, rules[name].body))
    }:
        ending |= more
    if "root" not in ending:
        raise ValueError("no text satisfies it: root never ends")
