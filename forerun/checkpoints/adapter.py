"""LoRA adapters in peft's format: folders of adapter_config.json and adapter_model.safetensors.

A module's weight W becomes W + scale B A, with B [out,r] and A [r,in]. Nothing is merged: executors
run both products beside the base's.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from forerun.checkpoints.checkpoint import shortened
from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.naming import StoredPart, layer_pieces
from forerun.checkpoints.shard import read_shard
from forerun.errors import ModelError
from forerun.networks.arch import Architecture
from forerun.networks.config_json import read_json
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import Dense, LayerSpec
from forerun.types import Floats

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 1024
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_IN_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.+)")
_HARMLESS = (
    *("peft_type", "task_type", "base_model_name_or_path", "lora_dropout", "target_modules"),
    *("init_lora_weights", "inference_mode", "revision", "auto_mapping", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "peft_version", "runtime_config"),
    *("rank_pattern", "ensure_weight_tying", "qalora_group_size"),
)
"""Keys that change nothing beyond which tensors there are, and their shapes."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one matrix: down float32[r,in], up float32[out,r], scaled."""

    down: Floats
    up: Floats


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter, read for one model.

    name      what requests call it
    matrices  by canonical name without `.weight`
    digest    of its files: cached prefixes belong to it
    """

    name: str
    path: Path
    matrices: Mapping[str, LowRank]
    digest: bytes

    @property
    def rank(self) -> int:
        """The greatest rank of its matrices."""
        return max(len(one.down) for one in self.matrices.values())

    @property
    def bytes(self) -> int:
        """Bytes of its matrices as float32."""
        return sum(one.down.nbytes + one.up.nbytes for one in self.matrices.values())


def read_adapter(name: str, folder: Path, arch: Architecture) -> LoraAdapter:
    """Read a folder for a model of this architecture. Raises ModelError naming each key, tensor or
    module that cannot be honoured.
    """
    try:
        return _read(name, folder, arch)
    except ModelError as error:
        raise ModelError(f"the adapter {name}: {error}") from error


def _read(name: str, folder: Path, arch: Architecture) -> LoraAdapter:
    if not (folder / _CONFIG).is_file():
        raise ModelError(f"{folder} is not a folder of peft's: it has no {_CONFIG}")
    if not (folder / _WEIGHTS).is_file():
        raise ModelError(f"{folder} has no {_WEIGHTS}; save it with safe_serialization=True")
    scaling = _Scaling(Keys(read_json(folder / _CONFIG), f"{_CONFIG}: "))
    file = read_shard(folder / _WEIGHTS)
    pairs = _pairs(file)
    matrices: dict[str, LowRank] = {}
    for module in pairs:
        matrices |= _placed(module, file, pairs[module], scaling, arch)
    if not matrices:
        raise ModelError(f"{folder / _WEIGHTS} holds no matrix")
    digest = blake2b(file.data.data, digest_size=16)
    digest.update((folder / _CONFIG).read_bytes())
    return LoraAdapter(name, folder, matrices, digest.digest())


class _Scaling:
    """Reads adapter_config.json. Raises ModelError naming what is not honoured."""

    def __init__(self, keys: Keys) -> None:
        if keys.get("peft_type") != "LORA":
            raise keys.unfit("peft_type", keys.get("peft_type"), "'LORA'")
        self.rank = keys.integer("r")
        self._alpha = keys.real("lora_alpha", 8.0)
        self._rooted = keys.flag("use_rslora", False)
        keys.require("bias", "none")
        self._alphas: dict[str, Any] = keys.get("alpha_pattern", {})
        if not isinstance(self._alphas, dict) or not all(map(_is_alpha, self._alphas.items())):
            message = "names of modules without wildcards, and their alphas"
            raise keys.unfit("alpha_pattern", self._alphas, message)
        keys.refuse_the_rest(
            lambda name, value: name in _HARMLESS or value is False or value in ({}, [], "")
        )

    def of(self, module: str, rank: int) -> float:
        """Return the scale of a module's product with matrices of this rank."""
        named = (a for key, a in self._alphas.items() if f".{module}".endswith(f".{key}"))
        alpha = float(next(named, self._alpha))
        return alpha / (rank**0.5 if self._rooted else rank)


def _is_alpha(item: tuple[str, Any]) -> bool:
    """Return whether an item of alpha_pattern is a module's name and a number."""
    pattern, alpha = item
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    return number and math.isfinite(alpha) and re.fullmatch(r"[\w.]+", pattern) is not None


def _pairs(file: TensorFile) -> dict[str, dict[str, str]]:
    """Return module -> its tensors' names by "A" and "B". Raises ModelError naming all others."""
    pairs: dict[str, dict[str, str]] = {}
    faults = []
    for tensor in file.tensors:
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            faults.append(tensor)
        else:
            pairs.setdefault(match[1], {})[match[2]] = tensor
    if faults:
        raise ModelError(f"tensors that are no LoRA of a linear layer: {shortened(faults)}")
    if halves := [module for module, found in pairs.items() if len(found) < 2]:
        raise ModelError(f"modules with only one of lora_A and lora_B: {shortened(halves)}")
    return pairs


def _placed(
    module: str, file: TensorFile, pair: dict[str, str], scaling: _Scaling, arch: Architecture
) -> dict[str, LowRank]:
    """Return what the adapter adds to each canonical matrix that the module holds."""
    match = _IN_LAYER.fullmatch(module)
    if match is None or int(match[1]) >= arch.layers:
        raise ModelError(f"{module} is no module of the model's layers, and is not adapted here")
    layer, spec = int(match[1]), arch.layer_specs[int(match[1])]
    pieces = layer_pieces(arch, spec)
    parts = {n: p for n, p in pieces.items() if p.stored == f"{match[2]}.weight"}
    if not parts or not all(_runs(name, spec) for name in parts):
        raise ModelError(
            f"{module} is not adapted here; {', '.join(ATTENTION)} of attention and "
            f"{', '.join(FEED_FORWARD)} of dense feed-forwards are"
        )
    down, up = file.floats(pair["A"]), file.floats(pair["B"])
    whole = next(iter(parts.values())).whole
    rank = len(down)
    if not 0 < rank <= MOST_RANK or down.shape != (rank, whole[1]) or up.shape != (whole[0], rank):
        raise ModelError(
            f"{module}: lora_A {list(down.shape)} and lora_B {list(up.shape)} do not fit a weight "
            f"of {list(whole)}, with ranks up to {MOST_RANK}"
        )
    scaled = up * np.float32(scaling.of(module, rank))
    return {
        f"model.layers.{layer}.{name.removesuffix('.weight')}": LowRank(down, _rows(scaled, part))
        for name, part in parts.items()
    }


def _rows(up: Floats, part: StoredPart) -> Floats:
    """Return the rows of a stored matrix that are the part's, in its order."""
    rows = up if part.rows is None else up[part.rows]
    return np.ascontiguousarray(rows if part.order is None else rows[part.order])


def _runs(name: str, spec: LayerSpec) -> bool:
    """Return whether executors adapt this matrix of a layer."""
    room, _, rest = name.partition(".")
    part = rest.removesuffix("_proj.weight") + "_proj"
    if room == "self_attn":
        attention = spec.attention
        plain = spec.recurrent is None and attention.latent is None
        plain = plain and not (attention.gated or attention.keyed_values)
        return plain and part in ATTENTION
    dense = isinstance(spec.feed_forward, Dense) and spec.beside is None
    return room == "mlp" and dense and part in FEED_FORWARD
