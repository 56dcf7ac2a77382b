"""Short convolutions in GGUF files (llama.cpp's lfm2 and lfm2moe): which layers have one."""

from dataclasses import replace

from forerun.networks.arch import ArchitectureSizes, Family
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import LayerSpec, ShortConvolution

CONVOLUTIONS: tuple[Family, ...] = ("lfm2", "lfm2_moe")
_KV_HEADS = "attention.head_count_kv"


def attending_heads(keys: Keys) -> int:
    """Return the number of key/value heads, which is the same in all attention layers. Raises
    ModelError naming the key.
    """
    counts = keys.get(_KV_HEADS)
    own = {*counts} - {0} if isinstance(counts, list) else {counts}
    count = own.pop() if len(own) == 1 else None
    if type(count) is not int or count < 1:
        raise keys.unfit(_KV_HEADS, counts, "0 in layers with a convolution, one number in others")
    return count


def convolution_layers(
    keys: Keys, sizes: ArchitectureSizes, layers: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """Return `layers` with a short convolution in place of attention in those without key/value
    heads. Raises ModelError naming the key.
    """
    convolution = ShortConvolution(sizes.hidden, keys.integer("shortconv.l_cache"))
    counts = keys.get(_KV_HEADS)
    if not isinstance(counts, list):
        return layers
    if len(counts) != sizes.layers:
        raise keys.unfit(_KV_HEADS, counts, f"of {sizes.layers} layers")
    return tuple(
        spec if count else replace(spec, qk_norm=False, recurrent=convolution)
        for count, spec in zip(counts, layers, strict=True)
    )
