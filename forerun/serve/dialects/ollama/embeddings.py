"""POST /api/embed and /api/embeddings."""

from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar

from forerun.serve.answers.contract import News
from forerun.serve.answers.service import Served, Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.embedding import MAX_INPUTS, EmbeddingRequest
from forerun.serve.bodies.fields import (
    Unused,
    accept,
    boolean,
    integer,
    mapping,
    one_or_more,
    plain_text,
    read,
)
from forerun.serve.bodies.schema import MAX_TOKENS, RequestBody
from forerun.serve.dialects.ollama.answers import NANO
from forerun.serve.dialects.ollama.schema import alive
from forerun.serve.dialects.openai.embeddings import EmbeddingDialect


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedBody(RequestBody):
    """POST /api/embed. truncate: inputs longer than the context are cut at the end."""

    input: tuple[str, ...] = accept(one_or_more(plain_text, MAX_INPUTS), ())
    truncate: bool = accept(boolean, True)
    dimensions: int | None = accept(integer(1, MAX_TOKENS))
    unused: ClassVar[dict[str, Unused]] = {
        "options": Unused(mapping),
        "keep_alive": Unused(alive),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OldEmbedBody(RequestBody):
    """POST /api/embeddings, which /api/embed replaces."""

    prompt: str = accept(plain_text, "")
    unused: ClassVar[dict[str, Unused]] = {
        "options": Unused(mapping),
        "keep_alive": Unused(alive),
    }


class OllamaEmbed(EmbeddingDialect):
    """POST /api/embed: a vector per input. 501 says why this model makes none."""

    def _read(
        self, value: Any, service: Service
    ) -> tuple[EmbeddingRequest, Served, tuple[str, ...]]:
        body = read(EmbedBody, value)
        served = service.named(body.model)
        inputs = () if body.input == ("",) else body.input
        limit = served.loaded.context if body.truncate else None
        request = EmbeddingRequest(inputs, "input", body.dimensions, most=limit, keep_first=True)
        return request, served, tuple(body.ignored)

    def _empty(self) -> dict[str, Any]:
        return {"model": self._served.name, "embeddings": []}

    def full_response(self, choices: News, tally: Tally) -> dict[str, Any]:
        """Implement Dialect.full_response: the vectors, with counts and times."""
        return {
            "model": self._served.name,
            "embeddings": [vector.tolist() for vector in self._vectors(choices)],
            "total_duration": int((monotonic() - tally.began) * NANO),
            "load_duration": 0,
            "prompt_eval_count": tally.prompt_tokens,
        }


class OllamaOldEmbed(OllamaEmbed):
    """POST /api/embeddings: the vector of one prompt. 501 as /api/embed."""

    def _read(
        self, value: Any, service: Service
    ) -> tuple[EmbeddingRequest, Served, tuple[str, ...]]:
        body = read(OldEmbedBody, value)
        served = service.named(body.model)
        inputs, limit = (body.prompt,) if body.prompt else (), served.loaded.context
        # The length of these vectors is the model's own, as Ollama leaves it.
        request = EmbeddingRequest(inputs, "prompt", normalize=False, most=limit, keep_first=True)
        return request, served, tuple(body.ignored)

    def _empty(self) -> dict[str, Any]:
        return {"embedding": []}

    def full_response(self, choices: News, tally: Tally) -> dict[str, Any]:
        """Implement Dialect.full_response: the vector of the one prompt."""
        (vector,) = self._vectors(choices)
        return {"embedding": vector.tolist()}
