"""A block drafter beside its target: the DraftModel contract on programs.

Rounds store what was accepted and draft by themselves (block_drafting.py), unless there are more
draft tokens than a full tree holds. The passes here are for the rest (block_passes.py); a step that
drafts with them is three dispatches and two copies.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.block_folder import BlockFile
from forerun.errors import EngineError
from forerun.executors.draft_checks import check_block, check_extension, check_pages
from forerun.executors.jax.draft_models.draft_features import streams_of
from forerun.executors.jax.drafts.block import BlockNetwork, load_block
from forerun.executors.jax.drafts.block_passes import block_shapes, enter_shapes
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.memory import check_fits
from forerun.executors.jax.program.functions import Key
from forerun.executors.jax.rounds.batches import Bucket, chunks, sized
from forerun.executors.jax.rounds.inputs import total, views_of
from forerun.executors.pair_scores import pair_scores
from forerun.interface.draft_model import (
    CANDIDATES,
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftExtension,
    DraftLevel,
    DraftModelTraits,
    FeatureNeeds,
    no_candidates,
)
from forerun.interface.features import Features
from forerun.types import AnyArray, Ints


class JaxBlockModel:
    """DraftModel on XLA, on the devices and in the dtype of its target; whole on each device.

    Raises MemoryPlanError if it does not fit, EngineError if a block is larger than a step.
    """

    def __init__(self, executor: JaxExecutor, checkpoint: Checkpoint, draft: BlockFile) -> None:
        head, limits = draft.head, executor.limits
        self.traits = DraftModelTraits(
            name=head.algorithm,
            cache=head.cache,
            target_ids=draft.target_ids,
            max_nodes=limits.max_nodes,
            features=FeatureNeeds("aux", head.features),
            block_size=head.depth,
            confident=head.confidence > 0,
        )
        if head.places > limits.max_nodes:
            raise EngineError(
                f"a block of {head.places} does not fit into a step of {limits.max_nodes} nodes; "
                "raise chunked-prefill-size"
            )
        self._executor, self._about, self._limits = executor, head, limits
        self._pairs = pair_scores(draft)
        network = BlockNetwork(head, executor.decoder)
        self._bytes, self._vocab = executor.draft_bytes(network.sizes), network.sizes.vocab
        check_fits(self._bytes, *executor.place)
        weights = load_block(network, checkpoint, draft, self._pairs, executor.dtype)
        executor.attach(network, weights)

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Write keys and values of the extension's features into the drafter's pages; dispatches
        without waiting.

        features  one row per token, of this executor

        Returns no candidates. Raises EngineError for an unsound extension, or if candidates are
        wanted.
        """
        check_extension(extension, self._limits)
        check_pages(extension, self._limits)
        stream = streams_of(extension, features)
        buckets, start = self._executor.buckets.widest, extension.start
        rows = [
            (r, np.arange(start[r], start[r + 1], dtype=np.int32)) for r in range(len(start) - 1)
        ]
        short = [row for row in rows if len(row[1]) <= buckets.nodes[-1]]
        for size, some in sized(short, buckets) if short else ():
            self._enter(extension, stream, size, some)
        for row, nodes in (row for row in rows if len(row[1]) > buckets.nodes[-1]):
            for size, part in chunks(nodes, buckets.chunks):
                self._enter(extension, stream, size, [(row, part)])
        return no_candidates(len(extension.scored))

    def _enter(
        self, extension: DraftExtension, stream: Ints, size: Bucket, rows: list[tuple[int, Ints]]
    ) -> None:
        shapes = enter_shapes(size, self._executor.tables)
        whole = np.zeros(total(shapes), np.int32)
        views = views_of(whole, shapes)
        for line, (row, nodes) in enumerate(rows):
            count, begin = len(nodes), int(nodes[0] - extension.start[row])
            views["kv_len"][line] = extension.kv_len[row] + begin
            views["stream"][line, :count], views["real"][line, :count] = stream[nodes], 1
        own = [row for row, _ in rows]
        views["tables"][: len(own)] = self._executor.page_tables(extension.pages[own])
        self._executor.programs.run(Key("enter", size), whole)

    def expand(self, level: DraftLevel) -> Candidates:
        """Raise EngineError: a block drafter proposes a whole block at once."""
        raise EngineError("a block drafter proposes a block, not level by level")

    def block(self, block: DraftBlock) -> BlockCandidates:
        """Propose a block below each of R roots, as many rows per pass as there are slots; waits
        for the device.

        Returns [R,depth,k] with k = block.candidates, or Vd where that is smaller. Raises
        EngineError if `block` is not sound or a log-probability is not finite.
        """
        check_block(block, self._about.depth, self._limits)
        sizes = self._executor.buckets.rows
        if self._pairs is not None:
            block = replace(block, candidates=self._pairs.count(block))
        parts = [
            self._propose(block.part(begin, begin + sizes[-1]))
            for begin in range(0, len(block.roots), sizes[-1])
        ]
        ids, log_probs, hidden = map(np.concatenate, zip(*parts, strict=True))
        if not np.isfinite(log_probs).all():
            raise EngineError("a block drafter's logits are not finite")
        pairs = None
        if self._pairs is not None:
            pairs = self._pairs.of(block.roots, ids, log_probs, hidden)
        return BlockCandidates(ids, log_probs, pairs)

    def _propose(self, block: DraftBlock) -> list[AnyArray]:
        """Draft ids and log-probabilities, each [R,depth,k], and what the output head reads, if
        pairs need it.
        """
        count, vocab = len(block.roots), self._vocab
        rows = next(size for size in self._executor.buckets.rows if size >= count)
        shapes = block_shapes(rows, self._executor.tables)
        whole = np.zeros(total(shapes), np.int32)
        views = views_of(whole, shapes)
        views["kv_len"][:count], views["root"][:count] = block.kv_len, block.roots
        views["tables"][:count] = self._executor.page_tables(block.pages)
        most = min(vocab, CANDIDATES if block.candidates <= CANDIDATES else vocab)
        found = self._executor.programs.ask(Key("block", Bucket(rows, most)), whole)
        ids, *bits = np.split(found[:count, : block.depth], [most, 2 * most], -1)
        log_probs, hidden = (np.ascontiguousarray(part).view(np.float32) for part in bits)
        return [ids[..., : block.candidates], log_probs[..., : block.candidates], hidden]

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: algorithm, vocab, features, block_size, causal, and bytes
        by purpose.
        """
        return {
            "algorithm": self._about.algorithm,
            "vocab": self.traits.vocab,
            "features": list(self._about.features),
            "block_size": self._about.places,
            "causal": self._about.causal,
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }
