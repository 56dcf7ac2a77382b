"""Rewrites `'...' % x`, `x.title()` and `missing|length` in chat templates, which minijinja does
not support with Jinja's meaning.

They become filters: `'%s: %d' % (a, b)` is `('%s: %d'|format(a, b))`. Only a string in quotes on
the left is known to be one; with anything else `%` remains the remainder.
"""

import re

_TAG = re.compile(r"\{[{%#]")
_TOKEN = re.compile(
    r"""\s++ | '(?:[^'\\]++|\\.)*+' | "(?:[^"\\]++|\\.)*+" | \d++(?:\.\d++)?+ | \w++
    | [-+]?+[%}]\} | \*\* | // | [=!<>]=  | .""",
    re.DOTALL | re.VERBOSE,
)
_RAW_END = re.compile(r"\{%[-+]?\s*+endraw\s*+[-+]?%\}")
_TITLE = [".", "title", "(", ")"]
TITLE = "title_of_python"
"""The filter for `.title()`: it also capitalises after an apostrophe."""
_EMPTY = {**dict.fromkeys(("length", "count", "first", "last"), "[]"), "items": "{}"}
"""Filters for which an undefined value counts as empty -> the empty value."""
_OPEN = {"(": ")", "[": "]", "{": "}"}


def with_filters(source: str) -> str:
    """Rewrite `'...' % x` and `.title()` in a template as filters, and give filters of undefined
    values an empty value; the rest is unchanged.
    """
    out, at = [], 0
    while tag := _TAG.search(source, at):
        out.append(source[at : tag.end()])
        at = tag.end()
        if tag[0] == "{#":
            end = source.find("#}", at)
            end = len(source) if end < 0 else end + 2
            out.append(source[at:end])
            at = end
            continue
        tokens, at = _tokens(source, at, "}}" if tag[0] == "{{" else "%}")
        out.append(_rewritten(tokens))
        words = [token for token in tokens if token.isidentifier()]
        if tag[0] == "{%" and words[:1] == ["raw"]:
            ended = _RAW_END.search(source, at)
            end = ended.end() if ended else len(source)
            out.append(source[at:end])
            at = end
    return "".join(out) + source[at:]


def _tokens(source: str, at: int, closer: str) -> tuple[list[str], int]:
    """Return the tokens from `at` to the end of the tag, including it, and the index of the end."""
    tokens: list[str] = []
    depth = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        assert match is not None
        token = match[0]
        if token.endswith(closer) and (depth <= 0 or closer == "%}"):
            return [*tokens, token], match.end()
        if len(token) > 1 and token[-1] == "}" and token[-2:] in ("}}", "%}"):
            token = token[:1]  # Brackets that close, no end of a tag.
        depth += (token in _OPEN) - (token in _OPEN.values())
        tokens.append(token)
        at += len(token)
    return tokens, at


def _rewritten(tokens: list[str]) -> str:
    out, at = "", 0
    while at < len(tokens):
        operator = _behind(tokens, at + 1)
        operand = _behind(tokens, operator + 1)
        if tokens[at][0] in "'\"" and tokens[operator : operator + 1] == ["%"]:
            end = _operand_end(tokens, operand)
            if end > operand:
                out += f"({tokens[at]}|format({_arguments(tokens[operand:end])}))"
                at = end
                continue
        if tokens[at] == "|" and (empty := _EMPTY.get("".join(tokens[operator : operator + 1]))):
            out += f"|default({empty})"
        behind = _behind(tokens, at + len(_TITLE))
        if tokens[at : at + len(_TITLE)] == _TITLE and tokens[behind : behind + 1] not in (
            ["."],
            ["["],
        ):
            out += f"|{TITLE}"
            at += len(_TITLE)
            continue
        out += tokens[at]
        at += 1
    return out


def _behind(tokens: list[str], at: int) -> int:
    """Return the index of the next token that is not white space."""
    while at < len(tokens) and tokens[at].isspace():
        at += 1
    return at


def _operand_end(tokens: list[str], at: int) -> int:
    """Return the index after the operand that begins at `at`: a value with its attributes, calls
    and filters; `at` if there is none.
    """
    first = at
    if tokens[at : at + 1] == ["-"]:
        at = _behind(tokens, at + 1)
    if at >= len(tokens) or not (
        tokens[at] in _OPEN or tokens[at][0] in "'\"" or _word(tokens, at)
    ):
        return first
    at = _closed(tokens, at) if tokens[at] in _OPEN else at + 1
    while True:
        here = _behind(tokens, at)
        sign = tokens[here] if here < len(tokens) else ""
        name = _behind(tokens, here + 1)
        if sign in ("(", "["):
            at = _closed(tokens, here)
        elif sign in (".", "|") and _word(tokens, name):
            at = name + 1
        else:
            return at


def _word(tokens: list[str], at: int) -> bool:
    return at < len(tokens) and re.match(r"\w", tokens[at]) is not None


def _closed(tokens: list[str], at: int) -> int:
    """Return the index after the bracket that closes the one at `at`."""
    depth = 0
    while at < len(tokens):
        depth += (tokens[at] in _OPEN) - (tokens[at] in _OPEN.values())
        at += 1
        if not depth:
            break
    return at


def _arguments(operand: list[str]) -> str:
    """Return the filter's arguments: the items of a tuple, or one value."""
    if operand[0] == "(" and _closed(operand, 0) == len(operand):
        inner, depth = operand[1:-1], 0
        for each in inner:
            depth += (each in _OPEN) - (each in _OPEN.values())
            if each == "," and not depth:
                return _rewritten(inner).rstrip().removesuffix(",")
    return _rewritten(operand)
