"""Embeddings: hidden states of a prompt, pooled as its chunks run beside others' text."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.engine.pooling import POOLINGS
from forerun.engine.request import Finish, Speculation, Stopping
from forerun.errors import RequestError
from forerun.executors.toy import ToyExecutor
from tests.engine.carrying import CarryingToy
from tests.engine.toys import RecordingSink, ask, finish, limits, make, run

PROMPT = b"A prompt that takes some chunks to read."


def embed(id, prompt=PROMPT, pooling="mean", **more):
    tokens = np.frombuffer(prompt, np.uint8).astype(np.int32)
    return replace(
        ask(id, tokens, **more),
        stopping=Stopping(0),
        speculation=Speculation(enabled=False),
        pooling=pooling,
    )


def states(prompt):
    """float32[T,4], straight from the module docstring of the toy."""
    before = [0, *prompt]
    rows = [(256, x, before[i], sum(prompt[: i + 1]) % 256) for i, x in enumerate(prompt)]
    return np.array(rows, np.float32) / 256


def pooled(prompt, pooling):
    return states(prompt).mean(0) if pooling == "mean" else states(prompt)[-1]


def vector(sink, id):
    (delta,) = sink.of(id)
    assert (delta.finish, delta.tokens, delta.text) == (Finish.STOP, (), "")
    return np.frombuffer(delta.embedding, np.float32)


@pytest.mark.parametrize("kind", [ToyExecutor, CarryingToy])
@pytest.mark.parametrize("name", ["none", "oracle"])
def test_embeddings_run_beside_text(name, kind):
    """Prompts of one token and of many chunks, with both poolings, beside texts that draft."""
    engine = make(name, executor=kind(limits(slots=3)), overlap=kind is CarryingToy)
    texts = [ask(f"text{n}", "Hello" * (n + 1)) for n in range(2)]
    inputs = {f"{p}{n}": (PROMPT[: n or None], p) for p in POOLINGS for n in (0, 1, 2, 17)}
    vectors = [embed(id, *given) for id, given in inputs.items()]
    sink = run(engine, texts[0], *vectors, texts[1])
    sink.expect(*texts)
    for id, given in inputs.items():
        np.testing.assert_allclose(vector(sink, id), pooled(*given), rtol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_chunks_preemption_and_cached_prefixes_change_no_bit(pooling):
    whole = vector(run(make(max_nodes=64), embed("v", pooling=pooling)), "v")
    for nodes, pages in ((3, 64), (16, 14)):
        engine = make(max_nodes=nodes, pages=pages, slots=4)
        texts = [ask(f"t{n}", "Hi" + "ho" * n, max_tokens=20) for n in range(3)]
        first = embed("first", pooling=pooling)
        sink = run(engine, *texts, embed("v", pooling=pooling))
        engine.submit(first, sink)
        finish(engine)
        assert vector(sink, "v").tobytes() == vector(sink, "first").tobytes() == whole.tobytes()
        cached = sink.last("first").cached_tokens
        assert (cached > 0) == (pooling == "last")


def test_states_that_are_not_finite_end_their_own_request_alone():
    class Broken(ToyExecutor):
        def finish(self, round, masks=None):
            outcome = super().finish(round, masks)
            round.hidden = np.where(round.hidden == 65 / 256, np.inf, round.hidden)
            return outcome

    sink = run(make(executor=Broken(limits())), embed("wrong"), embed("right", b"xyz"))
    assert sink.last("wrong").finish == Finish.ERROR and "not finite" in sink.last("wrong").error
    np.testing.assert_allclose(vector(sink, "right"), pooled(b"xyz", "mean"), rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (replace(embed("v"), pooling="max"), "must be last or mean"),
        (replace(embed("v"), n=2), "n 1"),
        (replace(embed("v"), stopping=Stopping(3)), "max_tokens must be 0"),
        (embed("v", b"x" * 500), "context"),
    ],
)
def test_what_is_no_embedding_is_refused(wrong, word):
    with pytest.raises(RequestError, match=word):
        make().submit(wrong, RecordingSink())
