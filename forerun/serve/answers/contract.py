"""The interface between a family of clients and the core: five functions; nothing else knows its
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
class Ready:
    """An answer that needs no engine: its JSON."""

    body: Any


REPORT, STEP = 40, 400
"""Bytes of one log-probability in an answer, and of one step of a trace."""

News = Sequence[tuple[int, Delta]]
"""(index of the choice, what is new of it)."""


class Dialect(ABC):
    """The request and answer format of one route. An object belongs to one request and may count
    along it.

    media_type  of an answer in pieces
    ping        written after a silence, so that proxies keep the connection open
    served      the request, set by `parse`
    ignored     fields of the request that change nothing, set by `parse`
    unenforced  keywords of its schemas that are not enforced, set before the first answer
    lossy       the accept thresholds, if they may change the answer, set by `parse`
    """

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    ping: ClassVar[bytes] = b": ping\n\n"
    served: Served

    def __init__(self) -> None:
        self.ignored: tuple[str, ...] = ()
        self.unenforced: tuple[str, ...] = ()
        self.lossy: dict[str, float] | None = None

    @abstractmethod
    def parse(self, value: Any, service: Service) -> Generation | Ready:
        """Return the generation for the JSON of a body, and set `served` and `ignored`. May run on
        any thread.

        Raises RequestError naming the field, ApiError.
        """

    @staticmethod
    def size(news: News) -> int:
        """Bytes of an answer with this news, about."""
        size = 0
        for _, delta in news:
            reported = len(delta.logprobs) + len(delta.prompt_logprobs)
            first = (delta.logprobs or delta.prompt_logprobs)[:1]
            size += len(delta.text) + reported * sum(REPORT * (1 + len(one.top)) for one in first)
            size += STEP * len(delta.trace)
        return size

    @abstractmethod
    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """The bytes of a stream for some news, maybe none; with `last`, nothing runs any more. May
        run on any thread, as `whole` may.
        """

    @abstractmethod
    def whole(self, choices: News, tally: Tally) -> Any:
        """The JSON of an answer in one piece; a choice's delta is all there is of it."""

    @abstractmethod
    def end(self, error: ApiError | None) -> bytes:
        """The last that a stream says: after all news, or where an error ended it."""

    @staticmethod
    @abstractmethod
    def error(error: ApiError) -> Any:
        """The JSON of an answer that is an error, in the dialect's words."""
