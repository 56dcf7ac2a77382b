"""The request bodies of llama.cpp's own routes."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from forerun.errors import RequestError
from forerun.serve.bodies.fields import (
    Declaration,
    Unused,
    accept,
    boolean,
    integer,
    items,
    need,
    number,
    only,
    part,
    plain_text,
    read,
    shown,
    takes,
    text,
)
from forerun.serve.bodies.messages import NO_MEDIA
from forerun.serve.bodies.schema import (
    MAX_PROMPTS,
    MAX_TOKENS,
    UNLIMITED,
    CompletionBody,
    Prompt,
    SampledBody,
)

MAX_FIELDS = 256
"""Most names in response_fields, and most chunks of input_extra."""
MAX_MIXED = 1 << 20
RANDOM_SEEDS = (None, -1, 2**32 - 1)
"""Values of seed that request a random one. The answer reports it, small enough for every JSON
parser.
"""


Parts = tuple[str | int, ...]
"""A prompt of texts and token ids, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptObject(Declaration):
    prompt_string: str = need(plain_text)
    multimodal_data: list[Any] | None = accept(only([], why=NO_MEDIA))


def _one_prompt(value: Any, where: str) -> Parts:
    """Read a text, token ids, or a list of both."""
    if isinstance(value, str):
        return (plain_text(value, where),)
    if isinstance(value, dict):
        return (read(_PromptObject, value, where).prompt_string,)
    if not isinstance(value, list):
        message = f"{where} must be a text or a list of texts and token ids, not {shown(value)}."
        raise RequestError(message, where)
    found = items(_text_or_id, MAX_MIXED, 1)(value, where)
    return tuple(found)


def _text_or_id(value: Any, where: str) -> str | int:
    if isinstance(value, str):
        return plain_text(value, where)
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise RequestError(f"{where} must be a text or a token id, not {shown(value)}.", where)
    return value


@takes({"type": ["string", "array", "object"]})
def _prompts(value: Any, where: str) -> tuple[Parts, ...]:
    """Read `prompt`: one prompt, or several: lists and objects in a list, or texts alone."""
    kinds = {type(one) for one in value} if isinstance(value, list) else set()
    if kinds and (kinds == {str} or kinds & {list, dict}):
        return items(_one_prompt, MAX_PROMPTS)(value, where)
    return (_one_prompt(value, where),)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeBody(SampledBody):
    """POST /completion. max_tokens (n_predict): negative = as many as the context has room for;
    None = the server's default, or as many.

    n_probs  alternatives to report of each token; 0 = no probabilities
    return_tokens  the answer has its tokens; a stream always does
    response_fields  the parts of the answer to return; "a/b" is b of a
    n_indent  the answer ends before a line that is indented by less, from its second line on
    t_max_predict_ms  the answer ends after this time, once it has a line break; 0 = never
    """

    prompt: tuple[Parts, ...] = need(_prompts)
    max_tokens: int | None = accept(integer(-2, MAX_TOKENS))
    seed: int | None = accept(integer(-(2**63), 2**64 - 1))
    n_probs: int = accept(integer(0, MAX_TOKENS), 0)
    return_tokens: bool = accept(boolean, False)
    response_fields: tuple[str, ...] = accept(items(text(256, 1), MAX_FIELDS), ())
    n_indent: int = accept(integer(0, MAX_TOKENS), 0)
    t_max_predict_ms: int = accept(integer(-1, MAX_TOKENS), 0)

    renamed: ClassVar[dict[str, str]] = {
        **SampledBody.renamed,
        "n_cmpl": "n",
        "logprobs": "n_probs",
        "slot_id": "id_slot",
    }
    refused: ClassVar[dict[str, str]] = {
        name: why for name, why in SampledBody.refused.items() if name != "return_tokens"
    }
    unused: ClassVar[dict[str, Unused]] = {
        **SampledBody.unused,
        "t_max_prompt_ms": Unused(integer(-1, MAX_TOKENS)),
        "n_cache_reuse": Unused(integer(0, MAX_TOKENS)),
        "sse_ping_interval": Unused(number(-1, 1e9)),
    }

    def plain(self, prompts: tuple[Prompt, ...], sampling: Mapping[str, float]) -> CompletionBody:
        """Convert the request to a CompletionBody with these prompts, texts or ids.

        sampling  the server's defaults
        """
        usual = None if "max_tokens" in sampling else UNLIMITED
        shared = {item.name: getattr(self, item.name) for item in fields(SampledBody)}
        drawn = secrets.randbits(31) if self.seed in RANDOM_SEEDS else self.seed
        return CompletionBody(
            **{**shared, "seed": drawn},
            prompt=prompts,
            max_tokens=usual if self.max_tokens is None else max(self.max_tokens, UNLIMITED),
            logprobs=self.n_probs or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extra(Declaration):
    text: str = need(plain_text)
    filename: str = accept(plain_text, "tmp")


@takes(plain_text.schema)
def _one_text(value: Any, where: str) -> tuple[Parts, ...]:
    return ((plain_text(value, where),),)


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillBody(NativeBody):
    """POST /infill: the text between input_prefix followed by prompt, and input_suffix.

    input_extra  other files; as much of their end is used as the context has room for
    """

    prompt: tuple[Parts, ...] = accept(_one_text, (("",),))
    input_prefix: str = need(plain_text)
    input_suffix: str = need(plain_text)
    input_extra: tuple[_Extra, ...] = accept(items(part(_Extra), MAX_FIELDS), ())
