"""POST /api/embed and /api/embeddings."""

from dataclasses import dataclass
from time import monotonic
from typing import Any

from forerun.serve.answers.contract import News
from forerun.serve.answers.service import Served, Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.embedding import MAX_INPUTS, EmbeddingRequest
from forerun.serve.bodies.fields import (
    accept,
    boolean,
    ignore,
    ignored_in,
    integer,
    mapping,
    one_or_more,
    read,
    text,
)
from forerun.serve.bodies.messages import plain_text
from forerun.serve.bodies.schema import MAX_TOKENS
from forerun.serve.dialects.ollama.answers import NANO
from forerun.serve.dialects.ollama.errors import error_body
from forerun.serve.dialects.ollama.schema import alive
from forerun.serve.dialects.openai.embeddings import EmbeddingDialect
from forerun.serve.http.errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedBody:
    """POST /api/embed. truncate: inputs beyond the context are cut to their beginning."""

    model: str | None = accept(text(256, 1))
    input: tuple[str, ...] = accept(one_or_more(plain_text, MAX_INPUTS), ())
    truncate: bool = accept(boolean, True)
    dimensions: int | None = accept(integer(1, MAX_TOKENS))
    options: dict[str, Any] | None = ignore(mapping)
    keep_alive: Any = ignore(alive)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldEmbedBody:
    """POST /api/embeddings, which /api/embed replaces."""

    model: str | None = accept(text(256, 1))
    prompt: str = accept(plain_text, "")
    options: dict[str, Any] | None = ignore(mapping)
    keep_alive: Any = ignore(alive)


class OllamaEmbed(EmbeddingDialect):
    """POST /api/embed."""

    def _read(
        self, value: Any, service: Service
    ) -> tuple[EmbeddingRequest, Served, tuple[str, ...]]:
        body = read(EmbedBody, value)
        served = service.named(body.model)
        inputs = () if body.input == ("",) else body.input
        most = served.loaded.context if body.truncate else None
        asked = EmbeddingRequest(inputs, "input", body.dimensions, most=most, keep_first=True)
        return asked, served, ignored_in(body)

    def _empty(self) -> dict[str, Any]:
        return {"model": self._served.name, "embeddings": []}

    def whole(self, choices: News, tally: Tally) -> dict[str, Any]:
        """As Dialect.whole: the vectors, with counts and times."""
        return {
            "model": self._served.name,
            "embeddings": [vector.tolist() for vector in self._vectors(choices)],
            "total_duration": int((monotonic() - tally.began) * NANO),
            "load_duration": 0,
            "prompt_eval_count": tally.prompt_tokens,
        }

    @staticmethod
    def error(error: ApiError) -> dict[str, str]:
        """As Dialect.error: `error_body`."""
        return error_body(error)


class OllamaOldEmbed(OllamaEmbed):
    """POST /api/embeddings: one vector, whose length is the model's own, as Ollama leaves it."""

    def _read(
        self, value: Any, service: Service
    ) -> tuple[EmbeddingRequest, Served, tuple[str, ...]]:
        body = read(OldEmbedBody, value)
        served = service.named(body.model)
        inputs, most = (body.prompt,) if body.prompt else (), served.loaded.context
        asked = EmbeddingRequest(inputs, "prompt", normalize=False, most=most, keep_first=True)
        return asked, served, ignored_in(body)

    def _empty(self) -> dict[str, Any]:
        return {"embedding": []}

    def whole(self, choices: News, tally: Tally) -> dict[str, Any]:
        """As Dialect.whole."""
        (vector,) = self._vectors(choices)
        return {"embedding": vector.tolist()}
