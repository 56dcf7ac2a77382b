"""What the scheduler promises about one plan at a time."""

import numpy as np
import pytest

from forerun.control.policy import FIXED, FixedPolicy
from forerun.engine.check import check_scheduler
from forerun.engine.chunked_prefill import HALF_LIFE, PromptShares
from forerun.engine.request import Speculation
from forerun.engine.scheduler import Scheduler, max_min_fair_split
from forerun.engine.sequence import Sequence
from forerun.text.stream import TextStream
from tests.engine.toys import TOKENIZER, ask, limits


@pytest.mark.parametrize(
    ("wanted", "room", "given"),
    [
        ([], 5, []),
        ([4, 4], 8, [4, 4]),
        ([4, 1, 4], 6, [3, 1, 2]),
        ([8, 8, 8], 2, [1, 1, 0]),
        ([0, 5], 3, [0, 3]),
        ([2, 2], 0, [0, 0]),
        ([10, 1, 1], 100, [10, 1, 1]),
    ],
)
def test_share_out(wanted, room, given):
    assert max_min_fair_split(wanted, room) == given


class World:
    """A scheduler whose sequences emit a made-up token wherever a row samples."""

    def __init__(self, nodes=0, depth=0, copies=False, **shape):
        self.scheduler = Scheduler(
            limits(**shape), FixedPolicy(nodes, depth), copy_page=lambda *_: copies
        )
        self.orders = 0

    def add(self, prompt_len=3, max_tokens=8, n=1, **changes):
        """Queue n sequences of different content."""
        prompt = np.full(prompt_len, self.orders + 1, np.int32)
        request = ask(str(self.orders), prompt, max_tokens, n=n, **changes)
        stream = TextStream(TOKENIZER)
        made = [Sequence((self.orders, i), request, print, stream) for i in range(n)]
        for sequence in made:
            self.scheduler.add(sequence)
        self.orders += 1
        return made[0] if n == 1 else made

    def step(self, accepted=0):
        """Plan and pretend: every draft token up to `accepted` deep is right."""
        schedule = self.scheduler.plan()
        check_scheduler(self.scheduler, self.scheduler.running)
        if schedule is None:
            return None
        plan = schedule.plan
        self.inspect(plan)
        for row, sequence in enumerate(schedule.rows):
            emitted = min(accepted, int(plan.max_depth[row])) + 1 if plan.samples[row] else 0
            sequence.append([99] * emitted)
            count = len(plan.known[row]) + max(emitted - 1, 0)
            sequence.table.commit(count, sequence.tokens)
            if sequence.remaining <= 0:
                self.scheduler.remove(sequence)
        check_scheduler(self.scheduler, self.scheduler.running)
        return schedule

    def inspect(self, plan):
        """What holds for every plan."""
        size = self.scheduler.limits.page_size
        known = np.array([len(tokens) for tokens in plan.known])
        assert known.min() >= 1
        assert known.sum() + plan.max_nodes.sum() <= self.scheduler.limits.max_nodes
        assert len(set(plan.slots.tolist())) == plan.rows
        assert ((plan.max_nodes == 0) == (plan.max_depth == 0)).all()
        assert (plan.max_depth <= plan.max_nodes).all()
        for row in range(plan.rows):
            needed = int(plan.kv_len[row] + known[row] + plan.max_depth[row])
            assert (plan.page_table[row, : -(-needed // size)] >= 0).all()


def rows(schedule):
    return [int(s.request.id) for s in schedule.rows]


def test_no_more_nodes_choose_a_token_than_are_scored():
    """However many tokens a step may have: rows that sample, and what they may draft."""
    world = World(nodes=8, depth=8, slots=4, max_nodes=1024, max_scored=10)
    for length in (3, 3, 100):
        world.add(prompt_len=length, max_tokens=50)
    plans = [world.step().plan for _ in range(4)]
    assert [plan.max_nodes.sum() for plan in plans] == [0, 7, 7, 7]
    assert sum(map(len, plans[0].known)) == 106


def test_guesses_leave_prefill_half_of_the_rest():
    world = World(nodes=8, depth=8, max_nodes=9, pages=256)
    world.add(prompt_len=3, max_tokens=50)
    world.step()
    assert world.step().plan.max_nodes.tolist() == [8]
    world.add(prompt_len=20)
    plan = world.step().plan
    assert plan.max_nodes.tolist() == [4, 0]
    assert [len(tokens) for tokens in plan.known] == [1, 4]


def test_a_large_one_that_waits_for_memory_is_not_overtaken():
    world = World(pages=8, page_size=2, max_nodes=16)
    world.add(prompt_len=8, max_tokens=6)
    world.add(prompt_len=10, max_tokens=2)
    world.add(prompt_len=1, max_tokens=2)
    seen = []
    while (schedule := world.step()) is not None:
        seen.append(rows(schedule))
    assert seen[:6] == [[0]] * 6 and sorted(seen[6]) == [1, 2]


def test_youngest_is_preempted_and_comes_back_in_its_place():
    world = World(pages=6, page_size=2, max_nodes=16)
    old = world.add(prompt_len=2, max_tokens=9)
    young = world.add(prompt_len=2, max_tokens=9)
    later = world.add(prompt_len=2, max_tokens=2)
    closed = []
    while (schedule := world.step()) is not None:
        closed += schedule.closed
        if schedule.closed:
            assert not schedule.opened
    assert closed
    assert old.remaining == young.remaining == later.remaining == 0


def test_speculation_shrinks_before_anyone_is_preempted():
    world = World(nodes=4, depth=4, pages=6, page_size=2, max_nodes=16)
    world.add(prompt_len=3, max_tokens=7)
    world.add(prompt_len=3, max_tokens=2)
    world.step()
    schedule = world.step()
    # Two pages each are taken, two are left: all go to the first, none to the second.
    assert schedule.closed == () and schedule.plan.max_depth.tolist() == [4, 0]
    schedule = world.step()
    assert schedule.closed == ()


def test_pages_for_draft_tokens_that_were_wrong_are_taken_back_where_they_run_out():
    world = World(nodes=4, depth=4, pages=6, page_size=2, max_nodes=16)
    first, second = world.add(max_tokens=7), world.add(max_tokens=4)
    world.step()
    assert world.step().plan.max_depth.tolist() == [4, 0]
    assert world.scheduler.index.available == world.scheduler.index.evictable
    assert (first.table.length, len(first.table.pages)) == (4, 4), "it keeps what it will grow into"
    schedule = world.step()  # The second one's next token needs a page.
    assert schedule.closed == () and len(second.table.pages) == 3


def test_pages_for_draft_tokens_are_no_reason_to_wait():
    world = World(nodes=4, depth=4, pages=6, page_size=2, max_nodes=16)
    first = world.add(max_tokens=7)
    for _ in range(3):
        world.step()
    assert len(first.table.pages) == 5
    waits = world.add(prompt_len=1, max_tokens=2)
    assert world.step().opened == (waits,)


@pytest.mark.parametrize(
    ("draft_request", "nodes", "depth"),
    [
        (Speculation(), 8, 6),
        (Speculation(enabled=False), 0, 0),
        (Speculation(max_nodes=3), 3, 3),
        (Speculation(max_depth=2), 8, 2),
        (Speculation(max_nodes=0), 0, 0),
        (Speculation(max_nodes=99, max_depth=99), 8, 6),
    ],
)
def test_wishes(draft_request, nodes, depth):
    world = World(nodes=8, depth=6, max_nodes=16)
    world.add(prompt_len=3, max_tokens=32, speculation=draft_request)
    world.step()
    plan = world.step().plan
    assert (plan.max_nodes.tolist(), plan.max_depth.tolist()) == ([nodes], [depth])


def test_rows_have_no_more_nodes_than_a_device_has_prepared_for():
    """Among two rows one may have four nodes, among three or more two."""
    world = World(nodes=8, depth=8, pages=128, row_nodes=(9, 4, 2, 2, 2, 2, 2, 2))
    allowed = []
    for _ in range(3):
        world.add(prompt_len=3, max_tokens=64)
        world.step()
        allowed.append(world.step().plan.max_nodes.tolist())
    assert allowed == [[8], [3, 3], [1, 1, 1]]
    assert world.scheduler.running[0].counts.reason == FIXED


def test_choices_wait_for_the_first_to_supply_the_prompt():
    world = World(max_nodes=8, page_size=2)
    first, second = world.add(prompt_len=13, max_tokens=4, n=2)
    assert [len(s.rows) for s in (world.step(), world.step())] == [1, 1]
    schedule = world.step()
    assert schedule.rows == (first, second)
    assert second.cached_tokens == 12 and first.cached_tokens == 0
    assert list(first.table.pages[:6]) == list(second.table.pages[:6])


def test_a_prompt_that_is_being_computed_is_waited_for():
    world = World(max_nodes=8, page_size=2)
    first = world.add(prompt_len=13, max_tokens=4)
    world.orders = 0
    second = world.add(prompt_len=15, max_tokens=4)
    world.orders = 5
    third = world.add(prompt_len=2, max_tokens=4)
    # The third has nothing to wait for, not even for the first.
    assert set(world.step().rows) == {first, third}
    assert set(world.step().rows) == {first, third}
    assert second in world.step().rows and second.cached_tokens == 12


def test_what_is_computed_already_is_not_waited_for():
    world = World(max_nodes=20, page_size=2, slots=3)
    first = world.add(prompt_len=30, max_tokens=4)
    world.step()
    assert first.table.length == 20
    request = ask("x", np.array([1] * 8 + [7], np.int32), 4)
    second = Sequence((9, 0), request, print, TextStream(TOKENIZER))
    world.scheduler.add(second)
    assert second in world.step().rows and second.cached_tokens == 8


# --- prompts that do not all fit into a step ---------------------------------------------------


def steps_until(world, sequences, most=400):
    """Steps until each of these has an output token, in the order of `sequences`."""
    done = {}
    for number in range(1, most):
        world.step()
        for place, sequence in enumerate(sequences):
            if sequence.total > sequence.prompt_len:
                done.setdefault(place, number)
        if len(done) == len(sequences):
            break
    return [done.get(place) for place in range(len(sequences))]


def test_a_short_prompt_waits_for_no_long_one():
    world = World(max_nodes=16, pages=2048, context=4096)
    long = world.add(prompt_len=1600)
    world.step()
    short = [world.add(prompt_len=length) for length in (7, 3, 1)]
    alone, *waited = steps_until(world, [long, *short])
    assert max(waited) <= 3
    # 1611 tokens in steps of 16, less what decoding rows take meanwhile.
    assert alone <= 105


def test_the_oldest_prompt_ends_whatever_comes():
    """Short prompts come in every step; the long one has half of each."""
    world = World(max_nodes=16, pages=2048, context=4096, slots=4)
    long = world.add(prompt_len=400)
    steps = 0
    while long.total == long.prompt_len and steps < 400:
        world.add(prompt_len=8, max_tokens=1)
        world.step()
        steps += 1
    assert steps <= 400 / 8 + 2


def test_clients_share_what_is_read_out_of_turn():
    """A client whose one prompt came after the twenty of another waits for two of them, not all."""
    world = World(max_nodes=16, pages=4096, slots=8, context=4096)
    crowd = [world.add(prompt_len=100, client="a") for _ in range(20)]
    for _ in range(10):
        world.step()
    one = world.add(prompt_len=110, client="b")
    (waited,) = steps_until(world, [one])
    assert waited <= 2 + 110 / 7
    assert sum(sequence.total > sequence.prompt_len for sequence in crowd) <= 4


def test_what_a_client_has_used_is_forgotten():
    shares = PromptShares()

    class Prompt:
        pending, request = 100, ask("x", client="a")

    class Other:
        pending, request = 100, ask("y", client="b")

    shares.divide([Prompt], 100)
    assert shares.cost(Prompt) == 200 and shares.cost(Other) == 100
    for _ in range(4 * HALF_LIFE // 100):
        shares.divide([Other], 100)
    assert shares.cost(Prompt) < 110 < HALF_LIFE < shares.cost(Other)


@pytest.mark.parametrize("room", [0, 1, 2, 15, 16, 100])
def test_a_steps_prompt_tokens_are_all_used(room):
    shares = PromptShares()
    world = World(max_nodes=64, pages=256)
    prompts = [world.add(prompt_len=length) for length in (30, 4, 10)]
    chunks = shares.divide(prompts, room)
    assert sum(chunks) == min(room, 44) and all(
        c <= p.pending for c, p in zip(chunks, prompts, strict=True)
    )
    assert chunks[0] >= min(room - room // 2, 30)
    assert chunks[1] == min(room // 2, 4) or room >= 44
