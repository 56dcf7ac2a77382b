"""The target's own prediction layers in torch, over pages and trees: what they compute is said in
models/prediction_layers.py, where they find it in executors/layer_states.py. Positions are an EAGLE
head's (hidden_state_model.py).
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.layer_states import LayerStates, layer_read, layers_at
from forerun.executors.torch.decoder import Block, apart
from forerun.executors.torch.draft_cache import (
    DraftCache,
    DraftPass,
    check_extension,
    check_level,
)
from forerun.executors.torch.executor import check_fits
from forerun.executors.torch.features import on_device
from forerun.executors.torch.hidden_state_model import indices, likeliest
from forerun.executors.torch.layers import PLAIN, Elementwise, Linear, Rotary, rotation
from forerun.executors.torch.target import TorchTarget
from forerun.executors.torch.weights import Weights
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftLevel,
    DraftModelTraits,
    Extension,
    FeatureNeeds,
)
from forerun.interface.features import Features
from forerun.models.prediction_layers import (
    EMBEDDING_NORM,
    FINAL_NORM,
    FUSE,
    HIDDEN_NORM,
    PredictionLayers,
)
from forerun.types import AnyArray, Ints


class _Layer:
    """One of a draft's layers."""

    def __init__(
        self, number: int, draft: PredictionLayers, weights: Weights, parts: Elementwise
    ) -> None:
        arch = draft.architecture
        self._parts, self._eps, self._hidden_first = parts, arch.norm_eps, draft.hidden_first
        self._block = Block(weights, number, arch.layer_specs[number], arch, parts)
        self._norms = [
            weights.norm(draft.own(number, part))
            for part in (EMBEDDING_NORM, HIDDEN_NORM, FINAL_NORM)
        ]
        self._fuse = weights.linear(draft.own(number, FUSE).removesuffix(".weight"))

    def __call__(self, embedded: Tensor, hidden: Tensor, work: DraftPass, rotary: Rotary) -> Tensor:
        """Outputs [n,H] after the layer's final norm."""
        norm, eps = self._parts.norm, self._eps
        of_embedding, of_hidden, final = self._norms
        parts = [norm(embedded, of_embedding, eps), norm(hidden, of_hidden, eps)]
        x = self._fuse(torch.cat(parts[::-1] if self._hidden_first else parts, -1))
        entering, normed = self._block.enter(x, None)
        x, more = self._block(entering, normed, rotary, apart(work.attend), ())
        return self._parts.add_norm(x, more, final, eps)[1]


class TorchPredictionModel:
    """DraftModel in torch, on the device and in the dtype of its target, whose embedding and head
    it uses.

    Raises MemoryPlanError where it does not fit.
    """

    def __init__(self, executor: TorchTarget, draft: PredictionLayers) -> None:
        arch, limits = draft.architecture, executor.limits
        device, dtype = executor.device, executor.dtype
        self.traits = DraftModelTraits(
            name="nextn",
            cache=draft.cache,
            target_ids=draft.target_ids,
            max_nodes=limits.max_nodes,
            features=FeatureNeeds("last"),
        )
        self._rows = LayerStates(limits)
        shape = draft.count, self._rows.rows, arch.hidden
        self._bytes = {
            "draft_weight": draft.parameters * dtype.itemsize,
            "draft_cache": DraftCache.bytes(draft.cache, limits, dtype)
            + shape[0] * shape[1] * shape[2] * dtype.itemsize,
        }
        check_fits(self._bytes, device)
        self._executor, self._draft, self._arch = executor, draft, arch
        attention = tuple(spec.attention for spec in arch.layer_specs)
        begins = tuple(range(draft.count))
        self._cache = DraftCache(
            draft.cache, limits, device, dtype, attention=attention, begins=begins
        )
        self._states = torch.zeros(shape, device=device, dtype=dtype)
        weights = Weights(draft, device, dtype, Linear, finite=True)
        parts = executor.kernels.parts if executor.kernels is not None else PLAIN
        self._layers = [_Layer(number, draft, weights, parts) for number in range(draft.count)]
        self._embedding = self._own_embedding(weights)
        self._head = self._own_head(weights)
        self._rope = arch.layer_specs[0].rope
        frequencies = self._rope.frequencies(arch.head_size)
        self._frequencies = torch.from_numpy(frequencies).to(device)
        executor.request_aux_hidden_states((executor.decoder.arch.layers,))

    def _own_embedding(self, weights: Weights) -> Tensor | None:
        name = "model.embed_tokens.weight"
        return weights.matrix(name) if name in self._draft.files else None

    def _own_head(self, weights: Weights) -> Linear | None:
        """Where the head is not the target's, or has only some of its rows."""
        name = "lm_head.weight"
        if self._draft.vocab == self._arch.vocab and name not in self._draft.files:
            return None
        if name not in self._draft.names():
            name = "model.embed_tokens.weight"
        ids = torch.from_numpy(self._draft.target_ids.astype("int64")).to(weights.device)
        return Linear(weights.matrix(name).index_select(0, ids))

    @torch.inference_mode()
    def extend(self, extension: Extension, features: Features | None) -> Candidates:
        """Run the tokens after those that became permanent through all layers, the first beside
        these' features.
        """
        executor, count = self._executor, len(extension.tokens)
        if features is None:
            raise EngineError("prediction layers were extended without the target's features")
        check_extension(extension, self.traits, executor.limits.vocab, executor.limits)
        streams = on_device(features, executor.device, executor.dtype)
        if len(streams) != count:
            raise EngineError("an extension whose features are not one row per token")
        work, before = self._cache.extension(extension), self._index(self._rows.before(extension))
        embedded, rotary = self._embed(work.tokens), self._rotary(work)
        for number, layer in enumerate(self._layers):
            hidden = (
                executor.decoder.final_norm(streams)
                if number == 0
                else self._states[number - 1, before]
            )
            self._states[number, :count] = layer(embedded, hidden, work, rotary)
        found = self._candidates(self._states[0], work.scored, extension.candidates)
        self._cache.commit(extension)
        kept = self._rows.kept(extension)
        self._states[:, self._index(kept.targets)] = self._states[:, self._index(kept.nodes)]
        return found

    @torch.inference_mode()
    def expand(self, level: DraftLevel) -> Candidates:
        """Run draft tokens through the layer of their depth, and through those of greater ones for
        what may hang below.
        """
        limits, begin = self._executor.limits, level.first
        check_level(level, self.traits, limits.vocab, limits)
        depth, count = self._rows.depth(level), len(self._layers)
        work, above = self._cache.level(level), self._index(self._rows.above(level))
        embedded, rotary = self._embed(work.tokens), self._rotary(work)
        running = layers_at(depth, count)
        for number in running:
            hidden = self._states[layer_read(number, depth, count), above]
            out = self._layers[number](embedded, hidden, work, rotary)
            self._states[number, begin : begin + len(out)] = out
        outputs = self._states[running[0], begin : begin + len(level.tokens)]
        return self._candidates(outputs, work.scored, level.candidates)

    def block(self, block: DraftBlock) -> BlockCandidates:
        """They propose level by level. Raises EngineError."""
        raise EngineError("prediction layers propose level by level, not a block")

    def _candidates(self, outputs: Tensor, scored: Ints, count: int) -> Candidates:
        """Of nodes `scored`, by what the head makes of their outputs."""
        read = outputs[self._index(scored)]
        if self._head is None:
            return likeliest(self._executor.decoder.read(read, len(read)), count)
        return likeliest(self._head(read), count)

    def _rotary(self, work: DraftPass) -> Rotary:
        position = self._index(work.position)
        return rotation(position, self._frequencies, self._rope.attention_factor)

    def _embed(self, tokens: Ints) -> Tensor:
        if self._embedding is not None:
            return F.embedding(self._index(tokens), self._embedding)
        return self._executor.decoder.embed(self._index(tokens))

    def _index(self, values: AnyArray) -> Tensor:
        return indices(values, self._executor.device)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": "nextn",
            "layers": self._draft.count,
            "vocab": self.traits.vocab,
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }
