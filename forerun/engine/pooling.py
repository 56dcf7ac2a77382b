"""Embeddings: the hidden states of a prompt, pooled to one vector as chunks of it run."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forerun.interface.plan import Plan, Round
from forerun.types import Floats

POOLINGS = ("last", "mean")
"""Names of a request's pooling: the last token's hidden state, or the mean of all."""


class PooledPrompt:
    """The pooled hidden state of a prompt, as far as it has run.

    Sums are float64 in the order of positions, so that the bits do not depend on the chunks.

    kind    one of POOLINGS
    length  of the prompt, in tokens
    """

    def __init__(self, kind: str, length: int) -> None:
        self._kind, self._length = kind, length
        # Positions in the sum, which a preempted sequence runs again.
        self._summed = 0
        self._sum: NDArray[np.float64] = np.zeros(0)

    @property
    def every(self) -> bool:
        """Whether every token has to run for it, also those that are in the prefix cache."""
        return self._kind == "mean"

    def wanted(self, begin: int, count: int) -> int:
        """Return of how many of the last of `count` tokens from position `begin` on, which a step
        runs, it needs hidden states.
        """
        end = begin + count
        if self.every:
            return max(end - max(begin, self._summed), 0)
        return int(end == self._length)

    def takes(self, round: Round, row: int) -> bool:
        """Add the hidden states of a finished round's row. Returns whether the prompt has run."""
        plan = round.plan
        assert plan.hidden is not None and round.hidden is not None
        end = int(plan.hidden[: row + 1].sum())
        self.add(round.hidden[end - int(plan.hidden[row]) : end])
        return int(plan.kv_len[row]) + plan.known_counts[row] == self._length

    def add(self, states: Floats) -> None:
        """Add float32[n,H], hidden states of as many tokens of a step as were wanted."""
        if not len(states):
            return
        before = self._sum[None] if self._summed else np.zeros((1, states.shape[1]))
        self._sum = np.add.reduce(np.concatenate([before, states.astype(np.float64)]), axis=0)
        self._summed += len(states)

    def vector(self) -> Floats:
        """Return float32[H], the pooled state, once the prompt has run."""
        vector: Floats = (self._sum / self._summed).astype(np.float32)
        return vector


def with_hidden(plan: Plan, pooled: list[PooledPrompt | None]) -> Plan:
    """Return the plan of a step whose rows may have prompts to pool: these sample nothing."""
    rows = zip(pooled, plan.kv_len.tolist(), plan.known_counts, strict=True)
    hidden = [one.wanted(begin, count) if one else 0 for one, begin, count in rows]
    samples = plan.samples & np.array([one is None for one in pooled])
    return replace(plan, samples=samples, hidden=np.array(hidden, np.int32))
