"""The serving engine as an author of training data, with its configured executor and drafter."""

from queue import Queue

import numpy as np

from forerun.build.engine import Loaded
from forerun.engine.request import Delta, Finish, Request, Stopping
from forerun.speculative.sampling import Sampling
from forerun.train.answers import Ask
from forerun.types import Ints, RequestId

LOOK = 16
"""Tokens between two checks whether an output is still usable."""


class ServedAuthor:
    """Continues prompts with a running engine. See forerun.train.answers.Author."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._done: Queue[tuple[int, Ints]] = Queue()
        self._serial = 0

    def ask(self, key: int, ask: Ask) -> None:
        """Submit one request to the engine. The answer ends where the context ends, or within about
        LOOK tokens after it becomes unusable. Raises RequestError if the prompt does not fit or the
        queue is full.
        """
        self._serial += 1
        room = self._loaded.context - len(ask.prompt)
        request = RequestId(f"train-{self._serial}")
        collected: list[int] = []
        looked, useless = 0, False

        def take(delta: Delta) -> None:
            nonlocal looked, useless
            collected.extend(delta.tokens)
            if delta.finish is not None:
                failed = delta.finish in (Finish.ERROR, Finish.ABORT) and not useless
                self._done.put((key, np.array([] if failed else collected, np.int32)))
            elif ask.useless and not useless and len(collected) >= looked + LOOK:
                looked, useless = len(collected), ask.useless(np.array(collected, np.int32))
                if useless:
                    self._loaded.engine.abort(request)

        self._loaded.engine.submit(
            Request(
                id=request,
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
        """Block until at least one continuation has finished. Returns all that have as (key, output
        int32[.]); an output without ids has failed.
        """
        found = [self._done.get()]
        while not self._done.empty():
            found.append(self._done.get())
        return found
