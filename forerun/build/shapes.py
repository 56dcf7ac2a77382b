"""Shapes of well-known models, and checkpoints of random numbers in any shape, to plan memory and
time steps without the weights.

The text of random weights is meaningless, but their time is the real model's, because the time of
matrix products does not depend on the numbers. Sizes as in the models' published configurations.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forerun.checkpoints.grouped import Grouped, GroupedRows
from forerun.checkpoints.mapped import Packed
from forerun.checkpoints.quantised.config import read_method
from forerun.checkpoints.quantised.grouped import kind_of
from forerun.networks.arch import Architecture, Rope, expected_tensors, plain_layers
from forerun.networks.layer_spec import AttentionSpec, Dense, Experts, Latent, LayerSpec, Router
from forerun.types import Floats

_LLAMA, _QWEN = Rope(5e5), Rope(1e6)
_SMOL, _LLAMA_1B = plain_layers(30, 64, 1536, Rope(1e5)), plain_layers(16, 64, 8192, _LLAMA)
_QWEN_8B, _QWEN_32B = (
    plain_layers(count, 128, ffn, _QWEN, qk_norm=True) for count, ffn in ((36, 12288), (64, 25600))
)


def _experts(
    dense: int, count: int, attention: AttentionSpec, width: int, experts: Experts
) -> tuple[LayerSpec, ...]:
    """Return `dense` layers of this width, then layers of experts, `count` in all."""
    first = LayerSpec(attention, _QWEN, Dense(width))
    return (first,) * dense + (replace(first, feed_forward=experts),) * (count - dense)


_GLM = tuple(
    replace(layer, qk_norm=True, qkv_bias=True)
    for layer in _experts(
        3,
        92,
        AttentionSpec(128**-0.5),
        12288,
        Experts(160, 8, 1536, Router("sigmoid", normalised=True, correction=True), shared=1536),
    )
)
_DEEPSEEK = _experts(
    3,
    61,
    AttentionSpec(192**-0.5, latent=Latent(512, 128, 64, 128, query_rank=1536)),
    18432,
    Experts(256, 8, 2048, Router("sigmoid", normalised=True, correction=True), shared=2048),
)

SHAPES: dict[str, Architecture] = {
    "tiny": Architecture(
        "llama", 64, 4, 2, 16, 512, 2048, 1e-5, plain_layers(6, 16, 96, Rope(1e4))
    ),
    "smollm2-135m": Architecture("llama", 576, 9, 3, 64, 49152, 8192, 1e-5, _SMOL, tied_head=True),
    "llama-3.2-1b": Architecture(
        "llama", 2048, 32, 8, 64, 128256, 131072, 1e-5, _LLAMA_1B, tied_head=True
    ),
    "llama-3.1-8b": Architecture(
        "llama", 4096, 32, 8, 128, 128256, 131072, 1e-5, plain_layers(32, 128, 14336, _LLAMA)
    ),
    "llama-2-70b": Architecture(
        "llama", 8192, 64, 8, 128, 32000, 4096, 1e-5, plain_layers(80, 128, 28672, Rope(1e4))
    ),
    "llama-3-70b": Architecture(
        "llama", 8192, 64, 8, 128, 128256, 8192, 1e-5, plain_layers(80, 128, 28672, _LLAMA)
    ),
    "qwen3-8b": Architecture("qwen3", 4096, 32, 8, 128, 151936, 40960, 1e-6, _QWEN_8B),
    "qwen3-32b": Architecture("qwen3", 5120, 64, 8, 128, 151936, 40960, 1e-6, _QWEN_32B),
    "glm-4.5": Architecture("glm4_moe", 5120, 96, 8, 128, 151552, 131072, 1e-5, _GLM),
    "deepseek-v3": Architecture("deepseek_v3", 7168, 128, 1, 576, 129280, 163840, 1e-6, _DEEPSEEK),
}
"""Name -> architecture. RoPE scaling for long contexts is left out, since it costs no time."""


_BLOCK = 1 << 20
"""Number of random numbers drawn; larger tensors repeat them."""


class RandomCheckpoint:
    """A checkpoint of random numbers: normal with standard deviation 0.02; norms are ones."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture, self.path = architecture, Path("random")
        self._shapes = expected_tensors(architecture)
        self._drawn: Floats = np.random.default_rng(0).normal(0, 0.02, _BLOCK).astype(np.float32)

    @property
    def block(self) -> Floats:
        """float32: the random numbers that every matrix repeats."""
        return self._drawn

    def names(self) -> tuple[str, ...]:
        """Return the canonical names of all tensors (arch.expected_tensors)."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor of that canonical name. Raises KeyError for an unknown
        one.
        """
        return self._shapes[name]

    def tensor(self, name: str) -> Floats:
        """Return a tensor as float32, the same numbers at every call. Raises KeyError for an
        unknown name.
        """
        return _filled(name, self._shapes[name], self._drawn)

    def packed(self, name: str) -> Packed | None:
        """Return None: no file stores it."""
        return None


class PlannedCheckpoint(RandomCheckpoint):
    """Random numbers for a config.json alone, with all matrices quantised by its first method.
    Raises ModelError as read_method.
    """

    def __init__(self, architecture: Architecture, config: Mapping[str, Any]) -> None:
        super().__init__(architecture)
        self._methods = read_method(config)

    def grouped(self, name: str) -> Grouped | None:
        """Return a quantised matrix of random numbers; None if it cannot stay quantised."""
        shape = self.shape(name)
        method = next(iter(self._methods), None)
        kind = None if method is None else kind_of(method)
        if method is None or kind is None or len(shape) != 2:
            return None
        rows, columns = shape
        group = min(method.group or columns, columns)
        scale = "F32" if kind == "float8" else "F16"
        offsets = method.offsets
        about = Grouped(kind, (rows, columns), group, method.zeros, scale, None, _unread, offsets)
        return replace(about, read=partial(self._random_rows, about))

    def _random_rows(self, about: Grouped, rows: slice) -> GroupedRows:
        """Return random numbers, the same for every matrix of the same width."""
        first, last, _ = rows.indices(about.shape[0])
        count, random = last - first, np.random.default_rng(0)
        high = 16 if about.kind == "int4" else 120  # No NaN of float8.
        numbers = random.integers(0, high, (1, about.shape[1]), np.uint8)
        if about.kind == "int8":
            numbers = (numbers - np.uint8(60)).view(np.int8)
        zeros = np.full((count, about.groups), numbers.dtype.type(8), numbers.dtype)
        scales = np.full((count, about.groups), 0.002, np.float32)
        shape = count, about.shape[1]
        return GroupedRows(np.broadcast_to(numbers, shape), scales, zeros if about.zeros else None)


def _unread(rows: slice) -> GroupedRows:
    raise AssertionError("replaced before anything is read")


def _filled(name: str, shape: tuple[int, ...], drawn: Floats) -> Floats:
    if len(shape) == 1:
        return np.full(shape, 0.0 if name.endswith(".bias") else 1.0, np.float32)
    return np.resize(drawn, shape)
