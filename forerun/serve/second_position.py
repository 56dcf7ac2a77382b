"""A look at the first drafts of the model's own prediction layers: whether the second position of
what they draft is accepted as the first one is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from forerun.engine.stats import Stats
from forerun.models.prediction_reading import collapse
from forerun.options.config import EngineConfig

ENOUGH = 100
"""Drafts whose first token was accepted: the second's share is then known to .05 (one standard
error), and layers that are read rightly are several of these above what is said."""

DEEP = 0.9
"""Share of drafts that begin with a token of the layers, and of these that go on with one, at
least: where fewer do, grammars or the policy's depths would be mistaken for the layers."""

LOOK_SECONDS = 1.0

log = logging.getLogger("forerun.serve")


def concerns(config: EngineConfig) -> bool:
    """Whether prediction layers alone draft, two tokens deep or more: only then a second position
    can collapse.
    """
    steps = config.speculative_num_steps
    return config.speculative_algorithm == "NEXTN" and (steps is None or steps > 1)


class SecondPosition:
    """Looks until enough was drafted, and speaks at most once."""

    def __init__(self) -> None:
        self.over = False

    def look(self, now: Stats) -> str | None:
        """What is to be said; None: nothing, or nothing yet. `over` is set when it is known."""
        first, second = (*now.accepted_at, 0, 0)[:2]
        if first < ENOUGH:
            return None
        self.over = True
        verified = {c.depth: c.verified for c in now.by_source if c.source == "draft_model"}
        begun = verified.get(1, 0)
        if begun < DEEP * now.drafts or verified.get(2, 0) < DEEP * begun:
            return None
        return collapse(first / now.drafts, second / first)

    async def run(self, stats: Callable[[], Awaitable[Stats]]) -> None:
        """Look every LOOK_SECONDS until it is known, and log once what is to be said. stats: asks
        the engine for its counters.
        """
        while not self.over:
            await asyncio.sleep(LOOK_SECONDS)
            if line := self.look(await stats()):
                log.warning("%s", line)
