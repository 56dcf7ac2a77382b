"""A checkpoint as a pytree of device arrays.

    embed [V,H], norm [H], head [V,H] (absent where it is the embedding), frequencies [E/2]
    layers  stacked: {name: [L, ...]}; apart: L dictionaries {name: [...]}

Matrices are [out, in] in the dtype of activations, vectors float32. Names are the checkpoint's
without prefix and ".weight". Stacked layers run in a scan, so a program's size does not grow with
the model; XLA's CPU backend copies each layer out of the stack, which doubles a step's time there,
so on the CPU layers lie apart.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from forerun.executors.jax.sharding import Sharding
from forerun.models.checkpoint import Checkpoint

Params = dict[str, Any]
"""The pytree."""


def load_params(
    checkpoint: Checkpoint, dtype: jnp.dtype, sharding: Sharding, stacked: bool
) -> Params:
    """Read a checkpoint, one matrix at a time, each device its own part."""
    arch = checkpoint.architecture
    reader = _Reader(checkpoint, dtype, sharding)
    params: Params = {
        "embed": reader.array("embed", "model.embed_tokens.weight"),
        "norm": reader.array("norm", "model.norm.weight"),
        "frequencies": jax.device_put(arch.rope.frequencies(arch.head_size), sharding.whole),
    }
    if not arch.tied_head:
        params["head"] = reader.array("head", "lm_head.weight")
    first = "model.layers.0."
    suffixes = [name.removeprefix(first) for name in checkpoint.names() if name.startswith(first)]
    names = {_short(suffix): suffix for suffix in suffixes}
    prefixes = [f"model.layers.{index}." for index in range(arch.layers)]
    if stacked:
        params["layers"] = {
            short: reader.stack(short, [prefix + suffix for prefix in prefixes])
            for short, suffix in names.items()
        }
    else:
        params["layers"] = tuple(
            {short: reader.array(short, prefix + suffix) for short, suffix in names.items()}
            for prefix in prefixes
        )
    return params


def _short(suffix: str) -> str:
    """self_attn.q_proj.weight -> q_proj; self_attn.q_proj.bias -> q_proj.bias."""
    *_, module, kind = suffix.split(".")
    return module if kind == "weight" else f"{module}.{kind}"


class _Reader:
    def __init__(self, checkpoint: Checkpoint, dtype: jnp.dtype, sharding: Sharding) -> None:
        self._checkpoint, self._dtype, self._sharding = checkpoint, dtype, sharding

    def array(self, short: str, name: str) -> Array:
        """One parameter."""
        shape = self._checkpoint.shape(name)
        where = self._sharding.weight(short, len(shape))
        return self._made(shape, where, lambda: self._checkpoint.tensor(name))

    def stack(self, short: str, names: list[str]) -> Array:
        """The same parameter of all layers. A callback per device reads only its part of each."""
        shape = self._checkpoint.shape(names[0])
        where = self._sharding.of(None, *self._sharding.weight(short, len(shape)).spec)
        dtype = self._dtype_of(shape)

        def part(index: tuple[slice, ...]) -> np.ndarray:
            layers, inner = names[index[0]], index[1:]
            return np.stack([np.asarray(self._checkpoint.tensor(n)[inner], dtype) for n in layers])

        return jax.make_array_from_callback((len(names), *shape), where, part)

    def _made(self, shape: tuple[int, ...], where: Any, read: Callable[[], Any]) -> Array:
        dtype, tensor = self._dtype_of(shape), read()
        # A copy: device memory on the CPU may be the very same bytes, which are a mapped file's.
        return jax.make_array_from_callback(
            shape, where, lambda index: np.array(tensor[index], dtype)
        )

    def _dtype_of(self, shape: tuple[int, ...]) -> jnp.dtype:
        return self._dtype if len(shape) > 1 else jnp.dtype(jnp.float32)
