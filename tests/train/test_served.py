"""The engine as the author of what a draft learns from."""

from contextlib import closing

import numpy as np

from forerun.build.engine import load
from forerun.options.config import EngineConfig
from forerun.train.answers import Chat, ContinuationRequest
from forerun.train.served import EngineGenerator
from tests.cli.toys import toy_loaded
from tests.models import tiny


def prompts(count, longest=70):
    random = np.random.default_rng(7)
    lengths = [1, 2, *random.integers(3, longest, count - 2)]
    return [random.integers(3, tiny.VOCAB, n).astype(np.int32) for n in lengths]


def outputs(author, asks):
    for key, ask in enumerate(asks):
        author.submit(key, ask)
    result = {}
    while len(result) < len(asks):
        for key, ids in author.finished():
            assert key not in result
            result[key] = ids.tolist()
    return result


def greedy_chats(folder, count, tokens, device="cpu"):
    """Texts that a model wrote itself, so that there is something to learn."""
    asks = [ContinuationRequest(p, 0.0, i, tokens) for i, p in enumerate(prompts(count, 20))]
    config = EngineConfig(model=str(folder), device=device, context=96, max_sequences=count)
    with closing(load(config)) as loaded:
        served = outputs(EngineGenerator(loaded), asks)
    for key, ids in served.items():
        written = np.concatenate([asks[key].prompt, np.array(ids, np.int32)])
        yield Chat(written, np.arange(len(written)) >= len(asks[key].prompt))


def test_an_output_of_no_use_ends_early():
    """What is ended is what the whole output would have begun with."""
    prompt = np.array([72, 105], np.int32)
    with toy_loaded(EngineConfig(model="toy")) as loaded:
        whole, ended, kept = (
            outputs(EngineGenerator(loaded), [ContinuationRequest(prompt, 0.0, 0, 800, useless)])[0]
            for useless in (None, lambda ids: len(ids) >= 50, lambda ids: False)
        )
    assert kept == whole
    assert 50 <= len(ended) < len(whole) and ended == whole[: len(ended)]
