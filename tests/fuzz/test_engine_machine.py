"""The whole engine on the toy under arbitrary use: texts stay right, and nothing leaks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from forerun.engine.request import Finish, Speculation
from tests.engine.carrying import CarryingToy
from tests.engine.toys import RecordingSink, ask, limits, make, reference

SHAPES = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 3, 8, 256]),
        "slots": st.integers(1, 5),
        "max_nodes": st.integers(2, 20),
        "nodes": st.integers(1, 6),
        "depth": st.integers(1, 6),
    }
)
SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.8, 1.5]),
        "seed": st.integers(0, 3),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "top_k": st.sampled_from([0, 4]),
        "min_tokens": st.sampled_from([0, 3]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Submits, aborts and steps in any order, in pools that are often too small for all."""

    @initialize(
        shape=SHAPES,
        room=st.integers(24, 60),
        name=st.sampled_from(["none", "ngram", "oracle", "adversary", "erratic"]),
        overlap=st.booleans(),
        alone=st.sampled_from([True, True, False]),
    )
    def build(self, shape, room, name, overlap, alone):
        # Nothing is carried beside a row that the host must decide: mostly have none then.
        self.alone = overlap and alone
        pages = -(-room // shape["page_size"])
        executor = None
        if overlap:
            sizes = {key: shape[key] for key in ("page_size", "slots", "max_nodes")}
            executor = CarryingToy(limits(pages=pages, **sizes))
        self.engine = make(name, pages=pages, executor=executor, overlap=overlap, **shape)
        self.sink = RecordingSink()
        self.requests = {}

    @rule(
        prompt=st.sampled_from(["a", "ab", "Hello", "Hello, w", "Hello, world!"]),
        max_tokens=st.integers(0, 11),
        n=st.sampled_from([1, 1, 2, 3]),
        stop=st.sampled_from([(), (), ("a",), ("bc", "lk"), ("p", "ghi")]),
        include_stop=st.booleans(),
        sampling=SAMPLING,
        speculation=st.sampled_from(
            [Speculation(), Speculation(enabled=False), Speculation(max_nodes=2, max_depth=1)]
        ),
    )
    def submit(self, prompt, max_tokens, n, stop, include_stop, sampling, speculation):
        if self.alone:
            sampling = {key: sampling[key] for key in ("temperature", "seed")}
        elif sampling["min_tokens"] > max_tokens:
            sampling = sampling | {"min_tokens": 0}
        request = ask(
            str(len(self.requests)), prompt, max_tokens, n=n, stop=stop, include_stop=include_stop,
            speculation=speculation, **sampling,
        )  # fmt: skip
        self.engine.submit(request, self.sink)
        self.requests[request.id] = request

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            self.engine.abort(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step_once()
            self.engine.check()

    @invariant()
    def what_was_told_is_right_so_far(self):
        for delta in self.sink.deltas[-3:] if hasattr(self, "sink") else ():
            tokens, text, _ = reference(self.requests[delta.request], delta.index)
            emitted = self.sink.tokens(delta.request, delta.index)
            assert emitted == tokens[: len(emitted)]
            assert text.startswith(self.sink.text(delta.request, delta.index))

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.step_once():
            steps += 1
            assert steps < 3000, "somebody starves"
        self.engine.check()
        stats = self.engine.stats()
        load = stats.load
        assert load.pages_held == load.running == load.waiting == stats.failed_steps == 0
        for request in self.requests.values():
            for index in range(request.n):
                if self.sink.last(request.id, index).finish == Finish.ABORT:
                    continue
                tokens, text, finish = reference(request, index)
                assert self.sink.tokens(request.id, index) == tokens
                assert self.sink.text(request.id, index) == text
                assert self.sink.last(request.id, index).finish == finish
                if request.sampling.prompt_logprobs is not None:
                    entries = self.sink.of(request.id, index)[0].prompt_logprobs
                    assert [entry.token for entry in entries] == request.prompt[1:].tolist()


@pytest.mark.parametrize("courses", [15, pytest.param(120, marks=pytest.mark.slow)])
def test_any_course_of_events(courses):
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(max_examples=courses, stateful_step_count=25, derandomize=True),
    )
