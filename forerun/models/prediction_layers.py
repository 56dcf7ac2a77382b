"""The target's own prediction layers ("multi-token prediction", MTP; SGLang's NEXTN), read from the
target's checkpoint under any of the published namings.

A prediction layer (DeepSeek-V3, arXiv 2412.19437, section 2.2) reads a hidden state beside the
embedding of a token, and predicts the token after it. Of K layers the k-th (from 1) has an entry at
every token from t_k on, in one of the paper's rows each (its row i is the entry at t_{i+k}):

    x        = fuse_k [norm_e(embed(t_p)); norm_h(o_{k-1}(p-1))]
    o_k(p)   = norm_f(layer_k(x))       logits of t_{p+1} = head(o_k(p))

where o_0 is the target's hidden state after the final norm, embedding and output head are the
target's, and a layer's attention sees its own entries, from t_k on. So layer k predicts the k-th
token behind what the target has run. What comes further behind is predicted by layer K from its own
outputs, o_K(p-1) in the place of o_{K-1}(p-1): with one layer, all depths, as SGLang serves these.
DeepSeek's and Qwen's fuse reads the embedding first, MiMo's the hidden state; Qwen's layers share
one fuse and its norms.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from forerun.errors import ModelError
from forerun.models.arch import Architecture
from forerun.models.cache_layer import CacheLayer
from forerun.models.checkpoint import Checkpoint, shortened
from forerun.models.mapped import Packed, TensorFile
from forerun.models.naming import Held, StoredPart, layer_pieces
from forerun.types import Floats, Ints

EMBEDDING_NORM, HIDDEN_NORM, FUSE, FINAL_NORM = "embedding_norm", "hidden_norm", "fuse", "norm"
"""What a layer has besides a decoder layer; see PredictionLayers.own."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

Files = Mapping[str, TensorFile]
"""Stored name -> the file that has it."""


@dataclass(frozen=True, slots=True)
class Naming:
    """How one project stores prediction layers.

    title         whose it is
    layer         prefix of a layer's own tensors; its number in group 1
    own           what else there is, behind that prefix or, with `apart`, as it is -> its part, or
                  the target's tensor that it is a copy of
    apart         those belong to no layer: all share them
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
        "shared_head.norm.weight": FINAL_NORM,
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
        "final_layernorm.weight": FINAL_NORM,
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
        "mtp.norm.weight": FINAL_NORM,
        "mtp.embed_tokens.weight": _EMBEDDING,
    },
    apart=True,
)
_ZEROED = ("glm4_moe",)
"""Families whose own code does so."""
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
    """A target's prediction layers, whole: a Checkpoint of as many decoder layers, the target's
    embedding and head, and of each layer FUSE [H,2H], EMBEDDING_NORM, HIDDEN_NORM and FINAL_NORM
    [H], called as `own` says.

    kind          what it is, in a sentence's words
    hidden_first  the fuse reads the hidden state before the embedding
    apart         all layers share what `own` names
    count         K: layer k drafts depth k, the last one all that is deeper
    target_ids    int32[Vd] the tokens that may be proposed, and whose rows the head has
    folder        where they are, if not in the target's checkpoint
    zeroed        the embedding of the entry at position 0 counts as zeros
    carries_normed  the next draft step reads o_k as its head does; else what it was before norm_f
                    (`--draft-reading feedback=raw`; projects disagree, and lose acceptance at the
                    second position silently)
    """

    kind: ClassVar[str] = "prediction layers"
    warnings: ClassVar[tuple[str, ...]] = ()

    target: Checkpoint
    files: Mapping[str, Held]
    hidden_first: bool
    apart: bool
    count: int
    target_ids: Ints
    folder: Path | None = None
    zeroed: bool = False
    carries_normed: bool = True

    @property
    def architecture(self) -> Architecture:
        """K layers, as the target's last."""
        return _layers(self.target.architecture, self.count)

    def own(self, layer: int, part: str) -> str:
        """Canonical name of a part of layer 0 .. K-1."""
        return _own(0 if self.apart else layer, part)

    def first(self, count: int) -> "PredictionLayers":
        """Without the layers beyond the first `count`, which nothing shallower reads."""
        if count >= self.count:
            return self
        beyond = [f"model.layers.{layer}." for layer in range(count, self.count)]
        beyond += [_own(layer, "") for layer in range(count, self.count) if not self.apart]
        files = {n: item for n, item in self.files.items() if not n.startswith(tuple(beyond))}
        return replace(self, files=files, count=count)

    @property
    def path(self) -> Path:
        """Their own folder, or the target's."""
        return self.folder or self.target.path

    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors."""
        borrowed = (name for name in _BORROWED if name in self.target.names())
        return tuple(dict.fromkeys([*self.files, *borrowed]))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; KeyError for an unknown name."""
        if name not in self.files:
            return self.target.shape(name)
        return self.files[name].piece.shape

    def tensor(self, name: str) -> Floats:
        """The tensor as float32; KeyError, ModelError where it is not finite."""
        if name not in self.files:
            return self.target.tensor(name)
        held = self.files[name]
        values = held.floats()
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: {held.name} holds NaN or infinity; the file is damaged")
        return values

    def packed(self, name: str) -> Packed | None:
        """A matrix as stored; None for a vector."""
        if name not in self.files:
            return self.target.packed(name)
        return self.files[name].packed()

    def limited(self, token_map: Ints) -> "PredictionLayers":
        """Proposing nothing but the target ids of `token_map` (FR-Spec). Raises ModelError where
        they come with a choice of their own.
        """
        if self.vocab < self.architecture.vocab:
            raise ModelError(
                f"{self.path} brings its own draft vocabulary; leave speculative-token-map out"
            )
        return replace(self, target_ids=token_map)

    @property
    def cache(self) -> tuple[CacheLayer, ...]:
        """What the layers keep of a position."""
        arch = self.architecture
        return (arch.cache_layer,) * self.count

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

    @property
    def feature_numbers(self) -> int:
        """H, of the target's last hidden state."""
        return self.architecture.hidden


def _layers(arch: Architecture, count: int) -> Architecture:
    return replace(arch, layer_specs=arch.layer_specs[-1:] * count)


def _own(layer: int, part: str) -> str:
    return f"predict.{layer}.{part}.weight" if part else f"predict.{layer}."


def open_prediction_layers(
    target: Checkpoint,
    files: Files,
    declared: int | None = None,
    folder: Path | None = None,
    target_ids: Ints | None = None,
) -> PredictionLayers:
    """The prediction layers of `target`, of the tensors that `divided` set aside.

    declared    how many its configuration promises, if it says so
    folder      where the tensors are, if not in the target's checkpoint
    target_ids  int32[Vd] the tokens they choose among; None = all

    Raises ModelError: there are none; more or fewer than declared; missing, unexpected or wrongly
    shaped tensors, all named.
    """
    where = folder or target.path
    if not files:
        announced = f"announces {declared} prediction layers, but " if declared else ""
        raise ModelError(
            f"{where} {announced}has no prediction layers (no tensors called mtp or eh_proj)"
        )
    naming, first, count = _naming(files, target.architecture, where)
    if declared and declared != count:
        raise ModelError(
            f"{where}: its configuration promises {declared} prediction layers "
            f"(num_nextn_predict_layers), its tensors are those of {count}"
        )
    arch = _layers(target.architecture, count)
    wanted = _pieces(arch, naming, first, count)
    borrowed = {_copy(name, layer): name for name in _BORROWED for layer in range(count)}
    whole = {stored: piece.whole for stored, piece in wanted.values()}
    faults = [f"unexpected {stored}" for stored in files if stored not in whole]
    needed = {stored for name, (stored, _) in wanted.items() if name not in borrowed}
    faults += [f"missing {stored}" for stored in needed if stored not in files]
    for stored, right in whole.items():
        shape = files[stored].tensors[stored].shape if stored in files else right
        if shape != right:
            faults.append(f"{stored} is {list(shape)}, not {list(right)}")
    if faults:
        raise ModelError(
            f"{where}: its prediction layers are not those of {naming.title}: "
            + shortened(sorted(faults))
        )
    found = {
        name: Held(files[stored], stored, piece)
        for name, (stored, piece) in wanted.items()
        if stored in files
    }
    kept = {name: item for name, item in found.items() if name not in borrowed}
    kept |= _copies(target, found, borrowed, where)
    ids = np.arange(arch.vocab, dtype=np.int32) if target_ids is None else target_ids
    layers = PredictionLayers(target, kept, naming.hidden_first, naming.apart, count, ids, folder)
    return replace(layers, zeroed=folder is None and arch.family in _ZEROED)


def _naming(files: Files, arch: Architecture, where: Path) -> tuple[Naming, int, int]:
    """The naming, the first layer's number, and how many there are."""
    for naming in (_MIMO, _QWEN, _DEEPSEEK):
        numbers = sorted({int(m[1]) for name in files if (m := naming.layer.match(name))})
        first = arch.layers if naming is _DEEPSEEK else 0
        if numbers and numbers != list(range(first, first + len(numbers))):
            raise ModelError(
                f"{where}: its prediction layers have the numbers {numbers}; they must count from "
                f"{first} on"
            )
        if numbers:
            return naming, first, len(numbers)
    raise ModelError(f"{where}: prediction layers without a layer: {shortened(sorted(files))}")


def _pieces(
    arch: Architecture, naming: Naming, first: int, count: int
) -> dict[str, tuple[str, StoredPart]]:
    """Canonical name -> stored name and piece of all that a file may have."""
    wanted: dict[str, tuple[str, StoredPart]] = {}
    vocabulary, width = (arch.vocab, arch.hidden), (arch.hidden,)
    shapes = {_EMBEDDING: vocabulary, _HEAD: vocabulary, FUSE: (arch.hidden, 2 * arch.hidden)}
    for layer, spec in enumerate(arch.layer_specs):
        pattern = naming.layer.pattern.replace("\\", "")
        prefix = pattern.replace("(d+)", str(layer + first))
        for name, piece in layer_pieces(arch, spec).items():
            wanted[f"model.layers.{layer}.{name}"] = prefix + piece.stored, piece
        if naming.apart and layer:
            continue
        for stored, part in naming.own.items():
            shape = shapes.get(part, width)
            name = _copy(part, layer) if part in _BORROWED else _own(layer, part)
            wanted[name] = (
                stored if naming.apart else prefix + stored,
                StoredPart(stored, shape, shape),
            )
    return wanted


def _copy(name: str, layer: int) -> str:
    """A layer's copy of what it shares with the target; the first layer's is called as that."""
    return f"copy.{layer}.{name}" if layer else name


def _copies(
    target: Checkpoint,
    found: Mapping[str, Held],
    borrowed: Mapping[str, str],
    where: Path,
) -> dict[str, Held]:
    """The file's embedding and head, by the target's names, where they are others than the
    target's. Raises ModelError where not all layers have the same.
    """
    kept: dict[str, Held] = {}
    for name in _BORROWED:
        mine = [found[copy] for copy in borrowed if borrowed[copy] == name and copy in found]
        others = [item for item in mine if _differs(target, name, item)]
        odd = [i for i in others if len(others) < len(mine) or not _equal(i, others[0])]
        if odd:
            raise ModelError(
                f"{where}: {odd[0].name} is another than that of the other prediction layers, "
                "which share one embedding and one head"
            )
        kept |= {name: others[0]} if others else {}
    return kept


def _equal(one: Held, other: Held) -> bool:
    return np.array_equal(one.rows(), other.rows())


def _differs(target: Checkpoint, name: str, item: Held) -> bool:
    """Whether a file's copy of the target's embedding or head is another one."""
    tied = name == _HEAD and target.architecture.tied_head
    theirs = target.packed(_EMBEDDING if tied else name)
    return theirs is None or not np.array_equal(item.rows(), theirs.rows)
