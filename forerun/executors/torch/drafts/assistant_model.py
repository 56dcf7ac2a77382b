"""Gemma 4's assistant in torch, pass by pass. Its computation is described in
drafts/assistant.py.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.drafts.assistant import BEFORE, BEHIND, CENTROIDS, Assistant
from forerun.executors.draft_checks import (
    check_borrows,
    check_extension,
    check_level,
    check_pages,
    own_features,
    roots_of,
)
from forerun.executors.draft_model import DraftModelBase, declared_layers
from forerun.executors.torch.attention.attention import KeyBlocks, RowKeys, attend
from forerun.executors.torch.attention.kv import indices
from forerun.executors.torch.decoder.decoder import Block
from forerun.executors.torch.decoder.elementwise import AnyHeads, rotation
from forerun.executors.torch.decoder.layers import Linear
from forerun.executors.torch.decoder.weights import Weights
from forerun.executors.torch.drafts.level_model import likeliest, rotations
from forerun.executors.torch.drafts.target import CachedTarget
from forerun.executors.torch.features import TorchFeatures
from forerun.executors.torch.memory import check_fits
from forerun.executors.torch.triton.kernels import parts_of
from forerun.interface.draft_model import (
    Candidates,
    DraftExtension,
    DraftLevel,
)
from forerun.interface.features import Features
from forerun.types import AnyArray, Ints

_NOWHERE: AnyArray = np.zeros(0, np.int64)


class TorchAssistantModel(DraftModelBase):
    """DraftModel in torch, on the device and in the dtype of its target, whose keys and values it
    reads in place. Raises MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: CachedTarget, draft: Assistant) -> None:
        arch, limits = draft.architecture, executor.limits
        device, dtype = executor.device, executor.dtype
        taken = {"draft_weight": draft.parameters * dtype.itemsize}
        check_fits(taken, device)
        self.traits, self.facts = declared_layers(draft, limits.max_nodes)
        self.facts |= {f"{part}_bytes": count for part, count in taken.items()}
        self._executor, self._arch = executor, arch
        weights, parts = (
            Weights(draft, device, dtype, Linear, finite=True),
            parts_of(executor.kernels),
        )
        self._parts, self._norm = parts, weights.norm("model.norm.weight")
        self._before, self._behind = weights.linear(BEFORE), weights.linear(BEHIND)
        self._blocks = [
            Block(weights, layer, spec, arch, parts) for layer, spec in enumerate(arch.layer_specs)
        ]
        self._ropes = rotations(arch.ropes, device)
        rows = weights.matrix(arch.head_tensor)
        if draft.vocab < arch.vocab:
            rows = rows.index_select(0, indices(draft.target_ids, device))
        self._head, self._clusters = Linear(rows), draft.clusters
        if draft.clusters is not None:
            self._rows, self._centroids = rows, weights.linear(CENTROIDS)
            self._tokens = indices(draft.clusters.tokens, device)
        # The input of the next step: of draft nodes, then of each slot's root.
        count = limits.max_nodes + limits.slots
        self._outputs = torch.zeros(count, draft.target_hidden, device=device, dtype=dtype)
        executor.request_aux_hidden_states((executor.decoder.arch.layers,))

    @torch.inference_mode()
    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run each row's root, with the features of the token before it. Returns Candidates [s,k].
        Raises EngineError for numbers out of bounds and for features that are missing or not one
        row per token.
        """
        executor = self._executor
        check_extension(extension, executor.limits)
        check_pages(extension, executor.limits)
        about = len(extension.tokens), self.traits.name, TorchFeatures
        streams = own_features(features, *about).tensor()
        roots = roots_of(extension)
        if executor.windows is not None:
            lengths = roots.kv_len.tolist()
            executor.windows.read_all(extension.slots.tolist(), extension.pages, lengths)
        hidden = executor.decoder.final_norm(streams[indices(roots.last, executor.device)])
        tokens = extension.next_tokens[roots.last]
        read, outputs = self._pass(tokens, hidden, roots.start, roots.kv_len, extension.pages)
        self._outputs[indices(executor.limits.max_nodes + extension.slots, outputs.device)] = (
            outputs
        )
        return self._candidates(read[indices(roots.scored, read.device)], extension.candidates)

    @torch.inference_mode()
    def expand(self, level: DraftLevel) -> Candidates:
        """Run draft tokens. Returns candidates [n,k] for each. Raises EngineError for numbers out
        of bounds.
        """
        limits, count = self._executor.limits, len(level.tokens)
        check_level(level, limits)
        roots = limits.max_nodes + np.repeat(level.slots, np.diff(level.start))
        parents = np.where(level.parents < 0, roots, level.parents)
        hidden = self._outputs[indices(parents, self._outputs.device)]
        read, outputs = self._pass(level.tokens, hidden, level.start, level.kv_len, level.pages)
        self._outputs[level.first : level.first + count] = outputs
        return self._candidates(read, level.candidates)

    def _pass(
        self, tokens: Ints, hidden: Tensor, start: Ints, kv_len: Ints, pages: Ints
    ) -> tuple[Tensor, Tensor]:
        """Return the head's input [n,Hd] and the next hidden states [n,H] of nodes that attend to
        their rows' cached tokens.
        """
        executor, arch = self._executor, self._arch
        device, decoder = executor.device, executor.decoder
        check_borrows(kv_len)
        position = np.repeat(kv_len, np.diff(start)).astype(np.int32)
        seen = self._seen(start, kv_len, pages, position - np.int32(1))
        scale = torch.tensor(decoder.arch.embedding_scale).to(executor.dtype).item()
        embedded = (
            F.embedding(indices(tokens, device), decoder.embedding).to(executor.dtype) * scale
        )
        rotary = [rotation(indices(position, device), *rope) for rope in self._ropes]

        def attend_layer(layer: int, heads: AnyHeads) -> Tensor:
            """The target's layers are read with a window w to the last w + 1 positions."""
            spec, reads = arch.layer_specs[layer].attention, arch.layer_specs[layer].reads or 0
            if spec.window is not None:
                spec = replace(spec, window=spec.window + 1)
            keys, values = executor.cache.layers[reads]
            queries = heads.turned()[0].to(executor.dtype)
            return attend(queries, keys, values, seen[executor.cache.kind_of[reads]], spec)

        x = self._before(torch.cat([embedded, hidden], -1))
        more: Tensor | None = None
        for spec, block in zip(arch.layer_specs, self._blocks, strict=True):
            x, normed = block.enter(x, more)
            x, more = block(
                x, normed, rotary[arch.ropes.index(arch.rope_of(spec))], attend_layer, ()
            )
        read = self._parts.norm(x if more is None else x + more, self._norm, arch.norm_eps)
        return read, self._behind(read)

    def _seen(self, start: Ints, kv_len: Ints, pages: Ints, last: Ints) -> list[KeyBlocks]:
        """Return, for each of PagedCache.kinds, the target's keys that nodes attend to, up to the
        positions `last` int32[n]. The nodes write no keys.
        """
        nodes, none = np.split(np.arange(len(last), dtype=np.int32), start[1:-1]), _NOWHERE
        return [
            KeyBlocks(
                [
                    RowKeys(
                        mine,
                        kind.slots_of(pages[row][None], 0, np.arange(int(kv_len[row]))),
                        [(none, mine)],
                    )
                    for row, mine in enumerate(nodes)
                ],
                none,
                last,
                kind,
            )
            for kind in self._executor.cache.kinds
        ]

    def _candidates(self, read: Tensor, count: int) -> Candidates:
        """Return the candidates for the head's input [s,Hd]."""
        if self._clusters is None:
            logits, ids = self._head(read), None
        else:
            best = self._centroids(read).topk(self._clusters.top_k, -1).indices
            ids = self._tokens[best].flatten(1)
            logits = torch.bmm(self._rows[ids], read.unsqueeze(-1)).squeeze(-1)
        found, log_probs = likeliest(logits, count)
        chosen = found if ids is None else ids.gather(-1, found)
        return Candidates(chosen.int().cpu().numpy(), log_probs.cpu().numpy())
