"""Reads `quantization_config` of a config.json, and `quantization` of one made for MLX: the storage
methods of the matrices.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from forerun.checkpoints.quantised.method import FLOATS, Layout, Method, Numbers
from forerun.errors import ModelError
from forerun.networks.keys import Keys, shown

READ = (
    "fp8 (float8 E4M3 with scales per block or tensor)",
    "compressed-tensors (float-, int-, naive-, pack-, nvfp4-pack-, mxfp4-pack-, mxfp8-quantized)",
    "gptq (2, 4 and 8 bits)",
    "awq (gemm, 4 bits)",
    "mxfp4 (gpt-oss's experts)",
    "modelopt (FP8, NVFP4, MXFP8)",
    "auto-round (packed as gptq or awq)",
    "fbgemm_fp8",
    "bitsandbytes (nf4, fp4, int8)",
    "quark (fp8, int8, uint4, int4, mxfp4)",
    "MLX (affine of 2 to 8 bits, mxfp4, mxfp8, nvfp4)",
)


def read_method(config: Mapping[str, Any]) -> tuple[Method, ...]:
    """Read config.json's `quantization_config`; () without one. If there are several methods,
    groups of modules are stored in different ways, which their tensors show. Raises ModelError
    naming the key that is not supported, or the supported methods.
    """
    settings = config.get("quantization_config")
    for own in (config.get("quantization"), settings):
        # MLX's: an object with `bits` and no method, mostly under both names.
        if isinstance(own, dict) and "bits" in own and "quant_method" not in own:
            return _read(_mlx, own, "quantization")
    if settings is None:
        return ()
    if not isinstance(settings, dict):
        raise ModelError(f"config.json: quantization_config is {shown(settings)}, not an object")
    name = Keys(settings, "config.json: quantization_config.").text("quant_method")
    readers = {
        "fp8": _float8,
        "gptq": _gptq,
        "awq": _awq,
        "mxfp4": _mxfp4,
        "compressed-tensors": _compressed,
        **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), _modelopt),
        "fbgemm_fp8": _fbgemm,
        "bitsandbytes": _bitsandbytes,
        "quark": _quark,
        "auto-round": _auto_round,
        "intel/auto-round": _auto_round,
    }
    if name not in readers:
        raise ModelError(
            f"config.json: quantization_config.quant_method is {shown(name)}, which is not read "
            f"here; these are: {', '.join(READ)}. Take one of these, or {_OTHERWISE}"
        )
    return _read(readers[name], settings, "quantization_config")


def _read(
    read: Callable[[Keys], tuple[Method, ...]], settings: Mapping[str, Any], place: str
) -> tuple[Method, ...]:
    """Return the methods that a reader finds in the settings, all of which must be read."""
    keys = Keys(settings, f"config.json: {place}.")
    try:
        keys.get("quant_method")
        methods = read(keys)
        keys.refuse_the_rest(_harmless)
    except ModelError as error:
        raise ModelError(f"{error}. Take {_OTHERWISE}") from error
    return methods


_OTHERWISE = "the model's unquantised checkpoint, or a GGUF file of it"


_HARMLESS = re.compile(
    r"""
    # how the numbers were found, which are in the file
    damp_percent | damp_auto_increment | static_groups | true_sequential | batch_size | tokenizer
    | dataset | model_seqlen | block_name_to_quantize | module_name_preceding_first_block
    | quantizer | meta | model_name_or_path | model_file_base_name | lm_head | is_marlin_format
    | mse | mock_quantization | offload_to_disk | hyb_act | adapter | pack_dtype | pack_impl
    | act_group_aware | cache_block_outputs | pad_token_id
    | autoround_version | packing_format | iters | low_(gpu|cpu)_mem_usage | nsamples | seqlen
    | lr | minmax_lr | amp | enable_(quanted_input|minmax_tuning|norm_bias_tuning) | sampler
    | gradient_accumulate_steps | to_quant_block_names | quant_block_list | not_use_best_mse
    | dynamic_max_gap | scale_dtype | supported_types | model_free
    # which kernels were used
    | backend | use_exllama | exllama_config | disable_exllama | use_cuda_fp16 | max_input_length
    | do_fuse | fuse_max_seq_len | modules_to_fuse
    # which program wrote it
    | .*version | quantization_status | global_compression_ratio | scale_fmt
    # which modules are left out: their tensors say so too
    | modules_to(_not)?_convert | ignored_layers | ignore | modules_in_block_to_quantize | dynamic
    # of activations and keys, which are not quantised here
    | activation_scheme | kv_cache_scheme | kv_cache_quant_algo
    | act_(bits|group_size|sym|dynamic|data_type)
    """,
    re.VERBOSE,
)


def _harmless(name: str, value: Any) -> bool:
    return value is False or value in ({}, [], "") or _HARMLESS.fullmatch(name) is not None


def _float8(keys: Keys) -> tuple[Method, ...]:
    """Return the method of DeepSeek-V3's blocks (arXiv 2412.19437, section 3.3), or of one scale
    for a whole matrix.
    """
    if (form := keys.text("fmt", "e4m3")) not in _E4M3:
        raise keys.unfit("fmt", form, " or ".join(_E4M3))
    keys.require("expert_dtype", "fp8")
    block = keys.get("weight_block_size")
    if block is None:
        return (Method("float8, one scale for a matrix", "float8", 8, 0, 0, numbers="float8"),)
    rows, columns = _block(keys, "weight_block_size", block)
    return (
        Method(
            f"float8 in blocks of {rows} x {columns}", "float8", 8, columns, rows, numbers="float8"
        ),
    )


_E4M3 = ("e4m3", "float8_e4m3fn")
"""Names of the same format: DeepSeek's and torch's (MiniMax)."""


def _block(keys: Keys, name: str, value: Any) -> tuple[int, int]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(each) is int and 1 <= each <= 1 << 16 for each in value)
    ):
        raise keys.unfit(name, value, "two sizes, rows and columns")
    return value[0], value[1]


def _gptq(keys: Keys) -> tuple[Method, ...]:
    """Return the method of GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel store it."""
    bits = keys.integer("bits")
    if bits not in (2, 4, 8):
        raise keys.unfit("bits", bits, "2, 4 or 8")
    group = _group(keys, "group_size")
    ordered = keys.flag("desc_act", False)
    keys.get("sym")  # The zero points are in the file either way.
    form = keys.text("checkpoint_format", keys.text("format", "gptq"))
    keys.require("format", form)
    keys.require("method", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise keys.unfit("checkpoint_format", form, "gptq or gptq_v2; others are made for a kernel")
    groups = f"in groups of {group}" if group else "a scale per channel"
    order = ", columns in order of activation" if ordered else ""
    title = f"GPTQ, {bits} bits {groups}{order}"
    return (Method(title, "gptq", bits, group, 1, True, form == "gptq"),)


def _awq(keys: Keys) -> tuple[Method, ...]:
    """Return the method of AWQ (arXiv 2306.00978) as AutoAWQ's "gemm" stores it."""
    keys.require("bits" if keys.has("bits") else "w_bit", 4)
    group = _group(keys, "group_size" if keys.has("group_size") else "q_group_size")
    for name in ("version", "format", "checkpoint_format"):
        form = keys.text(name, "gemm").lower()
        if form != "gemm":
            raise keys.unfit(name, form, "gemm; gemv and marlin pack the numbers otherwise")
    keys.require("method", "awq")
    keys.get("sym")  # Transformers writes GPTQ's default of it.
    if not keys.flag("zero_point", True):
        raise keys.unfit("zero_point", False, "true")
    return (Method(f"AWQ, 4 bits in groups of {group}", "awq", 4, group, 1, True),)


def _mxfp4(keys: Keys) -> tuple[Method, ...]:
    """Return the method of gpt-oss's experts; its other matrices are floats."""
    return (FLOATS["mxfp4"],)


_MLX_BITS = (2, 3, 4, 5, 6, 8)


def without_wrapper(name: str) -> str:
    """Return a name of a multimodal checkpoint's language model as one that was saved alone."""
    wrapped = name.startswith(("language_model.", "model.language_model."))
    return name.replace("language_model.", "", 1) if wrapped else name


def _mlx(keys: Keys) -> tuple[Method, ...]:
    """Return the methods of MLX: one for all modules, and others for modules by name."""
    modules: dict[Method, list[str]] = {_mlx_method(keys): []}
    for name in keys.unread():
        own = keys.get(name)
        if isinstance(own, dict) and "bits" in own:
            each = Keys(own, f"{keys.prefix}{name}.")
            modules.setdefault(_mlx_method(each), []).append(without_wrapper(name))
            each.refuse_the_rest(_harmless)
        elif not isinstance(own, bool) and not _harmless(name, own):
            raise keys.unfit(name, own, "true, false or an object with bits, if it is a module")
    first, *others = modules.items()
    named = tuple(replace(method, modules=tuple(names)) for method, names in others)
    return first[0], *named, *((replace(first[0], modules=tuple(first[1])),) if first[1] else ())


def _mlx_method(keys: Keys) -> Method:
    mode, bits = keys.text("mode", "affine"), keys.integer("bits")
    if mode == "affine":
        group = keys.integer("group_size", 64)
        if bits not in _MLX_BITS or group not in (32, 64, 128):
            raise keys.unfit(
                "bits", [bits, group], f"one of {_MLX_BITS} with group_size 32, 64 or 128"
            )
        return Method(f"MLX, {bits} bits in groups of {group}", "mlx", bits, group)
    if mode not in FLOATS:
        raise keys.unfit("mode", mode, f"affine, {', '.join(FLOATS)}")
    method = replace(FLOATS[mode], layout="mlx", title=f"MLX, {FLOATS[mode].title}")
    _require(keys, bits=method.bits, group_size=method.group)
    return method


def _require(keys: Keys, **values: int | str) -> None:
    for name, value in values.items():
        keys.require(name, value)


_MODELOPT = {
    "FP8": Method("float8, one scale for a matrix", "float8", 8, 0, 0, numbers="float8"),
    "FP8_PER_CHANNEL_PER_TOKEN": Method(
        "float8, a scale per row", "float8", 8, 0, 1, numbers="float8"
    ),
    "NVFP4": replace(FLOATS["nvfp4"], layout="fp4"),
    "W4A16_NVFP4": replace(FLOATS["nvfp4"], layout="fp4"),
    "MXFP8": FLOATS["mxfp8"],
}


def _modelopt(keys: Keys) -> tuple[Method, ...]:
    """Return the methods of NVIDIA's ModelOpt; those of single layers are in MIXED_PRECISION."""
    for name in ("config_groups", "producer", "exclude_modules", "kv_cache_scheme"):
        keys.get(name)
    mixed, layers = keys.text("quant_algo") == "MIXED_PRECISION", keys.get("quantized_layers")
    if mixed and (not isinstance(layers, dict) or not layers):
        raise keys.unfit("quantized_layers", layers, "an object of layers")
    sources = [keys]
    if mixed:
        place = f"{keys.prefix}quantized_layers."
        each_own = ((name, own if isinstance(own, dict) else {}) for name, own in layers.items())
        sources = [Keys(own, f"{place}{name}.") for name, own in each_own]
    methods = []
    for each in sources:
        algorithm = each.text("quant_algo")
        if algorithm not in _MODELOPT:
            raise each.unfit("quant_algo", algorithm, ", ".join(_MODELOPT))
        method = _MODELOPT[algorithm]
        each.require("group_size", method.group)
        if mixed:
            each.refuse_the_rest(_harmless)
        methods.append(replace(method, title=f"ModelOpt, {method.title}"))
    return tuple(dict.fromkeys(methods))


def _fbgemm(keys: Keys) -> tuple[Method, ...]:
    """Return the method of Meta's Llama 3.1 in float8: a scale per row."""
    keys.get("activation_scale_ub")
    return (Method("float8, a scale per row", "float8", 8, 0, 1, numbers="float8"),)


def _bitsandbytes(keys: Keys) -> tuple[Method, ...]:
    """Return the method of bitsandbytes: QLoRA's 4 bits (arXiv 2305.14314), whose groups the files
    describe, or LLM.int8's (arXiv 2208.07339), whose activations are not rounded here.
    """
    keys.require("bnb_4bit_quant_storage", "uint8")
    for name in ("bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "llm_int8_skip_modules"):
        keys.get(name)
    for name in ("llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload"):
        keys.get(name)
    kind, four = keys.text("bnb_4bit_quant_type", "fp4"), keys.flag("load_in_4bit", False)
    if four == keys.flag("load_in_8bit", False):
        raise keys.unfit("load_in_4bit", four, "true, or load_in_8bit, and not both")
    for name, value in (("_load_in_4bit", four), ("_load_in_8bit", not four)):
        if keys.flag(name, value) != value:
            raise keys.unfit(name, not value, str(value).lower())
    if not four:
        return (Method("bitsandbytes, 8-bit integers with a scale per row", "bnb8", 8, 0, 1),)
    return (Method(f"bitsandbytes, {kind}, 4 bits", "bnb4", 4, 64, numbers="table"),)


_QUARK_ALGORITHMS = ("awq", "gptq", "gptaq", "smooth", "autosmoothquant", "autoround", "qronos")
"""Those whose results are in the weights alone."""


def _quark(keys: Keys) -> tuple[Method, ...]:
    """Return the methods of AMD's Quark, of all modules and of single ones; the tensors show which
    a module has.
    """
    for name in ("exclude", "quant_mode", "kv_cache_quant_config", "kv_cache_post_rope"):
        keys.get(name)
    export = Keys(keys.get("export") or {}, f"{keys.prefix}export.")
    _require(export, weight_format="real_quantized", pack_method="reorder")
    algorithms = keys.get("algo_config") or []
    for own in algorithms if isinstance(algorithms, list) else [algorithms]:
        if not isinstance(own, dict) or own.get("name") not in _QUARK_ALGORITHMS:
            raise keys.unfit("algo_config", own, f"of {', '.join(_QUARK_ALGORITHMS)}")
    found = [("global_quant_config", keys.get("global_quant_config"))]
    for place in ("layer_quant_config", "layer_type_quant_config"):
        layers = keys.get(place) or {}
        if not isinstance(layers, dict):
            raise keys.unfit(place, layers, "an object")
        found += [(f"{place}.{name}", own) for name, own in layers.items()]
    methods = [_quark_method(keys, place, own) for place, own in found]
    made = tuple(dict.fromkeys(method for method in methods if method is not None))
    if len({method.signed for method in made if method.layout == "quark"}) > 1:
        raise keys.unfit("layer_quant_config", "int4 and uint4", "one of them for all layers")
    return made


def _quark_method(keys: Keys, place: str, settings: Any) -> Method | None:
    weight = settings.get("weight") if isinstance(settings, dict) else settings
    if weight is None:
        return None
    if not isinstance(weight, dict):
        raise keys.unfit(place, settings, "an object whose weight is one")
    own = Keys(weight, f"{keys.prefix}{place}.weight.")
    if settings.get("bias") is not None:
        raise keys.unfit(f"{place}.bias", settings["bias"], "absent")
    _require(own, zero_point_type="int32")
    dtype, scheme = own.text("dtype"), own.text("qscheme")
    if own.flag("is_dynamic", False) or own.get("is_scale_quant", False):
        raise own.unfit("is_dynamic", True, "false, as is is_scale_quant: weights are stored")
    rows = {"per_tensor": 0, "per_channel": 1}.get(scheme)
    how = "a scale per row" if rows else "one scale for a matrix"
    if rows is not None and dtype in ("fp8_e4m3", "int8"):
        own.require("ch_axis", 0)
        if dtype == "int8":
            return Method(f"Quark, 8-bit integers, {how}", "int8", 8, 0, rows, True)
        return Method(f"Quark, float8, {how}", "float8", 8, 0, rows, numbers="float8")
    own.require("ch_axis", -1)
    if scheme == "per_group" and dtype == "fp4":
        _require(own, group_size=32, scale_format="e8m0")
        return replace(FLOATS["mxfp4"], layout="fp4", title=f"Quark, {FLOATS['mxfp4'].title}")
    if scheme == "per_group" and dtype in ("int4", "uint4"):
        group = _group(own, "group_size")
        title = f"Quark, {dtype} in groups of {group}"
        return Method(title, "quark", 4, group, 1, True, signed=dtype == "int4")
    raise own.unfit(
        "dtype",
        f"{dtype} {scheme}",
        "fp8_e4m3 or int8 per_tensor or per_channel, or uint4, int4 or fp4 per_group",
    )


def _auto_round(keys: Keys) -> tuple[Method, ...]:
    """Return the method of AutoRound (arXiv 2309.05516), which packs as GPTQ or AWQ do."""
    keys.require("data_type", "int")
    bits, packing = keys.integer("bits"), keys.text("packing_format", "auto_round:auto_gptq")
    modules = keys.get("extra_config") or {}
    if not isinstance(modules, dict) or not all(isinstance(one, dict) for one in modules.values()):
        raise keys.unfit("extra_config", modules, "an object of modules")
    for name, own in modules.items():
        same = {"bits": bits, "group_size": keys.get("group_size", 128)}
        if own.get("bits", bits) in (16, 32):
            continue  # Floats: the module's tensor says so too.
        if other := {key: own[key] for key in same if own.get(key, same[key]) != same[key]}:
            raise keys.unfit(f"extra_config[{shown(name)}]", other, f"{same}, or 16 bits")
    if packing.endswith("gptq"):
        method = _gptq(keys)
    elif packing.endswith("awq"):
        method = _awq(keys)
    else:
        raise keys.unfit("packing_format", packing, "auto_round:auto_gptq or auto_round:auto_awq")
    return tuple(replace(one, title=f"AutoRound: {one.title}") for one in method)


def _group(keys: Keys, name: str) -> int:
    group = keys.integer(name, 128)
    if group != -1 and not 1 <= group <= 1 << 16:
        raise keys.unfit(name, group, "columns that share a scale, or -1 for all")
    return max(group, 0)


def _compressed(keys: Keys) -> tuple[Method, ...]:
    """Return the methods of compressed-tensors (written by vLLM's llm-compressor)."""
    form = keys.text("format", "dense")
    sparsity = keys.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise keys.unfit("sparsity_config", sparsity, "absent: sparse files are not read here")
    groups = keys.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise keys.unfit("config_groups", groups, "an object of groups")
    methods = []
    for name, group in groups.items():
        prefix = f"{keys.prefix}config_groups.{name}."
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise ModelError(f"{prefix}weights is missing; only weights are read quantised here")
        own = group.get("format") or form
        methods.append(_compressed_group(Keys(group["weights"], f"{prefix}weights."), own))
    return tuple(dict.fromkeys(methods))


_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
_OF_FLOATS: dict[str, Method] = {
    "nvfp4-pack-quantized": FLOATS["nvfp4"],
    "mxfp4-pack-quantized": replace(FLOATS["mxfp4"], layout="packed"),
    "mxfp8-quantized": FLOATS["mxfp8"],
}


def _compressed_group(keys: Keys, form: Any) -> Method:
    if form not in (*_FORMATS, *_OF_FLOATS):
        raise ModelError(
            f"config.json: quantization_config.format is {shown(form)}; of compressed-tensors "
            f"these are read: {', '.join((*_FORMATS, *_OF_FLOATS))}"
        )
    zeros = not keys.flag("symmetric", True)
    if form in _OF_FLOATS:
        method = _OF_FLOATS[form]
        _require(keys, num_bits=method.bits, type="float", group_size=method.group)
        if zeros or keys.text("strategy", "group") not in ("group", "tensor_group"):
            raise keys.unfit("strategy", keys.get("strategy"), "group or tensor_group, symmetric")
        keys.get("block_structure")
    else:
        method = _compressed_integers(keys, form, zeros)
    order = keys.get("actorder")
    if order not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise keys.unfit("actorder", order, "group, weight or absent")
    if keys.flag("dynamic", False):
        raise keys.unfit("dynamic", True, "false, since weights are stored")
    for name in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        keys.get(name)
    keys.refuse_the_rest(lambda _, value: value in (None, False, {}, []))
    return replace(method, title=f"compressed-tensors, {method.title}")


def _compressed_integers(keys: Keys, form: str, zeros: bool) -> Method:
    """Return the method of integers, or of float8 with floats as scales."""
    bits, kind = keys.integer("num_bits"), keys.text("type", "int")
    packed = form == "pack-quantized"
    if kind not in ("int", "float") or (packed and kind == "float"):
        raise keys.unfit("type", kind, "int, or float where the format is not pack-quantized")
    if bits not in ((4, 8) if packed else (8,)):
        raise keys.unfit("num_bits", bits, "8, or 4 where the format is pack-quantized")
    rows, group, how = _strategy(keys)
    title = f"{f'float{bits}' if kind == 'float' else f'{bits}-bit integers'}, {how}"
    layout: Layout = "packed" if packed else "float8" if kind == "float" else "int8"
    numbers: Numbers = "float8" if layout == "float8" else "integers"
    return Method(title, layout, bits, group, rows, zeros, numbers=numbers)


def _strategy(keys: Keys) -> tuple[int, int, str]:
    """Return the rows and columns that share a scale, and their description."""
    strategy, size = keys.text("strategy", "tensor"), keys.get("group_size")
    structure = keys.get("block_structure")
    match strategy:
        case "tensor":
            return 0, 0, "one scale for a matrix"
        case "channel":
            return 1, 0, "a scale per channel"
        case "group" if type(size) is int and size > 0:
            return 1, size, f"groups of {size}"
        case "block":
            rows, columns = _block(keys, "block_structure", structure)
            return rows, columns, f"blocks of {rows} x {columns}"
    raise keys.unfit("strategy", strategy, "tensor, channel, block, or group with a group_size")
