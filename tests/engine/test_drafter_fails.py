"""A drafter that fails ends speculation, and nothing else."""

import logging

import pytest

from forerun.control.policy import FixedPolicy
from forerun.drafters.ngram import NgramDrafter
from forerun.engine.thread import Engine, EngineOptions
from forerun.executors.toy import ToyExecutor
from forerun.interface.executor import Capabilities
from forerun.interface.grammars import NoGrammars
from tests.engine.toys import TOKENIZER, ask, limits, run


class Failing(NgramDrafter):
    """Raises in one verb, when that is called for the n-th time and ever after."""

    def __init__(self, verb, calls):
        super().__init__(slots=4)
        self.verb, self.left = verb, calls
        self.called_after = 0

    def _called(self, verb):
        if verb == self.verb:
            self.left -= 1
        if self.left <= 0:
            self.called_after += 1
            raise RuntimeError("the draft caught fire")

    def begin(self, slot_init):
        self._called("begin")
        super().begin(slot_init)

    def propose(self, plan):
        self._called("propose")
        return super().propose(plan)

    def observe(self, plan, trees, outcome):
        self._called("observe")
        super().observe(plan, trees, outcome)

    def end(self, slot):
        self._called("end")
        super().end(slot)


def engine(drafter):
    executor, policy = ToyExecutor(limits()), FixedPolicy(4, 4)
    return Engine(executor, drafter, policy, TOKENIZER, NoGrammars(), EngineOptions())


@pytest.mark.parametrize("verb", ["begin", "propose", "observe", "end"])
@pytest.mark.parametrize("calls", [1, 4])
def test_requests_outlive_the_drafter(verb, calls, caplog):
    inner = Failing(verb, calls)
    made = engine(inner)
    requests = [ask(str(i), f"Prompt {i}", 40) for i in range(6)]
    with caplog.at_level(logging.ERROR, "forerun.engine"):
        sink = run(made, *requests)
    sink.expect(*requests)
    reason = "speculation is off: the drafter ngram failed with RuntimeError: the draft caught fire"
    assert made.fault == reason
    assert [record.message for record in caplog.records] == [reason]
    assert caplog.records[0].exc_info is not None
    assert inner.called_after == 1, "a drafter that failed is not called again"
    assert made.stats().failed_steps == 0
    assert made.describe()["drafter"]["fault"] == reason
    run(made, ask("later"))
    granted = made.stats().load.granted
    assert granted and all(b.nodes == 0 and b.reason == reason for b in granted)


@pytest.mark.parametrize("drafts", [False, True])
def test_only_an_executor_that_drafts_gets_a_request(drafts):
    """Making one takes NumPy's time in every step."""
    inner, requests, executor = Failing("never", 10**9), [], ToyExecutor(limits())
    inner.on_device_draft = requests.append
    executor.capabilities = Capabilities(drafts=drafts)
    made = Engine(executor, inner, FixedPolicy(4, 4), TOKENIZER, NoGrammars(), EngineOptions())
    run(made, ask("r", "Hello", 12)).expect(ask("r", "Hello", 12))
    assert bool(requests) == drafts
