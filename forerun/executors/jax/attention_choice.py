"""Which attention an executor's programs use: plain jnp, or the Pallas kernel.

`auto` is jnp everywhere, until the kernel has run on a TPU. On the CPU the kernel is interpreted,
grid step by grid step: to compare with, not to serve with.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from forerun.errors import ConfigError
from forerun.executors.jax.attention import Layer, Past, Tree, attend
from forerun.executors.jax.pallas_attention import attend_pallas
from forerun.executors.jax.sharding import Sharding

log = logging.getLogger("forerun.executors.jax")

Attention = Callable[..., Array]
"""`attention.attend` or its twin."""

BACKENDS = ("auto", "jnp", "pallas")


def attention_of(backend: str, sharding: Sharding) -> Attention:
    """The attention function that programs on these devices call, with the signature of
    attention.attend.

    backend  one of BACKENDS; auto = jnp

    Raises ConfigError for an unknown name, and for the kernel on anything but a TPU or the CPU,
    where it is interpreted (a warning is logged).
    """
    if backend not in BACKENDS:
        raise ConfigError(
            f"attention-backend is {backend!r}; on jax it must be one of {', '.join(BACKENDS)}"
        )
    if backend != "pallas":
        return attend
    platform = sharding.mesh.devices.flat[0].platform
    if platform not in ("tpu", "cpu"):
        raise ConfigError(
            f"attention-backend is pallas, whose kernel is written for TPUs, but the device is a "
            f"{platform}; leave it auto."
        )
    if platform == "cpu":
        log.warning("attention-backend pallas is interpreted on the CPU, which is very slow")
    return _on_shards(partial(attend_pallas, interpret=platform == "cpu"), sharding)


def _on_shards(kernel: Attention, sharding: Sharding) -> Attention:
    """The kernel on every shard for its own heads: the compiler cannot cut what it cannot read."""
    shards = sharding.shards
    if shards == 1:
        return kernel

    def cut(
        queries: Array, fresh: tuple[Array, Array], past: Past, tree: Tree, how: Layer
    ) -> Array:
        divides = fresh[0].shape[2] % shards == 0
        heads: Any = PartitionSpec(None, None, "model" if divides else None, None)
        whole: Any = PartitionSpec()

        def own(number: Any, *given: Any) -> Array:
            return kernel(*given, Layer(number, how.spec, how.page_size))

        given = queries, fresh, past, tree
        where = heads, (heads, heads), Past(heads, heads, whole, whole), Tree(whole, whole)
        mapped: Callable[..., Array] = jax.shard_map(
            own,
            mesh=sharding.mesh,
            in_specs=(whole, *where),
            out_specs=heads,
            check_vma=False,
        )
        return mapped(jax.numpy.asarray(how.number, jax.numpy.int32), *given)

    return cut
