"""Forerun for Python programs."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from forerun.api import encode_chat, load
from forerun.completion import Completion, complete, make_request, stream
from forerun.config import EngineConfig
from forerun.engine.request import Delta, Request
from forerun.types import Ints


class LLM:
    """Forerun for Python programs.

        with LLM("smollm2-135m") as llm:
            print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)

    Keyword options of the constructor are the fields of `EngineConfig`. Those of the methods
    are the fields of `Sampling` (temperature, top_p, seed, ...) plus max_tokens, n, stop,
    include_stop, ignore_eos, and `grammar`, a `forerun.constrain.grammar.Grammar` that the text
    must follow; unknown ones raise RequestError. Temperature is 0 unless given.
    """

    def __init__(self, model: str = "smollm2-135m", **config: Any) -> None:
        self.loaded = load(EngineConfig(model=model, **config))

    def __enter__(self) -> Self:
        """Nothing more to do: the model is loaded."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the model."""
        self.close()

    def generate(self, prompts: str | Sequence[str], **options: Any) -> list[Completion]:
        """Continue plain texts, together. One completion per prompt (n per prompt, in order)."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        requests = [self._request(self._plain(text), options) for text in texts]
        return [item for choices in complete(self.loaded.engine, requests) for item in choices]

    def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Completion:
        """Answer a conversation: messages with `role` and `content`. The first choice."""
        request = self._request(self._turns(messages), options)
        return complete(self.loaded.engine, [request])[0][0]

    def stream(self, prompt: str | Sequence[dict[str, Any]], **options: Any) -> Iterator[Delta]:
        """Like `generate` of one text, or `chat` of messages, but delta by delta."""
        tokens = self._plain(prompt) if isinstance(prompt, str) else self._turns(prompt)
        return stream(self.loaded.engine, self._request(tokens, options))

    def close(self) -> None:
        """Release the model. Idempotent."""
        self.loaded.close()

    def _plain(self, text: str) -> Ints:
        return self.loaded.tokenizer.encode(text, bos=True)

    def _turns(self, messages: Sequence[dict[str, Any]]) -> Ints:
        return encode_chat(self.loaded, messages)

    def _request(self, prompt: Ints, options: dict[str, Any]) -> Request:
        if options.get("grammar") is not None:
            options = options | {"grammar": self.loaded.target.compile(options["grammar"])}
        return make_request(prompt, self.loaded.tokenizer.eos_ids, **options)
