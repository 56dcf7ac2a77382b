"""Faults of llguidance that we work around. Each test fails when it has mended the fault.

They use the library alone, none of our code.
"""

from importlib.metadata import version

import llguidance
import pytest

MENDED = (
    "llguidance {} no longer has this fault. Say so in docs/inside/llguidance-rollback.md and "
    "delete this test. Keep the copies: only they make masks independent of any library's rollback."
)


class Vocabulary:
    """Bytes, and tokens that reach from one lexeme into the next."""

    is_tokenizer_wrapper = True
    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
    spanning = (b':"', b":1", b":2")
    tokens = (*(bytes([value]) for value in range(256)), b"<end>", *spanning)

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(Vocabulary())
PAIR = llguidance.LLMatcher.grammar_from_json_schema(
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}'
)
FORCED = llguidance.LLMatcher.grammar_from_lark(
    'start: "(" ("a" COLON "1" | "b" COLON "2")\nCOLON: /[:;]/'
)


def behind(grammar: str, text: bytes) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(TOKENIZER, grammar)
    assert matcher.consume_tokens(list(text))
    return matcher


def spanning(matcher: llguidance.LLMatcher) -> set[bytes]:
    """Those of the longer tokens that may follow."""
    mask = matcher.compute_bitmask()
    return {text for id, text in enumerate(Vocabulary.spanning, 257) if mask[id // 8] >> id % 8 & 1}


def test_a_mask_is_remembered_over_a_rollback():
    assert spanning(behind(PAIR, b'{"name"')) == {b':"'}
    matcher = behind(PAIR, b'{"age"')
    assert spanning(matcher) == {b":1", b":2"}
    assert matcher.rollback(len(b'age"')) and matcher.consume_tokens(list(b'name"'))
    assert spanning(matcher) != {b':"'}, MENDED.format(version("llguidance"))
    assert spanning(matcher) == {b":1", b":2"}, "the fault is another one now"


@pytest.mark.parametrize("query_mask", [False, True])
def test_asking_at_the_place_rolled_back_to_does_not_always_help(query_mask):
    """Where that place forces a token, its mask does not replace what is remembered."""
    assert spanning(behind(FORCED, b"(b")) == {b":2"}
    matcher = behind(FORCED, b"(a")
    assert spanning(matcher) == {b":1"}
    assert matcher.rollback(2)
    if query_mask:
        assert matcher.compute_bitmask()[ord("(") // 8] == 1 << ord("(") % 8
    assert matcher.consume_tokens(list(b"(b"))
    assert spanning(matcher) == {b":1"}, MENDED.format(version("llguidance"))


def test_copies_made_before_know_nothing_of_each_other():
    """What we rely on instead."""
    for grammar, first, second in ((PAIR, b'{"age"', b'{"name"'), (FORCED, b"(a", b"(b")):
        root = behind(grammar, first[:1])
        root.compute_bitmask()
        for text in (first, second, first, second):
            copy = root.deep_copy()
            assert copy.consume_tokens(list(text[1:]))
            assert spanning(copy) == spanning(behind(grammar, text))
        assert root.compute_bitmask() == behind(grammar, first[:1]).compute_bitmask()


def test_a_rule_with_a_limit_of_tokens_cannot_be_rolled_back():
    limited = llguidance.LLMatcher.grammar_from_lark('start: a "!"\na[max_tokens=3]: /[a-z]*/')
    matcher = behind(limited, b"xy")
    assert not matcher.rollback(1), MENDED.format(version("llguidance"))
    assert "rollback not supported" in matcher.get_error()
