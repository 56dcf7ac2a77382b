"""Matches grammars with llguidance."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from threading import Lock
from time import sleep
from typing import Any

import llguidance
import numpy as np

from forerun.constrain.grammar import Grammar, Kind
from forerun.constrain.grammar.calls import SLASHES
from forerun.constrain.matcher.automaton import Vocabulary
from forerun.constrain.matcher.limits import CALL_LIMITS, LIMITS
from forerun.constrain.matcher.slashes import Slashes
from forerun.constrain.schema.paths import locate
from forerun.constrain.schema.patterns import assertion
from forerun.machine import trim_memory
from forerun.text.pieces import PieceTable
from forerun.types import AnyArray, Ints

LONG = 256
"""Characters of a forced text that are tokenized at once; the last quarter is dropped again, since
its tokens may have been cut.
"""


class GuidanceAutomaton:
    """An Automaton on an llguidance matcher.

    slashes  of a grammar with JSON, in whose strings slashes may be escaped
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        slashes: Slashes | None = None,
        before: llguidance.LLMatcher | None = None,
    ) -> None:
        self._matcher, self._slashes = matcher, slashes
        # A copy from before the backslash that the text ends with; only read and copied.
        self._before = before

    @property
    def complete(self) -> bool:
        """Whether llguidance has stopped: the text is complete."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        """The message of llguidance if the matcher failed permanently, else ""."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else ""

    def fork(self) -> "GuidanceAutomaton":
        """Return a copy at the same position, in 2 to 6 microseconds after 100 tokens of JSON, 50
        to 80 after 1,000. Despite its name, deep_copy shares the lexer: if that reaches its limit
        of states, all forks of one beginning fail. Therefore each request has its own beginning.
        """
        return GuidanceAutomaton(self._matcher.deep_copy(), self._slashes, self._before)

    def take(self, token: int) -> bool:
        """Advance the grammar by a token. Returns False, and changes nothing, if the grammar does
        not allow it. llguidance does not recover from a rejected token, so the token is tested
        first.
        """
        if self._slashes is None:
            return bool(self._matcher.try_consume_tokens([token]) == 1)
        places = [self._matcher]
        if self._before is not None and self._slashes.begins(token):
            places.append(self._before.deep_copy())
        for place in places:
            for ids, inner in self._slashes.readings(token):
                before = None if inner is None else place.deep_copy()
                matcher = place if len(ids) == 1 else place.deep_copy()
                if matcher.try_consume_tokens(ids) < len(ids):
                    continue
                if before is not None and inner and before.try_consume_tokens(inner) != len(inner):
                    before = None
                self._matcher, self._before = matcher, before
                return True
        return False

    def forced(self) -> list[int]:
        """Return the ids that must follow, in order; none if the text is complete."""
        if self._matcher.is_stopped() or any(self._slashed()):
            return []
        return list(self._matcher.compute_ff_tokens())

    def mask(self) -> bytes:
        """Return one bit per id, set if the token may follow (see Automaton.mask)."""
        mask, slashed = self._allowed(self._matcher), self._slashed()
        if not any(slashed):
            return mask
        both = np.frombuffer(mask, np.uint8) | np.frombuffer(slashed, np.uint8)
        return bytes(both.tobytes())

    def _allowed(self, matcher: llguidance.LLMatcher) -> bytes:
        """Return the mask of `matcher`, which is this one or its copy from before a backslash."""
        mask = bytes(matcher.compute_bitmask())
        if self._slashes is None:
            return mask

        def fits(ids: list[int]) -> bool:
            first = mask[ids[0] // 8] >> ids[0] % 8 & 1
            return bool(first) and matcher.deep_copy().try_consume_tokens(ids) == len(ids)

        return self._slashes.with_shown(mask, fits)

    def _slashed(self) -> bytes:
        """Return a mask of the tokens that may follow because the text ends with a backslash; b""
        if it does not.
        """
        if self._before is None or self._slashes is None or self._before.is_error():
            return b""
        return self._slashes.of(self._allowed(self._before))


def begin(
    vocabulary: llguidance.LLTokenizer, slashes: Slashes | None, text: str, apart: bool
) -> GuidanceAutomaton | str:
    """Return a new automaton at the beginning of a grammar in llguidance's form, which shares
    nothing that can fail with any other; or a string with the reason why there is none. Takes 0.5
    to 1 ms, with 1,500 optional properties 140; other threads run meanwhile.

    slashes  of the vocabulary, if the grammar contains JSON
    apart    for a process of its own: a step may cost more
    """
    limits = LIMITS if apart else CALL_LIMITS
    matcher = llguidance.LLMatcher(vocabulary, text, limits=limits, log_level=0)
    matcher.compute_bitmask()  # The first mask takes longest; a dead end shows here.
    if matcher.is_error():
        return str(matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting():
        return "no text satisfies it"
    return GuidanceAutomaton(matcher, slashes)


_OF_JSON = '{"grammars":[{"name":"json_schema",'
"""Beginning of a schema in llguidance's form."""


SLICES = [r"""[^"\\\x00-\x1F\x7F]{1,10}""", r"""[^"\\\x00-\x1F\x7F]{1,30}"""]
"""Patterns of tokens within strings, so that masks of strings are computed at once: .04 to .6 ms
with 262,144 tokens, where it takes 2.6 without. The library's four patterns are no faster, but take
.2 s more for the first request, and 40 MB.
"""


_STEP = 0.03
"""Seconds of a pause that other threads get: a step of another request takes no more. (Gemma 270M,
a stream beside its first grammar: .54 to .61 s without a token; .8 to .9 without the pauses.)
"""


class Guidance:
    """llguidance for one tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._slashes: dict[bool, Slashes] = {}

    def build(self, text: str) -> Callable[[bool], GuidanceAutomaton | str]:
        """Return `begin` bound to this tokenizer and a grammar in llguidance's form, as the
        compiling process translated it. The first call passes the vocabulary to llguidance. Raises
        nothing: `begin` reports an invalid grammar.
        """
        of_json = text.startswith(_OF_JSON)
        with self._lock:
            vocabulary, known = self._vocabulary
            slashes = None
            if of_json or text.startswith(SLASHES):
                slashes = self._slashes.get(of_json)
                if slashes is None:
                    special = known.special_token_ids
                    slashes = Slashes(known.tokens, known.longest, special, of_json)
                    self._slashes[of_json] = slashes
        return partial(begin, vocabulary, slashes, text)

    @cached_property
    def _vocabulary(self) -> tuple[llguidance.LLTokenizer, "_Vocabulary"]:
        """The vocabulary for llguidance, and ours. Created in two calls that hold the interpreter's
        lock, .4 s each with 262,144 tokens; other threads have time for a step after each.
        """
        known: Any = _Vocabulary(self._tokenizer)
        whole = llguidance.LLTokenizer(known, eos_token=list(self._tokenizer.eos_ids), slices=[])
        sleep(_STEP)
        vocabulary = whole.with_slices(SLICES)
        del whole
        known.tokens = PieceTable.of(known.tokens)
        trim_memory()
        sleep(_STEP)
        return vocabulary, known

    def explained(self, grammar: Grammar, message: str) -> str:
        """Return an error message for users: llguidance's `message` on one line, with the request
        field and, if known, the path or place in the source.
        """
        if "NoExtension" in message:
            return f"{grammar.field} cannot be satisfied by any text"
        lines = [line.rstrip() for line in message.splitlines() if line.strip()]
        lines = [line for line in lines if "<non-verbose/>" not in line]
        if " cannot be honoured: " in message and message.startswith(grammar.field):
            return message  # Of one tool among several.
        if grammar.kind is Kind.JSON_SCHEMA:
            if " cannot be honoured: " in message:
                return f"{grammar.field}: {message}"
            text, path = " ".join(map(str.strip, lines)), locate(grammar.source, message)
            return f"{grammar.field}: {f'{path} cannot be honoured: ' if path else ''}{text}"
        if grammar.kind is Kind.REGEX and "lookarounds not supported" in message:
            placed = assertion(grammar.source, grammar.field)
            if placed is not None:
                return str(placed)
        if grammar.kind is Kind.REGEX and "regex parse error" in message:
            # Between the headline and the excerpt of the grammar are the pattern and its caret.
            ends = (i for i, line in enumerate(lines) if "start: " in line)
            lines = ["", *lines[1 : next(ends, None)]]
        return f"{grammar.field} cannot be compiled: " + "\n".join(lines)


class _Vocabulary:
    """The tokenizer in the form that llguidance needs."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Vocabulary) -> None:
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens: Sequence[bytes] = [
            tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)
        ]
        # An ordinary token that ends the text, such as a line break, cannot occur within it.
        self.special_token_ids = sorted(tokenizer.special_ids.union(tokenizer.eos_ids))
        self._encode, self._ends = tokenizer.encode_within, frozenset(tokenizer.eos_ids)

    @cached_property
    def _spelled(self) -> tuple[AnyArray, Ints, int]:
        """(int64[n] ascending hashes of the bytes of all ids that are no control tokens, int32[n]
        these ids, length of the longest). A dictionary of 262,144 would take 40 MB more.
        """
        special, longest = set(self.special_token_ids), max(map(len, self.tokens), default=0)
        pieces = enumerate(self.tokens)
        ids = np.fromiter((id for id, piece in pieces if piece and id not in special), np.int32)
        hashes = np.fromiter((hash(self.tokens[id]) for id in ids), np.int64, len(ids))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], ids[order], longest

    def _longest_at(self, data: bytes, at: int) -> int | None:
        """Return the id of the longest token that `data` has at index `at`; None if there is none.
        Of ids with the same bytes, the last.
        """
        hashes, ids, longest = self._spelled
        texts = [data[at:end] for end in range(min(len(data), at + longest), at, -1)]
        places = np.searchsorted(hashes, [*map(hash, texts)], side="right") - 1
        for text, place in zip(texts, places.tolist(), strict=True):
            if place >= 0 and hashes[place] == hash(text) and self.tokens[ids[place]] == text:
                return int(ids[place])
        return None

    def __call__(self, text: str | bytes) -> list[int]:
        """Return ids of a forced text, with exactly its bytes. Of a long text only the beginning,
        since this is called at every node and no step uses more.
        """
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        if len(plain) <= 2 * LONG:
            ids = self._encode(plain)
            return ids if self._is_text(ids) and self._bytes(ids) == data else self.longest(data)
        ids, dropped = self._encode(plain[:LONG]), 0
        while ids and dropped < LONG // 4:
            dropped += len(self.tokens[ids.pop()])
        whole = ids and self._is_text(ids) and data.startswith(self._bytes(ids))
        return ids if whole else self.longest(data[:LONG])

    def _is_text(self, ids: list[int]) -> bool:
        return self._ends.isdisjoint(ids)

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.tokens[id] for id in ids)

    def longest(self, data: bytes) -> list[int]:
        """Return the ids of the longest tokens of `data`, one after the other, until none matches.
        For text that the tokenizer would change (it normalizes, or the bytes are no characters).
        """
        ids, at = list[int](), 0
        while at < len(data) and (found := self._longest_at(data, at)) is not None:
            ids.append(found)
            at += len(self.tokens[found])
        return ids
