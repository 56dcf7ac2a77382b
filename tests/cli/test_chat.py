import io
import json
import subprocess
import sys

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from forerun.cli.conversation import Conversation
from forerun.cli.terminal import Wrapped, keys
from forerun.errors import RequestError
from forerun.options.config import SamplingConfig
from tests.cli.toys import toy_loaded

ASK = SamplingConfig(max_tokens=40, ignore_eos=True, seed=0)
CHAT = [sys.executable, "-m", "forerun.cli", "chat", "toy", "--kv-tokens", "4096"]


def talking(loaded, ask=ASK, system=None, write=lambda _: None):
    lines = []
    talk = Conversation(loaded, ask, system, write, lines.append)
    talk.notes = lines
    return talk


def chatted(text, *flags, **how):
    return subprocess.run(
        [*CHAT, "--max-tokens", "12", *flags],
        input=text, capture_output=True, check=False, text=True, **how,
    )  # fmt: skip


def test_turns_are_remembered_and_forgotten():
    with toy_loaded() as loaded:
        talk = talking(loaded, system="Be brief.")
        first = talk.say("Hello").text
        second = talk.say("Hello").text
        assert first != second
        assert [turn["role"] for turn in talk.turns] == ["user", "assistant"] * 2
        assert talk.messages()[0]["role"] == "system"
        assert talk.stats()["answers"] == 2 and talk.stats()["tokens"] == 80
        talk.reset()
        assert talk.say("Hello").text == first


def test_control_c_stops_the_answer_only():
    pieces = []

    def impatient(text):
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    with toy_loaded() as loaded:
        talk = talking(loaded, write=impatient)
        cut = talk.say("Hello")
        assert 0 < len(cut.text) < 40 and pieces[-2:] == [" ...", "\n"]
        assert loaded.engine.drain(10.0)
    with toy_loaded() as loaded:
        assert talking(loaded).say("Hello").text.startswith(cut.text)


def test_a_turn_that_does_not_fit_is_forgotten():
    with toy_loaded() as loaded:
        talk = talking(loaded)
        talk.say("Hello")
        with pytest.raises(RequestError):
            talk.say("x" * 5000)
        assert len(talk.turns) == 2
        assert talk.say("Hello").text


def test_the_oldest_turns_make_room():
    with toy_loaded() as loaded:
        talk = talking(loaded)
        for number in range(3):
            talk.say(f"{number}" + "x" * 200)
            assert not talk.notes
        assert talk.say("3" + "x" * 200).text
        assert talk.notes == ["the context is full: the oldest 2 messages are dropped"]
        assert [turn["content"][0] for turn in talk.turns[::2]] == ["1", "2", "3"]
        # What is nearly too long gets the answer that still fits.
        assert len(talk.say("y" * (loaded.context - 40)).tokens) < 40


def test_regenerated_answers_differ_and_sessions_too():
    warm = SamplingConfig(max_tokens=20, ignore_eos=True, temperature=1.0, seed=None)
    with toy_loaded() as loaded:
        talk = talking(loaded, warm)
        with pytest.raises(RequestError, match="no answer to regenerate"):
            talk.regenerate()
        texts = [talk.say("Hello").text, talk.regenerate().text, talk.regenerate().text]
        assert len(set(texts)) == 3 and len(talk.turns) == 2
        assert talk.turns[-1]["content"] == texts[-1]
        assert talking(loaded, warm).sampling.seed != talk.sampling.seed
        known = [
            talking(loaded, SamplingConfig(max_tokens=20, temperature=1.0, seed=5)) for _ in "ab"
        ]
        assert known[0].say("Hello").text == known[1].say("Hello").text


def test_commands_of_the_terminal(tmp_path):
    done = chatted(
        "Hello\n/stats\n/reset\nHello\n/system Be kind.\nHello\n/fly\n/help\n"
        "/set\n/set temperature 0.5\n/set temperature hot\n/set top-k\n/set wings 2\n"
        "/save a.json\n/save a.json\n/save\n/save ~no-such-user/a\n/bye\nno\n",
        cwd=tmp_path,
    )
    assert done.returncode == 0
    first, again, kinder = done.stdout.splitlines()
    assert first == again != kinder
    for words in (
        "answers: 1, 12 tokens", "forgotten", "system: Be kind.", "no command /fly",
        "temperature: 0.5", "/set temperature takes a number, not 'hot'", "temperature 0.0, ",
        "top_k: the model's default", "/set knows max_tokens", "saved to a.json", "not saved: ",
        "name a file",
    ):  # fmt: skip
        assert words in done.stderr, words
    saved = json.loads((tmp_path / "a.json").read_text())
    assert [turn["role"] for turn in saved] == ["system"] + ["user", "assistant"] * 2


def test_lines_between_quotes_are_one_message():
    done = chatted('"""One\ntwo\n\nthree"""\n"""open', "--json")
    report = json.loads(done.stdout[done.stdout.index("{") :])
    messages = [turn["content"] for turn in report["turns"] if turn["role"] == "user"]
    assert messages == ["One\ntwo\n\nthree", "open"]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("Hello\r", "Hello"),
        ("half a li\x03Hello\r", "Hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("\x1b[200~one\ntwo\x1b[201~\r", "one\ntwo"),
    ],
)
def test_keys_of_the_terminal(typed, line):
    with create_pipe_input() as keyboard:
        keyboard.send_text(typed)
        session = PromptSession(key_bindings=keys(), input=keyboard, output=DummyOutput())
        assert session.prompt("> ") == line


def test_control_c_on_an_empty_line_leaves():
    with create_pipe_input() as keyboard:
        keyboard.send_text("\x03")
        session = PromptSession(key_bindings=keys(), input=keyboard, output=DummyOutput())
        with pytest.raises(EOFError):
            session.prompt("> ")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_break_between_words(size):
    text = "The quick brown fox\njumps over\n```\na line of code that is long\n```\nthe dog.\n"
    output = io.StringIO()
    wrapped = Wrapped(output, 12)
    for start in range(0, len(text), size):
        wrapped.write(text[start : start + size])
    assert output.getvalue().replace(" \n", "\n") == (
        "The quick\nbrown fox\njumps over\n```\na line of code that is long\n```\nthe dog.\n"
    )
    plain = io.StringIO()
    Wrapped(plain, None).write(text)
    assert plain.getvalue() == text
