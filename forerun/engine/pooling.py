"""Embeddings: pools the hidden states of a prompt to one vector while its chunks run."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forerun.interface.plan import Plan, Round
from forerun.types import Floats

POOLINGS = ("last", "mean")
"""Names of a request's pooling: the last token's hidden state, or the mean of all."""


class PooledPrompt:
    """The pooled hidden state of the part of a prompt that has run.

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
        """Whether every token must run, also those in the prefix cache."""
        return self._kind == "mean"

    def wanted(self, begin: int, count: int) -> int:
        """Return the number of last tokens whose hidden states are needed, of a chunk of `count`
        tokens from position `begin` on.
        """
        end = begin + count
        if self.every:
            return max(end - max(begin, self._summed), 0)
        return int(end == self._length)

    def takes(self, round: Round, row: int) -> bool:
        """Add the hidden states of one row of a finished round. Returns whether the prompt is
        complete.
        """
        plan = round.plan
        assert plan.hidden is not None and round.hidden is not None
        end = int(plan.hidden[: row + 1].sum())
        self.add(round.hidden[end - int(plan.hidden[row]) : end])
        return int(plan.kv_len[row]) + plan.known_counts[row] == self._length

    def add(self, states: Floats) -> None:
        """Add float32[n,H], the hidden states that `wanted` requested, of one chunk."""
        if not len(states):
            return
        before = self._sum[None] if self._summed else np.zeros((1, states.shape[1]))
        self._sum = np.add.reduce(np.concatenate([before, states.astype(np.float64)]), axis=0)
        self._summed += len(states)

    def vector(self) -> Floats:
        """Return float32[H], the pooled state. Call after the whole prompt has run."""
        vector: Floats = (self._sum / self._summed).astype(np.float32)
        return vector


def with_hidden(plan: Plan, pooled: list[PooledPrompt | None]) -> Plan:
    """Return the plan with `hidden` set for rows that pool their prompt; these rows sample nothing.

    pooled  one per row of the plan; None for a row that generates text
    """
    rows = zip(pooled, plan.kv_len.tolist(), plan.known_counts, strict=True)
    hidden = [one.wanted(begin, count) if one else 0 for one, begin, count in rows]
    samples = plan.samples & np.array([one is None for one in pooled])
    return replace(plan, samples=samples, hidden=np.array(hidden, np.int32))
