"""A draft model's keys and values under the target's page ids, for any number of layers.

    scratch   draft nodes 0 .. max_nodes + slots, numbered as in DraftLevel; the tokens of an
              extension use the same slots
    roots     one slot per sequence, for models that run a row's root itself

If draft entry q pairs the target's feature at q with the next token (EAGLE), the root is the last
*entry*, and there is nothing more of it to store. A model that reads tokens alone runs the root as
an additional node; its keys and values are kept here until the target has decided which token
follows.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from forerun.executors.draft_model import DraftNodes, with_roots
from forerun.executors.torch.attention.attention import KeyBlocks, RowKeys, attend
from forerun.executors.torch.attention.kv import KvShape, PagedCache, Slots, enter, indices
from forerun.executors.torch.decoder.decoder import Attend, attention_over
from forerun.executors.torch.decoder.elementwise import AnyHeads
from forerun.interface.draft_model import DraftBlock, DraftExtension, DraftLevel
from forerun.interface.executor import ExecutorLimits
from forerun.networks.layer_spec import AttentionSpec
from forerun.types import AnyArray, Ints


@dataclass(frozen=True, slots=True)
class DraftPass:
    """The M nodes of one pass.

    tokens    int32[M]
    position  int32[M]
    ends      int32[R] the last node of each row
    scored    int32[s] nodes to return candidates for
    attend    writes a layer's keys and values to scratch and returns the attention output
    """

    tokens: Ints
    position: Ints
    ends: Ints
    scored: Ints
    attend: Attend


class DraftCache:
    """Pages, scratch and roots of a draft model.

    shape      the shape of each layer's keys and values
    roots      whether the model runs each row's root itself
    partial    whether some layer does not attend to all positions before a node
    attention  how each layer's scores are computed; empty = scaled by 1/sqrt(E), no windows
    begins     the first position at which each layer has an entry; empty = 0
    paged      keys and values of all layers
    scratch_begin, root_begin  slots (kv.py) of draft node 0, and of the root of slot 0
    """

    def __init__(
        self,
        shape: KvShape,
        limits: ExecutorLimits,
        device: torch.device,
        dtype: torch.dtype,
        roots: bool = False,
        attention: tuple[AttentionSpec, ...] = (),
        begins: tuple[int, ...] = (),
    ) -> None:
        self.paged = PagedCache(shape, _room(limits), device, dtype)
        self.layers, count = self.paged.layers, len(self.paged.layers)
        self.begins = begins or (0,) * count
        self.attention: tuple[AttentionSpec | None, ...] = attention or (None,) * count
        self._device, self.roots, self._scratch = device, roots, limits.max_nodes + limits.slots
        windows = any(spec is not None and spec.window for spec in attention)
        self.partial = windows or any(self.begins)
        self.page_size = limits.page_size
        self.scratch_begin = self.paged.scratch_begin
        self.root_begin = self.scratch_begin + self._scratch
        self._nodes = DraftNodes(self._scratch)

    @staticmethod
    def bytes(shape: KvShape, limits: ExecutorLimits, dtype: torch.dtype) -> int:
        """Return the bytes of a DraftCache of this shape: pages like the target's, and scratch
        for draft nodes, an extension's roots and the roots by slot.
        """
        return shape.bytes(_room(limits), dtype)

    # --- passes --------------------------------------------------------------------------

    def extension(self, extension: DraftExtension) -> DraftPass:
        """Return a pass over the tokens that became permanent: the token after each, or with
        `roots` these tokens and each row's root. Raises EngineError if a position has no page.
        """
        self._targets(extension)
        tokens, start, scored = extension.next_tokens, extension.start, extension.scored
        if self.roots:
            tokens, start, scored, _ = with_roots(extension)
        nodes = np.arange(start[-1], dtype=np.int32)
        counts = np.diff(start)
        position = np.repeat(extension.kv_len - start[:-1], counts) + nodes
        rows = [
            RowKeys(mine, self._cached(pages, int(length)), [(self._places(mine), mine)])
            for mine, pages, length in zip(
                np.split(nodes, start[1:-1]), extension.pages, extension.kv_len, strict=True
            )
        ]
        return self._pass(tokens, position, start, scored, rows, 0)

    def level(self, level: DraftLevel) -> DraftPass:
        """Return a pass over draft tokens, and store each one's parent, for deeper levels."""
        nodes = np.arange(len(level.tokens), dtype=np.int32)
        known = level.kv_len + self.roots
        position = np.repeat(known, np.diff(level.start)) + self._nodes.add(level)
        rows = []
        for row, (begin, end) in enumerate(zip(level.start[:-1], level.start[1:], strict=True)):
            cached = self._cached(level.pages[row], int(level.kv_len[row]))
            if self.roots:
                cached = np.append(cached, self._root(level.slots[row]))
            chains = [
                (self._places(self._nodes.path(level.first + node)), nodes[node : node + 1])
                for node in range(begin, end)
            ]
            rows.append(RowKeys(nodes[begin:end], cached, chains))
        return self._pass(level.tokens, position, level.start, nodes, rows, level.first)

    def block(self, block: DraftBlock, mask: int, causal: bool) -> DraftPass:
        """Return a pass over blocks: each row's root, followed by `mask` tokens up to `depth`
        places.

        causal  whether a place attends only to those before it, and not to its whole block. All
                cached positions are attended to in both cases
        """
        depth, count = block.depth, len(block.roots)
        tokens = np.full((count, depth), mask, np.int32)
        tokens[:, 0] = block.roots
        nodes = np.arange(count * depth, dtype=np.int32).reshape(count, depth)
        rows = [
            RowKeys(mine, self._cached(pages, int(length)), [(self._places(mine), mine)])
            for mine, pages, length in zip(nodes, block.pages, block.kv_len, strict=True)
        ]
        position = block.kv_len[:, None] + np.arange(depth)
        sees = position if causal else np.repeat(position[:, -1:], depth, 1)
        start = np.arange(count + 1, dtype=np.int32) * np.int32(depth)
        where = position.ravel().astype(np.int32)
        return self._pass(tokens.ravel(), where, start, nodes.ravel(), rows, 0, sees.ravel())

    def write(self, layer: int, heads: AnyHeads) -> None:
        """Write keys and values of the tokens of an extension to scratch, from where `commit`
        copies them.
        """
        slots = self._places(np.arange(len(heads.rotary[0])))
        enter(heads, self.layers[layer], indices(slots, self._device))

    def commit(self, extension: DraftExtension) -> None:
        """Make the entries of an extension permanent: copy tokens to pages, and roots to their
        slots.
        """
        targets, nodes = self._targets(extension), np.arange(extension.start[-1])
        if self.roots:
            chains = with_roots(extension)
            nodes = np.append(chains.own, chains.start[1:] - 1)
            targets = np.append(targets, self._root(extension.slots))
        source = torch.from_numpy(self._places(nodes)).to(self._device)
        target = torch.from_numpy(targets).to(self._device)
        self.paged.move(source, target)

    def _pass(
        self,
        tokens: Ints,
        position: AnyArray,
        start: Ints,
        scored: Ints,
        rows: list[RowKeys],
        first: int,
        sees: AnyArray | None = None,
    ) -> DraftPass:
        """Return a pass; sees: the last position that each node attends to, None = its own."""
        position, slots = position.astype(np.int32), self._places(first + np.arange(len(position)))
        blocks = {
            begin: KeyBlocks(rows, slots, position, self.paged, begin=begin, last=sees)
            for begin in set(self.begins)
        }
        seen = [blocks[begin] for begin in self.begins]
        attending = attention_over(self.layers, self.attention, seen, enter, attend)
        return DraftPass(tokens, position, start[1:] - np.int32(1), scored, attending)

    # --- places --------------------------------------------------------------------------

    def _cached(self, pages: Ints, length: int) -> Slots:
        return self.paged.slots_of(pages[None], 0, np.arange(length))

    def _places(self, nodes: AnyArray) -> Slots:
        return self.paged.scratch(nodes)

    def _root(self, slots: AnyArray) -> Slots:
        return self.paged.scratch(np.asarray(self._scratch + slots))

    def _targets(self, extension: DraftExtension) -> Slots:
        """Return int64[n], the slots of the tokens of an extension."""
        return np.concatenate([
            self.paged.slots_of(pages[None], 0, np.arange(length, length + end - begin))
            for pages, length, begin, end in zip(
                extension.pages, extension.kv_len, extension.start, extension.start[1:],
                strict=False,
            )
        ])  # fmt: skip


def _room(limits: ExecutorLimits) -> ExecutorLimits:
    """Return the limits of a PagedCache whose scratch also has room for an extension's roots and
    the roots by slot.
    """
    return replace(limits, max_nodes=limits.max_nodes + 2 * limits.slots, max_scored=None)
