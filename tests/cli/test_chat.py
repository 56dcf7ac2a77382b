import io
import json
import subprocess
import sys

import pytest

from forerun.cli.chat import Conversation
from forerun.config import AskConfig
from forerun.errors import RequestError
from tests.cli.toys import toy_loaded

ASK = AskConfig(max_tokens=40, ignore_eos=True)
CHAT = [sys.executable, "-m", "forerun.cli", "chat", "--model", "toy", "--kv-tokens", "4096"]


def chatted(text, *flags):
    return subprocess.run(
        [*CHAT, "--max-tokens", "12", "--temperature", "0", *flags],
        input=text, capture_output=True, check=False, text=True,
    )  # fmt: skip


def test_turns_are_remembered_and_forgotten():
    with toy_loaded() as loaded:
        talk = Conversation(loaded, ASK, "Be brief.")
        first = talk.say("Hello").text
        second = talk.say("Hello").text
        assert first != second
        assert [turn["role"] for turn in talk.turns] == ["user", "assistant"] * 2
        assert talk.stats()["answers"] == 2 and talk.stats()["tokens"] == 80
        talk.reset()
        assert talk.say("Hello").text == first


class Impatient(io.StringIO):
    """A terminal whose owner presses Ctrl-C at the third piece of text."""

    def __init__(self):
        super().__init__()
        self.pieces = 0

    def write(self, text):
        self.pieces += 1
        if self.pieces == 3:
            raise KeyboardInterrupt
        return super().write(text)


def test_control_c_stops_the_answer_only(monkeypatch):
    with toy_loaded() as loaded:
        talk = Conversation(loaded, ASK, None)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Impatient())
            cut = talk.say("Hello")
        assert 0 < len(cut.text) < 40
        assert loaded.engine.drain(10.0)
    with toy_loaded() as loaded:
        talk = Conversation(loaded, ASK, None)
        assert talk.say("Hello").text.startswith(cut.text)


def test_a_turn_that_does_not_fit_is_forgotten():
    with toy_loaded() as loaded:
        talk = Conversation(loaded, ASK, None)
        talk.say("Hello")
        with pytest.raises(RequestError):
            talk.say("x" * 5000)
        assert len(talk.turns) == 2
        assert talk.say("Hello").text


def test_commands_of_the_terminal():
    done = chatted(
        "Hello\n/stats\n/reset\nHello\n/system Be kind.\nHello\n/fly\n/help\n/quit\nno\n"
    )
    assert done.returncode == 0
    first, again, kinder = done.stdout.splitlines()
    assert first == again != kinder
    for words in ("answers: 1, 12 tokens", "forgotten", "system: Be kind.", "no command /fly"):
        assert words in done.stderr


def test_a_conversation_as_json():
    report = json.loads(chatted("Hi\n\nHo\n", "--json").stdout.split("\n", 2)[2])
    assert [turn["role"] for turn in report["turns"]] == ["user", "assistant"] * 2
    assert report["answers"] == 2
