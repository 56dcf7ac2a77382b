"""The target as training sees it: whole sequences at once, dense, with features.

Serving's executor steps over pages; here every token of a chat is known, so one causal pass in
big matrix products gives all features. Same weights, same mathematics (tests hold the two
together); bits may differ, which training does not mind.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.eagle import rotate, rotation
from forerun.models.checkpoint import Checkpoint


class DenseTarget:
    """A target's weights on `device` in `dtype`, and one causal pass over them."""

    def __init__(self, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> None:
        arch = self.arch = checkpoint.architecture
        self.device, self.dtype = device, dtype
        self.weights = {
            name: torch.from_numpy(checkpoint.tensor(name).copy()).to(device, dtype)
            for name in checkpoint.names()
        }
        self.embed = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.embed)
        frequencies = arch.rope.frequencies(arch.head_size)
        self.frequencies = torch.from_numpy(frequencies).to(device)

    @torch.no_grad()
    def run(self, tokens: Tensor, features: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """int64[B,T], padded at the end -> features [B,T,F*H], last [B,T,H] after the final norm.

        Feature i is the residual stream entering layer i (transformers' hidden_states[i]).
        """
        positions = torch.arange(tokens.shape[1], device=self.device)
        cos, sin = rotation(positions, self.frequencies, self.arch.rope.attention_factor)
        cos, sin = cos.to(self.dtype), sin.to(self.dtype)
        x = F.embedding(tokens, self.embed)
        kept: dict[int, Tensor] = {}
        for layer in range(self.arch.layers):
            if layer in features:
                kept[layer] = x
            x = self._layer(f"model.layers.{layer}.", x, cos, sin)
        kept[self.arch.layers] = x
        last = self._norm(x, "model.norm.weight")
        return torch.cat([kept[i] for i in features], -1), last

    @torch.no_grad()
    def choices(self, last: Tensor) -> Tensor:
        """int64[...]: the argmax over the full vocabulary at each hidden state [..., H]."""
        flat = last.reshape(-1, last.shape[-1])
        chunk = max(1, (1 << 26) // len(self.head))
        parts = [(part @ self.head.T).argmax(-1) for part in flat.split(chunk)]
        return torch.cat(parts).view(last.shape[:-1])

    def _layer(self, prefix: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        arch, batch = self.arch, x.shape[:2]
        normed = self._norm(x, f"{prefix}input_layernorm.weight")
        queries = self._linear(normed, f"{prefix}self_attn.q_proj").view(*batch, -1, arch.head_size)
        keys = self._linear(normed, f"{prefix}self_attn.k_proj").view(*batch, -1, arch.head_size)
        values = self._linear(normed, f"{prefix}self_attn.v_proj").view(*batch, -1, arch.head_size)
        if arch.qk_norm:
            queries = self._norm(queries, f"{prefix}self_attn.q_norm.weight")
            keys = self._norm(keys, f"{prefix}self_attn.k_norm.weight")
        context = F.scaled_dot_product_attention(
            rotate(queries, cos, sin).transpose(1, 2),
            rotate(keys, cos, sin).transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            enable_gqa=arch.heads != arch.kv_heads,
        )
        x = x + self._linear(context.transpose(1, 2).flatten(-2), f"{prefix}self_attn.o_proj")
        normed = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        gate = F.silu(self._linear(normed, f"{prefix}mlp.gate_proj"))
        up = self._linear(normed, f"{prefix}mlp.up_proj")
        return x + self._linear(gate * up, f"{prefix}mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.arch.norm_eps)
        return (wide * self.weights[name].float()).to(x.dtype)
