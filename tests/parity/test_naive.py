"""NAIVE on the torch executor: verify, accept, commit, draft-extend and the next draft are one
program, whatever the sampler is asked for, and the text is that of plain decoding.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build.engine import make_engine
from forerun.client.completion import make_request
from forerun.constrain.grammar import Grammar
from forerun.executors.torch import TorchEagleModel
from forerun.executors.torch.captured.round import CapturedRound
from tests.covering import every, rarely, values
from tests.parity.driver import first_is_fast
from tests.parity.heads import opened
from tests.parity.tape import Tape
from tests.parity.test_torch_drafting import taped

MOST = {"chunked_prefill_size": 128, "context": 192, "max_sequences": 8}
NAIVE = {
    "speculative_algorithm": "NAIVE",
    "speculative_num_steps": None,
    "speculative_num_draft_tokens": None,
}
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
PAGES, TEMPERATURES = (1, 16, 64), (0.0, 0.8, 1.0)

GRAMMAR = Grammar.regex("[ -~]{60,}")


@pytest.fixture(scope="module")
def eager(folder, learned):
    target = opened(folder, learned[0], **MOST)
    yield target
    target.close()


@pytest.fixture(scope="module")
def rounds(folder, learned):
    """Targets with captured rounds by page size, and their tapes."""
    made = {}

    def of(page):
        if page not in made:
            tape = Tape()
            made[page] = taped(folder, learned[0], tape, True, page_size=page, **MOST), tape
        return made[page]

    yield of
    for target, _ in made.values():
        target.close()


def requests_of(texts, temperature, kinds=KINDS, length=18, grammar=None):
    """A request of every kind, after prompts whose answers the head has read."""
    return [
        make_request(
            texts[2 * n % len(texts)][:12], max_tokens=length + n, temperature=temperature, seed=n,
            ignore_eos="eos" not in options, grammar=grammar, **options,
        )
        for n, options in enumerate(kinds.values())
    ]  # fmt: skip


def answered(target, requests, **changes):
    """All that is said to the requests, one engine for all."""
    engine = make_engine(target, replace(target.config, **changes))
    heard = [[] for _ in requests]
    for request, news in zip(requests, heard, strict=True):
        engine.submit(request, news.append)
    while engine.step_once():
        pass
    engine.check()
    engine.shutdown()
    return heard


def tokens(heard):
    return [[token for news in mine for token in news.tokens] for mine in heard]


def counts(heard):
    """Draft tokens verified and accepted, by request."""
    return [(mine[-1].stats.draft_tokens, mine[-1].stats.accepted) for mine in heard]


def reports(heard):
    return [[entry for news in mine for entry in news.logprobs] for mine in heard]


@pytest.mark.parametrize(
    ("page", "temperature", "overlap"),
    rarely(
        every(PAGES, TEMPERATURES, [False, True]),
        [(64, 0.8, False)],
    ),
)
def test_texts_are_those_of_plain_decoding(rounds, eager, learned, temperature, page, overlap):
    requests = requests_of(learned[1], temperature)
    plain = answered(eager, requests, speculative_algorithm="OFF")
    found = answered(rounds(page)[0], requests, overlap=overlap, **NAIVE)
    assert tokens(found) == tokens(plain)
    if not overlap:  # A step more may run where a text has ended.
        assert counts(found) == counts(answered(eager, requests, **NAIVE))
    assert sum(accepted for _, accepted in counts(found)) > 5
    for mine, expected in zip(reports(found), reports(plain), strict=True):
        assert [entry.token for entry in mine] == [entry.token for entry in expected]
        for one, other in zip(mine, expected, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize(
    ("page", "temperature"), rarely(every(PAGES, TEMPERATURES), [(1, 0.0)], values)
)
def test_texts_under_a_grammar_are_those_of_plain_decoding(
    rounds, eager, learned, temperature, page
):
    grammar = eager.compile(GRAMMAR)
    requests = requests_of(learned[1], temperature, length=26, grammar=grammar)
    plain = answered(eager, requests, speculative_algorithm="OFF")
    found = answered(rounds(page)[0], requests, **NAIVE)
    assert tokens(found) == tokens(plain)
    # The draft token is one that the grammar allows, as where every pass is asked for, and the same
    # but for a rounding error of the head's.
    mine, single = (
        np.array(counts(each)).sum(0) for each in (found, answered(eager, requests, **NAIVE))
    )
    assert np.abs(mine - single).max() <= 2 and min(mine[1], single[1]) > 3


@pytest.fixture
def counted(monkeypatch):
    """What a step asks of the device beside its program, by name."""
    found = dict.fromkeys(("passes", "reads", "waits"), 0)

    def count(owner, name, kind):
        call = getattr(owner, name)

        def counting(*args, **kwargs):
            found[kind] += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("extend", "expand"):
        count(TorchEagleModel, name, "passes")
    for name in ("cpu", "item", "tolist", "__bool__", "__int__", "__float__"):
        count(torch.Tensor, name, "reads")
    read = CapturedRound.read

    def waited(self):
        found["waits"] += 1
        return read(self)

    monkeypatch.setattr(CapturedRound, "read", waited)
    return found


HELD = {name: (options, False) for name, options in KINDS.items()}
HELD |= {"grammar": ({}, True), "grammar and all of it": (KINDS["all of it"], True)}


@pytest.mark.parametrize("kind", first_is_fast([*HELD][::-1]))
def test_a_step_is_one_replay_and_one_wait(rounds, learned, counted, kind):
    """Nothing else is launched, nothing else is read: no pass of the head, no logits."""
    target, tape = rounds(64)
    options, held = HELD[kind]
    grammar = target.compile(GRAMMAR) if held else None
    kinds = {kind: options, "the same": options}
    requests = [
        request
        for temperature in (0.0, 0.8)
        for request in requests_of(learned[1], temperature, kinds, 20, grammar)
    ]
    for _ in range(2):
        answered(target, requests, **NAIVE)  # Captures what will run.
    engine = make_engine(target, replace(target.config, **NAIVE))
    for request in requests:
        engine.submit(request, lambda news: None)
    engine.step_once()  # Prompts,
    engine.step_once()  # and the step whose draft tokens the prompts' features have brought.
    captured = tape.captures
    for _ in range(6):
        before = dict(counted), tape.launched, tape.replays
        assert engine.step_once()
        assert tape.captures == captured
        assert (tape.launched - before[1], tape.replays - before[2]) == (1, 1)
        assert {name: count - before[0][name] for name, count in counted.items()} == {
            "passes": 0, "reads": 0, "waits": 1,
        }  # fmt: skip
    assert engine.stats().accepted > 0
    engine.shutdown()


def test_a_prompt_beside_it_is_what_falls_out(rounds, learned, counted):
    """A step in which some row runs its prompt is an eager one, all rows of it."""
    target, tape = rounds(64)
    engine = make_engine(target, replace(target.config, **NAIVE))
    first, second = requests_of(learned[1], 0.0, {"one": {}, "another": {}}, 30)
    engine.submit(first, lambda news: None)
    for _ in range(4):
        engine.step_once()
    before = tape.launched, counted["passes"]
    engine.submit(second, lambda news: None)
    engine.step_once()
    assert tape.launched == before[0] and counted["passes"] > before[1]
    for _ in range(2):
        engine.step_once()
    passes = counted["passes"]
    engine.step_once()
    assert counted["passes"] == passes and tape.launched > before[0]
    engine.shutdown()


def test_accept_thresholds_are_decided_on_the_host(rounds, eager, learned):
    """No round decides such a row, and what eager steps let pass is let pass beside exact rows."""
    target, _ = rounds(64)
    lossy = {"accept_threshold_acc": 0.0}
    kinds = {"lossy": lossy, "exact": {}, "penalised": lossy | {"presence_penalty": 0.1}}
    asked = requests_of(learned[1], 1.0, kinds, 24)
    heard = answered(target, asked, **NAIVE)
    expected = answered(eager, asked, **NAIVE)
    assert tokens(heard) == tokens(expected) and counts(heard) == counts(expected)
    for drafted, accepted in (counts(heard)[0], counts(heard)[2]):
        assert drafted - 1 <= accepted and accepted >= 10
    plain = answered(eager, asked, speculative_algorithm="OFF")
    assert tokens(heard)[1] == tokens(plain)[1] and tokens(heard)[0] != tokens(plain)[0]


def test_a_slot_forgets_the_biases_of_the_sequence_before(rounds, eager, learned):
    """A row that asks for nothing, in such a slot, beside a row that asks for something."""
    target, _ = rounds(64)
    biased = {"logit_bias": tuple((token, 30.0) for token in range(3, 60))}
    answered(target, requests_of(learned[1], 0.0, {"biased": biased}), **NAIVE)
    asked = requests_of(learned[1], 0.0, {"nothing": {}, "biased": biased})
    plain = answered(eager, asked, speculative_algorithm="OFF")
    assert tokens(answered(target, asked, **NAIVE)) == tokens(plain)
