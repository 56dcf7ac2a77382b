"""The device-independent half of draft models: the traits that follow from a checkpoint, the
methods that a kind of model does not support, and the positions of draft nodes in their trees.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from forerun.drafts.assistant import Assistant
from forerun.drafts.block_folder import BlockFile
from forerun.drafts.eagle_folder import DraftFile
from forerun.drafts.prediction_layers import PredictionLayers
from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.errors import EngineError, ModelError
from forerun.executors.draft_checks import check_block
from forerun.executors.pair_scores import pair_scores
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftExtension,
    DraftLevel,
    DraftModelTraits,
    FeatureNeeds,
)
from forerun.interface.executor import ExecutorLimits
from forerun.types import AnyArray, Ints

Declared = tuple[DraftModelTraits, dict[str, Any]]
"""The traits of a draft model, and its facts for /server_info without bytes."""


def declared_head(draft: DraftFile, max_nodes: int) -> Declared:
    """Return the traits and facts of an EAGLE head: EAGLE-1 reads the target's last residual
    stream, EAGLE-3 those that its file lists.
    """
    head = draft.head
    last = head.algorithm == "eagle1"
    needs = FeatureNeeds("last") if last else FeatureNeeds("aux", head.features)
    traits = DraftModelTraits(head.algorithm, head.cache, draft.target_ids, max_nodes, needs)
    features = list(head.features)
    return traits, {"algorithm": head.algorithm, "vocab": head.vocab, "features": features}


def declared_whole(draft: StandaloneDraft, max_nodes: int, runs_roots: bool = False) -> Declared:
    """Return the traits and facts of a whole model, which reads tokens alone. runs_roots: as of
    DraftModelTraits.
    """
    vocabulary = draft.vocabulary
    traits = DraftModelTraits(
        draft.algorithm, draft.cache, vocabulary.target_ids, max_nodes, runs_roots=runs_roots
    )
    return traits, {
        "algorithm": draft.algorithm,
        "model": draft.name,
        "layers": draft.checkpoint.architecture.layers,
        "vocab": traits.vocab,
        "shared_tokens": vocabulary.shared,
    }


def declared_layers(draft: PredictionLayers | Assistant, max_nodes: int) -> Declared:
    """Return the traits and facts of MTP layers or an assistant, which read the target's last
    residual stream.
    """
    name, layers = "frozen_kv_mtp", draft.architecture.layers
    if isinstance(draft, PredictionLayers):
        name, layers = "nextn", draft.count
    needs = FeatureNeeds("last")
    traits = DraftModelTraits(name, draft.cache, draft.target_ids, max_nodes, needs)
    return traits, {"algorithm": name, "layers": layers, "vocab": traits.vocab}


class DraftModelBase:
    """Base class of draft models that propose level by level.

    facts  for `describe`
    """

    traits: DraftModelTraits
    facts: dict[str, Any]

    def block(self, block: DraftBlock) -> BlockCandidates:
        """Raise EngineError, since the model proposes level by level."""
        raise EngineError(f"{self.traits.name} proposes level by level, not a block")

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info, including bytes by purpose."""
        return self.facts


class BlockModelBase(DraftModelBase):
    """Base class of block drafters; a subclass implements `propose`. Raises ModelError if a block
    is larger than a step.

    about  its description
    pairs  scores that depend on the previous token; None: none
    """

    def __init__(self, draft: BlockFile, limits: ExecutorLimits) -> None:
        head, self._limits = draft.head, limits
        if head.places > limits.max_nodes:
            raise ModelError(
                f"a block of {head.places} does not fit into a step of {limits.max_nodes} nodes; "
                "raise chunked-prefill-size"
            )
        self.about, self.pairs = head, pair_scores(draft)
        self.traits = DraftModelTraits(
            name=head.algorithm,
            cache=head.cache,
            target_ids=draft.target_ids,
            max_nodes=limits.max_nodes,
            features=FeatureNeeds("aux", head.features),
            block_size=head.depth,
            confident=head.confidence > 0,
        )
        self.facts = {
            "algorithm": head.algorithm,
            "vocab": self.traits.vocab,
            "features": list(head.features),
            "block_size": head.places,
            "causal": head.causal,
        }

    @property
    def rows_at_once(self) -> int:
        """The most rows of a pass: as many as a step has nodes."""
        return self._limits.max_nodes // self.about.places

    def propose(self, block: DraftBlock) -> Sequence[AnyArray]:
        """Return draft ids and log-probabilities, each [R,depth,k], and the output head's input
        float32[R,depth,H], which is empty unless `pairs` reads it; for at most `rows_at_once` rows.
        """
        raise NotImplementedError

    def expand(self, level: DraftLevel) -> Candidates:
        """Raise EngineError, since the model proposes blocks."""
        raise EngineError(f"{self.traits.name} proposes a block, not level by level")

    def block(self, block: DraftBlock) -> BlockCandidates:
        """Return a block of draft candidates below each of R roots. Raises EngineError if `block`
        is invalid or a log-probability is not finite.
        """
        check_block(block, self.about.depth, self._limits)
        if self.pairs is not None:
            block = replace(block, candidates=self.pairs.count(block))
        parts = [
            self.propose(block.part(begin, begin + self.rows_at_once))
            for begin in range(0, len(block.roots), self.rows_at_once)
        ]
        ids, log_probs, hidden = map(np.concatenate, zip(*parts, strict=True))
        if not np.isfinite(log_probs).all():
            raise EngineError(
                "a block drafter's logits are not finite; float16 overflows where bfloat16 does not"
            )
        if self.pairs is None:
            return BlockCandidates(ids, log_probs)
        return BlockCandidates(ids, log_probs, self.pairs.of(block.roots, ids, log_probs, hidden))


class Chains(NamedTuple):
    """The nodes of an extension for a model that runs roots: each row's tokens followed by its
    root.

    tokens  int32[n+R] target ids
    start   int32[R+1] row r has nodes start[r]:start[r+1]; the last is its root
    scored  int32[s] nodes to return candidates for
    own     int64[n] nodes of the extension's tokens
    """

    tokens: Ints
    start: Ints
    scored: Ints
    own: AnyArray


def with_roots(extension: DraftExtension) -> Chains:
    """Return the nodes of an extension with each row's root appended."""
    rows = np.arange(len(extension.start))
    row = np.repeat(rows[:-1], np.diff(extension.start))
    start, own = (extension.start + rows).astype(np.int32), np.arange(len(row)) + row
    tokens = np.zeros(int(start[-1]), np.int32)
    tokens[own] = extension.tokens
    tokens[start[1:] - 1] = extension.next_tokens[extension.start[1:] - 1]
    # Candidates to follow a token are computed by the next node.
    return Chains(tokens, start, (own[extension.scored] + 1).astype(np.int32), own)


class DraftNodes:
    """The position of each draft node in its tree, by its number in DraftLevel: its parent and
    depth.
    """

    def __init__(self, count: int) -> None:
        self._above = np.full(count, -1, np.int32)
        self._depth = np.zeros(count, np.int32)

    def add(self, level: DraftLevel) -> Ints:
        """Store a level's nodes. Returns int32[n], the number of draft nodes above each."""
        numbers = slice(level.first, level.first + len(level.tokens))
        self._above[numbers] = level.parents
        depth = np.where(level.parents < 0, 0, self._depth[level.parents] + 1).astype(np.int32)
        self._depth[numbers] = depth
        return depth

    def path(self, number: int) -> Ints:
        """Return the draft nodes from the first level down to `number`; empty for -1, the root."""
        path = []
        while number >= 0:
            path.append(number)
            number = int(self._above[number])
        return np.array(path[::-1], np.int32)
