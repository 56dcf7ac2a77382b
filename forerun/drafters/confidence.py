"""Calibrates a draft's confidence in its best token by counted outcomes.

A confidence head learns the acceptance of rejection sampling at temperature 1, given that all
before it was accepted. Here a draft token is accepted if it is the target's choice: at temperature
0 that is another chance, of which the confidence is only an ordering. So outcomes are counted by
tenths of confidence, by depth, and apart for greedy and sampled texts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.control.constants import DECAY, PRIOR
from forerun.types import Floats

TENTHS = 10
_WHOLE = -1
"""The depth that stands for all."""


@dataclass(slots=True)
class _Count:
    """Times that a best token was tried below a right one, and right; decayed."""

    tried: float = 0.0
    right: float = 0.0

    def rate(self, believed: float) -> float:
        return (PRIOR * believed + self.right) / (PRIOR + self.tried)

    def line(self, start: float, slope: float) -> tuple[float, float]:
        """Return `rate` of a belief of start + slope * c, in the same form."""
        weight = PRIOR + self.tried
        return (PRIOR * start + self.right) / weight, PRIOR * slope / weight

    def learn(self, right: bool) -> None:
        self.tried = DECAY * self.tried + 1.0
        self.right = DECAY * self.right + right


class Confidence:
    """Chances that the best token of a node is right, if all above it are."""

    def __init__(self) -> None:
        self._counts: dict[tuple[bool, int, int], _Count] = {}

    def rate(self, sampled: bool, depth: int, confidence: float) -> float:
        """Return the calibrated chance. Without observations at a depth (from 0) it is that of all
        depths, without any the confidence itself.
        """
        whole = self._count(sampled, _WHOLE, confidence).rate(confidence)
        return self._count(sampled, depth, confidence).rate(whole)

    def learn(self, sampled: bool, depth: int, confidence: float, right: bool) -> None:
        """Count one outcome."""
        for each in (_WHOLE, depth):
            self._count(sampled, each, confidence).learn(right)

    def chances(self, depths: int) -> Floats:
        """Return `rate` of every confidence, as OnDeviceDraftSpec.chances, at depths below
        `depths`.
        """
        found = np.zeros((2, 2, depths, TENTHS), np.float32)
        found[1] = 1.0
        for (sampled, depth, tenth), each in self._counts.items():
            if depth == _WHOLE:
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
        whole = {key: each for key, each in counts if key[1] == _WHOLE and each.tried}
        return {
            f"{'sampled' if sampled else 'greedy'}, confidence {tenth / TENTHS:.1f}": round(
                each.right / each.tried, 3
            )
            for (sampled, _, tenth), each in sorted(whole.items())
        }


def scaled(log_probs: Floats, best: float) -> list[float]:
    """Return probabilities of candidates, best first, of which the best has the chance `best` and
    the others keep their ratios to it, as far as they are no more than 1 together.
    """
    if not len(log_probs):
        return []
    ratios = [float(each) for each in np.exp(log_probs - log_probs[0])]
    share = min(best, 1.0 / sum(ratios))
    return [share * ratio for ratio in ratios]
