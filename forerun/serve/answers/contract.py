"""The interface between a dialect and the server: only the dialect depends on its format."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.engine.request import Delta
from forerun.serve.answers.service import Served, Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.prepare import Generation
from forerun.serve.http.errors import ApiError


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked body.

    generation  the engine requests for it
    served      the model that it names
    ignored     its fields that have no effect
    """

    generation: Generation
    served: Served
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """An answer that needs no engine: its JSON, and fields of the body that have no effect."""

    body: Any
    ignored: tuple[str, ...] = ()


REPORT, STEP = 40, 400
"""Bytes of one log-probability in an answer, and of one step of a trace."""

News = Sequence[tuple[int, Delta]]
"""(index of the choice, its new delta) pairs."""


class Dialect(ABC):
    """The request and answer format of one route. An object belongs to one request: `parse` reads
    its body, the other methods write its answer and may keep counts.

    media_type  of a streamed answer
    """

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    _served: Served

    @abstractmethod
    def parse(self, value: Any, service: Service) -> ParsedRequest | Ready:
        """Check the JSON of a body. May run on any thread.

        Raises RequestError naming the field, ApiError.
        """

    def stored(self, value: Any) -> int:
        """Return the bytes of stored answers that `parse` reads in addition to the body, whose JSON
        is `value`.
        """
        return 0

    @staticmethod
    def size(news: News) -> int:
        """Estimate the bytes of an answer with these deltas."""
        size = 0
        for _, delta in news:
            size += len(delta.text) + STEP * len(delta.trace)
            if logprobs := delta.logprobs or delta.prompt_logprobs:
                reported = len(delta.logprobs) + len(delta.prompt_logprobs)
                size += reported * REPORT * (1 + len(logprobs[0].top))
        return size

    def ping(self) -> bytes:
        """Return the bytes written after a silence, so that proxies and clients keep the connection
        open.
        """
        return b": ping\n\n"

    @abstractmethod
    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """Encode deltas, possibly none, as bytes of a stream; with `last`, no choice runs any more.
        May run on any thread, as may `full_response`.
        """

    @abstractmethod
    def full_response(self, choices: News, tally: Tally) -> Any:
        """Return the JSON of an answer in one piece, from one merged delta per choice."""

    @abstractmethod
    def end(self, error: ApiError | None) -> bytes:
        """Return the last bytes of a stream, after all deltas or after an error."""
