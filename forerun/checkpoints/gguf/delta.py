"""Gated delta nets in GGUF files (llama.cpp's qwen3next, qwen35 and qwen35moe).

A net's queries, keys and values are one matrix, of all heads one after the other, and z another; in
qwen3next files of before 2026 all four are one, key head by key head, as in folders. b and a are
one matrix there, key head by key head, and two in Qwen3.5. The decay is stored as -exp(A_log).
Qwen3.5's converter interleaves value heads by key heads (GatedDelta.tiled): this order is kept,
since columns of a K-quant cannot be moved.
"""

from dataclasses import dataclass, replace

import numpy as np

from forerun.checkpoints.checkpoint import shortened
from forerun.checkpoints.gguf.header import GgufFile
from forerun.checkpoints.mapped import Packed
from forerun.checkpoints.naming import StoredPart, StoredTensor, head_by_head, joined, order_of
from forerun.errors import ModelError
from forerun.networks.arch import Architecture, ArchitectureSizes, Family
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import GatedDelta, LayerSpec
from forerun.types import Floats

DELTA_FAMILIES: tuple[Family, ...] = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
DECAY, _JOINED = "linear_attn.A_log", "linear_attn.in_proj_qkvz.weight"
_NAMES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    _JOINED: "ssm_in.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    DECAY: "ssm_a",
}
"""Names in folders -> names in the file."""


def delta_layers(
    keys: Keys, sizes: ArchitectureSizes, family: Family, spec: LayerSpec
) -> tuple[LayerSpec, ...]:
    """Return the layers: every `full_attention_interval`th has attention as in `spec`, but gated
    and with norms of queries and keys; the others have a delta net. Raises ModelError naming the
    key.
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
        tiled=family != "qwen3_next",
    )
    if delta.tiled:
        keys.get("rope.dimension_sections")  # Of a token of text all positions are one.
    attends = replace(spec, attention=replace(spec.attention, gated=True), qk_norm=True)
    net = replace(attends, qk_norm=False, recurrent=delta)
    return tuple(net if recurrent else attends for recurrent in _recurrent(keys, sizes.layers))


def _recurrent(keys: Keys, layers: int) -> list[bool]:
    every = keys.integer("full_attention_interval", 4)
    if every < 1:
        raise keys.unfit("full_attention_interval", every, "positive")
    default = [(layer + 1) % every != 0 for layer in range(layers)]
    flags = keys.get("attention.recurrent_layers", default)
    if isinstance(flags, list) and len(flags) == layers + keys.integer("nextn_predict_layers", 0):
        flags = flags[:layers]  # Prediction layers, which attend, are listed too.
    if not isinstance(flags, list) or len(flags) != layers or not {*flags} <= {True, False}:
        raise keys.unfit("attention.recurrent_layers", flags, f"{layers} times true or false")
    return [bool(recurrent) for recurrent in flags]


@dataclass(frozen=True, slots=True)
class StoredALog:
    """A_log, computed from the -exp(A_log) in the file."""

    stored: StoredTensor

    @property
    def piece(self) -> StoredPart:
        """The part of the stored tensor, with its shape."""
        return self.stored.piece

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The one stored tensor that it is computed from."""
        return (self.stored,)

    @property
    def name(self) -> str:
        """The name of the stored tensor."""
        return self.stored.name

    def floats(self) -> Floats:
        """Return float32[Hv], the logarithm of the negated stored numbers. Raises ModelError if a
        stored number is not negative.
        """
        decay = self.stored.floats()
        if not (decay < 0).all():
            raise ModelError(f"{shortened([self.name])} must be negative: it is -exp(A_log)")
        a_log: Floats = np.log(-decay)
        return a_log

    def packed(self) -> Packed | None:
        """Return None: it is a vector."""
        return None


def delta_part(
    file: GgufFile, arch: Architecture, spec: LayerSpec, prefix: str, name: str
) -> tuple[str, StoredPart] | None:
    """Return (name in the file, part) of a tensor of a delta net, or of gated attention's queries
    and gate; None for other tensors. Names in the file begin with `prefix`.
    """
    delta = spec.recurrent if isinstance(spec.recurrent, GatedDelta) else None
    wide = arch.heads * arch.head_size, arch.hidden
    own = {f"self_attn.{part}_proj.weight": wide for part in ("q", "gate")}
    shape = (delta.tensors(arch.hidden) if delta is not None else own).get(name)
    if shape is None:
        return None
    stored_shape = shape[::2] if name == "linear_attn.conv1d.weight" else shape
    layout = joined
    if arch.family == "qwen3_next":
        gates = name in ("linear_attn.b_proj.weight", "linear_attn.a_proj.weight")
        if delta is None or gates or f"{prefix}{_NAMES[_JOINED]}" in file.tensors:
            layout = head_by_head
    piece = layout(name, StoredPart(name, shape, stored_shape), arch, spec)
    order = order_of(name, arch, spec)
    if order is not None and piece.order is not None:
        piece = replace(piece, order=piece.order[order])
    return prefix + _NAMES[piece.stored], piece
