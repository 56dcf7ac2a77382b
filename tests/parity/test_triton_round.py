"""The kernels before and after a round's forward pass, interpreted on the CPU, against plain torch;
and whole rounds of nothing but interpreted kernels.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build.target import open_target
from forerun.executors.torch import TorchExecutor, model_runner, torch_executor
from forerun.executors.torch.attention.geometry import tree_intervals
from forerun.executors.torch.attention.kv import KvShape, PagedCache
from forerun.executors.torch.captured.fixed import BufferDims, RoundBuffers, room_of
from forerun.executors.torch.captured.round import StagingBuffer
from forerun.executors.torch.decoder.float8 import FLOAT8
from forerun.executors.torch.sizes import Size
from forerun.executors.torch.triton.round_types import RoundShape
from forerun.networks.cache_layer import CacheLayer
from forerun.speculative.tree import batch
from tests.covering import spread
from tests.models import tiny
from tests.parity.driver import as_draft, limits
from tests.parity.interpreted import load
from tests.parity.launches import kernels
from tests.parity.tape import Tape, on_tape
from tests.parity.test_rounds_that_draft import PROMPTS
from tests.parity.test_torch_captured import half_true, no_draft, texts
from tests.references.rounds import accept, near, prepare
from tests.worlds.answers import answered, counts, drafting, tokens, wanted
from tests.worlds.draft_models import configured, make

CPU = torch.device("cpu")
for name in ("choice", "layers", "merge", "future", "shaping", "states"):
    load(f"triton.triton_{name}")
draft = load("triton.triton_draft")
attention = load("triton.triton_attention")
tiles = load("sizes")
rounds = load("triton.triton_round")


def facts_of(size, trees, decided, seed):
    """A round's facts, of rows with these trees, as the host writes them."""
    random = np.random.default_rng(seed)
    dims = BufferDims(6, 4, 2, 4300, 2, 16)
    room = torch.zeros(room_of(size.rows, size.total, dims), dtype=torch.int32)
    sized, staging = RoundBuffers(size, dims, room), StagingBuffer(room)
    staging.reset(sized)
    facts = staging.buffers
    rows, row = len(decided), np.repeat(np.arange(len(decided)), np.diff(trees.start))
    place = row * size.nodes + np.arange(len(row)) - trees.start[row]
    facts["kv_len"][:rows] = random.integers(0, 60, rows)
    facts["position"][:rows] = random.integers(0, 1000, rows)
    facts["low"][:], facts["high"][:] = random.integers(-(1 << 31), 1 << 31, (2, size.rows))
    facts["temperature"].view(np.float32)[:rows] = random.choice([0.0, 0.8], rows)
    facts["decided"][:rows], facts["count"][:rows] = decided, np.diff(trees.start)
    table = random.permutation(size.rows * 6).reshape(size.rows, 6).astype(np.int32)
    facts["tokens"][place], facts["depth"][place] = trees.tokens, trees.depth
    facts["parents"][place] = np.where(trees.parents < 0, -1, trees.parents - trees.start[row])
    facts["tree_intervals"][:, place] = tree_intervals(trees)
    sized.flat.copy_(staging.flat)
    return sized.buffers | {"table": torch.from_numpy(table)}


def trees_of(seed):
    """A chain, a tree, a lone node, with few tokens: paths are accepted."""
    random = np.random.default_rng(seed)
    parents = [-1, 0, 1], [-1, -1, 0, 0, 2], []
    draft_tokens = [as_draft(random.integers(0, 3, len(p)).tolist(), list(p)) for p in parents]
    return batch([np.array([1], np.int32)] * 3, draft_tokens)


@pytest.mark.parametrize("seed", range(4))
def test_facts_say_the_same_of_every_node(seed):
    facts = facts_of(Size(4, 6), trees_of(seed), [True, True, seed % 2 == 0], seed)
    frequencies = torch.stack([torch.logspace(0, -3, 8), torch.logspace(0, -5, 8)])
    shape = RoundShape(16, 1000, frequencies, torch.tensor([1.0, 1.3]))
    actual, expected = rounds.prepare(facts, shape), prepare(facts, shape)
    for name in ("position", "pages", "slots"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        assert getattr(actual, name).dtype == torch.int32
    for name in ("seeds", "positions", "temperatures"):
        assert torch.equal(getattr(actual.noise, name), getattr(expected.noise, name)), name
    for one, other in zip(actual.rotary, expected.rotary, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    # The chain's nodes go into its pages, the tree's into scratch, the padding's too.
    slots = actual.slots.view(4, 6)
    assert torch.equal(slots[0, :4], actual.pages.view(4, 6)[0, :4])
    assert (slots[0, 4:] >= 1000).all() and (slots[1] >= 1000).all() and (slots[3] >= 1000).all()
    assert (slots[2, 0] < 1000) == (seed % 2 == 0)


@pytest.mark.parametrize("nodes", [1, 13])
def test_nodes_are_where_their_window_pages_are(nodes):
    """Of 3 rows, over more programs than one; those in scratch stay there, others are in pages."""
    random, total = torch.Generator().manual_seed(nodes), 3 * nodes
    position = torch.randint(0, 6 * 16, (total,), generator=random, dtype=torch.int32)
    slots = torch.randint(0, 600, (total,), generator=random, dtype=torch.int32)
    slots[::2] += 1000
    table = torch.randint(0, 20, (3, 6), generator=random, dtype=torch.int32)
    shape = RoundShape(16, 1000, torch.ones(1, 4), torch.ones(1))
    places = rounds.near(position, slots, table, shape, 600)
    for one, other in zip(places, near(position, slots, table, shape, 600), strict=True):
        assert torch.equal(one, other) and one.dtype == torch.int32
    assert torch.equal(places[0][::2], slots[::2] - 600)
    assert torch.equal(places[0][1::2], places[1][1::2])


@pytest.mark.parametrize("seed", spread(range(12), 6))
def test_paths_are_kept_as_by_the_rule(seed):
    facts = facts_of(Size(4, 6), trees_of(seed), [True, True, seed % 3 == 0], seed)
    noise = prepare(facts, RoundShape(16, 1000, torch.ones(1, 4), torch.ones(1))).noise
    vocab = 3 if seed % 2 else 4300
    logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, :3] += 20
    logits[seed] = torch.nan
    records = torch.full((2, 24), -7, dtype=torch.int32)
    actual = rounds.accept(logits.bfloat16(), noise, facts, records[0])
    expected = accept(logits.bfloat16(), noise, facts, records[1])
    assert torch.equal(*records)
    for name in ("choices", "on_path", "count", "last"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert seed or actual.on_path.any()
    # From choices that were made elsewhere.
    again = rounds.keep(actual.choices, facts, records[1])
    assert torch.equal(*records) and torch.equal(again.on_path, actual.on_path)
    assert torch.equal(again.choices, actual.choices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8])
@pytest.mark.parametrize("chosen", [False, True])
def test_kept_numbers_are_moved(dtype, chosen):
    source, target = torch.tensor([70, 71, 72, 3]), torch.tensor([5, 71, 9, 20])
    kept = torch.tensor([True, True, False, True]) if chosen else None
    results = []
    for move in (rounds.move, PagedCache.move):
        cache = PagedCache(KvShape((CacheLayer(3, 16),) * 2), limits(8), CPU, dtype)
        random = torch.Generator().manual_seed(0)
        (part,) = cache.parts
        part.numbers.copy_(torch.randn(part.numbers.shape, generator=random))
        if part.scales is not None:
            part.scales.copy_(torch.rand(part.scales.shape, generator=random))
        before = part.numbers.float()
        move(cache, source.int(), target.int(), kept)
        results.append((part.numbers.float(), part.scales))
        assert (before != part.numbers.float()).any()
    assert torch.equal(results[0][0], results[1][0])
    assert dtype != FLOAT8 or torch.equal(results[0][1], results[1][1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "windows"),
    [("qwen3", 0), ("gemma3_text", 0), ("gemma3_text", 100), ("qwen3_5_text", 0), ("lfm2", 0)],
)
def test_whole_rounds_of_interpreted_kernels_give_the_eager_text(
    checkpoint, monkeypatch, family, windows
):
    """No reference runs: every kernel of a round does, on one tiny model. Every prefix in two
    parts, and where layers have a window of 24, one text grows beyond it: they keep every page, or
    have pages of their own.
    """
    # Whatever the lengths are: an eager step's tiles, a round's, and those of a draft head.
    monkeypatch.setattr(tiles, "KEYS", 8)
    monkeypatch.setattr(attention, "parts_for", lambda programs: 2)
    on_tape(monkeypatch, kernels=kernels())
    small = limits(tiny.VOCAB, context=128, pages=40, max_nodes=128)
    monkeypatch.setattr(Tape, "capture", lambda self, work: work)  # A tape holds no kernel of ours.
    own = replace(small, window=25 * bool(windows), window_pages=windows)
    made = torch_executor(own)(checkpoint(family), own).capture()
    monkeypatch.setattr(model_runner, "kernels_for", lambda device: None)
    eager = TorchExecutor(checkpoint(family), small)
    expected = texts(eager, no_draft, count=10)
    assert texts(made, half_true(expected, 3), count=10) == expected
    assert made.describe()["rounds"] > 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["NEXTN", "STANDALONE"])
def test_rounds_of_interpreted_kernels_grow_the_trees_of_single_passes(
    tmp_path, monkeypatch, method
):
    """Every kernel of a draft model in rounds: trees 2 wide and 3 deep, of rows side by side."""
    folders = make(tmp_path)
    eager = open_target(configured(folders, method, 16))
    monkeypatch.setattr(draft, "CHUNK", 512)  # The interpreter orders fewer for as many tokens.
    on_tape(monkeypatch, kernels=kernels(), warm=False)
    monkeypatch.setattr(Tape, "capture", lambda self, work: work)
    rounds = open_target(configured(folders, method, 16))
    requests = wanted(PROMPTS[:2], 8, 0.8)
    actual, expected = (
        answered(target, requests, 1, **drafting(5, 3, 2))[0] for target in (rounds, eager)
    )
    assert rounds.executor.describe()["rounds"] > 1
    rounds.close()
    eager.close()
    assert tokens(actual) == tokens(expected) and counts(actual) == counts(expected)
    assert sum(accepted for _, accepted in counts(actual)) > 3
