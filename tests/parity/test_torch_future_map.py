"""What a round takes from the one before, on the device: draft tokens, bounds, ancestors."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forerun.executors.device_choice import CUT_OFFS, Choosing
from forerun.executors.torch.attention.geometry import tree_intervals
from forerun.executors.torch.captured.fixed import BufferDims, RoundBuffers, room_of
from forerun.executors.torch.captured.round import StagingBuffer, prepare_inputs_carried
from forerun.executors.torch.captured.runner import LEVELS
from forerun.executors.torch.sizes import Record, Size
from forerun.executors.torch.triton.round_types import Accepted, with_room
from forerun.interface.plan import Plan
from forerun.speculative.accept import NOTHING
from forerun.speculative.draft_tree import full_draft
from forerun.speculative.tree import NO_DRAFT, batch, full_size
from tests.parity.interpreted import load
from tests.parity.tape import Watch
from tests.references import future

triton_future = load("triton.triton_future")

SLOTS = 4
LOGS = np.array([0.0, -0.5, -0.5, -1.0, -2.0, -np.inf, np.nan], np.float32)


def full_tree(random, width, levels):
    """Tokens, parents and values as a device grows them, with ties and missing children."""
    tokens = random.integers(0, 50, full_size(width, levels)).astype(np.int32)
    parents, values = [np.full(width, -1)], [random.choice(LOGS, width)]
    values[0] = np.where(np.isnan(values[0]), -np.inf, values[0])
    for level in range(1, levels):
        best = np.sort(np.argsort(-values[-1], kind="stable")[:width])
        parents.append(np.repeat(full_size(width, level - 1) + best, width))
        below = random.choice(LOGS[:-1], len(best) * width)
        values.append((np.repeat(values[-1][best], width) + below).astype(np.float32))
    return tokens, np.concatenate(parents).astype(np.int32), np.concatenate(values)


def there(array):
    return torch.from_numpy(np.ascontiguousarray(array))


def sized_of(size, width):
    """A size's tensors, with page tables so wide."""
    dims = BufferDims(width, SLOTS, 2, 32, 2, 16)
    room = torch.zeros(room_of(size.rows, size.total, dims), dtype=torch.int32)
    return RoundBuffers(size, dims, room)


def staged(sized):
    """What the host fills of such a round."""
    staging = StagingBuffer(sized.flat)
    staging.reset(sized)
    return staging


def room_for(size):
    state = torch.zeros(SLOTS + 1, 3, dtype=torch.int32)
    return with_room(state, size.width, max(size.levels, LEVELS))


def left(carry, size, slots, rows):
    """Let a round of `size` end with these rows: (kv_len, position, token, tree)."""
    sized = sized_of(size, 3)
    staging = staged(sized)
    buffers = staging.buffers
    choices = torch.full((size.total,), NOTHING, dtype=torch.int32)
    kept = torch.zeros(size.rows, size.nodes, dtype=torch.bool)
    record = Record.of(size, sized.record)
    grown = np.zeros((3, size.rows, size.draft_tokens), np.int32)
    for row, (slot, (kv_len, position, token, tree)) in enumerate(zip(slots, rows, strict=True)):
        buffers["kv_len"][row], buffers["position"][row] = kv_len - 1, position - 1
        buffers["slot"][row] = buffers["draft_slot"][row] = slot
        choices[row * size.nodes], kept[row, 0] = token, True
        grown[:, row] = tree[0], tree[1], tree[2].view(np.int32)
    record.grown.copy_(there(grown.reshape(-1)))
    sized.flat.copy_(staging.flat)
    with Watch():
        count, last = kept.sum(1, dtype=torch.int32), torch.zeros(size.rows, dtype=torch.int32)
        future.leave(carry, size, sized.buffers, Accepted(choices, kept, count, last), record)


def entered(carry, size, slots, bounds):
    """The facts of a round whose rows go on from these slots; bounds: (most, deep, ends)."""
    sized = sized_of(size, 90)
    staging = staged(sized)
    buffers = staging.buffers
    many = len(slots)
    most, deep, ends = np.array(bounds, np.int32).T
    choosing = Choosing(
        *(np.zeros(SLOTS, kind) for kind in (bool, np.float32, np.uint64, np.int32, CUT_OFFS))
    )
    nothing = np.zeros(many, np.int32)
    no, known = np.zeros(many, np.bool_), (np.zeros(1, np.int32),) * many
    plan = Plan(np.array(slots), nothing, known, ~no, most, deep, nothing[:, None], no)
    prepare_inputs_carried(buffers, size, plan, ends, choosing, most)
    buffers["slot"][:many] = slots
    sized.flat.copy_(staging.flat)
    with Watch():
        facts = future.resume(carry, size, sized.buffers)
    again = triton_future.resume(carry, size, sized.buffers)
    assert all(torch.equal(again[name], values) for name, values in facts.items())
    return {name: values.numpy() for name, values in facts.items()}


def seen(enter, leave):
    return (enter[None] <= enter[:, None]) & (enter[:, None] < leave[None])


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    levels=st.integers(1, 5),
    power=st.sampled_from([0, 1, 2, 3, 4, 4]),
    rows=st.integers(1, SLOTS),
)
@example(seed=0, width=2, levels=5, power=4, rows=SLOTS)  # Paths of five levels.
def test_guesses_are_those_that_the_host_would_take(seed, width, levels, power, rows):
    random = np.random.default_rng(seed)
    slots = random.permutation(SLOTS)[:rows].tolist()
    trees = [full_tree(random, width, levels) for _ in slots]
    state = [(*random.integers(5, 90, 3).tolist(), tree) for tree in trees]
    grown, size = Size(4, 2, levels, width), Size(4, 1 << power)
    carry = room_for(grown)
    left(carry, grown, slots, state)
    bounds = [
        (int(random.integers(0, size.nodes)), int(random.integers(0, levels + 2)),
         kv_len + 1 + int(random.integers(0, levels + 2)))
        if random.random() < 0.5 else (size.nodes - 1, levels, kv_len + 1 + levels)
        for kv_len, *_ in state
    ]  # fmt: skip
    buffers = entered(carry, size, slots, bounds)
    for row, ((kv_len, position, token, tree), (most, deep, ends)) in enumerate(
        zip(state, bounds, strict=True)
    ):
        assert (buffers["kv_len"][row], buffers["position"][row]) == (kv_len, position)
        depth = min(deep, ends - kv_len - 1, levels)
        draft = full_draft(width, depth, most, *tree) if most and depth else NO_DRAFT
        expected = batch([np.array([token], np.int32)], [draft])
        count = len(expected.tokens)
        assert buffers["count"][row] == count
        mine = slice(row * size.nodes, row * size.nodes + count)
        for name in ("tokens", "parents", "depth"):
            assert buffers[name][mine].tolist() == getattr(expected, name).tolist()
        enter, leave = buffers["tree_intervals"].reshape(2, 4, size.nodes)[:, row]
        sees = seen(enter, leave)
        whose = tree_intervals(expected)
        assert (sees[:count, :count] == seen(*whose)).all()
        # What is no node sees itself alone, and no node sees it.
        assert (sees[count:] == np.eye(size.nodes, dtype=bool)[count:]).all()
        assert not sees[:count, count:].any()


def test_rows_that_are_not_ahead_keep_their_facts():
    carry, size = room_for(Size(2, 2, 2, 2)), Size(2, 4)
    random = np.random.default_rng(0)
    sized = sized_of(size, 3)
    staging = staged(sized)
    buffers = staging.buffers
    for values in buffers.values():
        values[...] = random.integers(1, 4, values.shape)
    buffers["carried"][:] = 0
    sized.flat.copy_(staging.flat)
    resumed = future.resume(carry, size, sized.buffers)
    again = triton_future.resume(carry, size, sized.buffers)
    assert all(torch.equal(again[name], values) for name, values in resumed.items())
    assert all((resumed[name].numpy() == values).all() for name, values in buffers.items())


def test_a_round_that_grows_nothing_leaves_no_guesses():
    random = np.random.default_rng(1)
    grown = Size(1, 2, 3, 2)
    carry = room_for(grown)
    tokens, parents, values = full_tree(random, 2, 3)
    left(carry, grown, [2], [(7, 3, 11, (tokens, parents, np.zeros_like(values)))])
    assert entered(carry, Size(1, 4), [2], [(3, 3, 100)])["count"][0] == 4
    nothing = np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    left(carry, Size(1, 2), [2], [(8, 4, 12, nothing)])
    buffers = entered(carry, Size(1, 4), [2], [(3, 3, 100)])
    assert (buffers["count"][0], buffers["kv_len"][0], buffers["tokens"][0]) == (1, 8, 12)


@settings(max_examples=30)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(0, 3), st.sampled_from([1, 2, 5, 8])
)
def test_the_kernel_leaves_what_its_reference_leaves(seed, width, levels, nodes):
    """By slot, and in the record; also where no row follows, and where nothing is grown."""
    random = np.random.default_rng(seed)
    size = Size(3, nodes, levels, width if levels else 0)
    kept = torch.from_numpy(random.random((3, nodes)) < 0.5)
    accepted = Accepted(
        there(random.integers(-1, 50, size.total).astype(np.int32)),
        kept,
        kept.sum(1, dtype=torch.int32),
        there(random.integers(0, nodes, 3).astype(np.int32)),
    )
    carries = []
    for leave in (future.leave, triton_future.leave):
        random = np.random.default_rng(seed)
        carry = room_for(Size(1, 1, max(levels, 1), width))
        sized = sized_of(size, 3)
        for values in (carry.state, carry.tokens, carry.parents, sized.record):
            values.copy_(there(random.integers(0, 90, values.shape).astype(np.int32)))
        sized.flat.copy_(there(random.integers(0, 50, sized.flat.shape).astype(np.int32)))
        sized.buffers["slot"].copy_(there(random.permutation(SLOTS + 1)[:3].astype(np.int32)))
        sized.buffers["draft_slot"].copy_(there(random.integers(-1, 2, 3).astype(np.int32)))
        record = Record.of(size, sized.record)
        leave(carry, size, sized.buffers, accepted, record)
        state = carry
        carries.append((state.state, state.tokens, state.parents, state.value, sized.record))
    assert all(torch.equal(one, other) for one, other in zip(*carries, strict=True))
