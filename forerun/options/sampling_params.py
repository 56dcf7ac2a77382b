"""The sampling parameters that leave a model's distribution unchanged unless they are set, and
their bounds: of requests, options, and what a model's own files recommend.
"""

import math
from typing import NamedTuple

from forerun.errors import ConfigError


class SamplingParam(NamedTuple):
    """A sampling parameter.

    neutral           the value that changes nothing
    low, high         bounds in requests and options (inclusive)
    recommended_high  the greatest value that a model may recommend; None = it recommends none
    """

    neutral: float
    low: float
    high: float
    recommended_high: float | None = None


SAMPLING_PARAMS = {
    "temperature": SamplingParam(neutral=1.0, low=0.0, high=2.0, recommended_high=100.0),
    "top_p": SamplingParam(neutral=1.0, low=0.0, high=1.0, recommended_high=1.0),
    "top_k": SamplingParam(neutral=0, low=-1, high=2**31 - 1, recommended_high=2**31 - 1),
    "min_p": SamplingParam(neutral=0.0, low=0.0, high=1.0, recommended_high=1.0),
    "repetition_penalty": SamplingParam(neutral=1.0, low=1e-6, high=2.0, recommended_high=100.0),
    "frequency_penalty": SamplingParam(neutral=0.0, low=-2.0, high=2.0),
    "presence_penalty": SamplingParam(neutral=0.0, low=-2.0, high=2.0),
}

NEUTRAL: dict[str, float] = {name: param.neutral for name, param in SAMPLING_PARAMS.items()}
"""The value of each parameter that changes nothing."""

RANGES: dict[str, tuple[float, float]] = {
    name: (param.low, param.high) for name, param in SAMPLING_PARAMS.items()
}
"""The least and greatest value of each parameter in requests and options."""


_OVERRIDES = {**RANGES, "seed": (0, 2**53), "max_tokens": (1, 2**31 - 1)}
_WHOLE = ("top_k", "seed", "max_tokens")


def parse_overrides(pairs: tuple[str, ...]) -> dict[str, float]:
    """Return the sampling parameters, the seed and the longest answer that NAME=VALUE pairs set.
    Raises ConfigError naming the first pair whose name is unknown or whose value is no number
    within its bounds.
    """
    values: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if name not in _OVERRIDES:
            raise ConfigError(
                f"sampling-override has {pair!r}, but must be NAME=VALUE with one of the names "
                f"{', '.join(_OVERRIDES)}."
            )
        low, high = _OVERRIDES[name]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (name in _WHOLE and value % 1):
            kind = "a whole number" if name in _WHOLE else "a number"
            raise ConfigError(
                f"sampling-override has {pair!r}, but {name} must be {kind} from {low} to {high}."
            )
        values[name] = max(int(value), 0) if name in _WHOLE else value
    return values
