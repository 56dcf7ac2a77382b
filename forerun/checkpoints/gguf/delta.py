"""Gated delta nets in GGUF files (llama.cpp's qwen3next).

A net's queries, keys and values are one matrix, of all heads one after the other, and z another;
files of before 2026 have all four in one, key head by key head, as folders do. b and a are always
one matrix, key head by key head. What decays is stored as -exp(A_log).
"""

from dataclasses import dataclass, replace

import numpy as np

from forerun.checkpoints.checkpoint import shortened
from forerun.checkpoints.gguf.header import GgufFile
from forerun.checkpoints.mapped import Packed
from forerun.checkpoints.naming import StoredPart, StoredTensor, head_by_head, order_of
from forerun.errors import ModelError
from forerun.networks.arch import Architecture, ArchitectureSizes
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import GatedDelta, LayerSpec
from forerun.types import Floats

DECAY, _JOINED = "linear_attn.A_log", "linear_attn.in_proj_qkvz.weight"
_NAMES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    _JOINED: "ssm_in.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    DECAY: "ssm_a",
}
"""By the names in folders."""


def delta_layers(keys: Keys, sizes: ArchitectureSizes, spec: LayerSpec) -> tuple[LayerSpec, ...]:
    """Every `full_attention_interval`th layer attends, as `spec` says, but gated and with norms of
    queries and keys; in the others a net stands. Raises ModelError naming the key.
    """
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if heads < 1 or inner % heads:
        raise keys.unfit("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {heads}")
    delta = GatedDelta(
        keys.integer("ssm.group_count"),
        heads,
        keys.integer("ssm.state_size"),
        inner // heads,
        keys.integer("ssm.conv_kernel"),
    )
    attends = replace(spec, attention=replace(spec.attention, gated=True), qk_norm=True)
    net = replace(attends, qk_norm=False, delta=delta)
    return tuple(net if recurrent else attends for recurrent in _recurrent(keys, sizes.layers))


def _recurrent(keys: Keys, layers: int) -> list[bool]:
    every = keys.integer("full_attention_interval", 4)
    if every < 1:
        raise keys.unfit("full_attention_interval", every, "positive")
    default = [(layer + 1) % every != 0 for layer in range(layers)]
    flags = keys.get("attention.recurrent_layers", default)
    if not isinstance(flags, list) or len(flags) != layers or not {*flags} <= {True, False}:
        raise keys.unfit("attention.recurrent_layers", flags, f"{layers} times true or false")
    return [bool(recurrent) for recurrent in flags]


@dataclass(frozen=True, slots=True)
class StoredALog:
    """A_log of what a file has of it, -exp(A_log)."""

    stored: StoredTensor

    @property
    def piece(self) -> StoredPart:
        """Return its part of the stored tensor, and its shape."""
        return self.stored.piece

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The one tensor that is stored of it."""
        return (self.stored,)

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.stored.name

    def floats(self) -> Floats:
        """float32[Hv]: log of what is stored negated. Raises ModelError if a stored number is
        not negative.
        """
        decay = self.stored.floats()
        if not (decay < 0).all():
            raise ModelError(f"{shortened([self.name])} must be negative: it is -exp(A_log)")
        a_log: Floats = np.log(-decay)
        return a_log

    def packed(self) -> Packed | None:
        """None: it is a vector."""
        return None


def delta_part(
    file: GgufFile, arch: Architecture, spec: LayerSpec, prefix: str, name: str
) -> tuple[str, StoredPart] | None:
    """Name in the file and part of a tensor of such a model's net, or of what makes its queries and
    their gate; None of the others. Names in the file begin with `prefix`.
    """
    delta = spec.delta
    wide = arch.heads * arch.head_size, arch.hidden
    own = {f"self_attn.{part}_proj.weight": wide for part in ("q", "gate")}
    shape = (delta.tensors(arch.hidden) if delta is not None else own).get(name)
    if shape is None:
        return None
    if delta is not None:
        first = {"q": 0, "k": delta.keys, "v": 2 * delta.keys}
        part = name.removeprefix("linear_attn.").removesuffix("_proj.weight")
        if part in (*first, "z") and f"{prefix}{_NAMES[_JOINED]}" not in file.tensors:
            if part == "z":
                return f"{prefix}attn_gate.weight", StoredPart(name, shape, shape)
            rows = slice(first[part], first[part] + shape[0])
            joined = StoredPart(name, shape, (delta.channels, arch.hidden), rows=rows)
            return f"{prefix}attn_qkv.weight", joined
    whole = shape[::2] if name == "linear_attn.conv1d.weight" else shape
    piece = head_by_head(name, StoredPart(name, shape, whole), arch, spec)
    order = order_of(name, arch, spec)
    if order is not None and piece.order is not None:
        piece = replace(piece, order=piece.order[order])
    return prefix + _NAMES[piece.stored], piece
