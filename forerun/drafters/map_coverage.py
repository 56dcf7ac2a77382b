"""Measures how many of the target's tokens a draft model with a reduced vocabulary cannot
propose.
"""

import logging

import numpy as np

from forerun.interface.plan import Outcome
from forerun.types import Ints

log = logging.getLogger("forerun.drafters")

ENOUGH, MUCH = 1_000, 0.2
"""Emitted tokens, and the share of them outside the vocabulary, from which one warning is
logged.
"""


class MapCoverage:
    """Counts emitted tokens of steps that draft on the host, and those outside the draft
    vocabulary.

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
        """Count the tokens that a step emitted. Logs one warning if too many are outside the
        vocabulary.
        """
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
        """Return `size` of the draft vocabulary, and `left_out`, the share of emitted tokens
        outside it (0 before the first). Acceptance is lower by at most this share.
        """
        share = self._left_out / self._emitted if self._emitted else 0.0
        return {"size": self._size, "left_out": round(share, 4)}
