"""The interface between a family of clients and the core: four functions; nothing else knows its
format.
"""

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

    generation  what it asks of the engine
    served      the model that it names
    ignored     fields of it that change nothing
    """

    generation: Generation
    served: Served
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """An answer that needs no engine: its JSON, and fields of the body that change nothing."""

    body: Any
    ignored: tuple[str, ...] = ()


REPORT, STEP = 40, 400
"""Bytes of one log-probability in an answer, and of one step of a trace."""

News = Sequence[tuple[int, Delta]]
"""(index of the choice, what is new of it)."""


class Dialect(ABC):
    """The request and answer format of one route. An object belongs to one request: `parse` reads
    its body, the others write its answer and may count along it.

    media_type  of an answer in pieces
    """

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    _served: Served

    @abstractmethod
    def parse(self, value: Any, service: Service) -> ParsedRequest | Ready:
        """Check the JSON of a body. May run on any thread.

        Raises RequestError naming the field, ApiError.
        """

    def stored(self, value: Any) -> int:
        """Count the bytes that `parse` reads beside a body, of which this is the JSON."""
        return 0

    @staticmethod
    def size(news: News) -> int:
        """Estimate the bytes of an answer with this news."""
        size = 0
        for _, delta in news:
            reported = len(delta.logprobs) + len(delta.prompt_logprobs)
            first = (delta.logprobs or delta.prompt_logprobs)[:1]
            size += len(delta.text) + reported * sum(REPORT * (1 + len(one.top)) for one in first)
            size += STEP * len(delta.trace)
        return size

    def ping(self) -> bytes:
        """Return what is written after a silence, so that proxies and clients keep the connection
        open.
        """
        return b": ping\n\n"

    @abstractmethod
    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """Encode some news, maybe none, as bytes of a stream; with `last`, nothing runs any more.
        May run on any thread, as `whole` may.
        """

    @abstractmethod
    def whole(self, choices: News, tally: Tally) -> Any:
        """Return the JSON of an answer in one piece; a choice's delta is all there is of it."""

    @abstractmethod
    def end(self, error: ApiError | None) -> bytes:
        """Encode the last bytes of a stream: after all news, or where an error ended it."""
