"""Answers the target writes itself: the only text a draft should learn from.

Other people's text is a poor teacher (EAGLE-3, section 4; docs/log.md): the draft must imitate
what the target writes, under the template and with the sampling it will be served with. Prompts
come from a file of chats, or from nowhere: a chat model given its template up to the user's
turn writes a user's turn. Everything goes through the engine that will serve.
"""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.api import Loaded
from forerun.engine.request import Delta, Finish, Request, Stopping
from forerun.errors import ModelError, RequestError
from forerun.spec.sampling import Sampling
from forerun.types import Ints, RequestId

Messages = list[dict[str, Any]]
_MARK = "\u2603FORERUN\u2603"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How answers are asked for.

    greedy      share of answers at T=0; the rest at `temperature`
    follow_up   share of chats that get a second turn, written by the target
    held_out    chats kept aside to choose the best checkpoint
    """

    answers: int
    max_tokens: int = 384
    greedy: float = 0.5
    temperature: float = 0.8
    follow_up: float = 0.1
    held_out: int = 64
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Chat:
    """One finished chat as token ids. wanted[i]: token i belongs to an answer."""

    tokens: Ints
    wanted: np.ndarray


@dataclass(slots=True)
class Problems:
    """Lines and answers that were left out, and why."""

    bad_lines: list[str] = field(default_factory=list)
    loops: int = 0
    empty: int = 0


def read_prompts(path: Path, problems: Problems) -> Iterator[Messages]:
    """Chats of a jsonl file: {"messages": [...]} up to the last user turn, {"turns": [...]} or
    {"prompt": "..."}. A bad line is noted in `problems` and skipped.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _messages(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                problems.bad_lines.append(f"{path}:{number}: {error}")


def _messages(record: Any) -> Messages:
    """The chat of one record. Raises ValueError, KeyError or TypeError for what is none."""
    if "messages" in record:
        messages = [{"role": m["role"], "content": str(m["content"])} for m in record["messages"]]
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if not messages:
            raise ValueError("no user message")
        return messages
    text = record["turns"][0] if "turns" in record else record["prompt"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the prompt is not a text")
    return [{"role": "user", "content": text}]


class Writer:
    """Lets the target write, many answers at once."""

    def __init__(self, loaded: Loaded, recipe: Recipe, width: int) -> None:
        if loaded.chat is None:
            raise ModelError(f"{loaded.name} has no chat template; give it one to train a draft")
        self.loaded, self.recipe, self.width = loaded, recipe, width
        self.chat = loaded.chat
        self.problems = Problems()
        self._serial = 0
        self._random = np.random.default_rng(recipe.seed)

    def write(self, prompts: Iterator[Messages] | None, done: Callable[[Chat], None]) -> None:
        """Answer prompts (None: self-written ones) until the recipe is met or they run out.

        `done` gets every usable chat, in no particular order, on this thread.
        """
        ready: list[Chat] = []
        lock = threading.Condition()
        flying = 0
        written = 0
        while written < self.recipe.answers:
            with lock:
                exhausted = False
                while flying < self.width and written + flying < self.recipe.answers:
                    messages = next(prompts, None) if prompts else []
                    if messages is None:
                        exhausted = True
                        break
                    if self._launch(messages, ready, lock):
                        flying += 1
                if not flying and exhausted:
                    return
                while not ready:
                    lock.wait()
                finished, ready[:] = list(ready), []
            flying -= len(finished)
            for chat in finished:
                if len(chat.tokens):
                    written += 1
                    done(chat)

    def _launch(self, messages: Messages, ready: list[Chat], lock: threading.Condition) -> bool:
        """Start one chat on the engine. False where the prompt does not fit."""
        session = _Session(self, messages, ready, lock)
        try:
            session.advance()
        except RequestError as error:
            self.problems.bad_lines.append(str(error))
            return False
        return True

    def draw(self) -> tuple[float, int, bool]:
        """Temperature, seed and whether a second turn follows, for the next chat."""
        greedy = self._random.random() < self.recipe.greedy
        follow = self._random.random() < self.recipe.follow_up
        return (
            0.0 if greedy else self.recipe.temperature,
            int(self._random.integers(1 << 62)),
            bool(follow),
        )

    def submit(self, prompt: Ints, sampling: Sampling, sink: Callable[[Ints], None]) -> None:
        """One request; `sink` gets its output ids (empty where it failed)."""
        self._serial += 1
        room = self.loaded.context - len(prompt)
        collected: list[int] = []

        def take(delta: Delta) -> None:
            collected.extend(delta.tokens)
            if delta.finish is not None:
                failed = delta.finish in (Finish.ERROR, Finish.ABORT)
                sink(np.array([] if failed else collected, np.int32))

        self.loaded.engine.submit(
            Request(
                id=RequestId(f"train-{self._serial}"),
                prompt=prompt,
                sampling=sampling,
                stopping=Stopping(
                    max_tokens=max(min(self.recipe.max_tokens, room), 1),
                    stop_tokens=tuple(sorted(self.loaded.tokenizer.eos_ids)),
                ),
            ),
            take,
        )


class _Session:
    """One chat under way: write the user's turn if there is none, answer, perhaps once more."""

    def __init__(
        self, writer: Writer, messages: Messages, ready: list[Chat], lock: threading.Condition
    ) -> None:
        self.writer, self.messages, self.ready, self.lock = writer, list(messages), ready, lock
        self.temperature, self.seed, self.follow = writer.draw()
        self.answers: list[tuple[Ints, Ints]] = []

    def advance(self) -> None:
        """Ask for whatever comes next."""
        if self.messages and self.messages[-1]["role"] == "user":
            prompt = self.writer.chat.encode(self.messages)
            sampling = Sampling(temperature=self.temperature, seed=self.seed)
            self.writer.submit(prompt, sampling, lambda ids: self._answered(prompt, ids))
        else:
            opening = self._user_opening()
            sampling = Sampling(temperature=1.0, seed=self.seed + len(self.messages))
            self.writer.submit(opening, sampling, self._asked)

    def _user_opening(self) -> Ints:
        """The template up to where the user's words would begin."""
        marked = [*self.messages, {"role": "user", "content": _MARK}]
        tokenizer = self.writer.loaded.tokenizer
        ids = self.writer.chat.encode(marked, add_generation_prompt=False)
        mark = tokenizer.encode(_MARK)
        for begin in range(len(ids) - 1, -1, -1):
            text = tokenizer.decode(ids[begin:], skip_special=False)
            if text.startswith(_MARK):
                return ids[:begin]
        raise ModelError(f"the chat template hides the user's words ({len(mark)} ids)")

    def _asked(self, ids: Ints) -> None:
        words = self.writer.loaded.tokenizer.decode(ids).strip()
        if len(words) < 8:
            self._finish(usable=False)
            return
        self.messages.append({"role": "user", "content": words})
        self._again()

    def _answered(self, prompt: Ints, ids: Ints) -> None:
        if not len(ids) or repeats(ids):
            self.writer.problems.loops += bool(len(ids))
            self.writer.problems.empty += not len(ids)
            self._finish(usable=bool(self.answers))
            return
        self.answers.append((prompt, ids))
        if not self.follow or len(self.answers) == 2:
            self._finish(usable=True)
            return
        words = self.writer.loaded.tokenizer.decode(ids)
        self.messages.append({"role": "assistant", "content": words})
        self._again()

    def _again(self) -> None:
        try:
            self.advance()
        except RequestError:
            self._finish(usable=bool(self.answers))

    def _finish(self, usable: bool) -> None:
        """Hand the chat over; only the last answer of a chat is wanted, with all before it."""
        chat = Chat(np.zeros(0, np.int32), np.zeros(0, np.bool_))
        if usable:
            prompt, answer = self.answers[-1]
            wanted = np.zeros(len(prompt) + len(answer), np.bool_)
            wanted[len(prompt) :] = True
            chat = Chat(np.concatenate([prompt, answer]), wanted)
        with self.lock:
            self.ready.append(chat)
            self.lock.notify()


def repeats(ids: Ints, length: int = 8, most: int = 3) -> bool:
    """True where one n-gram stands more than `most` times: loops would flatter the draft."""
    seen: dict[bytes, int] = {}
    for begin in range(len(ids) - length + 1):
        gram = ids[begin : begin + length].tobytes()
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] > most:
            return True
    return False
