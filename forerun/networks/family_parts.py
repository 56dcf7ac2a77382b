"""Common parts of several families' readers: windows, scales and keys that may be null."""

from forerun.networks.arch import ArchitectureSizes
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import AttentionSpec, LayerSpec

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CONV = "conv"

Layers = tuple[LayerSpec, ...]


def plain_attention(sizes: ArchitectureSizes, window: int | None = None) -> AttentionSpec:
    """Return attention with scores scaled by 1/sqrt(E), to keys within `window` tokens (None: to
    all before).
    """
    return AttentionSpec(sizes.head_size**-0.5, window)


def optional_real(keys: Keys, name: str, default: float | None) -> float | None:
    """Return a number as Keys.real; None if the key is null, the default if it is absent."""
    if keys.get(name) is None and (keys.has(name) or default is None):
        return None
    return keys.real(name, default)


def optional_integer(keys: Keys, name: str, default: int | None) -> int | None:
    """Return a number as Keys.integer; None if the key is null, the default if it is absent."""
    if keys.get(name) is None and (keys.has(name) or default is None):
        return None
    return keys.integer(name, default)


def uses_windows(keys: Keys) -> bool:
    """Return whether Qwen's use_sliding_window is on. A window that is null switches it off, as in
    transformers.
    """
    used = keys.flag("use_sliding_window", False)
    return used and not (keys.has("sliding_window") and keys.get("sliding_window") is None)


def upper_windows(keys: Keys, sizes: ArchitectureSizes) -> list[int | None]:
    """Return each layer's window in Qwen2 and Qwen3: those from max_window_layers on have one."""
    used = uses_windows(keys)
    window = keys.integer("sliding_window", 4096)
    first = keys.integer("max_window_layers", 28)
    slides = slides_of(
        keys, sizes, [used and layer >= first for layer in range(sizes.layers)], used
    )
    return [window if slide else None for slide in slides]


def kinds_of(keys: Keys, sizes: ArchitectureSizes, other: str, default: list[str]) -> list[str]:
    """Return FULL or `other` for each layer, from layer_types, else the default. Raises ModelError
    for other words, and if no layer has attention.
    """
    kinds = keys.get("layer_types") or default
    named = isinstance(kinds, list) and all(kind in (FULL, other) for kind in kinds)
    if not named or len(kinds) != sizes.layers or FULL not in kinds:
        what = f"{sizes.layers} times {FULL} or {other}, the first of them at least once"
        raise keys.unfit("layer_types", kinds, what)
    found: list[str] = kinds
    return found


def slides_of(
    keys: Keys, sizes: ArchitectureSizes, default: list[bool], used: bool = True
) -> list[bool]:
    """Return whether each layer has a window, by layer_types, else the default.

    used  windows are switched on; if not, layer_types must not name any

    Raises ModelError for another layer_types.
    """
    kinds = keys.get("layer_types")
    if kinds is None:
        return default
    named = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not named or len(kinds) != sizes.layers:
        raise keys.unfit("layer_types", kinds, f"{sizes.layers} times {FULL} or {SLIDING}")
    if SLIDING in kinds and not used:
        raise keys.unfit("use_sliding_window", used, "true where layer_types say so")
    return [kind == SLIDING for kind in kinds]
