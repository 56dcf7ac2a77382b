"""The target model: embeddings, L pre-norm blocks, final norm, head. All families in one block.

How nodes see each other is not known here: `attend` gets a layer's queries, keys and values
and returns the context.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.layers import (
    PLAIN,
    Elementwise,
    Float8Linear,
    Linear,
    invariant_sizes,
    padded_rows,
    rotation,
)
from forerun.models.checkpoint import Checkpoint

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [M,A,E], keys [M,G,E], values [M,G,E]), rotated -> context [M,A,E]."""


class Weights:
    """A checkpoint's tensors on `device` in `dtype`, read when asked for.

    float8  products inside the blocks run in float8
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, float8: bool
    ) -> None:
        self._float8 = float8
        self._checkpoint, self._names = checkpoint, set(checkpoint.names())
        self.device, self.dtype = device, dtype

    def vector(self, name: str) -> Tensor | None:
        """float32 whatever the dtype, or None where the model has no such tensor."""
        return self._load(name).float() if name in self._names else None

    def matrix(self, name: str) -> Tensor:
        """[N,K] in the dtype."""
        return self._load(name).to(self.dtype)

    def block_linear(self, *names: str) -> Linear | Float8Linear:
        """`linear`, in float8 where that was asked for."""
        return self.linear(*names, kind=Float8Linear if self._float8 else Linear)

    def linear(
        self, *names: str, kind: type[Linear] | type[Float8Linear] = Linear
    ) -> Linear | Float8Linear:
        """The matrices called names, one above the other, as one product."""
        biases = [self.vector(f"{name}.bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        weight = torch.cat([self.matrix(f"{name}.weight") for name in names])
        return kind(weight, torch.cat(present).to(self.dtype) if present else None)

    def _load(self, name: str) -> Tensor:
        array = np.array(self._checkpoint.tensor(name))  # A copy: the file's view is read-only.
        return torch.from_numpy(array).to(self.device)


class Block:
    """One decoder layer."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.attention_norm = weights.vector(f"{prefix}.input_layernorm.weight")
        self.qkv = weights.block_linear(*(f"{attention}.{part}_proj" for part in "qkv"))
        self.q_norm = weights.vector(f"{attention}.q_norm.weight")
        self.k_norm = weights.vector(f"{attention}.k_norm.weight")
        self.out = weights.block_linear(f"{attention}.o_proj")
        self.mlp_norm = weights.vector(f"{prefix}.post_attention_layernorm.weight")
        self.gate_up = weights.block_linear(f"{mlp}.gate_proj", f"{mlp}.up_proj")
        self.down = weights.block_linear(f"{mlp}.down_proj")

    @property
    def linears(self) -> tuple[Linear | Float8Linear, ...]:
        """Its matrix products."""
        return self.qkv, self.out, self.gate_up, self.down


class Decoder:
    """A target's weights and its forward pass over M flat nodes.

    row_sizes  row counts its products may be run at (see layers.padded_rows); empty where bits
               may depend on the batch: anywhere but in float32 on the CPU, as it is written
    float8     the blocks' products run in float8; embedding and head stay in `dtype`
    parts      what stands between the products
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        float8: bool = False,
        parts: Elementwise = PLAIN,
    ) -> None:
        arch = self.arch = checkpoint.architecture
        weights = Weights(checkpoint, device, dtype, float8)
        self._parts = parts
        self._embed = weights.matrix("model.embed_tokens.weight")
        self._blocks = [Block(weights, f"model.layers.{i}") for i in range(arch.layers)]
        self._norm = weights.vector("model.norm.weight")
        self._head = Linear(self._embed) if arch.tied_head else weights.linear("lm_head")
        self._frequencies = torch.from_numpy(arch.rope.frequencies(arch.head_size)).to(device)
        self.row_sizes: tuple[int, ...] = ()
        if device.type == "cpu" and dtype == torch.float32 and parts is PLAIN:
            linears = [linear for block in self._blocks for linear in block.linears]
            self.row_sizes = invariant_sizes([*linears, self._head])

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, features: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Residual stream [M,H] after the last layer, for tokens and positions int64[M].

        M must be `padded_rows` of something. Also returns the stream [M,H] entering each layer
        of `features`, in that order (transformers' hidden_states; L = after the last layer).
        """
        factor = self.arch.rope.attention_factor
        rotary = rotation(positions, self._frequencies, factor)
        x = self.embed(tokens)
        entering = []
        for layer, block in enumerate(self._blocks):
            entering.append(x)
            x = x + self._attention(layer, block, x, rotary, attend)
            x = x + self._mlp(block, x)
        entering.append(x)
        return x, [entering[layer] for layer in features]

    def embed(self, tokens: Tensor) -> Tensor:
        """[M,H] for tokens int64[M]."""
        return F.embedding(tokens, self._embed)

    def final_norm(self, last: Tensor) -> Tensor:
        """[n,H]: what the head reads, from residual streams [n,H] after the last layer."""
        return self._parts.norm(last, self._norm, self.arch.norm_eps)

    def logits(self, last: Tensor, out: Tensor | None = None) -> Tensor:
        """float32[n,V] from residual streams [n,H] after the last layer; into `out`, if given."""
        padding = padded_rows(len(last), self.row_sizes) - len(last)
        normed = self.final_norm(F.pad(last, (0, 0, 0, padding)))
        logits = self._head(normed)[: len(last)]
        return logits.float() if out is None else out.copy_(logits)

    def _attention(
        self, layer: int, block: Block, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        arch = self.arch
        parts = [arch.heads, arch.kv_heads, arch.kv_heads]
        qkv = block.qkv(self._parts.norm(x, block.attention_norm, arch.norm_eps))
        q, k, v = qkv.view(len(x), -1, arch.head_size).split(parts, 1)
        if arch.qk_norm:
            q, k = (
                self._parts.norm(heads, weight, arch.norm_eps)
                for heads, weight in ((q, block.q_norm), (k, block.k_norm))
            )
        q, k = (self._parts.rotate(heads, *rotary) for heads in (q, k))
        return block.out(attend(layer, q, k, v).flatten(1))

    def _mlp(self, block: Block, x: Tensor) -> Tensor:
        gate_up = block.gate_up(self._parts.norm(x, block.mlp_norm, self.arch.norm_eps))
        return block.down(self._parts.gate(*gate_up.chunk(2, -1)))
