"""GGUF checkpoints: canonical names, canonical row order, floats on demand."""

import re
from pathlib import Path

from forerun.errors import ModelError
from forerun.models.arch import Architecture
from forerun.models.checkpoint import check_whole, shortened
from forerun.models.gguf_config import architecture_of
from forerun.models.gguf_header import GgufFile, Value, read_header
from forerun.models.layer_spec import NORM_NAMES
from forerun.models.mapped import Packed
from forerun.types import AnyArray, Floats

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "attn_norm": "before_attention",
    "post_attention_norm": "after_attention",
    "ffn_norm": "before_feed_forward",
    "post_ffw_norm": "after_feed_forward",
}
"""Names of norms by where they stand (layer_spec.NormNames)."""
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)", re.ASCII)


class GgufCheckpoint:
    """A GGUF file as a Checkpoint.

    llama.cpp stores the query and key rows of Llama models with each head's halves
    interleaved, for a rotation of neighbouring pairs; they are put back here, so `tensor` and
    `packed` are always in the half-split order of `forerun.models.rope`.
    """

    def __init__(self, path: Path) -> None:
        """Map and check the file; ModelError names what is wrong with it."""
        self._file = read_header(path)
        self.architecture: Architecture = architecture_of(self._file)
        self._stored = _canonical(self._file, self.architecture)
        shapes = {name: self._file.tensors[source].shape for name, source in self._stored.items()}
        check_whole(self.architecture, shapes, path)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def metadata(self) -> dict[str, Value]:
        """Everything the header says; the tokenizer and chat template live here."""
        return self._file.metadata

    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors."""
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; KeyError for an unknown name."""
        return self._file.tensors[self._stored[name]].shape

    def tensor(self, name: str) -> Floats:
        """The tensor as float32; a read-only view of the file where that is how it is stored."""
        return self._half_split(name, self._file.floats(self._stored[name]))

    def packed(self, name: str) -> Packed | None:
        """A matrix as stored, rows in canonical order; None for a vector."""
        source = self._stored[name]
        stored = self._file.tensors[source]
        if len(stored.shape) != 2:
            return None
        rows = self._half_split(name, self._file.rows(source))
        return Packed(stored.kind, rows, stored.shape[-1])

    def _half_split(self, name: str, rows: AnyArray) -> AnyArray:
        """Undo llama.cpp's interleaving of a query or key head's two halves."""
        arch = self.architecture
        if arch.family != "llama":
            return rows
        if ".q_proj." in name:
            heads = arch.heads
        elif ".k_proj." in name:
            heads = arch.kv_heads
        else:
            return rows
        pairs = rows.reshape(heads, arch.head_size // 2, 2, *rows.shape[1:])
        ordered = pairs.swapaxes(1, 2).reshape(rows.shape)
        ordered.flags.writeable = False
        return ordered


def _canonical(file: GgufFile, arch: Architecture) -> dict[str, str]:
    """Canonical name -> name in the file. ModelError for tensors of no known meaning."""
    norms = NORM_NAMES[arch.layer_specs[0].norms]
    in_layer = _IN_LAYER | {source: getattr(norms, where) for source, where in _NORMS.items()}
    names: dict[str, str] = {}
    unknown = []
    for source in file.tensors:
        layer = _LAYER_NAME.fullmatch(source)
        if source in _TOP:
            names[_TOP[source]] = source
        elif layer and in_layer.get(layer[2]):
            names[f"model.layers.{layer[1]}.{in_layer[layer[2]]}.{layer[3]}"] = source
        elif source != "rope_freqs.weight":
            unknown.append(repr(source))
    if unknown:
        raise ModelError(f"{file.path}: unexpected tensors: {shortened(unknown)}")
    return names
