"""LoRA adapters in peft's format: folders of adapter_config.json and adapter_model.safetensors.

A module's weight W becomes W + scale B A, with B [out,r] and A [r,in]. Nothing is merged: executors
run both products in addition to the base's.
"""

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
from forerun.networks.layer_spec import Experts
from forerun.types import Floats

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 1024
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_IN_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d{1,9})\.(.+)")
_ANY, _END = r".*\.", re.compile(r"(?:\.\*\\\.)?(?:\w|\\?\.)+")
"""Patterns of module names that match a suffix, as peft's own do."""
_EXPERTS = re.compile(r"(?:(?:mlp|feed_forward|block_sparse_moe|moe)\.)?experts(?:\.base_layer)*")
_HARMLESS = (
    *("peft_type", "task_type", "base_model_name_or_path", "lora_dropout", "target_modules"),
    *("inference_mode", "revision", "auto_mapping", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "peft_version", "runtime_config"),
    *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),
    *("ensure_weight_tying", "qalora_group_size", "target_parameters"),
)
"""Keys that have no effect besides on the names and shapes of tensors."""

_BESIDE = ("gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights that leave the base unchanged. For "pissa", "olora", "corda" and
"loftq" peft subtracts from the base when it loads the adapter.
"""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The scaled product that an adapter adds to one matrix: down float32[r,in], up
    float32[out,r].
    """

    down: Floats
    up: Floats


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter, read for one model.

    name      its name in requests
    matrices  by canonical name without `.weight`
    digest    hash of its files, part of the salt of cached prefixes
    """

    name: str
    path: Path
    matrices: Mapping[str, LowRank]
    digest: bytes

    @property
    def rank(self) -> int:
        """The largest rank of its matrices."""
        return max(len(one.down) for one in self.matrices.values())

    @property
    def bytes(self) -> int:
        """Bytes of its matrices as float32."""
        return sum(one.down.nbytes + one.up.nbytes for one in self.matrices.values())


def read_adapter(name: str, folder: Path, arch: Architecture) -> LoraAdapter:
    """Read a folder for a model of this architecture. Raises ModelError naming each key, tensor or
    module that is not supported.
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
    pairs, adapted = _pairs(file), _Adapted(arch)
    matrices: dict[str, LowRank] = {}
    for module in pairs:
        matrices |= _placed(module, file, pairs[module], scaling, adapted)
    if not matrices:
        raise ModelError(f"{folder / _WEIGHTS} holds no matrix")
    digest = blake2b(file.data.data, digest_size=16)
    digest.update((folder / _CONFIG).read_bytes())
    return LoraAdapter(name, folder, matrices, digest.digest())


class _Scaling:
    """Reads adapter_config.json. Raises ModelError naming what is not supported."""

    def __init__(self, keys: Keys) -> None:
        if keys.get("peft_type") != "LORA":
            raise keys.unfit("peft_type", keys.get("peft_type"), "'LORA'")
        ranks: dict[str, Any] = keys.get("rank_pattern", {})
        if not isinstance(ranks, dict) or not all(isinstance(r, int) for r in ranks.values()):
            raise keys.unfit("rank_pattern", ranks, "modules' names, and their ranks")
        self._ranks = {keys.integer("r"), *ranks.values()}
        self._alpha = keys.real("lora_alpha", 8.0)
        self._rooted = keys.flag("use_rslora", False)
        keys.require("bias", "none")
        begun = keys.get("init_lora_weights", True)
        if not isinstance(begun, bool) and begun not in _BESIDE:
            wanted = f"true or one of {', '.join(_BESIDE)}: others change the base's weights"
            raise keys.unfit("init_lora_weights", begun, wanted)
        alphas: dict[str, Any] = keys.get("alpha_pattern", {})
        if not isinstance(alphas, dict) or not all(map(_is_alpha, alphas.items())):
            message = "ends of modules' names, and their alphas"
            raise keys.unfit("alpha_pattern", alphas, message)
        ends = (name.removeprefix(_ANY).replace("\\.", ".") for name in alphas)
        self._alphas = dict(zip(ends, alphas.values(), strict=True))
        keys.refuse_the_rest(
            lambda name, value: name in _HARMLESS or value is False or value in ({}, [], "")
        )

    def of(self, module: str, rank: int) -> float:
        """Return the scale of a module's product with matrices of this rank. Raises ModelError for
        a rank that adapter_config.json does not have.
        """
        if rank not in self._ranks:
            known = ", ".join(map(str, sorted(self._ranks)))
            raise ModelError(
                f"{module} has the rank {rank}, but r and rank_pattern of {_CONFIG} say {known}: "
                "its files are of different adapters"
            )
        named = (a for key, a in self._alphas.items() if f".{module}".endswith(f".{key}"))
        alpha = float(next(named, self._alpha))
        return alpha / (rank**0.5 if self._rooted else rank)


def _is_alpha(item: tuple[str, Any]) -> bool:
    """Return whether an item of alpha_pattern is a module's name and a number."""
    pattern, alpha = item
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    return number and abs(alpha) < 1e30 and _END.fullmatch(pattern) is not None


def _pairs(file: TensorFile) -> dict[str, dict[str, str]]:
    """Return module -> its tensors' names by "A" and "B". Raises ModelError naming all other
    tensors.
    """
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


class _Adapted:
    """The matrices of a model that executors adapt, as parts of stored ones."""

    def __init__(self, arch: Architecture) -> None:
        self._arch = arch
        self._layers: dict[int, dict[str, dict[str, StoredPart]]] = {}

    def parts(self, module: str) -> tuple[int, dict[str, StoredPart]]:
        """Return a module's layer, and the parts of its matrix by canonical name. Raises ModelError
        if no adapter may change that module.
        """
        layer, name = self._place(module)
        if layer not in self._layers:
            self._layers[layer] = self._by_stored(layer)
        parts = self._layers[layer].get(f"{name}.weight", {})
        if not parts or not all(map(_runs, parts)):
            raise ModelError(
                f"{module} is not adapted here; projections of attention but kv_b_proj, of "
                "recurrent layers, of feed-forwards and of experts are, and routers"
            )
        return layer, parts

    def experts(self, module: str) -> "_AllExperts | None":
        """Return the experts if a module has all of them as one parameter; None for any other
        module.
        """
        layer, name = self._place(module)
        spec = self._arch.layer_specs[layer]
        for room, experts in (("mlp", spec.feed_forward), ("moe", spec.beside)):
            if isinstance(experts, Experts) and _EXPERTS.fullmatch(name):
                prefix, alternating = f"model.layers.{layer}.{room}", self._arch.family == "gpt_oss"
                return _AllExperts(prefix, experts, self._arch.hidden, alternating)
        return None

    def _place(self, module: str) -> tuple[int, str]:
        match = _IN_LAYER.fullmatch(module)
        if match is None or int(match[1]) >= self._arch.layers:
            raise ModelError(
                f"{module} is no module of the model's layers, and is not adapted here"
            )
        return int(match[1]), match[2]

    def _by_stored(self, layer: int) -> dict[str, dict[str, StoredPart]]:
        found: dict[str, dict[str, StoredPart]] = {}
        for name, piece in layer_pieces(self._arch, self._arch.layer_specs[layer]).items():
            found.setdefault(piece.stored, {})[name] = piece
        return found


def _placed(
    module: str, file: TensorFile, pair: dict[str, str], scaling: _Scaling, adapted: _Adapted
) -> dict[str, LowRank]:
    """Return the product that the adapter adds to each canonical matrix of the module."""
    down, up = file.floats(pair["A"]), file.floats(pair["B"])
    if (experts := adapted.experts(module)) is not None:
        return experts.placed(module, down, up, scaling)
    layer, parts = adapted.parts(module)
    shape = next(iter(parts.values())).stored_shape
    rank = len(down)
    if not 0 < rank <= MOST_RANK or down.shape != (rank, shape[1]) or up.shape != (shape[0], rank):
        raise ModelError(
            f"{module}: lora_A {list(down.shape)} and lora_B {list(up.shape)} do not fit a weight "
            f"of {list(shape)}, with ranks up to {MOST_RANK}"
        )
    scaled = up * np.float32(scaling.of(module, rank))
    return {
        f"model.layers.{layer}.{name.removesuffix('.weight')}": LowRank(down, _rows(scaled, part))
        for name, part in parts.items()
    }


@dataclass(frozen=True, slots=True)
class _AllExperts:
    """All experts of a layer, adapted as one parameter (peft's target_parameters): lora_A [E r,in]
    by expert, lora_B [out, r E] by rank.

    alternating  rows of gate and up alternate
    """

    prefix: str
    experts: Experts
    hidden: int
    alternating: bool

    def placed(
        self, module: str, down: Floats, up: Floats, scaling: _Scaling
    ) -> dict[str, LowRank]:
        """Return the product that the adapter adds to each expert's matrices: gate and up, or
        down.
        """
        count, width = self.experts.count, self.experts.width
        rank, rest = divmod(len(down), count)
        shape = up.shape[:1] + down.shape[1:]
        opens = shape == (2 * width, self.hidden)
        fits = (opens or shape == (self.hidden, width)) and up.shape[1:] == (len(down),)
        if not fits or rest or not 0 < rank <= MOST_RANK:
            raise ModelError(
                f"{module}: lora_A {list(down.shape)} and lora_B {list(up.shape)} do not fit "
                f"{count} experts of width {width}, with ranks up to {MOST_RANK}"
            )
        first = down.reshape(count, rank, -1)
        parameter = "gate_up_proj" if opens else "down_proj"
        named = f"{module.partition('.base_layer')[0]}.{parameter}"
        last = up.reshape(-1, rank, count) * np.float32(scaling.of(named, rank))
        parts = {"down": slice(None)}
        if opens and self.alternating:
            parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        elif opens:
            parts = {"gate": slice(width), "up": slice(width, None)}
        return {
            f"{self.prefix}.experts.{expert}.{part}_proj": LowRank(
                first[expert], np.ascontiguousarray(last[rows, :, expert])
            )
            for expert in range(count)
            for part, rows in parts.items()
        }


def _rows(up: Floats, part: StoredPart) -> Floats:
    """Return the rows of a stored matrix that belong to the part, in its order."""
    rows = up if part.rows is None else up[part.rows]
    return np.ascontiguousarray(rows if part.order is None else rows[part.order])


def _runs(name: str) -> bool:
    """Return whether executors adapt this matrix of a layer: all products except those that latent
    attention absorbs, and routers.
    """
    part = name.removesuffix(".weight").rpartition(".")[2]
    others = "kv_a_proj_with_mqa", "per_layer_input_gate", "per_layer_projection", "gate"
    return part in others or (part.endswith("_proj") and part != "kv_b_proj")
