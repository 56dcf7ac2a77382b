"""Sessions: who asks what, in which order, and what is kept. A scripted author stands in."""

import json
from itertools import count

import numpy as np
import pytest

from forerun.errors import ModelError, RequestError
from forerun.text.chat import ChatTemplate
from forerun.text.rendering import BYTE_LEVEL_TEMPLATE
from forerun.text.tokenizer import Tokenizer
from forerun.train import answers
from forerun.train.answer_store import PART, AnswerStore
from forerun.train.answers import Chat, Recipe, Writer
from forerun.train.corpus import write_chats
from forerun.train.prompts import Problems, read_prompts

TOKENIZER = Tokenizer.byte_level()
CHAT = ChatTemplate(BYTE_LEVEL_TEMPLATE, TOKENIZER)
ANSWERED = {"role": "assistant", "content": "4"}
ANSWER = "The sky scatters the short waves of the light."


class Scripted:
    """Says `says(text of the prompt)`, some calls later, in another order."""

    def __init__(self, says, most=10_000):
        self.says, self.most, self.asks = says, most, []
        self._open = []

    def ask(self, key, ask):
        if len(ask.prompt) > self.most:
            raise RequestError("too long")
        text = TOKENIZER.decode(ask.prompt, skip_special=False)
        self.asks.append((text, ask))
        self._open.append((key, self.says(text)))

    def finished(self):
        ready, self._open = self._open[-2:], self._open[:-2]
        return [(key, np.array(TOKENIZER.encode(text), np.int32)) for key, text in ready]


def write(author, prompts=None, begun=0, written=0, **recipe):
    writer = Writer(author, CHAT, TOKENIZER, Recipe(**{"answers": 6} | recipe), 3, begun)
    chats = []
    writer.write(prompts, chats.append, written)
    return writer, chats


def text_of(chat):
    return TOKENIZER.decode(chat.tokens, skip_special=False)


def wanted_of(chat):
    return TOKENIZER.decode(chat.tokens[chat.wanted])


def says(prompt):
    asking = not prompt.endswith("assistant\n")
    return "Why is the sky blue?" if asking else ANSWER


def test_without_prompts_the_target_asks_and_answers():
    author = Scripted(says)
    writer, chats = write(author, follow_up=0)
    assert len(chats) == 6
    assert {wanted_of(chat) for chat in chats} == {ANSWER}
    assert all("user\nWhy is the sky blue?" in text_of(chat) for chat in chats)
    questions = [pair for pair in author.asks if not pair[0].endswith("assistant\n")]
    assert {ask.temperature for _, ask in questions} == {1.0}
    assert all(text.endswith("user\n") for text, _ in questions)
    assert writer.begun == 6


def test_second_turns_follow_their_first():
    author = Scripted(says)
    _, chats = write(author, follow_up=1)
    for chat in chats:
        assert text_of(chat).count("Why is the sky blue?") == 2
        assert text_of(chat).count(ANSWER) == 2
        assert wanted_of(chat) == ANSWER  # Only the last answer.


def test_a_bad_second_turn_leaves_the_first():
    author = Scripted(lambda p: "x" * 400 if ANSWER in p else says(p))
    writer, chats = write(author, follow_up=1)
    assert [wanted_of(chat) for chat in chats] == [ANSWER] * 6
    assert all(text_of(chat).count("Why is the sky blue?") == 1 for chat in chats)
    assert writer.problems.loops == 6


def test_prompts_of_a_file_and_what_does_not_fit(tmp_path):
    lines = [
        json.dumps({"prompt": "One?"}),
        "no json",
        json.dumps({"prompt": "y" * 200}),
        json.dumps({"turns": ["Two?", "Three?"]}),
        json.dumps({"messages": [{"role": "user", "content": "Four?"}, ANSWERED]}),
        json.dumps({"messages": []}),
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    problems = Problems()
    author = Scripted(says, most=120)
    writer, chats = write(author, read_prompts(tmp_path / "p.jsonl", problems), follow_up=0)
    asked = sorted(text_of(chat).split("user\n")[1].split("<")[0] for chat in chats)
    assert asked == ["Four?", "One?", "Two?"]
    assert [line.split(":")[1] for line in problems.bad_lines] == ["2", "6"]
    assert writer.problems.bad_lines == ["too long"]


def test_no_chat_is_begun_after_time_is_up(monkeypatch):
    """By a clock on which every look takes a second."""
    monkeypatch.setattr(answers, "monotonic", count().__next__)
    author = Scripted(says)
    _, chats = write(author, answers=10_000, minutes=2)
    assert 20 < len(chats) < 200


def test_a_model_that_only_loops_is_named():
    with pytest.raises(ModelError, match="only 0 are usable"):
        write(Scripted(lambda p: "ha" * 200 if p.endswith("assistant\n") else says(p)))


def test_shares_and_a_resumed_run_draws_on():
    author = Scripted(says)
    write(author, answers=400, greedy=0.25, follow_up=0)
    answering = [ask for text, ask in author.asks if text.endswith("assistant\n")]
    greedy = sum(ask.temperature == 0 for ask in answering) / 400
    assert 0.15 < greedy < 0.35
    again = Scripted(says)
    _, chats = write(again, begun=300, written=390, answers=400, follow_up=0)
    assert len(chats) == 10
    assert not {ask.seed for _, ask in again.asks} & {ask.seed for _, ask in author.asks}


class Prompt(Scripted):
    """Answers one at a time, the first asked first."""

    def finished(self):
        self._open.reverse()
        self._open, ready = self._open[:-1], self._open[-1:]
        self._open.reverse()
        return [(key, np.array(TOKENIZER.encode(text), np.int32)) for key, text in ready]


def test_a_corpus_is_the_same_whichever_answer_came_first(tmp_path):
    """Two are unusable and replaced by others."""

    def answer(prompt):
        return "" if "wrong" in prompt else f"You asked: {prompt[-40:]}"

    asked = [f"{'wrong' if n in (1, 4) else 'right'} question {n * 7}" for n in range(12)]
    corpora = []
    for kind in (Scripted, Prompt):
        turns = iter([[{"role": "user", "content": text}] for text in asked])
        _, chats = write(kind(answer), turns, answers=9, follow_up=0)
        corpora.append((chats, write_chats(tmp_path / kind.__name__, chats, 2)))
    (some, one), (others, other) = corpora
    assert [chat.number for chat in some] != [chat.number for chat in others]
    for name in ("tokens", "wanted", "starts"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


def test_the_shelf_keeps_chats_over_an_interruption(tmp_path):
    random = np.random.default_rng(0)

    def chat():
        tokens = random.integers(0, 9, random.integers(2, 9)).astype(np.int32)
        return Chat(tokens, tokens > 4, int(random.integers(99)))

    store = AnswerStore(tmp_path / "answers")
    made = [chat() for _ in range(PART + 3)]
    for number, one in enumerate(made):
        store.add(one, number + 2)
    again = AnswerStore(tmp_path / "answers")  # As if killed: only whole parts are there.
    assert (len(again.chats), again.begun) == (PART, PART + 1)
    store.save()
    again = AnswerStore(tmp_path / "answers")
    assert (len(again.chats), again.begun) == (PART + 3, PART + 4)
    for a, b in zip(made, again.chats, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.wanted, b.wanted)
        assert a.number == b.number
    (tmp_path / "answers" / "part-00000.npz").write_bytes(b"torn")
    with pytest.raises(ModelError, match="remove it"):
        AnswerStore(tmp_path / "answers")
