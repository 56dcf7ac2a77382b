"""An EAGLE draft head in torch, beside its target: the class that was trained, over pages and
trees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.errors import ModelError
from forerun.executors.torch.draft_cache import (
    DraftCache,
    DraftPass,
)
from forerun.executors.torch.eagle import EagleHead
from forerun.executors.torch.executor import check_fits
from forerun.executors.torch.hidden_state_model import HiddenStateModel
from forerun.executors.torch.kv import PagedCache
from forerun.executors.torch.layers import rotation
from forerun.executors.torch.target import TorchTarget
from forerun.executors.torch.weights import some_rows
from forerun.interface.draft_model import (
    DraftModelTraits,
    FeatureNeeds,
)
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_folder import DraftFile


@dataclass(frozen=True, slots=True)
class HeadArrays:
    """A draft head as it lies on its device.

    module    the trained class; `head` in it says what it is
    cache     its pages, which are the target's, and as much scratch
    outputs   [max_nodes + slots + 1, H] what a next draft step receives: of draft nodes, of each
              slot's last extension, and of nobody
    turning   float32[E/2] frequencies of its rotary positions
    ids       int32[Vd] target id of every draft id
    embedding [V,H] of target ids
    normed    an EAGLE-1 head reads its feature through this, the target's final norm
    """

    module: EagleHead
    cache: PagedCache
    outputs: Tensor
    turning: Tensor
    ids: Tensor
    embedding: Tensor
    normed: Callable[[Tensor], Tensor]


class TorchEagleModel(HiddenStateModel):
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
        super().__init__(
            executor, traits, DraftCache(head.cache, limits, device, dtype), head.hidden
        )
        self._about = head
        self._embedding = self._own_embedding(draft)
        self._head = _loaded(executor, checkpoint, draft)
        frequencies = head.rope.frequencies(head.head_size)
        self._frequencies = torch.from_numpy(frequencies).to(device)
        executor.request_aux_hidden_states(head.features)

    def arrays(self) -> HeadArrays:
        """What it works on, for who drafts without asking pass by pass."""
        target_ids = self.traits.target_ids.astype(np.int32)
        return HeadArrays(
            module=self._head,
            cache=self._cache.parts[0],
            outputs=self._outputs,
            turning=self._frequencies,
            ids=torch.from_numpy(target_ids).to(self._executor.device),
            embedding=self._executor.decoder.embedding
            if self._embedding is None
            else self._embedding,
            normed=self._executor.decoder.final_norm,
        )

    def forward(self, work: DraftPass, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the output head reads, and what a next step receives, both [n,H]."""
        factor = self._about.rope.attention_factor
        cos, sin = rotation(self.index(work.position), self._frequencies, factor)
        embedded = self._embed(self.index(work.tokens))
        read, outputs = self._head(embedded, hidden, cos, sin, partial(work.attend, 0))
        return read, outputs

    def logits(self, read: Tensor) -> Tensor:
        """[n,Vd]."""
        return self._head.logits(read)

    def enter(self, features: Tensor) -> Tensor:
        """The target's features, fused."""
        if self._about.algorithm == "eagle1":
            features = self._executor.decoder.final_norm(features)
        return self._head.fuse(features)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        return self._executor.decoder.embed(tokens)

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
    with torch.device("meta"):
        head = EagleHead(draft.head)
    weights = {}
    for name, _ in head.named_parameters():
        if name == "lm_head.weight" and not draft.head.trained_head:
            own = "model.embed_tokens.weight" if checkpoint.architecture.tied_head else name
            weights[name] = some_rows(
                checkpoint, own, draft.target_ids, executor.device, executor.dtype
            )
        else:
            values = torch.from_numpy(np.array(draft.tensor(name)))
            weights[name] = values.to(executor.device, executor.dtype)
    head.load_state_dict(weights, assign=True)
    if executor.kernels is not None:
        head.use(executor.kernels.parts)
    return head.requires_grad_(False)
