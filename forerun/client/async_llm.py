"""Forerun for asyncio programs."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self, Unpack

from forerun.client.completion import POLL_SECONDS, Completion
from forerun.client.llm import LLM, Prompt, one_answer
from forerun.client.options import EngineArgs, SamplingOptions, checked
from forerun.engine.request import Delta, Request
from forerun.errors import EngineError


class AsyncLLM:
    """`LLM` for asyncio: loading and generation do not block the event loop.

        async with AsyncLLM("smollm2-135m") as llm:
            answer = await llm.chat([{"role": "user", "content": "Why is the sky blue?"}])
            async for delta in llm.stream("Once upon a time"):
                print(delta.text, end="")

    Options as in `LLM`. Concurrent calls are batched. Cancelling a call aborts its request.
    """

    def __init__(self, model: str = "smollm2-135m", **config: Unpack[EngineArgs]) -> None:
        self._model, self._config = model, config
        self._llm: LLM | None = None

    async def __aenter__(self) -> Self:
        """Load the model. Raises what `forerun.build.engine.load` raises."""
        self._llm = await asyncio.to_thread(lambda: LLM(self._model, **self._config))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the model."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.close)

    async def generate(
        self, prompts: str | Sequence[str], **options: Unpack[SamplingOptions]
    ) -> list[Completion]:
        """Continue plain texts, batched. Returns one Completion per prompt (n per prompt, prompt by
        prompt).

        options  as of LLM.generate

        Raises RequestError if a prompt or an option is wrong, EngineError if the engine fails or no
        model is loaded. An error, or cancelling the call, aborts all its requests.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        tasks = [asyncio.create_task(self.choices(text, **options)) for text in texts]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [item for choices in answers for item in choices]

    async def chat(
        self, messages: Sequence[dict[str, Any]], **options: Unpack[SamplingOptions]
    ) -> Completion:
        """Return the answer to a conversation; options and errors as of `LLM.chat`. Cancelling the
        call aborts its request.
        """
        one_answer(messages, options)
        return (await self.choices(messages, **options))[0]

    async def choices(self, prompt: Prompt, **options: Unpack[SamplingOptions]) -> list[Completion]:
        """Return all n continuations of a text, or answers to a conversation, in the order of their
        indices. Raises as `generate`.
        """
        completions = [Completion(index) for index in range(checked(options).get("n", 1))]
        async with aclosing(self.stream(prompt, **options)) as deltas:
            async for delta in deltas:
                completions[delta.index].add(delta)
        return completions

    async def stream(
        self, prompt: Prompt, **options: Unpack[SamplingOptions]
    ) -> AsyncGenerator[Delta]:
        """Yield the deltas of all choices as they arrive; `index` is the number of the choice.
        Closing the iterator early aborts the request. Errors as of `generate`, at the first
        iteration.
        """
        llm = self._llm
        if llm is None:
            raise EngineError("the model is not loaded: use `async with AsyncLLM(...) as llm`")
        request: Request = await asyncio.to_thread(lambda: llm.request(prompt, **options))
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Delta]()
        engine, left = llm.loaded.engine, request.n

        def take(delta: Delta) -> None:
            # The loop may have ended without waiting for an aborted request.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(inbox.put_nowait, delta)

        engine.submit(request, take)
        try:
            while left:
                try:
                    delta = await asyncio.wait_for(inbox.get(), POLL_SECONDS)
                except TimeoutError:
                    if engine.alive:
                        continue
                    raise EngineError("the engine's thread has died; see its log") from None
                left -= delta.finish is not None
                yield delta
        finally:
            if left:
                engine.abort(request.id)
