"""POST /embedding and /embeddings: llama.cpp's embeddings, and OpenAI's without /v1."""

from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.errors import RequestError
from forerun.serve.answers.contract import News
from forerun.serve.answers.service import Served, Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.embedding import MAX_INPUTS, EmbeddingBody, EmbeddingRequest
from forerun.serve.bodies.fields import accept, need, only, read
from forerun.serve.bodies.schema import Prompt, RequestBody, prompts
from forerun.serve.dialects.openai.embeddings import EmbeddingDialect, OpenAIEmbeddings

_NORMS = only(-1, 2, why="vectors have the length 1 (2), or stay as they are (-1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaEmbeddingBody(RequestBody):
    """POST /embedding. embd_normalize: 2, of length 1; -1, unchanged."""

    content: tuple[Prompt, ...] = need(prompts(MAX_INPUTS))
    encoding_format: str = accept(only("float", why="numbers are JSON here"), "float")
    embd_normalize: int = accept(_NORMS, 2)

    renamed: ClassVar[dict[str, str]] = {"input": "content"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsBody(EmbeddingBody):
    """POST /embeddings: `input` as in /v1/embeddings, or `content` as in /embedding."""

    input: tuple[Prompt, ...] = accept(prompts(MAX_INPUTS), ())
    content: tuple[Prompt, ...] = accept(prompts(MAX_INPUTS), ())
    embd_normalize: int | None = accept(_NORMS)


class LlamaEmbeddings(EmbeddingDialect):
    """POST /embedding: a list with the vector of each input. 501 says why this model makes none."""

    def _read(
        self, value: Any, service: Service
    ) -> tuple[EmbeddingRequest, Served, tuple[str, ...]]:
        body = read(LlamaEmbeddingBody, value)
        served = service.named(body.model)
        request = EmbeddingRequest(body.content, "content", normalize=body.embd_normalize == 2)
        return request, served, tuple(body.ignored)

    def full_response(self, choices: News, tally: Tally) -> list[dict[str, Any]]:
        """Implement Dialect.full_response: a list with the vector of each input."""
        vectors = self._vectors(choices)
        return [{"index": i, "embedding": [one.tolist()]} for i, one in enumerate(vectors)]


class EitherEmbeddings(OpenAIEmbeddings):
    """POST /embeddings: as /embedding for `content`, as /v1/embeddings for `input`."""

    def __init__(self) -> None:
        super().__init__()
        self._native: LlamaEmbeddings | None = None

    def _read(
        self, value: Any, service: Service
    ) -> tuple[EmbeddingRequest, Served, tuple[str, ...]]:
        body = read(EmbeddingsBody, value)
        if bool(body.input) == bool(body.content):
            raise RequestError("Give either input (OpenAI) or content (llama.cpp).", "input")
        if body.input and body.embd_normalize is None:
            return super()._read(value, service)
        self._native = LlamaEmbeddings()
        return self._native._read(value, service)

    def full_response(self, choices: News, tally: Tally) -> Any:
        """Implement Dialect.full_response, in the format that belongs to the field."""
        if self._native is None:
            return super().full_response(choices, tally)
        self._native._asked = self._asked
        return self._native.full_response(choices, tally)
