"""A draft model that is hardly ever right is named once, of whatever kind it is."""

import asyncio
import logging
from dataclasses import replace

import pytest

from forerun.engine.metrics import EngineMetrics
from forerun.engine.stats import Load, SourceCount, snapshot
from forerun.serve.observe import draft_alarm
from forerun.speculative.tree import DraftSource

NONE = snapshot(EngineMetrics(), Load(0, 0, 10, 0, 0))


def stats(verified, right, drafts, source=DraftSource.DRAFT_MODEL):
    counts = SourceCount(source.name.lower(), 1, verified, right), SourceCount("ngram", 1, 900, 0)
    return replace(NONE, drafts=drafts, by_source=(*counts, SourceCount(counts[0].source, 2, 9, 9)))


@pytest.mark.parametrize(
    ("counted", "warns"),
    [
        (stats(200, 19, 300), True),
        (stats(200, 20, 300), False),
        (stats(199, 0, 300), False),
        (stats(1600, 30, 200), False),  # Eight siblings each: 15 % of the drafts.
        (stats(200, 0, 300, DraftSource.NGRAM), False),
        (NONE, False),
    ],
)
def test_it_warns_of_few_first_tokens_that_are_right(counted, warns):
    assert (draft_alarm.seldom_right(counted) is not None) == warns


def test_it_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(draft_alarm, "LOOK_SECONDS", 0.0)
    asked = iter([NONE, stats(500, 3, 500)])

    async def counted():
        return next(asked)

    with caplog.at_level(logging.WARNING):
        asyncio.run(draft_alarm.watch(counted))
    assert caplog.text.count("3 of 500 first draft tokens were accepted") == 1
