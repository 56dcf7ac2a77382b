"""The target's own prediction layer in torch, over pages and trees: what it computes is said in
models/prediction_layers.py. Positions are an EAGLE head's (eagle_model.py).
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.decoder import Block
from forerun.executors.torch.draft_cache import DraftCache, DraftPass
from forerun.executors.torch.executor import check_fits
from forerun.executors.torch.hidden_state_model import HiddenStateModel
from forerun.executors.torch.layers import PLAIN, Linear, rotation
from forerun.executors.torch.target import TorchTarget
from forerun.executors.torch.weights import Weights
from forerun.interface.draft_model import DraftModelTraits, FeatureNeeds
from forerun.models.prediction_layers import (
    EMBEDDING_NORM,
    FUSE,
    HIDDEN_NORM,
    PredictionLayers,
)


class TorchPredictionModel(HiddenStateModel):
    """DraftModel in torch, on the device and in the dtype of its target, whose embedding and head
    it uses.

    Raises MemoryPlanError where it does not fit.
    """

    def __init__(self, executor: TorchTarget, draft: PredictionLayers) -> None:
        arch, device, dtype = draft.architecture, executor.device, executor.dtype
        traits = DraftModelTraits(
            name="nextn",
            cache=draft.cache,
            target_ids=draft.target_ids,
            max_nodes=executor.limits.max_nodes,
            features=FeatureNeeds("last"),
        )
        self._bytes = {
            "draft_weight": draft.parameters * dtype.itemsize,
            "draft_cache": DraftCache.bytes(draft.cache, executor.limits, dtype),
        }
        check_fits(self._bytes, device)
        attention = tuple(spec.attention for spec in arch.layer_specs)
        cache = DraftCache(draft.cache, executor.limits, device, dtype, attention=attention)
        super().__init__(executor, traits, cache, arch.hidden)
        self._draft, self._arch, self._rope = draft, arch, arch.layer_specs[0].rope
        self._parts = executor.kernels.parts if executor.kernels is not None else PLAIN
        weights = Weights(draft, device, dtype, Linear)
        self._block = Block(weights, 0, arch.layer_specs[0], arch, self._parts)
        self._embedding_norm = weights.norm(EMBEDDING_NORM)
        self._hidden_norm = weights.norm(HIDDEN_NORM)
        self._final_norm = weights.norm("model.norm.weight")
        self._fuse = weights.linear(FUSE.removesuffix(".weight"))
        self._embedding = self._own_embedding(weights)
        self._head = self._own_head(weights)
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

    def enter(self, features: Tensor) -> Tensor:
        """The target's hidden states after its final norm, from before it."""
        return self._executor.decoder.final_norm(features)

    def forward(self, work: DraftPass, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [n,H] after the layer's final norm, twice: they are read, and fed back."""
        eps, norm = self._arch.norm_eps, self._parts.norm
        token = norm(self._embed(self.index(work.tokens)), self._embedding_norm, eps)
        parts = [token, norm(hidden, self._hidden_norm, eps)]
        x = self._fuse(torch.cat(parts[::-1] if self._draft.hidden_first else parts, -1))
        position = self.index(work.position)
        rotary = rotation(position, self._frequencies, self._rope.attention_factor)
        out = norm(self._block(x, rotary, work.attend, ()), self._final_norm, eps)
        return out, out

    def logits(self, read: Tensor) -> Tensor:
        """float32[n,Vd]."""
        if self._head is None:
            return self._executor.decoder.read(read, len(read))
        return self._head(read).float()

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        return self._executor.decoder.embed(tokens)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": "nextn",
            "layers": self._draft.count,
            "vocab": self.traits.vocab,
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }
