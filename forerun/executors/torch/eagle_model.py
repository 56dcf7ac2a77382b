"""An EAGLE draft head in torch, beside its target: what was trained (eagle.py), in fewer and larger
launches.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.errors import ModelError
from forerun.executors.torch.draft_cache import DraftCache
from forerun.executors.torch.eagle import EagleHead
from forerun.executors.torch.layers import PLAIN, Heads, plain
from forerun.executors.torch.level_model import LevelModel, Nodes
from forerun.executors.torch.memory import check_fits
from forerun.executors.torch.target import TorchTarget
from forerun.executors.torch.weights import some_rows, stacked
from forerun.interface.draft_model import (
    DraftModelTraits,
    FeatureNeeds,
)
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_folder import DraftFile


class TorchEagleModel(LevelModel):
    """DraftModel in torch, on the device and in the dtype of its target. `EagleHead.forward` is its
    slow twin.

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
        self._parts = PLAIN if executor.kernels is None else executor.kernels.parts
        module = self._module = _loaded(executor, checkpoint, draft)
        layer = self._layer = module.layer
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv = stacked(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = stacked(mlp.gate_proj, mlp.up_proj)
        executor.request_aux_hidden_states(head.features)

    def enter(self, features: Tensor | None) -> Tensor:
        """The target's features, fused."""
        assert features is not None, "the traits ask for features"
        about, module, eps = self._about, self._module, self._about.norm_eps
        if about.algorithm == "eagle1":
            return self._executor.decoder.final_norm(features)
        if about.feature_norm == "joint":
            features = self._parts.norm(features, module.input_norm.weight, eps)
        if about.feature_norm == "each":
            weights = [norm.get_parameter("weight") for norm in module.fc_norm]
            chunks = zip(features.split(about.target_hidden, -1), weights, strict=True)
            features = torch.cat([self._parts.norm(c, weight, eps) for c, weight in chunks], -1)
        return F.linear(features, module.fc.weight, module.fc.bias)

    def forward(self, nodes: Nodes, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The head's one layer over the next tokens, each beside its hidden state."""
        module, layer, about, parts = self._module, self._layer, self._about, self._parts
        eps = about.norm_eps
        if about.algorithm == "eagle1":
            embedded = F.embedding(nodes.tokens, self._embedding)
            residual = x = module.fc(torch.cat([embedded, hidden], -1))
        else:
            norms = layer.input_layernorm.weight, layer.hidden_norm.weight
            x = parts.draft_inputs(nodes.tokens, self._embedding, hidden, norms, eps)
            residual = x[:, about.hidden :] if about.normed_residual else hidden
        qkv = F.linear(x, self._qkv).view(len(x), -1, about.head_size)
        heads = Heads(qkv, about.kv_heads, None, None, eps, nodes.rotary[0], parts)
        mixed = layer.self_attn.o_proj(plain(nodes.attend(0, heads)).flatten(1))
        after = layer.post_attention_layernorm.weight
        residual, normed = parts.add_norm(residual, mixed, after, eps)
        opened, up = F.linear(normed, self._gate_up).chunk(2, -1)
        fed = layer.mlp.down_proj(parts.gate(opened, up))
        if about.algorithm == "eagle1":
            output = residual + fed
            return output, output
        output, read = parts.add_norm(residual, fed, module.norm.weight, eps)
        return read, read if about.normed_feedback else output

    def logits(self, read: Tensor) -> Tensor:
        """[n,Vd]."""
        return F.linear(read, self._module.lm_head.weight)

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
    return head.requires_grad_(False)
