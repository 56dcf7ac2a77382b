"""One pass of a draft head within a captured round: EagleHead, its slow twin, in fewer and
larger launches.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from forerun.executors.torch.eagle_model import HeadArrays
from forerun.executors.torch.layers import Elementwise, Heads, Rotary


class HeadPass:
    """A head's weights as a round multiplies by them. The module's own become views of these."""

    def __init__(self, arrays: HeadArrays, parts: Elementwise) -> None:
        self._arrays, self._module, self._parts = arrays, arrays.module, parts
        self._about = arrays.module.head
        attention, mlp = self._module.layer.self_attn, self._module.layer.mlp
        self._qkv = _stacked(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = _stacked(mlp.gate_proj, mlp.up_proj)

    def enter(self, features: Tensor) -> Tensor:
        """[n,H]: what the head reads of the target's features [n,F*H]."""
        about, module, eps = self._about, self._module, self._about.norm_eps
        if about.algorithm == "eagle1":
            return self._arrays.normed(features)
        if about.feature_norm == "joint":
            features = self._parts.norm(features, module.input_norm.weight, eps)
        if about.feature_norm == "each":
            weights = [norm.get_parameter("weight") for norm in module.fc_norm]
            chunks = zip(features.split(about.target_hidden, -1), weights, strict=True)
            features = torch.cat([self._parts.norm(c, weight, eps) for c, weight in chunks], -1)
        return F.linear(features, module.fc.weight, module.fc.bias)

    def logits(self, read: Tensor) -> Tensor:
        """[n,Vd] from what `__call__` says the head reads [n,H]."""
        return F.linear(read, self._module.lm_head.weight)

    def __call__(
        self, tokens: Tensor, hidden: Tensor, rotary: Rotary, attend: Callable[[Heads], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What the head reads and what the next step receives, both [n,H], from target ids int[n]
        of the next token beside hidden [n,H].
        """
        embedded = F.embedding(tokens, self._arrays.embedding)
        module, layer, about, parts = self._module, self._module.layer, self._about, self._parts
        eps = about.norm_eps
        if about.algorithm == "eagle1":
            residual = x = module.fc(torch.cat([embedded, hidden], -1))
        else:
            normed = parts.norm(hidden, layer.hidden_norm.weight, eps)
            x = torch.cat([parts.norm(embedded, layer.input_layernorm.weight, eps), normed], -1)
            residual = normed if about.normed_residual else hidden
        qkv = F.linear(x, self._qkv).view(len(x), -1, about.head_size)
        heads = Heads(qkv, about.kv_heads, None, None, eps, rotary, parts)
        mixed = layer.self_attn.o_proj(attend(heads).flatten(1))
        after = layer.post_attention_layernorm.weight
        residual, normed = parts.add_norm(residual, mixed, after, eps)
        opened, up = F.linear(normed, self._gate_up).chunk(2, -1)
        fed = layer.mlp.down_proj(parts.gate(opened, up))
        if about.algorithm == "eagle1":
            output = residual + fed
            return output, output
        output, read = parts.add_norm(residual, fed, module.norm.weight, eps)
        return read, read if about.normed_feedback else output


def _stacked(*linears: nn.Linear) -> Tensor:
    """Their weights, one above the other, kept once."""
    whole = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(
        linears, whole.split([len(each.weight) for each in linears]), strict=True
    ):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return whole
