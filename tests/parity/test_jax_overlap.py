"""The engine with overlap over rounds on XLA, against the engine without it."""

import numpy as np
import pytest

from forerun.build import drafting as build_drafting
from forerun.client.completion import make_request
from forerun.executors.jax import JaxExecutor
from forerun.executors.jax.program.programs import JaxPrograms
from tests.drafters.served import on_xla
from tests.parity.heads import opened
from tests.parity.test_jax_drafts import LEARNED
from tests.parity.test_torch_overlap import (
    OFF,
    Resting,
    answered,
    asked,
    tokens,
    trees,  # noqa: F401
)

SLOW = pytest.mark.slow
SHAPES = [(7, 3, 2), pytest.param((3, 3, 1), marks=SLOW)]
"""Draft tokens, depth, width."""


def drafting(shape):
    nodes, depth, width = shape
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_num_draft_tokens": nodes + 1,
        "speculative_num_steps": depth,
        "speculative_eagle_topk": width,
    }


@pytest.fixture(scope="module", params=SHAPES)
def target(request, folder, learned, compiled, quickly):
    """The target and head, which compile what they need when they need it; and how they draft.
    Rounds of trees are padded to all of their nodes: sizes differ by rows alone.
    """
    pads = ("nodes", "chunks") if request.param == SHAPES[0] else ()
    shape = drafting(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JaxPrograms, "warm_up", lambda *_: None)
        with on_xla(compiled, warm=True, pads=pads):
            many = LEARNED | shape | {"executor": "jax", "overlap": True}
            made = opened(folder, learned[0], **many)
    yield made, shape
    made.close()


@pytest.mark.parametrize(
    ("drafts", "temperature"), [(True, 0.8), pytest.param(False, 0.0, marks=SLOW)]
)
def test_texts_and_trees_are_those_without_overlap(
    target,
    learned,
    trees,  # noqa: F811
    temperature,
    drafts,
):
    made, shape = target
    changes, requests = shape if drafts else OFF, asked(learned[1], temperature)[:2]
    expected, _ = answered(made, requests, False, **changes)
    before = {slot: list(ran) for slot, ran in trees.items()}
    trees.clear()
    found, stats = answered(made, requests, True, **changes)
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
    assert sum(accepted) > 10 if drafts else not any(accepted)


KINDS = {
    1: {"repetition_penalty": 1.2},
    2: {"logprobs": 2, "top_k": 5},
    3: {"top_p": 0.7},
    5: {"logit_bias": ((9, 3.0),), "min_tokens": 4},
}
"""By request: those of 2 and 5 are carried, what the others' steps say is looked at first."""


@SLOW
def test_requests_that_come_and_go(target, learned):
    """More than there are slots, of other lengths each, with every sampling parameter."""
    made, shape = target
    requests = [
        make_request(
            text[: 12 + n], max_tokens=9 + 5 * (n % 4), ignore_eos=True,
            temperature=0.8 * (n % 3 > 0), seed=n, **KINDS.get(n, {}),
        )
        for n, text in enumerate(learned[1][:8])
    ]  # fmt: skip
    expected, _ = answered(made, requests, False, **shape)
    found, stats = answered(made, requests, True, **shape)
    assert tokens(found) == tokens(expected)
    told = [
        [(r.token, [t for t, _ in r.top]) for news in heard[2] for r in news.logprobs]
        for heard in (found, expected)
    ]
    assert told[0] == told[1] and [token for token, _ in told[0]] == tokens(found)[2]
    assert stats.carried > 5


@SLOW
@pytest.mark.parametrize(("kind", "carried"), [(1, False), (2, True), (3, False), (5, True)])
def test_who_is_carried(target, learned, kind, carried):
    made, shape = target
    request = make_request(
        learned[1][0][:12], max_tokens=9, ignore_eos=True, temperature=0.8, **KINDS[kind]
    )
    found, stats = answered(made, [request], True, **shape)
    assert (stats.carried > 0) == carried
    assert tokens(found) == tokens(answered(made, [request], False, **shape)[0])


def test_a_step_is_begun_before_the_one_before_it_is_read(target, learned, monkeypatch):
    """In all but the first and the last; and each is still one dispatch. A last one that may have
    no draft token is begun when the one before is read, which could end the answer.
    """
    made, shape = target
    events = []
    for verb, name in {"begin": "begin", "begin_after": "carry", "finish": "finish"}.items():
        call = getattr(JaxExecutor, verb)

        def noted(self, step, *args, call=call, name=name):
            result = call(self, step, *args)
            events.append((name, self.programs.dispatches))
            return result

        monkeypatch.setattr(JaxExecutor, verb, noted)
    answered(made, asked(learned[1], 0.8)[:1], True, **shape)
    names = [name for name, _ in events]
    first = names.index("carry")
    last = len(names) - (3 if names[-2] == "begin" else 1)
    assert names[first:last] == ["carry", "finish"] * ((last - first) // 2)
    assert names[last:] in (["finish"], ["finish", "begin", "finish"])
    counts = np.array([count for name, count in events[first:last] if name == "carry"])
    assert (np.diff(counts) == 1).all() and len(counts) > 3


@pytest.mark.parametrize("first", [0, pytest.param(8, marks=SLOW)])
def test_a_head_that_rested_drafts_as_if_it_had_not(target, learned, monkeypatch, first):
    """Plain rounds overlap beside a head, whether it has drafted before or not: what it missed of
    them is kept on the device.
    """
    made, shape = target
    monkeypatch.setattr(build_drafting, "FixedPolicy", lambda *_: Resting(first, again=40))
    requests = asked(learned[1], 0.0, (60, 60))
    expected, before = answered(made, requests, False, **shape)
    found, stats = answered(made, requests, True, **shape)
    assert tokens(found) == tokens(expected)
    assert stats.carried > 0.8 * stats.steps > 40
    assert stats.accepted > 0.9 * before.accepted > 10
