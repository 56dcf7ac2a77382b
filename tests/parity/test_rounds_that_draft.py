"""Draft models at the end of captured rounds, against the same models pass by pass: every
method x shape x page size x temperature, the texts those of plain decoding.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build import drafting as build_drafting
from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.client.completion import make_request
from forerun.constrain.grammar import Grammar
from forerun.control.policy import Budget, Decision, FixedPolicy
from forerun.drafters.confidence import Confidence
from forerun.engine.chunked_prefill import PromptPace
from forerun.executors.torch.captured.round import CapturedRound
from forerun.executors.torch.sizes import Size
from tests.covering import every, rarely, spread, values
from tests.models import tiny
from tests.parity.heads import SWITCHES, RandomHead, opened
from tests.parity.tape import Tape, on_tape, taped
from tests.worlds.answers import (
    OFF,
    RecordedDrafts,
    answered,
    counts,
    drafting,
    plain,
    reports,
    same_drafts,
    tokens,
    wanted,
)
from tests.worlds.draft_models import BLIND, CONFIDENT, METHODS, PAIRED, configured, make

HEADS = "EAGLE", "NAIVE"
"""Of a head that has learned: see `learned`."""
NAIVE = {
    "speculative_algorithm": "NAIVE",
    "speculative_num_steps": None,
    "speculative_num_draft_tokens": None,
}
SHAPES = {
    "one": drafting(1, 1, 1),
    "chain": drafting(4, 4, 1),
    "tree": drafting(12, 4, 4),
    "whole tree": drafting(9, 3, 3),
}
"""Deeper than there are prediction layers."""
KINDS = {
    "nothing": {},
    "penalties": {"repetition_penalty": 1.05, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "cut-offs": {"top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "bias": {"logit_bias": ((9, 1.0), (11, -2.0))},
    "early stop tokens": {"min_tokens": 20, "eos": tuple(range(100, 200))},
    "log-probabilities": {"logprobs": 3},
    "all of it": {
        "repetition_penalty": 1.05,
        "top_p": 0.95,
        "logprobs": 0,
        "presence_penalty": 0.1,
    },
}
GRAMMAR = Grammar.regex("[ -~]{60,}")
PAGES, TEMPERATURES = (1, 16, 64), (0.0, 0.8, 1.0)
MOST = {"chunked_prefill_size": 128, "context": 192, "max_sequences": 8}


def shape_of(method, shape):
    """Changes of EngineConfig; NAIVE drafts in one shape alone."""
    return NAIVE if method == "NAIVE" else SHAPES[shape]


@pytest.fixture(scope="module")
def targets(tmp_path_factory, folder, learned):
    """By method and page size: with captured rounds, without them, and the tape."""
    opened_, made = {}, []

    def target_of(method, page, **changes):
        made[:] = made or [make(tmp_path_factory.mktemp("made"))]
        return open_target(configured(made[0], method, page, **changes))

    def of(method, page=16):
        key = "a head" if method in HEADS else method, page
        if key in opened_:
            return opened_[key]
        tape, most = Tape(), MOST | {"page_size": page}
        if method in HEADS:
            rounds = taped(folder, learned[0], tape, True, **most)
            eager = opened(folder, learned[0], **most)
        else:
            with pytest.MonkeyPatch.context() as patch:
                on_tape(patch, tape, warm=False)
                rounds = target_of(method, page, overlap=True)
            rounds = replace(rounds, config=replace(rounds.config, overlap=False))
            eager = target_of(method, page)
        opened_[key] = rounds, eager, tape
        return opened_[key]

    yield of
    for rounds, eager, _ in opened_.values():
        rounds.close()
        eager.close()


BEGIN = np.random.default_rng(3).integers(3, 300, 70).astype(np.int32)
PROMPTS = [BEGIN[:9], BEGIN[:1], BEGIN[20:50], BEGIN, BEGIN, np.append(BEGIN[:64], np.int32(7))]
"""Some begin as others do, so that their pages are found again."""


def requests_for(temperature, length=12, prompts=PROMPTS):
    return wanted(prompts, [length + n % 5 for n in range(len(prompts))], temperature)


def of_every_kind(texts, temperature, kinds=KINDS, length=18, grammar=None):
    """A request of every kind, after prompts whose answers the head has read."""
    return [
        make_request(
            texts[2 * n % len(texts)][:12], max_tokens=length + n, temperature=temperature, seed=n,
            ignore_eos="eos" not in options, grammar=grammar, **options,
        )
        for n, options in enumerate(kinds.values())
    ]  # fmt: skip


@pytest.fixture
def noted(monkeypatch):
    # How prompts are cut beside rows that decode depends on time.
    monkeypatch.setattr(PromptPace, "bound", lambda pace, room, alone: room)
    return RecordedDrafts(monkeypatch)


def priced(monkeypatch, observe=lambda what: None):
    """Trees that a round grows are priced by what was counted before it: the counts stay, and what
    would be counted is observed.
    """
    known, random = Confidence(), np.random.default_rng(2)
    for tenth in random.random(400):
        known.learn(bool(tenth * 100 % 2 < 1), int(tenth * 1000 % 3), tenth, tenth * 1e4 % 3 < 1)
    monkeypatch.setattr(Confidence, "__init__", lambda self: vars(self).update(vars(known)))
    monkeypatch.setattr(Confidence, "learn", lambda self, *what: observe(what))


@pytest.mark.parametrize(
    ("method", "shape", "page", "temperature"),
    [
        ("STANDALONE", "chain", 1, 0.8),  # Whose roots wait for the next step.
        *rarely(
            every([*METHODS, "EAGLE"], SHAPES, PAGES, TEMPERATURES),
            [
                *(("NEXTN, by depth", "tree", 16, 1.0), ("EAGLE", "one", 16, 0.8)),
                *(("EAGLE", "whole tree", 16, 0.8), ("EAGLE", "tree", 16, 0.0)),
            ],
        ),
    ],
)
def test_drafts_and_texts_are_those_of_single_passes(
    targets, noted, learned, monkeypatch, method, shape, page, temperature
):
    outcomes = []
    priced(monkeypatch, outcomes.append)
    rounds, eager, _ = targets(method, page)
    # One draft token a step: three times the steps, so that as many can be right.
    head = method == "EAGLE"
    prompts = [text[:12] for text in learned[1][:3]] if head else PROMPTS
    requests = requests_for(temperature, 36 if shape == "one" else 22 if head else 12, prompts)
    changes = SHAPES[shape]
    (actual, _), drafts, few = noted.during(answered, rounds, requests, 3, **changes)
    less = Counter((*what[:2], round(what[2], 3), what[3]) for what in outcomes)
    outcomes.clear()
    (expected, _), others, many = noted.during(answered, eager, requests, 3, **changes)
    more = Counter((*what[:2], round(what[2], 3), what[3]) for what in outcomes)
    assert tokens(actual) == tokens(expected) == plain(eager, requests)
    assert counts(actual) == counts(expected)
    same_drafts(drafts, others, 2e-3)
    able = temperature or method not in BLIND
    # A map of 64 tokens is right less often; a head that has learned is, but for hot texts.
    least = 2 if method in PAIRED else 15 if head and temperature < 1 else 5
    assert sum(accepted for _, accepted in counts(actual)) > (least if able else -1)
    assert few < many / 2
    # Of a last draft that nothing is left to verify rounds count the outcome too, and of a node
    # whose children are no part of a full tree they do not.
    assert (more - less).total() <= (shape.endswith("tree")) and bool(more) == (method in CONFIDENT)


@pytest.mark.parametrize(
    ("page", "temperature", "overlap"),
    rarely(every(PAGES, TEMPERATURES, [False, True]), [(64, 0.8, False)]),
)
def test_rows_of_every_kind_are_those_of_plain_decoding(
    targets, learned, temperature, page, overlap
):
    """NAIVE: verify, accept, commit, draft-extend and the next draft are one program, whatever the
    sampler is needed.
    """
    rounds, eager, _ = targets("NAIVE", page)
    requests = of_every_kind(learned[1], temperature)
    expected, _ = answered(eager, requests, **OFF)
    texts, _ = answered(rounds, requests, overlap=overlap, **NAIVE)
    assert tokens(texts) == tokens(expected)
    if not overlap:  # A step more may run where a text has ended.
        assert counts(texts) == counts(answered(eager, requests, **NAIVE)[0])
    assert sum(accepted for _, accepted in counts(texts)) > 5
    for mine, theirs in zip(reports(texts), reports(expected), strict=True):
        assert [entry.token for entry in mine] == [entry.token for entry in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize(
    ("page", "temperature"), rarely(every(PAGES, TEMPERATURES), [(1, 0.0)], values)
)
def test_texts_under_a_grammar_are_those_of_plain_decoding(targets, learned, temperature, page):
    rounds, eager, _ = targets("NAIVE", page)
    grammar = eager.compile(GRAMMAR)
    requests = of_every_kind(learned[1], temperature, length=26, grammar=grammar)
    texts, _ = answered(rounds, requests, **NAIVE)
    assert tokens(texts) == plain(eager, requests)
    # The draft token is one that the grammar allows, as where every pass is run apart, and the same
    # but for a rounding error of the head's.
    alone, _ = answered(eager, requests, **NAIVE)
    mine, single = (np.array(counts(each)).sum(0) for each in (texts, alone))
    assert np.abs(mine - single).max() <= 2 and min(mine[1], single[1]) > 3


# --- what a step asks for ------------------------------------------------------------------------


@pytest.fixture
def seen(noted, monkeypatch):
    """() -> how often it was read from the device and waited for it, and a model was asked for a
    pass.
    """
    reads, waits, read = [], [], CapturedRound.read
    for name in ("cpu", "item", "tolist", "__bool__", "__int__", "__float__"):
        call = getattr(torch.Tensor, name)

        def counting(*args, call=call):
            reads.append(1)
            return call(*args)

        monkeypatch.setattr(torch.Tensor, name, counting)
    monkeypatch.setattr(CapturedRound, "read", lambda self: waits.append(1) or read(self))
    return lambda: (len(reads), len(waits), noted.passes)


HELD = {name: (options, False) for name, options in KINDS.items()}
HELD |= {"grammar": ({}, True), "grammar and all of it": (KINDS["all of it"], True)}


STEPS = every(METHODS, ["tree", "chain"], ["nothing"]) + every(["NAIVE"], ["one"], HELD)


@pytest.mark.parametrize(
    ("method", "shape", "kind"),
    rarely(
        STEPS, [("DFLASH", "chain", "nothing"), ("NAIVE", "one", "grammar and all of it")], values
    ),
)
def test_a_step_is_one_replay_and_one_wait(targets, learned, seen, method, shape, kind):
    """Nothing else is launched, nothing else is read: no pass of the model, no logits."""
    rounds, _, tape = targets(method, 64 if method == "NAIVE" else 16)
    changes, (options, held) = shape_of(method, shape), HELD[kind]
    if method == "NAIVE":
        grammar, kinds = (
            rounds.compile(GRAMMAR) if held else None,
            {kind: options, "again": options},
        )
        requests = [
            request
            for temperature in (0.0, 0.8)
            for request in of_every_kind(learned[1], temperature, kinds, 20, grammar)
        ]
    else:
        requests = requests_for(0.8, 15)[:3]
    for _ in range(2):
        answered(rounds, requests, 0 if method == "NAIVE" else 3, **changes)  # Captures what runs.
    engine = make_engine(rounds, replace(rounds.config, **changes))
    for request in requests if method == "NAIVE" else requests[:1]:
        engine.submit(request, lambda news: None)
    engine.step_once()  # Prompts,
    engine.step_once()  # and the step whose draft tokens they have brought.
    captured = tape.captures
    for _ in range(6 if method == "NAIVE" else 3):
        before, launched, replays = seen(), tape.launched, tape.replays
        assert engine.step_once()
        assert tape.captures == captured
        assert (tape.launched, tape.replays) == (launched + 1, replays + 1)
        assert seen() == (before[0], before[1] + 1, before[2])
    assert engine.stats().accepted > 0 or method in PAIRED
    engine.shutdown()


def test_a_prompt_beside_it_is_what_falls_out(targets, learned, noted):
    """A step in which some row runs its prompt is an eager one, all rows of it."""
    target, _, tape = targets("NAIVE", 64)
    engine = make_engine(target, replace(target.config, **NAIVE))
    first, second = of_every_kind(learned[1], 0.0, {"one": {}, "another": {}}, 30)
    engine.submit(first, lambda news: None)
    for _ in range(4):
        engine.step_once()
    before = tape.launched, noted.passes
    engine.submit(second, lambda news: None)
    engine.step_once()
    assert tape.launched == before[0] and noted.passes > before[1]
    for _ in range(2):
        engine.step_once()
    passes = noted.passes
    engine.step_once()
    assert noted.passes == passes and tape.launched > before[0]
    engine.shutdown()


def test_accept_thresholds_are_decided_on_the_host(targets, learned):
    """No round decides such a row, and what eager steps let pass is let pass beside exact rows."""
    rounds, eager, _ = targets("NAIVE", 64)
    lossy = {"accept_threshold_acc": 0.0}
    kinds = {"lossy": lossy, "exact": {}, "penalised": lossy | {"presence_penalty": 0.1}}
    requests = of_every_kind(learned[1], 1.0, kinds, 24)
    deltas, expected = (answered(each, requests, **NAIVE)[0] for each in (rounds, eager))
    assert tokens(deltas) == tokens(expected) and counts(deltas) == counts(expected)
    for drafted, accepted in (counts(deltas)[0], counts(deltas)[2]):
        assert drafted - 1 <= accepted and accepted >= 10
    without = plain(eager, requests)
    assert tokens(deltas)[1] == without[1] and tokens(deltas)[0] != without[0]


def test_a_slot_forgets_the_biases_of_the_sequence_before(targets, learned):
    """A row that asks for nothing, in such a slot, beside a row that asks for something."""
    rounds, eager, _ = targets("NAIVE", 64)
    biased = {"logit_bias": tuple((token, 30.0) for token in range(3, 60))}
    answered(rounds, of_every_kind(learned[1], 0.0, {"biased": biased}), **NAIVE)
    requests = of_every_kind(learned[1], 0.0, {"nothing": {}, "biased": biased})
    assert tokens(answered(rounds, requests, **NAIVE)[0]) == plain(eager, requests)


# --- rounds that go on from each other, rows that come and go ------------------------------------


@pytest.mark.parametrize(
    ("method", "shape", "page", "temperature"),
    rarely(
        every(METHODS, ["chain", "tree"], [1, 16], [0.0, 0.8]),
        [("DFLASH", "tree", 16, 0.8)],
        values,
    ),
)
def test_with_overlap(targets, method, shape, page, temperature):
    """The next round begins before this one is read, on what it leaves on the device."""
    rounds, eager, tape = targets(method, page)
    requests = requests_for(temperature)
    expected, _ = answered(eager, requests, 3, **SHAPES[shape])
    texts, stats = answered(rounds, requests, 3, overlap=True, **SHAPES[shape])
    assert tokens(texts) == tokens(expected)
    assert stats.carried > 0.3 * stats.steps and tape.launched == tape.done
    assert [accepted for _, accepted in counts(texts)] == [
        accepted for _, accepted in counts(expected)
    ]


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


def firsts(drafts):
    """The first token proposed behind each text."""
    return {where: each[-1].tokens[0] for where, each in drafts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_rows_come_go_and_rest(targets, noted, learned, monkeypatch, width):
    """Also prompts between rounds, rows the device cannot decide, and wishes for deeper trees than
    were grown ahead: these are as deep as they are, so where both draft the likeliest is compared.
    """
    rounds, eager, _ = targets("EAGLE")
    requests = mixed(learned[1])  # Of which some wait for a slot.
    with monkeypatch.context() as patch:
        patch.setattr(build_drafting, "FixedPolicy", lambda *_: Uneven())
        ((actual, _), drafts, few), ((expected, _), others, many) = (
            noted.during(answered, each, requests, 2, **drafting(5, 5, width, "EAGLE"))
            for each in (rounds, eager)
        )
    assert tokens(actual) == tokens(expected) == plain(eager, requests)
    mine, theirs = firsts(drafts), firsts(others)
    shared = mine.keys() & theirs.keys()
    assert len(shared) > 20 and all(mine[where] == theirs[where] for where in shared)
    assert few < many


@contextmanager
def pair(folder, dense_head, **changes):
    """The target and a head with captured rounds and without."""
    both = taped(folder, dense_head, **changes), opened(folder, dense_head, **changes)
    try:
        yield both
    finally:
        for target in both:
            target.close()


def compared(both, noted, requests, **changes):
    """Of two targets whose texts and drafts are the same, the passes that ran."""
    ((actual, _), drafts, few), ((expected, _), others, many) = (
        noted.during(answered, each, requests, **changes) for each in both
    )
    assert tokens(actual) == tokens(expected)
    same_drafts(drafts, others)
    return few, many


@pytest.mark.slow
def test_a_lookup_beside_the_head(targets, noted, learned):
    """Rows whose lookup finds something are followed too, though they wish for no draft token."""
    prompts = [np.concatenate([text[:40], text[20:40]]) for text in learned[1][:4]]
    changes = drafting(5, 5, 1, "EAGLE+NGRAM")
    few, many = compared(targets("EAGLE")[:2], noted, wanted(prompts, 30), **changes)
    assert few < many / 3


def test_without_captured_rounds_every_pass_is_run(folder, learned, noted, targets):
    requests = wanted(learned[1][:3, :12], 20)
    eager = targets("EAGLE")[1]
    target = taped(folder, learned[0], disable_cuda_graph=True, **MOST)
    few, many = compared((target, eager), noted, requests, **drafting(3, 3, 1, "EAGLE"))
    target.close()
    assert few == many > 20


@pytest.mark.parametrize("changes", spread(SWITCHES[1:], 1))
def test_every_kind_of_head(folder, dense, noted, tmp_path, changes):
    """A head without any switch is the learned one."""
    prompts = np.random.default_rng(4).integers(0, tiny.VOCAB, (2, 12)).astype(np.int32)
    with pair(folder, RandomHead(dense, tmp_path, changes)) as both:
        few, many = compared(both, noted, wanted(prompts, 12, 0.8), **drafting(7, 3, 2, "EAGLE"))
    assert few < many / 3


def test_a_size_that_needs_too_much_scratch_is_not_drafted_for(targets):
    target = targets("EAGLE")[0]
    answered(target, wanted([PROMPTS[0]], 4), **drafting(1, 1, 1, "EAGLE"))
    fits = target.executor.rounds.runner.drafting.fits
    assert fits(Size(4, 16, levels=5, width=4))
    assert not fits(Size(16, 4, levels=5, width=4))
    assert not fits(Size(1, 4, levels=1, width=10**4))
