"""The author that will serve: the engine, with whatever executor and drafter it was given."""

from queue import Queue

import numpy as np

from forerun.build.engine import Loaded
from forerun.engine.request import Delta, Finish, Request, Stopping
from forerun.speculative.sampling import Sampling
from forerun.train.answers import Ask
from forerun.types import Ints, RequestId


class ServedAuthor:
    """Continues prompts through a running engine. See forerun.train.answers.Author."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._done: Queue[tuple[int, Ints]] = Queue()
        self._serial = 0

    def ask(self, key: int, ask: Ask) -> None:
        """Submit one request to the engine; an answer is cut where the context ends. Raises
        RequestError where the prompt does not fit or the queue is full.
        """
        self._serial += 1
        room = self._loaded.context - len(ask.prompt)
        collected: list[int] = []

        def take(delta: Delta) -> None:
            collected.extend(delta.tokens)
            if delta.finish is not None:
                failed = delta.finish in (Finish.ERROR, Finish.ABORT)
                self._done.put((key, np.array([] if failed else collected, np.int32)))

        self._loaded.engine.submit(
            Request(
                id=RequestId(f"train-{self._serial}"),
                prompt=ask.prompt,
                sampling=Sampling(temperature=ask.temperature, seed=ask.seed),
                stopping=Stopping(
                    max_tokens=max(min(ask.max_tokens, room), 1),
                    stop_tokens=tuple(sorted(self._loaded.tokenizer.eos_ids)),
                ),
            ),
            take,
        )

    def finished(self) -> list[tuple[int, Ints]]:
        """Block until at least one continuation has finished, then return all that have: (key,
        output int32[.]). No ids: it failed.
        """
        found = [self._done.get()]
        while not self._done.empty():
            found.append(self._done.get())
        return found
