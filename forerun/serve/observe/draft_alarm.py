"""Warns once if a draft model is hardly ever right. A draft for another model, or one that is read
wrongly, costs time and changes no text, so nothing else would show it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from forerun.engine.stats import Stats

LOOK_SECONDS = 10.0
LEAST, ENOUGH = 0.1, 200
"""The share of accepted first draft tokens below which a warning is logged, and how many drafts are
counted first. The worst of our trained stand-ins and shipped drafts has .75; DSpark read as DFlash
had .003.
"""

log = logging.getLogger("forerun.serve")


def seldom_right(stats: Stats) -> str | None:
    """Return the warning if fewer than LEAST of the draft model's first tokens were right, over at
    least ENOUGH drafts; else None.
    """
    first = [count for count in stats.by_source if count.source == "draft_model"]
    counts = [count for count in first if count.depth == 1]
    # At most one of several siblings can be right, so count drafts and not their tokens.
    drafts = min(sum(count.verified for count in counts), stats.drafts)
    right = sum(count.accepted for count in counts)
    if drafts < ENOUGH or right >= LEAST * drafts:
        return None
    return (
        f"the draft model is hardly ever right: {right} of {drafts} first draft tokens were "
        "accepted. It may be made for another model, or its files may not be what their "
        "configuration says; --speculative-algorithm NGRAM drafts without it."
    )


async def watch(stats: Callable[[], Awaitable[Stats]]) -> None:
    """Check every LOOK_SECONDS until the warning was logged, or until cancelled. stats: returns the
    engine's counters.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        warning = seldom_right(await stats())
        if warning is not None:
            log.warning("%s", warning)
            return
