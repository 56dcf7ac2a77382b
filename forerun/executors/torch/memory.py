"""The device memory of a torch executor, computed before anything is allocated."""

from collections.abc import Sequence

import torch

from forerun.checkpoints.grouped import Grouped
from forerun.checkpoints.quantised_matrices import PARTS, SCRATCH, saved_bytes
from forerun.errors import ConfigError, MemoryPlanError
from forerun.executors.torch.attention.kv import KvShape
from forerun.interface.executor import ExecutorLimits
from forerun.machine import memory_available
from forerun.networks.arch import Architecture

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.bfloat16,
}
"""The dtype of activations by name; float8 applies to the weights of the blocks alone."""

FILE = "file"
"""The dtype name with which weights stay as stored, if kernels can read them."""


def activations(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations for a name in DTYPES or FILE. Raises ConfigError for another
    name.
    """
    if dtype == FILE:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join([*DTYPES, FILE])}")
    return DTYPES[dtype]


def kv_shape(arch: Architecture) -> KvShape:
    """Return the shape of the key/value cache of a draft model `arch`, whose layers all keep every
    page.
    """
    return KvShape(arch.caches, arch.cache_places)


def target_kv_shape(arch: Architecture, limits: ExecutorLimits) -> KvShape:
    """Return the shape of a target's key/value cache: sliding-window layers have window pages, if
    there are any.
    """
    if not limits.window_pages:
        return kv_shape(arch)
    owners = [spec for spec in arch.layer_specs if spec.recurrent is None and spec.reads is None]
    windowed = tuple(bool(spec.attention.window) for spec in owners)
    return KvShape(arch.caches, arch.cache_places, windowed)


def planned_bytes(
    arch: Architecture,
    limits: ExecutorLimits,
    device: torch.device,
    dtype: str,
    kept: Sequence[Grouped] = (),
) -> dict[str, int]:
    """Return bytes by purpose. On the CPU a tied head is stored again as a packed copy of the
    embedding.

    kept  matrices that stay quantised
    """
    item = activations(dtype, device).itemsize
    narrowed = arch.parameters - arch.vocab * arch.hidden * (1 if arch.tied_head else 2)
    narrowed -= arch.token_numbers
    copies = arch.vocab * arch.hidden if arch.tied_head and device.type == "cpu" else 0
    heads = (5 * arch.heads * c.head_size + 4 * c.kv_heads * c.head_size for c in arch.cache_shapes)
    widest = max(5 * arch.ffn, *heads)
    logits = 4 * limits.scored_nodes * arch.vocab
    saved = narrowed if dtype == "float8" else saved_bytes(kept, item)
    logits += (SCRATCH + PARTS) * (bool(kept) or dtype == "float8")
    return {
        "weight": (arch.parameters + copies) * item - saved,
        "scratch": limits.max_nodes * 4 * (3 * arch.hidden + widest) + logits,
    }


def check_fits(parts: dict[str, int], device: torch.device) -> None:
    """Raise MemoryPlanError if the parts exceed the free memory."""
    on_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_cuda else memory_available()
    if sum(parts.values()) > free:
        listed = " + ".join(f"{part} {count:,}" for part, count in parts.items())
        raise MemoryPlanError(
            f"{listed} bytes do not fit into the {free:,} bytes that are free on {device}; "
            "lower the number of cached tokens (kv-tokens) or of nodes in a step"
        )
