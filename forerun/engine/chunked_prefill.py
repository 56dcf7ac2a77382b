"""Chunked prefill: decides how many prompt tokens run in a step, and of which prompts."""

from collections.abc import Sequence as Several

from forerun.engine.sequence import Sequence

STEP_MS = 250.0
"""Longest step with decoding rows, in milliseconds: the gap that a prompt causes in their streams.
(A stream beside a prompt on two cores of a Xeon, medians of three. Default model, 3,000 tokens: the
longest gap is .13, .30, .67 s with 100, 250 and 500, the prompt's first token comes after 5.8, 5.7
and 5.1 s; without a bound 1.33 and 5.9. Gemma 3 270M, 2,000 tokens: .13, .34, .69 and 5.0, 4.0, 3.5
s.)
"""
ALONE_MS = 1000.0
"""Longest step without decoding rows, in milliseconds: a new short prompt, an abort and a shutdown
have to wait for a step, and after 15,000 tokens 512 took eight seconds. (Qwen2.5 Coder 0.5B, two
busy cores, processor seconds of some 3,000 tokens, two runs: 21.7 and 19.9 without a bound, 19.4
and 19.1 with 1000, 20.1 and 21.1 with 500, 19.9 and 21.1 with 250.)
"""
LEAST = 32
"""Fewest prompt tokens of a step; larger numbers are multiples of it. (16, 32 and 64 do not
differ.)
"""

HALF_LIFE = 8192
"""Prompt tokens, of all clients, after which a client's past use counts half."""


class PromptPace:
    """Bounds the prompt tokens of a step by its time. With decoding rows the bound is STEP_MS, or
    twice a step without a prompt if that is more; without them ALONE_MS, or five times that step.

    Updated by every step, so it follows the machine, the batch and the length of texts.

    decoding_ms    recent time of a step without a prompt, milliseconds
    tokens_per_ms  recent prompt tokens per millisecond; 0 before the first
    """

    def __init__(self) -> None:
        self.decoding_ms = self.tokens_per_ms = 0.0

    def bound(self, room: int, alone: bool) -> int:
        """Return the most prompt tokens for a step, at most `room`. alone: the step has no decoding
        rows.
        """
        most, share = (ALONE_MS, 4.0) if alone else (STEP_MS, 1.0)
        ms = max(most - self.decoding_ms, share * self.decoding_ms)
        return (
            min(max(int(self.tokens_per_ms * ms) // LEAST, 1) * LEAST, room)
            if self.tokens_per_ms
            else room
        )

    def observe(self, prompt_tokens: int, ms: float) -> None:
        """Update the rate with a step that ran `prompt_tokens` and took `ms` milliseconds.

        A step that was slow for another reason, such as one that compiles, counts half at most.
        """
        if prompt_tokens >= LEAST or not self.tokens_per_ms:
            rate = prompt_tokens / max(ms - self.decoding_ms, ms / 4.0, 1e-3)
            self.tokens_per_ms = (rate + (self.tokens_per_ms or rate)) / 2.0


class PromptShares:
    """Divides a step's prompt tokens: one half by cost, the other by arrival.

    The cost of a prompt is its remaining tokens plus its client's recent prompt tokens. So a short
    prompt does not wait for long ones, clients share the first half evenly, and the second half
    always advances the oldest prompt.
    """

    def __init__(self) -> None:
        self._read = 0.0
        # By client: its decayed prompt tokens, and the value of `_read` at that time.
        self._used: dict[str, tuple[float, float]] = {}

    def cost(self, sequence: Sequence) -> float:
        """Return the cost of a sequence's prompt, in tokens."""
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
