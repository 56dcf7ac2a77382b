"""/tokenize, /detokenize and /tokenizer_info, in the formats of vLLM, SGLang and llama.cpp."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from forerun.build.engine import Frontend
from forerun.errors import RequestError
from forerun.serve.answers.answering import Json, received, rendered, service_of
from forerun.serve.bodies.dialogue import chat_prompt
from forerun.serve.bodies.fields import (
    accept,
    boolean,
    items,
    need,
    one_or_more,
    plain_text,
    read,
    takes,
)
from forerun.serve.bodies.prepare import known_tokens
from forerun.serve.bodies.schema import (
    MAX_PROMPTS,
    ConversationFields,
    RequestBody,
    token_ids,
)
from forerun.serve.bodies.wire import dump_json
from forerun.serve.dialects.openai.render import token_text
from forerun.serve.dialects.sglang.schema import PerText, per_list
from forerun.text.reasoning import Marks
from forerun.text.tokenizer import as_numbers
from forerun.types import Ints

_PART = 1 << 16
"""Bytes of an answer that are sent at a time."""


@takes(one_or_more(plain_text, MAX_PROMPTS).schema)
def _texts(value: Any, where: str) -> str | tuple[str, ...]:
    """Read a text or a list of them."""
    found = one_or_more(plain_text, MAX_PROMPTS)(value, where)
    return found if isinstance(value, list) else found[0]


_one_list, _empty = per_list(token_ids), items(token_ids, 0)


@takes({"anyOf": [_empty.schema, _one_list.schema]})
def _ids(value: Any, where: str) -> PerText:
    """Read token ids, possibly none, or a list of lists of them."""
    return PerText(((),)) if value == [] else _one_list(value, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeBody(RequestBody, ConversationFields):
    """POST /tokenize: texts or a conversation. parse_special: as in CompletionBody.

    content, add_special, with_pieces  llama.cpp's: a text, whether to put the begin-of-text token
    before it (default: no), and whether to return tokens with their texts
    """

    prompt: str | tuple[str, ...] | None = accept(_texts)
    content: str | tuple[str, ...] | None = accept(_texts)
    add_special_tokens: bool = accept(boolean, True)
    add_special: bool = accept(boolean, False)
    with_pieces: bool = accept(boolean, False)
    parse_special: bool = accept(boolean, True)
    return_token_strs: bool = accept(boolean, False)

    renamed: ClassVar[dict[str, str]] = {"text": "prompt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    tokens: PerText = need(_ids)
    skip_special_tokens: bool = accept(boolean, False)


async def tokenize(request: Request) -> Response:
    """POST /tokenize: the token ids of a text or conversation. 400 names a field that cannot be
    accepted.
    """
    value, data = await received(request)
    service = service_of(request)
    body = await service.workers.run(len(data), read, TokenizeBody, value)
    loaded = service.named(body.model).loaded
    return _sent(await rendered(service, len(data), _answer, body, loaded))


async def detokenize(request: Request) -> Response:
    """POST /detokenize: the text of token ids. 400 names a field that cannot be accepted."""
    value, data = await received(request)
    service = service_of(request)
    body = await service.workers.run(len(data), read, DetokenizeBody, value)
    loaded = service.named(body.model).loaded
    return _sent(await service.workers.run(len(data), _detokenized, body, loaded))


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info: what a client needs to use /tokenize as its tokenizer."""
    loaded = service_of(request).enter().loaded
    tokenizer = loaded.tokenizer
    ends = {"bos_token": None, "eos_token": None, "pad_token": tokenizer.names.get("eos_token")}
    return Json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": loaded.context,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": None if loaded.chat is None else loaded.chat.source,
            "additional_special_tokens": [t.text for t in tokenizer.added.values() if t.control],
            **ends,
            **tokenizer.names,
        }
    )


TOKEN_ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/tokenize", tokenize, methods=["POST"]),
    Route("/v1/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
]


def _sent(answer: bytes) -> Response:
    """Return an answer of JSON, sent in parts because it may be fifteen times as long as the
    request: others have their turn in between.
    """

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(answer), _PART):
            yield answer[start : start + _PART]

    headers = {"content-length": str(len(answer))}
    return StreamingResponse(parts(), media_type=Json.media_type, headers=headers)


def _answer(body: TokenizeBody, loaded: Frontend) -> bytes:
    """Return the answer's JSON, encoded where the tokens are: there may be millions of them."""
    return dump_json(_tokens(body, loaded))


def _tokens(body: TokenizeBody, loaded: Frontend) -> dict[str, Any]:
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError("Give one of prompt, content and messages.", "prompt")
    if body.tools and body.messages is None:
        raise RequestError("tools are for messages.", "tools")
    if body.messages is not None:
        marks = Marks.found_in(loaded.chat.source if loaded.chat is not None else None)
        prompt = chat_prompt(body, loaded, body.tools, marks)
        return _counts_and_ids(body, loaded, [prompt], several=False)
    begins = body.add_special if body.content is not None else body.add_special_tokens
    content = body.prompt if body.content is None else body.content
    texts = (content,) if isinstance(content, str) else content or ()
    ids = [loaded.tokenizer.encode(one, body.parse_special, bos=begins) for one in texts]
    return _counts_and_ids(body, loaded, ids, several=not isinstance(content, str))


def _counts_and_ids(
    body: TokenizeBody, loaded: Frontend, found: list[Ints], several: bool
) -> dict[str, Any]:
    """Return counts and ids: of one text, or lists of them for several."""

    def strings(ids: Ints) -> list[str]:
        return [token_text(loaded.tokenizer.token_bytes(id)) for id in ids.tolist()]

    def shaped(values: list[Any]) -> Any:
        return values if several else values[0]

    tokens: list[Any] = [as_numbers(ids) for ids in found]
    if body.with_pieces:
        tokens = [
            [
                {"id": id, "piece": piece}
                for id, piece in zip(ids.tolist(), strings(ids), strict=True)
            ]
            for ids in found
        ]
    answer = {"count": shaped([len(ids) for ids in found]), "max_model_len": loaded.context}
    answer["tokens"] = shaped(tokens)
    if body.return_token_strs:
        answer["token_strs"] = shaped([strings(ids) for ids in found])
    return answer


def _detokenized(body: DetokenizeBody, loaded: Frontend) -> bytes:
    """Return the answer's JSON, with the field names of vLLM, llama.cpp and SGLang."""
    found = _text(body, loaded)
    return dump_json({"prompt": found, "content": found, "text": found})


def _text(body: DetokenizeBody, loaded: Frontend) -> str | list[str]:
    def one(tokens: tuple[int, ...], place: str) -> str:
        ids = known_tokens(tokens, loaded, place)
        return loaded.tokenizer.decode(as_numbers(ids), skip_special=body.skip_special_tokens)

    found = body.tokens
    if found.several:
        return [one(ids, f"tokens[{at}]") for at, ids in enumerate(found.values)]
    return one(found.values[0], "tokens")
