"""One mesh (data, model) and its sharding: heads and feed-forward columns by shard.

As in Megatron (arXiv 1909.08053, section 3): queries, keys, values, gate and up are sharded by
their outputs, o_proj and down_proj by their inputs, so a layer needs two sums over the shards.
Experts are sharded by expert, embedding and head by token, pages by key/value head; everything else
is copied to every shard.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from forerun.errors import ConfigError
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import Dense, Experts

BY_TOKEN = ("embed", "head", "token_rows")
"""Matrices [V,.], sharded by token."""

BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "heads_gate_proj", "gate_proj", "up_proj")
"""Matrices [in, out] that are sharded by columns, with their biases."""

BY_INPUT = ("o_proj", "down_proj")
"""Matrices [in, out] that are sharded by rows; their biases are added once, after the sum."""


@dataclass(frozen=True)
class Sharding:
    """The placement of arrays.

    mesh    axes data (1, for now) and model
    cut     whether to shard arrays over the model axis if possible; else all are on every device
    """

    mesh: Mesh
    cut: bool = True

    @property
    def shards(self) -> int:
        """Devices that share every layer; 1 if nothing is sharded."""
        return int(self.mesh.shape["model"]) if self.cut else 1

    def of(self, *axes: str | None) -> NamedSharding:
        """Return the sharding of an array, one mesh axis ("model", "data") or None per
        dimension.
        """
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array of which every device has a copy."""
        return self.of()

    @property
    def cache(self) -> NamedSharding:
        """The sharding of pages [L,slots,G,E]: key/value heads by shard."""
        return self.of(None, None, "model", None) if self.cut else self.replicated

    def weight(self, name: str, dimensions: int) -> NamedSharding:
        """Return the sharding of a parameter by its short name and number of dimensions: a matrix,
        or the bias or norm of that name.
        """
        part = name.removeprefix("shared.").removesuffix(".bias")
        if not self.cut:
            return self.of(*[None] * dimensions)
        if name.startswith("experts."):
            return self.of("model", *[None] * (dimensions - 1))
        if part in BY_TOKEN:
            return self.of("model", None)
        if part in BY_OUTPUT:
            return self.of("model") if dimensions == 1 else self.of(None, "model")
        if part in BY_INPUT and dimensions > 1:
            return self.of("model", None)
        return self.of(*[None] * dimensions)

    def put(self, x: Array, *axes: str | None) -> Array:
        """Constrain the sharding of an array inside a program, one mesh axis or None per dimension;
        returns `x` itself on one device.
        """
        if self.shards == 1:
            return x
        placed: Array = jax.lax.with_sharding_constraint(x, self.of(*axes))
        return placed


def check_shards(arch: Architecture, shards: int, devices: int) -> None:
    """Raise ConfigError if there are fewer than `shards` devices, or heads, vocabulary,
    feed-forward or experts are not divisible by it.
    """
    if shards > devices:
        raise ConfigError(
            f"tp-size is {shards}, but jax sees {devices} device{'s' * (devices != 1)} here; "
            f"lower it to {devices} or less."
        )
    parts = {"attention heads": arch.heads}
    for shape in arch.cache_shapes:
        several = f" of {shape.head_size} numbers" * (len(arch.cache_shapes) > 1)
        parts[f"key/value heads{several}"] = shape.kv_heads
    parts["tokens of the vocabulary"] = arch.vocab
    for spec in dict.fromkeys(arch.layer_specs):
        match spec.feed_forward:
            case Dense(width):
                parts["feed-forward columns"] = width
            case Experts() as experts:
                parts["experts"] = experts.count
                parts["shared expert's columns"] = experts.shared
    for what, count in parts.items():
        if count % shards:
            raise ConfigError(
                f"tp-size is {shards}, but the model's {count} {what} do not divide by it; choose "
                "a number that divides them."
            )


def devices_of(platform: str | None) -> list[Any]:
    """Return JAX's devices of a platform; None = its own choice. Raises ConfigError if there are
    none.
    """
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        raise ConfigError(f"device is {platform}, but jax sees none here: {error}") from error


def where_it_divides(arch: Architecture, sharding: Sharding) -> Sharding:
    """Return the target's sharding for another model; one that copies everything to every device if
    that model is not divisible.
    """
    try:
        check_shards(arch, sharding.shards, sharding.shards)
    except ConfigError:
        return replace(sharding, cut=False)
    return sharding


def make_sharding(arch: Architecture, shards: int, platform: str | None = None) -> Sharding:
    """Return the mesh of the first `shards` devices. Raises ConfigError as `devices_of` and
    `check_shards`.
    """
    devices = devices_of(platform)
    check_shards(arch, shards, len(devices))
    placed = np.array(devices[:shards]).reshape(1, shards)
    return Sharding(Mesh(placed, ("data", "model"), axis_types=(AxisType.Auto,) * 2))
