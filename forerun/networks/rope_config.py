"""Reads the rotary embedding from config.json, in both formats."""

from dataclasses import replace
from typing import Any

from forerun.networks.keys import Keys, shown
from forerun.networks.rope import (
    LinearScaling,
    Llama3,
    LongRope,
    Proportional,
    Rope,
    Scaling,
    Yarn,
    longrope_attention_factor,
    yarn_attention_factor,
)

OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys of the rope that divide a position in three parts, which are equal for a token of text."""


def rope_from(
    keys: Keys,
    context: int,
    theta: float = 10000.0,
    head_size: int | None = None,
    share: float = 1.0,
    ignored: tuple[str, ...] = (),
) -> Rope:
    """Read the rope, in both formats: rope_theta with rope_scaling, and rope_parameters
    (transformers 5).

    context    tokens the model was trained for
    theta      default of the base
    head_size  size of a head, of which partial_rotary_factor (default `share`) are rotated;
               None: the family rotates all
    ignored    keys of rope_parameters that have no effect on text

    Raises ModelError naming the key that cannot be used.
    """
    scaling, parameters = keys.get("rope_scaling"), keys.get("rope_parameters")
    inner = _object(keys, "rope_scaling" if scaling else "rope_parameters", scaling or parameters)
    for name in ignored:
        inner.get(name)
    theta = keys.real("rope_theta", theta)
    original = keys.integer("original_max_position_embeddings", context)
    if head_size is None:
        keys.require("partial_rotary_factor", 1.0)
    else:
        share = inner.real("partial_rotary_factor", keys.real("partial_rotary_factor", share))
    rope = _rope(inner, theta, context, original, head_size is not None)
    if head_size is None or share == 1.0:
        return rope
    if not 0 < share <= 1:
        raise keys.unfit("partial_rotary_factor", share, "in (0, 1]")
    return replace(rope, rotated=int(head_size * share))


def rope_of_fixed_alpha(keys: Keys, context: int, head_size: int) -> Rope:
    """Read Hunyuan's rope: its "dynamic" means a base multiplied by alpha ** (E / (E - 2)) for
    texts of every length. Other kinds as in rope_from. Raises ModelError naming the key that cannot
    be used.
    """
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    inner = _object(keys, name, keys.get(name))
    if inner.text("rope_type", inner.text("type", "default")) != "dynamic":
        return rope_from(keys, context)
    for neutral in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        inner.get(neutral)  # Of YaRN.
    inner.require("factor", 1.0)
    alpha = inner.real("alpha")
    if alpha <= 0:
        raise inner.unfit("alpha", alpha, "positive")
    theta = inner.real("rope_theta", keys.real("rope_theta", 10000.0))
    inner.refuse_the_rest(lambda name, value: False)
    return Rope(theta * alpha ** (head_size / (head_size - 2)))


def ropes_by_kind(keys: Keys, context: int, thetas: dict[str, float]) -> dict[str, Rope]:
    """Read a rope for each kind of layer in `thetas`, kind -> default of the base, from
    rope_parameters with an object for each kind, as transformers 5 writes it. Raises ModelError
    naming the key that cannot be used.
    """
    kinds = _object(keys, "rope_parameters", keys.get("rope_parameters"))
    ropes = {
        kind: _rope(_object(kinds, kind, kinds.get(kind)), theta, context, context)
        for kind, theta in thetas.items()
    }
    kinds.refuse_the_rest(lambda name, value: False)
    return ropes


def _object(keys: Keys, name: str, value: Any) -> Keys:
    """Return the object called `name` within `keys`; an empty one if there is none."""
    if not isinstance(value or {}, dict):
        raise keys.unfit(name, value, "an object")
    return Keys(value or {}, f"{keys.prefix}{name}.")


def _rope(inner: Keys, theta: float, context: int, original: int, partial: bool = False) -> Rope:
    """Read the rope of an object of rope parameters. partial: it may rotate only a part of a
    head.
    """
    kind = inner.text("rope_type", inner.text("type", "default"))
    kind = "default" if kind == "mrope" else kind  # Of OF_IMAGES alone.
    if not partial and kind != "proportional":
        inner.require("partial_rotary_factor", 1.0)
    theta = inner.real("rope_theta", theta)
    original = inner.integer("original_max_position_embeddings", original)
    rope = Rope(theta, _scaling(kind, inner, context, original))
    inner.refuse_the_rest(lambda name, value: value is False or name == "finetuned")
    return rope


_KINDS = "default, linear, llama3, longrope, proportional, yarn"


def _scaling(kind: str, inner: Keys, context: int, original: int) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(inner.real("factor"))
    if kind == "proportional":
        share = inner.real("partial_rotary_factor", 1.0)
        if not 0 < share <= 1:
            raise inner.unfit("partial_rotary_factor", share, "in (0, 1]")
        return Proportional(share, inner.real("factor", 1.0))
    if kind == "llama3":
        low, high = inner.real("low_freq_factor"), inner.real("high_freq_factor")
        return Llama3(inner.real("factor"), low, high, original)
    if kind in ("longrope", "su"):  # Phi-3's first name for it.
        stretch = inner.real("factor", context / max(original, 1))
        recommended = longrope_attention_factor(stretch, original)
        factor = inner.real("attention_factor", recommended)
        short, long = (_divisors(inner, f"{name}_factor") for name in ("short", "long"))
        return LongRope(short, long, original, factor)
    if kind != "yarn":
        raise inner.unfit("rope_type", kind, f"one of {_KINDS}")
    factor = inner.real("factor", context / max(original, 1))
    return Yarn(
        factor,
        original,
        inner.real("attention_factor", _attention_factor(inner, factor)),
        inner.real("beta_fast", 0.0) or 32.0,
        inner.real("beta_slow", 0.0) or 1.0,
        inner.flag("truncate", True),
    )


def _divisors(inner: Keys, name: str) -> tuple[float, ...]:
    values = inner.get(name)
    numbers = isinstance(values, list) and all(map(_is_number, values))
    if not numbers or not values:
        raise inner.unfit(name, values, "a list of numbers")
    return tuple(float(value) for value in values)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def _attention_factor(inner: Keys, factor: float) -> float:
    """Return YaRN's factor; with DeepSeek's two scales if both are given."""
    scale, over_all = inner.real("mscale", 0.0), inner.real("mscale_all_dim", 0.0)
    if not (scale and over_all) or factor <= 1:
        return yarn_attention_factor(factor)
    step = yarn_attention_factor(factor) - 1
    below = over_all * step + 1
    if below <= 0:
        raise inner.unfit("mscale_all_dim", shown(over_all), "positive")
    return (scale * step + 1) / below
