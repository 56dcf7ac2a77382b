"""Two ranks or four write what one process writes without speculation: every draft method, trees
and chains, a grammar, mixed parameters, alone and in batches that are preempted.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.build.target import open_target
from forerun.measure.prove import _requests as requests_of
from forerun.measure.prove import answers, encode
from tests.covering import covering, every, values
from tests.e2e.drafts import METHODS, Hinted, make
from tests.e2e.test_equality_matrix import TRIALS, configured, shaped


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


def said(target, config, trial, temperature, group):
    """Tokens and log-probabilities of every answer, and the texts of all."""
    prompts = [encode(target, prompt, trial.tokens) for prompt in trial.prompts]
    compiled = target.compile(trial.grammar) if trial.grammar is not None else None
    requests = requests_of(target, prompts, trial, temperature, compiled)
    done = answers(target, config, requests, group)
    tokens = [item.tokens for item in done.done]
    texts = [
        np.concatenate([requests[index].prompt, item.tokens]).tolist()
        for index, item in zip(done.prompts, done.done, strict=True)
    ]
    logprobs = [e.logprob for item in done.done for e in item.logprobs]
    accepted = sum(item.stats.accepted for item in done.done)
    return tokens, logprobs, texts, accepted


def compared(made, method, size, **shares):
    """shares: options beside tp_size."""
    config = configured(made, method, executor="torch", max_sequences=5)
    alone = open_target(replace(config, speculative_algorithm="OFF"))
    shared = open_target(replace(config, tp_size=size, **shares))
    accepted = 0
    try:
        for (name, trial), temperature in zip(TRIALS.items(), (0.0, 0.8), strict=True):
            expected, of_one, texts, _ = said(alone, alone.config, trial, temperature, 1)
            target = shared
            if shared.draft_model is not None:
                model = Hinted(shared.draft_model, (), 0)
                model._texts = texts
                target = replace(shared, draft_model=model)
            for shape in ("chain", "tree"):
                found, logprobs, _, more = said(
                    target, shaped(shared.config, shape), trial, temperature, trial.group
                )
                assert found == expected, (name, shape)
                np.testing.assert_allclose(logprobs, of_one, atol=1e-3)
                accepted += more
    finally:
        alone.close()
        shared.close()
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize(("method", "size"), covering(every(METHODS, [2, 4]), values))
def test_every_draft_method(made, method, size):
    compared(made, method, size)
