"""Our kernels on the device against plain torch there; captured rounds against eager steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.executors.torch import TorchExecutor, torch_executor
from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.attention.geometry import Geometry
from forerun.executors.torch.attention.kv import Narrow, enter
from forerun.executors.torch.attention.prompt_attention import PackedPrompts, row_by_row
from forerun.executors.torch.decoder.elementwise import PLAIN, Heads
from forerun.executors.torch.decoder.few_bits import FEW, few_bits_product, loaded
from forerun.executors.torch.decoder.float8 import FLOAT8
from forerun.executors.torch.sizes import tiles_of
from forerun.executors.torch.triton.kernels import kernels_for
from forerun.executors.torch.triton.round_types import Levels, RoundShape
from forerun.networks.layer_spec import AttentionSpec
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import full_size
from forerun.speculative.verify import intervals
from tests.models import tiny
from tests.parity.cuts import lost, mixed, shaping_of
from tests.parity.driver import Driver, Row, as_draft, limits
from tests.parity.grouped import grouped
from tests.references.kernels import REFERENCE_KERNELS, attend_dense
from tests.references.rounds import accept, descend, grow, prepare

ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Norm of the difference over the norm of the result."""


@pytest.fixture
def kernels(device):
    """In a rehearsal plain torch against itself: what kernels compute is tested, interpreted, by
    tests/parity/test_triton_*.py.
    """
    return kernels_for(torch.device(device)) or REFERENCE_KERNELS


def step(kv_len, nodes, groups, size, device, dtype, seed=0):
    """Random keys, values and queries of rows with random trees of `nodes` nodes."""
    random = np.random.default_rng(seed)
    page, width = 16, max(kv_len) // 16 + 1
    pages = random.permutation(len(kv_len) * width).reshape(len(kv_len), width)
    parents = [
        np.array([-1, *(random.integers(0, i) for i in range(1, nodes))], np.int32) for _ in kv_len
    ]
    spans = [intervals(row) for row in parents]
    start = np.arange(len(kv_len) + 1, dtype=np.int32) * nodes
    scratch = len(kv_len) * width * page

    def there(array):
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)

    geometry = Geometry(
        start=there(start),
        slots=there(scratch + np.arange(len(kv_len) * nodes)),
        kv_len=there(np.array(kv_len)),
        table=there(pages),
        tree_intervals=there(np.concatenate(spans, axis=1)),
        tiles=there(tiles_of(start, 4)),
        tile=4,
        page_size=page,
        position=there(
            np.concatenate([n + depths(row) for n, row in zip(kv_len, parents, strict=True)])
        ),
    )
    total = scratch + len(kv_len) * nodes + 1
    draw = torch.Generator(device).manual_seed(seed)
    keys, values = (
        torch.randn(groups[1], total, size, device=device, dtype=dtype, generator=draw)
        for _ in "kv"
    )
    shape = len(kv_len) * nodes, groups[0], size
    queries = torch.randn(shape, device=device, dtype=dtype, generator=draw)
    return queries, keys, values, geometry


def cases(device):
    """Cached tokens of rows, and nodes of each; a rehearsal has the first."""
    result = [([0, 5, 64, 700], 8), ([3000], 1), ([130] * 5, 33)]
    return result if device != "cpu" else result[:1]


def depths(parents):
    """int32[N]: steps below the first node."""
    depth = np.zeros_like(parents)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    return depth


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prompts_of_any_lengths_by_flash_attention(kernels, device, dtype, window):
    """One call for whole prompts and chunks behind a prefix, with and without a window."""
    queries, keys = np.array([7, 300, 64, 1], np.int32), np.array([7, 300, 500, 90], np.int32)

    def sums(lengths):
        return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)

    packed = PackedPrompts(slice(0, 372), torch.empty(0), queries, keys, sums(queries), sums(keys))
    torch.manual_seed(3)
    query = torch.randn(372, 8, 64, dtype=dtype, device=device)
    key, value = (torch.randn(2, 897, 64, dtype=dtype, device=device).transpose(0, 1) for _ in "kv")
    spec = AttentionSpec(scale=0.125, window=window)
    actual = kernels.varlen(query, key, value, packed, spec).float()
    exact = row_by_row(query.float(), key.float(), value.float(), packed, spec)
    assert (actual - exact).norm() < ERROR[dtype] * exact.norm()


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("spec", [(0.1, 1), (0.1, 100), (0.1, 512, 20.0), (0.1, None, 5.0)])
@pytest.mark.parametrize("size", [128, 256])
def test_windows_and_caps(kernels, device, dtype, spec, size):
    for kv_len, nodes in cases(device):
        inputs = *step(kv_len, nodes, (8, 4), size, device, dtype), AttentionSpec(*spec)
        expected, actual = attend_dense(*inputs).double(), kernels.attend(*inputs).double()
        assert torch.isfinite(actual).all()
        assert (actual - expected).norm() / expected.norm() < ERROR[dtype]


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("groups", [(32, 8), (9, 3), (16, 2)])
@pytest.mark.parametrize("size", [64, 128])
def test_attention(kernels, device, dtype, groups, size):
    for kv_len, nodes in cases(device):
        inputs = step(kv_len, nodes, groups, size, device, dtype)
        expected = attend_dense(*inputs).double()
        actual = kernels.attend(*inputs).double()
        assert torch.isfinite(actual).all()
        assert (actual - expected).norm() / expected.norm() < ERROR[dtype]


@pytest.mark.parametrize("groups", [(32, 8), (9, 3)])
def test_float8_pages(kernels, device, groups):
    """Written and read: the kernels against plain torch, number for number and nearly."""
    queries, _, _, geometry = step([5, 64, 700], 8, groups, 128, device, torch.bfloat16)
    draw = torch.Generator(device).manual_seed(3)
    total = int(geometry.slots[-1]) + 2
    shape = total, groups[0] + 2 * groups[1], 128
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=draw)
    qkv[3, groups[0], 7] = torch.nan
    turned = torch.rand(2, total, 64, device=device, generator=draw)
    heads = Heads(qkv, groups[1], None, None, 1e-5, (turned[0], turned[1]), PLAIN)
    staging = []
    for work in (kernels.enter, enter):
        staging.append(tuple(
            Narrow(
                torch.zeros(groups[1], total, 128, device=device, dtype=FLOAT8),
                torch.zeros(groups[1], total, device=device),
            )
            for _ in "kv"
        ))  # fmt: skip
        work(heads, staging[-1], torch.arange(total, device=device, dtype=torch.int32))
    for one, other in zip(*staging, strict=True):
        torch.testing.assert_close(one.scale, other.scale, rtol=1e-6, atol=0, equal_nan=True)
        whole = one.scale.isfinite()
        same = one.numbers.float()[whole] == other.numbers.float()[whole]
        assert same.float().mean() > 0.999  # A division may round to the other neighbour.
    actual = kernels.attend(queries, *staging[1], geometry).double()
    expected = attend_dense(queries, *staging[1], geometry).double()
    assert (actual - expected).nan_to_num().norm() / expected.nan_to_num().norm() < 1e-2


@pytest.mark.parametrize("dtype", list(ERROR))
def test_parts_between_the_products(kernels, device, dtype):
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device=device, generator=draw)

    weight, both = normal(4096), normal(3, 2 * 14336).to(dtype).chunk(2, -1)
    x, heads = normal(5, 4096).to(dtype), normal(5, 48, 128).to(dtype)[:, 3:35]
    cos, sin = normal(5, 64), normal(5, 64)
    for actual, expected in zip(
        *(parts.add_norm(x, x.flip(0), weight, 1e-5) for parts in (kernels.parts, PLAIN)),
        strict=True,
    ):
        assert (actual - expected).double().norm() / expected.double().norm() < ERROR[dtype]
    for part, inputs in (
        ("norm", (x, weight, 1e-5)),
        ("norm", (heads, weight[:128], 1e-5)),
        ("gate", both),
        ("gelu_gate", both),
        ("rotate", (heads, cos, sin)),
        ("draft_inputs", (torch.arange(5, device=device).int(), x.flip(1), x, (weight,) * 2, 1e-5)),
    ):
        actual = getattr(kernels.parts, part)(*inputs).double()
        expected = getattr(PLAIN, part)(*inputs).double()
        assert (actual - expected).norm() / expected.norm() < ERROR[dtype]


@pytest.mark.parametrize("width", [2, 4, 16])
def test_frontiers_are_the_plain_ones(kernels, device, width):
    draw = torch.Generator(device).manual_seed(4)
    size, rows = Levels(4, width), 33
    grown = torch.randint(
        0, 9000, (3, rows, full_size(width, 4)), device=device, generator=draw, dtype=torch.int32
    )
    values = -torch.rand(grown[2].shape, device=device, generator=draw).mul(50).round()
    grown[2] = values.view(torch.int32)
    actual, expected = None, None
    for level in (1, 2, 3):
        count = rows * (width if level > 1 else 1)
        hidden = torch.randn(count, 4096, device=device, generator=draw).bfloat16()
        actual, expected = (
            work(grown, size, level, hidden, None if before is None else before.above, True)
            for work, before in ((kernels.descend, actual), (descend, expected))
        )
        for name in ("chosen", "tokens", "hidden", "above", "tree_intervals"):
            assert torch.equal(getattr(actual, name), getattr(expected, name)), name


@pytest.mark.parametrize("width", [1, 4, 16])
def test_children_are_the_plain_ones(kernels, device, width):
    draw = torch.Generator(device).manual_seed(2)
    logits = torch.randn(48, 32000, device=device, generator=draw) * 4
    ids = torch.randperm(128256, device=device, generator=draw)[:32000].int()
    noise = NodeNoise(
        seeds=torch.randint(-(1 << 62), 1 << 62, (48,), device=device, generator=draw),
        positions=torch.arange(48, device=device, dtype=torch.int32) * 999,
        temperatures=(torch.arange(48, device=device) % 3 * 0.5).float(),
    )
    actual, expected = torch.zeros(2, 3, 48, width, device=device, dtype=torch.int32)
    for work, out in ((kernels.grow, actual), (grow, expected)):
        work(logits, ids, noise, Levels(1, width), 0, out, None)
    assert (actual[0] == expected[0]).float().mean() > 0.99  # But for near-ties.
    values = (each[2].view(torch.float32) for each in (actual, expected))
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab", [320, 49152, 151936])
def test_choices_are_the_plain_ones(kernels, device, vocab):
    draw = torch.Generator(device).manual_seed(1)
    logits = torch.randn(64, vocab, device=device, generator=draw) * 4
    logits[5, 77], logits[6, 78], logits[7] = torch.nan, torch.inf, -torch.inf
    logits[8, [3, 7]] = 90.0
    rows = torch.ones(64, device=device, dtype=torch.int32)
    facts = dict.fromkeys(("kv_len", "low", "high", "tokens", "depth", "table"), rows * 0)
    facts["table"], facts["parents"] = facts["table"][:, None], rows * -1
    facts["count"] = facts["decided"] = rows
    facts["position"] = torch.arange(64, device=device, dtype=torch.int32) * 999
    facts["low"] = torch.randint(-(1 << 31), 1 << 31, (64,), device=device, generator=draw).int()
    facts["temperature"] = (torch.arange(64, device=device) % 3 * 0.5).float().view(torch.int32)
    facts["tree_intervals"] = torch.stack([rows * 0, rows])
    shape = RoundShape(16, 100, torch.rand(1, 64, device=device), torch.ones(1, device=device))
    actual = []
    for first, last in ((kernels.prepare, kernels.accept), (prepare, accept)):
        made, record = first(facts, shape), rows * -9
        actual.append((made, last(logits, made.noise, facts, record), record))
    (mine, chosen, record), (theirs, expected, plain) = actual
    assert torch.equal(record, plain) and torch.equal(chosen.on_path, expected.on_path)
    assert torch.equal(mine.slots, theirs.slots) and torch.equal(
        mine.noise.seeds, theirs.noise.seeds
    )
    torch.testing.assert_close(mine.rotary, theirs.rotary, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_cuts_are_the_references(kernels, device, scale):
    """Of 64 rows of a vocabulary of 128k, and of some with two nodes, ties and excluded tokens."""
    vocab = 128256 if device != "cpu" else 9001
    draw = torch.Generator(device).manual_seed(5)
    for rows, nodes, coarse in ((64, 1, False), (42, 2, True)):
        logits = torch.randn(rows, nodes, vocab, device=device, generator=draw) * scale
        if coarse:
            logits = logits.mul(64).round().div(64)
            logits[::2, 1, vocab // 3 :] = -torch.inf
        settings = (mixed(vocab) * 4)[:rows]
        shaping = shaping_of(settings, nodes, vocab, device)
        apart = lost(logits, settings, shaping, kernels.shape(logits, shaping, None))
        assert (apart < 1e-4).all(), apart.max()


@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
@pytest.mark.parametrize(("shape", "group"), [((1536, 4096), 128), ((320, 1000), 1000)])
def test_products_of_few_bits_are_the_references(kernels, device, kind, shape, group):
    """In any number of rows, a row with the same bits alone and in company; the gate, too."""
    made, _ = grouped(kind, shape, group, kind == "int4")
    weight, by = loaded([made], torch.device(device)), kernels.parts.few_bits
    x = torch.randn(300, shape[1], device=device).bfloat16()
    few = by.product(x[:FEW], weight, None)
    for rows in (slice(0, 1), slice(3, 19), slice(16, 17), slice(90, 130), slice(7, FEW)):
        assert torch.equal(by.product(x[rows].clone(), weight, None), few[rows]), rows
    for rows in (1, 16, 33, 300):
        actual, expected = (
            product(x[:rows], weight, None) for product in (by.product, few_bits_product)
        )
        assert (actual - expected).norm() / expected.norm() < ERROR[torch.bfloat16]
        if by.gated is not None:
            apart = kernels.parts.gate(*actual.chunk(2, -1))
            assert torch.equal(by.gated(x[:rows], weight, None, "silu"), apart)
    assert not weight.through.any()


def test_rounds_in_float8(checkpoint, device):
    """Every product of every layer: captured, and the same text again."""
    made = TorchExecutor(checkpoint(), limits(tiny.VOCAB), device, "float8").capture()
    runs = []
    for _ in range(2):
        with Driver(made) as driver:
            driver.open(0, np.arange(20, 60), Sampling(temperature=0.0))
            for _ in range(30):
                driver.step([Row(0)])
            runs.append(driver.sequences[0].tokens)
    assert runs[0] == runs[1] and len(runs[0]) >= 70
    assert bool(made.describe().get("captured")) == (device == "cuda")


@pytest.mark.parametrize(
    ("family", "windows"),
    [("gemma3_text", 0), ("gemma3_text", 48), ("qwen2_moe", 0), ("qwen3_5_text", 0), ("lfm2", 0)],
)
def test_other_families_write_the_text_of_the_cpu(checkpoint, device, family, windows):
    """Windows, caps, sandwich norms and recurrent states in rounds; experts eagerly. In float32.
    windows: so many window pages on the device.
    """
    texts, kept = [], limits(tiny.VOCAB)
    near = replace(kept, window=25 * bool(windows), window_pages=windows)
    for where, room in ((device, near), ("cpu", kept)):
        made = torch_executor(room)(checkpoint(family), room, where, "float32").capture()
        with Driver(made) as driver:
            for slot in range(3):
                driver.open(slot, np.arange(20, 60 + slot), Sampling(temperature=0.0))
            driver.step([Row(slot) for slot in range(3)])
            for _ in range(30):
                driver.step([Row(slot, draft=as_draft([7, 9], [-1, -1])) for slot in range(3)])
            texts.append([driver.sequences[slot].tokens[:85] for slot in range(3)])
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 2


@pytest.mark.parametrize("kv_dtype", ["same", "float8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_rounds_give_the_eager_text(checkpoint, device, compiled, kv_dtype):
    """In float32; the numbers differ in their last bits, so one near-tie is forgiven."""
    texts = []
    for graphs in (True, False):
        how = ("float32", compiled and graphs and device == "cuda", kv_dtype)
        made = TorchExecutor(checkpoint("qwen3"), limits(tiny.VOCAB), device, *how)
        made = made.capture() if graphs else made
        with Driver(made) as driver:
            for slot, temperature in enumerate((0.0, 0.8, 1.0)):
                prompt = np.arange(20 + slot, 40 + 3 * slot)
                driver.open(slot, prompt, Sampling(temperature=temperature, seed=slot))
            driver.step([Row(slot) for slot in range(3)])
            for _ in range(30):
                last = [driver.sequences[slot].tokens[-1] for slot in range(3)]
                trees = [as_draft([t, 9, 8], [-1, -1, 0]) for t in last]
                driver.step([Row(slot, draft=tree) for slot, tree in enumerate(trees)])
            texts.append([driver.sequences[slot].tokens[:45] for slot in range(3)])
        if device == "cuda" and graphs:
            assert (3, 4, 0, 0) in [size[:4] for size in made.describe()["captured"]]
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 2
