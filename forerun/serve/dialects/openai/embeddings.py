"""POST /v1/embeddings, and the common part of all embedding routes."""

import base64
from abc import abstractmethod
from typing import Any

from forerun.serve.answers.contract import Dialect, News, ParsedRequest, Ready
from forerun.serve.answers.service import Served, Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.embedding import EmbeddingBody, EmbeddingRequest, embedding_generation
from forerun.serve.bodies.fields import read
from forerun.serve.http.errors import ApiError
from forerun.types import Floats

NUMBER = 20
"""Approximate bytes of a number in an answer."""


class EmbeddingDialect(Dialect):
    """The common part of all embedding routes: answers in one piece, a vector per input."""

    _asked: EmbeddingRequest

    def parse(self, value: Any, service: Service) -> ParsedRequest | Ready:
        """Implement Dialect.parse; Ready if there is no input and the dialect allows that. Raises
        RequestError naming the field, ApiError.
        """
        self._asked, self._served, ignored = self._read(value, service)
        if not self._asked.inputs:
            return Ready(self._empty(), ignored)
        generation = embedding_generation(self._asked, self._served.loaded, self._served.name)
        return ParsedRequest(generation, self._served, ignored)

    @abstractmethod
    def _read(
        self, value: Any, service: Service
    ) -> tuple[EmbeddingRequest, Served, tuple[str, ...]]:
        """Return the request, its model, and the ignored fields."""

    def _empty(self) -> Any:
        """Return the answer to a request without input."""
        return {}

    @staticmethod
    def size(news: News) -> int:
        """Return the approximate bytes of an answer with these deltas."""
        return sum(len(delta.embedding) // 4 * NUMBER for _, delta in news)

    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """Return nothing: embeddings do not stream."""
        return b""

    def end(self, error: ApiError | None) -> bytes:
        """Return nothing: embeddings do not stream."""
        return b""

    def _vectors(self, choices: News) -> list[Floats]:
        return self._asked.vectors(delta for _, delta in choices)


class OpenAIEmbeddings(EmbeddingDialect):
    """POST /v1/embeddings: a vector per input. 400 names a field that cannot be accepted, 501 says
    why this model makes none.
    """

    _body: EmbeddingBody

    def _read(
        self, value: Any, service: Service
    ) -> tuple[EmbeddingRequest, Served, tuple[str, ...]]:
        body = self._body = read(EmbeddingBody, value)
        served = service.named(body.model)
        return EmbeddingRequest.of(body, served.loaded.context), served, tuple(body.ignored)

    def full_response(self, choices: News, tally: Tally) -> dict[str, Any]:
        """Implement Dialect.full_response: OpenAI's list of embeddings, with the usage."""
        packed = self._body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(vector) if packed else vector.tolist(),
            }
            for index, vector in enumerate(self._vectors(choices))
        ]
        usage = {"prompt_tokens": tally.prompt_tokens, "total_tokens": tally.prompt_tokens}
        model = self._served.name
        return {"id": tally.generation.id, "object": "list", "created": tally.generation.created,
                "model": model, "data": data, "usage": usage}  # fmt: skip


def _base64(vector: Floats) -> str:
    """Encode a vector float32[n] as little-endian base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
