"""Latent attention in GGUF files (llama.cpp's deepseek2: DeepSeek V3 and R1, Kimi K2).

Since 2025 their metadata have the size of a cached position, and the sizes of heads under names of
their own, and kv_b_proj is two tensors with a matrix per head: one that projects queries into the
latent space [A,rank,nope], and one that projects values out of it [A,value,rank].
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from forerun.checkpoints.mapped import Packed, TensorFile
from forerun.checkpoints.naming import StoredPart, StoredTensor
from forerun.errors import ModelError
from forerun.networks.arch import ArchitectureSizes
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import AttentionSpec, Latent
from forerun.networks.rope import Rope, Scaling, Yarn
from forerun.types import Floats

ABSORBED, INTO, OUT_OF = "self_attn.kv_b_proj.weight", "attn_k_b.weight", "attn_v_b.weight"


def latent_of(keys: Keys, sizes: ArchitectureSizes) -> Latent:
    """Return the sizes of latent attention. Raises ModelError if the file is older than 2025, when
    keys had other meanings, or a key does not fit the others.
    """
    head = keys.integer("attention.key_length_mla", 0)
    if not head:
        raise ModelError(
            f"{keys.prefix}attention.key_length_mla is not there: llama.cpp's converter of before "
            "April 2025 made this file; take one that was made anew, or convert the folder again"
        )
    rank, rope = keys.integer("attention.kv_lora_rank"), keys.integer("rope.dimension_count")
    keys.require("attention.head_count_kv", 1)
    keys.require("attention.key_length", rank + rope)
    if not 0 < rope < head:
        raise keys.unfit("rope.dimension_count", rope, f"between 1 and {head - 1}")
    return Latent(
        rank,
        head - rope,
        rope,
        keys.integer("attention.value_length_mla"),
        keys.integer("attention.q_lora_rank", 0) or None,
        paired=True,
    )


def latent_attention(keys: Keys, latent: Latent) -> AttentionSpec:
    """Return the attention: scores scaled by 1/sqrt(a head's width), and by YaRN's factor twice,
    for queries and keys.
    """
    more = keys.real("rope.scaling.yarn_log_multiplier", 0.0)
    factor = keys.real("rope.scaling.factor", 0.0) or 1.0
    spread = 1.0 + more * math.log(factor)
    return AttentionSpec(spread**2 * (latent.nope + latent.rope) ** -0.5, latent=latent)


def latent_rope(keys: Keys, latent: Latent, scaling: Scaling | None) -> Rope:
    """Return the rope of the rotated part. As in llama.cpp, YaRN's own factor applies to the scores
    and not to cosines and sines.
    """
    if isinstance(scaling, Yarn):
        scaling = replace(scaling, attention_factor=1.0)
    return Rope(keys.real("rope.freq_base", 10000.0), scaling)


@dataclass(frozen=True, slots=True)
class StoredKvB:
    """kv_b_proj [A*(nope+value),rank], joined from its two halves in the file."""

    into: StoredTensor
    out_of: StoredTensor
    piece: StoredPart

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The two stored tensors that it is joined from."""
        return self.into, self.out_of

    @property
    def name(self) -> str:
        """The name in the file of the first of its two tensors."""
        return self.into.name

    def floats(self) -> Floats:
        """Join float32[heads*(nope+value),rank] of both tensors, head by head, the first
        transposed.
        """
        into = self.into.floats().swapaxes(1, 2)
        both: Floats = np.concatenate([into, self.out_of.floats()], 1)
        return both.reshape(self.piece.shape)

    def packed(self) -> Packed | None:
        """Return the joined matrix as F32 if both tensors are floats; else None, because no stored
        rows are this matrix.
        """
        if {self.into.kind, self.out_of.kind} <= {"F32", "F16", "BF16"}:
            whole = np.ascontiguousarray(self.floats())
            return Packed("F32", whole.view(np.uint8), whole.shape[1])
        return None


def stored_kv_b(file: TensorFile, prefix: str, heads: int, latent: Latent) -> StoredKvB:
    """Return kv_b_proj of a layer, stored as two tensors whose names begin with `prefix`."""
    into, out_of = (heads, latent.rank, latent.nope), (heads, latent.value, latent.rank)
    shape = heads * (latent.nope + latent.value), latent.rank
    return StoredKvB(
        StoredTensor(file, prefix + INTO, StoredPart(prefix + INTO, into, into)),
        StoredTensor(file, prefix + OUT_OF, StoredPart(prefix + OUT_OF, out_of, out_of)),
        StoredPart(ABSORBED, shape, shape),
    )
