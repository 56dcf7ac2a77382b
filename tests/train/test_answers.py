"""Sessions: their turns, in order, and what is kept. A scripted author stands in."""

import json
from itertools import count

import numpy as np
import pytest

from forerun.errors import ConfigError, ModelError, RequestError
from forerun.text.chat import ChatTemplate
from forerun.text.rendering import BYTE_LEVEL_TEMPLATE
from forerun.text.tokenizer import Tokenizer
from forerun.train import answers
from forerun.train.answers import (
    PART,
    AnswerStore,
    Chat,
    ChatGenerator,
    GenerationConfig,
    PlainText,
)
from forerun.train.corpus import write_chats
from forerun.train.presets import TrainConfig
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

    def submit(self, key, ask):
        if len(ask.prompt) > self.most:
            raise RequestError("too long")
        text = TOKENIZER.decode(ask.prompt, skip_special=False)
        self.asks.append((text, ask))
        self._open.append((key, self.says(text)))

    def finished(self):
        ready, self._open = self._open[-2:], self._open[:-2]
        return [(key, np.array(TOKENIZER.encode(text), np.int32)) for key, text in ready]


def write(author, prompts=None, settled=(), written=0, **recipe):
    """The generator, and its usable chats in the order in which they came."""
    generator = ChatGenerator(
        author, CHAT, TOKENIZER, GenerationConfig(**{"answers": 6} | recipe), 3, settled
    )
    chats = []
    generator.generate(prompts, lambda _, chat: chat and chats.append(chat), written)
    return generator, chats


def text_of(chat):
    return TOKENIZER.decode(chat.tokens, skip_special=False)


def wanted_of(chat):
    return TOKENIZER.decode(chat.tokens[chat.loss_mask])


def says(prompt):
    asking = not prompt.endswith("assistant\n")
    return "Why is the sky blue?" if asking else ANSWER


def test_without_prompts_the_target_asks_and_answers():
    author = Scripted(says)
    _, chats = write(author, follow_up=0)
    assert len(chats) == 6
    assert {wanted_of(chat) for chat in chats} == {ANSWER}
    assert all("user\nWhy is the sky blue?" in text_of(chat) for chat in chats)
    questions = [pair for pair in author.asks if not pair[0].endswith("assistant\n")]
    assert {ask.temperature for _, ask in questions} == {1.0}
    assert all(text.endswith("user\n") for text, _ in questions)
    assert sorted(chat.number for chat in chats) == [*range(6)]


def test_second_turns_follow_their_first():
    author = Scripted(says)
    _, chats = write(author, follow_up=1)
    for chat in chats:
        assert text_of(chat).count("Why is the sky blue?") == 2
        assert text_of(chat).count(ANSWER) == 2
        assert wanted_of(chat) == ANSWER  # Only the last answer.


def test_a_bad_second_turn_leaves_the_first():
    author = Scripted(lambda p: "x" * 400 if ANSWER in p else says(p))
    generator, chats = write(author, follow_up=1)
    assert [wanted_of(chat) for chat in chats] == [ANSWER] * 6
    assert all(text_of(chat).count("Why is the sky blue?") == 1 for chat in chats)
    assert generator.problems.loops == 6


def test_prompts_of_a_file_and_what_does_not_fit(tmp_path):
    lines = [
        json.dumps({"prompt": "One?"}),
        "no json",
        json.dumps({"prompt": "y" * 200}),
        json.dumps({"turns": ["Two?", "Three?"]}),
        json.dumps({"messages": [{"role": "user", "content": "Four?"}, ANSWERED]}),
        json.dumps({"messages": []}),
        json.dumps({"turns": []}),
        json.dumps({"text": "Five?"}),
        "[" * 5000,
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    problems = Problems()
    author = Scripted(says, most=120)
    generator, chats = write(author, read_prompts(tmp_path / "p.jsonl", problems), follow_up=0)
    questions = sorted(text_of(chat).split("user\n")[1].split("<")[0] for chat in chats)
    assert questions == ["Four?", "One?", "Two?"]
    assert [line.split(":")[1] for line in problems.bad_lines] == ["2", "6", "7", "8", "9"]
    assert problems.bad_lines[3].endswith("no messages, turns or prompt")
    assert generator.problems.bad_lines == ["too long"]


def test_no_chat_is_begun_after_time_is_up(monkeypatch):
    """By a clock on which every look takes a second."""
    monkeypatch.setattr(answers, "monotonic", count().__next__)
    author = Scripted(says)
    _, chats = write(author, answers=10_000, minutes=2)
    assert 20 < len(chats) < 200


def test_a_base_model_goes_on_with_plain_text(tmp_path):
    texts = ["Once upon a time", "The sky"]
    prompts = iter([[{"role": "user", "content": text}] for text in texts])
    author, chats = Scripted(lambda prompt: " there was a small town."), []
    recipe = GenerationConfig(answers=2, follow_up=0)
    generator = ChatGenerator(author, PlainText(TOKENIZER), TOKENIZER, recipe, 3)
    generator.generate(prompts, lambda _, chat: chats.append(chat))
    assert sorted(map(text_of, chats)) == [f"{text} there was a small town." for text in texts]
    generator.generate(None, lambda _, chat: chats.append(chat))
    assert text_of(chats[-1]) == "there was a small town. there was a small town."


@pytest.mark.parametrize(("said", "kept", "follow_up"), [(40, 2, 1), (4, 2, 1), (3, 3, 0)])
def test_an_answer_is_kept_up_to_its_loop(said, kept, follow_up):
    looping = ANSWER + "and so on " * said
    author = Scripted(lambda prompt: looping if prompt.endswith("assistant\n") else says(prompt))
    generator, chats = write(author, follow_up=follow_up)
    assert {wanted_of(chat) for chat in chats} == {ANSWER + "and so on " * kept}
    assert all(text_of(chat).count("Why is the sky blue?") == 1 for chat in chats)
    assert generator.problems.loops == 0


def test_a_model_that_only_loops_is_named():
    with pytest.raises(ModelError, match="only 0 are usable"):
        write(Scripted(lambda p: "ha" * 200 if p.endswith("assistant\n") else says(p)))


def test_shares_of_temperatures():
    author = Scripted(says)
    write(author, answers=400, greedy=0.25, hot=0.5, follow_up=0)
    answering = [ask for text, ask in author.asks if text.endswith("assistant\n")]
    for temperature, least, most in ((0, 0.15, 0.35), (1, 0.4, 0.6), (0.8, 0.15, 0.35)):
        share = sum(ask.temperature == temperature for ask in answering) / 400
        assert least < share < most, temperature


def test_shares_of_more_than_all_are_refused():
    with pytest.raises(ConfigError, match=r"greedy is 0\.75 and hot is 0\.5: these shares"):
        TrainConfig(greedy=0.75, hot=0.5)


class Stopped(Scripted):
    """Ends the run after so many outputs."""

    def __init__(self, says, outputs):
        super().__init__(says)
        self.left = outputs

    def finished(self):
        ready = super().finished()
        self.left -= len(ready)
        if self.left < 0:
            raise KeyboardInterrupt
        return ready


@pytest.mark.parametrize("outputs", [0, 1, 7, 30, 61])
def test_an_interrupted_run_writes_what_one_run_does(tmp_path, monkeypatch, outputs):
    """Whatever was lost, unusable or done out of order when it was stopped, and twice."""
    monkeypatch.setattr("forerun.train.answers.PART", 5)
    prompts = [[{"role": "user", "content": f"question {n * 7}"}] for n in range(60)]

    def answer(prompt):
        # A following turn depends on what was drawn for the chat; every sixth comes to nothing.
        number = int(prompt.rsplit("question ", 1)[1].split("<")[0]) // 7
        return "" if number % 6 == 1 and "assistant\n" in prompt[-11:] else f"Answer {prompt[-30:]}"

    def run(name, stops):
        store = AnswerStore(tmp_path / name)
        for author in (*(Stopped(answer, stop) for stop in stops), Scripted(answer)):
            store = AnswerStore(tmp_path / name)
            generator = ChatGenerator(
                author, CHAT, TOKENIZER, GenerationConfig(answers=40), 5, store.settled
            )
            try:
                generator.generate(iter(prompts), store.add, len(store.chats))
            except KeyboardInterrupt:
                pass
            finally:
                store.save()
        return write_chats(tmp_path / name / "corpus", store.chats, 2)

    one, other = run("whole", []), run("parts", [outputs, 20])
    for name in ("tokens", "loss_mask", "starts"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


def test_the_shelf_keeps_chats_over_an_interruption(tmp_path):
    random = np.random.default_rng(0)

    def chat(number):
        tokens = random.integers(0, 9, random.integers(2, 9)).astype(np.int32)
        return Chat(tokens, tokens > 4, number)

    store = AnswerStore(tmp_path / "answers")
    made = [chat(number) for number in range(0, 2 * PART + 6, 2)]
    for one in made:
        store.add(one.number, one)
        store.add(one.number + 1, None)
    again = AnswerStore(tmp_path / "answers")  # As if killed: only whole parts are there.
    assert (len(again.chats), again.settled) == (PART, {*range(2 * PART - 1)})
    store.save()
    again = AnswerStore(tmp_path / "answers")
    assert (len(again.chats), again.settled) == (PART + 3, {*range(2 * PART + 6)})
    for a, b in zip(made, again.chats, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.loss_mask, b.loss_mask)
        assert a.number == b.number
    store.add(9999, None)
    store.save()  # A part without a chat.
    again = AnswerStore(tmp_path / "answers")
    assert len(again.chats) == PART + 3 and 9999 in again.settled
    for torn in (b"torn", b"PK\x03\x04 cut short"):
        (tmp_path / "answers" / "part-00000.npz").write_bytes(torn)
        with pytest.raises(ModelError, match=r"part-00000.npz cannot be read .*; remove it"):
            AnswerStore(tmp_path / "answers")
