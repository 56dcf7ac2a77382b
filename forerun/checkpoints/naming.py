"""The places of a layer's tensors in a folder: under other names, several in one, or in another
order.

`arch.layer_tensors` names the tensors of a layer; a `StoredPart` says which stored tensor each is,
or is a part of. Families differ in a table of names (_RENAMED) and in these layouts:

    fused        queries, keys and values are one matrix, gate and up another (Phi-3), or gate and
                 up alone (Granite 4)
    stacked      all experts are one tensor: matrices [in, out], gate and up in turns (gpt-oss), or
                 [out, in], gate above up (what transformers 5 keeps in memory; Qwen3.5)
    switched     all experts are one tensor for each of gate, up and down (MLX)
    interleaved  rows of several parts alternate head by head in one matrix (Qwen3-Next)
    joined       a delta net's queries, keys and values are one matrix (Qwen3.5)
    rotated      in a head the rotated numbers come first (partial rotation), or the two numbers of
                 a pair are adjacent (DeepSeek); here pairs are half a head apart, over the whole
                 head
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.ggml import STORAGE
from forerun.checkpoints.grouped import Grouped
from forerun.checkpoints.mapped import Packed, TensorFile
from forerun.networks.arch import Architecture, Family, layer_tensors
from forerun.networks.layer_spec import Experts, GatedDelta, LayerSpec
from forerun.networks.rope import Rope
from forerun.types import AnyArray, Floats

Order = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StoredPart:
    """A tensor as a part of a stored one.

    stored      name of the stored tensor, without the layer's prefix
    shape       of this tensor
    stored_shape  of the stored tensor
    expert      which expert of a stored tensor of all experts; None: it is not one of these
    transposed  a matrix that is stored [in, out]
    rows        which rows (of a vector: numbers) of the remaining; None = all
    order       the order of these, int64[rows]; None = unchanged
    """

    stored: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    expert: int | None = None
    transposed: bool = False
    rows: slice | None = None
    order: Order | None = None

    @property
    def alone(self) -> bool:
        """Whether the stored tensor is identical to this one."""
        return self.shape == self.stored_shape and self.order is None and not self.transposed


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the model as a part of one in a file; `name` is the stored tensor's full name."""

    file: TensorFile
    name: str
    piece: StoredPart

    @property
    def parts(self) -> tuple["StoredTensor", ...]:
        """The stored tensors that it consists of: itself."""
        return (self,)

    @property
    def kind(self) -> str:
        """The storage type by ggml's name, such as Q4_K."""
        return self.file.tensors[self.name].kind

    def floats(self) -> Floats:
        """Return the tensor as float32; a read-only view of the file if that is how it is
        stored.
        """
        if self.piece.alone:
            return self.file.floats(self.name)
        packed = self.packed()
        if packed is not None and self.kind != "F32":
            return packed.floats()
        if packed is None and self._of_rows:
            return self.part(slice(None), slice(None))
        found: Floats = self.cut(self.file.floats(self.name)).reshape(self.piece.shape)
        return found

    def part(self, rows: slice, columns: slice) -> Floats:
        """Return float32[n,k], some rows and columns of a matrix; of one stored in few bits little
        else is read.
        """
        if not self._of_rows:
            return self.floats()[rows, columns]
        which = self._which()[rows]
        first = int(which.min())
        cut = self.file.part(self.name, slice(first, int(which.max()) + 1), columns)
        found: Floats = cut[which - first]
        return found

    @property
    def _of_rows(self) -> bool:
        """Whether it consists of rows of a matrix, or of one of all experts, or of all of them."""
        return len(self.piece.shape) == 2 and not self.piece.transposed

    def _which(self) -> Order:
        """Return int[n], the rows of the stored matrix that it consists of."""
        height, expert = self.piece.stored_shape[-2], self.piece.expert or 0
        return self._ordered(np.arange(expert * height, (expert + 1) * height))

    def grouped(self) -> Grouped | None:
        """Return the rows of TensorFile.grouped that it consists of; None if these are columns."""
        found = self.file.grouped(self.name) if self._of_rows else None
        return found if found is None or self.piece.alone else found.rows(self._which())

    def rows(self) -> NDArray[np.uint8]:
        """Return uint8[rows, bytes of a row] of a matrix; a view of the file where possible."""
        stored, piece = self.file.rows(self.name), self.piece
        if piece.alone or len(piece.stored_shape) == 1:
            return stored
        if not piece.transposed:
            per = piece.stored_shape[-2]
            first = 0 if piece.expert is None else piece.expert * per
            return self._ordered(stored[first : first + per])
        width = stored.shape[1] // piece.stored_shape[-1]
        numbers = stored.view(f"u{width}").reshape(piece.stored_shape)
        matrix = numbers if piece.expert is None else numbers[piece.expert]
        turned: NDArray[np.uint8] = np.ascontiguousarray(self._ordered(matrix.T)).view(np.uint8)
        return turned

    def packed(self) -> Packed | None:
        """Return a matrix as stored; None for a vector, and for a format that only its own file can
        widen.
        """
        if self.piece.alone:
            return self.file.packed(self.name)
        if len(self.piece.shape) != 2 or self.kind not in STORAGE:
            return None
        return Packed(self.kind, self.rows(), self.piece.shape[-1])

    def cut(self, stored: AnyArray) -> AnyArray:
        """Return this tensor's part of the whole stored tensor, transposed and ordered."""
        piece = self.piece
        found = stored if piece.expert is None else stored[piece.expert]
        return self._ordered(found.T if piece.transposed else found)

    def _ordered(self, rows: AnyArray) -> AnyArray:
        piece = self.piece
        rows = rows if piece.rows is None else rows[piece.rows]
        return rows if piece.order is None else rows[piece.order]


_SHARED = (r"mlp\.shared_expert\.", "mlp.shared_experts.")

_SPARSE = (
    (r"mlp\.gate\.e_score", "block_sparse_moe.e_score"),
    (r"mlp\.gate\.", "block_sparse_moe.gate."),
    (r"mlp\.experts\.(\d+)\.gate_proj\.", r"block_sparse_moe.experts.\1.w1."),
    (r"mlp\.experts\.(\d+)\.down_proj\.", r"block_sparse_moe.experts.\1.w2."),
    (r"mlp\.experts\.(\d+)\.up_proj\.", r"block_sparse_moe.experts.\1.w3."),
)
_LFM2 = (
    (r"input_layernorm\.", "operator_norm."),
    (r"post_attention_layernorm\.", "ffn_norm."),
    (r"self_attn\.([qk])_norm\.", r"self_attn.\1_layernorm."),
    (r"self_attn\.o_proj\.", "self_attn.out_proj."),
    (r"mlp\.gate\.e_score_correction_bias", "feed_forward.expert_bias"),
    (r"mlp\.gate\.", "feed_forward.gate."),
    (r"mlp\.(experts\.\d+\.)?gate_proj\.", r"feed_forward.\1w1."),
    (r"mlp\.(experts\.\d+\.)?down_proj\.", r"feed_forward.\1w2."),
    (r"mlp\.(experts\.\d+\.)?up_proj\.", r"feed_forward.\1w3."),
)
_RENAMED: dict[Family, tuple[tuple[str, str], ...]] = {
    "mixtral": _SPARSE,
    "minimax_m2": _SPARSE,
    "glm4_moe": (_SHARED,),
    "glm4_moe_lite": (_SHARED,),
    "deepseek_v3": (_SHARED,),
    "deepseek_v2": (_SHARED,),
    "gpt_oss": ((r"mlp\.gate\.", "mlp.router."),),
    "granitemoehybrid": ((r"mlp\.down_proj\.", "shared_mlp.output_linear."),),
    "hunyuan_v1_dense": (
        (r"self_attn\.q_norm\.", "self_attn.query_layernorm."),
        (r"self_attn\.k_norm\.", "self_attn.key_layernorm."),
    ),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "gemma4_text": (
        (r"moe\.gate\.weight", "router.proj.weight"),
        (r"moe\.gate\.", "router."),
        (r"moe\.experts\.", "experts."),
    ),
}
"""By family: (prefix of canonical names, prefix of the files' names) pairs."""
FINAL_NORMS: dict[Family, str] = dict.fromkeys(("lfm2", "lfm2_moe"), "model.embedding_norm.weight")
"""Names of model.norm.weight in families whose files call it otherwise."""

IN_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
EXPERT = re.compile(r"(?:mlp|moe)\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def layer_pieces(
    arch: Architecture, spec: LayerSpec, stored: Iterable[str] = (), transposed: bool = False
) -> dict[str, StoredPart]:
    """Map the canonical name of every tensor of a layer of `arch` with this `spec`, without the
    layer's prefix, to its part.

    stored      names of the files' tensors, for families that have either of two layouts
    transposed  all experts' matrices are stored [in, out] (`experts_transposed`)
    """
    stored = tuple(stored)
    stacked = arch.family in _IN_ONE and any(n.endswith(_STACKED) for n in stored)
    rooms = {match[1] for name in stored if (match := _SWITCHED.fullmatch(name))}
    packed = any(name.endswith(f"{_STACKED}.weight") for name in stored)
    own = {name[match.end() :] for name in stored if (match := IN_LAYER.match(name))}
    pieces = {}
    for name, shape in layer_tensors(arch, spec).items():
        piece = StoredPart(_renamed(name, arch.family), shape, shape)
        if arch.family == "phi3":
            piece = fused(name, piece, arch, spec)
        elif arch.family == "granitemoehybrid" and name in _GATE_UP:
            piece = replace(fused(name, piece, arch, spec), stored=_GATE_AND_UP)
        elif arch.family == "gpt_oss":
            piece = _stacked(name, piece, spec, packed)
        elif arch.family == "qwen3_next":
            piece = head_by_head(name, piece, arch, spec)
        elif arch.family in ("qwen3_5_text", "qwen3_5_moe_text"):
            piece = joined(name, piece, arch, spec)
            if stacked and isinstance(spec.feed_forward, Experts):
                piece = _one_above_the_other(name, piece, spec.feed_forward, "mlp.experts")
        elif stacked:
            piece = _one_above_the_other(name, piece, spec.feed_forward, "mlp.experts", transposed)
        elif arch.family == "gemma4_text":
            piece = _one_above_the_other(name, piece, spec.beside, "experts")
        for room in rooms:
            piece = _switched(name, piece, spec.beside or spec.feed_forward, room)
        for other in (name, name.replace("mlp.", "feed_forward.")):
            if piece.stored not in own and other in own:  # MLX undoes what _RENAMED says.
                piece = StoredPart(other, shape, shape)
        order = order_of(name, arch, spec)
        if order is not None:
            piece = replace(piece, order=order if piece.order is None else piece.order[order])
        pieces[name] = piece
    return pieces


def _renamed(name: str, family: Family) -> str:
    for begin, stored in _RENAMED.get(family, ()):
        renamed, count = re.subn(f"^{begin}", stored, name)
        if count:
            return renamed
    return name


def fused(name: str, piece: StoredPart, arch: Architecture, spec: LayerSpec) -> StoredPart:
    """Return the part of Phi-3's fused tensors for `name`: q, k and v are stacked, and so are gate
    and up; `piece` unchanged for other names.
    """
    queries, keys = arch.heads * arch.head_size, arch.kv_heads * arch.head_size
    width = spec.active_width
    places = {
        "self_attn.q_proj.weight": ("self_attn.qkv_proj.weight", 0, queries + 2 * keys),
        "self_attn.k_proj.weight": ("self_attn.qkv_proj.weight", queries, queries + 2 * keys),
        "self_attn.v_proj.weight": (
            "self_attn.qkv_proj.weight",
            queries + keys,
            queries + 2 * keys,
        ),
        "mlp.gate_proj.weight": ("mlp.gate_up_proj.weight", 0, 2 * width),
        "mlp.up_proj.weight": ("mlp.gate_up_proj.weight", width, 2 * width),
    }
    if name not in places:
        return piece
    stored, first, rows = places[name]
    part = slice(first, first + piece.shape[0])
    return replace(piece, stored=stored, stored_shape=(rows, piece.shape[1]), rows=part)


_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_GATE_AND_UP = "shared_mlp.input_linear.weight"


_SWITCHED = re.compile(
    r"model\.layers\.\d+\.((?:\w+\.)*(?:switch_mlp|switch_glu|experts))\.gate_proj\.weight"
)


def _switched(name: str, piece: StoredPart, experts: object, room: str) -> StoredPart:
    """Return the part of MLX's tensors of all experts, room.gate_proj.weight and so on."""
    match = EXPERT.fullmatch(name)
    if match is None or not isinstance(experts, Experts):
        return piece
    stored, shape = f"{room}.{match[2]}_proj.{match[3]}", (experts.count, *piece.shape)
    return StoredPart(stored, piece.shape, shape, expert=int(match[1]))


def _stacked(name: str, piece: StoredPart, spec: LayerSpec, packed: bool) -> StoredPart:
    """Return gpt-oss's part: all experts in one tensor, with rows of gate and up alternating.

    packed  matrices are stored quantised, [out, in] and as NAME.weight
    """
    match = EXPERT.fullmatch(name)
    if match is None:
        return piece
    assert isinstance(spec.feed_forward, Experts)
    count, expert = spec.feed_forward.count, int(match[1])
    part, kind = match[2], match[3]
    opens = part != "down"
    stored = "mlp.experts." + ("gate_up_proj" if opens else "down_proj")
    rows = slice(part == "up", None, 2) if opens else None
    outputs = piece.shape[0] * (2 if opens else 1)
    if kind == "bias":
        return replace(
            piece, stored=f"{stored}_bias", stored_shape=(count, outputs), expert=expert, rows=rows
        )
    if packed:
        stored_shape = count, outputs, piece.shape[1]
        return replace(
            piece, stored=f"{stored}.weight", stored_shape=stored_shape, expert=expert, rows=rows
        )
    stored_shape = count, piece.shape[1], outputs
    return replace(
        piece, stored=stored, stored_shape=stored_shape, expert=expert, transposed=True, rows=rows
    )


_STACKED, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_IN_ONE = ("qwen3_5_moe_text", "qwen3_moe")
"""Families with all experts in one tensor in some files."""


def experts_transposed(arch: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether matrices in tensors of all experts are stored [in, out], as Qwen published
    Qwen3-VL's; transformers writes [out, in]. shapes: of the files' tensors.
    """
    return arch.family == "qwen3_moe" and any(
        (name.endswith(_STACKED) and shape[-1] != arch.hidden)
        or (name.endswith(_DOWN) and shape[1:2] != (arch.hidden,))
        for name, shape in shapes.items()
    )


def _one_above_the_other(
    name: str, piece: StoredPart, experts: object, room: str, transposed: bool = False
) -> StoredPart:
    """Return the part of a tensor of all experts, called room.down_proj and room.gate_up_proj; gate
    is above up. transposed: matrices are stored [in, out].
    """
    match = EXPERT.fullmatch(name)
    if match is None or not isinstance(experts, Experts):
        return piece
    count, part = experts.count, match[2]
    width, columns = piece.shape
    if part == "down":
        stored, rows, height = f"{room}.down_proj", None, width
    else:
        first = 0 if part == "gate" else width
        stored, rows, height = f"{room}.gate_up_proj", slice(first, first + width), 2 * width
    stored_shape = (count, columns, height) if transposed else (count, height, columns)
    expert = int(match[1])
    return replace(
        piece,
        stored=stored,
        stored_shape=stored_shape,
        expert=expert,
        rows=rows,
        transposed=transposed,
    )


def joined(name: str, piece: StoredPart, arch: Architecture, spec: LayerSpec) -> StoredPart:
    """Return Qwen3.5's part: a delta net's queries, keys and values are stacked, its gates
    separate; in attention each head's gate follows its query, as in Qwen3-Next.
    """
    delta = spec.recurrent if isinstance(spec.recurrent, GatedDelta) else None
    if delta is None:
        return head_by_head(name, piece, arch, spec)
    part = name.removeprefix("linear_attn.").removesuffix("_proj.weight")
    if part in ("z", "b", "a"):
        return replace(piece, stored=f"linear_attn.in_proj_{part}.weight")
    rows = delta.rows_of(part)
    if rows is None:
        return piece
    stored_shape = delta.channels, piece.shape[1]
    return replace(
        piece, stored="linear_attn.in_proj_qkv.weight", stored_shape=stored_shape, rows=rows
    )


def head_by_head(name: str, piece: StoredPart, arch: Architecture, spec: LayerSpec) -> StoredPart:
    """Return Qwen3-Next's part: each head's gate follows its query; in a delta net, each key head's
    query, key and the values and gates of its value heads are one matrix, and their b and a
    another.
    """
    room, part, kind = name.split(".", 2) if name.count(".") == 2 else ("", "", "")
    if room == "self_attn" and part in ("q_proj", "gate_proj"):
        heads, stored = arch.heads, "q_proj"
        widths = {"q_proj": arch.head_size, "gate_proj": arch.head_size}
    elif isinstance(delta := spec.recurrent, GatedDelta) and part.endswith("_proj"):
        heads, each = delta.key_heads, delta.value_heads // delta.key_heads
        wide = each * delta.value_size
        widths = {"q_proj": delta.key_size, "k_proj": delta.key_size, "v_proj": wide}
        widths["z_proj"], stored = wide, "in_proj_qkvz"
        if part in ("b_proj", "a_proj"):
            widths, stored = {"b_proj": each, "a_proj": each}, "in_proj_ba"
    else:
        return piece
    if part not in widths:  # out_proj
        return piece
    height = sum(widths.values())
    first = sum(list(widths.values())[: list(widths).index(part)])
    rows = np.arange(heads)[:, None] * height + np.arange(first, first + widths[part])
    return replace(
        piece,
        stored=f"{room}.{stored}.{kind}",
        stored_shape=(heads * height, *piece.shape[1:]),
        order=rows.ravel(),
    )


def order_of(name: str, arch: Architecture, spec: LayerSpec) -> Order | None:
    """Return int[rows], for each row of this query or key weight or norm in canonical order, its
    index in the file; None if the orders are the same.
    """
    latent, rope = spec.attention.latent, spec.rope
    if latent is not None:
        if not latent.paired:
            return None
        head = np.arange(latent.rope).reshape(-1, 2).T.ravel()
        if name.startswith("self_attn.kv_a_proj_with_mqa."):
            return np.concatenate([np.arange(latent.rank), latent.rank + head])
        if name in ("self_attn.q_b_proj.weight", "self_attn.q_proj.weight"):
            order = np.concatenate([np.arange(latent.nope), latent.nope + head])
            return each_head(order, arch.heads)
        return None
    cached = arch.cache_of(spec)
    if rope.rotated is None or not 0 < rope.rotated < cached.head_size:
        return None
    head = _rotated_first(rope, cached.head_size)
    kind = name.removeprefix("self_attn.").rsplit(".", 1)[0]
    heads = {"q_proj": arch.heads, "k_proj": cached.kv_heads, "q_norm": 1, "k_norm": 1}.get(kind)
    if spec.wide_qk_norm and kind.endswith("_norm"):
        heads = {"q_norm": arch.heads, "k_norm": cached.kv_heads}.get(kind)
    return None if heads is None else each_head(head, heads)


def each_head(head: Order, heads: int) -> Order:
    """Return the order of the rows of `heads` heads, each in the order `head`."""
    order: Order = (np.arange(heads)[:, None] * len(head) + head).ravel()
    return order


def _rotated_first(rope: Rope, size: int) -> Order:
    """Return one head's order: pairs (i, i + rotated/2) of its first numbers become (i, i +
    size/2).
    """
    half, rotated = size // 2, rope.rotated or 0
    rest = np.arange(rotated, size)
    keep = half - rotated // 2
    first = np.concatenate([np.arange(rotated // 2), rest[:keep]])
    second = np.concatenate([np.arange(rotated // 2, rotated), rest[keep:]])
    order: Order = np.concatenate([first, second])
    return order
