"""Recurrent states on torch: the oracle's numbers, and the same bits on every way to a text."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.build.calibration import measure_costs
from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.executors.state_slots import StateSlots
from forerun.executors.state_steps import StateStep
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.attention.delta_walk import DeltaWay, NativeDelta, PlainDelta
from forerun.executors.torch.attention.states import States
from forerun.executors.torch.decoder.delta import (
    DeltaInputs,
    DeltaNumbers,
    Tokens,
    softplus,
    summed,
)
from forerun.interface.plan import Outcome, Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.networks.config_json import architecture_from
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import batch
from tests.models import tiny
from tests.parity.driver import (
    EVERYTHING,
    Driver,
    Row,
    Sequence,
    as_draft,
    chain_draft,
    limits,
    logits_in_chunks,
)
from tests.references.gated_delta import Recurrence
from tests.references.states import STATES

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", params=[False, True], ids=["grouped", "tiled"])
def arch(request, tmp_path_factory):
    """Value heads of a key head follow each other, or stand in turns."""
    settings = tiny.config("qwen3_next", linear_key_head_dim=7).to_dict()
    made = architecture_from(settings, tmp_path_factory.mktemp("arch"))
    if not request.param:
        return made
    specs = [
        replace(s, recurrent=replace(s.recurrent, tiled=True)) if s.recurrent else s
        for s in made.layer_specs
    ]
    return replace(made, layer_specs=tuple(specs))


def bounds(**changes):
    return limits(tiny.VOCAB, **{"page_size": 4, "checkpoints": 6} | changes)


class StateTrees:
    """Trees of random numbers through the layers' states, by torch and by the oracle."""

    def __init__(self, arch, seed, walk=None, kernels=None):
        self.about, self.random = arch.recurrent, np.random.default_rng(seed)
        self.layers = arch.recurrent_layers
        self.states = States(arch, bounds(), torch.device("cpu"), walk, kernels)
        self.kernel = self.random.normal(size=(self.about.channels, self.about.window))
        self.kernel = self.kernel.astype(np.float32)
        self.texts = {}
        self.lengths = {}

    def numbers(self, layer, path):
        """What the tokens of a path, as a tuple, bring to a layer: by the last token and where."""
        seed = hash((layer, path[-1], len(path))) & 0xFFFFFFFF
        random, about = np.random.default_rng(seed), self.about
        mixed = random.normal(size=about.channels).astype(np.float32)
        return mixed, random.uniform(-1.4, 4, 2 * about.value_heads).astype(np.float32)

    def open(self, slot):
        init = SlotInit(slot, TokenText([]), 0, GREEDY)
        self.states.open(init)
        self.texts[slot] = ()

    def step(self, rows):
        """Rows of (slot, known tokens, draft, accepted nodes). What every node read, by layer."""
        known = [np.array(tokens, np.int32) for _, tokens, _, _ in rows]
        trees = batch(known, [draft for _, _, draft, _ in rows])
        slots = np.array([slot for slot, *_ in rows], np.int32)
        plan = plan_of(slots, [len(self.texts[slot]) for slot in slots.tolist()], known)
        paths = []
        for row, slot in enumerate(slots.tolist()):
            for node in trees.nodes(row):
                above = int(trees.parents[node])
                before = self.texts[slot] if above < 0 else paths[above]
                paths.append((*before, int(trees.tokens[node])))
        step = self.states.begin(plan, trees)
        layers = [self.states.layer(step, n, self.inputs(n, paths)) for n in range(self.layers)]
        self.states.known(step)
        accepted = [
            trees.root(row) + 1 + np.array(path, int) for row, (*_, path) in enumerate(rows)
        ]
        outcome = outcome_of(accepted)
        for row, (slot, _, _, path) in enumerate(rows):
            self.texts[slot] = paths[accepted[row][-1]] if path else paths[trees.root(row)]
        self.states.accept(step, outcome)
        return layers, paths

    def inputs(self, layer, paths):
        parts = map(np.stack, zip(*(self.numbers(layer, p) for p in paths), strict=True))
        mixed, gates = (torch.from_numpy(part) for part in parts)
        heads, kernel = self.about.value_heads, torch.from_numpy(self.kernel)
        numbers = DeltaNumbers(mixed, gates, kernel, -torch.ones(heads), torch.zeros(heads))
        return DeltaInputs(self.about, numbers, torch.zeros(0))

    def oracle(self, layer, path):
        """The recurrence after a path, and what its last token read."""
        made, read = Recurrence(self.about, self.kernel), None
        for end in range(1, len(path) + 1):
            mixed, gates = self.numbers(layer, path[:end])
            share = 1 / (1 + np.exp(-gates.astype(np.float64)))
            beta, others = np.split(share, 2)
            read = made.token(mixed, 1 - others, beta)  # exp(-softplus(a)).
        return made, read


def plan_of(slots, kv_len, known):
    count = len(slots)
    nothing = np.zeros(count, np.int32)
    return Plan(
        slots=slots,
        kv_len=np.array(kv_len, np.int32),
        known=tuple(known),
        samples=np.ones(count, bool),
        max_nodes=nothing,
        max_depth=nothing,
        page_table=np.zeros((count, 1), np.int32),
        constrained=np.zeros(count, bool),
    )


def outcome_of(accepted):
    counts = np.array([len(path) + 1 for path in accepted], np.int32)
    nothing = np.zeros(len(accepted), np.int32)
    return Outcome(
        counts,
        np.zeros((len(accepted), 1), np.int32),
        nothing,
        nothing == 0,
        accepted=np.concatenate(accepted).astype(np.int32),
    )


@pytest.fixture
def unkept(monkeypatch):
    """Of texts that are not there nothing is kept."""
    monkeypatch.setattr(StateSlots, "_places", lambda *_: [])


BUSH = as_draft([5, 6, 7, 8, 9, 10, 11], [-1, 0, 0, 2, -1, 4, 3])


WAYS = {"plain": (PlainDelta(), None), "core": (NativeDelta(), None)}
WAYS["kernels"] = None, STATES


@pytest.mark.parametrize("which", WAYS)
def test_the_states_of_trees_are_the_oracles(arch, unkept, which):
    way = StateTrees(arch, 0, *WAYS[which])
    for slot in (0, 2):
        way.open(slot)
    way.step([(0, [1, 2, 3, 4, 5], as_draft([], []), [])])
    steps = [
        [(0, [9], BUSH, [0, 2, 3, 6]), (2, [3, 1], as_draft([], []), [])],
        [(2, [8], BUSH, [4]), (0, [7], BUSH, [0])],
        [(0, [1], BUSH, []), (2, [4], chain_draft([1, 2, 3]), [0, 1, 2])],
        [(0, [6], as_draft([1, 2, 3, 4], [-1, -1, 0, 2]), [0, 2, 3])],  # Below the first of two.
    ]
    for rows in steps:
        actual, paths = way.step(rows)
        for layer in range(way.layers):
            for node, path in enumerate(paths):
                _, read = way.oracle(layer, path)
                np.testing.assert_allclose(actual[layer][node], read, atol=2e-6)
    for slot, text in way.texts.items():
        for layer in range(way.layers):
            made, _ = way.oracle(layer, text)
            np.testing.assert_allclose(way.states.matrices[layer, slot], made.state, atol=2e-6)
            np.testing.assert_array_equal(
                way.states.windows[layer, slot], made.window.astype(np.float32)
            )
    assert not way.states.matrices[:, 1].any(), "a free slot was written to"


@settings(max_examples=10)
@given(seed=st.integers(0, 1 << 32))
def test_a_state_has_the_same_bits_on_every_way(arch, seed):
    """Token by token alone, and in chunks and accepted branches of trees in company."""
    random = np.random.default_rng(seed)
    text = random.integers(0, 50, 24).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateSlots, "_places", lambda *_: [])
        plain, other = StateTrees(arch, 1), StateTrees(arch, 1)
        plain.open(0)
        for token in text:
            plain.step([(0, [token], as_draft([], []), [])])
        for slot in (1, 3):
            other.open(slot)
        while (done := len(other.texts[3])) < len(text):
            known = int(random.integers(1, 4))
            rest = text[done : done + known]
            true = text[done + known : done + known + int(random.integers(0, 6))]
            wrong = int(random.integers(0, 4))
            tokens = [*([77] * wrong), *true]
            parents = [*range(-1, wrong - 1), -1, *range(wrong, len(tokens) - 1)][: len(tokens)]
            path = list(range(wrong, len(tokens)))
            rows = [(3, rest, as_draft(tokens, parents), path), (1, [8], BUSH, [4, 5])]
            other.step(rows[:: int(random.choice([1, -1]))])
    assert other.texts[3] == tuple(text)
    assert torch.equal(other.states.matrices[:, 3], plain.states.matrices[:, 0])
    assert torch.equal(other.states.windows[:, 3], plain.states.windows[:, 0])


KERNELS = list(filter(native.kernels, native.KERNELS))
SIZES = [(7, 12, 2, 4), (128, 128, 1, 2), (1, 33, 3, 3), (8, 16, 2, 2)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_core_and_torch_make_the_same_bits(kernels, sizes):
    """Of random trees, states that are kept on the way included, and of one token more."""
    key_size, value_size, key_heads, heads = sizes
    random = torch.Generator().manual_seed(5)

    def drawn(*shape):
        return torch.randn(shape, generator=random)

    known = [np.arange(n, dtype=np.int32) for n in (3, 1, 9)]
    drafts = [BUSH, as_draft([], []), chain_draft([1, 2])]
    trees = batch(known, drafts)
    slots, count = np.array([4, 0, 2], np.int32), len(trees.tokens)
    ends = {4: trees.root(0), 0: trees.root(1), 2: trees.root(2), 5: 1, 6: trees.start[2] + 4}
    tokens = Tokens(
        drawn(count, key_heads, key_size),
        drawn(count, key_heads, key_size) / key_size,
        drawn(count, heads, value_size),
        torch.rand(count, heads, generator=random),
        torch.rand(count, heads, generator=random),
    )
    before, made = drawn(7, heads, key_size, value_size), []
    for walk in (PlainDelta(), NativeDelta(kernels)):
        states = before.clone()
        step = StateStep(SimpleNamespace(slots=slots), trees, {}, ends)
        actual = walk.advance(states, DeltaWay.of(step), tokens)
        walk.follow(states, np.array([6, 1]), tokens.part(3, 5))
        made.append((actual, states))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(made[0][1][3], before[3]) and not torch.equal(made[0][1][1], before[1])


def test_sums_and_gates_do_not_depend_on_the_company():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(31, 7, 13, 5, generator=random) * 3
    whole, soft = summed(x), softplus(x)
    for rows in (1, 2, 3, 7, 30):
        assert torch.equal(summed(x[:rows]), whole[:rows])
        assert torch.equal(summed(x[-rows:].contiguous()), whole[-rows:])
        assert torch.equal(softplus(x[-rows:]), soft[-rows:])
        assert torch.equal(softplus(x[:rows, 2, 3].contiguous()), soft[:rows, 2, 3])
    torch.testing.assert_close(whole, x.sum(-2))
    torch.testing.assert_close(soft, torch.nn.functional.softplus(x))


# --- which states are kept ---------------------------------------------------------------


FAMILIES = ["qwen3_next", "lfm2"]


@pytest.fixture(scope="module", params=FAMILIES)
def either(request, checkpoint):
    return TorchExecutor(checkpoint(request.param), bounds(pages=200)), checkpoint(request.param)


@pytest.fixture(scope="module")
def executor(checkpoint):
    return TorchExecutor(checkpoint("qwen3_next"), bounds(pages=200))


def test_going_on_from_a_checkpoint_is_running_the_text(either, random):
    """Bits of all later tokens, behind pages and a state that another sequence has left."""
    executor, source = either
    tokens = random.integers(0, tiny.VOCAB, 30).astype(np.int32)
    expected = logits_in_chunks(executor, tokens)
    fresh = TorchExecutor(source, executor.limits)
    with Driver(fresh) as driver:
        driver.open(0, tokens[:22], GREEDY)
        driver.step([Row(0, known=10)])
        driver.step([Row(0)])
        pages = driver.sequences[0].pages
        assert fresh.reusable_prefix_len(tokens[:28]) == 20
        assert fresh.reusable_prefix_len(tokens[:19]) == 0, "of the prompt the last alone is kept"
        assert fresh.reusable_prefix_len(tokens[1:28]) == 0
        text = TokenText(tokens)
        fresh.open(SlotInit(1, text, len(tokens), EVERYTHING, cached=20, shared=20))
        driver.sequences[1] = Sequence(text, tokens.tolist(), 20, pages[:5])
        actual = driver.step([Row(1)]).every()
        driver.sequences[1].pages = driver.sequences[1].pages[5:]
    assert torch.equal(actual, expected[20:])
    fresh.states.book.check()


def test_a_state_that_is_not_kept_is_refused(executor):
    tokens = np.random.default_rng(8).integers(0, tiny.VOCAB, 30).astype(np.int32)
    with pytest.raises(EngineError, match="no checkpoint of the recurrent state"):
        executor.open(SlotInit(0, TokenText(tokens), 30, GREEDY, cached=8, shared=8))
    executor.close(0)
    with Driver(executor) as driver:
        driver.open(0, tokens)
        driver.sequences[0].kv_len = 4
        with pytest.raises(EngineError, match="recurrent state after 0 tokens"):
            driver.step([Row(0)])


def test_a_step_that_fails_leaves_nothing_to_go_on_from(executor, monkeypatch):
    tokens = np.random.default_rng(9).integers(0, tiny.VOCAB, 30).astype(np.int32)

    def broken(*_):
        raise RuntimeError("out of memory")

    with Driver(executor) as driver:
        driver.open(0, tokens)
        with monkeypatch.context() as patch:
            patch.setattr(States, "layer", broken)
            with pytest.raises(RuntimeError):
                driver.step([Row(0)])
        assert executor.reusable_prefix_len(tokens) == 0
        with pytest.raises(EngineError, match="recurrent state after -1 tokens"):
            driver.step([Row(0)])
    executor.states.book.check()


def test_a_copy_that_fails_frees_the_row_of_its_checkpoint(arch, monkeypatch):
    states = States(arch, bounds(), torch.device("cpu"))
    states.book.open(SlotInit(0, TokenText(np.arange(3, dtype=np.int32)), 3, GREEDY))
    states.book.end(0, 3)
    step = SimpleNamespace(
        plan=SimpleNamespace(kv_len=np.array([3])), trees=SimpleNamespace(known=np.array([0]))
    )
    free = len(states.book._free)
    with monkeypatch.context() as patch:
        patch.setattr(states, "copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            states._passed(step, 0, 0, 0, [7])
    assert len(states.book._free) == free
    states.book.end(0, 3)
    states._passed(step, 0, 0, 0, [7])
    assert states.book.lengths(np.array([0, 1, 2, 7], np.int32)) == [4]


@pytest.mark.parametrize(
    "changes", [{}, {"page_size": 1, "checkpoints": 2}], ids=["usual", "each step evicts one"]
)
def test_what_a_step_costs_is_measured_behind_a_kept_state(checkpoint, changes):
    executor = TorchExecutor(checkpoint("qwen3_next"), bounds(pages=200, **changes))
    costs = measure_costs(executor)
    assert costs.attend_ms >= 0 and len(costs.nodes) > 1
    if not changes:
        assert executor.reusable_prefix_len(np.zeros(400, np.int32)) >= 64, (
            "the far step went on from there"
        )
    executor.states.book.check()


def test_sixteen_bits_are_near(checkpoint, executor, random):
    tokens = random.integers(0, tiny.VOCAB, 40)
    narrow = TorchExecutor(checkpoint("qwen3_next"), bounds(pages=200), dtype="bfloat16")
    exact, rounded = (logits_in_chunks(each, tokens, (16, None)) for each in (executor, narrow))
    assert np.corrcoef(exact.flatten(), rounded.flatten())[0, 1] > 0.98


class Book:
    """A book of states of texts that count up, by hand."""

    def __init__(self, checkpoints=4, size=4):
        self.book = StateSlots(bounds(checkpoints=checkpoints, page_size=size, slots=3))

    def run(self, slot, text, prompt, chunks, cached=0, shared=0, salt=b""):
        about = {"cached": cached, "shared": shared, "salt": salt}
        self.book.open(SlotInit(slot, TokenText(text), prompt, GREEDY, **about))
        made, begin = [], cached
        for count in chunks:
            self.book.begin(slot, begin)
            claims = self.book.claims(slot, begin, begin + count)
            self.book.register(slot, claims)
            begin += count
            self.book.end(slot, begin)
            made.append([claim.length for claim in claims])
        self.book.check()
        return made

    def known(self, text, salt=b""):
        return self.book.reusable_prefix_len(np.array(text, np.int32), salt)


def test_the_last_ends_of_pages_of_prompt_and_answer_are_kept():
    made, text = Book(), list(range(40))
    assert made.run(0, text, 16, [10, 6, 1, 1, 1, 1, 1, 3, 1]) == [
        *([8], [12, 16], [], [], [], [20], [], [24], [])
    ]
    assert made.known(text) == 24
    assert made.known(text[:23]) == 12, "of the answer the last alone is kept"
    assert made.known(text[:11]) == 0
    assert made.known([1, *text]) == 0


def test_where_two_texts_part_is_kept_for_the_third():
    made, text = Book(), list(range(30))
    made.run(0, text, 30, [30])
    other = [*text[:17], *range(90, 103)]
    assert made.known(other[:16]) == 0
    assert made.run(1, other, 30, [30], shared=16) == [[16, 28]]
    assert made.known(other[:16]) == 16
    third = [*text[:16], *range(60, 70)]
    assert made.run(2, third, 26, [10], cached=16, shared=16) == [[24]]


def test_the_least_recently_used_goes():
    made, texts = Book(checkpoints=2), [[n] * 9 for n in range(3)]
    made.run(0, texts[0], 9, [9])
    made.run(1, texts[1], 9, [9])
    made.book.open(SlotInit(2, TokenText(texts[0]), 9, GREEDY, cached=8, shared=8))
    made.run(1, texts[2], 9, [9])
    assert [made.known(text) for text in texts] == [8, 0, 8]


def test_without_checkpoints_nothing_is_gone_on_from():
    made = Book(checkpoints=0)
    assert made.run(0, list(range(9)), 9, [9]) == [[]]
    assert made.known(list(range(9))) == 0


def test_a_state_is_for_texts_of_its_salt():
    made, text = Book(checkpoints=8), list(range(9))
    made.run(0, text, 9, [9], salt=b"a")
    assert (made.known(text, b"a"), made.known(text), made.known(text, b"b")) == (8, 0, 0)
    with pytest.raises(EngineError, match="no checkpoint of the recurrent state"):
        made.run(1, text, 9, [1], cached=8, shared=8, salt=b"b")
    assert made.run(1, text, 9, [9], salt=b"b") == [[8]], "the other salt's is none of it"
    assert made.known(text, b"b") == 8
