"""Rotary position embedding: the frequencies by which queries and keys are rotated.

RoPE (Su et al. 2021, arXiv 2104.09864) rotates the pair (x[i], x[i + E/2]) of a head by the angle
position * frequency[i]. This is the half-split layout of `transformers`; files in another layout
are converted when they are read. The arithmetic is float32 in transformers' order of operations, so
that the numbers are the same up to the last bit of `pow`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.errors import ModelError
from forerun.types import Floats


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): all frequencies / factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones unchanged. Between
    original_context / high and original_context / low (wavelengths in tokens) it interpolates.
    """

    factor: float
    low: float
    high: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), "NTK-by-parts" and a factor on cos and sin.

    fast, slow        rotations within the original context that bound the ramp
    attention_factor  multiplies cos and sin
    truncate          round the ramp's ends outward to whole dimensions
    """

    factor: float
    original_context: int
    attention_factor: float
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Divided:
    """Explicit divisors, one per frequency (GGUF's `rope_freqs.weight`). Length E/2."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Proportional:
    """Gemma 4's scaling: the first `share` of a whole head's frequencies are divided by `factor`;
    the others are 0. The two elements of a pair are half a head apart, in files too.
    """

    share: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): searched divisors, one per frequency, for
    short texts and for long ones.

    original_context  texts of up to this many tokens are short
    attention_factor  multiplies cos and sin
    stretched         use the long ones; transformers does so for longer texts, other servers for
                      all texts, see Architecture.for_context
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float
    stretched: bool = False


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """Return the default factor of cos and sin: sqrt(1 + ln(factor) / ln(original_context)), and 1
    for a factor of 1 or less (LongRoPE, arXiv 2402.13753, as transformers computes it).

    factor            new context over original context
    original_context  tokens that the model was trained on first
    """
    return math.sqrt(1 + math.log(factor) / math.log(max(original_context, 2))) if factor > 1 else 1


_LEAST = 1e-20
"""Lower limit of numbers, and inverse of the upper one: others would leave the range of float32. No
model has them.
"""

Scaling = LinearScaling | Llama3 | Yarn | Divided | Proportional | LongRope


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a layer: base `theta`, and the scaling of the context, if any.

    rotated  how many elements of a head are rotated; None: all, 0: the layer has no positions
             (arXiv 2305.19466). The others have the frequency 0. In files the rotated numbers come
             first; naming.py moves them to this module's halves when they are read
    """

    theta: float
    scaling: Scaling | None = None
    rotated: int | None = None

    def frequencies(self, head_size: int) -> Floats:
        """Return float32[E/2], radians per position, for a head of E = `head_size` numbers; 0 for
        pairs that are not rotated.
        """
        if self.rotated is None or self.rotated >= head_size:
            return self._frequencies(head_size)
        found: Floats = np.zeros(head_size // 2, np.float32)
        if self.rotated:
            found[: self.rotated // 2] = self._frequencies(self.rotated)
        return found

    def _frequencies(self, head_size: int) -> Floats:
        exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
        theta = np.float64(np.float32(self.theta))
        powers: Floats = (theta ** exponents.astype(np.float64)).astype(np.float32)
        plain: Floats = np.float32(1.0) / powers
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor) | Proportional(factor=factor):
                stretched: Floats = plain / np.float32(factor)
                if isinstance(self.scaling, Proportional):
                    stretched[int(self.scaling.share * head_size // 2) :] = 0
                return stretched
            case Llama3():
                return _llama3(plain, self.scaling)
            case Yarn():
                return _yarn(powers, self.scaling, self.theta, head_size)
            case Divided(divisors):
                divided: Floats = np.divide(plain, np.asarray(divisors, np.float32))
                return divided
            case LongRope(short, long):
                chosen = np.asarray(long if self.scaling.stretched else short, np.float32)
                frequencies: Floats = np.float32(1.0) / (chosen * powers)
                return frequencies

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin of rotated pairs."""
        scales = isinstance(self.scaling, Yarn | LongRope)
        return self.scaling.attention_factor if scales else 1.0  # type: ignore[union-attr]

    def check(self, head_size: int) -> None:
        """Raise ModelError if a number would make the frequencies meaningless."""
        positive = {"theta": self.theta}
        if self.rotated is not None and (self.rotated % 2 or not 0 <= self.rotated <= head_size):
            raise ModelError(
                f"rope: {self.rotated} of {head_size} numbers cannot be rotated in pairs"
            )
        head_size = head_size if self.rotated is None else self.rotated
        match self.scaling:
            case LinearScaling(factor):
                positive["factor"] = factor
            case Llama3(factor, low, high, original):
                positive |= {"factor": factor, "low_freq_factor": low}
                positive |= {"original context": original, "high - low": high - low}
            case Yarn(factor, original, attention, fast, slow):
                positive |= {"factor": factor, "original context": original}
                positive |= {"attention_factor": attention, "beta_fast": fast, "beta_slow": slow}
                positive["log(theta)"] = math.log(self.theta) if self.theta > 0 else 0.0
            case Divided(divisors):
                positive |= _divisors(divisors, head_size)
            case Proportional(share, factor):
                positive |= {"share": share, "factor": factor, "rest": 2 - share}
            case LongRope(short, long, original, attention):
                positive |= {"original context": original, "attention_factor": attention}
                positive |= {
                    f"{name} (short)": d for name, d in _divisors(short, head_size).items()
                }
                positive |= _divisors(long, head_size)
        for name, value in positive.items():
            if not _LEAST < value < 1 / _LEAST:
                raise ModelError(f"rope: {name} must be a positive number, not {value}")


def frequency_table(ropes: Sequence[tuple[Rope, int]]) -> Floats:
    """Return float32[K,E/2], the frequencies of K (rope, head size) pairs; E is the largest head
    size, and rows of smaller heads are padded with zeros.
    """
    table = np.zeros((len(ropes), max(size for _, size in ropes) // 2), np.float32)
    for row, (rope, size) in zip(table, ropes, strict=True):
        row[: size // 2] = rope.frequencies(size)
    return table


def _divisors(divisors: tuple[float, ...], turned: int) -> dict[str, float]:
    """Return the divisors that must be positive, by name. Raises ModelError unless there are half
    as many as `turned`.
    """
    if len(divisors) != turned // 2:
        raise ModelError(
            f"rope divisors: {len(divisors)} given, the head size {turned} needs {turned // 2}"
        )
    # NumPy's minimum and maximum are NaN if a number is NaN.
    return {"smallest divisor": float(np.min(divisors)), "largest divisor": float(np.max(divisors))}


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's recommended factor for a context that is `factor` times as long (section 3.4):
    0.1 scale ln(factor) + 1; 1 if it is not longer.
    """
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(plain: Floats, scaling: Llama3) -> Floats:
    """Return the frequencies float32[E/2] scaled in Llama 3.1's three bands of wavelengths."""
    wavelength = np.float32(2 * math.pi) / plain
    context = scaling.original_context
    smooth = (context / wavelength - scaling.low) / (scaling.high - scaling.low)
    stretched = plain / np.float32(scaling.factor)
    between = (1 - smooth) * plain / np.float32(scaling.factor) + smooth * plain
    long_waves = wavelength > context / scaling.low
    short_waves = wavelength < context / scaling.high
    chosen = np.where(long_waves, stretched, np.where(short_waves, plain, between))
    return chosen.astype(np.float32)


def _yarn(powers: Floats, scaling: Yarn, theta: float, head_size: int) -> Floats:
    """Return YaRN's blend of unchanged and interpolated frequencies. powers = theta ** (2i/E)."""

    def dimension(rotations: float) -> float:
        """Return the dimension that makes `rotations` rotations within the original context."""
        ratio = scaling.original_context / (rotations * 2 * math.pi)
        return head_size * math.log(ratio) / (2 * math.log(theta))

    low, high = dimension(scaling.fast), dimension(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    steps = np.arange(head_size // 2, dtype=np.float32)
    keep = 1 - np.clip((steps - low) / (high - low), 0, 1)
    extrapolated = np.float32(1.0) / powers
    interpolated = np.float32(1.0) / (np.float32(scaling.factor) * powers)
    blend: Floats = interpolated * (1 - keep) + extrapolated * keep
    return blend
