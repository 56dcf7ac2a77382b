"""The engine with overlap over captured rounds, against the engine without it.

The tape does what is launched only when somebody waits for it: whatever the host reads too early,
or overwrites too early, shows in the text.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build import drafting
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
from forerun.executors.torch.captured.programs import Programs
from forerun.executors.torch.triton.round_types import with_room
from tests.parity.heads import opened, opened_config
from tests.parity.tape import Tape, on_tape
from tests.parity.test_torch_drafting import taped
from tests.shape.walk import Walk

FILES, STATEMENTS = 28, 2_865
"""Of steps that overlap, with a draft head's chains: the host's half from plan to the last delta,
and the program, which runs as it is (tests/shape/walk.py). Kernels are not counted: tests/twins
stands for them. They may only shrink.
"""

OFF = {"speculative_algorithm": "OFF"}
SHAPES = [OFF] + [
    {
        "speculative_algorithm": "EAGLE",
        "speculative_num_draft_tokens": nodes + 1,
        "speculative_num_steps": depth,
        "speculative_eagle_topk": width,
    }
    for nodes, depth, width in [(1, 1, 1), (3, 3, 1), (9, 3, 4), (9, 3, 3)]
]
"""No drafter; chains; trees of which all, or the best, are verified."""


@pytest.fixture(scope="module")
def slow(folder, learned):
    """The target and head on a device that is slow, and its tape."""
    tape = Tape()
    target = taped(folder, learned[0], tape, True, chunked_prefill_size=128, context=128)
    yield target, tape
    target.close()


@pytest.fixture(scope="module")
def eager(folder, learned):
    target = opened(folder, learned[0], chunked_prefill_size=128, context=128)
    yield target
    target.close()


@pytest.fixture
def trees(monkeypatch):
    """What every slot ran, in order: (kv_len, tokens, parents), as drafters are told."""
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


def answered(target, requests, overlap, pause=0, **changes):
    """What the requests are told, and the engine's statistics. One comes every `pause` steps."""
    engine = make_engine(target, replace(target.config, overlap=overlap, **changes))
    output_tokens, waiting, steps = [[] for _ in requests], list(requests), 0
    busy = True
    while busy or waiting:
        while waiting and steps % max(pause, 1) == 0:
            engine.submit(waiting.pop(0), output_tokens[-1 - len(waiting)].append)
            if pause:
                break
        busy = engine.step_once()
        steps += 1
    engine.check()
    engine.shutdown()
    return output_tokens, engine.stats()


def tokens(output_tokens):
    return [[token for news in heard for token in news.tokens] for heard in output_tokens]


def asked(texts, temperature, lengths=(22, 12, 17)):
    return [
        make_request(text[:12], max_tokens=length, ignore_eos=True, temperature=temperature, seed=n)
        for n, (text, length) in enumerate(zip(texts, lengths, strict=False))
    ]


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [
        *((shape, 0.8) for shape in (OFF, *SHAPES[2:4])),
        pytest.param(SHAPES[1], 0.8, marks=pytest.mark.slow),
        *(pytest.param(shape, 0.0, marks=pytest.mark.slow) for shape in (OFF, SHAPES[4])),
    ],
)
def test_texts_and_trees_are_those_without_overlap(slow, eager, learned, trees, temperature, shape):
    requests = asked(learned[1], temperature)
    expected, _ = answered(eager, requests, False, **shape)
    before = {slot: list(ran) for slot, ran in trees.items()}
    trees.clear()
    found, stats = answered(slow[0], requests, True, **shape)
    assert tokens(found) == tokens(expected)
    # All but prompts, the steps after them and the last ones.
    assert stats.carried > 0.6 * stats.steps > 4
    assert trees.keys() == before.keys()
    for slot, ran in trees.items():
        # A row that has ended runs once more at most.
        assert ran[: len(before[slot])] == before[slot]
        assert len(ran) - len(before[slot]) in (0, 1)
    accepted = [heard[-1].stats.accepted for heard in found]
    assert accepted == [heard[-1].stats.accepted for heard in expected]
    assert not any(accepted) if shape is OFF else sum(accepted) > 10


def crowd(texts):
    """More requests than slots, of other lengths each; two cannot be decided on the device."""
    kinds = {3: {"repetition_penalty": 1.2}, 8: {"logprobs": 2}}
    return [
        make_request(
            text[: 12 + n], max_tokens=9 + 5 * (n % 4), ignore_eos=True,
            temperature=0.8 * (n % 2), seed=n, **kinds.get(n, {}),
        )
        for n, text in enumerate(texts)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "pause"),
    [
        (SHAPES[4], 0),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((OFF, 0), (SHAPES[2], 3))),
    ],
)
def test_requests_that_come_and_go(slow, eager, learned, shape, pause):
    """Also rows with penalties and reports, prompts between rounds, and waiting for a slot."""
    requests = crowd(np.concatenate([learned[1][:7], learned[1][:2]]))
    expected, _ = answered(eager, requests, False, pause, **shape)
    found, stats = answered(slow[0], requests, True, pause, **shape)
    assert tokens(found) == tokens(expected)
    reports = [
        [r.token for news in output_tokens[8] for r in news.logprobs]
        for output_tokens in (found, expected)
    ]
    assert reports[0] == reports[1] == tokens(found)[8]
    assert stats.carried > 0.15 * stats.steps


NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5}


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(OFF, marks=pytest.mark.slow),
        NGRAM,
        pytest.param(SHAPES[2], marks=pytest.mark.slow),
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
    expected, _ = answered(eager, requests, False, **OFF)
    found, stats = answered(slow[0], requests, True, **shape)
    assert tokens(found) == tokens(expected)
    # From the grammar's end on; no step that has draft tokens from the text.
    assert (stats.carried > 5) == (shape is not NGRAM)
    if shape is SHAPES[2]:
        assert sum(heard[-1].stats.accepted for heard in found) > 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_wishes_that_change_from_step_to_step(slow, eager, learned, monkeypatch, width):
    """None at all now and then, and deeper ones than there is room for: looked at first."""
    monkeypatch.setattr(rounds, "LEVELS", 1)
    requests = asked(learned[1], 0.0, (40, 33, 37))
    expected, _ = answered(eager, requests, False, **OFF)
    runner = slow[0].executor.rounds.runner
    runner.future = with_room(runner.future.state, 0, 0)  # Room is made anew.
    runner.programs.forget()
    monkeypatch.setattr(drafting, "FixedPolicy", lambda *_: FixedPolicy(5, 5))
    deep = {"speculative_num_draft_tokens": 6, "speculative_num_steps": 5}
    deep |= {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": width}
    found, stats = answered(slow[0], requests, True, **deep)
    assert tokens(found) == tokens(expected)
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


BOTH = SHAPES[2] | {"speculative_algorithm": "EAGLE+NGRAM"}


@pytest.mark.parametrize(
    ("shape", "first", "carried"),
    [
        pytest.param(SHAPES[2], 0, 50, marks=pytest.mark.slow),
        (BOTH, 8, 15),
        pytest.param(BOTH, 0, 25, marks=pytest.mark.slow),
    ],
)
def test_a_head_that_rested_drafts_as_if_it_had_not(
    slow, eager, learned, monkeypatch, shape, first, carried
):
    """Whether steps had extended it before: all that it missed is kept on the device."""
    monkeypatch.setattr(drafting, "FixedPolicy", lambda *_: Resting(first, again=40))
    requests = asked(learned[1], 0.0, (60, 60))
    expected, before = answered(eager, requests, False, **shape)
    found, stats = answered(slow[0], requests, True, **shape)
    assert tokens(found) == tokens(expected)
    assert stats.carried >= carried
    assert stats.accepted > 0.9 * before.accepted > 10


def test_steps_without_draft_tokens_begin_early_too(slow, eager, learned, monkeypatch):
    """And are exactly plain ones: the model does not follow them."""
    monkeypatch.setattr(drafting, "FixedPolicy", lambda *_: Resting(8))
    requests = asked(learned[1], 0.8, (40, 40, 40))
    expected, _ = answered(eager, requests, False, **OFF)
    wanted, ask = [], ModelDrafter.on_device_draft

    def noted(self, plan):
        wanted.append(ask(self, plan))
        return wanted[-1]

    monkeypatch.setattr(ModelDrafter, "on_device_draft", noted)
    found, stats = answered(slow[0], requests, True, **SHAPES[2])
    assert tokens(found) == tokens(expected)
    assert stats.carried > 0.7 * stats.steps > 14
    assert wanted[-1] is None


def test_the_next_step_is_begun_before_this_one_is_read(slow, learned, monkeypatch):
    """In every step but the first round and the last, and two are never read in the wrong order."""
    target, tape = slow
    events, made = [], target.executor
    for verb, name in {"begin": "begin", "begin_after": "carry", "finish": "look"}.items():
        call = getattr(made, verb)

        def noted(step, *args, call=call, name=name):
            undone = tape.launched - tape.done
            result = call(step, *args)
            events.append((name, undone, tape.launched - tape.done))
            return result

        monkeypatch.setattr(made, verb, noted)
    _, stats = answered(target, asked(learned[1], 0.0, [20]), True, **SHAPES[2])
    names = [name for name, *_ in events]
    first = names.index("carry") - 1
    # The prompt, then one round that the host fills in, then nothing but carried ones.
    assert names[:first] == ["begin", "look"]
    carried = names.count("carry")
    assert names[first : first + 1 + 2 * carried] == ["begin"] + ["carry", "look"] * carried
    assert stats.carried == carried > 3
    # When a step is carried, the one before has not been done; then both have not.
    assert {event[1:] for event in events if event[0] == "carry"} == {(1, 2)}
    assert tape.launched == tape.done


def test_without_the_option_nothing_is_carried(slow, eager, learned):
    requests = asked(learned[1], 0.8)
    found, stats = answered(slow[0], requests, False, **SHAPES[2])
    assert stats.carried == 0
    assert tokens(found) == tokens(answered(eager, requests, False, **SHAPES[2])[0])


def test_an_executor_without_rounds_is_looked_at_step_by_step(eager, learned):
    _, stats = answered(eager, asked(learned[1], 0.0), True, **SHAPES[2])
    assert stats.carried == 0


def test_stop_tokens_end_where_they_should(slow, eager, learned):
    """The step that runs on when a text has ended is dropped, and its pages are used again."""
    plain = asked(learned[1], 0.0, [40] * 3)
    output_tokens = tokens(answered(eager, plain, False, **OFF)[0])
    requests = [
        replace(request, stopping=replace(request.stopping, stop_tokens=(text[5 + 2 * n],)))
        for n, (request, text) in enumerate(zip(plain, output_tokens, strict=True))
    ]
    expected, _ = answered(eager, requests, False, **SHAPES[2])
    found, stats = answered(slow[0], requests, True, **SHAPES[2])
    assert tokens(found) == tokens(expected)
    assert [heard[-1].finish for heard in found] == [Finish.STOP] * 3
    assert stats.carried > 2


def test_a_row_that_is_not_finite_ends_alone(slow, learned, monkeypatch):
    """Its logits are gone when that is noticed: the next round has run over them."""
    target, _ = slow
    rounds_of = target.executor.rounds.runner
    accept = rounds_of.kernels.accept
    requests = asked(learned[1], 0.0, (30, 30, 30))
    expected = tokens(answered(target, requests, True, **OFF)[0])

    def spoiled(logits, noise, *rest):
        # A row whose root is at output position 9 has no choice there.
        broken = (noise.positions == 9) & (noise.seeds == 1)
        return accept(logits.masked_fill(broken[:, None], torch.nan), noise, *rest)

    monkeypatch.setattr(rounds_of, "kernels", replace(rounds_of.kernels, accept=spoiled))
    rounds_of.programs.forget()
    try:
        found, stats = answered(target, requests, True, **OFF)
    finally:
        monkeypatch.undo()
        rounds_of.programs.forget()
    output_tokens = tokens(found)
    assert output_tokens[0] == expected[0] and output_tokens[2] == expected[2]
    assert output_tokens[1] == expected[1][:9]
    assert found[1][-1].finish == Finish.ERROR and "not finite" in found[1][-1].error
    assert stats.carried > 10


def test_what_start_up_captured_is_what_runs(folder, learned, monkeypatch):
    """The head and overlap come before the captures: neither voids them afterwards."""
    tape, told = Tape(), []
    on_tape(monkeypatch, tape)
    shape = {
        "speculative_algorithm": "EAGLE",
        "speculative_num_draft_tokens": 3,
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 1,
    }
    small = {"chunked_prefill_size": 32, "context": 128, "max_sequences": 2, "overlap": True}
    config = opened_config(folder, learned[0], **small, **shape)
    target = open_target(config, lambda *news: told.append(news))
    try:
        ready = set(target.executor.describe()["captured"])
        sizes = declared(target.executor.limits, DraftShape(nodes=2, width=1, depth=2))
        assert ready == set(sizes)
        plain = {size[:4] for size in sizes if not (size.shaping or size.masked)}
        assert plain == {
            (rows, *rest)
            for rows in (1, 2)
            for rest in ((1, 0, 0), (3, 0, 0), (2, 1, 1), (3, 2, 1))
        }
        last = [news for news in told if news[0] == "preparing step sizes"][-1]
        assert last[1:] == (len(sizes), len(sizes))
        _, stats = answered(target, asked(learned[1], 0.0, (30, 17)), True)
        assert stats.carried > 5
        captured = target.executor.describe()["captured"]
        assert ready == set(captured)
        assert tape.captures == len(captured)  # None of them twice.
    finally:
        target.close()


def test_the_walk_through_rounds_is_counted(slow, learned, capsys, monkeypatch):
    """Of a second request, as in service, where all sizes were made and captured before the first.
    The program runs as it is: a replay opens nothing of it.
    """
    target, _ = slow
    engine = make_engine(target, replace(target.config, overlap=True, **SHAPES[2]))
    engine.submit(asked(learned[1], 0.0, [30])[0], lambda news: None)
    while engine.step_once():
        pass
    news = []
    engine.submit(asked(learned[1], 0.0, [30])[0], news.append)
    for _ in range(3):  # The prompt, and the first steps of the slot.
        engine.step_once()
    before = engine.stats().carried
    runner = target.executor.rounds.runner
    monkeypatch.setattr(runner, "programs", Programs(runner.work))
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
