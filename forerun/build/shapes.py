"""Shapes of well-known models, and weights that fill them: what an engine costs at their size.

The text such weights write means nothing; the time they take is the real model's, because matrix
products do not look at the numbers. Sizes as in the models' published configurations.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from forerun.checkpoints.mapped import Packed
from forerun.drafts.eagle_config import expected_draft_tensors, head_for
from forerun.drafts.eagle_folder import DraftFile
from forerun.errors import ConfigError
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
    """`dense` layers of this width, then layers of experts, `count` in all."""
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
"""Name -> architecture; RoPE scaling for long contexts is left out, it costs nothing."""


def shape_named(name: str) -> Architecture:
    """The architecture called `name`. Raises ConfigError that lists what there is."""
    if name not in SHAPES:
        raise ConfigError(f"no shape is called {name!r}; there are: {', '.join(SHAPES)}.")
    return SHAPES[name]


_BLOCK = 1 << 20
"""Numbers that are drawn; larger tensors repeat them."""


class RandomCheckpoint:
    """A checkpoint.Checkpoint of random numbers: normal, 0.02 wide; norms are ones."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture, self.path = architecture, Path("random")
        self._shapes = expected_tensors(architecture)
        self._drawn = _draw(0)

    @property
    def block(self) -> Floats:
        """float32: the random numbers that every matrix repeats."""
        return self._drawn

    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors (arch.expected_tensors)."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor of that canonical name. Raises KeyError for an unknown one."""
        return self._shapes[name]

    def tensor(self, name: str) -> Floats:
        """Return a tensor as float32, the same numbers at every call. Raises KeyError for an
        unknown name.
        """
        return _filled(name, self._shapes[name], self._drawn)

    def packed(self, name: str) -> Packed | None:
        """None: no file stores it."""
        return None


class _RandomDraft(DraftFile):
    __slots__ = ()

    def tensor(self, name: str) -> Floats:
        """A tensor of random numbers."""
        return _filled(name, expected_draft_tensors(self.head)[name], _draw(1))


def random_draft(target: Architecture, vocab: int) -> DraftFile:
    """An EAGLE-3 head for `target` with its own head for `vocab` tokens, of random numbers.

    Raises ModelError if the target has too few layers.
    """
    head = replace(head_for(target, vocab), trained_head=True)
    return _RandomDraft(Path("random"), head, np.arange(vocab, dtype=np.int32), (), {})


def _draw(seed: int) -> Floats:
    drawn: Floats = np.random.default_rng(seed).normal(0, 0.02, _BLOCK).astype(np.float32)
    return drawn


def _filled(name: str, shape: tuple[int, ...], drawn: Floats) -> Floats:
    if len(shape) == 1:
        return np.full(shape, 0.0 if name.endswith(".bias") else 1.0, np.float32)
    return np.resize(drawn, shape)
