"""Steps that begin before the one before them was looked at: order, endings, failures."""

import numpy as np
import pytest

from forerun.control.policy import Budget, Decision, FixedPolicy
from forerun.control.step_costs import StepCosts
from forerun.engine.request import Finish
from forerun.errors import EngineError
from forerun.interface.plan import Outcome, Plan, Round
from tests.control.steps import MODEL, PolicyOnTable
from tests.engine.carrying import CarryingToy
from tests.engine.toys import RecordingSink, ask, finish, limits, make, reference, run, step, submit

DRAFTERS = ["none", "oracle", "adversary", "erratic"]


def overlapped(name="erratic", fails=(), nodes=4, depth=4, **shape):
    toy = CarryingToy(limits(**shape), fails)
    return make(name, nodes, depth, executor=toy, overlap=True), toy


def hot(id, prompt="Hello", max_tokens=20, **changes):
    return ask(id, prompt, max_tokens, temperature=0.8, seed=5, **changes)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_next_step_begins_before_this_one_is_looked_at(name):
    engine, toy = overlapped(name)
    run(engine, hot("a", max_tokens=30))
    place = {event: index for index, event in enumerate(toy.events)}
    carried = [number for what, number in toy.events if what == "carry"]
    assert len(carried) == engine.stats().carried > 3
    for number in carried:
        assert place["carry", number] < place["look", number - 1] < place["look", number]
        assert place["carry", number] < place["do", number - 1] < place["do", number]
    # The prompt, then a round of which the host knows all; from there on every one is carried.
    assert carried == list(range(2, carried[-1] + 1))


@pytest.mark.parametrize(
    "changes",
    [{"frequency_penalty": 0.5}, {"logprobs": 1}, {"top_k": 4}, {"min_tokens": 5}],
)
def test_what_the_device_does_not_decide_alone_is_looked_at_first(changes):
    engine, _ = overlapped()
    request = hot("a", **changes)
    run(engine, request).expect(request)
    assert engine.stats().carried == 0


def test_guesses_from_the_text_are_looked_at_first_but_plain_steps_are_not():
    engine, _ = overlapped("ngram")
    run(engine, hot("a"))
    assert engine.stats().carried == 0
    engine, _ = overlapped("ngram", nodes=0, depth=0)
    run(engine, hot("a"))
    assert engine.stats().carried > 10


@pytest.mark.parametrize("name", ["ngram", "erratic"])
def test_where_the_host_decides_the_next_step_begins_before_the_report(name):
    """Draft tokens from the text; log-probabilities that the toy's device does not report."""
    engine, toy = overlapped(name)
    changes = {} if name == "ngram" else {"logprobs": 1}
    sink, request = RecordingSink(), hot("a", max_tokens=30, **changes)

    def relay(delta):
        toy.events.append(("news", len(sink.tokens("a")) + len(delta.tokens)))
        sink(delta)

    engine.submit(request, relay)
    finish(engine)
    sink.expect(request)
    order = [what for what, _ in toy.events if what != "do"]
    assert engine.stats().carried == 0 and order.count("begin") > 8
    # Look, begin the next, report: but what ends is reported at once, and nothing runs after it.
    assert order == [
        "begin",
        *["look", "begin", "news"] * (order.count("begin") - 1),
        "look",
        "news",
    ]


@pytest.mark.parametrize("name", ["ngram", "none"])
def test_what_a_stop_string_ends_runs_once_more_unreported(name):
    most = 4 if name == "ngram" else 0
    engine, _ = overlapped(name, nodes=most, depth=most)
    whole = reference(ask("a", "ab", 40))[1]
    requests = [ask("a", "ab", 40, stop=(whole[9:12],)), hot("b", max_tokens=30)]
    sink = run(engine, *requests)
    sink.expect(*requests)
    assert sink.last("a").finish == Finish.STOP


@pytest.mark.parametrize("number", [2, 4])
def test_a_step_that_cannot_begin_before_the_news_fails_alone(number):
    engine, _ = overlapped("ngram", fails=[("begin", number)])
    sink = RecordingSink()
    broken, after = hot("a", max_tokens=30), hot("b", max_tokens=20)
    engine.submit(broken, sink)
    finish(engine)
    last = sink.last("a")
    assert last.finish == Finish.ERROR and f"begin of step {number} fails" in last.error
    tokens = sink.tokens("a")
    assert tokens == reference(broken)[0][: len(tokens)]
    engine.submit(after, sink)
    finish(engine)
    sink.expect(after)


def test_a_prompt_that_comes_meanwhile_is_taken_in_and_found_again():
    engine, _ = overlapped(pages=40)
    sink, first = RecordingSink(), hot("a", max_tokens=60)
    second = hot("b", "Hello, world, again", 12)
    engine.submit(first, sink)
    step(engine, 6)
    engine.submit(second, sink)
    finish(engine)
    third = hot("c", "Hello, world, again and more", 12)
    engine.submit(third, sink)
    finish(engine)
    sink.expect(first, second, third)
    assert sink.of("c")[0].cached_tokens > 0


@pytest.mark.parametrize(("name", "page_size"), [("none", 1), ("oracle", 3), ("erratic", 4)])
def test_a_page_that_a_running_round_reads_may_be_written_behind_it(name, page_size):
    """Of equal pages that several rows fill a commit frees all but one, while the next round reads
    them; what then comes from disk is written there.
    """
    engine, toy = overlapped(name, page_size=page_size, pages=200 // page_size)
    sink = RecordingSink()
    requests = [ask(str(i), "same text", 40, stop_tokens=()) for i in range(3)]
    submit(engine, sink, *requests)
    index, written = engine._core.scheduler.index, set()
    while engine.step_once():
        engine.check()
        for page in index.take(min(index.available - 4, 6)) or ():
            toy.pages.write_page(page, bytes(toy.pages.page_bytes))
            index.release(page)
            written.add(page)
    sink.expect(*requests)
    assert engine.stats().failed_steps == 0 and engine.stats().carried > 4 and len(written) > 5


def test_siblings_end_together_where_their_sink_fails():
    engine, _ = overlapped(slots=6)
    stays, deltas = hot("b", "other", 25), []

    def deaf(delta):
        deltas.append(delta)
        raise RuntimeError("no listener")

    sink = RecordingSink()
    engine.submit(stays, sink)
    engine.submit(hot("a", n=3), deaf)
    finish(engine)
    sink.expect(stays)
    assert len(deltas) == 1


@pytest.mark.parametrize("what", ["do", "look"])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_a_step_that_fails_ends_its_own_requests(what, number):
    engine, _ = overlapped(fails=[(what, number)])
    sink = RecordingSink()
    broken = [hot("a", max_tokens=60), ask("b", "other", 50)]
    submit(engine, sink, *broken)
    finish(engine)
    for request in broken:
        last = sink.last(request.id)
        assert last.finish == Finish.ERROR and f"step {number} fails" in last.error
        tokens = sink.tokens(request.id)
        assert tokens == reference(request)[0][: len(tokens)]
    assert engine.alive and engine.stats().failed_steps == 1
    after = hot("c", max_tokens=30)
    engine.submit(after, sink)
    finish(engine)
    sink.expect(after)


def test_shutdown_with_a_step_running_leaves_slots_closed():
    engine, toy = overlapped()
    sink = RecordingSink()
    engine.submit(hot("a", max_tokens=60), sink)
    step(engine, 5)
    engine.shutdown()
    engine.check()
    assert sink.last("a").finish == Finish.ABORT
    again = make("none", executor=toy, overlap=True)
    request = hot("b")
    run(again, request).expect(request)


def test_the_thread_sleeps_only_when_nothing_runs():
    engine, _ = overlapped()
    sink, requests = RecordingSink(), [hot(str(n), max_tokens=5 + 3 * n) for n in range(7)]
    engine.start()
    try:
        submit(engine, sink, *requests)
        assert engine.drain(30)
    finally:
        engine.shutdown()
    sink.expect(*requests)
    engine.check()


def test_a_drafter_that_fails_ahead_ends_speculation_and_no_request():
    engine, toy = overlapped("oracle")

    def broken(plan, running):
        raise RuntimeError("no more")

    toy._drafter.can_overlap = broken
    request = hot("a", max_tokens=30)
    run(engine, request).expect(request)
    assert engine.fault is not None and engine.stats().carried == 0


class Counting(FixedPolicy):
    """Draft tokens where none were looked for in six steps; counts its decisions."""

    def __init__(self):
        super().__init__(3, 3)
        self.decisions, self.looks = 0, []

    def decide(self, slots, kv_len, constrained=False):
        self.decisions += 1
        if True in self.looks[-6:]:
            return Decision("", (Budget(0, 0, ""),) * len(slots))
        return super().decide(slots, kv_len)

    def observe(self, report):
        self.looks.append(any(report.allowed))


@pytest.mark.parametrize(
    ("name", "features"), [("oracle", True), ("oracle", False), ("ngram", False)]
)
def test_a_policy_decides_once_for_most_steps(name, features):
    """A plan that cannot be carried is thrown away, and its budget with it: rarely."""
    toy, policy = CarryingToy(limits()), Counting()
    engine = make(name, executor=toy, overlap=True, policy=policy)
    if features:  # They are needed on the host.
        toy._drafter.can_overlap = lambda plan, running: False
    request = hot("a", max_tokens=120)
    run(engine, request).expect(request)
    stats = engine.stats()
    assert stats.steps - 2 <= policy.decisions <= 1.2 * stats.steps
    assert (stats.carried > stats.steps / 2) == (not features)


def test_occasional_lookups_are_served():
    """A plan with draft tokens from the text is thrown away before its begin, and made anew: they
    come a step later.
    """
    toy, policy = CarryingToy(limits()), Counting()
    engine = make("ngram", executor=toy, overlap=True, policy=policy)
    request = hot("a", max_tokens=120)
    run(engine, request).expect(request)
    assert sum(policy.looks) >= len(policy.looks) // 8 > 10


def test_adaptive_guessing_sees_every_step():
    costs = StepCosts(nodes=(1, 16), verify_ms=(1.0, 1.1), drafts_in_step=True)
    policy, toy = PolicyOnTable(costs, 4, 4, MODEL), CarryingToy(limits())
    engine = make("oracle", executor=toy, overlap=True, policy=policy)
    requests = [hot("a", max_tokens=60), ask("b", "other", 60)]
    sink = run(engine, *requests)
    sink.expect(*requests)
    stats = engine.stats()
    assert stats.carried > stats.steps / 3
    assert stats.acceptance_length > 2 and policy.describe()["right_by_level"][0] > 0.7


def test_a_plan_is_completed_by_the_outcome_before():
    many, pages = np.ones(3, np.int32), np.zeros((3, 2), np.int32)
    known = tuple(np.array([7], np.int32) for _ in range(3))
    before = Plan(
        np.array([4, 2, 9]), np.array([10, 20, 30]), known, many == 1, many, many, pages, many == 0
    )
    round = Round(before)
    most = np.array([32, 12, 22])
    bounds = Plan(
        np.array([9, 4, 2]), most, known, many == 1, 2 * many, 3 * many, pages + 5, many == 0
    )
    carried = Round(bounds, previous=round)
    with pytest.raises(EngineError, match="not finished"):
        carried.complete_plan()
    round.outcome = Outcome(
        n_tokens=np.array([2, 0, 1], np.int32),
        tokens=np.array([[5, 6], [-1, -1], [8, -1]], np.int32),
        n_draft_tokens=np.array([1, 1, 0], np.int32),
        finite=np.array([True, False, True]),
    )
    carried.complete_plan()
    made = carried.plan
    assert carried.previous is None
    assert made.slots.tolist() == [9, 4, 2]
    assert made.kv_len.tolist() == [31, 12, 20]
    assert [known.tolist() for known in made.known] == [[8], [6], [7]]
    assert made.samples.all() and not made.constrained.any()
    assert (made.max_nodes.tolist(), made.max_depth.tolist()) == ([2] * 3, [3] * 3)
    assert (made.page_table == 5).all()
