"""Traffic as agents make it: long shared beginnings, tool results, branches, repeated requests.

A script is drawn from a seed and nothing else: which agent asks what, when it goes back to an
earlier place of its conversation, when another takes up from there. Prompts contain the answers, so
two plays of a script are the same exactly as long as all answers are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forerun.client.completion import make_request
from forerun.engine.request import Finish, Speculation
from forerun.engine.thread import Engine
from forerun.types import Ints

Piece = Callable[[np.random.Generator, str], list[int]]
"""(generator, one of "system", "user", "tool") -> tokens of one message."""

MAX_STEPS = 20_000
"""A round that takes more steps hangs."""


@dataclass(frozen=True)
class Exchange:
    """One request of the play, what was answered, and how many of its tokens were cached."""

    prompt: tuple[int, ...]
    options: dict
    answer: tuple[int, ...]
    cached: int


def ask(
    engine: Engine, prompts: list[tuple[tuple[int, ...], dict]], **speculation
) -> list[Exchange]:
    """Submit requests together and step by hand until all have ended; what came of each.

    Pages, slots and tables are checked after every step.
    """
    requests = [
        make_request(
            np.array(prompt, np.int32), (), ignore_eos=True,
            speculation=Speculation(**speculation), **options,
        )
        for prompt, options in prompts
    ]  # fmt: skip
    tokens = {request.id: [] for request in requests}
    cached = dict.fromkeys(tokens, 0)

    def sink(delta) -> None:
        assert delta.finish != Finish.ERROR, delta.error
        tokens[delta.request].extend(delta.tokens)
        cached[delta.request] += delta.cached_tokens

    for request in requests:
        engine.submit(request, sink)
    steps = 0
    while engine.step_once():
        engine.check()
        steps += 1
        assert steps < MAX_STEPS, "the round does not end"
    assert engine.stats().load.pages_held == 0
    return [
        Exchange(prompt, options, tuple(tokens[request.id]), cached[request.id])
        for (prompt, options), request in zip(prompts, requests, strict=True)
    ]


class Script:
    """agents  how many talk at once; turns  rounds; piece  messages; room  longest prompt."""

    def __init__(self, seed: int, agents: int, turns: int, piece: Piece, room: int) -> None:
        self.seed, self.agents, self.turns = seed, agents, turns
        self.piece, self.room = piece, room

    def play(self, engine: Engine) -> list[list[Exchange]]:
        """Run the whole script on an engine: its exchanges, by round."""
        random = np.random.default_rng(self.seed)
        systems = [self.piece(random, "system") for _ in range(2)]
        talks = [list(systems[number % 2]) for number in range(self.agents)]
        earlier = [[list(talk)] for talk in talks]
        rounds = []
        for _ in range(self.turns):
            prompts = [self._turn(random, talks, earlier, systems, n) for n in range(self.agents)]
            exchanges = ask(engine, prompts)
            for number, one in enumerate(exchanges):
                earlier[number].append(list(talks[number]))
                talks[number] = [*one.prompt, *one.answer]
            rounds.append(exchanges)
        return rounds

    def _turn(self, random, talks, earlier, systems, number) -> tuple[tuple[int, ...], dict]:
        """What agent `number` asks next."""
        fate = random.random()
        if fate < 0.15:  # Goes back, as one that tries another way.
            talks[number] = list(earlier[number][int(random.integers(len(earlier[number])))])
        elif fate < 0.3:  # Takes up where another is.
            talks[number] = list(talks[int(random.integers(self.agents))])
        text = talks[number] + self.piece(random, "tool" if random.random() < 0.4 else "user")
        if len(text) > self.room:
            text = systems[number % 2] + self.piece(random, "user")
        options = {
            "max_tokens": int(random.integers(3, 14)),
            "temperature": float(random.choice([0.0, 0.0, 0.8])),
            "seed": int(random.integers(4)),
        }
        return tuple(text), options


def cached(rounds: list[list[Exchange]], page_size: int = 1) -> int:
    """Prompt tokens that came from the prefix cache, those of whole pages of this size."""
    return sum(one.cached // page_size * page_size for exchanges in rounds for one in exchanges)


def conversation_tokens(rounds: list[list[Exchange]]) -> list[tuple[tuple[int, ...], ...]]:
    """Prompts and answers alone."""
    return [(one.prompt, one.answer) for exchanges in rounds for one in exchanges]


def ask_again(
    engine: Engine, rounds: list[list[Exchange]], seed: int, at_once: int
) -> tuple[int, int]:
    """Ask everything once more, in another order and company; each must get the same tokens.

    Returns their number, and how many of their prompt tokens were cached.
    """
    everything = [one for exchanges in rounds for one in exchanges]
    order = np.random.default_rng(seed).permutation(len(everything))
    reused = 0
    for first in range(0, len(order), at_once):
        chosen = [everything[place] for place in order[first : first + at_once]]
        again = ask(engine, [(one.prompt, one.options) for one in chosen])
        for before, now in zip(chosen, again, strict=True):
            assert now.answer == before.answer, (before, now)
            reused += now.cached
    return len(order), reused


def letters(random: np.random.Generator, kind: str) -> list[int]:
    """Messages for the toy, whose tokens are bytes. Tool results repeat, as they do."""
    length = {"system": 37, "user": int(random.integers(3, 12)), "tool": 18}[kind]
    if kind == "tool":
        return [97 + (index * int(random.integers(1, 4))) % 5 for index in range(length)]
    return random.integers(97, 113, length).tolist()


def cut_from(texts: list[Ints]) -> Piece:
    """Messages for a model: pieces of encoded texts."""

    def piece(random: np.random.Generator, kind: str) -> list[int]:
        text = texts[int(random.integers(len(texts)))].tolist()
        length = {"system": 60, "user": int(random.integers(4, 20)), "tool": 24}[kind]
        start = int(random.integers(max(1, len(text) - length)))
        return text[start : start + length]

    return piece
