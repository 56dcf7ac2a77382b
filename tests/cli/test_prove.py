from dataclasses import replace

import numpy as np
import pytest

from forerun.client.completion import Completion
from forerun.constrain.grammar import Grammar
from forerun.engine.request import Finish
from forerun.errors import ContextError
from forerun.executors import host_choice
from forerun.executors.toy import ToyExecutor
from forerun.interface.plan import TokenLogprobs
from forerun.measure import mixed
from forerun.measure.prove import Trial, answers, first_difference, prove
from forerun.measure.workload import read_prompts, spread
from forerun.options.config import EngineConfig
from forerun.speculative.sampling import Sampling
from tests.cli.toys import CONFIG, toy_target

TRIAL = Trial(tuple(spread(read_prompts(), 6)), tokens=40, group=3)


def test_the_toy_is_proved():
    with toy_target() as target:
        proof = prove(target, target.config, TRIAL)
    assert proof.holds and proof.identical and proof.speculated
    assert [(run.temperature, run.speculation, run.at_once) for run in proof.runs] == [
        (temperature, side, at_once)
        for temperature in (0.0, 0.8)
        for at_once in (1, 3)
        for side in ("OFF", "NGRAM")
    ]
    for run in proof.runs:
        assert (run.identical, run.answers, run.tokens) == (6, 6, 6 * 40)
        if run.speculation == "OFF":
            assert (run.draft_tokens, run.tokens_per_step) == (0, 1.0)
        elif run.temperature == 0.0:
            assert run.tokens_per_step > 1.1
            assert 0.0 < run.share_accepted <= 1.0


class LeakyToy(ToyExecutor):
    """Scores a root differently when draft tokens hang below it: what `prove` must catch."""

    def begin(self, plan, trees, masks=None):
        round = super().begin(plan, trees, masks)
        best = round.best
        for row in range(trees.rows):
            if len(trees.nodes(row)) > trees.known[row]:
                root = trees.root(row)
                best[root] = 97 + (best[root] - 96) % 16
        return round


def test_a_leak_is_found_at_its_first_token_with_the_gap():
    with toy_target() as target:
        broken = replace(target, executor=LeakyToy(target.memory.limits))
        proof = prove(broken, target.config, TRIAL)
        true = prove(target, replace(target.config, speculative_algorithm="OFF"), TRIAL)
    assert not proof.holds and not proof.identical
    divergence = next(run.divergence for run in proof.runs if run.divergence)
    assert 0 < divergence.position < 40
    # The neighbouring letter is one step down the toy's ramp of half-logits; a to p wraps round.
    assert divergence.found == 97 + (divergence.expected - 96) % 16
    assert divergence.logit_gap in (pytest.approx(0.5, abs=1e-5), None)
    assert divergence.score_gap == divergence.logit_gap
    assert next(run for run in proof.runs if run.speculation == "OFF").divergence is None
    assert true.identical


def test_speculation_off_compares_batches_only():
    with toy_target(replace(CONFIG, speculative_algorithm="OFF")) as target:
        proof = prove(target, target.config, TRIAL)
    assert proof.holds
    assert {run.speculation for run in proof.runs} == {"OFF"}


def test_prompts_that_do_not_fit_are_refused_by_name():
    config = EngineConfig(model="toy", context=64, kv_tokens=256, max_sequences=4)
    with toy_target(config) as target, pytest.raises(ContextError, match=TRIAL.prompts[0].id):
        prove(target, target.config, TRIAL)


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], []) is None


def test_built_in_prompts_are_many_and_of_many_kinds():
    prompts = read_prompts()
    assert len(prompts) >= 80
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({prompt.kind for prompt in prompts}) >= 8
    assert sum(len(prompt.messages) > 2 for prompt in prompts) >= 8
    eight = spread(prompts, 8)
    assert len({prompt.kind for prompt in eight}) >= 6
    assert np.all([prompt.messages[-1]["role"] == "user" for prompt in prompts])


MIXED = replace(
    TRIAL,
    prompts=tuple(spread(read_prompts(), 12)),
    group=6,
    grammar=Grammar.regex("([a-p]{2},){20}[a-p]!"),
    mixed=True,
)


def test_every_parameter_is_proved_with_the_grammar_and_without(monkeypatch):
    calls = []

    def spying(target, config, requests, *rest):
        calls.extend(requests)
        return answers(target, config, requests, *rest)

    monkeypatch.setattr("forerun.measure.prove.answers", spying)
    with toy_target() as target:
        prove(target, replace(target.config, speculative_algorithm="OFF"), replace(MIXED, tokens=2))
        kinds = [mixed.options(index, target.tokenizer) for index in range(9)]
    names = {name for kind in kinds for name in kind}
    wanted = {"repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "n"}
    assert wanted | {"stop", "logprobs", "top_k", "top_p", "min_p"} <= names
    assert {request.grammar is None for request in calls} == {True, False}
    assert {request.n for request in calls} == {1, 2, 3}


def test_equal_tokens_are_not_all_that_is_compared():
    output_tokens = TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.0)))
    one = Completion(tokens=[5], logprobs=[output_tokens], text="a", finish=Finish.STOP)
    assert mixed.report_difference(one, replace(one)) is None
    for other, at in (
        (replace(one, logprobs=[replace(output_tokens, logprob=-0.6)]), 0),
        (replace(one, logprobs=[replace(output_tokens, top=((5, -0.5), (7, -1.0)))]), 0),
        (replace(one, text="b"), 1),
        (replace(one, finish=Finish.LENGTH), 1),
        (replace(one, logprobs=[]), 1),
    ):
        assert mixed.report_difference(one, other) == at


def test_a_leak_that_only_parameters_show_is_found(monkeypatch):
    """No bias and no penalty below the root: without --mixed nothing would show it."""
    right = host_choice.process

    def forgetful(logits, sampling, history, ancestors, mask):
        if ancestors:
            sampling = Sampling(temperature=sampling.temperature, seed=sampling.seed)
        return right(logits, sampling, history, ancestors, mask)

    monkeypatch.setattr(host_choice, "process", forgetful)
    with toy_target() as target:
        assert prove(target, target.config, TRIAL).holds
        proof = prove(target, target.config, replace(MIXED, grammar=None))
    assert not proof.identical
    assert next(run.divergence for run in proof.runs if run.divergence).position > 0
