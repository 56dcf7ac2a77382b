"""Requests for embeddings, and the vectors of their answers."""

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from forerun.build.engine import Frontend
from forerun.engine.request import Delta, Request, Speculation, Stopping
from forerun.errors import RequestError
from forerun.serve.bodies.fields import MAX_TEXT, Unused, accept, boolean, integer, need, only, text
from forerun.serve.bodies.prepare import Generation, check_length, known_tokens, too_long
from forerun.serve.bodies.schema import (
    MAX_TOKENS,
    Prompt,
    RequestBody,
    cache_salt,
    prompts,
    truncation,
)
from forerun.serve.http.errors import ApiError
from forerun.speculative.sampling import Sampling
from forerun.types import Floats, Ints, RequestId

MAX_INPUTS = 2048
"""Most inputs of one request, OpenAI's limit."""
MAX_NUMBERS = 1 << 22
"""Most numbers of one answer: some 80 MB of JSON."""
AT_ONCE = 64
"""Most inputs of one request in the engine at once; the others wait outside its queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBody(RequestBody):
    """POST /v1/embeddings. dimensions: keep only the first numbers, scaled to length 1 again, for
    models that were trained for it. normalize: false keeps the vector's own length (vLLM).
    """

    input: tuple[Prompt, ...] = need(prompts(MAX_INPUTS))
    encoding_format: str = accept(only("float", "base64", why="these are the formats"), "float")
    dimensions: int | None = accept(integer(1, MAX_TOKENS))
    normalize: bool = accept(boolean, True)
    truncate_prompt_tokens: int | None = accept(truncation)
    add_special_tokens: bool = accept(boolean, True)
    cache_salt: str | None = accept(cache_salt)
    request_id: str | None = accept(text(256, 1))
    user: str = accept(text(MAX_TEXT), "")

    renamed: ClassVar[dict[str, str]] = {"rid": "request_id", "extra_key": "cache_salt"}
    refused: ClassVar[dict[str, str]] = {"messages": "put the text into input"}
    unused: ClassVar[dict[str, Unused]] = {"priority": Unused(integer(-(2**63), 2**63 - 1), 0)}


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for embeddings, from a body of any dialect.

    place       the field that has the inputs
    dimensions  how many numbers are kept, the first ones; None = all
    normalize   vectors have length 1
    most        most tokens of an input: longer ones are cut; None = they are rejected
    keep_first  cut inputs keep their first tokens instead of their last
    special     texts get the tokens that the model expects around them
    name        the client's own name for the request
    """

    inputs: tuple[Prompt, ...]
    place: str = "input"
    dimensions: int | None = None
    normalize: bool = True
    most: int | None = None
    keep_first: bool = False
    special: bool = True
    salt: str = ""
    name: str | None = None

    @classmethod
    def of(cls, body: EmbeddingBody, context: int) -> "EmbeddingRequest":
        """Return the request of a body of /v1/embeddings."""
        limit = body.truncate_prompt_tokens
        return cls(
            body.input,
            dimensions=body.dimensions,
            normalize=body.normalize,
            most=context if limit == -1 else limit,
            special=body.add_special_tokens,
            salt=body.cache_salt or "",
            name=body.request_id,
        )

    def vectors(self, deltas: Iterable[Delta]) -> list[Floats]:
        """Return float32[dimensions] for each input, from the last deltas, in order."""
        return [self._vector(np.frombuffer(delta.embedding, np.float32)) for delta in deltas]

    def _vector(self, pooled: Floats) -> Floats:
        cut = pooled[: self.dimensions]
        if not self.normalize:
            return cut
        exact = cut.astype(np.float64)
        length = max(float(np.linalg.norm(exact)), 1e-30)
        vector: Floats = (exact / length).astype(np.float32)
        return vector


def embedding_generation(request: EmbeddingRequest, loaded: Frontend, name: str) -> Generation:
    """Return the engine's requests. Raises RequestError naming the field, ContextError, ApiError
    (501) if the model, called `name`, makes no embeddings.
    """
    rule: dict[str, Any] = loaded.info["embeddings"]
    if rule["fault"]:
        raise ApiError(501, f"{name} makes no embeddings: {rule['fault']}.", "not_implemented")
    size = rule["size"] if request.dimensions is None else request.dimensions
    if size > rule["size"]:
        message = f"dimensions is {size}, but {name} has {rule['size']}."
        raise RequestError(message, "dimensions")
    if len(request.inputs) * size > MAX_NUMBERS:
        raise RequestError(
            f"{len(request.inputs)} inputs of {size} numbers are more than the {MAX_NUMBERS} of "
            "one answer; send fewer inputs.",
            request.place,
        )
    id = f"embd-{uuid.uuid4().hex}"
    requests = tuple(
        Request(
            id=RequestId(f"{id}-{index}"),
            prompt=_tokens(given, request, loaded, rule["prompt"], index),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=0),
            speculation=Speculation(enabled=False),
            cache_salt=request.salt,
            pooling=rule["pooling"],
        )
        for index, given in enumerate(request.inputs)
    )
    given = () if request.name is None else (request.name,)
    return Generation(
        *(request.name or id, int(time.time()), requests, 1, False, frozenset()),
        client_ids=given,
        at_once=AT_ONCE,
    )


def _tokens(
    given: Prompt, request: EmbeddingRequest, loaded: Frontend, prompt: str, index: int
) -> Ints:
    """Return the tokens int32[T] of an input. Raises RequestError, ContextError."""
    tokenizer, suffix = loaded.tokenizer, np.zeros(0, np.int32)
    place = request.place if len(request.inputs) == 1 else f"{request.place}[{index}]"
    if isinstance(given, str):
        if request.most is None:
            check_length(given, loaded, place)
        ids = tokenizer.encode(prompt + given, True, request.special)
        if request.special:
            suffix = np.array(tokenizer.suffix, np.int32)
    else:
        ids = known_tokens(given, loaded, place)
    if request.most is not None:
        room = max(min(request.most, loaded.context) - len(suffix), 0)
        ids = ids[:room] if request.keep_first else ids[max(len(ids) - room, 0) :]
    ids = np.concatenate([ids, suffix])
    if not len(ids):
        raise RequestError(f"{place} is empty; it needs at least one token.", place)
    if len(ids) > loaded.context:
        raise too_long(len(ids), loaded, place)
    return ids
