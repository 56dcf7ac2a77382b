"""The memory that an executor needs and the memory that is free on its device, computed before
anything is allocated.
"""

from typing import Any

from forerun.errors import MemoryPlanError
from forerun.executors.jax.network.kv import StateShape
from forerun.executors.jax.network.sharding import devices_of
from forerun.executors.jax.rounds.batches import Buckets
from forerun.machine import memory_available
from forerun.networks.arch import Architecture


def planned_bytes(
    arch: Architecture, shape: StateShape, buckets: Buckets, itemsize: int
) -> dict[str, int]:
    """Return the bytes that the executor will allocate, all devices together: weight, cache, and
    round (logits, noise and streams of the largest step).

    itemsize  bytes of a number in weights and cache
    """
    nodes = max(size.total for size in buckets.rounds)
    widest = max(buckets.chunks[-1], nodes)
    streams = widest * (4 * arch.hidden + 3 * arch.ffn + arch.latent_numbers) * 4
    return {
        "weight": arch.parameters * itemsize,
        "cache": shape.cache_bytes(arch, itemsize),
        "states": shape.states * arch.state_bytes,
        "round": nodes * arch.vocab * 4 * 4 + streams + shape.hidden * arch.hidden * itemsize,
    }


def check_fits(parts: dict[str, int], device: Any, shards: int) -> None:
    """Raise MemoryPlanError, with the parts and what to lower, if they exceed the free memory.

    parts   bytes by purpose, all devices together
    device  one of `shards` equal devices
    """
    free = _free_on(device, shards)
    if sum(parts.values()) > free:
        listed = " + ".join(f"{part} {count:,}" for part, count in parts.items())
        raise MemoryPlanError(
            f"{listed} bytes do not fit into the {free:,} bytes that are free on {device}; lower "
            "kv-tokens (cache), or max-sequences, draft-nodes or chunked-prefill-size (the largest "
            "round)"
        )


def _free_on(device: Any, shards: int) -> int:
    """Return the free bytes of `shards` devices like this one; the machine's if the device does not
    report them.
    """
    known = device.memory_stats() or {}
    if "bytes_limit" not in known:
        return memory_available()
    return int(shards * (known["bytes_limit"] - known.get("bytes_in_use", 0)))


def free_bytes(platform: str | None, shards: int) -> int:
    """Return the free bytes of `shards` devices of a platform (None = JAX's own choice); the
    machine's memory if the device does not report it. Raises ConfigError if JAX has no such device.
    """
    return _free_on(devices_of(platform)[0], shards)
