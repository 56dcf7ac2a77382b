"""Answers the target writes itself: the only text a draft should learn from.

Other people's text is a poor teacher (EAGLE-3, section 4): the draft must imitate
what the target writes, under the template and with the sampling it will be served with. Prompts
come from a file of chats, or from nowhere: a chat model given its template up to the user's
turn writes a user's turn.

    Writer    keeps `width` sessions going until there are enough chats
    Session   one chat: what to ask next, what to do with what came back; generates nothing
    Author    generates: forerun.train.served, the engine that will serve
    AnswerStore  chats written so far, in parts on disk: an interrupted run loses the last few only
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np

from forerun.errors import ModelError, RequestError
from forerun.text.tokenizer import Tokenizer
from forerun.train.prompts import Messages, Problems
from forerun.types import Ints

_MARK = "\u2603FORERUN\u2603"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How answers are generated.

    answers     how many chats are finished before the work ends
    max_tokens  longest answer, in tokens
    greedy      share of answers at T=0
    hot         share of answers at T=1; the rest at `temperature`
    follow_up   share of chats that get a second turn, written by the target
    minutes     no new chat is begun after this long; 0 = no limit
    seed        with a chat's number: decides its temperature, noise and whether it goes on
    """

    answers: int
    max_tokens: int = 384
    greedy: float = 0.5
    hot: float = 0.0
    temperature: float = 0.8
    follow_up: float = 0.1
    minutes: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Chat:
    """One finished chat as token ids. wanted[i]: token i belongs to an answer.

    number  of the chat, by when it was begun: chats finish in an order that time decides, and
            what a chat says depends on its number and the recipe alone
    """

    tokens: Ints
    wanted: np.ndarray
    number: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """One continuation: of prompt int32[T], to an end-of-text id or `max_tokens` tokens.

    useless  output int32[.] -> whether it is of no use, however it goes on: an author may end it
             there. None: never
    """

    prompt: Ints
    temperature: float
    seed: int
    max_tokens: int
    useless: Callable[[Ints], bool] | None = None


class ChatEncoder(Protocol):
    """Writes chats as a model reads them."""

    def encode(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> Ints:
        """Return int32[T], the ids of a conversation. Raises RequestError for a bad one."""
        ...


class PlainText:
    """What base models read instead of chats: texts, one behind the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> Ints:
        """Implement ChatEncoder.encode."""
        text = "".join(str(message["content"]) for message in messages)
        return self._tokenizer.encode(text, bos=True)


class Author(Protocol):
    """Continues prompts, many at once."""

    def ask(self, key: int, ask: Ask) -> None:
        """Begin one continuation; its output comes back under `key`. Raises RequestError if the
        prompt does not fit the context.
        """
        ...

    def finished(self) -> list[tuple[int, Ints]]:
        """Return (key, output int32[.] ids) of all that finished since the last call, each once.

        Works or waits a while, and may come back with nothing yet. The end-of-text id is part of
        the output; no ids at all = that continuation failed.
        """
        ...


class Writer:
    """Lets the target write, many chats at once.

    settled  numbers of the chats that an earlier run has settled: these are not begun again. What
             is written is then what one run would have written, unless `minutes` ended it.
    """

    def __init__(
        self,
        author: Author,
        chat: ChatEncoder,
        tokenizer: Tokenizer,
        recipe: Recipe,
        width: int,
        settled: Collection[int] = (),
    ) -> None:
        self.author, self.chat, self.tokenizer = author, chat, tokenizer
        self.recipe, self.width, self._settled = recipe, width, frozenset(settled)
        self.problems = Problems()
        self._first_message: Ints | None = None

    def write(
        self,
        prompts: Iterator[Messages] | None,
        done: Callable[[int, Chat | None], None],
        written: int = 0,
    ) -> None:
        """Answer prompts until the recipe is met, they run out or its time is up.

        prompts  all chats from number 0 on, each ending with a user's turn; None: the target writes
                 the user's turns as well
        done     called with the number of every chat that is settled and the chat, None if it
                 came to nothing; in no particular order
        written  chats that count already

        Raises ModelError if hardly any chat is usable, or the template leaves no place for a
        user's turn.
        """
        until = monotonic() + 60 * self.recipe.minutes if self.recipe.minutes else inf
        flying: dict[int, Session] = {}
        failures = 0
        more = True
        waiting = self._unsettled(prompts)
        while written < self.recipe.answers:
            more = more and monotonic() < until
            room = min(self.width, self.recipe.answers - written) - len(flying)
            while more and room > 0:
                if more := (following := next(waiting, None)) is not None:
                    begun = self._begin(*following, flying)
                    room -= begun
                    if not begun:
                        done(following[0], None)
            if not flying:
                return
            for key, ids in self.author.finished():
                session = flying[key]
                session.take(ids, extra_turn=monotonic() < until)
                if self._go_on(key, session):
                    continue
                del flying[key]
                chat = session.result()
                written += chat is not None
                failures += chat is None
                done(key, chat)
            if failures > 200 + 20 * written:
                raise ModelError(
                    f"of {failures + written} chats the target wrote only {written} are usable "
                    f"({self.problems.loops} loop, {self.problems.empty} are empty); is this a "
                    "chat model, and is its template right?"
                )

    def first_message(self, messages: Messages) -> Ints:
        """Return int32[.], the template's ids up to the beginning of the next user's text, after
        `messages`. Raises ModelError if the template does not render a user's text unchanged.
        """
        if not messages and self._first_message is not None:
            return self._first_message
        marked = [*messages, {"role": "user", "content": _MARK}]
        ids = self.chat.encode(marked, add_generation_prompt=False)
        for begin in range(len(ids) - 1, -1, -1):
            text = self.tokenizer.decode(ids[begin:], skip_special=False)
            if text.startswith(_MARK):
                if not messages:
                    self._first_message = ids[:begin]
                return ids[:begin]
        raise ModelError(
            "the chat template does not render a user's message unchanged, so the target cannot "
            "write users' messages; give a file of --prompts"
        )

    def _unsettled(self, prompts: Iterator[Messages] | None) -> Iterator[tuple[int, Messages]]:
        """Yield (number, messages) of the chats that are still to be begun, endlessly if the target
        writes users' messages itself.
        """
        for number, messages in enumerate(repeat([]) if prompts is None else prompts):
            if number not in self._settled:
                yield number, messages

    def _begin(self, key: int, messages: Messages, flying: dict[int, "Session"]) -> bool:
        """Start chat `key`. False if the prompt does not fit."""
        random, recipe = np.random.default_rng([self.recipe.seed, key]), self.recipe
        drawn = random.random()
        warm = 1.0 if drawn >= 1.0 - recipe.hot else recipe.temperature
        extra_turn = random.random() < recipe.follow_up
        session = Session(
            writer=self,
            number=key,
            messages=messages,
            temperature=0.0 if drawn < recipe.greedy else warm,
            seed=int(random.integers(1 << 62)),
            extra_turn=bool(extra_turn),
        )
        if self._go_on(key, session):
            flying[key] = session
        elif not messages:
            raise ModelError(f"no user's turn can be begun: {self.problems.bad_lines[-1]}")
        return key in flying

    def _go_on(self, key: int, session: "Session") -> bool:
        """Ask for what the session wants next; False if there is nothing more."""
        try:
            if (ask := session.next()) is None:
                return False
            self.author.ask(key, ask)
        except RequestError as error:
            if not session.answered:
                self.problems.bad_lines.append(str(error))
            return False
        return True


class Session:
    """One chat under way: write the user's turn if there is none, answer, perhaps once more."""

    def __init__(
        self,
        writer: Writer,
        number: int,
        messages: Messages,
        temperature: float,
        seed: int,
        extra_turn: bool,
    ) -> None:
        self._writer, self._number, self._messages = writer, number, list(messages)
        self._temperature, self._seed, self._follow = temperature, seed, extra_turn
        self._asked: Ask | None = None
        self._chat: Chat | None = None
        self._over = False

    @property
    def answered(self) -> bool:
        """Whether at least one answer is usable, so that `result` has a chat."""
        return self._chat is not None

    def next(self) -> Ask | None:
        """Return the continuation that this chat needs next: a user's turn (at T=1) or an answer;
        None if the chat is over. Raises RequestError if the template refuses the messages.
        """
        if self._over:
            return None
        most = self._writer.recipe.max_tokens
        if self._answering:
            prompt = self._writer.chat.encode(self._messages)
            self._asked = Ask(prompt, self._temperature, self._seed, most, repeats)
        else:
            first_message = self._writer.first_message(self._messages)
            self._asked = Ask(first_message, 1.0, self._seed + len(self._messages), most)
        return self._asked

    def take(self, ids: Ints, extra_turn: bool) -> None:
        """Use the output int32[.] of the last `next`. An answer that loops, which is cut
        there, or is empty ends the chat.

        extra_turn  False: no second turn is begun any more
        """
        if self._answering:
            self._take_answer(ids, extra_turn)
        else:
            self._take_question(ids)

    def result(self) -> Chat | None:
        """Return the chat up to its last usable answer, with everything before it as context; None
        if no answer is usable.
        """
        return self._chat

    @property
    def _answering(self) -> bool:
        return bool(self._messages) and self._messages[-1]["role"] == "user"

    def _take_question(self, ids: Ints) -> None:
        words = self._writer.tokenizer.decode(ids).strip()
        self._over = len(words) < 8
        self._messages.append({"role": "user", "content": words})

    def _take_answer(self, ids: Ints, extra_turn: bool) -> None:
        whole, ids = len(ids), before_loop(ids)
        if not len(ids):
            self._writer.problems.loops += whole > 0
            self._writer.problems.empty += not whole
            self._over = True
            return
        self._over = not (extra_turn and self._follow) or self.answered or len(ids) < whole
        assert self._asked is not None
        tokens = np.concatenate([self._asked.prompt, ids]).astype(np.int32)
        wanted = np.arange(len(tokens)) >= len(self._asked.prompt)
        self._chat = Chat(tokens, wanted, self._number)
        words = self._writer.tokenizer.decode(ids)
        self._messages.append({"role": "assistant", "content": words})


def repeats(ids: Ints) -> bool:
    """Return whether some run of eight tokens occurs more than three times in ids int32[.]: loops
    are easy to draft and would flatter the draft. False for short texts.
    """
    if len(ids) < 8:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, np.int32), 8)
    _, counts = np.unique(windows, axis=0, return_counts=True)
    return bool(counts.max() > 3)


LEAST = 16
"""Tokens before a loop that are worth keeping."""


def before_loop(ids: Ints) -> Ints:
    """Return the ids int32[.] up to where a run of eight tokens that `repeats` comes for the third
    time; none if there are fewer than LEAST before.
    """
    if not repeats(ids):
        return ids
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, np.int32), 8)
    _, which, counts = np.unique(windows, axis=0, return_inverse=True, return_counts=True)
    which = which.reshape(-1)
    third = min(int(np.flatnonzero(which == run)[2]) for run in np.flatnonzero(counts > 3))
    return ids[:third] if third >= LEAST else ids[:0]


PART = 10
"""Chats in a part."""


class AnswerStore:
    """Parts of settled chats in a folder. `chats` holds all that are usable, `useless` the numbers
    of the others, those on disk included.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.chats: list[Chat] = []
        self.useless: list[int] = []
        self._stored = self._stored_useless = self._parts = 0
        for path in sorted(folder.glob("part-*.npz")):
            self._load(path)

    @property
    def settled(self) -> set[int]:
        """Numbers of all chats that are settled."""
        return {*self.useless, *(chat.number for chat in self.chats)}

    def add(self, number: int, chat: Chat | None) -> None:
        """Keep one chat, or that chat `number` came to nothing; every PART chats are written
        (`save`).
        """
        if chat is None:
            self.useless.append(number)
            return
        self.chats.append(chat)
        if len(self.chats) - self._stored >= PART:
            self.save()

    def save(self) -> None:
        """Write the chats that are not on disk yet as one new part, whole or not at all. Raises
        OSError.
        """
        fresh = self.chats[self._stored :]
        useless = self.useless[self._stored_useless :]
        if not fresh and not useless:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"part-{self._parts:05}.npz"
        beside = path.with_suffix(".new.npz")
        np.savez(
            beside,
            tokens=np.concatenate([np.zeros(0, np.int32), *(chat.tokens for chat in fresh)]),
            wanted=np.concatenate([np.zeros(0, np.bool_), *(chat.wanted for chat in fresh)]),
            lengths=np.array([len(chat.tokens) for chat in fresh], np.int64),
            numbers=np.array([chat.number for chat in fresh], np.int64),
            useless=np.array(useless, np.int64),
        )
        beside.replace(path)
        self._parts += 1
        self._stored, self._stored_useless = len(self.chats), len(self.useless)

    def _load(self, path: Path) -> None:
        if path.name.endswith(".new.npz"):
            return
        try:
            with np.load(path, allow_pickle=False) as part:
                ends = np.cumsum(part["lengths"])[:-1]
                tokens, wanted = np.split(part["tokens"], ends), np.split(part["wanted"], ends)
                numbers = part["numbers"].tolist()
                self.useless += part["useless"].tolist()
        except (OSError, ValueError, KeyError, BadZipFile, zlib.error) as error:
            raise ModelError(
                f"{path} cannot be read ({error}); remove it and start again"
            ) from None
        # Where no chat is in it, `split` makes one piece of nothing.
        self.chats += map(Chat, tokens[: len(numbers)], wanted[: len(numbers)], numbers)
        self._parts += 1
        self._stored, self._stored_useless = len(self.chats), len(self.useless)
