"""What is asked of a drafter that costs time: for each row nothing, one draft token, or levels of a
tree, whichever brings most beyond what its time would bring elsewhere.

One draft token (NAIVE) is the smallest step that can pay: two nodes a row, and where the device
drafts by itself nothing is run for it but the extension that every step needs. Beside many rows
every further node costs time in proportion, so there it wins where a level of a tree loses; beside
few a level costs hardly more. Which it is, costs and rates say: no number of rows does.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from forerun.control import reasons
from forerun.control.acceptance import Acceptance
from forerun.control.constants import DECAY, FIRST_RATE, LOSS_SHARE
from forerun.control.cost_model import LiveCosts
from forerun.control.policy import Budget
from forerun.control.slowdown_guard import SlowdownGuard
from forerun.speculative.tree import Draft
from forerun.types import AnyArray, Ints


class _Offer(NamedTuple):
    """Pieces that rows may buy, and what is bought of them.

    size    draft tokens of a piece
    won     tokens beyond what the time would bring elsewhere
    pieces  int[B] of each row
    ms      of a step with none, the first, the first two, ...
    """

    size: int
    won: float
    pieces: AnyArray
    ms: list[float]


class LevelBudgets:
    """Budgets of rows, by what came of earlier ones.

    width  draft tokens of a level

    How often the likeliest draft token is right (`single`) is learnt of steps with one alone, how
    often one of a level is of steps with levels (`Acceptance`). Where either was seen, the level is
    right at least as often as the token; and the longer no token was tried alone, the more it is
    believed to be right as often as the level, so that it is tried where that would pay.
    """

    def __init__(self, guard: SlowdownGuard, acceptance: Acceptance, width: int) -> None:
        self._guard, self._acceptance, self._width = guard, acceptance, width
        self.single_rate = FIRST_RATE
        # What free drafters alone win in a row, in tokens a step, see SlowdownGuard.worthwhile.
        self._free_won = 0.0
        # By slot: how often one draft token was tried, and right; what the last step told.
        self._single: dict[int, tuple[float, float]] = {}
        self._told: list[float] = []
        # Steps since one was tried.
        self._since = 0

    def open(self, slot: int) -> None:
        """Start from what other sequences taught."""
        self._single.pop(slot, None)

    def single(self, slot: int) -> float:
        """The chance that one draft token is right; what all sequences share is one observation."""
        tries, right = self._single.get(slot, (0.0, 0.0))
        return (self.single_rate + right) / (1.0 + tries)

    def _singles(self, slots: Ints) -> AnyArray:
        """float64[B]: the same of all rows, see `shrunk`."""
        if self._told:
            self.single_rate += (1.0 - DECAY) * (float(np.mean(self._told)) - self.single_rate)
            self._told.clear()
        rates = np.array([self.single(slot) for slot in slots.tolist()])
        seen = [self._single.get(slot, (0.0, 0.0))[0] for slot in slots.tolist()]
        return shrunk(rates, 1.0 + np.array(seen))

    def learn_free(
        self, drafts: list[Draft], bought: Callable[..., tuple[Sequence[int], float]]
    ) -> None:
        """What the draft tokens that free drafters know of would have won alone; bought: see
        AdaptivePolicy.
        """
        free = [draft if draft.free is None else draft.free for draft in drafts]
        scores = [score for draft in free for score in draft.score.tolist()]
        owners = [row for row, draft in enumerate(free) for _ in range(len(draft))]
        won = bought(scores, owners)[1] / len(drafts)
        self._free_won += (1.0 - DECAY) * (won - self._free_won)

    def budgets(
        self, slots: Ints, kv_len: Ints, step: int, tried: dict[int, float]
    ) -> list[Budget]:
        """As much as pays, beyond what free drafters win alone. A row that gets nothing is probed
        now and then with the least there is, so that it notices when its text becomes easy.

        step   of how many this is one
        tried  by slot, the last step in which it had draft tokens, or wrong ones
        """
        rows, width, free = len(slots), self._width, self._free_won
        least, best, rates = self._offers(slots, kv_len)
        if best.won <= free * np.count_nonzero(best.pieces):
            best = best._replace(pieces=np.zeros(rows, np.int64))
        # All rows that are off may probe, so each waits `rows` times as long as one alone.
        ms = least.ms
        price = rows * (ms[1] / ms[0] - 1.0)
        useful = any(time < (1.0 + added / rows) * ms[0] for added, time in enumerate(ms))
        # A look whose draft token will not be verified costs time and tells little.
        useful = useful and self._affords(rows, int(kv_len.sum()))
        found = []
        for slot, given, rate in zip(
            slots.tolist(), best.pieces.tolist(), rates.tolist(), strict=True
        ):
            tried[slot] = step if given else tried[slot]
            if not given and slot in self._single:  # What was seen long ago must not forbid it.
                tries, right = self._single[slot]
                self._single[slot] = DECAY * tries, DECAY * right
            facts = round(100 * rate), round(100 * price * max(1.0, self._guard.speed))
            # One that is right is followed by another at once (AdaptivePolicy.observe).
            wait = (price + free) / LOSS_SHARE / (1.0 - min(rate, 0.9) if free else 1.0)
            probe = not given and useful and step - tried[slot] > wait
            text = reasons.ON_LEVELS.format(best.size * given) if given else reasons.WRONG
            if best.size < width and given:
                text = reasons.ON_SINGLE
            text = reasons.LOOKING if probe else text
            depth, size = (1, least.size) if probe else (given, best.size)
            why = _worded(text + reasons.ABOUT_LEVEL, *facts)
            found.append(Budget(size * depth, depth, why, model_depth=depth))
        return found

    def _offers(self, slots: Ints, kv_len: Ints) -> tuple[_Offer, _Offer, AnyArray]:
        """The offer of the smallest pieces, the best, and float64[B] how often the first level of
        a row is right.
        """
        rates = self._acceptance.rates(slots)
        if self._width == 1:
            levels = self._offer(rates, 1, kv_len)
            return levels, levels, rates[:, 0]
        single = self._singles(slots)
        for level, seen in enumerate(self._acceptance.seen(slots).T):
            rates[:, level] = shrunk(rates[:, level], seen)
        tried_alone = [self._single.get(slot, (0.0,))[0] > 0.5 for slot in slots.tolist()]
        rates[:, 0] = np.where(tried_alone, np.maximum(rates[:, 0], single), rates[:, 0])
        doubt = 1.0 - DECAY**self._since
        self._since += 1
        single += doubt * np.maximum(rates[:, 0] - single, 0.0)
        least = self._offer(single[:, None], 1, kv_len)
        levels = self._offer(rates, self._width, kv_len)
        return least, levels if levels.won > least.won else least, rates[:, 0]

    def _offer(self, rates: AnyArray, size: int, kv_len: Ints) -> _Offer:
        """What is bought of pieces of `size` draft tokens; rates float64[B,D] of each piece of a
        row given the one above.
        """
        rows = len(rates)
        # Tokens each piece would bring; they fall along a row, so sorting keeps pieces in order.
        gains = np.cumprod(rates, axis=1).reshape(-1)
        ranked = np.argsort(-gains, kind="stable")
        owners = ranked // rates.shape[1]
        ms, at_most = levels_ms(self._guard.costs, kv_len, owners, size)
        times = list(zip(ms[1:], at_most[1:], strict=True))
        count, won = self._guard.worthwhile(gains[ranked].tolist(), times, ms[0], rows)
        return _Offer(size, won, np.bincount(owners[:count], minlength=rows), ms)

    def _affords(self, rows: int, cached: int) -> bool:
        """Whether one draft token may be tried beside rows that see so many cached tokens."""
        costs, nodes = self._guard.costs, rows + 1
        plain, seen = costs.one(rows, cached), cached * nodes // rows
        longest = costs.at_most(nodes, seen, costs.one(nodes, seen))
        return longest - plain <= self._guard.max_new_loss * plain

    def learn(self, slot: int, allowed: int, right: bool) -> None:
        """Whether a draft token was right in a step that allowed so many."""
        tries, rights = self._single.get(slot, (0.0, 0.0))
        tries, rights = DECAY * tries, DECAY * rights
        if allowed < self._width:
            tries, rights, self._since = tries + 1.0, rights + right, 0
            self._told.append(float(right))
        self._single[slot] = tries, rights


@lru_cache(maxsize=4096)
def _worded(text: str, *facts: int) -> str:
    """The text with these numbers: it takes long to make, and steps mostly say the same."""
    return text.format(*facts)


def shrunk(rates: AnyArray, seen: AnyArray) -> AnyArray:
    """float64[B]: rates of rows, seen so often, only as far from their mean as they are apart by
    more than luck (Efron and Morris 1975): where many rows are much alike, none is left out for bad
    luck, and none is believed to be better.
    """
    if len(rates) < 4:
        return rates
    mean = np.average(rates, weights=seen)
    luck = mean * (1.0 - mean) / seen
    apart = max(0.0, np.average((rates - mean) ** 2, weights=seen) - np.average(luck, weights=seen))
    found: AnyArray = mean + (rates - mean) * (apart / (apart + luck) if apart > 0 else 0.0)
    return found


def levels_ms(
    costs: LiveCosts, kv_len: Ints, owners: Ints, width: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of a step, drafting included, with no level, the first, the first two, ...: what
    is believed, and what it may take if that is wrong.

    kv_len  int32[B], cached tokens of the rows
    owners  int[n], the row of each level
    width   draft tokens of a level
    """
    draft_tokens = width * np.arange(len(owners) + 1)
    nodes = len(kv_len) + draft_tokens
    cached = np.cumsum(np.append(kv_len.sum(), width * kv_len[owners]))
    drafting = (
        costs.measured.follow_ms * (draft_tokens > 0) + costs.measured.draft_ms * draft_tokens
    )
    ms: list[float] = (costs.many(nodes, cached) + costs.pace * drafting).tolist()
    steps = zip(nodes.tolist(), cached.tolist(), ms, strict=True)
    return ms, [costs.at_most(*step) for step in steps]
