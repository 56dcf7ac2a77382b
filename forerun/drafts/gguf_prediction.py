"""Reads prediction layers from GGUF files, with llama.cpp's names: `blk.N.nextn.*` and a decoder
layer's own tensors after the model's, N from its number of layers on (GLM-4.5, DeepSeek V3); or
alone in a file next to the model's (mtp-*.gguf).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.gguf.header import GgufFile, is_gguf
from forerun.checkpoints.gguf.naming import AnyStored, announced_layers, stored_in_layer
from forerun.checkpoints.gguf.parts import read_gguf
from forerun.checkpoints.naming import StoredTensor
from forerun.checkpoints.prediction_naming import (
    EMBEDDING_NORM,
    FINAL_NORM,
    FUSE,
    HIDDEN_NORM,
    ZEROED,
    Naming,
    copied,
    own_pieces,
    several,
)
from forerun.drafts.prediction_layers import (
    PredictionLayers,
    check_stored,
    layers_of,
)
from forerun.errors import ModelError
from forerun.networks.arch import Architecture, layer_tensors

_TARGETS = ("token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight")
"""Tensors of the whole model that a converter may put into a file of prediction layers."""
_NAMING = Naming(
    "llama.cpp",
    re.compile(r"blk\.(\d{1,9})\."),
    {
        "nextn.enorm.weight": EMBEDDING_NORM,
        "nextn.hnorm.weight": HIDDEN_NORM,
        "nextn.eh_proj.weight": FUSE,
        "nextn.shared_head_norm.weight": FINAL_NORM,
        "nextn.embed_tokens.weight": "model.embed_tokens.weight",
        "nextn.shared_head_head.weight": "lm_head.weight",
    },
)


def open_in_gguf(target: GgufCheckpoint) -> PredictionLayers:
    """Open as many prediction layers as the file's metadata declare. Raises ModelError if there are
    none, or naming all missing, unexpected or wrongly shaped tensors.
    """
    files, count = target.prediction_files, announced_layers(target.metadata)
    there = {name: file.tensors[name].shape for name, file in files.items()}
    if not any(".nextn." in name for name in there):
        announced = f"announces {count} prediction layers, but " if count else ""
        raise ModelError(
            f"{target.path} {announced}has no prediction layers (no tensors called nextn)"
        )
    (file,) = {id(file): file for file in files.values()}.values()
    found = _checked(file, target.architecture, count, there)
    return layers_of(target, _NAMING, found, count)


def holds_layers_alone(path: Path) -> bool:
    """Return whether a path is a GGUF file of prediction layers and no other layers."""
    if not is_gguf(path):
        return False
    try:
        names = read_gguf(path).tensors
    except ModelError:
        return False
    first = any(name.startswith("blk.0.") for name in names)
    return not first and any(".nextn." in name for name in names)


def open_layers_alone(path: Path, target: Checkpoint) -> PredictionLayers:
    """Open the prediction layers in a file of their own. Embedding, final norm and output head are
    the target's, even if the file has others. Raises ModelError if it is damaged or for another
    architecture, or naming all missing, unexpected or wrongly shaped tensors.
    """
    file, arch = read_gguf(path), target.architecture
    own = file.metadata.get("general.architecture")
    theirs = target.metadata["general.architecture"] if isinstance(target, GgufCheckpoint) else own
    if own != theirs:
        raise ModelError(f"{path} holds prediction layers for {own}; the target is {theirs}")
    there = {name: one.shape for name, one in file.tensors.items() if name not in _TARGETS}
    count = announced_layers(file.metadata) if own is not None else 0
    if count < 1:
        raise ModelError(f"{path} announces no prediction layers ({own}.nextn_predict_layers)")
    found = _checked(file, arch, count, there)
    return replace(layers_of(target, _NAMING, found, count, path), zeroed=arch.family in ZEROED)


def _checked(
    file: GgufFile, target: Architecture, count: int, there: Mapping[str, tuple[int, ...]]
) -> dict[str, AnyStored]:
    """Return canonical name -> stored tensor of the layers; `there`: the file's names and shapes.
    Raises ModelError if one is missing, or has another shape.
    """
    expected = _wanted(file, target, count)
    parts = [(name, part) for name, item in expected.items() for part in item.parts]
    check_stored(
        _NAMING.title,
        file.path,
        {part.name: part.piece.stored_shape for _, part in parts},
        there,
        {part.name for name, part in parts if copied(name)},
    )
    absent = {name for name, part in parts if part.name not in there}
    return {name: item for name, item in expected.items() if name not in absent}


def _wanted(file: GgufFile, target: Architecture, count: int) -> dict[str, AnyStored]:
    """Return canonical name -> stored tensor of everything that the file may contain."""
    arch, expected = several(target, count), dict[str, AnyStored]()
    for layer, spec in enumerate(arch.layer_specs):
        prefix = f"blk.{target.layers + layer}."
        for name, shape in layer_tensors(arch, spec).items():
            item = stored_in_layer(file, arch, spec, prefix, name, shape)
            expected[f"model.layers.{layer}.{name}"] = item
        for name, (stored, piece) in own_pieces(arch, _NAMING, layer).items():
            expected[name] = StoredTensor(file, prefix + stored, piece)
    return expected
