"""Messages between rank 0 and another rank beside the passes, over a socket.

A message is eight bytes of length, a line of JSON, and arrays one after the other.
"""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.types import AnyArray

_LENGTH = 8


@dataclass(frozen=True, slots=True)
class RankMessage:
    """kind: what it is about; facts: JSON values; arrays: by name."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, AnyArray] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the message as bytes to send: int64 length of the rest, little endian, a line of
        JSON, then the arrays' bytes.
        """
        parts = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        table = [[name, part.dtype.str, part.shape] for name, part in parts.items()]
        head = json.dumps([self.kind, self.facts, table]).encode() + b"\n"
        body = head + b"".join(part.tobytes() for part in parts.values())
        return len(body).to_bytes(_LENGTH, "little") + body

    @staticmethod
    def decoded(body: bytes) -> "RankMessage":
        """Return the message whose `encoded` was `body` behind the length; arrays are writable
        copies.
        """
        head, _, rest = body.partition(b"\n")
        kind, facts, table = json.loads(head)
        arrays, begin = {}, 0
        for name, dtype, shape in table:
            count = int(np.prod(shape))
            size = count * np.dtype(dtype).itemsize
            # A copy: torch warns of arrays that it may not write to.
            arrays[name] = np.frombuffer(rest[begin : begin + size], dtype).reshape(shape).copy()
            begin += size
        return RankMessage(kind, facts, arrays)


class Channel:
    """One end of a socket. Not locked."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._heard = b""

    def send(self, message: RankMessage) -> None:
        """Send a message, and wait until the socket has taken it. Raises OSError if the other
        end is gone.
        """
        self._end.sendall(message.encoded())

    def receive(self) -> RankMessage:
        """Return the next message. Raises EOFError if the other end is gone."""
        while True:
            message = self._whole()
            if message is not None:
                return message
            self._more()

    def poll(self) -> RankMessage | None:
        """Return the next message, or None if no whole one has arrived. Never waits; does not
        report that the other end has closed.
        """
        self._end.setblocking(False)
        try:
            while True:
                self._more()
        except (BlockingIOError, EOFError, OSError):
            pass
        finally:
            self._end.setblocking(True)
        return self._whole()

    def close(self) -> None:
        """Close this end; the other one's `receive` raises EOFError. Idempotent."""
        self._end.close()

    def _more(self) -> None:
        found = self._end.recv(1 << 16)
        if not found:
            raise EOFError
        self._heard += found

    def _whole(self) -> RankMessage | None:
        length = int.from_bytes(self._heard[:_LENGTH], "little") + _LENGTH
        if len(self._heard) < max(length, _LENGTH + 1):
            return None
        body, self._heard = self._heard[_LENGTH:length], self._heard[length:]
        return RankMessage.decoded(body)
