"""How many of the tokens that a grammar and a drafter expect are worth a node."""

from functools import lru_cache

import numpy as np

from forerun.control.cost_model import StepCosts

MIN_PROB = 0.1
"""Probability of its whole path below which no draft token is worth a look, however cheap a node
is."""
LIKELY = 0.35
"""The same where nobody knows what a node costs."""
DECAY = 0.98
"""What is left of a row's weight in the estimate of speed after the next row."""
START = (20.0, 36.0)
"""The estimate before the first row: plain steps paid, tokens brought. Schemas bring as much."""


class GrammarBudget:
    """Divides a step's draft tokens among constrained rows.

    A draft token is made where it is likelier than what its time would bring elsewhere: added
    milliseconds times the speed that constrained rows reach on average. (Of a ratio of means,
    tokens over time, that is the maximum; the fastest mixture of steps is not made of steps that
    are each as fast as they can be. Dinkelbach 1967.) Speed is told in tokens per plain step of
    as many rows, so that it means the same for one row and for many.

    costs  what steps cost on this machine; None = a node costs next to nothing
    """

    def __init__(self, costs: StepCosts | None) -> None:
        self._costs = costs
        self._paid, self._brought = START
        self._price = 1.0

    def min_prob(self, rows: int) -> float:
        """How likely a token must be to be worth looking for in a step of so many rows."""
        return least_chance(self._costs, rows)

    def of(self, rows: int, others: int, scores: list[list[float]]) -> list[int]:
        """How many of each row's draft tokens to make, given the probability of each one's path,
        best first.

        rows    of the step, those without a grammar included
        others  draft tokens of the rows that are not asked about
        """
        if self._costs is None:
            return [len(row) for row in scores]
        ranked = sorted(
            ((score, row) for row, found in enumerate(scores) for score in found), reverse=True
        )
        step_ms = self._costs.verify(np.arange(rows + others, rows + others + len(ranked) + 1))
        token_ms = self._paid / self._brought * float(self._costs.verify(np.array(rows))) / rows
        best, most, tokens = 0, 0.0, 0.0
        for number, (score, _) in enumerate(ranked, 1):
            tokens += score
            won = tokens - float(step_ms[number] - step_ms[0]) / token_ms
            if won > most:
                best, most = number, won
        chosen = [0] * len(scores)
        for _, row in ranked[:best]:
            chosen[row] += 1
        return chosen

    def made(self, rows: int, draft_tokens: int) -> None:
        """The coming step makes so many draft tokens, over all rows."""
        if self._costs is not None:
            plain, step = self._costs.verify(np.array([rows, rows + draft_tokens])).tolist()
            self._price = step / plain

    def brought(self, tokens: int) -> None:
        """That step brought a constrained row so many tokens."""
        self._paid = DECAY * self._paid + self._price
        self._brought = DECAY * self._brought + tokens


@lru_cache(maxsize=1024)
def least_chance(costs: StepCosts | None, rows: int) -> float:
    """How likely a token must be to be worth a node, with two more for each of `rows` rows."""
    if costs is None or rows == 0:
        return LIKELY
    step, larger = costs.verify(np.array([rows, 3 * rows]))
    return min(1.0, max(MIN_PROB, float(larger / step - 1.0) / 2.0))
