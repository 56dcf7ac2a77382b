"""Grammars matched by xgrammar: optional, for it brings torch and transformers with it."""

import json
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import xgrammar

from forerun.constrain.automaton import Vocabulary
from forerun.constrain.grammar import Grammar, Kind
from forerun.constrain.xgrammar_rules import check, plain_dots

WHITESPACE = 40
"""Characters between JSON tokens at most."""
LONG = 256
"""Characters of a forced text that are made into tokens at once."""


def compile_grammar(
    compiler: "xgrammar.GrammarCompiler", kind: str, source: str, one_line: bool
) -> "xgrammar.CompiledGrammar":
    """Raises RuntimeError where the source cannot be read."""
    if kind == Kind.REGEX:
        return compiler.compile_regex(plain_dots(source))
    if kind == Kind.GRAMMAR:
        return compiler.compile_grammar(source)
    if one_line:
        pair = (", ", ": ")
        return compiler.compile_json_schema(
            source, any_whitespace=False, separators=pair, strict_mode=False
        )
    return compiler.compile_json_schema(source, strict_mode=False, max_whitespace_cnt=WHITESPACE)


def compiler_of(tokens: list[bytes], ends: list[int]) -> "xgrammar.GrammarCompiler":
    """A compiler for a vocabulary: the bytes of each id, none for control tokens."""
    kind = xgrammar.VocabType.RAW
    info = xgrammar.TokenizerInfo(tokens, kind, vocab_size=len(tokens), stop_token_ids=ends)
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


_Answer = TypeVar("_Answer")
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")


class VocabularyMasks:
    """What the automata of one tokenizer share."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        special = {*tokenizer.special_ids, *tokenizer.eos_ids}
        ids = range(tokenizer.vocab_size)
        self.tokens = [b"" if id in special else tokenizer.token_bytes(id) for id in ids]
        self.ends = list(tokenizer.eos_ids)
        self.encode = tokenizer.encode_part
        self.words = -(-len(self.tokens) // 32)
        self.end_mask = self.only(*self.ends)
        known = [id for id in ids if self.tokens[id] or id in self.ends]
        self.known = self.only(*known)
        # A string of limited length would let raw control characters in: no JSON has them.
        self.in_json = self.only(*(id for id in known if not _CONTROL.search(self.tokens[id])))

    def only(self, *tokens: int) -> bytes:
        """The mask that allows these tokens."""
        bits = np.zeros(self.words * 32, np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").tobytes()


class XgrammarAutomaton:
    """An xgrammar matcher. See Automaton.

    Where only one text can follow, xgrammar allows every spelling of it in tokens. Here, as with
    llguidance, the tokenizer's own is the only one: so it can be drafted, and is what the model
    has learned.

    known  the mask of tokens that xgrammar may be shown at all
    """

    def __init__(
        self, matcher: "xgrammar.GrammarMatcher", words: VocabularyMasks, known: bytes
    ) -> None:
        self._matcher = matcher
        self._words = words
        self._known = known
        self._fault = ""
        # Text that is certain to follow and how much of it has.
        self._sure: tuple[bytes, int] | None = None
        # Of the present place, where they are known.
        self._mask: bytes | None = None
        self._open: bytes | None = None

    @property
    def error(self) -> str:
        """See Automaton."""
        return self._fault

    @property
    def complete(self) -> bool:
        """See Automaton."""
        if self._asked(self._matcher.is_terminated, False):
            return True
        return (
            self._asked(self._matcher.is_completed, False)
            and self._allowed() == self._words.end_mask
        )

    def fork(self) -> "XgrammarAutomaton":
        """See Automaton."""
        copy = XgrammarAutomaton(self._matcher.fork(), self._words, self._known)
        copy._fault, copy._sure = self._fault, self._sure
        copy._mask, copy._open = self._mask, self._open
        return copy

    def take(self, token: int) -> bool:
        """See Automaton."""
        if not self._known[token >> 3] >> (token & 7) & 1:
            return False
        if self._asked(self._matcher.is_terminated, True):
            return False
        taken = self._asked(self._matcher.accept_token, False, token)
        if taken:
            self._sure = _behind(self._sure, self._words.tokens[token])
            self._mask = self._open = None
        return taken

    def forced(self) -> list[int]:
        """See Automaton."""
        tokens: list[int] = []
        length, place = 0, self
        while length < LONG and not place.complete:
            token = place._forced_token()
            if token is None:
                break
            place = self.fork() if place is self else place
            if not place.take(token):
                break
            tokens.append(token)
            length += len(self._words.tokens[token])
        return tokens

    def mask(self) -> bytes:
        """See Automaton."""
        if self._mask is None:
            token = self._forced_token()
            self._mask = self._allowed() if token is None else self._words.only(token)
        return self._mask

    def _forced_token(self) -> int | None:
        """The only token that may follow, if there is one."""
        if self._sure is None:  # To ask costs time in proportion to the answer's length.
            self._sure = self._asked(self._matcher.find_jump_forward_string, "").encode(), 0
        begun = self._sure[1]
        text = self._sure[0][begun : begun + LONG].decode("utf-8", "ignore")
        # The last token may be cut short by the end of what is certain.
        ids = self._words.encode(text, False)[:-1] if text else []
        if ids:
            return ids[0]
        allowed = self._allowed()
        if allowed.count(0) < len(allowed) - 1:
            return None
        bits = np.flatnonzero(np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little"))
        return int(bits[0]) if len(bits) == 1 and bits[0] not in self._words.ends else None

    def _allowed(self) -> bytes:
        """Every token that xgrammar allows; the end where it has failed."""
        if self._open is None:
            bits = np.zeros(self._words.words, np.int32)
            if not self._asked(self._matcher.fill_next_token_bitmask, True, bits):
                bits[:] = -1  # It says so instead of writing it.
            # Beyond the vocabulary its bits are as they come.
            bits &= np.frombuffer(self._known, np.int32)
            self._open = self._words.end_mask if self._fault else bits.tobytes()
        return self._open

    def _asked(self, function: Callable[..., _Answer], otherwise: _Answer, *given: Any) -> _Answer:
        """What a function of xgrammar's says. It raises where it gives up; then never again."""
        if not self._fault:
            try:
                return function(*given)
            except UnicodeDecodeError:  # A certain text that ends inside a character is not told.
                return otherwise
            except RuntimeError as error:
                self._fault = str(error) or "xgrammar failed"
        return otherwise


def _behind(sure: tuple[bytes, int] | None, token: bytes) -> tuple[bytes, int] | None:
    """What is certain behind a token, as long as it goes on as expected and in whole characters."""
    if sure is None:
        return None
    text, end = sure[0], sure[1] + len(token)
    whole = end < len(text) and text[end] & 0xC0 != 0x80
    return (text, end) if whole and text.startswith(token, sure[1]) else None


class XgrammarGrammar:
    """A grammar compiled by xgrammar. See Prepared."""

    def __init__(
        self, ready: "xgrammar.CompiledGrammar", words: VocabularyMasks, known: bytes
    ) -> None:
        self._ready, self._words, self._known = ready, words, known

    @property
    def size(self) -> int:
        """See Prepared."""
        return int(self._ready.memory_size_bytes)

    def begin(self, apart: bool = False) -> XgrammarAutomaton:
        """See Prepared."""
        ready: Any = self._ready
        return XgrammarAutomaton(xgrammar.GrammarMatcher(ready), self._words, self._known)


class Xgrammar:
    """The xgrammar of one tokenizer. See Backend."""

    name = "xgrammar"
    command = (sys.executable, "-m", "forerun.constrain.xgrammar_worker")
    lanes = 1

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._words = VocabularyMasks(tokenizer)
        self._compiler = compiler_of(self._words.tokens, self._words.ends)

    def init_message(self) -> str:
        """The vocabulary: what compiling costs depends on it."""
        tokens = [token.hex() for token in self._words.tokens]
        return json.dumps({"tokens": tokens, "ends": self._words.ends})

    def check(self, grammar: Grammar) -> None:
        """See Backend."""
        check(grammar)

    def build(self, grammar: Grammar, compiled: str) -> "XgrammarGrammar | str":
        """See Backend. It compiles once more, without holding other threads up."""
        try:
            ready = compile_grammar(self._compiler, grammar.kind, compiled, grammar.one_line)
        except RuntimeError as error:
            return str(error)
        words = self._words
        known = words.in_json if grammar.kind is Kind.JSON_SCHEMA else words.known
        return XgrammarGrammar(ready, words, known)

    def explained(self, grammar: Grammar, message: str) -> str:
        """See Backend. Without the time and the place in xgrammar's own source."""
        if " cannot be honoured by xgrammar: " in message:
            return f"{grammar.field}: {message}"
        length = re.sub(r"^\[[^\]]*\] \S+:\d+: ", "", message, flags=re.MULTILINE).strip()
        return f"{grammar.field} cannot be compiled by xgrammar: {length}"
