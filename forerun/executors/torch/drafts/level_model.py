"""The base of torch draft models that propose level by level.

Their passes do not synchronise with the device and leave the placement of keys and values to the
caller. The DraftModel interface (`extend`, `expand`) runs passes one by one; captured rounds run
the same ones in one program (captured/drafting.py).

A model that reads a hidden state with the next token, first the target's and then its own output,
has an entry for t_{q+1} at position q (EAGLE, section 4.1): it pairs feature f_q with that token
and predicts t_{q+2}; so after n decided tokens, the last of which has not been run, both caches
have n - 1 entries. Results need not be bit-identical in every batch: a draft that differs in its
last bit may cost an acceptance, but never changes the text.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.draft_checks import check_extension, check_level, own_features
from forerun.executors.draft_model import Declared, DraftModelBase
from forerun.executors.layer_states import LayerStates
from forerun.executors.torch.attention.attention_shapes import widest_tile
from forerun.executors.torch.attention.geometry import PassRows
from forerun.executors.torch.attention.kv import indices
from forerun.executors.torch.decoder.decoder import Attend, attention_over
from forerun.executors.torch.decoder.elementwise import Rotary, rotation
from forerun.executors.torch.drafts.draft_cache import DraftCache, DraftPass
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.features import TorchFeatures
from forerun.executors.torch.triton.kernels import Kernels
from forerun.interface.draft_model import (
    Candidates,
    DraftExtension,
    DraftLevel,
)
from forerun.interface.features import Features
from forerun.networks.rope import Rope
from forerun.types import Ints


@dataclass(frozen=True, slots=True)
class Nodes:
    """The input of a pass over n nodes.

    tokens  int[n] target ids
    rotary  of their positions, one for each of the model's ropes
    attend  computes a layer's attention, and stores its keys and values
    depth   0: tokens that became permanent; else of draft tokens, 1 = below the root
    position  int[n] at depth 0; None: of draft tokens, which are never the first
    before  at depth 0, if a layer reads the layer before it: (that layer, its outputs [n,H]) -> for
            each node the output of the entry before its own
    """

    tokens: Tensor
    rotary: tuple[Rotary, ...]
    attend: Attend
    depth: int
    before: Callable[[int, Tensor], Tensor]
    position: Tensor | None = None


class LevelModel(DraftModelBase):
    """The DraftModel interface around `enter`, `forward` and `logits`, which do not synchronise
    with the device.

    cache      keys and values
    outputs    [n,W] the input of a next draft step: of draft nodes from 0 on, and of each slot's
               last entry from max_nodes on; the last row is padding
    states     the row numbers in `outputs` if layers read each other; None = there is one layer
    ids        int32[Vd] target id of every draft id
    ropes      frequencies float32[E/2] and factor of each kind of rotary positions
    gqa_group  query heads per key/value head
    """

    def __init__(
        self,
        executor: TorchTarget,
        declared: Declared,
        cache: DraftCache,
        ropes: tuple[tuple[Rope, int], ...],
        heads: int,
        width: int,
        states: LayerStates | None = None,
    ) -> None:
        """Initialise the model. ropes: as Architecture.ropes; heads: A query heads; width: W."""
        (self.traits, self.facts), self.cache, self.states = declared, cache, states
        self._executor, limits = executor, executor.limits
        self.gqa_group = widest_tile(heads, self.traits.cache)
        rows = states.rows if states is not None else limits.max_nodes + limits.slots + 1
        self.outputs = torch.zeros(rows, width, device=executor.device, dtype=executor.dtype)
        self.ids = torch.from_numpy(self.traits.target_ids.astype(np.int32)).to(executor.device)
        self.ropes = rotations(ropes, executor.device)

    # --- asynchronous -----------------------------------------------------------------------

    def enter(self, features: Tensor | None) -> Tensor:
        """Return the hidden states [n,H] that permanent tokens are read with, from the target's
        features [n,F*H]; None if and only if the traits need none.
        """
        raise NotImplementedError

    def forward(self, nodes: Nodes, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of `logits` [n,H] and of a next step [n,W]; hidden: from `enter`, or at
        greater depths the parents' output.
        """
        raise NotImplementedError

    def logits(self, read: Tensor) -> Tensor:
        """Return draft logits [n,Vd], of any dtype, for the first result of `forward`, [n,H]."""
        raise NotImplementedError

    # --- the contract, pass by pass ----------------------------------------------------------

    @torch.inference_mode()
    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run the tokens that became permanent: with features the next token of each, else the
        tokens alone. Writes their keys and values to pages, and the slots' last outputs; returns
        candidates [s,k] for `extension.scored`. Raises EngineError for numbers out of bounds and
        for features that are missing or not one row per token.
        """
        executor, states, streams = self._executor, self.states, None
        check_extension(extension, executor.limits)
        if self.traits.features.kind != "none":
            about = len(extension.tokens), self.traits.name, TorchFeatures
            streams = own_features(features, *about).tensor()
        hidden = self.enter(streams)
        work, before = self.cache.extension(extension), nothing_before
        if states is not None:
            rows = indices(states.before(extension), executor.device)

            def before(layer: int, outputs: Tensor) -> Tensor:
                count, width = outputs.shape
                mine = self.outputs[:, layer * width : (layer + 1) * width]
                mine[:count] = outputs
                return mine[rows]

        read, outputs = self.forward(self._nodes(work, 0, before, extension), hidden)
        self.cache.commit(extension)
        nodes, targets = work.ends, executor.limits.max_nodes + extension.slots
        if states is not None:
            stored = states.stored(extension)
            nodes, targets = stored.nodes, stored.targets
        last = outputs[indices(nodes, executor.device)]
        self.outputs[indices(targets, executor.device)] = last
        return self._candidates(read, work.scored, extension.candidates)

    @torch.inference_mode()
    def expand(self, level: DraftLevel) -> Candidates:
        """Run draft tokens, in scratch. Returns candidates [n,k] for each. Raises EngineError for
        numbers out of bounds.
        """
        limits, count = self._executor.limits, len(level.tokens)
        check_level(level, limits)
        depth = 1 if self.states is None else self.states.depth(level)
        kept = limits.max_nodes + np.repeat(level.slots, np.diff(level.start))
        parents = np.where(level.parents < 0, kept, level.parents)
        work = self.cache.level(level)
        nodes = self._nodes(work, depth, nothing_before)
        read, outputs = self.forward(nodes, self.outputs[indices(parents, self.outputs.device)])
        self.outputs[level.first : level.first + count] = outputs
        return self._candidates(read, work.scored, level.candidates)

    def _nodes(
        self,
        work: DraftPass,
        depth: int,
        before: Callable[[int, Tensor], Tensor],
        extension: DraftExtension | None = None,
    ) -> Nodes:
        device = self._executor.device
        position = indices(work.position, device)
        rotary = tuple(rotation(position, *each) for each in self.ropes)
        attend = work.attend
        if extension is not None and self._executor.kernels is not None:
            attend = self._launched(work, extension, self._executor.kernels)
        first = position if depth == 0 else None
        return Nodes(indices(work.tokens, device), rotary, attend, depth, before, first)

    def _launched(self, work: DraftPass, extension: DraftExtension, kernels: Kernels) -> Attend:
        """Return the attention of an extension with the target's own kernels, since prompts are
        long.
        """
        cache, device = self.cache, self._executor.device
        start = np.append(0, work.ends + 1).astype(np.int32)
        places = cache.scratch_begin + np.arange(len(work.tokens))
        rows = PassRows(start, extension.kv_len, extension.pages, work.position)
        geometry = rows.geometry(places, cache.paged, self.gqa_group, device)
        seen = [replace(geometry, begin=begin) for begin in cache.begins]
        return attention_over(cache.layers, cache.attention, seen, kernels.enter, kernels.attend)

    def _candidates(self, read: Tensor, scored: Ints, count: int) -> Candidates:
        ids, log_probs = likeliest(self.logits(read[indices(scored, read.device)]), count)
        return Candidates(ids.int().cpu().numpy(), log_probs.cpu().numpy())


def rotations(
    ropes: Iterable[tuple[Rope, int]], device: torch.device
) -> list[tuple[Tensor, float]]:
    """Return frequencies float32[E/2] and factor of each kind of rotary positions, as `rotation`
    reads them; ropes: as Architecture.ropes.
    """
    return [
        (torch.from_numpy(rope.frequencies(size)).to(device), rope.attention_factor)
        for rope, size in ropes
    ]


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices int64[n,k] of the k = `count` greatest logits [n,V], or of all if there
    are fewer, best first, and their log-probabilities float32[n,k].
    """
    logits = logits.float()
    best, which = logits.topk(min(count, logits.shape[-1]), -1)
    return which, best - logits.logsumexp(-1, keepdim=True)


def nothing_before(layer: int, outputs: Tensor) -> Tensor:
    """Raise EngineError, because no layer reads another in this pass (Nodes.before)."""
    raise EngineError("a pass in which no layer reads another")
