"""A whole, smaller model that drafts, and the map between its tokens and the target's.

Two vocabularies are matched token by token ("token-level intersection", Timor et al., arXiv
2502.05202, algorithm 4): tokens that only one of them has are never proposed, and a target token
that the draft lacks is replaced by one of its own in the draft's context. This limits what can be
proposed, at every temperature; which draft tokens are accepted is still the target's own choice.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.errors import ModelError
from forerun.networks.cache_layer import CacheLayer
from forerun.types import Ints


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMap:
    """A draft model's ids for the target's tokens, and the tokens it may propose.

    inputs      int32[V]   its own id for every target id
    own_ids     int32[Vd]  its own ids that it may propose
    target_ids  int32[Vd]  the target's ids of the same tokens, ascending
    shared      tokens that both vocabularies have; Vd is smaller if a token map limits it
    """

    inputs: Ints
    own_ids: Ints
    target_ids: Ints
    shared: int

    def limited(self, token_map: Ints) -> "VocabularyMap":
        """Return the map with only the target ids `token_map` int32[n] (FR-Spec). Raises ModelError
        if none is left.
        """
        inside = np.isin(self.target_ids, token_map)
        if not inside.any():
            raise ModelError("the token map names no token that the draft model has")
        return VocabularyMap(
            self.inputs, self.own_ids[inside], self.target_ids[inside], self.shared
        )

    def every(self, own: int) -> bool:
        """Return whether all `own` ids of the draft may be proposed, so that its head needs no
        selection of rows.
        """
        return len(self.own_ids) == own and bool(np.all(self.own_ids == np.arange(own)))


def equal_vocabulary(target: int, own: int) -> VocabularyMap:
    """Return the map for a draft whose tokens have the target's ids, with vocabularies padded to V
    = `target` and to `own`.
    """
    ids = np.arange(min(target, own), dtype=np.int32)
    inputs = np.zeros(target, np.int32)
    inputs[: len(ids)] = ids
    return VocabularyMap(inputs, ids, ids, len(ids))


@dataclass(frozen=True, slots=True, eq=False)
class StandaloneDraft:
    """An opened model that drafts for another one. kind: its name in a sentence."""

    kind: ClassVar[str] = "whole model"

    name: str
    checkpoint: Checkpoint
    vocabulary: VocabularyMap

    def __post_init__(self) -> None:
        """Raise ModelError for a model that cannot draft here."""
        if self.checkpoint.architecture.recurrent is not None:
            raise ModelError(
                f"{self.name} has layers with a recurrent state, which a draft model cannot have "
                "yet; use --speculative-algorithm NGRAM, or a draft model with attention only"
            )

    def limited(self, token_map: Ints) -> "StandaloneDraft":
        """Return a copy that proposes only the target ids `token_map` int32[n] (FR-Spec). Raises
        ModelError if none is left.
        """
        return replace(self, vocabulary=self.vocabulary.limited(token_map))

    @property
    def algorithm(self) -> str:
        """Its name in statistics: "standalone"."""
        return "standalone"

    @property
    def cache(self) -> tuple[CacheLayer, ...]:
        """What its layers with keys and values of their own cache per position, in order."""
        return self.checkpoint.architecture.caches

    @property
    def path(self) -> Path:
        """The file or folder of its weights."""
        return self.checkpoint.path

    @property
    def vocab(self) -> int:
        """Vd, the number of draft ids."""
        return len(self.vocabulary.target_ids)

    @property
    def parameters(self) -> int:
        """Number of weights that run; a head with some rows of a tied embedding is a copy and
        counts.
        """
        arch = self.checkpoint.architecture
        rows = self.vocab * arch.hidden
        if arch.tied_head:
            return arch.parameters + (0 if self.vocab == arch.vocab else rows)
        return arch.parameters - arch.vocab * arch.hidden + rows

    @property
    def node_numbers(self) -> int:
        """Float32 elements of scratch per node of a pass, other than its logits."""
        arch = self.checkpoint.architecture
        return (4 + arch.expert_rows) * arch.hidden + 3 * arch.ffn + arch.latent_numbers

    @property
    def feature_numbers(self) -> int:
        """0: it reads tokens only."""
        return 0
