"""Messages between rank 0 and another rank, outside of the passes, over a connection (a socket). A
message is a line of JSON followed by its arrays.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from forerun.types import AnyArray


@dataclass(frozen=True, slots=True)
class RankMessage:
    """kind: type of the message; facts: JSON values; arrays: by name."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, AnyArray] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the message as bytes to send: a line of JSON, then the arrays' bytes."""
        parts = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        table = [[name, part.dtype.str, part.shape] for name, part in parts.items()]
        head = json.dumps([self.kind, self.facts, table]).encode() + b"\n"
        return head + b"".join(part.tobytes() for part in parts.values())

    @staticmethod
    def decoded(body: bytes) -> "RankMessage":
        """Return the message whose `encoded` was `body`; arrays are writable copies."""
        head, _, rest = body.partition(b"\n")
        kind, facts, table = json.loads(head)
        arrays, begin = {}, 0
        for name, dtype, shape in table:
            count = int(np.prod(shape))
            size = count * np.dtype(dtype).itemsize
            # A copy, because torch warns about read-only arrays.
            arrays[name] = np.frombuffer(rest[begin : begin + size], dtype).reshape(shape).copy()
            begin += size
        return RankMessage(kind, facts, arrays)


class Channel:
    """One end of a connection. Not thread-safe."""

    def __init__(self, end: Connection) -> None:
        self._end = end

    def send(self, message: RankMessage) -> None:
        """Send a message; blocks until the socket has accepted it. Raises OSError if the other end
        is closed.
        """
        self._end.send_bytes(message.encoded())

    def receive(self) -> RankMessage:
        """Return the next message. Raises EOFError if the other end is closed."""
        try:
            body = self._end.recv_bytes()
        except OSError as error:  # In the middle of a message.
            raise EOFError from error
        return RankMessage.decoded(body)

    def poll(self) -> RankMessage | None:
        """Return the next message, or None if none has begun to arrive. Raises EOFError if the
        other end is closed.
        """
        return self.receive() if self._end.poll() else None

    def close(self) -> None:
        """Close this end; the other one's `receive` raises EOFError. Idempotent."""
        self._end.close()
