"""What a decoder is, in no framework: its sizes, its variations, its tensors.

One block serves all families: RMSNorm, rotary grouped-query attention, SwiGLU. They differ by
biases and by a norm on queries and keys (Llama: Touvron et al. 2023; Mistral: Jiang et al. 2023;
Qwen2, Qwen3: their technical reports).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from forerun.errors import ModelError
from forerun.models.rope import Rope

__all__ = ["FAMILIES", "Architecture", "Family", "Rope", "expected_tensors", "family_named"]

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = get_args(Family)

_MOST = {
    "layers": 1024,
    "hidden": 1 << 18,
    "heads": 4096,
    "kv_heads": 4096,
    "head_size": 4096,
    "ffn": 1 << 20,
    "vocab": 1 << 24,
    "context": 1 << 30,
}
"""Larger than any model there is; a file that asks for more is damaged or hostile."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers an executor needs to run a checkpoint.

    layers L, hidden H, heads A, kv_heads G, head_size E, ffn I, vocab V
    context         longest sequence this description is exact for, in tokens: what the model
                    was trained for, or its sliding window where that is shorter
    norm_eps        added to the mean square in every RMSNorm
    rope            rotary frequencies, half-split layout
    qkv_bias        q_proj, k_proj and v_proj have biases; o_bias, mlp_bias likewise
    qk_norm         RMSNorm over E on each query and key head, before the rotation
    tied_head       the output head is the embedding
    sliding_window  tokens a query sees, itself included, or None; `context` never exceeds it,
                    so an executor need not know it
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    context: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Raise ModelError for numbers that no model can have."""
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ModelError(f"the model's {name} is {value}; it must be 1 to {most}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly"
            )
        if self.head_size % 2:
            raise ModelError(f"the head size {self.head_size} is odd; RoPE turns pairs")
        if not (math.isfinite(self.norm_eps) and 0 < self.norm_eps < 1):
            raise ModelError(f"the norm's epsilon is {self.norm_eps}; it must be in (0, 1)")
        if self.sliding_window is not None and self.context > self.sliding_window:
            raise ModelError("context exceeds the sliding window")
        self.rope.check(self.head_size)

    @property
    def parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        return sum(math.prod(shape) for shape in expected_tensors(self).values())


def family_named(name: object, where: str) -> Family:
    """The family called `name`, or ModelError that lists what runs."""
    if name not in FAMILIES:
        raise ModelError(f"{where}: {name!r} does not run here; these do: {', '.join(FAMILIES)}")
    return name


def expected_tensors(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor of the model, in the order of the computation.

    Matrices are [out, in], as `y = W x` reads them.
    """
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab, arch.hidden)}
    layer = _layer_tensors(arch)
    for index in range(arch.layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (arch.hidden,)
    if not arch.tied_head:
        tensors["lm_head.weight"] = (arch.vocab, arch.hidden)
    return tensors


def _layer_tensors(arch: Architecture) -> dict[str, tuple[int, ...]]:
    queries, keys = arch.heads * arch.head_size, arch.kv_heads * arch.head_size
    matrices = {
        "self_attn.q_proj": (queries, arch.hidden, arch.qkv_bias),
        "self_attn.k_proj": (keys, arch.hidden, arch.qkv_bias),
        "self_attn.v_proj": (keys, arch.hidden, arch.qkv_bias),
        "self_attn.o_proj": (arch.hidden, queries, arch.o_bias),
        "mlp.gate_proj": (arch.ffn, arch.hidden, arch.mlp_bias),
        "mlp.up_proj": (arch.ffn, arch.hidden, arch.mlp_bias),
        "mlp.down_proj": (arch.hidden, arch.ffn, arch.mlp_bias),
    }
    tensors: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (arch.hidden,)}
    for name, (rows, columns, bias) in matrices.items():
        tensors[f"{name}.weight"] = (rows, columns)
        if bias:
            tensors[f"{name}.bias"] = (rows,)
        if name == "self_attn.o_proj":
            tensors["post_attention_layernorm.weight"] = (arch.hidden,)
    if arch.qk_norm:
        tensors["self_attn.q_norm.weight"] = (arch.head_size,)
        tensors["self_attn.k_norm.weight"] = (arch.head_size,)
    return tensors
