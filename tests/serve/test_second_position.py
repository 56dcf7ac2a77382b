"""What a server says of the first drafts of a model's own layers."""

import asyncio
import logging
from dataclasses import replace

import pytest

from forerun.engine.metrics import EngineMetrics
from forerun.engine.stats import Load, SourceCount, snapshot
from forerun.options.config import EngineConfig
from forerun.serve import second_position
from forerun.serve.second_position import SecondPosition, concerns

NONE = snapshot(EngineMetrics(), Load(waiting=0, running=0, pages=8, pages_held=0, pages_kept=0))


def counted(accepted_at, drafts=200, second=200, source="draft_model"):
    verified = [SourceCount(source, 1, drafts, 0), SourceCount(source, 2, second, 0)]
    return replace(NONE, accepted_at=accepted_at, drafts=drafts, by_source=tuple(verified))


@pytest.mark.parametrize(
    ("stats", "over", "said"),
    [
        (NONE, False, False),
        (counted((99, 0)), False, False),
        (counted((160, 30)), True, True),
        (counted((160,)), True, True),
        (counted((160, 130)), True, False),
        (counted((160, 30), second=100), True, False),  # One token deep, mostly.
        (counted((160, 30), source="grammar"), True, False),
    ],
)
def test_it_speaks_of_layers_alone_and_when_it_knows(stats, over, said):
    look = SecondPosition()
    line = look.look(stats)
    assert (look.over, line is not None) == (over, said)
    assert not said or "collapses at the second position (0.80, then 0." in line


def test_it_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(second_position, "LOOK_SECONDS", 0.0)
    told = [NONE, counted((99, 9)), counted((160, 30)), counted((200, 30))]

    async def stats():
        return told.pop(0)

    with caplog.at_level(logging.WARNING, "forerun.serve"):
        asyncio.run(SecondPosition().run(stats))
    assert len(told) == 1 and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("method", "steps", "concerned"),
    [("NEXTN", None, True), ("NEXTN", 3, True), ("NEXTN", 1, False), ("EAGLE", 3, False)],
)
def test_what_concerns_it(method, steps, concerned):
    config = replace(EngineConfig(), speculative_algorithm=method, speculative_num_steps=steps)
    assert concerns(config) == concerned
