"""Names that projects give the tensors of prediction layers, those besides a decoder layer's
included.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.checkpoints.checkpoint import shortened
from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.naming import StoredPart, layer_pieces
from forerun.errors import ModelError
from forerun.networks.arch import Architecture

EMBEDDING_NORM, HIDDEN_NORM, FUSE, FINAL_NORM = "embedding_norm", "hidden_norm", "fuse", "norm"
"""A layer's tensors besides those of a decoder layer; see PredictionLayers.own."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Files = Mapping[str, TensorFile]
"""Stored name -> the file that has it."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The names that one project gives the tensors of prediction layers.

    title         the project
    layer         prefix of a layer's own tensors; its number in group 1
    own           other tensors, after that prefix or, with `apart`, without it -> the part, or the
                  target's tensor of which it is a copy
    apart         those belong to no layer: all share them
    hidden_first  the fuse reads the hidden state before the embedding
    """

    title: str
    layer: re.Pattern[str]
    own: Mapping[str, str]
    apart: bool = False
    hidden_first: bool = False


DEEPSEEK = Naming(
    "DeepSeek-V3 and GLM-4.5",
    re.compile(r"model\.layers\.(\d{1,9})\."),
    {
        "enorm.weight": EMBEDDING_NORM,
        "hnorm.weight": HIDDEN_NORM,
        "eh_proj.weight": FUSE,
        "shared_head.norm.weight": FINAL_NORM,
        "embed_tokens.weight": EMBEDDING,
        "shared_head.head.weight": HEAD,
    },
)
MIMO = Naming(
    "MiMo",
    re.compile(r"model\.mtp_layers\.(\d{1,9})\."),
    {
        "token_layernorm.weight": EMBEDDING_NORM,
        "hidden_layernorm.weight": HIDDEN_NORM,
        "input_proj.weight": FUSE,
        "final_layernorm.weight": FINAL_NORM,
    },
    hidden_first=True,
)
QWEN = Naming(
    "Qwen3-Next",
    re.compile(r"mtp\.layers\.(\d{1,9})\."),
    {
        "mtp.pre_fc_norm_embedding.weight": EMBEDDING_NORM,
        "mtp.pre_fc_norm_hidden.weight": HIDDEN_NORM,
        "mtp.fc.weight": FUSE,
        "mtp.norm.weight": FINAL_NORM,
        "mtp.embed_tokens.weight": EMBEDDING,
    },
    apart=True,
)
ZEROED = ("glm4_moe",)
"""Families whose own code zeroes the embedding at position 0."""
BORROWED = (EMBEDDING, HEAD)
"""The target's tensors of which a file may have a copy."""


def divided(
    files: Files, arch: Architecture
) -> tuple[dict[str, TensorFile], dict[str, TensorFile]]:
    """Divide a folder's tensors, by their stored names, into the target's and those of its
    prediction layers.
    """
    own_names = {name for name in files if _belongs(name, files, arch)}
    return (
        {name: file for name, file in files.items() if name not in own_names},
        {name: file for name, file in files.items() if name in own_names},
    )


def _belongs(name: str, files: Files, arch: Architecture) -> bool:
    """Return whether a tensor belongs to a prediction layer. A layer after the target's without a
    fuse does not: it is a fault of the target.
    """
    match = DEEPSEEK.layer.match(name)
    if match is not None:
        return int(match[1]) >= arch.layers and f"{match[0]}eh_proj.weight" in files
    return name.startswith(("mtp.", "model.mtp_layers."))


def several(arch: Architecture, count: int) -> Architecture:
    """Return `arch` with `count` copies of its last attention layer."""
    attends = [spec for spec in arch.layer_specs if spec.recurrent is None]
    return replace(arch, layer_specs=tuple(attends[-1:] * count))


def own_name(layer: int, part: str) -> str:
    """Return the canonical name of a part of a layer; without a part, the prefix of all of them."""
    return f"predict.{layer}.{part}.weight" if part else f"predict.{layer}."


def naming_of(files: Files, arch: Architecture, where: Path) -> tuple[Naming, int, int]:
    """Return how a folder names its prediction layers, the number of the first, and their count.
    Raises ModelError if numbers are missing or no naming fits.
    """
    for naming in (MIMO, QWEN, DEEPSEEK):
        numbers = sorted({int(m[1]) for name in files if (m := naming.layer.match(name))})
        first = arch.layers if naming is DEEPSEEK else 0
        if numbers and numbers != list(range(first, first + len(numbers))):
            raise ModelError(
                f"{where}: its prediction layers have the numbers {numbers}; they must count from "
                f"{first} on"
            )
        if numbers:
            return naming, first, len(numbers)
    raise ModelError(f"{where}: prediction layers without a layer: {shortened(sorted(files))}")


def pieces(
    arch: Architecture, naming: Naming, first: int, count: int, files: Iterable[str] = ()
) -> dict[str, tuple[str, StoredPart]]:
    """Map the canonical name of every tensor that the file of `count` layers from `first` on may
    have to its stored name and part. files: names of the tensors there are.
    """
    parts: dict[str, tuple[str, StoredPart]] = {}
    for layer, spec in enumerate(arch.layer_specs):
        pattern = naming.layer.pattern.replace("\\", "")
        prefix = pattern.replace("(d{1,9})", str(layer + first))
        for name, piece in layer_pieces(arch, spec, files).items():
            parts[f"model.layers.{layer}.{name}"] = prefix + piece.stored, piece
        if naming.apart and layer:
            continue
        for name, (stored, piece) in own_pieces(arch, naming, layer).items():
            parts[name] = stored if naming.apart else prefix + stored, piece
    return parts


def own_pieces(arch: Architecture, naming: Naming, layer: int) -> dict[str, tuple[str, StoredPart]]:
    """Map the canonical names of a layer's tensors besides those of a decoder layer to their stored
    names, after any prefix, and parts.
    """
    vocabulary, width = (arch.vocab, arch.hidden), (arch.hidden,)
    shapes = {EMBEDDING: vocabulary, HEAD: vocabulary, FUSE: (arch.hidden, 2 * arch.hidden)}
    pieces = {}
    for stored, part in naming.own.items():
        shape = shapes.get(part, width)
        name = copy_name(part, layer) if part in BORROWED else own_name(layer, part)
        pieces[name] = stored, StoredPart(stored, shape, shape)
    return pieces


def copy_name(name: str, layer: int) -> str:
    """Return the name under which a layer may store a copy of one of the target's tensors."""
    return f"copy.{layer}.{name}"


def copied(name: str) -> bool:
    """Return whether a name is one of `copy_name`: files may leave it out."""
    return name.startswith("copy.")
