"""A checkpoint as a pytree of device arrays.

    embed [V,H], norm [H], head [V,H] (absent where it is the embedding)
    frequencies  tuple of [E/2], one for each of the model's `ropes`
    token_rows [V,L*D], token_projection [H,L*D], token_norm [D]  where tokens have vectors for each
                 layer
    layers       tuple: a dictionary {name: [...]} for each layer; stacked, the layers of a pattern
                 that repeats are one tuple of its layers, {name: [times, ...]} each

Matrices are [in, out] in the dtype of activations, which XLA's CPU backend multiplies a few rows
by in two thirds of the time that [out, in] takes; those of experts and those by token (BY_TOKEN)
are [out, in]. Vectors are float32, norms with the model's offset. Names are the checkpoint's last
parts, without ".weight"; those of experts have one axis more in front.

Stacked layers run in a scan, so a program's size does not grow with the model; XLA's CPU backend
copies each layer out of the stack, which doubles a step's time there, so on the CPU layers lie
apart.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.executors.jax.network.sharding import BY_TOKEN, Sharding
from forerun.networks.arch import PER_LAYER_ROWS, Architecture
from forerun.types import AnyArray

TOKENS = {
    "token_rows": f"{PER_LAYER_ROWS}.weight",
    "token_projection": "model.per_layer_model_projection.weight",
    "token_norm": "model.per_layer_projection_norm.weight",
}
"""Names of the tensors of tokens' vectors for each layer."""

OWN = {("self_attn", "gate_proj"): "heads_gate_proj", ("linear_attn", "norm"): "head_weight"}
"""Short names for tensors whose last name occurs twice in a layer: a feed-forward's gate; norms
with an offset.
"""

Params = dict[str, Any]
"""The pytree."""


class Pattern(NamedTuple):
    """Layers `begin` to begin + period * times - 1: `period` of them, repeated `times` times."""

    begin: int
    period: int
    times: int

    @classmethod
    def of(cls, arch: Architecture) -> "Pattern":
        """Return the pattern in a model's layers that leaves the fewest to compile: mostly one
        layer, six in Gemma 3, all but the first few if experts begin there. 1 time: no pattern, or
        layers keep keys and values of several shapes, or recurrent states.
        """
        specs, best = arch.layer_specs, cls(0, len(arch.layer_specs), 1)
        if len(arch.cache_shapes) > 1 or arch.token_vector or arch.recurrent is not None:
            return best
        for begin in range(len(specs)):
            for period in range(1, (len(specs) - begin) // 2 + 1):
                end = begin + period
                while end < len(specs) and specs[end] == specs[end - period]:
                    end += 1
                found = cls(begin, period, (end - begin) // period)
                if found.spared > best.spared:
                    best = found
        return best

    @property
    def spared(self) -> int:
        """Layers that are not compiled because they repeat another one."""
        return self.period * (self.times - 1)


def load_params(checkpoint: Checkpoint, dtype: Any, sharding: Sharding, stacked: bool) -> Params:
    """Load a checkpoint's parameters to the devices, as the pytree above; each device reads only
    its own part. Raises ModelError if a tensor is missing or of another shape.

    dtype    of matrices
    stacked  whether layers that repeat are in one array per name
    """
    arch = checkpoint.architecture
    reader = _Reader(checkpoint, dtype, sharding)
    params: Params = {
        "embed": reader.load("embed", "model.embed_tokens.weight"),
        "norm": reader.load("norm", "model.norm.weight"),
        "frequencies": tuple(
            jax.device_put(rope.frequencies(size), sharding.replicated) for rope, size in arch.ropes
        ),
    }
    if arch.token_vector:
        params |= {short: reader.load(short, name) for short, name in TOKENS.items()}
    if not arch.tied_head:
        params["head"] = reader.load("head", "lm_head.weight")
    prefixes = [f"model.layers.{index}." for index in range(arch.layers)]
    grouped = [_grouped(checkpoint, prefix) for prefix in prefixes]
    layers: list[Any] = [
        lambda group=group: {short: reader.load(short, names) for short, names in group.items()}
        for group in grouped
    ]
    begin, period, times = Pattern.of(arch)
    if stacked and times > 1:
        end = begin + period * times

        def together() -> tuple[Params, ...]:
            alike = (grouped[begin + part : end : period] for part in range(period))
            return tuple(
                {short: reader.load(short, [one[short] for one in every]) for short in every[0]}
                for every in alike
            )

        layers[begin:end] = [together]
    params["layers"] = tuple(made() for made in layers)
    return params


def load_named(
    checkpoint: Checkpoint, names: dict[str, str], dtype: Any, sharding: Sharding
) -> Params:
    """Load parameters to the devices under the short names in `names`, which maps them to the
    checkpoint's. Raises ModelError if a tensor is missing.
    """
    reader = _Reader(checkpoint, dtype, sharding)
    return {short: reader.load(short, name) for short, name in names.items()}


def load_layer(checkpoint: Checkpoint, dtype: Any, sharding: Sharding) -> Params:
    """Load the parameters of the first decoder layer, by short name, in `dtype`, to the devices of
    `sharding`. Raises ModelError if a tensor cannot be read.
    """
    group = _grouped(checkpoint, "model.layers.0.")
    reader = _Reader(checkpoint, dtype, sharding)
    return {short: reader.load(short, names) for short, names in group.items()}


def _grouped(checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
    """Return short name -> full name, or the names of all experts, of one layer's parameters."""
    found: dict[str, Any] = {}
    for name in checkpoint.names():
        if not name.startswith(prefix):
            continue
        *path, module, kind = ["", *name.removeprefix(prefix).split(".")]
        short = module if kind == "weight" else f"{module}.{kind}".lstrip(".")
        short = OWN.get(("".join(path[-1:]), short), short)
        if "experts" in path:
            found.setdefault(f"experts.{short}", []).append(name)
        elif "shared_expert" in path:
            found[f"shared.{short}"] = [name]
        else:
            found[short] = [name]
    return {
        short: names if short.startswith("experts.") else names[0] for short, names in found.items()
    }


class _Reader:
    def __init__(self, checkpoint: Checkpoint, dtype: Any, sharding: Sharding) -> None:
        self._checkpoint, self._dtype, self._sharding = checkpoint, jnp.dtype(dtype), sharding
        self._offset = checkpoint.architecture.norm_offset

    def load(self, short: str, names: Any) -> Array:
        """Load one parameter from one name or a (nested) list of names, which adds a leading axis
        per level. A callback per device reads only its part.
        """
        experts = short.startswith("experts.")
        shape, axes = _shape(names, self._checkpoint.shape)
        own = self._sharding.weight(short, len(shape) - axes + experts)
        lead = axes - experts
        where = self._sharding.of(*[None] * lead, *own.spec)
        narrow = len(shape) - axes == 2  # A convolution has three, and stays float32.
        turned = narrow and not experts and short not in BY_TOKEN
        offset = self._offset if "norm" in short else 0.0

        def read(name: str, index: tuple[slice, ...]) -> AnyArray:
            tensor = self._checkpoint.tensor(name)
            tensor = (tensor.T if turned else tensor)[index]
            # A copy: on the CPU JAX may use the file's memory directly.
            wide = tensor + np.float32(offset) if offset else tensor
            return np.array(wide, self._dtype if narrow else np.float32, order="C")

        def part(index: tuple[slice, ...] | None) -> AnyArray:
            assert index is not None  # None only for a scalar.
            return _read(names, index, read)

        if turned:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return jax.make_array_from_callback(shape, where, part)


def _shape(names: Any, of: Callable[[str], tuple[int, ...]]) -> tuple[tuple[int, ...], int]:
    """Return the shape of a parameter, and the number of axes from lists of names."""
    if isinstance(names, str):
        return tuple(of(names)), 0
    inner, axes = _shape(names[0], of)
    return (len(names), *inner), axes + 1


def _read(
    names: Any, index: tuple[slice, ...], read: Callable[[str, tuple[slice, ...]], AnyArray]
) -> AnyArray:
    if isinstance(names, str):
        return read(names, index)
    return np.stack([_read(name, index[1:], read) for name in names[index[0]]])
