"""An EAGLE draft head in torch, beside its target: the network that was trained (eagle.py), over
pages.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.executors.torch.draft_cache import DraftCache
from forerun.executors.torch.draft_layer import for_serving
from forerun.executors.torch.eagle import EagleHead
from forerun.executors.torch.kernels import parts_of
from forerun.executors.torch.level_model import LevelModel, Nodes
from forerun.executors.torch.memory import check_fits
from forerun.executors.torch.target import TorchTarget
from forerun.executors.torch.weights import some_rows
from forerun.interface.draft_model import (
    DraftModelTraits,
    FeatureNeeds,
)
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_folder import DraftFile


class TorchEagleModel(LevelModel):
    """DraftModel in torch, on the device and in the dtype of its target.

    Raises ModelError for a head without an embedding of its width, MemoryPlanError where it does
    not fit.
    """

    def __init__(self, executor: TorchTarget, checkpoint: Checkpoint, draft: DraftFile) -> None:
        head, limits = draft.head, executor.limits
        last = head.algorithm == "eagle1"
        traits = DraftModelTraits(
            name=head.algorithm,
            cache=head.cache,
            target_ids=draft.target_ids,
            max_nodes=limits.max_nodes,
            features=FeatureNeeds("last") if last else FeatureNeeds("aux", head.features),
        )
        device, dtype = executor.device, executor.dtype
        self._bytes = {
            "draft_weight": head.parameters * dtype.itemsize,
            "draft_cache": DraftCache.bytes(head.cache, limits, dtype),
        }
        check_fits(self._bytes, device)
        cache = DraftCache(head.cache, limits, device, dtype)
        super().__init__(
            executor, traits, cache, (head.rope,), (head.heads, head.head_size), head.hidden
        )
        self._about = head
        embedding = self._own_embedding(draft)
        self._embedding = executor.decoder.embedding if embedding is None else embedding
        self._module = _loaded(executor, checkpoint, draft)
        executor.request_aux_hidden_states(head.features)

    def enter(self, features: Tensor | None) -> Tensor:
        """The target's features, fused."""
        assert features is not None, "the traits ask for features"
        if self._about.algorithm == "eagle1":
            return self._executor.decoder.final_norm(features)
        return self._module.fuse(features)

    def forward(self, nodes: Nodes, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The head's one layer over the next tokens, each beside its hidden state."""
        return self._module.forward(
            nodes.tokens, self._embedding, hidden, nodes.rotary[0], nodes.attend
        )

    def logits(self, read: Tensor) -> Tensor:
        """[n,Vd]."""
        return self._module.logits(read)

    def _own_embedding(self, draft: DraftFile) -> Tensor | None:
        """The head's embedding, where the target's is not as wide as the head."""
        head, name = draft.head, "embed_tokens.weight"
        if head.hidden == head.target_hidden:
            return None
        if name not in draft.files or not head.trained_head:
            raise ModelError(
                f"{draft.path}: a head of width {head.hidden} beside a target of width "
                f"{head.target_hidden} needs {name} and lm_head.weight of its own"
            )
        weights = torch.from_numpy(np.array(draft.tensor(name)))
        return weights.to(self._executor.device, self._executor.dtype)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": self._about.algorithm,
            "vocab": self.traits.vocab,
            "features": list(self._about.features),
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }


def _loaded(executor: TorchTarget, checkpoint: Checkpoint, draft: DraftFile) -> EagleHead:
    """The trained class with the file's weights; the output head is the target's if not its own."""
    device, dtype = executor.device, executor.dtype

    def weights(name: str) -> Tensor:
        if name == "lm_head.weight" and not draft.head.trained_head:
            own = "model.embed_tokens.weight" if checkpoint.architecture.tied_head else name
            return some_rows(checkpoint, own, draft.target_ids, device, dtype)
        return torch.from_numpy(np.array(draft.tensor(name))).to(device, dtype)

    return for_serving(lambda: EagleHead(draft.head, parts_of(executor.kernels)), weights)
