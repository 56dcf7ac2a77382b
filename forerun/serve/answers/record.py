"""The record of one request for log and traces, which never contains a prompt or an answer."""

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from urllib.parse import quote

from forerun.serve.answers.session import GenerationSession

CLIENT_GONE = 499
"""Status that is logged if the client has disconnected, as in nginx."""

IGNORED = b"x-forerun-ignored"
"""Header with the names of request fields that had no effect."""

UNENFORCED = b"x-forerun-unenforced"
"""Header with the schema keywords that are not enforced."""

LOSSY = b"x-forerun-lossy"
"""Header with the accept thresholds, if the answer may differ from plain decoding's."""

LONGEST = 1000
"""Most bytes of names in such a header: proxies accept a few kilobytes for all headers. The
answer's body has all names.
"""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
"""A traceparent header: version, trace, span, flags (W3C Trace Context)."""


@dataclass(slots=True)
class RequestRecord:
    """The facts known about one request so far.

    route       its path with names in place of ids; None if there is no such route
    model       name of the model that answers it
    trace       the caller's trace id, if it sent a traceparent
    ignored     its fields that have no effect
    unenforced  keywords of its schemas that are not enforced
    lossy       its accept thresholds, if they may change the answer
    """

    id: str
    trace: str | None = None
    began: float = field(default_factory=monotonic)
    status: int | None = None
    note: str = ""
    route: str | None = None
    model: str | None = None
    session: GenerationSession | None = None
    ignored: tuple[str, ...] = ()
    unenforced: tuple[str, ...] = ()
    lossy: dict[str, float] | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "RequestRecord":
        """Return the record of a request that begins now. It has the client's own id, if that is
        safe to log.
        """
        given = headers.get("x-request-id", "")
        trace = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        return cls(given if _ID.fullmatch(given) else uuid.uuid4().hex, trace and trace[1])

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return (name, value) of the response headers that report what was ignored, not enforced,
        or may be lossy.
        """
        found = [(IGNORED, _names(self.ignored, "%[]$:() "))] if self.ignored else []
        if self.unenforced:
            found.append((UNENFORCED, _names(self.unenforced, "[]$:")))
        if self.lossy:
            found.append((LOSSY, ", ".join(f"{k}={v:g}" for k, v in self.lossy.items())))
        return [(name, value.encode()) for name, value in found]

    def answered(self) -> int:
        """Return the status that was sent; CLIENT_GONE if none was."""
        return self.status or CLIENT_GONE

    def first_seconds(self) -> float | None:
        """Return the seconds from the request to its first token; None before that."""
        first = self.session.tally.first if self.session is not None else None
        return None if first is None else first - self.began

    def fields(self) -> dict[str, Any]:
        """Return the record by short names: id, trace, times in milliseconds, and for generations
        tokens and acceptance length.
        """
        found: dict[str, Any] = {"id": self.id}
        if self.trace is not None:
            found["trace"] = self.trace
        found["ms"] = round((monotonic() - self.began) * 1000)
        if self.session is not None:
            tally, first = self.session.tally, self.first_seconds()
            found |= {
                "in": tally.prompt_tokens,
                "cached": tally.cached_tokens,
                "out": tally.output_tokens,
            }
            if first is not None:
                found["ttft_ms"] = round(first * 1000)
            steps = sum(stats.steps for stats in tally.stats)
            if steps:
                accepted = sum(stats.accepted for stats in tally.stats)
                found["accept"] = round(1 + accepted / steps, 2)
        return found

    def line(self, method: str, path: str, fields: Mapping[str, Any]) -> str:
        """Return the record as one log line: method, path, status and `fields`."""
        parts = [f"{method} {quote(path)[:200]} {self.answered()}"]
        for name, value in fields.items():
            parts.append(f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}")
        return " ".join(parts) + (f" ({self.note})" if self.note else "")


def _names(paths: Sequence[str], safe: str) -> str:
    """Join paths for a header, percent-quoted except for the characters `safe`: as many as fit, and
    the number of the rest.
    """
    found, room = list[str](), LONGEST
    for path in paths:
        found.append(quote(path, safe=safe, errors="replace"))
        room -= len(found[-1]) + 2
        if room < 0:
            found[-1] = f"{len(paths) - len(found) + 1} more"
            break
    return ", ".join(found)
