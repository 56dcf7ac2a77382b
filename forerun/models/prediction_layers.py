"""The target's own prediction layers ("multi-token prediction", MTP; SGLang's NEXTN), read from the
target's checkpoint under any of the published namings.

A prediction layer (DeepSeek-V3, arXiv 2412.19437, section 2.2) reads the target's hidden state h_q
after the final norm beside the embedding of the token after it, and predicts the one after that:

    x   = fuse [norm_e(embed(t_{q+1})); norm_h(h_q)]
    out = norm_f(layer(x))          logits of t_{q+2} = head(out)

with the target's embedding and output head. The next depth receives `out` in the place of h, as
SGLang serves all of these. DeepSeek's and Qwen's fuse reads the embedding first, MiMo's the hidden
state.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from forerun.errors import ModelError
from forerun.models.arch import Architecture, expected_tensors
from forerun.models.cache_layer import CacheLayer
from forerun.models.checkpoint import Checkpoint, Packed, shortened
from forerun.models.mapped import TensorFile
from forerun.types import Floats, Ints

EMBEDDING_NORM, HIDDEN_NORM = "predict.embedding_norm.weight", "predict.hidden_norm.weight"
FUSE = "predict.fuse.weight"
_FINAL_NORM, _EMBEDDING, _HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"

Files = Mapping[str, TensorFile]
"""Stored name -> the file that has it."""


@dataclass(frozen=True, slots=True)
class Naming:
    """How one project stores prediction layers.

    title         whose it is
    layer         prefix of a layer's own tensors; its number in group 1
    own           what else there is, behind that prefix or, with `apart`, as it is -> canonical
    apart         those belong to no layer
    hidden_first  the fuse reads the hidden state before the embedding
    """

    title: str
    layer: re.Pattern[str]
    own: Mapping[str, str]
    apart: bool = False
    hidden_first: bool = False


_DEEPSEEK = Naming(
    "DeepSeek-V3 and GLM-4.5",
    re.compile(r"model\.layers\.(\d+)\."),
    {
        "enorm.weight": EMBEDDING_NORM,
        "hnorm.weight": HIDDEN_NORM,
        "eh_proj.weight": FUSE,
        "shared_head.norm.weight": _FINAL_NORM,
        "embed_tokens.weight": _EMBEDDING,
        "shared_head.head.weight": _HEAD,
    },
)
_MIMO = Naming(
    "MiMo",
    re.compile(r"model\.mtp_layers\.(\d+)\."),
    {
        "token_layernorm.weight": EMBEDDING_NORM,
        "hidden_layernorm.weight": HIDDEN_NORM,
        "input_proj.weight": FUSE,
        "final_layernorm.weight": _FINAL_NORM,
    },
    hidden_first=True,
)
_QWEN = Naming(
    "Qwen3-Next",
    re.compile(r"mtp\.layers\.(\d+)\."),
    {
        "mtp.pre_fc_norm_embedding.weight": EMBEDDING_NORM,
        "mtp.pre_fc_norm_hidden.weight": HIDDEN_NORM,
        "mtp.fc.weight": FUSE,
        "mtp.norm.weight": _FINAL_NORM,
        "mtp.embed_tokens.weight": _EMBEDDING,
    },
    apart=True,
)
_BORROWED = (_EMBEDDING, _HEAD)
"""The target's, of which a file may hold a copy."""


def divided(
    files: Files, arch: Architecture
) -> tuple[dict[str, TensorFile], dict[str, TensorFile]]:
    """A folder's tensors as the target's and its prediction layers'."""
    mine = {name for name in files if _belongs(name, files, arch)}
    return (
        {name: file for name, file in files.items() if name not in mine},
        {name: file for name, file in files.items() if name in mine},
    )


def _belongs(name: str, files: Files, arch: Architecture) -> bool:
    """Whether a tensor is of a prediction layer. Behind the target's layers, a layer without a
    fuse is none: it is a fault of the target.
    """
    found = _DEEPSEEK.layer.match(name)
    if found is not None:
        return int(found[1]) >= arch.layers and f"{found[0]}eh_proj.weight" in files
    return name.startswith(("mtp.", "model.mtp_layers."))


@dataclass(frozen=True, slots=True, eq=False)
class PredictionLayers:
    """A target's first prediction layer, whole: a Checkpoint of one decoder layer with a norm, the
    target's embedding and head, and FUSE [H,2H], EMBEDDING_NORM and HIDDEN_NORM [H].

    kind          what it is, in a sentence's words
    hidden_first  the fuse reads the hidden state before the embedding
    count         layers that the file has; the first is applied again and again
    target_ids    int32[Vd] the tokens that may be proposed, and whose rows the head has
    """

    kind: ClassVar[str] = "prediction layers"

    target: Checkpoint
    files: Mapping[str, tuple[TensorFile, str]]
    hidden_first: bool
    count: int
    target_ids: Ints

    @property
    def architecture(self) -> Architecture:
        """One layer, as the target's last."""
        return _one_layer(self.target.architecture)

    @property
    def path(self) -> Path:
        """The target's."""
        return self.target.path

    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors."""
        borrowed = (name for name in _BORROWED if name in self.target.names())
        return tuple(dict.fromkeys([*self.files, *borrowed]))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; KeyError for an unknown name."""
        if name not in self.files:
            return self.target.shape(name)
        file, stored = self.files[name]
        return file.tensors[stored].shape

    def tensor(self, name: str) -> Floats:
        """The tensor as float32; KeyError, ModelError where it is not finite."""
        if name not in self.files:
            return self.target.tensor(name)
        file, stored = self.files[name]
        values = file.floats(stored)
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: {stored} holds NaN or infinity; the file is damaged")
        return values

    def packed(self, name: str) -> Packed | None:
        """A matrix as stored; None for a vector."""
        if name not in self.files:
            return self.target.packed(name)
        file, stored = self.files[name]
        info = file.tensors[stored]
        if len(info.shape) != 2:
            return None
        return Packed(info.kind, file.rows(stored), info.shape[-1])

    def limited(self, token_map: Ints) -> "PredictionLayers":
        """Proposing nothing but the target ids of `token_map` (FR-Spec)."""
        return replace(self, target_ids=token_map)

    @property
    def cache(self) -> tuple[CacheLayer, ...]:
        """What the layer keeps of a position."""
        arch = self.architecture
        return (CacheLayer(arch.kv_heads, arch.head_size),)

    @property
    def vocab(self) -> int:
        """Vd."""
        return len(self.target_ids)

    @property
    def parameters(self) -> int:
        """Numbers of weights beside the target's; a head of some of its rows is a copy."""
        own = [name for name in self.files if name not in _BORROWED]
        copied = 0 if self.vocab == self.architecture.vocab else self.vocab
        copies = copied * self.architecture.hidden
        return sum(math.prod(self.shape(name)) for name in own) + copies

    @property
    def node_numbers(self) -> int:
        """float32 numbers of a node in a pass, beside its logits."""
        return 6 * self.architecture.hidden + 3 * self.architecture.ffn


def _one_layer(arch: Architecture) -> Architecture:
    return replace(arch, layer_specs=arch.layer_specs[-1:])


def open_prediction_layers(target: Checkpoint, files: Files) -> PredictionLayers:
    """The first prediction layer of `target`, of the tensors that `divided` set aside.

    Raises ModelError: there is none; missing, unexpected or wrongly shaped tensors, all named.
    """
    where, arch = target.path, target.architecture
    if not files:
        raise ModelError(f"{where} has no prediction layers (no tensors called mtp or eh_proj)")
    naming, first, count = _naming(files, where)
    found: dict[str, tuple[TensorFile, str]] = {}
    faults = []
    for stored, file in files.items():
        name = _canonical(stored, naming, first)
        if name is None:
            faults.append(f"unexpected {stored}")
        elif name:
            found[name] = (file, stored)
    expected = _expected(_one_layer(arch))
    faults += [f"missing {_as_stored(name, naming, first)}" for name in expected - found.keys()]
    shapes = {name: file.tensors[stored].shape for name, (file, stored) in found.items()}
    wanted = _shapes(_one_layer(arch))
    for name, shape in shapes.items():
        if name not in wanted:
            faults.append(f"unexpected {found[name][1]}")
        elif shape != wanted[name]:
            faults.append(f"{found[name][1]} is {list(shape)}, not {list(wanted[name])}")
    if faults:
        raise ModelError(
            f"{where}: its prediction layers are not those of {naming.title}: "
            + shortened(sorted(faults))
        )
    kept = {n: item for n, item in found.items() if n not in _BORROWED or _differs(target, n, item)}
    ids = np.arange(arch.vocab, dtype=np.int32)
    return PredictionLayers(target, kept, naming.hidden_first, count, ids)


def _naming(files: Files, where: Path) -> tuple[Naming, int, int]:
    """The naming, the first layer's number, and how many there are."""
    for naming in (_MIMO, _QWEN, _DEEPSEEK):
        numbers = sorted({int(m[1]) for name in files if (m := naming.layer.match(name))})
        if numbers:
            return naming, numbers[0], len(numbers)
    raise ModelError(f"{where}: prediction layers without a layer: {shortened(sorted(files))}")


def _canonical(stored: str, naming: Naming, first: int) -> str | None:
    """Empty for a tensor of a further layer; None for one that has no place."""
    if naming.apart and stored in naming.own:
        return naming.own[stored]
    found = naming.layer.match(stored)
    if found is None:
        return None
    if int(found[1]) != first:
        return ""
    rest = stored[found.end() :]
    return naming.own.get(rest, f"model.layers.0.{rest}")


def _as_stored(name: str, naming: Naming, first: int) -> str:
    """What a canonical name is called in the file."""
    own = next((stored for stored, known in naming.own.items() if known == name), None)
    if own is not None and naming.apart:
        return own
    prefix = naming.layer.pattern.replace("\\", "").replace("(d+)", str(first))
    return prefix + (own or name.removeprefix("model.layers.0."))


def _shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of all that a file may have."""
    hidden = arch.hidden
    return expected_tensors(replace(arch, tied_head=False)) | {
        FUSE: (hidden, 2 * hidden),
        EMBEDDING_NORM: (hidden,),
        HIDDEN_NORM: (hidden,),
    }


def _expected(arch: Architecture) -> set[str]:
    """Canonical names of what a file must have."""
    return _shapes(arch).keys() - {*_BORROWED}


def _differs(target: Checkpoint, name: str, item: tuple[TensorFile, str]) -> bool:
    """Whether a file's copy of the target's embedding or head is another one."""
    file, stored = item
    tied = name == _HEAD and target.architecture.tied_head
    theirs = target.packed(_EMBEDDING if tied else name)
    return theirs is None or not np.array_equal(file.rows(stored), theirs.rows)
