"""Tensor and expert parallelism: which part of every tensor a rank has, and the model that its
parts form.

Megatron's division (Shoeybi et al. 2019, arXiv 1909.08053, section 3): queries, keys, values, gate
and up are split by their outputs, o_proj and down_proj by their inputs, so that a layer needs two
sums over the ranks. Embedding and head are split by token. Everything else is on every rank, and so
is a key/value head if there are more ranks than heads. Experts are split in the same way, each by
its columns, or divided as wholes: groups of ranks have the same number of experts each, and experts
are split only within a group. A recurrent layer is split by its heads or channels, with its
convolution and its states, and its output product by its inputs.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint, ReadInParts
from forerun.checkpoints.ggml import STORAGE
from forerun.checkpoints.grouped import Grouped
from forerun.checkpoints.mapped import Packed
from forerun.checkpoints.quantised_matrices import grouped_of
from forerun.errors import ConfigError
from forerun.networks.arch import Architecture, expected_tensors
from forerun.networks.layer_spec import (
    Dense,
    Experts,
    GatedDelta,
    LayerSpec,
    Recurrent,
    ShortConvolution,
)
from forerun.types import Floats


class Cut(Enum):
    """A division of a tensor among the ranks."""

    WHOLE = "every rank has all of it"
    ROWS = "by its first axis"
    COLUMNS = "by its last axis"
    KV_HEADS = "by its first axis, key/value head by key/value head"
    PARTS = "by its first axis, each of the parts that a recurrent layer has there"
    COLUMN_PARTS = "by its last axis, likewise"
    ONCE = "rank 0 has it, the others zeros: it is added to a sum over the ranks"


_CUTS = {
    r".*\.linear_attn\.[qk]_proj\.weight": Cut.ROWS,
    r".*\.linear_attn\.([vzba]_proj\.weight|conv1d\.weight|A_log|dt_bias)": Cut.PARTS,
    r".*\.linear_attn\.out_proj\.weight": Cut.COLUMN_PARTS,
    r".*\.conv\.in_proj\.(weight|bias)": Cut.PARTS,
    r".*\.conv\.conv\.(weight|bias)": Cut.ROWS,
    r".*\.out_proj\.weight": Cut.COLUMNS,
    r".*\.out_proj\.bias": Cut.ONCE,
    r".*\.(q_proj|q_b_proj|kv_b_proj|gate_proj|up_proj)\.(weight|bias)": Cut.ROWS,
    r".*\.(k_proj|v_proj)\.(weight|bias)": Cut.KV_HEADS,
    r".*\.(o_proj|down_proj)\.weight": Cut.COLUMNS,
    r".*\.(o_proj|down_proj)\.bias": Cut.ONCE,
    r".*\.sinks": Cut.ROWS,
    r"(model\.embed_tokens|lm_head)\.weight": Cut.ROWS,
}
"""Pattern of canonical names -> their division; all other tensors are whole."""


def cut_of(name: str) -> Cut:
    """Return how the tensor of this canonical name is divided among ranks; WHOLE by default."""
    return next((cut for pattern, cut in _CUTS.items() if re.fullmatch(pattern, name)), Cut.WHOLE)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One of the ranks that share a model.

    rank          its number, from 0
    size          number of ranks
    experts       groups of ranks among which experts are divided (ep-size); divides `size`
    shared_whole  every rank has the whole shared expert; else it is split by its columns
    """

    rank: int = 0
    size: int = 1
    experts: int = 1
    shared_whole: bool = False

    def span(self, length: int) -> slice:
        """Return this rank's part of an axis of `length` elements: ranks' parts are consecutive,
        and differ in length by at most one.
        """
        return slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)

    def kv_span(self, kv_heads: int, length: int) -> slice:
        """Return a rank's part of an axis of `length` elements of `kv_heads` heads: whole heads, at
        least one; several ranks have the same one if there are fewer heads than ranks.
        """
        if kv_heads >= self.size:
            return self.span(length)
        head, each = kv_heads * self.rank // self.size, length // kv_heads
        return slice(head * each, (head + 1) * each)

    def among(self, name: str) -> "TensorParallel":
        """Return the group of ranks that share the tensor of this canonical name, and this one's
        number in it.
        """
        if ".mlp.experts." in name:
            share = self.size // self.experts
            return TensorParallel(self.rank % share, share)
        if self.shared_whole and ".mlp.shared_expert." in name:
            return TensorParallel()
        return self

    def architecture(self, arch: Architecture) -> Architecture:
        """Return the model that this rank's parts of `arch` form; its vocabulary is the whole
        one.
        """
        if self.size == 1:
            return arch
        narrow = {spec: self._layer(spec) for spec in set(arch.layer_specs)}
        return replace(
            arch,
            heads=arch.heads // self.size,
            kv_heads=max(1, arch.kv_heads // self.size),
            layer_specs=tuple(narrow[spec] for spec in arch.layer_specs),
        )

    def parameters(self, arch: Architecture) -> int:
        """Return how many weights of `arch` this rank has, counting a tied head once."""
        return sum(
            math.prod(self.shape(name, shape, arch))
            for name, shape in self.own(expected_tensors(arch), arch).items()
        )

    def own(
        self, tensors: Mapping[str, tuple[int, ...]], arch: Architecture
    ) -> dict[str, tuple[int, ...]]:
        """Return those of `tensors`, by canonical name, of which this rank has a part: all but
        those of other ranks' experts.
        """
        if self.experts == 1:
            return dict(tensors)
        own_shapes = expected_tensors(self.architecture(arch))
        return {name: shape for name, shape in tensors.items() if name in own_shapes}

    def shape(self, name: str, shape: tuple[int, ...], arch: Architecture) -> tuple[int, ...]:
        """Return the shape of this rank's part of a tensor of that name and shape. arch: the whole
        model.
        """
        pieces, axis = self.pieces(name, shape, arch), axis_of(name)
        found = [[part.stop - part.start for part in piece] for piece in pieces]
        shape_here = found[0]
        shape_here[axis] = sum(each[axis] for each in found)
        return tuple(shape_here)

    def pieces(
        self, name: str, shape: tuple[int, ...], arch: Architecture
    ) -> list[tuple[slice, ...]]:
        """Return this rank's pieces of a tensor of this name and shape, consecutive along `axis_of`
        its name: one, or several if the tensor is split by parts. arch: the whole model.
        """
        rows, columns = slice(0, shape[0]), tuple(slice(0, length) for length in shape[1:])
        ranks = self.among(name)
        match cut_of(name):
            case Cut.ROWS:
                rows = ranks.span(shape[0])
            case Cut.KV_HEADS:
                rows = ranks.kv_span(arch.kv_heads, shape[0])
            case Cut.PARTS:
                spans = ranks.spans(_parts(arch.recurrent, name, shape[0]))
                return [(span, *columns) for span in spans]
            case Cut.COLUMN_PARTS:
                spans = ranks.spans(_parts(arch.recurrent, name, shape[-1]))
                return [(rows, *columns[:-1], span) for span in spans]
            case Cut.COLUMNS:
                columns = *columns[:-1], ranks.span(shape[-1])
        return [(rows, *columns)]

    def spans(self, lengths: tuple[int, ...]) -> list[slice]:
        """Return this rank's part of each of the consecutive parts, of these lengths, along an
        axis.
        """
        begins = np.cumsum((0, *lengths[:-1])).tolist()
        spans = zip(begins, map(self.span, lengths), strict=True)
        return [slice(begin + span.start, begin + span.stop) for begin, span in spans]

    def _layer(self, spec: LayerSpec) -> LayerSpec:
        recurrent = spec.recurrent
        if isinstance(recurrent, GatedDelta):
            heads = recurrent.key_heads // self.size, recurrent.value_heads // self.size
            recurrent = replace(recurrent, key_heads=heads[0], value_heads=heads[1])
        elif isinstance(recurrent, ShortConvolution):
            recurrent = replace(recurrent, channels=recurrent.channels // self.size)
        fed = self._feed_forward(spec.feed_forward)
        return replace(spec, feed_forward=fed, recurrent=recurrent)

    def _feed_forward(self, spec: Dense | Experts) -> Dense | Experts:
        if isinstance(spec, Dense):
            return replace(spec, width=spec.width // self.size)
        share = self.size // self.experts
        own = TensorParallel(self.rank // share, self.experts).span(spec.count)
        return replace(
            spec,
            width=spec.width // share,
            shared=spec.shared if self.shared_whole else spec.shared // self.size,
            own=None if self.experts == 1 else range(own.start, own.stop),
            shared_whole=self.shared_whole,
        )


def check_divides(arch: Architecture, tp: TensorParallel) -> None:
    """Raise ConfigError if a model cannot be divided among `tp.size` ranks; the message says by how
    many it could be.
    """
    _check_experts(arch, tp)
    fault = _fault(arch, tp)
    if fault is None:
        return
    able = [n for n in range(1, arch.heads + 1) if _fault(arch, _resized(tp, n)) is None]
    ways = f"this model can be shared by {_listed(able)}"
    if able == [1] and not tp.shared_whole and _fault(arch, replace(tp, shared_whole=True)) is None:
        ways = "with --replicate-shared-expert every rank has all of it"
    raise ConfigError(f"tp-size is {tp.size}, but {fault}; {ways}.")


def _check_experts(arch: Architecture, tp: TensorParallel) -> None:
    mixtures = {s.feed_forward for s in arch.layer_specs if isinstance(s.feed_forward, Experts)}
    if not mixtures:
        if tp.experts > 1:
            raise ConfigError(
                f"ep-size is {tp.experts}, but this model has no experts; leave it out."
            )
        return
    counts = {about.count for about in mixtures}
    able = [n for n in range(1, tp.size + 1) if not any(c % n for c in (tp.size, *counts))]
    fault = ""
    if tp.size % tp.experts:
        fault = f"does not divide tp-size, which is {tp.size}"
    elif any(count % tp.experts for count in counts):
        fault = f"does not divide the model's {_listed(sorted(counts), 'and')} experts"
    if fault:
        raise ConfigError(
            f"ep-size is {tp.experts}, which {fault}; with {tp.size} ranks it can be "
            f"{_listed(able)}."
        )


def _resized(tp: TensorParallel, size: int) -> TensorParallel:
    """Return `tp` for `size` ranks; if each rank was a group of experts, so it is then."""
    experts = size if tp.experts == tp.size else tp.experts if size > 1 else 1
    return TensorParallel(0, size, experts, tp.shared_whole)


def _listed(numbers: list[int], last: str = "or") -> str:
    return f" {last} ".join(str(number) for number in numbers)


def _fault(arch: Architecture, tp: TensorParallel) -> str | None:
    """Return why a model cannot be divided like this, as a clause; None if it can."""
    size = tp.size
    if size % tp.experts:
        return f"its {tp.experts} groups of experts do not divide by that"
    parts = [("attention heads", arch.heads, size)]
    match arch.recurrent:
        case GatedDelta() as net:
            parts.append(("key heads of a gated delta net", net.key_heads, size))
        case ShortConvolution() as convolution:
            parts.append(("channels of a convolution", convolution.channels, size))
    for spec in dict.fromkeys(arch.layer_specs):
        match spec.feed_forward:
            case Dense(width):
                parts.append(("feed-forward columns", width, size))
            case Experts() as experts:
                parts.append(("experts", experts.count, tp.experts))
                parts.append(("columns of each expert", experts.width, size // tp.experts))
                whole = tp.shared_whole
                parts.append(("columns of the shared expert", experts.shared, 1 if whole else size))
        if spec.wide_qk_norm and size > 1:
            return "its queries are normed over all heads at once"
    if size > 1 and len(arch.cache_shapes) > 1:
        return "its layers keep keys and values of different shapes"
    for what, count, ranks in parts:
        if count % ranks:
            return f"its {count} {what} do not divide by {'that' if ranks == size else ranks}"
    groups = arch.kv_heads
    if groups % size and size % groups:
        return f"its {groups} key/value heads neither divide by that nor divide it"
    return None


class RankCheckpoint:
    """A rank's parts of a checkpoint, as a Checkpoint of its own; nothing else is read.

    full   the checkpoint
    tp     which rank this is
    """

    def __init__(self, full: Checkpoint, tp: TensorParallel) -> None:
        self.full, self.tp = full, tp
        self._architecture = tp.architecture(full.architecture)
        shapes = {name: full.shape(name) for name in full.names()}
        self._names = tuple(tp.own(shapes, full.architecture))

    @property
    def architecture(self) -> Architecture:
        """The network that this rank's parts form."""
        return self._architecture

    @property
    def path(self) -> Path:
        """The file or folder of the whole checkpoint."""
        return self.full.path

    def names(self) -> tuple[str, ...]:
        """Return the canonical names of all tensors of which it has a part."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of a tensor. Raises KeyError for an unknown name."""
        return self.tp.shape(name, self.full.shape(name), self.full.architecture)

    def tensor(self, name: str) -> Floats:
        """Return the rank's part as float32; zeros if another rank adds the tensor for all. Raises
        KeyError for an unknown name.
        """
        if cut_of(name) is Cut.ONCE and self.tp.among(name).rank:
            return np.zeros(self.shape(name), np.float32)
        pieces = [self._piece(name, index) for index in self._pieces(name)]
        return np.concatenate(pieces, axis_of(name)) if len(pieces) > 1 else pieces[0]

    def _piece(self, name: str, index: tuple[slice, ...]) -> Floats:
        packed = self.full.packed(name)
        if packed is None and len(index) == 2 and isinstance(self.full, ReadInParts):
            return self.full.part(name, *index)
        if packed is None:
            return self.full.tensor(name)[index]
        rows, columns = index
        blocks = _covering(packed.kind, columns, packed.columns)
        part = _part(packed, rows, blocks).floats()
        return part[:, columns.start - blocks.start : columns.stop - blocks.start]

    def packed(self, name: str) -> Packed | None:
        """Return the rank's part of a matrix as stored; None for a vector, and if the part does not
        end at the end of a block of the format, since blocks are not split. Raises KeyError for an
        unknown name.
        """
        packed = self.full.packed(name)
        if packed is None:
            return None
        pieces, axis = self._pieces(name), axis_of(name)
        if any(_covering(packed.kind, each, packed.columns) != each for _, each in pieces):
            return None
        found = [_part(packed, *piece) for piece in pieces]
        if len(found) == 1:
            return found[0]
        columns = self.shape(name)[1]
        octets = np.concatenate([part.rows for part in found], axis)
        return replace(found[0], rows=octets, columns=columns)

    def grouped(self, name: str) -> Grouped | None:
        """Return the rank's part of a matrix in few bits; None if it has none, or the part begins
        within a group or is in several pieces.
        """
        found, pieces = grouped_of(self.full, name), self._pieces(name)
        return None if found is None or len(pieces) > 1 else found.cut(*pieces[0])

    def _pieces(self, name: str) -> list[tuple[slice, ...]]:
        return self.tp.pieces(name, self.full.shape(name), self.full.architecture)


def axis_of(name: str) -> int:
    """Return the axis along which the tensor of this canonical name is split: -1 for columns, 0
    for rows.
    """
    return -1 if cut_of(name) is Cut.COLUMN_PARTS else 0


def _parts(about: Recurrent | None, name: str, length: int) -> tuple[int, ...]:
    """Return the lengths of the consecutive parts of the axis by which a recurrent layer's tensor
    is split. Interleaved value heads form as many parts as a key head has value heads.
    """
    if not isinstance(about, GatedDelta):
        return (length // 3,) * 3
    times = about.value_heads // about.key_heads if about.tiled else 1
    if name.endswith("conv1d.weight"):
        return about.keys, about.keys, *((about.values // times,) * times)
    return (length // times,) * times


def _covering(kind: str, columns: slice, length: int) -> slice:
    """Return the columns of the format's blocks that contain these columns."""
    block = STORAGE[kind].block
    return slice(columns.start // block * block, min(-(-columns.stop // block) * block, length))


def _part(packed: Packed, rows: slice, columns: slice) -> Packed:
    """Return rows and whole blocks of columns of a matrix, as a view."""
    _, block, size = STORAGE[packed.kind]
    octets = slice(columns.start // block * size, -(-columns.stop // block) * size)
    return Packed(packed.kind, packed.rows[rows, octets], columns.stop - columns.start)
