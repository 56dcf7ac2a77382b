"""Calibrates a draft model's confidence in its best token by counting outcomes.

A confidence head learns the acceptance of rejection sampling at temperature 1, given that all
tokens before were accepted. Here a draft token is accepted if it is the target's choice. At
temperature 0 that has another probability, which the confidence only orders. So outcomes are
counted by tenths of confidence, by depth, and separately for greedy and sampled texts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.control.constants import DECAY, PRIOR
from forerun.types import Floats

TENTHS = 10
_ALL_DEPTHS = -1
"""Key of the counts over all depths."""


@dataclass(slots=True)
class _Count:
    """Counts of best tokens tried below a right one, and of those that were right; decayed."""

    tried: float = 0.0
    right: float = 0.0

    def rate(self, believed: float) -> float:
        return (PRIOR * believed + self.right) / (PRIOR + self.tried)

    def line(self, start: float, slope: float) -> tuple[float, float]:
        """Return (a, b) such that a + b * c equals `rate(start + slope * c)`."""
        weight = PRIOR + self.tried
        return (PRIOR * start + self.right) / weight, PRIOR * slope / weight

    def learn(self, right: bool) -> None:
        self.tried = DECAY * self.tried + 1.0
        self.right = DECAY * self.right + right


class Confidence:
    """Estimates the probability that the best token of a node is right, if all above it are."""

    def __init__(self) -> None:
        self._counts: dict[tuple[bool, int, int], _Count] = {}

    def rate(self, sampled: bool, depth: int, confidence: float) -> float:
        """Return the calibrated probability. A depth (from 0) without observations uses those of
        all depths; without any, the result is `confidence` itself.
        """
        overall = self._count(sampled, _ALL_DEPTHS, confidence).rate(confidence)
        return self._count(sampled, depth, confidence).rate(overall)

    def learn(self, sampled: bool, depth: int, confidence: float, right: bool) -> None:
        """Count whether the best token at `depth` was right, of this confidence."""
        for each in (_ALL_DEPTHS, depth):
            self._count(sampled, each, confidence).learn(right)

    def chances(self, depths: int) -> Floats:
        """Return `rate` as a function of confidence: float32[2,2,depths,TENTHS], see
        OnDeviceDraftSpec.chances.
        """
        found = np.zeros((2, 2, depths, TENTHS), np.float32)
        found[1] = 1.0
        for (sampled, depth, tenth), each in self._counts.items():
            if depth == _ALL_DEPTHS:
                found[:, int(sampled), :, tenth] = np.array(each.line(0.0, 1.0))[:, None]
        for (sampled, depth, tenth), each in self._counts.items():
            if 0 <= depth < depths:
                place = slice(None), int(sampled), depth, tenth
                found[place] = each.line(*found[place].tolist())
        return found

    def _count(self, sampled: bool, depth: int, confidence: float) -> _Count:
        tenth = min(int(confidence * TENTHS), TENTHS - 1)
        return self._counts.setdefault((sampled, depth, tenth), _Count())

    def describe(self) -> dict[str, Any]:
        """Return, for /server_info, how often tokens of each tenth of confidence were right. From
        any thread.
        """
        counts = self._counts.copy().items()
        overall = {key: each for key, each in counts if key[1] == _ALL_DEPTHS and each.tried}
        return {
            f"{'sampled' if sampled else 'greedy'}, confidence {tenth / TENTHS:.1f}": round(
                each.right / each.tried, 3
            )
            for (sampled, _, tenth), each in sorted(overall.items())
        }


def scaled(log_probs: Floats, best: float) -> list[float]:
    """Return probabilities of candidates with float32[k] log_probs, best first: `best` for the
    first, the others in their ratios to it. If they would sum to more than 1, all are scaled down
    to 1.
    """
    if not len(log_probs):
        return []
    ratios = [float(each) for each in np.exp(log_probs - log_probs[0])]
    share = min(best, 1.0 / sum(ratios))
    return [share * ratio for ratio in ratios]
