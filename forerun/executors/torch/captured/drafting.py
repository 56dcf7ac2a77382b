"""The work of a draft model at the end of a captured round: it follows the target and builds the
next trees.

    round      ... -> walk -> move pages -> extend -> level 1 -> level 2 -> ... -> record
    per slot                                  '-> the last output, for passes that the host requests

The arithmetic is that of forerun.drafters.model_drafter and forerun.speculative.draft_tree, in
fixed shapes and without synchronisation: decisions of the host become sorts, gathers and masks
here. The passes are those of the DraftModel interface (level_model.py).

The extension runs the model over *all* nodes of the step, in the target's own geometry: node n
reads the target's choice there, with the target's features if the model reads any, so the nodes of
the accepted path read exactly the tokens that follow. The results of the other nodes stay in
scratch, unused. For a model that runs roots itself (draft_cache.py) the entry of the step's root is
kept by slot: it is written to its page first, all nodes are one position later, and the entry of
the last accepted token, the next root, is kept by slot again.

The nodes of a level are queries, and all levels so far are keys, after the root if it is run: the
nodes that run are contiguous in scratch for each row, `width` per level. In each level they are in
the order of their parents, so those below any node are contiguous, and `enter` and `leave`
(geometry.py) are two counts.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.attention.geometry import Geometry
from forerun.executors.torch.captured.entries import (
    CommittedRound,
    Forest,
    before_of,
    behind_roots,
    keep_page_ends,
)
from forerun.executors.torch.decoder.decoder import Attend, attention_over
from forerun.executors.torch.decoder.elementwise import Rotary
from forerun.executors.torch.drafts.block import TorchBlockModel
from forerun.executors.torch.drafts.level_model import LevelModel, Nodes, likeliest, nothing_before
from forerun.executors.torch.sizes import Record, Size
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.torch.triton.round_types import Extended, Frontier, TreeStarts
from forerun.interface.draft_model import CANDIDATES
from forerun.types import Floats


class Drafting:
    """Drafts with a draft model at the end of a captured round. Keeps no state between rounds."""

    _model: LevelModel | TorchBlockModel
    confident = False

    def __init__(self, kernels: Kernels, max_nodes: int) -> None:
        self._kernels, self._max_nodes = kernels, max_nodes

    def fits(self, size: Size) -> bool:
        """Return whether the nodes that run fit into scratch, and every place has enough
        candidates.
        """
        raise NotImplementedError

    def calibrate(self, chances: Floats) -> None:
        """Use OnDeviceDraftSpec.chances from the next round on."""
        raise NotImplementedError

    # --- asynchronous: no shape and no branch depends on a value ---------------------------

    def work(
        self, size: Size, committed: CommittedRound, features: Tensor | None, record: Record
    ) -> Tensor | None:
        """Fill the record's `grown` int32[3*R*K]: tokens, parents and value bits of the trees; and
        its `confident`, if the model has a confidence. Returns, for rounds with grammars,
        int32[2*R*CANDIDATES]: ids and log-probability bits of the candidates below the roots.
        """
        raise NotImplementedError

    def _rotary(self, position: Tensor) -> tuple[Rotary, ...]:
        rotation, ropes = self._kernels.rotation, self._model.ropes
        return tuple(rotation(position, *each) for each in ropes)

    def _attend(self, slots: Tensor, geometry: Geometry) -> Attend:
        """Return the attention of nodes whose keys and values are written to `slots`."""
        enter, attend, cache = self._kernels.enter, self._kernels.attend, self._model.cache
        seen = [replace(geometry, begin=begin) if begin else geometry for begin in cache.begins]
        return attention_over(cache.layers, cache.attention, seen, enter, attend, slots)

    def _move(self, source: Tensor, target: Tensor, kept: Tensor) -> None:
        self._kernels.move(self._model.cache.paged, source, target, kept)

    def _candidates(self, read: Tensor) -> Tensor:
        """Return int32[2*R*CANDIDATES], ids and log-probabilities for the record."""
        which, log_probs = likeliest(self._model.logits(read), CANDIDATES)
        return padded(self._model.ids[which], log_probs)


def padded(ids: Tensor, log_probs: Tensor) -> Tensor:
    """Return the record's `candidates` of ids int32 and log_probs float32[R,k], best first."""
    missing = (0, CANDIDATES - ids.shape[1])
    ids = F.pad(ids, missing)
    log_probs = F.pad(log_probs, missing, value=-torch.inf)
    return torch.cat([ids.flatten(), log_probs.flatten().view(torch.int32)])


class LevelDrafting(Drafting):
    """The work in a round of a model that proposes level by level."""

    _model: LevelModel

    def __init__(self, model: LevelModel, kernels: Kernels, max_nodes: int) -> None:
        super().__init__(kernels, max_nodes)
        self._model = model
        self._forests: dict[Size, Forest] = {}

    def fits(self, size: Size) -> bool:
        """Return whether the nodes that run fit into scratch, and every place has enough
        candidates.
        """
        run = size.rows * max(size.levels - 1, 0) * size.width
        return run <= self._max_nodes and size.width <= len(self._model.ids)

    # --- asynchronous: no shape and no branch depends on a value ---------------------------

    def work(
        self, size: Size, committed: CommittedRound, features: Tensor | None, record: Record
    ) -> Tensor | None:
        """Implement Drafting.work; features [M,F*H], None if the model reads none."""
        model = self._model
        if size not in self._forests:
            device = committed.accepted.choices.device
            self._forests[size] = Forest(size, model.gqa_group, model.cache, device)
        forest = self._forests[size]
        starts, roots = self._extend(forest, committed, features)
        grown = record.grown.view(3, size.rows, -1)
        self._grow(forest, committed.inputs["table"], starts, roots, grown)
        return self._candidates(starts.read) if size.masked else None

    def _extend(
        self, forest: Forest, committed: CommittedRound, features: Tensor | None
    ) -> tuple[TreeStarts, Tensor | None]:
        """Run every node and make the accepted ones permanent. Also returns int32[R], the slots of
        the next roots, if the model runs roots. Includes rows that the model does not follow: their
        entries are written after all valid ones, and a later extension overwrites them.
        """
        model, kernels, states = self._model, self._kernels, self._model.states
        prepared, accepted, inputs = committed.prepared, committed.accepted, committed.inputs
        entries, roots, waiting = prepared, None, model.cache.roots
        if waiting:
            entries, roots = behind_roots(model.cache, committed, forest.nodes, self._move)
        geometry = replace(
            committed.geometry,
            tiles=forest.tiles,
            tile=forest.tile,
            slots=entries.slots,
            position=entries.position,
            split=None,  # The tiles differ.
        )
        if waiting:
            geometry = replace(geometry, kv_len=geometry.kv_len + 1)
        before = nothing_before if states is None else before_of(model, states, committed)
        nodes = Nodes(
            tokens=accepted.choices.clamp_min(0),
            rotary=self._rotary(entries.position),
            attend=self._attend(entries.slots, geometry),
            depth=0,
            before=before,
            position=entries.position,
        )
        read, outputs = model.forward(nodes, model.enter(features))
        if forest.size.nodes > 1 or waiting:
            self._move(entries.slots, entries.pages, accepted.on_path.flatten())
        extended = Extended(read, outputs, model.outputs, self._max_nodes)
        starts = kernels.follow(extended, accepted, prepared, inputs, forest.levels)
        if states is not None:
            keep_page_ends(model, states, committed, outputs)
        return starts, roots

    def _grow(
        self, forest: Forest, table: Tensor, starts: TreeStarts, roots: Tensor | None, grown: Tensor
    ) -> None:
        """Build full trees below the rows' new ends, in grown int32[3,R,K]."""
        model, kernels, size = self._model, self._kernels, forest.size
        width, rows = size.width, size.rows

        def hang(level: int, read: Tensor, chosen: Tensor | None) -> None:
            logits, noise = model.logits(read), starts.noise[level]
            kernels.grow(logits, model.ids, noise, forest.levels, level, grown, chosen)

        hang(0, starts.read, None)
        if size.levels == 1:
            return
        position = starts.position.flatten()
        kinds = [
            [part.split(rows * width) for part in rotary]
            for rotary in self._rotary(position + 1 if model.cache.roots else position)
        ]
        hidden = starts.hidden  # Of the nodes above the newest level.
        every = self._geometry(forest, table, starts.kv_len, roots)
        frontier: Frontier | None = None
        for level in range(1, size.levels):
            if width > 1:
                above = None if frontier is None else frontier.above
                frontier = kernels.descend(
                    grown, forest.levels, level, hidden, above, roots is not None
                )
                hidden = frontier.hidden
            # As if all levels existed, but only this one's nodes are queries.
            chain = forest.chain[level - 1]
            geometry = replace(
                every,
                tree_intervals=chain if frontier is None else frontier.tree_intervals,
                tiles=forest.level_tiles[level - 1],
                asking=forest.asking[level - 1],
            )
            nodes = Nodes(
                tokens=grown[0, :, level - 1].contiguous() if frontier is None else frontier.tokens,
                rotary=tuple((cos[level - 1], sin[level - 1]) for cos, sin in kinds),
                attend=self._attend(forest.slots[level - 1], geometry),
                depth=level,
                before=nothing_before,
            )
            read, hidden = model.forward(nodes, hidden)
            hang(level, read, None if frontier is None else frontier.chosen)

    def _geometry(
        self, forest: Forest, table: Tensor, kv_len: Tensor, roots: Tensor | None
    ) -> Geometry:
        """Return the geometry of all nodes that run, after rows of kv_len int32[R] and their roots;
        the first level's nodes are queries.
        """
        cache, slots = self._model.cache, forest.run_slots
        if roots is not None:
            slots = torch.cat([roots[:, None], slots], 1)
        return Geometry(
            start=forest.start,
            slots=slots.flatten(),
            kv_len=kv_len,
            table=table,
            tree_intervals=forest.chain[0],
            tiles=forest.level_tiles[0],
            tile=forest.level_tile,
            page_size=cache.page_size,
            position=(kv_len[:, None] + forest.behind).flatten() if cache.partial else None,
            asking=forest.asking[0],
        )
