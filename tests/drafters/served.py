"""Serving a few prompts by one fresh engine, as tests of draft models do."""

import numpy as np

from forerun.build.engine import make_engine
from forerun.client.completion import complete, make_request

SMALL = {
    "policy": "fixed",
    "max_sequences": 4,
    "chunked_prefill_size": 40,
    "kv_tokens": 1024,
    "page_size": 8,
}
"""Of EngineConfig: longer prompts are read in several steps, and pages are soon used again."""


def asked(prompts, tokens, temperature=0.0, seed=None):
    """Requests of so many tokens each; a prompt's seed is its length, or the one given."""
    return [
        make_request(
            np.asarray(prompt, np.int32),
            max_tokens=tokens,
            ignore_eos=True,
            temperature=temperature,
            seed=len(prompt) if seed is None else seed,
        )
        for prompt in prompts
    ]


def answered(target, config, requests, at_once=None):
    """What became of every request, all at once or `at_once` of them, and the engine's statistics;
    no step fails, and nothing is wrong with the drafter.
    """
    engine = make_engine(target, config)
    engine.start()
    try:
        done = [choices[0] for choices in complete(engine, requests, at_once)]
        assert engine.stats().failed_steps == 0
        assert engine.fault is None
        return done, engine.stats()
    finally:
        engine.shutdown()
