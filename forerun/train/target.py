"""The target as training sees it: whole sequences at once, dense, with features.

Serving's executor steps over pages; here every token of a chat is known, so one causal pass in
big matrix products gives all features. Same weights, same mathematics (tests hold the two
together); bits may differ, which training does not mind.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.layers import rotate, rotation
from forerun.models.checkpoint import Checkpoint

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B,A,T,E], keys [B,G,T,E], values [B,G,T,E]) -> context [B,A,T,E]."""


def embeddings(checkpoint: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embedding and output rows, each float32[V,H]; one tensor where tied."""
    embed = torch.from_numpy(checkpoint.tensor("model.embed_tokens.weight").copy())
    if checkpoint.architecture.tied_head:
        return embed, embed
    return embed, torch.from_numpy(checkpoint.tensor("lm_head.weight").copy())


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

    def stream(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Iterator[Tensor]:
        """Residual streams [B,T,H]: entering each layer in turn, then after the last.

        tokens int64[B,T] at positions int64[T] or [B,T]. The caller switches gradients off.
        """
        cos, sin = rotation(positions, self.frequencies, self.arch.rope.attention_factor)
        turn = cos.to(self.dtype), sin.to(self.dtype)
        x = F.embedding(tokens, self.embed)
        for layer in range(self.arch.layers):
            yield x
            x = self._layer(layer, x, turn, attend)
        yield x

    @torch.no_grad()
    def run(self, tokens: Tensor, features: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """int64[B,T], padded at the end -> features [B,T,F*H], last [B,T,H] after the final norm.

        Feature i is the residual stream entering layer i (transformers' hidden_states[i]).
        """
        positions = torch.arange(tokens.shape[1], device=self.device)
        kept: dict[int, Tensor] = {}
        for layer, x in enumerate(self.stream(tokens, positions, self.causal)):
            if layer in features or layer == self.arch.layers:
                kept[layer] = x
        last = self.final_norm(kept[self.arch.layers])
        return torch.cat([kept[i] for i in features], -1), last

    def causal(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of a whole sequence to itself; the same for every layer."""
        grouped = self.arch.heads != self.arch.kv_heads
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=grouped
        )

    def final_norm(self, x: Tensor) -> Tensor:
        """What the head reads, from the stream after the last layer."""
        return self._norm(x, "model.norm.weight")

    @torch.no_grad()
    def choices(self, last: Tensor) -> Tensor:
        """int64[...]: the argmax over the full vocabulary at each normed hidden state [..., H]."""
        flat = last.reshape(-1, last.shape[-1])
        chunk = max(1, (1 << 26) // len(self.head))
        parts = [(part @ self.head.T).argmax(-1) for part in flat.split(chunk)]
        return torch.cat(parts).view(last.shape[:-1])

    def _layer(self, layer: int, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        arch, prefix = self.arch, f"model.layers.{layer}."
        split = (*x.shape[:2], -1, arch.head_size)
        normed = self._norm(x, f"{prefix}input_layernorm.weight")
        queries = self._linear(normed, f"{prefix}self_attn.q_proj").view(split)
        keys = self._linear(normed, f"{prefix}self_attn.k_proj").view(split)
        values = self._linear(normed, f"{prefix}self_attn.v_proj").view(split)
        if arch.qk_norm:
            queries = self._norm(queries, f"{prefix}self_attn.q_norm.weight")
            keys = self._norm(keys, f"{prefix}self_attn.k_norm.weight")
        queries, keys = rotate(queries, *turn), rotate(keys, *turn)
        context = attend(
            layer, queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
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
