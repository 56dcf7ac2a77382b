"""Lookup where it is sure, a head elsewhere: the text stays, and each does its part."""

import pytest

from forerun.constrain.grammars import NoGrammars
from forerun.control.policy import FixedPolicy
from forerun.drafters.combined import CombinedDrafter
from forerun.drafters.model_drafter import TreeShape
from forerun.drafters.ngram import NgramDrafter
from forerun.engine.options import EngineOptions
from forerun.engine.thread import Engine
from tests.drafters.test_model_drafter import FeaturedToy, ToyHead, Watched
from tests.engine.toys import TOKENIZER, ask, limits, run


class Counted(Watched):
    """Counts the rows it is asked for draft tokens for."""

    asked = 0

    def propose(self, plan):
        self.asked += int((plan.max_nodes > 0).sum())
        return super().propose(plan)


def served(bar):
    """Steps of a few long texts, and how often the head was asked."""
    executor = FeaturedToy(limits(pages=200))
    device = ToyHead(executor.limits)
    head = Counted(device, executor.limits, TreeShape(2, 3))
    drafter = CombinedDrafter(NgramDrafter(4), head, bar)
    made = Engine(
        executor, drafter, FixedPolicy(4, 4), TOKENIZER, NoGrammars(), EngineOptions()
    )  # fmt: skip
    requests = [ask(str(i), f"Prompt {i}", 60) for i in range(3)]
    ear = run(made, *requests)
    for request in requests:
        ear.expect(request)
    assert made.stats().failed_steps == 0
    assert drafter.traits.needs_features and "ngram" in drafter.traits.name
    return made.stats().steps, head.asked


@pytest.mark.parametrize("bar", [0.3, 0.6])
def test_the_better_of_both_leads(bar):
    """The toy soon repeats itself: then only the lookup speaks, four right draft tokens a step."""
    (alone, asked), (both, few) = served(bar=2.0), served(bar)
    assert both < alone
    assert few < 0.6 * asked
