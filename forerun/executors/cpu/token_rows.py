"""Per-layer vectors of tokens (layer_spec.LayerSpec.token_vector), read from the file."""

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.mapped import Packed
from forerun.networks.arch import PER_LAYER_ROWS
from forerun.types import Floats, Ints


class TokenRows:
    """A table of per-layer token vectors that stays in its mapped file: it is most of a small Gemma
    4, and a step reads one row for each token.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        name = f"{PER_LAYER_ROWS}.weight"
        self._tokens = checkpoint.architecture.vocab
        self._stored: Packed | None = checkpoint.packed(name)
        self._whole = checkpoint.tensor(name) if self._stored is None else None
        self._held = np.empty(0, np.float32)

    def address(self, tokens: Ints) -> int:
        """Return the address of `of(tokens)`, which stays valid until the next call."""
        self._held = self.of(tokens)
        return self._held.ctypes.data

    def of(self, tokens: Ints) -> Floats:
        """Return float32[M,L*D], the rows of int32[M] tokens. A token outside the vocabulary gets
        an arbitrary row: the core rejects its step.
        """
        tokens = tokens.clip(0, self._tokens - 1)
        if self._stored is None:
            assert self._whole is not None
            rows = self._whole[tokens]
        else:
            packed_rows = np.ascontiguousarray(self._stored.rows[tokens])
            rows = Packed(self._stored.kind, packed_rows, self._stored.columns).floats()
        return np.ascontiguousarray(rows, np.float32)
