import ctypes
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.build import with_torch
from forerun.build.memory import Needs, human, needs_of, plan_memory
from forerun.build.shapes import RandomCheckpoint
from forerun.build.target import open_target
from forerun.errors import ConfigError, MemoryPlanError
from forerun.executors import cpu
from forerun.networks.arch import Architecture, plain_layers
from forerun.networks.config_json import architecture_from
from forerun.networks.layer_spec import AttentionSpec, Experts, Latent, Router
from forerun.networks.rope import Rope
from forerun.options.config import EngineConfig
from tests.models import tiny
from tests.parity.driver import limits

SMALL = Needs(context=2048, vocab=1000, weights=10**8, per_token=20_000, per_node=10_000)


def test_default_is_enough_for_a_full_context_and_for_all_sequences():
    plan = plan_memory(EngineConfig(), SMALL, 10**10)
    assert plan.limits.context == 2048
    assert plan.limits.pages * plan.limits.page_size == 64 * 256
    assert plan.cache == 64 * 256 * 20_000


def test_a_tight_machine_shortens_the_context():
    needs = Needs(context=131072, vocab=1000, weights=10**8, per_token=20_000, per_node=0)
    plan = plan_memory(EngineConfig(), needs, 10**9)
    assert 20_000 <= plan.limits.context * 1.0 <= 25_000
    assert plan.limits.context == plan.limits.pages * plan.limits.page_size


def test_where_every_layer_has_a_window_tokens_cost_nothing():
    """But their windows do: what these leave over is not what the context depends on."""
    sizes = {"per_token": 64, "windowed": 64, "window": 1025}
    needs = Needs(context=131072, vocab=300, weights=1000, per_node=10, **sizes)
    for available in range(800_000, 806_000, 50):
        plan = plan_memory(EngineConfig(), needs, available)
        assert plan.limits.context == 131072 and plan.limits.windows_fit([131072] * 4)
        assert plan.weights + plan.cache + plan.scratch <= 0.6 * available


def test_what_does_not_fit_is_refused_with_the_parts():
    with pytest.raises(MemoryPlanError, match=r"weights 100\.0 MB .* Lower kv-tokens"):
        plan_memory(EngineConfig(), SMALL, 10**8)
    with pytest.raises(MemoryPlanError, match=r"1,000,000 tokens 20\.0 GB"):
        plan_memory(EngineConfig(kv_tokens=10**6), SMALL, 10**9)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_kernels_keep_no_draft_tokens_state(tmp_path, family):
    """On a CPU each draft token has its own; on CUDA each sequence has one while it advances."""
    arch = architecture_from(tiny.config(family).to_dict(), tmp_path)
    config = EngineConfig(executor="torch", device="cpu", dtype="float32", max_sequences=7)
    here, there = (
        with_torch.ENTRY.needs(replace(config, device=device), arch, RandomCheckpoint(arch))
        for device in ("cpu", "cuda")
    )
    state = 12 * arch.recurrent.state_numbers
    assert here.per_scored - there.per_scored == state
    assert there.fixed - here.fixed == 7 * state + 8 * 8 * arch.vocab
    assert there.captured and not here.captured


def test_captured_rounds_have_memory_of_their_own():
    """Of as many nodes as a step may choose tokens for; what is left for the cache is less."""
    needs = replace(SMALL, per_scored=4_000)
    eager, captured = (
        plan_memory(EngineConfig(), replace(needs, captured=captured), 10**9, fill=True)
        for captured in (False, True)
    )
    assert eager.graphs == 0 and captured.graphs == 512 * (10_000 + 4_000)
    assert captured.describe()["graphs"] == captured.graphs
    assert 0 <= eager.cache - captured.cache - captured.graphs < 16 * 20_000
    with pytest.raises(MemoryPlanError, match=r"scratch 14\.3 MB"):
        plan_memory(EngineConfig(), replace(needs, captured=True), 10**8)


def test_contradictions_are_configuration_errors():
    with pytest.raises(ConfigError, match="made for 2048"):
        plan_memory(EngineConfig(context=4096), SMALL, 10**10)
    with pytest.raises(ConfigError, match="too small for one sequence"):
        plan_memory(EngineConfig(context=1000, kv_tokens=500), SMALL, 10**10)


def test_a_device_of_its_own_is_filled():
    plan = plan_memory(EngineConfig(), SMALL, 10**10, fill=True)
    assert plan.limits.pages * plan.limits.page_size > 200_000
    assert sum(plan.describe().values()) == pytest.approx(0.88 * 10**10, rel=1e-3)
    half = plan_memory(EngineConfig(mem_fraction_static=0.5), SMALL, 10**10, fill=True)
    assert sum(half.describe().values()) == pytest.approx(0.5 * 10**10, rel=1e-3)


@given(
    available=st.integers(0, 10**11),
    page_size=st.integers(1, 256),
    kv_tokens=st.none() | st.integers(16, 10**6),
    context=st.integers(64, 10**6),
    fill=st.booleans(),
)
def test_a_plan_never_exceeds_its_share(available, page_size, kv_tokens, context, fill):
    config = EngineConfig(page_size=page_size, kv_tokens=kv_tokens)
    needs = Needs(context, 1000, 10**8, 20_000, 1000)
    try:
        plan = plan_memory(config, needs, available, fill=fill)
    except MemoryPlanError:
        return
    pages = plan.limits.pages * page_size
    assert 0 < plan.limits.context <= pages
    assert pages >= (kv_tokens or 0)
    # Rounding up to whole pages may take at most one page more than the share.
    page_bytes = page_size * needs.per_token
    assert (
        plan.weights + plan.cache + plan.scratch <= available * (0.88 if fill else 0.6) + page_bytes
    )


def test_bytes_for_people():
    assert [human(0), human(999), human(98_362_432), human(25 * 10**9)] == [
        "0 B",
        "999 B",
        "98.4 MB",
        "25.0 GB",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_keeps_a_tied_head_twice_where_it_packs(tmp_path, dtype):
    hf = tiny.model("llama", tie_word_embeddings=True)
    path = tiny.write_gguf(hf, tmp_path / "tied.gguf", "F32")
    target = open_target(EngineConfig(model=str(path), executor="torch", dtype=dtype))
    target.close()
    once = sum(weight.numel() for weight in hf.parameters())
    head = hf.lm_head.weight.numel()
    expected = (once + head) * 4 if dtype == "float32" else once * 2
    assert target.memory.weights == expected


EXPERT = Experts(64, 6, 192, Router("sigmoid", normalised=True), shared=192)


@pytest.mark.parametrize("experts", [EXPERT, replace(EXPERT, top_k=2, shared=0)])
def test_scratch_counts_the_rows_of_a_nodes_experts(experts):
    """What csrc/experts.cpp reserves of a node: its row once for each expert that it visits, as
    floats, gate and up of each, and what comes of each, with the shared one's.
    """
    hidden = 512
    (plain,) = plain_layers(1, 64, 192, Rope(1e4))
    arch = Architecture(
        "glm4_moe",
        *(hidden, 8, 2, 64, 1000, 2048, 1e-5),
        (plain, replace(plain, feed_forward=experts)),
    )
    visited, shared = experts.top_k, bool(experts.shared)
    gathered, out = visited * hidden, (visited + shared) * hidden
    between = 2 * (visited * experts.width + experts.shared)
    dense = replace(arch, layer_specs=(plain,))
    assert needs_of(arch, 1, 1).per_node >= 4 * (4 * hidden + gathered + between + out)
    assert needs_of(dense, 1, 1).per_node == 4 * (4 * hidden + 3 * 192)


LATENT = Latent(512, 128, 64, 128, query_rank=1536)


@pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
@pytest.mark.parametrize("latent", [LATENT, replace(LATENT, query_rank=None)])
def test_scratch_counts_the_heads_of_latent_attention(latent):
    """What the compiled core really takes of memory for a node more: nearly all of it is that of 32
    heads here, and the plan has no less.
    """
    (plain,) = plain_layers(1, 64, 128, Rope(1e4))
    attention = AttentionSpec(0.1, latent=latent)
    sizes = (256, 32, 1, latent.rank + latent.rope, 320, 2048, 1e-5)
    arch = Architecture("deepseek_v3", *sizes, (replace(plain, attention=attention),))
    source, taken = RandomCheckpoint(arch), []
    for nodes in (64, 576):
        before = allocated()
        made = cpu.CpuExecutor(source, limits(arch.vocab, max_nodes=nodes), 1, dtype="q8_0")
        taken.append(allocated() - before)
        made.shutdown()
    planned = needs_of(arch, 1, 1).per_node
    assert 0.6 * planned < (taken[1] - taken[0]) / 512 < planned


class Allocated(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated():
    """Bytes that this process has allocated, wherever they come from: pages that are in memory say
    less, where a process has freed some before.
    """
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Allocated
    result = ask()
    return result.uordblks + result.hblkhd
