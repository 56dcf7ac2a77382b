"""Forerun, in process, as `forerun.build.engine` users run it."""

import threading
import time

import numpy as np
from protocol import Load, Stream, serve

from forerun.build import engine as build
from forerun.config import EngineConfig
from forerun.engine.request import Delta, Request, Stopping
from forerun.speculative.sampling import Sampling
from forerun.types import RequestId


class Forerun:
    """The default engine; `speculation` is its default drafter and policy, or off."""

    def load(self, load: Load) -> None:
        """Model, cache and engine thread."""
        self.loaded = build.load(
            EngineConfig(
                model=load.gguf,
                threads=load.threads,
                kv_tokens=load.context * load.streams,
                max_sequences=max(load.streams, 1),
                speculative_algorithm="AUTO" if load.speculation else "OFF",
            )
        )
        self.count = 0

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
        """All prompts at once."""
        begin = time.perf_counter()
        answers = [_Answer(begin) for _ in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            self.count += 1
            request = Request(
                id=RequestId(f"bench-{self.count}"),
                prompt=np.array(prompt, np.int32),
                sampling=Sampling(temperature=0.0),
                stopping=Stopping(max_tokens=max_tokens),
            )
            self.loaded.engine.submit(request, answer.take)
        return [answer.wait() for answer in answers]


class _Answer:
    def __init__(self, begin: float) -> None:
        self.begin, self.first, self.last = begin, 0.0, 0.0
        self.tokens: list[int] = []
        self.done = threading.Event()

    def take(self, delta: Delta) -> None:
        self.last = time.perf_counter() - self.begin
        self.first = self.first or self.last
        self.tokens += delta.tokens
        if delta.finish is not None:
            self.done.set()

    def wait(self) -> Stream:
        self.done.wait()
        return Stream(self.first, self.last, self.tokens)


serve(Forerun())
