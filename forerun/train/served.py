"""The serving engine as a generator of training data, with its configured executor and drafter."""

from queue import Queue

import numpy as np

from forerun.build.engine import Loaded
from forerun.engine.request import Delta, Finish, Request, Stopping
from forerun.speculative.sampling import Sampling
from forerun.train.answers import ContinuationRequest
from forerun.types import Ints, RequestId

LOOK = 16
"""Tokens between two checks whether an output is still usable."""


class EngineGenerator:
    """Continues prompts with a running engine. See forerun.train.answers.Author."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._done: Queue[tuple[int, Ints]] = Queue()
        self._serial = 0

    def submit(self, key: int, request: ContinuationRequest) -> None:
        """Submit one request to the engine. The answer ends where the context ends, or within about
        LOOK tokens after it becomes unusable. Raises RequestError if the prompt does not fit or the
        queue is full.
        """
        self._serial += 1
        room = self._loaded.context - len(request.prompt)
        id = RequestId(f"train-{self._serial}")
        collected: list[int] = []
        looked, unusable = 0, False

        def take(delta: Delta) -> None:
            nonlocal looked, unusable
            collected.extend(delta.tokens)
            if delta.finish is not None:
                failed = delta.finish in (Finish.ERROR, Finish.ABORT) and not unusable
                self._done.put((key, np.array([] if failed else collected, np.int32)))
            elif request.is_unusable and not unusable and len(collected) >= looked + LOOK:
                looked = len(collected)
                unusable = request.is_unusable(np.array(collected, np.int32))
                if unusable:
                    self._loaded.engine.abort(id)

        self._loaded.engine.submit(
            Request(
                id=id,
                prompt=request.prompt,
                sampling=Sampling(temperature=request.temperature, seed=request.seed),
                stopping=Stopping(
                    max_tokens=max(min(request.max_tokens, room), 1),
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
