"""Drafting at the end of a captured round, against the same head asked pass by pass."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.build import drafting
from forerun.build.engine import make_engine
from forerun.client.completion import make_request
from forerun.control.policy import Budget, Decision, FixedPolicy
from forerun.drafters import deferred_extend
from forerun.drafters.model_drafter import ModelDrafter
from forerun.executors import feature_ring
from forerun.executors.torch import TorchEagleModel, TorchExecutor
from forerun.executors.torch.features import TorchStepFeatures
from forerun.executors.torch.triton.record import Size
from tests.covering import spread
from tests.models import tiny
from tests.parity.heads import SWITCHES, Twin, opened, serve
from tests.parity.tape import on_tape


def taped(folder, twin, tape=None, overlap=False, **changes):
    """The target with rounds that a tape captures when they come up, none before. overlap: whether
    they can go on from each other; engines that do so say so.
    """
    with pytest.MonkeyPatch.context() as patch:
        on_tape(patch, tape, warm=False)
        target = opened(folder, twin, overlap=overlap, **changes)
        return replace(target, config=replace(target.config, overlap=False))


@pytest.fixture(scope="module")
def pair(folder, learned):
    """The same target and head, captured and not."""
    most = {"chunked_prefill_size": 128, "context": 128}
    targets = taped(folder, learned[0], **most), opened(folder, learned[0], **most)
    yield targets
    for target in targets:
        target.close()


@pytest.fixture
def seen(monkeypatch):
    """What head drafters propose, and how many passes they ask for. A draft is known by its
    sequence's tokens, since slots are given again, and by how many are cached.
    """
    found = {"drafts": [], "passes": 0}
    propose = ModelDrafter.propose

    def proposed(self, plan):
        drafts = propose(self, plan)
        sequences = [state.text.tokens.tobytes() for state in self._states_of(plan)]
        found["drafts"] += zip(sequences, plan.kv_len.tolist(), drafts, strict=True)
        return drafts

    monkeypatch.setattr(ModelDrafter, "propose", proposed)
    for name in ("extend", "expand"):
        asked = getattr(TorchEagleModel, name)

        def counted(self, *work, asked=asked):
            found["passes"] += 1
            return asked(self, *work)

        monkeypatch.setattr(TorchEagleModel, name, counted)
    return found


def both(pair, seen, run):
    """Of each target: what `run` returns, the drafts proposed, the passes asked for."""
    staging = []
    for target in pair:
        seen["drafts"], seen["passes"] = [], 0
        staging.append((run(target), seen["drafts"], seen["passes"]))
    return staging


def same(one, other, rtol=1e-3):
    """Drafts behind the same texts, but for the last bits of their scores: which requests share a
    step is the engine thread's affair.
    """
    found, wanted = (
        {tuple(where): draft for *where, draft in each if len(draft)} for each in (one, other)
    )
    assert found.keys() == wanted.keys() and found
    for where, expected in wanted.items():
        draft = found[where]
        assert draft.tokens.tolist() == expected.tokens.tolist()
        assert draft.parents.tolist() == expected.parents.tolist()
        np.testing.assert_allclose(draft.score, expected.score, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [
        *(((1, 1, 1), 0.8), ((15, 5, 4), 0.8), ((9, 3, 3), 0.8)),
        *(pytest.param(shape, 0.0, marks=pytest.mark.slow) for shape in ((5, 5, 1), (15, 5, 4))),
    ],
)
def test_drafts_and_texts_are_those_of_single_passes(pair, seen, learned, temperature, shape):
    """shape: draft tokens, depth, width; of one draft token a step, two rows of products a
    sequence.
    """
    nodes, depth, width = shape
    prompts = list(learned[1][:3, :12])

    def run(target):
        return serve(
            target, prompts, "EAGLE", 22, temperature,
            speculative_num_draft_tokens=nodes + 1, speculative_num_steps=depth,
        speculative_eagle_topk=width,
        )  # fmt: skip

    (carried, drafts, few), (behind, expected, many) = both(pair, seen, run)
    assert [item.tokens for item in carried] == [item.tokens for item in behind]
    same(drafts, expected)
    assert sum(item.stats.accepted for item in carried) > 15
    # Prompts are the host's affair, and what is grown below them; then no pass is asked for.
    assert few <= depth <= many / 4


class Uneven(FixedPolicy):
    """Other wishes for every sequence and position, now and then none."""

    def __init__(self):
        super().__init__(5, 5)

    def decide(self, slots, kv_len, constrained=False):
        rows = []
        for slot, cached in zip(slots.tolist(), kv_len.tolist(), strict=True):
            depth = 0 if cached % 11 in (4, 5, 6, 7) else (slot + cached // 3) % 6
            rows.append(Budget(depth, depth, "as it comes", model_depth=depth))
        return Decision("as it comes", tuple(rows))


def mixed(texts):
    """Requests that begin and end at different steps, some of which the device cannot decide."""
    kinds = [
        {},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.8, "seed": 6, "top_k": 9},
        {"repetition_penalty": 1.2},
        {"logprobs": 2},
    ]
    return [
        make_request(
            text[: 12 + 5 * n], max_tokens=15 + 7 * (n % 4), ignore_eos=True, **kinds[n % 5]
        )
        for n, text in enumerate(texts)
    ]


def answered(target, requests, every=5, **changes):
    """What is said to the requests, one more of which comes after `every` steps."""
    shape = {
        "speculative_algorithm": "EAGLE",
        "speculative_num_draft_tokens": 6,
        "speculative_num_steps": 5,
    } | changes
    engine = make_engine(target, replace(target.config, **shape))
    output_tokens, waiting, steps = [[] for _ in requests], list(requests), 0
    while engine.step_once() or waiting:
        if waiting and steps % every == 0:
            engine.submit(waiting[0], output_tokens[-len(waiting)].append)
            waiting = waiting[1:]
        steps += 1
    engine.check()
    return [[token for news in heard for token in news.tokens] for heard in output_tokens]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_rows_come_go_and_rest(pair, seen, learned, monkeypatch, width):
    """Also prompts between rounds, rows the device cannot decide, and wishes for deeper trees than
    were grown ahead: these are as deep as they are, so where both draft the likeliest is compared.
    """
    monkeypatch.setattr(drafting, "FixedPolicy", lambda *_: Uneven())
    texts = learned[1][:8]  # Of which two wait for a slot.

    def run(target):
        return answered(target, mixed(texts), 2, speculative_eagle_topk=width)

    (carried, drafts, few), (behind, expected, many) = both(pair, seen, run)
    monkeypatch.undo()
    assert carried == behind == answered(pair[1], mixed(texts), 2, speculative_algorithm="OFF")
    firsts, others = (
        {tuple(where): draft.tokens[0] for *where, draft in each if len(draft)}
        for each in (drafts, expected)
    )
    shared = firsts.keys() & others.keys()
    assert len(shared) > 20 and all(firsts[where] == others[where] for where in shared)
    assert few < many


class Resting(FixedPolicy):
    """No draft tokens while the longest text has some lengths, then for everybody: by text, so that
    steps that begin early decide alike.
    """

    def decide(self, slots, kv_len, constrained=False):
        if 14 <= kv_len.min() < 60 or 80 <= kv_len.min() < 90:
            return Decision("not now", (Budget(0, 0, "not now"),) * len(slots))
        return super().decide(slots, kv_len)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_plain_rounds_are_caught_up_with(folder, learned, seen, monkeypatch, overlap):
    """Features of plain rounds stay on the device, in a ring that goes round several times, and the
    head drafts in the rest of an answer what it drafts when it is asked pass by pass.
    """
    monkeypatch.setattr(drafting, "FixedPolicy", lambda *_: Resting(5, 5))
    monkeypatch.setattr(feature_ring, "RING_TOKENS", 20)
    monkeypatch.setattr(deferred_extend, "MAX_LAG", 16)
    most = {"chunked_prefill_size": 128, "context": 128}
    pair = taped(folder, learned[0], overlap=overlap, **most), opened(folder, learned[0], **most)
    requests = [
        make_request(text[:12], max_tokens=100, ignore_eos=True, temperature=0.8 * (n % 2), seed=n)
        for n, text in enumerate(learned[1][:3])
    ]

    stored, store = [], TorchStepFeatures.store

    def counted(self):
        stored.append(self.written)
        return store(self)

    monkeypatch.setattr(TorchStepFeatures, "store", counted)
    went, go_on = [], TorchExecutor.begin_after
    monkeypatch.setattr(TorchExecutor, "begin_after", lambda *args: went.append(1) or go_on(*args))

    def run(target):
        return answered(target, requests, 1, overlap=overlap and target is pair[0])

    try:
        (carried, drafts, few), (behind, expected, many) = both(pair, seen, run)
        assert carried == behind == answered(pair[1], requests, 1, speculative_algorithm="OFF")
    finally:
        for target in pair:
            target.close()
    assert sum(stored) > 50, "plain rounds wrote them"
    assert bool(len(went) > 20) == overlap, "each before the one before it was read"
    late = [[each for each in some if each[1] >= 60] for some in (drafts, expected)]
    assert len(late[1]) > 15 and few < many / 2
    firsts, others = (
        {tuple(where): draft.tokens.tolist() for *where, draft in each if len(draft)}
        for each in late
    )
    shared = firsts.keys() & others.keys()
    assert len(shared) > 5
    for where in shared:
        depth = min(len(firsts[where]), len(others[where]))
        assert firsts[where][:depth] == others[where][:depth]


@pytest.mark.slow
def test_a_lookup_beside_the_head(pair, seen, learned):
    """Rows whose lookup finds something are followed too, though they wish for no draft token."""
    repeated = [np.concatenate([text[:40], text[20:40]]) for text in learned[1][:4]]
    requests = [make_request(prompt, max_tokens=30, ignore_eos=True) for prompt in repeated]

    def run(target):
        return answered(target, requests, speculative_algorithm="EAGLE+NGRAM")

    (carried, drafts, few), (behind, expected, many) = both(pair, seen, run)
    assert carried == behind
    same(drafts, expected)
    assert few < many / 3


def test_without_captured_rounds_every_pass_is_asked_for(folder, learned, pair, seen):
    target = taped(folder, learned[0], disable_cuda_graph=True)
    try:
        prompts = list(learned[1][:3, :12])
        staging = both((target, pair[1]), seen, lambda target: serve(target, prompts, "EAGLE", 20))
    finally:
        target.close()
    (alone, drafts, passes), (expected_texts, expected, same_passes) = staging
    assert [item.tokens for item in alone] == [item.tokens for item in expected_texts]
    same(drafts, expected)
    assert passes == same_passes > 20


@pytest.mark.parametrize("changes", spread(SWITCHES[1:], 1))
def test_every_kind_of_head(folder, dense, seen, tmp_path, changes):
    """A head without any switch is the learned one."""
    twin = Twin(dense, tmp_path, changes)
    targets = taped(folder, twin), opened(folder, twin)
    prompts = np.random.default_rng(4).integers(0, tiny.VOCAB, (2, 12)).astype(np.int32)
    try:
        shape = {
            "speculative_num_draft_tokens": 8,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 2,
        }
        staging = both(targets, seen, lambda t: serve(t, list(prompts), "EAGLE", 12, 0.8, **shape))
    finally:
        for target in targets:
            target.close()
    (carried, drafts, few), (behind, expected, many) = staging
    assert [item.tokens for item in carried] == [item.tokens for item in behind]
    same(drafts, expected)
    assert few < many / 3


def test_a_size_that_needs_too_much_scratch_is_not_drafted_for(pair):
    fits = pair[0].executor.rounds.runner.drafting.fits
    assert fits(Size(4, 16, levels=5, width=4))
    assert not fits(Size(16, 4, levels=5, width=4))
    assert not fits(Size(1, 4, levels=1, width=10**4))
