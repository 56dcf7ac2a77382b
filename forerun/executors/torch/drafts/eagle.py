"""An EAGLE draft head in torch: the network that is trained and that serves, and the draft model
that runs it over pages beside its target.

EAGLE-3 (arXiv 2503.01840, section 3): features from inside the target are fused to one hidden
state; one decoder layer reads it beside the embedding of the next token; its output is fed back
as the next hidden state. EAGLE-1/2 heads (arXiv 2401.15077) fuse embedding and hidden state
first. How rows see each other is the caller's affair (draft_layer.py).
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from forerun.errors import ModelError
from forerun.executors.torch.decoder.elementwise import Elementwise, Rotary
from forerun.executors.torch.decoder.weights import some_rows
from forerun.executors.torch.drafts.draft_cache import DraftCache
from forerun.executors.torch.drafts.draft_layer import (
    TRAINED,
    Attend,
    DraftLayer,
    LayerShape,
    Norm,
    for_serving,
)
from forerun.executors.torch.drafts.level_model import LevelModel, Nodes
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.memory import check_fits
from forerun.executors.torch.triton.kernels import parts_of
from forerun.interface.draft_model import (
    DraftModelTraits,
    FeatureNeeds,
)
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_config import DraftHead
from forerun.models.draft_folder import DraftFile


class EagleHead(nn.Module):
    """A draft head. Parameter names are the canonical tensor names of forerun.models.draft_config.

    `lm_head` is a parameter also where it was copied from the target; the trainer freezes it.
    """

    def __init__(self, head: DraftHead, parts: Elementwise = TRAINED) -> None:
        super().__init__()
        self.head, self.parts = head, parts
        width = 2 * head.hidden
        if head.algorithm == "eagle3":
            width = head.target_hidden * len(head.features)
            self.norm = Norm(head.hidden, head.norm_eps)
        self.fc = nn.Linear(width, head.hidden, bias=head.fc_bias)
        if head.feature_norm == "joint":
            self.input_norm = Norm(width, head.norm_eps)
        if head.feature_norm == "each":
            self.fc_norm = nn.ModuleList(
                Norm(head.target_hidden, head.norm_eps) for _ in head.features
            )
        self.layers = nn.ModuleList([DraftLayer(_shape(head), parts)])
        self.lm_head = nn.Linear(head.hidden, head.vocab, bias=False)

    @property
    def layer(self) -> DraftLayer:
        """The one decoder layer."""
        (layer,) = self.layers
        assert isinstance(layer, DraftLayer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden state [..., H] from the target's features [..., F*H], F features side by side.

        EAGLE-1's single feature is the hidden state already.
        """
        if self.head.algorithm == "eagle1":
            return features
        about, norm = self.head, self.parts.norm
        if about.feature_norm == "joint":
            features = norm(features, self.input_norm.weight, about.norm_eps)
        if about.feature_norm == "each":
            weights = [each.get_parameter("weight") for each in self.fc_norm]
            chunks = zip(features.split(about.target_hidden, -1), weights, strict=True)
            features = torch.cat([norm(c, weight, about.norm_eps) for c, weight in chunks], -1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self,
        tokens: Tensor,
        embedding: Tensor,
        hidden: Tensor,
        rotary: Rotary,
        attend: Attend,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One draft step: next tokens int[...], rows of `embedding` [V,H], beside hidden [..., H].

        rotary: of the rows' positions. Returns what the head reads and what the next step receives,
        both [..., H]; they differ unless `normed_feedback`.

        only int64[R]: of N rows [N,H] these run; all N give keys and values. Then results are
        [R,H].
        """
        layer, about, parts = self.layer, self.head, self.parts
        if about.algorithm == "eagle1":
            embedded = F.embedding(tokens, embedding).to(hidden.dtype)
            residual = x = self.fc(torch.cat([embedded, hidden], -1))
        else:
            norms = layer.entry_norm(), layer.entry_norm("hidden_norm")
            x = parts.draft_inputs(tokens, embedding, hidden, norms, about.norm_eps)
            residual = x[..., about.hidden :] if about.normed_residual else hidden
        residual, fed = layer.run(x, residual, rotary, attend, 0, only)
        if about.algorithm == "eagle1":
            output = residual + fed
            return output, output
        output, read = parts.add_norm(residual, fed, self.norm.weight, about.norm_eps)
        return read, read if about.normed_feedback else output

    def logits(self, read: Tensor) -> Tensor:
        """Draft logits [..., Vd] from what `forward` says the head reads."""
        logits: Tensor = self.lm_head(read)
        return logits


def _shape(head: DraftHead) -> LayerShape:
    norms = ("input_layernorm", "hidden_norm") if head.algorithm == "eagle3" else ()
    sizes = head.hidden, head.heads, head.kv_heads, head.head_size, head.ffn, head.norm_eps
    return LayerShape(*sizes, input_width=head.input_width, entry_norms=norms)


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
