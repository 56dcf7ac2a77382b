"""Experts, and what else a layer may say on the compiled core, against transformers, the torch
executor and NumPy.
"""

import math
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from forerun.build.shapes import SHAPES, RandomCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.mapped import Packed
from forerun.errors import ModelError
from forerun.executors.cpu import CpuExecutor, native
from forerun.executors.cpu.few_bits import check_fp4
from forerun.networks.layer_spec import Experts, Router
from tests.covering import covering, every, rarely, some_of, thinned, values
from tests.cpu.reference import forward
from tests.cpu.test_logits import SAME, distance, farthest, fp32, logits_of
from tests.cpu.test_products import k_quantised
from tests.models import tiny
from tests.parity.driver import Driver, Row, limits, paths_of_a_tree
from tests.parity.test_torch_logits import EXPERTS, FURTHER, GEMMAS, ONLY, own, windowed

LATER = ("seed_oss", "olmo3", "exaone4", "glm4_moe_lite", "minimax_m2", "ministral3")
LATER += (*tiny.CONVOLUTIONS, "granitemoehybrid", "gemma4_text", "hunyuan_v1_dense")
CASES = [
    *(("qwen2_moe", name, changes) for name, changes in EXPERTS.items()),
    *(("qwen2_moe", name, changes) for name, changes in {
        "a wide shared expert": {"shared_expert_intermediate_size": 80},
        "no biases": {"qkv_bias": False},
    }.items()),
    *(("qwen3_moe", name, changes) for name, changes in EXPERTS.items()),
    *(
        (family, name, changes)
        for family in (
            *("mixtral", "glm4_moe", "gpt_oss", "smollm3", "granite", "olmo2"),
            *("deepseek_v2", "deepseek_v3", *tiny.DELTAS, *LATER),
        )
        for name, changes in FURTHER[family].items()
    ),
    *(
        (family, name, changes)
        for family in ("gemma2", "gemma3_text")
        for name, changes in (GEMMAS | ONLY[family]).items()
    ),
]  # fmt: skip
WIDE_LATENT = {"q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
_EVEN = {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 64}
IN_FILES = {
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    **dict.fromkeys(tiny.DELTAS, _EVEN),
    "qwen3_5_text": {"linear_value_head_dim": 16},
    **dict.fromkeys(tiny.DEEPSEEKS, WIDE_LATENT),
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 16},
}
"""What quantised files need: rows of 32, and of SmolLM3 and Gemma what llama.cpp knows."""
FAMILIES = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"),
    *("smollm3", "granite", "olmo2", "deepseek_v3", "deepseek_v2"),
    *("gemma2", "gemma3_text", *tiny.DELTAS, *LATER),
)
FEW = (*tiny.DELTAS, "glm4_moe_lite", "gemma4_text")
"""Where a rounding that tips goes on from layer to layer."""
IN_GGUF = [family for family in FAMILIES if family not in ("exaone4", "ministral3")]


WINDOWS = [(family, n) for family in ("mistral", "qwen2", "qwen3") for n in (1, 16, 100)]


@pytest.mark.parametrize(("family", "window"), WINDOWS)
def test_contexts_longer_than_the_window(executor, checkpoint, random, family, window):
    source = checkpoint(family, None, **windowed(family, window))
    tokens = random.integers(0, tiny.VOCAB, 180)
    logits = logits_of(executor(source, 2), tokens, (178, 1, 1))
    assert np.abs(logits - fp32(source, tokens)).max() < 1e-4


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("threads", [1, 3])
def test_long_texts(executor, checkpoint, random, family, threads):
    """32,768 numbers of keys (csrc/attention.inl, kTogether) are 816 positions of 40 numbers each;
    of a single token behind many positions all threads share each head (csrc/attend.cpp).
    """
    source = checkpoint(family, None, max_position_embeddings=1024)
    tokens = random.integers(0, tiny.VOCAB, 840)
    made = executor(source, threads, max_nodes=1024, context=1024, pages=80)
    logits = logits_of(made, tokens, (838, 1, 1))
    assert farthest(logits, source, tokens) < 1e-4


@pytest.mark.parametrize(
    ("family", "name", "changes"), some_of(own(CASES), lambda cell: values(cell[:2]))
)
def test_logits_are_those_of_transformers(executor, checkpoint, random, family, name, changes):
    source = checkpoint(family, None, **changes)
    tokens = random.integers(0, tiny.VOCAB, 120)
    logits = logits_of(executor(source, 2), tokens)
    assert logits.std() > 0.3
    assert farthest(logits, source, tokens) < 1e-4


KINDS = "Q8_0", "Q4_1", "F16"
OWN = "deepseek_v3", "qwen2_moe", "gpt_oss", "qwen3_next", "lfm2", "gemma4_text"
"""Families whose products are not those of the others: a latent, experts, states, embeddings by
layer."""


@pytest.mark.parametrize(("family", "page_size"), thinned(every(FAMILIES, [1, 16]), values))
def test_every_node_of_a_tree_is_a_token_of_its_path(
    executor, checkpoint, random, family, page_size
):
    changes = {"sliding_window": 5} if family in ("gpt_oss", "mixtral") else {}
    source = checkpoint(family, None, **changes)
    made = executor(source, 2, page_size=page_size, pages=400)
    for text, logits in paths_of_a_tree(made, random):
        assert np.array_equal(logits, logits_of(executor(source), text)[40:])


@pytest.mark.parametrize(
    ("family", "kind"), rarely(every(OWN, KINDS), covering(every(IN_GGUF, KINDS), values), None)
)
def test_files_of_few_bits_are_the_references(executor, checkpoint, random, family, kind):
    """What a GGUF file's own numbers come to, routers in float32. A rounding that tips stays in a
    state or chooses another expert: of these there are fewer tokens.
    """
    source = checkpoint(family, kind, **IN_FILES.get(family, {}))
    tokens = random.integers(0, tiny.VOCAB, 20 if family in FEW else 60)
    logits = logits_of(executor(source, 2), tokens)
    assert distance(logits, forward(source, tokens)) < SAME


def test_experts_in_k_quants(executor, random, tmp_path):
    """As files of today have them: experts in Q4_K and Q6_K, in blocks of 256; in the second layer
    the gates in Q6_K, too, which read what was gathered.
    """
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    hf = tiny.model("qwen3_moe", **wide)
    stored = {}
    for layer in range(2):
        gate = ("Q4_K", "Q6_K")[layer]
        for part, kind in (("gate", gate), ("up", "Q4_K"), ("down", "Q6_K")):
            raw = k_quantised(random, kind, 6 * 256, 256).reshape(6, 256, -1)
            name = f"model.layers.{layer}.mlp.experts.{part}_proj.weight"
            stored[name] = raw, GGMLQuantizationType[kind]
    source = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", "Q8_0", stored=stored))
    tokens = random.integers(0, tiny.VOCAB, 60)
    made = executor(source, 2)
    assert "Q4_K, Q6_K, Q8_0 as in the file" in made.describe()["dtype"]
    logits = logits_of(made, tokens)
    assert distance(logits, forward(source, tokens)) < SAME
    assert np.array_equal(logits, logits_of(executor(source, kernels="portable"), tokens))


def test_mxfp4_keeps_its_numbers(executor, random, tmp_path):
    """gpt-oss as its files are: experts in MXFP4, any bytes, scales that 16 bits hold."""
    hf = tiny.model("gpt_oss", max_position_embeddings=512)
    stored, kind = {}, GGMLQuantizationType["MXFP4"]
    for layer in range(2):
        for part, (rows, columns) in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
            raw = random.integers(0, 256, (5, rows, columns // 32, 17), dtype=np.uint8)
            raw[..., 0] = random.integers(120, 124, raw.shape[:3])  # Weights of trained sizes.
            name = f"model.layers.{layer}.mlp.experts.{part}_proj.weight"
            stored[name] = raw.reshape(5, rows, -1), kind
    source = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", "Q8_0", stored=stored))
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    packed = source.packed(name)
    assert packed.kind == "MXFP4"
    made = executor(source, 2)
    assert "weights MXFP4, Q8_0 as in the file" in made.describe()["dtype"]
    tokens = random.integers(0, tiny.VOCAB, 60)
    logits = logits_of(made, tokens)
    assert distance(logits, forward(source, tokens)) < SAME
    assert np.array_equal(logits, logits_of(executor(source, kernels="portable"), tokens))


def test_mxfp4_scales_out_of_range_are_named():
    rows = np.zeros((2, 34), np.uint8)
    rows[:, ::17] = 127
    check_fp4(rows, "here")
    for outside in (103, 144):
        rows[1, 17] = outside
        with pytest.raises(ModelError, match=r"here: a scale of MXFP4"):
            check_fp4(rows, "here")
    rows[1, 17] = 143
    check_fp4(rows, "here")


@pytest.mark.parametrize(
    ("family", "kind"),
    thinned(every([*IN_GGUF, "qwen2", "qwen3"], ["Q4_1", "Q8_0", "BF16", "F16", None]), values),
)
def test_every_instruction_set_gives_the_same_bits(executor, checkpoint, random, family, kind):
    source = checkpoint(family, kind, **IN_FILES.get(family, {}))
    tokens = random.integers(0, tiny.VOCAB, 70)
    plain = logits_of(executor(source, kernels="portable"), tokens)
    for name in native.KERNELS:
        if native.kernels(name):
            logits = logits_of(executor(source, 2, kernels=name), tokens)
            assert np.array_equal(plain, logits), name


@pytest.mark.parametrize("name", list(filter(native.kernels, native.KERNELS)))
def test_gelu_by_erf_is_within_a_millionth_of_itself(name):
    """In float32, also where it vanishes: against float64, until the normal distribution's tail is
    below 1e-36. What is not finite stays so.
    """
    sizes = np.concatenate([np.linspace(0, 12.5, 40_001), np.geomspace(1e-30, 1e30, 4_001)])
    gate = np.concatenate([sizes, -sizes[sizes < 12.5], [1.0]]).astype(np.float32)
    up = np.resize(np.array([1, -3, 0.5], np.float32), len(gate))
    actual = gated(name, gate, up)
    exact = gate.astype(np.float64)
    exact = exact * 0.5 * np.vectorize(math.erfc)(-exact / math.sqrt(2)) * up
    assert np.all(np.abs(actual - exact) <= 1e-6 * np.abs(exact) + 1e-36)
    assert np.array_equal(actual, gated("portable", gate, up))
    beyond = np.array([np.nan, np.inf, -np.inf, 1, 2, 3, -40, -1e30, np.nan], np.float32)
    seen = np.isfinite(gated(name, beyond, np.ones(9, np.float32)))
    assert seen.tolist() == [False] * 3 + [True] * 5 + [False]


def test_gelu_by_erf_in_eight_bits_is_the_references(executor, checkpoint, random):
    """No file says so: Gemma's of few bits with the other GELU in it."""
    source = copy(checkpoint("gemma3_text", "Q8_0", **IN_FILES["gemma3_text"]))
    arch = source.architecture
    specs = tuple(replace(spec, activation="gelu") for spec in arch.layer_specs)
    source.architecture = replace(arch, layer_specs=specs)
    tokens = random.integers(0, tiny.VOCAB, 60)
    logits = logits_of(executor(source, 2), tokens)
    assert distance(logits, forward(source, tokens)) < SAME
    source.architecture = arch
    assert distance(logits, forward(source, tokens)) > SAME, "the two differ"


def exactly(which, gate, up):
    """Gate `which` of csrc/kernels.h in float64."""
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    if which == 0:
        return gate / (1 + np.exp(-gate)) * up
    if which == 1:
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return gate / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize("name", list(filter(native.kernels, native.KERNELS)))
@pytest.mark.parametrize("which", [0, 1, 2])
def test_gates_are_what_they_are_called(name, which):
    """Both sides of every limit, and a number of numbers that fills no vector."""
    gate, up = np.meshgrid(np.linspace(-12, 12, 67), np.linspace(-9, 9, 41))
    gate, up = gate.ravel().astype(np.float32), up.ravel().astype(np.float32)
    assert len(gate) % 8 == 3
    actual, exact = gated(name, gate, up, which), exactly(which, gate, up)
    assert np.all(np.abs(actual - exact) <= 1e-5 * np.abs(exact) + 1e-6)


def gated(name, gate, up, which=3):
    out = np.empty_like(gate)
    arrays = (gate.ctypes.data, up.ctypes.data, len(gate), out.ctypes.data)
    assert native.load().forerun_gate(name.encode(), which, *arrays) == 0
    return out


ROUTERS = [
    Router(),
    Router(normalised=True),
    Router("sigmoid", normalised=True, scale=2.5, correction=True, groups=4, topk_group=2),
]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("shared", [0, 40])
def test_any_company_leaves_a_row_its_bits(random, router, shared):
    """Quantised on the way: 16 experts, some with one row and some with many."""
    arch = SHAPES["tiny"]
    (spec,) = set(arch.layer_specs)
    experts = Experts(16, 3, 48, router, shared, shared_gate=bool(shared))
    arch = replace(arch, layer_specs=(spec, replace(spec, feed_forward=experts)))
    source = RandomCheckpoint(arch)
    made = [
        CpuExecutor(source, limits(arch.vocab, max_nodes=200), threads, dtype="q8_0")
        for threads in (1, 3)
    ]
    tokens = random.integers(0, arch.vocab, 150)
    whole = logits_of(made[0], tokens)
    with Driver(made[1]) as driver:
        driver.open(0, tokens)
        for known in (1, 2, 5, 60, 82):
            start = driver.sequences[0].kv_len
            rows = driver.step([Row(0, known=known)]).every().numpy()
            assert np.array_equal(rows, whole[start : start + known])
    for each in made:
        each.shutdown()


@pytest.mark.parametrize("left", [0, 3])
def test_experts_of_several_formats(executor, random, left):
    """Some of a layer's experts are quantised and the others, left out of that, are floats: each
    reads its own kind of numbers, whichever is the first.
    """
    arch = SHAPES["tiny"]
    (spec,) = set(arch.layer_specs)
    experts = Experts(8, 2, 32, Router(normalised=True))
    source = Uneven(replace(arch, layer_specs=(replace(spec, feed_forward=experts),)), left)
    tokens = random.integers(0, arch.vocab, 40)
    logits = logits_of(executor(source, 2), tokens)
    assert distance(logits, forward(source, tokens)) < SAME


class Uneven(RandomCheckpoint):
    """One expert is of the one kind, all others of the other: the first is quantised."""

    def __init__(self, arch, left):
        super().__init__(arch)
        self.left = left

    def packed(self, name):
        if ".experts." not in name or (f".experts.{self.left}." in name) != (self.left > 0):
            return None
        matrix = np.ascontiguousarray(self.tensor(name))
        return Packed("F32", matrix.view(np.uint8), matrix.shape[1])


def test_a_router_that_is_not_finite_is_reported(executor, checkpoint):
    """A row without a choice is a row of NaN, and nothing is read out of bounds."""
    arch = SHAPES["tiny"]
    (spec,) = set(arch.layer_specs)
    experts = Experts(8, 2, 32, ROUTERS[2])
    source = Broken(replace(arch, layer_specs=(replace(spec, feed_forward=experts),)))
    logits = logits_of(executor(source), np.arange(20))
    assert np.isnan(logits).all()


class Broken(RandomCheckpoint):
    def tensor(self, name):
        weight = super().tensor(name)
        return weight * np.nan if name.endswith("mlp.gate.weight") else weight


def test_only_visited_experts_are_read(checkpoint, random):
    """Experts that no node visits may hold anything."""
    arch = SHAPES["tiny"]
    (spec,) = set(arch.layer_specs)
    experts = Experts(8, 2, 32, Router(normalised=True))
    arch = replace(arch, layer_specs=(replace(spec, feed_forward=experts),))
    tokens = random.integers(0, arch.vocab, 12)
    source = Chosen(arch)
    made = CpuExecutor(source, limits(arch.vocab), 1)
    logits = logits_of(made, tokens)
    made.shutdown()
    assert np.isfinite(logits).all()


class Chosen(RandomCheckpoint):
    """Experts 0 and 5 are always chosen; the others are not numbers."""

    def tensor(self, name):
        weight = super().tensor(name).copy()
        if name.endswith("embed_tokens.weight"):
            weight[:, 0] = 5.0
        if name.endswith("mlp.gate.weight"):
            weight[:] = 0.0
            weight[[0, 5], 0] = 9.0
        if ".experts." in name and not any(f".experts.{kept}." in name for kept in (0, 5)):
            weight[:] = np.nan
        return weight
