"""Quantised checkpoints: every format against its definition, and damaged ones."""

import json
from base64 import b64decode
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.grouped import MIDDLE
from forerun.checkpoints.mapped import TensorEntry, TensorFile
from forerun.checkpoints.quantised.config import read_method
from forerun.checkpoints.quantised.files import with_matrices
from forerun.checkpoints.quantised.numbers import VALUES, widened
from forerun.checkpoints.tensor_parallel import RankCheckpoint, TensorParallel
from forerun.errors import ModelError
from forerun.executors.cpu.few_bits import kind_of
from tests.covering import every, some_of, values
from tests.models import packers, tiny


def compressed(form, **weights):
    plain = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": plain | {"dynamic": False} | weights}
        },
        "ignore": ["lm_head"],
    }


FLOATS = (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))
"""Name, bits, columns of a group."""


def of_floats(form, bits, group):
    """As llm-compressor writes it."""
    strategy = "tensor_group" if group == 16 else "group"
    dtype = "torch.float8_e4m3fn" if group == 16 else "torch.uint8"
    more = {"observer": "memoryless_minmax", "observer_kwargs": {}, "actorder": None}
    sizes = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group}
    made = compressed(form, **sizes, **more, scale_dtype=dtype, block_structure=None)
    activations = made["config_groups"]["group_0"]["weights"] | {"dynamic": "local"}
    made["config_groups"]["group_0"] |= {"input_activations": activations, "format": form}
    return made


def quark(dtype, scheme, **weight):
    """As Quark 0.13 exports it."""
    spec = {"dtype": dtype, "qscheme": scheme, "ch_axis": 0, "is_dynamic": False, "bias": None}
    spec |= {"zero_point_type": "int32", "observer_cls": "PerTensorMinMaxObserver"} | weight
    return {
        "quant_method": "quark",
        "algo_config": [{"name": "awq", "scaling_layers": []}],
        "exclude": ["lm_head"],
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
        "global_quant_config": {"weight": spec, "input_tensors": None, "bias": None},
        "layer_quant_config": {"*lm_head": {"weight": None}},
        **{"layer_type_quant_config": {}, "kv_cache_post_rope": False, "version": "0.13"},
    }


def shuffled(weight):
    return np.random.default_rng(1).permutation(weight.shape[1])


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "dynamic": False}}},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 16,
    "sym": True,
    "data_type": "int",
    "iters": 0,
    "model_free": True,
    "autoround_version": "0.14.2",
    "block_name_to_quantize": "model.layers",
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
}
MLX = {"group_size": 32, "bits": 4, "mode": "affine"}
MLX |= {"model.layers.9.mlp.up_proj": {"group_size": 32, "bits": 8}, "model.norm": False}
BNB = {
    "quant_method": "bitsandbytes",
    **{"load_in_4bit": True, "_load_in_4bit": True, "load_in_8bit": False, "_load_in_8bit": False},
    **{"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8"},
    **{"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True},
    **{"llm_int8_threshold": 6.0, "llm_int8_skip_modules": ["lm_head"]},
    **dict.fromkeys(("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"), False),
}
"""As unsloth's folders have it."""
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 16}

FORMATS = {
    "fp8-block": (
        FP8 | {"fmt": "float8_e4m3fn", "weight_block_size": [32, 24]},
        lambda w: packers.float8(w, 32, 24),
    ),
    "fp8-tensor": (FP8, lambda w: packers.float8(w, 0, 0, "weight_scale")),
    "modelopt": (
        MODELOPT | {"kv_cache_scheme": {"type": "float", "num_bits": 8}},
        lambda w: packers.float8(w, 0, 0, "weight_scale"),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []},
        lambda w: packers.float8(w, 1, 0, "weight_scale"),
    ),
    "gptq": (GPTQ, packers.gptq),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: packers.gptq(w, version="2")),
    "gptq-8": (GPTQ | {"bits": 8}, lambda w: packers.gptq(w, bits=8)),
    "gptq-2": (GPTQ | {"bits": 2}, lambda w: packers.gptq(w, bits=2)),
    "gptq-channel": (GPTQ | {"group_size": -1}, lambda w: packers.gptq(w, group=0)),
    "gptq-order": (GPTQ | {"desc_act": True}, lambda w: packers.gptq(w, order=shuffled(w))),
    "awq": (AWQ, packers.awq),
    "round": (ROUND, lambda w: without_order(packers.gptq(w))),
    "round-awq": (ROUND | {"packing_format": "auto_round:auto_awq"}, packers.awq),
    "packed": (compressed("pack-quantized", **GROUP), packers.packed),
    "packed-8": (
        compressed("pack-quantized", num_bits=8),
        lambda w: packers.packed(w, bits=8, group=0),
    ),
    "packed-zeros": (
        compressed("pack-quantized", **GROUP, **{"symmetric": False}),
        lambda w: packers.packed(w, symmetric=False),
    ),
    "packed-order": (
        compressed("pack-quantized", **GROUP, actorder="group"),
        lambda w: packers.packed(w, order=shuffled(w)),
    ),
    "int8": (compressed("int-quantized"), packers.int8),
    "float8-channel": (
        compressed("float-quantized", type="float"),
        lambda w: packers.float8(w, 1, 0, "weight_scale"),
    ),
    "float8-blocks": (
        compressed("float-quantized", type="float", strategy="block", block_structure=[32, 32]),
        lambda w: packers.float8(w, 32, 32, "weight_scale"),
    ),
    "mlx": (MLX, packers.mlx),
    **{
        f"mlx-{bits}": (MLX | {"bits": bits}, partial(packers.mlx, bits=bits))
        for bits in (2, 3, 5, 6, 8)
    },
    **{
        f"mlx-{mode}": (
            {"mode": mode, "bits": bits, "group_size": group},
            partial(packers.mlx_floats, mode=mode),
        )
        for mode, bits, group in FLOATS
    },
    **{
        f"compressed-{mode}": (
            of_floats(f"{mode}{'' if bits == 8 else '-pack'}-quantized", bits, group),
            partial(packers.packed_floats, mode=mode),
        )
        for mode, bits, group in FLOATS
    },
    "bnb": (BNB, packers.bitsandbytes),
    "bnb-plain": (
        BNB | {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_type": "fp4"},
        partial(packers.bitsandbytes, nested=False, kind="fp4"),
    ),
    "bnb-8": (
        BNB
        | dict.fromkeys(("load_in_4bit", "_load_in_4bit"), False)
        | dict.fromkeys(("load_in_8bit", "_load_in_8bit"), True),
        packers.eight_bits_by_rows,
    ),
    "quark-fp8": (
        quark("fp8_e4m3", "per_tensor"),
        lambda w: packers.float8(w, 0, 0, "weight_scale"),
    ),
    "quark-fp8-rows": (
        quark("fp8_e4m3", "per_channel"),
        lambda w: packers.float8(w, 1, 0, "weight_scale"),
    ),
    "quark-uint4": (quark("uint4", "per_group", ch_axis=-1, group_size=16), packers.quark),
    "quark-int4": (
        quark("int4", "per_group", ch_axis=-1, group_size=16),
        partial(packers.quark, signed=True),
    ),
    "quark-mxfp4": (
        quark("fp4", "per_group", ch_axis=-1, group_size=32, scale_format="e8m0"),
        partial(packers.packed_floats, mode="mxfp4", by="modelopt"),
    ),
    "modelopt-nvfp4": (
        MODELOPT | {"quant_algo": "NVFP4", "group_size": 16},
        partial(packers.packed_floats, mode="nvfp4", by="modelopt"),
    ),
    "modelopt-mxfp8": (
        MODELOPT | {"quant_algo": "MXFP8"},
        partial(packers.packed_floats, mode="mxfp8"),
    ),
    "modelopt-mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.layers.0.self_attn.k_proj": {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
        lambda w: (
            packers.packed_floats(w, "nvfp4", "modelopt")
            if len(w) == 32
            else packers.float8(w, 0, 0, "weight_scale")
        ),
    ),
}


def without_order(packed):
    """AutoRound's files have no g_idx."""
    tensors, meant = packed
    return {name: tensors[name] for name in tensors if name != "g_idx"}, meant


def made(path, name, family="llama"):
    """A folder in the format called `name`, and what its matrices stand for."""
    files, meant = written(name, family)
    folder = path / "tiny"
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder, dict(meant)


@cache
def written(name, family):
    """Its files by name, made once: numbers are packed one at a time."""
    settings, pack = FORMATS[name]
    with TemporaryDirectory() as root:
        folder = tiny.save_folder(tiny.model(family), Path(root))
        meant = packers.quantise(folder, settings, pack)
        return {file.name: file.read_bytes() for file in folder.iterdir()}, meant


def test_numbers_are_those_of_their_own_libraries():
    """Arrays of recorded.json, made and widened by the libraries named there."""
    for one in json.loads((Path(__file__).parent / "recorded.json").read_text()):
        files = {}
        for part, (kind, shape, text) in one["tensors"].items():
            data, name = np.frombuffer(b64decode(text), np.uint8), f"m.{part}"
            entry = TensorEntry(kind, tuple(shape), 0, len(data))
            files[name] = TensorFile(Path("m"), {name: entry}, data)
        (file,) = with_matrices(files, read_method(one["config"])).values()
        expected = np.frombuffer(b64decode(one["float32"]), "<f4")
        np.testing.assert_array_equal(file.floats("m.weight").ravel(), expected, one["by"])


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_what_their_format_says(name, tmp_path):
    folder, meant = made(tmp_path, name)
    checkpoint = FolderCheckpoint(folder)
    assert len(meant) == 14
    for weight, numbers in meant.items():
        assert checkpoint.shape(weight) == numbers.shape
        np.testing.assert_array_equal(checkpoint.tensor(weight), numbers)
        assert checkpoint.packed(weight) is None


WIDENED = ("mlx-6", "mlx-8", "nvfp4", "bnb", "bnb-plain")
"""Formats that no product reads as they are."""


def scales_as_halves(scales):
    return scales is None or np.array_equal(scales, scales.astype(np.float16))


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_by_group_are_the_matrix(name, tmp_path):
    folder, meant = made(tmp_path, name)
    checkpoint = FolderCheckpoint(folder)
    for weight, numbers in meant.items():
        grouped = checkpoint.grouped(weight)
        if name.endswith(WIDENED) or (name == "modelopt-mixed" and len(numbers) == 32):
            assert grouped is None
            continue
        assert grouped.shape == numbers.shape
        parts = grouped.read(slice(0, len(numbers)))
        means = VALUES.get(grouped.kind.removeprefix("mx"))
        wide = parts.numbers if means is None else means[parts.numbers]
        groups = np.arange(numbers.shape[1]) // grouped.group
        middle = MIDDLE if grouped.kind == "int4" and not grouped.offsets else 0
        zeros = middle if parts.zeros is None else parts.zeros
        zeros = np.broadcast_to(np.float32(zeros), parts.scales.shape)[:, groups]
        made_of = (wide.astype(np.float32) - zeros) * parts.scales[:, groups]
        if grouped.offsets:
            made_of += parts.offsets[:, groups]
        if grouped.order is not None:
            made_of[:, grouped.order] = made_of.copy()
        np.testing.assert_array_equal(made_of, numbers)
        exact = scales_as_halves(parts.scales) and scales_as_halves(parts.offsets)
        assert grouped.halves() == exact
    assert checkpoint.grouped("model.embed_tokens.weight") is None


def test_scales_that_are_no_halves_are_rounded_and_said_to_be(tmp_path):
    folder, _ = made(tmp_path, "awq")
    name = "model.layers.0.mlp.up_proj"

    def change(factor, tensors):
        tensors[f"{name}.scales"] = tensors[f"{name}.scales"].float() * factor

    for factor, halves, kind in (
        (1.0, True, "4-bit integers in groups below 128"),
        (1.0001, False, "4-bit integers in groups below 128, some scales rounded"),
        (1e10, None, "few bits"),
    ):
        rewrite(folder, partial(change, factor))
        grouped = FolderCheckpoint(folder).grouped(f"{name}.weight")
        assert grouped.halves() is halves
        assert kind_of(replace(grouped, group=32)) == kind
    rewrite(folder, partial(change, np.nan))
    with pytest.raises(ModelError, match=r"mlp.up_proj.scales holds NaN or infinity; the file is"):
        FolderCheckpoint(folder).tensor(f"{name}.weight")


@pytest.mark.parametrize("name", ["compressed-nvfp4", "modelopt-nvfp4"])
@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_scale_of_all_that_is_no_number_is_named(name, value, tmp_path):
    folder, _ = made(tmp_path, name)
    part = "weight_global_scale" if name.startswith("compressed") else "weight_scale_2"
    rewrite(folder, lambda t: t[f"{Q}.{part}"].fill_(value))
    with pytest.raises(ModelError, match=rf"q_proj.{part} is {value}; it must be finite and pos"):
        FolderCheckpoint(folder).tensor(f"{Q}.weight")


class Watched(np.ndarray):
    """Counts the bytes that are taken of it as a matrix."""

    seen = 0

    def __getitem__(self, index):
        value = super().__getitem__(index)
        if np.ndim(value) >= 2 and self.ndim >= 2:
            Watched.seen += value.nbytes
        return value


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_is_that_of_the_whole_and_little_else_is_read(name, tmp_path):
    """Cuts wherever they come, groups and words included; then halves: half the bytes, but for what
    belongs to groups in any order.
    """
    folder, meant = made(tmp_path, name)
    checkpoint, random = FolderCheckpoint(folder), np.random.default_rng(2)
    weight = "model.layers.0.mlp.down_proj.weight"
    for _ in range(12):
        (top, bottom), (left, right) = (
            sorted(random.choice(length + 1, 2, False)) for length in meant[weight].shape
        )
        cut = slice(int(top), int(bottom)), slice(int(left), int(right))
        np.testing.assert_array_equal(checkpoint.part(weight, *cut), meant[weight][cut])
    held = checkpoint._stored[weight]
    matrix = held.file.matrices[held.name]
    watched = {
        part: (replace(file, data=file.data.view(Watched)), stored)
        for part, (file, stored) in matrix.parts.items()
    }
    watched, (rows, columns) = replace(matrix, parts=watched), matrix.shape
    taken = []
    for cut in ((rows, columns), (rows // 2, columns), (rows, columns // 2)):
        Watched.seen = 0
        watched.part(*(slice(0, end) for end in cut))
        taken.append(Watched.seen)
    assert 0 < taken[1] <= 0.51 * taken[0], taken
    shared = name.endswith(("order", "8", "mlx-2"))  # Scales are more of them; one group is cut.
    assert 0 < taken[2] <= (0.6 if shared else 0.55) * taken[0], taken


@pytest.mark.parametrize(
    ("size", "family"), some_of(every([2, 4], ["phi3", "glm4_moe", "llama"]), values)
)
def test_parts_of_ranks_are_those_of_the_whole(family, size, tmp_path):
    """Several matrices in one, and rows in another order."""
    folder = tiny.save_folder(tiny.model(family), tmp_path / "tiny")
    packers.quantise(folder, *FORMATS["awq"])
    whole = FolderCheckpoint(folder)
    for rank in range(size):
        tp = TensorParallel(rank, size)
        part = RankCheckpoint(whole, tp)
        for name in part.names():
            (index,) = tp.pieces(name, whole.shape(name), whole.architecture)
            np.testing.assert_array_equal(part.tensor(name), whole.tensor(name)[index], name)


@pytest.mark.parametrize("name", ["fp8-block", "awq", "packed-order"])
def test_logits_are_transformers_with_the_same_numbers(name, tmp_path):
    folder, meant = made(tmp_path, name, "qwen3")
    checkpoint = FolderCheckpoint(folder)
    plain = tiny.model("qwen3")
    with torch.no_grad():
        for weight, parameter in plain.named_parameters():
            if weight in meant:
                parameter.copy_(torch.from_numpy(meant[weight]))
    ids = torch.arange(100)[None]
    assert torch.equal(tiny.reference(checkpoint)(ids).logits, plain(ids).logits)


def test_every_byte_of_float8_is_torchs():
    every = np.arange(256, dtype=np.uint8)
    torchs = torch.from_numpy(every.copy()).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(widened(every, "F8_E4M3"), torchs)


def test_parts_of_a_matrix_may_lie_in_different_shards(tmp_path):
    folder, meant = made(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001.safetensors": names[::2], "model-00002.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    index = {name: file for file, some in halves.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    checkpoint = FolderCheckpoint(folder)
    for weight, numbers in meant.items():
        np.testing.assert_array_equal(checkpoint.tensor(weight), numbers)


def test_scales_of_activations_and_of_the_cache_are_left_alone(tmp_path):
    folder, _ = made(tmp_path, "fp8-tensor")

    def change(tensors):
        for part in ("q_proj.input_scale", "q_proj.activation_scale", "k_scale", "v_scale"):
            tensors[f"model.layers.0.self_attn.{part}"] = torch.ones(())

    rewrite(folder, change)
    assert len(FolderCheckpoint(folder).names()) == 21


@pytest.mark.parametrize(
    ("made", "short"),
    [
        (transformers.GPTQConfig(bits=4), {"quant_method": "gptq", "bits": 4}),
        (transformers.AwqConfig(bits=4), {"quant_method": "awq", "bits": 4}),
        (transformers.FbgemmFp8Config(), {"quant_method": "fbgemm_fp8"}),
        (transformers.FineGrainedFP8Config(), FP8 | {"weight_block_size": [128, 128]}),
    ],
)
def test_what_transformers_writes_beside_a_format_changes_nothing(made, short):
    """All its settings, defaults too, are in what it saves."""
    settings = json.loads(json.dumps(made.to_dict(), default=str))
    assert read_method({"quantization_config": settings}) == read_method(
        {"quantization_config": short}
    )


Q = "model.layers.1.self_attn.q_proj"
STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"


def state(**changes):
    """What bitsandbytes says of a matrix, changed."""
    said = {"blocksize": 32, "shape": [64, 64], "nested_blocksize": 256, "nested_offset": 0.5}
    return torch.frombuffer(bytearray(json.dumps(said | changes).encode()), dtype=torch.uint8)


DAMAGES = {
    "no scales": ("gptq", lambda t: t.pop(f"{Q}.scales"), f"{Q} has g_idx, qweight, qzeros; it"),
    "no zeros": ("awq", lambda t: t.pop(f"{Q}.qzeros"), f"{Q} has qweight, scales; it needs"),
    "no zero points": (
        "packed-zeros",
        lambda t: t.pop(f"{Q}.weight_zero_point"),
        f"{Q}.weight_zero_point is missing",
    ),
    "no float8 scale": (
        "fp8-block",
        lambda t: t.pop(f"{Q}.weight_scale_inv"),
        f"{Q}.weight_scale is missing",
    ),
    "two scales": (
        "fp8-block",
        lambda t: t.update({f"{Q}.weight_scale": torch.ones(1)}),
        f"{Q} has weight_scale_inv and weight_scale",
    ),
    "turned": (
        "awq",
        lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].T.contiguous()}),
        r"scales is \[64, 4\], not \[4, 64\]",
    ),
    "another group": (
        "gptq",
        lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].repeat(2, 1)}),
        r"scales is \[8, 64\], not \[4, 64\]",
    ),
    "another type": (
        "gptq",
        lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}),
        "qweight is stored as F32, not I32",
    ),
    "a stranger": (
        "awq",
        lambda t: t.update({f"{Q}.g_idx": torch.zeros(64, dtype=torch.int32)}),
        "g_idx",
    ),
    "no state": (
        "bnb",
        lambda t: t.pop(f"{Q}.weight.quant_state.bitsandbytes__nf4"),
        f"{Q}.weight.quant_state.bitsandbytes__nf4 is missing",
    ),
    "no JSON": (
        "bnb",
        lambda t: t[f"{Q}.weight.quant_state.bitsandbytes__nf4"].fill_(7),
        "quant_state.bitsandbytes__nf4 is damaged: JSONDecodeError",
    ),
    "another block": (
        "bnb",
        lambda t: t.update({STATE: state(blocksize=60)}),
        "blocks of 60 do not divide the 64 columns",
    ),
    "a shape beyond the file": (
        "bnb",
        lambda t: t.update({STATE: state(shape=[64, 1 << 40])}),
        r"q_proj.weight is \[2048, 1\], not \[35184372088832, 1\]",
    ),
    "in a GPU's order": (
        "bnb-8",
        lambda t: t[f"{Q}.weight_format"].fill_(2),
        "weight_format is not 0: save the model with a newer bitsandbytes",
    ),
    "no unit": (
        "compressed-nvfp4",
        lambda t: t.pop(f"{Q}.weight_global_scale"),
        f"{Q}.weight_global_scale is missing",
    ),
    "turned bytes": (
        "modelopt-nvfp4",
        lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].T.contiguous()}),
        r"weight_scale is \[4, 64\], not \[64, 4\]",
    ),
    "another shape said": (
        "packed",
        lambda t: t.update({f"{Q}.weight_shape": torch.tensor([64, 999])}),
        "weight_shape says 64 x 999",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_is_named(damage, tmp_path):
    name, change, message = DAMAGES[damage]
    folder, _ = made(tmp_path, name)
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        FolderCheckpoint(folder)


def test_modelopt_says_its_format_in_a_file_beside(tmp_path):
    """Its older exports leave config.json as it was: every scale was an unexpected tensor."""
    folder, meant = made(tmp_path, "modelopt")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    beside = folder / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    checkpoint = FolderCheckpoint(folder)
    for weight, numbers in meant.items():
        np.testing.assert_array_equal(checkpoint.tensor(weight), numbers)
    beside.write_text(json.dumps({"quantization": said | {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelError, match="quant_algo is 'W4A8_AWQ'; it must be FP8"):
        FolderCheckpoint(folder)


def test_groups_that_are_none_are_refused_when_they_are_read(tmp_path):
    folder, _ = made(tmp_path, "gptq-order")
    rewrite(folder, lambda t: t[f"{Q}.g_idx"].add_(1))
    with pytest.raises(ModelError, match="names groups 1 to 4; there are 4"):
        FolderCheckpoint(folder).tensor(f"{Q}.weight")


REFUSED = {
    "plain": (FP8, "no tensor is: remove quantization_config"),
    "hqq": ({"quant_method": "hqq"}, "are: fp8 .* GGUF"),
    "as bfloat16": (BNB | {"bnb_4bit_quant_storage": "bfloat16"}, "must be 'uint8' to run here"),
    "rotated": (
        quark("int8", "per_tensor") | {"algo_config": {"name": "rotation"}},
        "algo_config is",
    ),
    "quark's order": (
        quark("int8", "per_tensor") | {"export": {"pack_method": "order"}},
        "export.pack_method is 'order'; it must be 'reorder'",
    ),
    "quark's groups": (quark("fp8_e4m3", "per_group", ch_axis=-1), "dtype is 'fp8_e4m3 per_group'"),
    "quark in two steps": (
        quark("int8", "per_tensor") | {"global_quant_config": {"weight": [{}, {}]}},
        "global_quant_config is .*; it must be an object whose weight is one",
    ),
    "int4 beside uint4": (
        quark("int4", "per_group", ch_axis=-1)
        | {
            "layer_quant_config": {
                "*": quark("uint4", "per_group", ch_axis=-1)["global_quant_config"]
            }
        },
        "it must be one of them for all layers",
    ),
    "four and eight bits": (
        BNB | {"load_in_8bit": True},
        "load_in_4bit is True; it must be",
    ),
    "three bits": (GPTQ | {"bits": 3}, "bits is 3; it must be 2, 4 or 8"),
    "gemv": (AWQ | {"version": "gemv"}, "gemm; gemv and marlin pack"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, "gptq or gptq_v2"),
    "marlin by format": (GPTQ | {"format": "marlin"}, "gptq or gptq_v2"),
    "rounded anyhow": (
        ROUND | {"packing_format": "auto_round"},
        "packing_format is 'auto_round'; it",
    ),
    "rounded floats": (ROUND | {"data_type": "mx_fp"}, "data_type is 'mx_fp'; it must be 'int'"),
    "mixed rounds": (
        ROUND | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 16}}},
        r"extra_config\['model.layers.0.mlp.up_proj'\] is {'bits': 8}; it must be {'bits': 4",
    ),
    "fp4 experts": (FP8 | {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'; it must be e4m3 or"),
    "unknown": (FP8 | {"rotate": True}, "quantization_config.rotate = True"),
    "mxfp6": (compressed("mxfp6-pack-quantized"), "format is 'mxfp6-pack-quantized'; of"),
    "nvfp4 in other groups": (
        of_floats("nvfp4-pack-quantized", 4, 32),
        "group_size is 32; it must be",
    ),
    "nvfp4 with zeros": (
        compressed("nvfp4-pack-quantized", **GROUP | {"type": "float", "symmetric": False}),
        "strategy is 'group'; it must be group or tensor_group, symmetric",
    ),
    "smoothed": (
        MODELOPT | {"quant_algo": "NVFP4_AWQ"},
        "quant_algo is 'NVFP4_AWQ'; it must be FP8",
    ),
    "mixed without layers": (
        MODELOPT | {"quant_algo": "MIXED_PRECISION"},
        "quantized_layers is None; it must be an object of layers",
    ),
    "six bits": (compressed("pack-quantized", num_bits=6), "num_bits is 6; it must be 8, or 4"),
    "mlx's seven": ({"bits": 7, "group_size": 64}, r"bits is \[7, 64\]; it must be one of"),
    "mlx's mode": (MLX | {"mode": "mx"}, "quantization.mode is 'mx'; it must be affine, nvfp4,"),
    "mlx's module": (MLX | {"model.layers.1": 4}, "model.layers.1 is 4; it must be true, false or"),
    "mlx's key": (MLX | {"rotate": 4}, "quantization.rotate is 4; it must be true, false or"),
    "no object": ("fp8", "quantization_config is 'fp8', not an object"),
    "a block of one": (FP8 | {"weight_block_size": [128]}, "two sizes, rows and columns"),
    "no group size": (compressed("int-quantized", strategy="group"), "strategy is 'group'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_read_is_refused_with_what_to_do(what, tmp_path):
    settings, message = REFUSED[what]
    folder = tiny.save_folder(tiny.model("llama"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=message) as refused:
        FolderCheckpoint(folder)
    assert what in ("no object", "plain") or str(refused.value).endswith("or a GGUF file of it")
