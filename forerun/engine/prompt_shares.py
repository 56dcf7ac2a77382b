"""Divides a step's prompt tokens among prompts that do not all fit into it."""

from collections.abc import Sequence as Several

from forerun.engine.sequence import Sequence

HALF_LIFE = 8192
"""Prompt tokens, of all clients, after which half of a client's past use no longer counts."""


class PromptShares:
    """Divides a step's prompt tokens: one half by cost, the other by arrival.

    The cost of a prompt is its remaining tokens plus its client's recent prompt tokens. So a short
    prompt waits for no long one, clients share the first half evenly, and the oldest prompt always
    advances by the other.
    """

    def __init__(self) -> None:
        self._read = 0.0
        # By client: its decayed prompt tokens, and the value of `_read` at that time.
        self._used: dict[str, tuple[float, float]] = {}

    def cost(self, sequence: Sequence) -> float:
        """Return the cost of a sequence's prompt, tokens."""
        return sequence.pending + self._used_by(sequence.request.client)

    def divide(self, sequences: Several[Sequence], room: int) -> list[int]:
        """Return how many tokens of each prompt run in a step that has room for `room` of them.

        sequences  in order of arrival
        """
        pending = [sequence.pending for sequence in sequences]
        chunks = [0] * len(pending)
        if sum(pending) <= room:
            chunks = pending
        else:
            by_cost = sorted(range(len(pending)), key=lambda row: self.cost(sequences[row]))
            _fill(chunks, pending, by_cost, room // 2)
            _fill(chunks, pending, range(len(pending)), room - sum(chunks))
        for sequence, chunk in zip(sequences, chunks, strict=True):
            self._count(sequence.request.client, chunk)
        return chunks

    def _used_by(self, client: str) -> float:
        used, when = self._used.get(client, (0.0, 0.0))
        return float(used * 0.5 ** ((self._read - when) / HALF_LIFE))

    def _count(self, client: str, tokens: int) -> None:
        self._used[client] = self._used_by(client) + tokens, self._read + tokens
        self._read += tokens
        if len(self._used) > 1024:
            self._used = {
                client: used for client, used in self._used.items() if self._used_by(client) >= 1
            }


def _fill(chunks: list[int], pending: list[int], order: Several[int], room: int) -> None:
    """Raise chunks[row] up to pending[row], row after row in `order`, by `room` tokens in all."""
    for row in order:
        more = min(pending[row] - chunks[row], room)
        chunks[row] += more
        room -= more
