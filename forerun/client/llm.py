"""The synchronous Python interface."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

from forerun.build.engine import encode_chat, load
from forerun.client.adapters import adapter_number
from forerun.client.completion import Completion, complete, make_request, stream
from forerun.client.options import EngineArgs, SamplingOptions, checked
from forerun.engine.request import Delta, Request
from forerun.errors import RequestError
from forerun.options.config import EngineConfig
from forerun.types import Ints

Prompt = str | Sequence[dict[str, Any]]
"""A text to continue, in which the spellings of control tokens such as <|im_start|> become those
tokens, or the messages of a conversation to answer, in which they stay text.
"""


class LLM:
    """Forerun for Python programs.

        with LLM("smollm2-135m") as llm:
            print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)

    Keyword options of the constructor are the fields of `EngineConfig`. Those of the methods
    are the fields of `Sampling` (temperature, top_p, seed, ...) plus max_tokens, n, stop,
    stop_token_ids, include_stop, ignore_eos, `grammar`, a `forerun.constrain.grammar.Grammar`
    that the text must follow, and `lora_name`, the adapter of `lora_modules` that answers; unknown
    ones raise RequestError. Temperature is 0 unless given.
    `options` has them with their types.
    """

    def __init__(self, model: str = "smollm2-135m", **config: Unpack[EngineArgs]) -> None:
        self.loaded = load(EngineConfig(model=model, **config))

    def __enter__(self) -> Self:
        """Return this object; the constructor has loaded the model."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the model."""
        self.close()

    def generate(
        self, prompts: str | Sequence[str], **options: Unpack[SamplingOptions]
    ) -> list[Completion]:
        """Continue plain texts, batched, and wait for all. Returns one Completion per prompt (n per
        prompt, prompt by prompt). Raises RequestError if a prompt or an option is wrong,
        EngineError if the engine fails.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        requests = [self.request(text, **options) for text in texts]
        return [item for choices in complete(self.loaded.engine, requests) for item in choices]

    def chat(
        self, messages: Sequence[dict[str, Any]], **options: Unpack[SamplingOptions]
    ) -> Completion:
        """Return the answer to a conversation of messages with `role` and `content`. Raises
        RequestError if a message or an option is wrong, `n` is above 1 (use `choices`) or a plain
        text is given; ModelError if the model has no chat template; EngineError if the engine
        fails.
        """
        one_answer(messages, options)
        return self.choices(messages, **options)[0]

    def choices(self, prompt: Prompt, **options: Unpack[SamplingOptions]) -> list[Completion]:
        """Return all n continuations of a text, or answers to a conversation, in the order of their
        indices. Raises as `generate`; ModelError if the model has no chat template.
        """
        return complete(self.loaded.engine, [self.request(prompt, **options)])[0]

    def stream(self, prompt: Prompt, **options: Unpack[SamplingOptions]) -> Iterator[Delta]:
        """Yield the deltas of all choices as they arrive; `index` is the number of the choice.
        Closing the iterator early aborts the request. Options are checked when this is called.
        Raises RequestError if one is wrong or the engine refuses the request, EngineError if the
        engine fails.
        """
        return stream(self.loaded.engine, self.request(prompt, **options))

    def close(self) -> None:
        """Shut the engine down and release the model. Idempotent."""
        self.loaded.close()

    def _tokens(self, prompt: Prompt) -> Ints:
        if isinstance(prompt, str):
            return self.loaded.tokenizer.encode(prompt, specials=True, bos=True)
        return encode_chat(self.loaded, prompt)

    def request(self, prompt: Prompt, **options: Unpack[SamplingOptions]) -> Request:
        """Return the request that the other methods submit, with its grammar compiled. Raises
        RequestError naming an option that is wrong or out of range, ModelError for messages to a
        model without a chat template.
        """
        given: dict[str, Any] = {**checked(options)}
        if given.get("grammar") is not None:
            given["grammar"] = self.loaded.target.compile(given["grammar"])
        name = given.pop("lora_name", None)
        request = make_request(self._tokens(prompt), self.loaded.tokenizer.eos_ids, **given)
        if name is None:
            return request
        return replace(request, adapter=adapter_number(self.loaded.info, name, "lora_name"))


def one_answer(messages: Prompt, options: SamplingOptions) -> None:
    """Raise RequestError if `chat` is called with a plain text, with a wrong option, or with `n`
    above 1.
    """
    if isinstance(messages, str):
        raise RequestError("chat takes messages; to continue a text use generate.", "messages")
    if checked(options).get("n", 1) != 1:
        raise RequestError("chat gives one answer; for several use choices(..., n=...).", "n")
