"""A block drafter next to its target: the DraftModel interface implemented with compiled programs.
Rounds store the features of accepted tokens and draft by themselves (block_drafting.py), unless
more draft tokens are requested than a full tree has. The passes here are for those cases; a step
that drafts with them takes three dispatches and two copies.
"""

from collections.abc import Sequence

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.block_folder import BlockFile
from forerun.executors.draft_checks import check_extension, check_pages, own_features
from forerun.executors.draft_model import BlockModelBase
from forerun.executors.jax.drafts.block import BlockNetwork, load_block
from forerun.executors.jax.drafts.block_drafting import block_shapes, enter_shapes
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.program.features import JaxFeatures
from forerun.executors.jax.program.functions import Key
from forerun.executors.jax.rounds.batches import Bucket, dispatches
from forerun.executors.packed import zeros_of
from forerun.interface.draft_model import (
    CANDIDATES,
    Candidates,
    DraftBlock,
    DraftExtension,
    no_candidates,
)
from forerun.interface.features import Features
from forerun.types import AnyArray, Ints


class JaxBlockModel(BlockModelBase):
    """DraftModel on XLA, on the devices and in the dtype of its target; copied to each device.
    Raises MemoryPlanError if it does not fit, ModelError if a block is larger than a step.
    """

    def __init__(self, executor: JaxExecutor, checkpoint: Checkpoint, draft: BlockFile) -> None:
        super().__init__(draft, executor.limits)
        self._executor = executor
        network = BlockNetwork(draft.head, executor.decoder)
        self._vocab = network.sizes.vocab
        self.facts |= executor.attach(
            network, lambda: load_block(network, checkpoint, draft, self.pairs, executor.dtype)
        )

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Write keys and values of the extension's features to the drafter's pages. Does not wait
        for the device.

        features  one row per token, of this executor

        Returns no candidates. Raises EngineError for an invalid extension, or if candidates are
        requested.
        """
        check_extension(extension, self._limits)
        check_pages(extension, self._limits)
        about = len(extension.tokens), self.traits.name, JaxFeatures
        stream = own_features(features, *about).streams
        for size, rows in dispatches(extension.start, self._executor.buckets.widest):
            self._enter(extension, stream, size, rows)
        return no_candidates(len(extension.scored))

    def _enter(
        self, extension: DraftExtension, stream: Ints, size: Bucket, rows: list[tuple[int, Ints]]
    ) -> None:
        whole, views = zeros_of(enter_shapes(size, self._executor.tables))
        for line, (row, nodes) in enumerate(rows):
            count, begin = len(nodes), int(nodes[0] - extension.start[row])
            views["kv_len"][line] = extension.kv_len[row] + begin
            views["stream"][line, :count], views["real"][line, :count] = stream[nodes], 1
        own = [row for row, _ in rows]
        views["tables"][: len(own)] = self._executor.page_tables(extension.pages[own])
        self._executor.programs.run(Key("enter", size), whole)

    @property
    def rows_at_once(self) -> int:
        """The most rows of a pass: as many as there are slots."""
        return self._executor.buckets.rows[-1]

    def propose(self, block: DraftBlock) -> Sequence[AnyArray]:
        """Implement BlockModelBase.propose; waits for the device."""
        count, vocab = len(block.roots), self._vocab
        rows = next(size for size in self._executor.buckets.rows if size >= count)
        whole, views = zeros_of(block_shapes(rows, self._executor.tables))
        views["kv_len"][:count], views["root"][:count] = block.kv_len, block.roots
        views["tables"][:count] = self._executor.page_tables(block.pages)
        most = min(vocab, CANDIDATES if block.candidates <= CANDIDATES else vocab)
        found = self._executor.programs.query(Key("block", Bucket(rows, most)), whole)
        ids, *bits = np.split(found[:count, : block.depth], [most, 2 * most], -1)
        log_probs, hidden = (np.ascontiguousarray(part).view(np.float32) for part in bits)
        return [ids[..., : block.candidates], log_probs[..., : block.candidates], hidden]
