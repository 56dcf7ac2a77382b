"""`forerun chat`: a conversation at the terminal."""

import argparse
import contextlib
import sys
from dataclasses import asdict
from typing import Any

from forerun.build.engine import Loaded, encode_chat
from forerun.cli.console import emit_json, interactive, load_shown, say
from forerun.client.completion import Completion, acceptance_length, make_request, stream
from forerun.config import AskConfig, EngineConfig
from forerun.errors import ContextError, RequestError
from forerun.flags import configured

with contextlib.suppress(ImportError):  # Windows has none; input() then edits less well.
    import readline  # noqa: F401

HELP = """/reset   forget the conversation
/system  show or set the system message: /system You answer in rhyme.
/stats   tokens and acceptance of the conversation so far
/help    this list
/quit    leave (or Ctrl-D). Ctrl-C stops the answer only."""


class Conversation:
    """The turns so far and what they cost."""

    def __init__(self, loaded: Loaded, ask: AskConfig, system: str | None) -> None:
        self.loaded, self.ask, self.system = loaded, ask, system
        self.turns: list[dict[str, Any]] = []
        self.done: list[Completion] = []

    def reset(self) -> None:
        """Forget everything said; the system message stays."""
        self.turns.clear()
        self.done.clear()

    def say(self, text: str) -> Completion:
        """Send one user turn, stream the answer to stdout, remember both.

        Ctrl-C ends the answer early and keeps what there is. Raises RequestError, with the
        turn forgotten, where the conversation no longer fits.
        """
        self.turns.append({"role": "user", "content": text})
        answer = Completion()
        try:
            self._stream(answer)
        except RequestError:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": answer.text})
        self.done.append(answer)
        return answer

    def _stream(self, answer: Completion) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt = encode_chat(self.loaded, [*system, *self.turns])
        request = make_request(prompt, self.loaded.tokenizer.eos_ids, **asdict(self.ask))
        deltas = stream(self.loaded.engine, request)
        try:
            for delta in deltas:
                answer.add(delta)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.write(" ...")
        finally:
            deltas.close()
        sys.stdout.write("\n")
        sys.stdout.flush()

    def stats(self) -> dict[str, Any]:
        """Totals of the conversation."""
        tokens = sum(len(item.tokens) for item in self.done)
        steps = acceptance_length([item.stats for item in self.done])
        return {"answers": len(self.done), "tokens": tokens, "tokens_per_step": steps}


def main(arguments: argparse.Namespace) -> int:
    """Run the command: reads turns until the input ends."""
    ask, config = configured(AskConfig, arguments), configured(EngineConfig, arguments)
    loaded = load_shown(config)
    try:
        talk = Conversation(loaded, ask, arguments.system)
        if interactive():
            say(f"{loaded.name}. /help lists the commands, Ctrl-D leaves.")
        while (line := _read()) is not None:
            if line == "/quit":
                break
            _turn(talk, line)
        if arguments.json:
            emit_json({"turns": talk.turns, **talk.stats()})
    finally:
        loaded.close()
    return 0


def _turn(talk: Conversation, line: str) -> None:
    command, _, rest = line.partition(" ")
    if not line.strip():
        return
    if command == "/help":
        say(HELP)
    elif command == "/reset":
        talk.reset()
        say("forgotten")
    elif command == "/stats":
        totals = talk.stats()
        say(
            f"answers: {totals['answers']}, {totals['tokens']} tokens, "
            f"{totals['tokens_per_step']:.2f} tokens per step"
        )
    elif command == "/system":
        talk.system = rest or talk.system
        say(f"system: {talk.system or 'none'}")
    elif line.startswith("/"):
        say(f"no command {command}; /help lists them")
    else:
        try:
            talk.say(line)
        except RequestError as error:
            say(f"{error} /reset starts anew." if isinstance(error, ContextError) else str(error))


def _read() -> str | None:
    """One line; None at the end of the input. Ctrl-C at an empty prompt leaves like Ctrl-D."""
    try:
        return input("> " if interactive() else "").strip()
    except (EOFError, KeyboardInterrupt) as error:
        if interactive():
            say("")  # The shell's prompt begins a line of its own.
        elif isinstance(error, KeyboardInterrupt):
            raise
        return None
