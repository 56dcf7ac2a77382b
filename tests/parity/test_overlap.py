"""The engine with overlap over rounds, on torch's tape and on XLA, against the engine without it.

The tape does what is launched only when somebody waits for it: whatever the host reads too early,
or overwrites too early, shows in the text.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from forerun.build import drafting as build_drafting
from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.client.completion import make_request
from forerun.constrain.grammar import Grammar
from forerun.control.policy import Budget, Decision, FixedPolicy
from forerun.draft_shape import DraftShape
from forerun.drafters.model_drafter import ModelDrafter
from forerun.engine.request import Finish
from forerun.executors.torch.captured import runner as rounds
from forerun.executors.torch.captured.declared import declared
from forerun.executors.torch.triton.round_types import with_room
from tests.drafters.served import on_xla
from tests.parity.heads import opened, opened_config
from tests.parity.tape import Tape, on_tape, taped
from tests.shape.walk import Walk
from tests.worlds.answers import OFF, answered, drafting, reports, tokens, wanted

FILES, STATEMENTS = 25, 2_825
"""Of steps that overlap, with a draft head's chains: the host's half from plan to the last delta,
and the program, which runs as it is (tests/shape/walk.py). Kernels are not counted:
tests/references stands for them. They may only shrink.
"""

SLOW = pytest.mark.slow
ONE, CHAIN = drafting(1, 1, 1, "EAGLE"), drafting(3, 3, 1, "EAGLE")
TREE, BEST = drafting(9, 3, 4, "EAGLE"), drafting(9, 3, 3, "EAGLE")
"""Of TREE all, of BEST the best nodes are verified."""
ON_XLA = drafting(7, 3, 2, "EAGLE")
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5}
BOTH = CHAIN | {"speculative_algorithm": "EAGLE+NGRAM"}
SMALL = {"chunked_prefill_size": 128, "context": 128}
SMALL_ON_XLA = SMALL | {"max_sequences": 2, "chunked_prefill_size": 64, "kv_tokens": 1024}


class Device(NamedTuple):
    """target: begins rounds early. judge: looks at every step. tape: where `target` is on one.
    dispatched: how many rounds were begun.
    """

    target: Any
    judge: Any
    tape: Tape | None
    dispatched: Callable[[], int]


@pytest.fixture(scope="module")
def devices(folder, learned, compiled, quickly):
    """The target and its head on "torch", where the tape is slow, and on "jax", where programs are
    compiled when they are needed and rounds of trees are padded to all of their nodes, so that
    sizes differ by rows alone; or "jax, chains".
    """
    made, closed = {}, []

    def on_torch():
        tape = Tape()
        target, judge = (
            taped(folder, learned[0], tape, True, **SMALL),
            opened(folder, learned[0], **SMALL),
        )
        closed.extend([target, judge])
        return Device(target, judge, tape, lambda: tape.launched)

    def on_jax(shape, pads):
        with on_xla(compiled, pads=pads):
            many = SMALL_ON_XLA | shape | {"executor": "jax", "overlap": True}
            target = opened(folder, learned[0], **many)
        closed.append(target)
        return Device(target, target, None, lambda: target.executor.programs.dispatches)

    makers = {
        "torch": on_torch,
        "jax": lambda: on_jax(ON_XLA, ("nodes", "chunks")),
        "jax, chains": lambda: on_jax(CHAIN, ()),
    }

    def of(name):
        if name not in made:
            made[name] = makers[name]()
        return made[name]

    yield of
    for target in closed:
        target.close()


@pytest.fixture
def slow(devices):
    """The target on a device that is slow, and its tape."""
    device = devices("torch")
    return device.target, device.tape


@pytest.fixture
def eager(devices):
    return devices("torch").judge


@pytest.fixture
def trees(monkeypatch):
    """What every slot ran, in order: (kv_len, tokens, parents), as drafters observe."""
    seen = {}
    observe = ModelDrafter.observe

    def observed(self, plan, trees, outcome):
        for row, slot in enumerate(plan.slots.tolist()):
            nodes = trees.nodes(row)
            mine = slice(nodes.start, nodes.stop)
            parents = np.where(trees.parents[mine] < 0, -1, trees.parents[mine] - nodes.start)
            ran = int(plan.kv_len[row]), trees.tokens[mine].tolist(), parents.tolist()
            seen.setdefault(slot, []).append(ran)
        observe(self, plan, trees, outcome)

    monkeypatch.setattr(ModelDrafter, "observe", observed)
    return seen


def requests_for(texts, temperature, lengths=(22, 12, 17)):
    some = zip(texts, lengths, strict=False)
    return wanted([text[:12] for text, _ in some], lengths[: len(texts)], temperature)


@pytest.mark.parametrize(
    ("device", "shape", "temperature"),
    [
        *(("torch", shape, 0.8) for shape in (OFF, CHAIN, TREE)),
        ("jax", ON_XLA, 0.8),
        *(
            pytest.param(*cell, marks=SLOW)
            for cell in (
                *(("torch", ONE, 0.8), ("torch", OFF, 0.0), ("torch", BEST, 0.0)),
                *(("jax", OFF, 0.0), ("jax, chains", CHAIN, 0.8), ("jax, chains", OFF, 0.0)),
            )
        ),
    ],
)
def test_texts_and_trees_are_those_without_overlap(
    devices, learned, trees, device, shape, temperature
):
    target, judge, *_ = devices(device)
    requests = requests_for(learned[1][: 3 if device == "torch" else 2], temperature)
    expected, _ = answered(judge, requests, overlap=False, **shape)
    before = {slot: list(ran) for slot, ran in trees.items()}
    trees.clear()
    texts, stats = answered(target, requests, overlap=True, **shape)
    assert tokens(texts) == tokens(expected)
    # All but prompts, the steps after them and the last ones.
    assert stats.carried > 0.6 * stats.steps > 4
    assert trees.keys() == before.keys()
    for slot, ran in trees.items():
        # A row that has ended runs once more at most.
        assert ran[: len(before[slot])] == before[slot]
        assert len(ran) - len(before[slot]) in (0, 1)
    accepted = [deltas[-1].stats.accepted for deltas in texts]
    assert accepted == [deltas[-1].stats.accepted for deltas in expected]
    assert not any(accepted) if shape is OFF else sum(accepted) > 10


KINDS = {
    1: {"repetition_penalty": 1.2},
    2: {"logprobs": 2, "top_k": 5},
    3: {"top_p": 0.7},
    5: {"logit_bias": ((9, 3.0),), "min_tokens": 4},
}
"""By request; on XLA those of 2 and 5 are carried, the others' steps are looked at first."""


def crowd(texts):
    """More requests than slots, of other lengths each, with every sampling parameter."""
    return [
        make_request(
            text[: 12 + n], max_tokens=9 + 5 * (n % 4), ignore_eos=True,
            temperature=0.8 * (n % 3 > 0), seed=n, **KINDS.get(n, {}),
        )
        for n, text in enumerate(texts)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "shape", "pause"),
    [
        ("torch", BEST, 0),
        *(
            pytest.param(*cell, marks=SLOW)
            for cell in (
                *(("torch", OFF, 0), ("torch", CHAIN, 3)),
                *(("jax", ON_XLA, 0), ("jax, chains", CHAIN, 0)),
            )
        ),
    ],
)
def test_requests_that_come_and_go(devices, learned, device, shape, pause):
    """Also rows with parameters and reports, prompts between rounds, and waiting for a slot."""
    target, judge, *_ = devices(device)
    requests = crowd(np.concatenate([learned[1][:7], learned[1][:2]]))
    expected, _ = answered(judge, requests, pause, overlap=False, **shape)
    texts, stats = answered(target, requests, pause, overlap=True, **shape)
    assert tokens(texts) == tokens(expected)
    logprobs = [
        [(entry.token, [token for token, _ in entry.top]) for entry in reports(deltas)[2]]
        for deltas in (texts, expected)
    ]
    assert logprobs[0] == logprobs[1] and [token for token, _ in logprobs[0]] == tokens(texts)[2]
    assert stats.carried > 0.15 * stats.steps


@SLOW
@pytest.mark.parametrize("device", ["jax", "jax, chains"])
@pytest.mark.parametrize(("kind", "carried"), [(1, False), (2, True), (3, False), (5, True)])
def test_rows_that_are_carried_on_xla(devices, learned, device, kind, carried):
    target, shape = devices(device).target, ON_XLA if device == "jax" else CHAIN
    requests = wanted([learned[1][0][:12]], 9, 0.8, **KINDS[kind])
    texts, stats = answered(target, requests, overlap=True, **shape)
    assert (stats.carried > 0) == carried
    assert tokens(texts) == tokens(answered(target, requests, overlap=False, **shape)[0])


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(OFF, marks=SLOW),
        NGRAM,
        pytest.param(CHAIN, marks=SLOW),
    ],
)
def test_what_is_looked_at_first_says_the_same(slow, eager, learned, shape):
    """Draft tokens from the text and grammars, which only the host knows, beside penalties, cuts
    and reports, which the device does (decision 0022).
    """
    grammar = eager.compile(Grammar.regex("[ -~]{60,}"))
    kinds = [
        {"grammar": grammar},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"top_p": 0.8, "min_p": 0.01},
        {"logprobs": 2, "presence_penalty": 0.5},
    ]
    requests = [
        make_request(
            learned[1][n][:12], max_tokens=10 + 7 * n, ignore_eos=True, seed=n,
            temperature=0.8 * (n < 3), **kind,
        )
        for n, kind in enumerate(kinds)
    ]  # fmt: skip
    expected, _ = answered(eager, requests, overlap=False, **OFF)
    texts, stats = answered(slow[0], requests, overlap=True, **shape)
    assert tokens(texts) == tokens(expected)
    # From the grammar's end on; no step that has draft tokens from the text.
    assert (stats.carried > 5) == (shape is not NGRAM)
    if shape is CHAIN:
        assert sum(deltas[-1].stats.accepted for deltas in texts) > 0


@SLOW
@pytest.mark.parametrize("width", [1, 2])
def test_wishes_that_change_from_step_to_step(slow, eager, learned, monkeypatch, width):
    """None at all now and then, and deeper ones than there is room for: looked at first."""
    monkeypatch.setattr(rounds, "LEVELS", 1)
    requests = requests_for(learned[1], 0.0, (40, 33, 37))
    expected, _ = answered(eager, requests, overlap=False, **OFF)
    runner = slow[0].executor.rounds.runner
    runner.future = with_room(runner.future.state, 0, 0)  # Room is made anew.
    runner.programs.forget()
    monkeypatch.setattr(build_drafting, "FixedPolicy", lambda *_: FixedPolicy(5, 5))
    deep = drafting(5, 5, width, "EAGLE")
    texts, stats = answered(slow[0], requests, overlap=True, **deep)
    assert tokens(texts) == tokens(expected)
    assert runner.future.levels == 5
    assert stats.carried > 5 and stats.accepted > 5


class Resting(FixedPolicy):
    """Draft tokens in the first steps of an engine, and where texts have got long, none between."""

    def __init__(self, first, again=10**6):
        super().__init__(2, 2)
        object.__setattr__(self, "first", iter(range(first)))
        object.__setattr__(self, "again", again)

    def decide(self, slots, kv_len, constrained=False):
        if next(self.first, None) is not None or min(kv_len) >= self.again:
            return super().decide(slots, kv_len, constrained)
        return Decision("not now", (Budget(0, 0, "not now"),) * len(slots))


@pytest.mark.parametrize(
    ("device", "shape", "first", "carried"),
    [
        *(("torch", BOTH, 8, 15), ("jax", ON_XLA, 0, 40)),
        *(
            pytest.param(*cell, marks=SLOW)
            for cell in (
                *(("torch", CHAIN, 0, 50), ("torch", BOTH, 0, 25)),
                *(("jax", ON_XLA, 8, 40), ("jax, chains", CHAIN, 0, 40)),
                ("jax, chains", CHAIN, 8, 40),
            )
        ),
    ],
)
def test_a_head_that_rested_drafts_as_if_it_had_not(
    devices, learned, monkeypatch, device, shape, first, carried
):
    """Whether steps had extended it before: all that it missed is kept on the device."""
    target, judge, *_ = devices(device)
    monkeypatch.setattr(build_drafting, "FixedPolicy", lambda *_: Resting(first, again=40))
    requests = requests_for(learned[1], 0.0, (60, 60))
    expected, before = answered(judge, requests, overlap=False, **shape)
    texts, stats = answered(target, requests, overlap=True, **shape)
    assert tokens(texts) == tokens(expected)
    assert stats.carried >= carried and (device == "torch" or stats.carried > 0.8 * stats.steps)
    assert stats.accepted > 0.9 * before.accepted > 10


def test_steps_without_draft_tokens_begin_early_too(slow, eager, learned, monkeypatch):
    """And are exactly plain ones: the model does not follow them."""
    monkeypatch.setattr(build_drafting, "FixedPolicy", lambda *_: Resting(8))
    requests = requests_for(learned[1], 0.8, (40, 40, 40))
    expected, _ = answered(eager, requests, overlap=False, **OFF)
    wanted, ask = [], ModelDrafter.on_device_draft

    def noted(self, plan):
        wanted.append(ask(self, plan))
        return wanted[-1]

    monkeypatch.setattr(ModelDrafter, "on_device_draft", noted)
    texts, stats = answered(slow[0], requests, overlap=True, **CHAIN)
    assert tokens(texts) == tokens(expected)
    assert stats.carried > 0.7 * stats.steps > 14
    assert wanted[-1] is None


def events_of(device, patch):
    """Return a list that gets, while `patch` holds, every verb of a step that the engine asks for,
    and how many rounds were begun, and on a tape not done, when it was and after it.
    """
    events, made, tape = [], device.target.executor, device.tape

    def now():
        return device.dispatched() if tape is None else tape.launched - tape.done

    for verb in ("begin", "begin_after", "finish"):
        call = getattr(made, verb)

        def noted(step, *args, call=call, verb=verb):
            before = now()
            result = call(step, *args)
            events.append((verb, before, now()))
            return result

        patch.setattr(made, verb, noted)
    return events


def test_the_next_step_is_begun_before_this_one_is_read(devices, learned, monkeypatch):
    """In every step but the first round and the last, and two are never read in the wrong order."""
    device = devices("torch")
    events = events_of(device, monkeypatch)
    requests = requests_for(learned[1], 0.0, [20])
    _, stats = answered(device.target, requests, overlap=True, **CHAIN)
    names = [name for name, *_ in events]
    first = names.index("begin_after") - 1
    # The prompt, then one round that the host fills in, then nothing but carried ones.
    assert names[:first] == ["begin", "finish"]
    carried = names.count("begin_after")
    assert names[first : first + 1 + 2 * carried] == ["begin", *["begin_after", "finish"] * carried]
    assert stats.carried == carried > 3
    # When a step is carried, the one before has not been done; then both have not.
    assert {event[1:] for event in events if event[0] == "begin_after"} == {(1, 2)}
    assert device.tape.launched == device.tape.done


@pytest.mark.parametrize("device", ["jax", pytest.param("jax, chains", marks=SLOW)])
def test_on_xla_too_and_each_is_one_dispatch(devices, learned, monkeypatch, device):
    """A last one that may have no draft token is begun when the one before is read, which could end
    the answer.
    """
    device, shape = devices(device), ON_XLA if device == "jax" else CHAIN
    events = events_of(device, monkeypatch)
    answered(device.target, requests_for(learned[1], 0.8)[:1], overlap=True, **shape)
    names = [name for name, *_ in events]
    first = names.index("begin_after")
    last = len(names) - (3 if names[-2] == "begin" else 1)
    assert names[first:last] == ["begin_after", "finish"] * ((last - first) // 2)
    assert names[last:] in (["finish"], ["finish", "begin", "finish"])
    counts = np.array([n for name, _, n in events[first:last] if name == "begin_after"])
    assert (np.diff(counts) == 1).all() and len(counts) > 3


def test_without_the_option_nothing_is_carried(slow, eager, learned):
    requests = requests_for(learned[1], 0.8)
    texts, stats = answered(slow[0], requests, overlap=False, **CHAIN)
    assert stats.carried == 0
    assert tokens(texts) == tokens(answered(eager, requests, overlap=False, **CHAIN)[0])


def test_an_executor_without_rounds_is_looked_at_step_by_step(eager, learned):
    _, stats = answered(eager, requests_for(learned[1], 0.0), overlap=True, **CHAIN)
    assert stats.carried == 0


def test_stop_tokens_end_where_they_should(slow, eager, learned):
    """The step that runs on when a text has ended is dropped, and its pages are used again."""
    plain = requests_for(learned[1], 0.0, [40] * 3)
    output_tokens = tokens(answered(eager, plain, overlap=False, **OFF)[0])
    requests = [
        replace(request, stopping=replace(request.stopping, stop_tokens=(text[5 + 2 * n],)))
        for n, (request, text) in enumerate(zip(plain, output_tokens, strict=True))
    ]
    expected, _ = answered(eager, requests, overlap=False, **CHAIN)
    texts, stats = answered(slow[0], requests, overlap=True, **CHAIN)
    assert tokens(texts) == tokens(expected)
    assert [deltas[-1].finish for deltas in texts] == [Finish.STOP] * 3
    assert stats.carried > 2


def test_a_row_that_is_not_finite_ends_alone(slow, learned, monkeypatch):
    """Its logits are gone when that is noticed: the next round has run over them."""
    target, _ = slow
    rounds_of = target.executor.rounds.runner
    accept = rounds_of.kernels.accept
    requests = requests_for(learned[1], 0.0, (30, 30, 30))
    expected = tokens(answered(target, requests, overlap=True, **OFF)[0])

    def spoiled(logits, noise, *rest):
        # A row whose root is at output position 9 has no choice there.
        broken = (noise.positions == 9) & (noise.seeds == 1)
        return accept(logits.masked_fill(broken[:, None], torch.nan), noise, *rest)

    monkeypatch.setattr(rounds_of, "kernels", replace(rounds_of.kernels, accept=spoiled))
    rounds_of.programs.forget()
    try:
        texts, stats = answered(target, requests, overlap=True, **OFF)
    finally:
        monkeypatch.undo()
        rounds_of.programs.forget()
    output_tokens = tokens(texts)
    assert output_tokens[0] == expected[0] and output_tokens[2] == expected[2]
    assert output_tokens[1] == expected[1][:9]
    assert texts[1][-1].finish == Finish.ERROR and "not finite" in texts[1][-1].error
    assert stats.carried > 10


def test_what_start_up_captured_is_what_runs(folder, learned, monkeypatch):
    """The head and overlap come before the captures: neither voids them afterwards."""
    tape, progress = Tape(), []
    on_tape(monkeypatch, tape)
    shape = drafting(2, 2, 1, "EAGLE")
    small = {"chunked_prefill_size": 32, "context": 128, "max_sequences": 2, "overlap": True}
    config = opened_config(folder, learned[0], **small, **shape)
    with closing(open_target(config, lambda *news: progress.append(news))) as target:
        ready = set(target.executor.describe()["captured"])
        sizes = declared(target.executor.limits, DraftShape(nodes=2, width=1, depth=2))
        assert ready == set(sizes)
        plain = {size[:4] for size in sizes if not (size.shaping or size.masked)}
        assert plain == {
            (rows, *rest)
            for rows in (1, 2)
            for rest in ((1, 0, 0), (3, 0, 0), (2, 1, 1), (3, 2, 1))
        }
        last = [news for news in progress if news[0] == "preparing step sizes"][-1]
        assert last[1:] == (len(sizes), len(sizes))
        _, stats = answered(target, requests_for(learned[1], 0.0, (30, 17)), overlap=True)
        assert stats.carried > 5
        captured = target.executor.describe()["captured"]
        assert ready == set(captured)
        assert tape.captures == len(captured)  # None of them twice.


class EagerPrograms(dict):
    """Programs of which each runs as it is instead of being replayed."""

    sealed = False

    def __init__(self, work):
        self.work = work

    def __missing__(self, size):
        return partial(self.work, size)


def test_the_walk_through_rounds_is_counted(slow, learned, capsys, monkeypatch):
    """Of a second request, as in service, where all sizes were made and captured before the first.
    The program runs as it is: a replay opens nothing of it.
    """
    target, _ = slow
    engine = make_engine(target, replace(target.config, overlap=True, **CHAIN))
    engine.submit(requests_for(learned[1], 0.0, [30])[0], lambda news: None)
    while engine.step_once():
        pass
    news = []
    engine.submit(requests_for(learned[1], 0.0, [30])[0], news.append)
    for _ in range(3):  # The prompt, and the first steps of the slot.
        engine.step_once()
    before = engine.stats().carried
    runner = target.executor.rounds.runner
    monkeypatch.setattr(runner, "programs", EagerPrograms(runner.work))
    with Walk() as walk:
        while not (news and news[-1].finish):
            engine.step_once()
    carried = engine.stats().carried - before
    engine.shutdown()
    with capsys.disabled():
        print(f"\nOne token through captured rounds with a draft head opens:\n{walk.listing()}")
    assert carried > 3
    assert "executors/torch/captured/drafting.py" in walk.calls
    assert walk.files <= FILES and walk.statements <= STATEMENTS, walk.listing()
