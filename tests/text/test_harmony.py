"""Answers in channels, read however they are cut, as OpenAI's own reader reads them."""

import os
from itertools import combinations, pairwise
from random import Random

import pytest

from forerun.text.harmony import FINAL, START, HarmonyReader, begun_message

NAMES = ("look_up", "now")
ANALYSIS = "<|channel|>analysis<|message|>"
COMMENT = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"x": "<|"}'
BEFORE = ' to=functions.look_up<|channel|>commentary json<|message|>{"x": "<|"}'
CALLED = [["look_up", '{"x": "<|"}']]

VECTORS = [
    (f"{ANALYSIS}Hm.{NEXT}{FINAL}Four.", "Hm.", "Four.", []),
    (f"{ANALYSIS}Hm.{NEXT}{FINAL}Four.<|return|>", "Hm.", "Four.", []),
    (f"<|channel|>commentary to=assistant{ANALYSIS}Hm.{NEXT}{FINAL}Four.", "Hm.", "Four.", []),
    (f"{FINAL} a < b <| c ", "", " a < b <| c ", []),
    (f"{ANALYSIS}Hm.{NEXT}{CALL}", "Hm.", "", CALLED),
    (f"{ANALYSIS}Hm.{NEXT}{BEFORE}<|call|>", "Hm.", "", CALLED),
    (CALL, "", "", CALLED),
    (BEFORE, "", "", CALLED),
    (f"{CALL}<|call|><|start|>assistant{CALL}", "", "", CALLED * 2),
    (f"{COMMENT}Let me see.{NEXT}{CALL}", "", "Let me see.", CALLED),
    (f"{ANALYSIS}A{NEXT}{ANALYSIS}B{NEXT}{COMMENT}C{NEXT}{FINAL}D", "A\nB", "C\nD", []),
    ("<|channel|>commentary to=functions.now<|message|>", "", "", [["now", "{}"]]),
    ("<|channel|>commentary to=functions.other json<|message|>{}", "", "{}", []),
    ("<|channel|>analysis to=python code<|message|>1 + 1", "1 + 1", "1 + 1", []),
    (f"{ANALYSIS}Hm.", "Hm.", "Hm.", []),
    ("Plain words.", "", "Plain words.", []),
    (" two", "", " two", []),
    ("<|chan", "", "", []),
    ("", "", "", []),
]


def put_together(reader, parts, cut=False):
    reasoning, content, calls = "", "", []
    for piece in [*map(reader.push, parts), reader.finish(cut)]:
        reasoning, content = reasoning + piece.reasoning, content + piece.content
        for call in piece.calls:
            if call.name is not None:
                assert call.index == len(calls), "a call begins with its name, in order"
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    assert reader.called == bool(calls)
    return reasoning, content, calls


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), VECTORS)
def test_any_cut_gives_the_same(text, reasoning, content, calls):
    cuts = [(), range(1, len(text)), *combinations(range(1, len(text)), 1)]
    for cut in cuts:
        edges = [0, *cut, len(text)]
        parts = [text[a:b] for a, b in pairwise(edges)]
        events = put_together(HarmonyReader(NAMES, f"{START}assistant"), parts)
        assert events == (reasoning, content, calls), cut


def test_an_answer_without_room_is_no_answer_yet():
    for text in (f"{ANALYSIS}Hm.", f"{ANALYSIS}Hm.<|end|>", f"{ANALYSIS}Hm.{NEXT}<|channel|>fi"):
        assert put_together(HarmonyReader(NAMES), [text], cut=True) == ("Hm.", "", [])


def test_reasoning_may_stay_in_the_content():
    reader = HarmonyReader(NAMES, f"{START}assistant", apart=False)
    assert put_together(reader, [f"{ANALYSIS}Hm.{NEXT}{FINAL}Four."]) == ("", "Hm.\nFour.", [])


@pytest.mark.parametrize(
    ("begun", "text", "events"),
    [
        (f"{START}assistant{FINAL}Two and", " two", ("", " two", [])),
        (f"{START}assistant{ANALYSIS}I", f" see{NEXT}{FINAL}it", (" see", "it", [])),
        (f"{START}assistant<|channel|>", "final<|message|>it", ("", "it", [])),
        (FINAL, "it", ("", "it", [])),
    ],
)
def test_a_prompt_may_begin_the_message(begun, text, events):
    assert put_together(HarmonyReader(NAMES, begun), [text]) == events


def test_the_message_that_a_prompt_ends_in():
    assert begun_message("a<|start|>user<|message|>b<|end|><|start|>assistant") == (
        "<|start|>assistant"
    )
    assert begun_message("two and two are") is None


def test_long_texts_are_no_headers_and_are_read_once():
    text = "<|channel|>" * 40_000
    reader = HarmonyReader(NAMES)
    pieces = [reader.push(text[at : at + 64]) for at in range(0, len(text), 64)]
    assert "".join(piece.content for piece in pieces) + reader.finish().content == text


def test_openais_reader_reads_the_same():
    if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        pytest.skip("TIKTOKEN_ENCODINGS_BASE names no folder with o200k_base.tiktoken")
    harmony = pytest.importorskip("openai_harmony")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    random, words = Random(5), ("It", " rains", " <", " in Oslo", "\n", '{"a": 1}', " to=x")
    for _ in range(300):
        spoken = []
        for _ in range(random.randrange(4)):
            head = random.choice([ANALYSIS, COMMENT, FINAL])
            spoken.append(head + "".join(random.choices(words, k=random.randrange(1, 6))))
        text = NEXT.join([*spoken, random.choice([CALL, BEFORE, f"{FINAL}Done."])])
        ids = encoding.encode(text, allowed_special="all")
        messages = encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
        thoughts, said, calls = [], [], []
        for message in messages:
            body = message.content[0].text
            if message.recipient is not None:
                calls.append([message.recipient.removeprefix("functions."), body])
            else:
                (thoughts if message.channel == "analysis" else said).append(body)
        expected = ("\n".join(thoughts), "\n".join(said), calls)
        assert put_together(HarmonyReader(NAMES, f"{START}assistant"), [*text]) == expected, text
