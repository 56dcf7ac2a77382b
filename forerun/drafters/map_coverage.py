"""How much of what the target writes a draft model can propose at all, of a part of its tokens."""

import logging

import numpy as np

from forerun.interface.plan import Outcome
from forerun.types import Ints

log = logging.getLogger("forerun.drafters")

ENOUGH, MUCH = 1_000, 0.2
"""Emitted tokens after which a share of left out ones is logged once, and that share."""


class MapCoverage:
    """Counts tokens of steps behind which the host drafts, and those that a draft vocabulary lacks.

    target_ids  int32[Vd] ascending: the draft vocabulary
    vocab       V of the target
    """

    def __init__(self, target_ids: Ints, vocab: int) -> None:
        held = np.zeros(vocab, np.bool_)
        held[target_ids] = True
        self._held, self._size = held.tobytes(), len(target_ids)
        self._emitted = self._left_out = 0
        self._warned = False

    def count(self, outcome: Outcome) -> None:
        """Count the tokens that a step emitted. Logs a warning once if many are left out."""
        # As lists: NumPy's calls, cold after a forward pass, take longer.
        tokens = [token for emitted in outcome.output_tokens for token in emitted]
        self._emitted += len(tokens)
        self._left_out += len(tokens) - sum(map(self._held.__getitem__, tokens))
        if not self._warned and self._emitted >= ENOUGH and self._left_out > MUCH * self._emitted:
            self._warn()

    def _warn(self) -> None:
        self._warned = True
        log.warning(
            "%d of %d tokens written are outside the draft's vocabulary of %d, and cost it "
            "acceptance: give a map of your own texts (`forerun train --token-map`), or "
            "--speculative-token-map none if the draft takes one",
            self._left_out,
            self._emitted,
            self._size,
        )

    def describe(self) -> dict[str, float]:
        """Return the draft vocabulary's size and the share of emitted tokens that it leaves out, by
        which acceptance is lower at most: 0 before the first.
        """
        share = self._left_out / self._emitted if self._emitted else 0.0
        return {"size": self._size, "left_out": round(share, 4)}
