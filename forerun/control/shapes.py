"""Chooses one draft shape per step, for the whole batch, for a drafter that takes time.

Every row that may draft gets the same shape: a device computes rows x deepest row, so a smaller
draft of one row saves nothing. The expected tokens of all shapes follow from how often each level
was right if the one above was; the time is measured for each shape, in plain steps, by powers of
two of rows. Drafts that are grown on the host have one shape, the largest: they end where a further
pass of the draft model would take longer than it saves (Budget.pass_prob).
"""

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np

from forerun.control import reasons
from forerun.control.account import Account
from forerun.control.constants import (
    DECAY,
    FIRST_RATE,
    FIRST_RETURNS,
    LOSS_SHARE,
    MIN_REPEATS,
    PLAIN_EVERY,
    PRIOR,
    TRIAL,
)
from forerun.control.costs import Mean
from forerun.control.host_drafts import HostDrafts, LevelCounts
from forerun.control.policy import Budget
from forerun.control.report import StepReport
from forerun.draft_shape import DraftShape


@dataclass(slots=True)
class ShapeStats:
    """Measurements of steps of about the same number of rows.

    relative_cost  by shape: the step's time, in plain steps
    steps        number of steps that drafted
    enabled      whether to draft
    steps_since  plain steps since the last that drafted
    cooldown     plain steps before a new trial
    """

    relative_cost: dict[DraftShape, Mean] = field(default_factory=dict)
    steps: int = 0
    enabled: bool = True
    steps_since: int = 0
    cooldown: int = PLAIN_EVERY // 2


class Shapes:
    """Chooses among shapes, by tokens per millisecond.

    drafts  selects among proposals made on the host, and learns from them
    depth   longest path; each level has `width` draft tokens
    merged  drafters without a draft model propose into the same trees
    baseline  speed without this drafter, relative to plain decoding: a draft model has to exceed
              what the others would have reached alone, also in steps that it takes part in
    buckets       measurements of steps, by powers of two of rows
    tries, right  float64[1 + depth], how often each level was tried below one that was right, and
                  right; decayed. Index 0 is a draft token alone
    """

    def __init__(
        self, account: Account, drafts: HostDrafts, depth: int, width: int, merged: bool
    ) -> None:
        self._account, self._drafts, self._merged = account, drafts, merged
        self.baseline, self._width, self._wide = Mean(1.0, FIRST_RETURNS), width, width > 1
        shape = DraftShape(width * depth, width, depth)
        self._grown_on_host = not account.costs.measured.drafts_in_step
        self.shapes = [shape] if self._grown_on_host else shape.declared()
        self.buckets: dict[int, ShapeStats] = {}
        self.tries, self.right = np.zeros(1 + depth), np.zeros(1 + depth)

    def rates(self) -> list[float]:
        """Return 1 + depth chances: entry 0, that a draft token alone is right; entry n, that some
        token of level n is right if one of the level above is. A level without observations has the
        chance of the one above; entry 0 that of entry 1.
        """
        tries, right = self.tries.tolist(), self.right.tolist()

        def rate(believed: float, level: int) -> float:
            return (PRIOR * believed + right[level]) / (PRIOR + tries[level])

        rates = [rate(FIRST_RATE, 0)]
        for level in range(1, len(tries)):
            rates.append(rate(rates[-1], level))
        rates[0] = rate(rates[1], 0)
        return rates

    def relative_cost(self, rows: int, shape: DraftShape) -> float:
        """Return the time of a step with this shape, in plain steps. A shape without observations
        gets the time measured at start-up, for a draft of as many levels as are expected to be
        right. That estimate shrinks with the number of steps, so that an overestimated shape is
        tried eventually.
        """
        bucket = self._bucket(rows)
        if (seen := bucket.relative_cost.get(shape)) is not None:
            return seen.value
        costs, nodes, passes = self._account.costs.measured, float(shape.nodes), shape.depth - 1.0
        if self._grown_on_host:
            nodes = passes = float(np.cumprod(self.rates()[1:]).sum())
        plain, ms = costs.verify(np.array([rows, rows * (1.0 + nodes)])).tolist()
        longer = max(0.0, (ms + costs.follow_ms) / plain - 1.0) + passes * self._pass_cost(rows)
        return float(1.0 + longer * min(1.0, PLAIN_EVERY / max(bucket.steps, 1)))

    def _pass_cost(self, rows: int) -> float:
        """Return the time of a pass of the draft model over a level of `rows` rows, in plain steps,
        as measured at start-up: on the host it grows with its nodes as a step of the target does.
        """
        costs, level = self._account.costs.measured, rows * self._width
        plain, one, many = costs.verify(np.array([rows, 1, level])).tolist()
        return float(costs.draft_ms / plain * (many / one if self._grown_on_host else 1.0))

    def speeds(self, rows: int) -> list[float]:
        """Return the expected speed of a step of `rows` rows with each of `shapes`, in their order:
        tokens of a row per time of a plain step, so 1.0 is plain decoding.
        """
        single, *levels = self.rates()
        brought = [*accumulate(accumulate(levels, mul))]
        return [
            (1.0 + (single if self._alone(shape) else brought[shape.depth - 1]))
            / self.relative_cost(rows, shape)
            for shape in self.shapes
        ]

    def budget(self, rows: int) -> Budget | None:
        """Return what every row may draft in the coming step; None = whatever drafters without a
        draft model propose.
        """
        if (shape := self.choose(rows)) is not None:
            reason, depth = reasons.ON_LEVELS.format(shape.nodes), shape.depth
            pass_prob = self._pass_prob(rows) if self._grown_on_host else 0.0
            return Budget(shape.nodes, depth, reason, model_depth=depth, pass_prob=pass_prob)
        return None if self._merged else Budget(0, 0, self._off_reason(rows))

    def _pass_prob(self, rows: int) -> float:
        """Return the least probability of a path below which one more pass of the draft model
        brings more tokens than other steps bring in its time.
        """
        speed = max(self.baseline.value, *self.speeds(rows))
        return speed * self._pass_cost(rows) / self.rates()[1]

    def _off_reason(self, rows: int) -> str:
        """Return why no shape was chosen, as text for users."""
        ratios = [self.relative_cost(rows, shape) for shape in self.shapes]
        pairs = zip(ratios, self.shapes, strict=True)
        if all(ratio * self.baseline.value >= 1.0 + shape.depth for ratio, shape in pairs):
            return reasons.TOO_SLOW
        if not self._account.model.covers((min(ratios) - 1.0) * self.baseline.value):
            return reasons.TOO_RISKY
        return reasons.WRONG

    def choose(self, rows: int) -> DraftShape | None:
        """Return the shape of the coming step, the fastest whose loss the credit covers; None = no
        draft tokens. Changes nothing.
        """
        bucket = self._bucket(rows)
        if not bucket.enabled and bucket.steps_since < bucket.cooldown:
            return None
        speeds = self.speeds(rows)
        order = sorted(range(len(speeds)), key=speeds.__getitem__, reverse=True)
        for shape in [self.shapes[place] for place in order]:
            ratio, balance = self.relative_cost(rows, shape), self._account.model
            loss = (ratio - 1.0) * self.baseline.value
            if not balance.covers(loss) or ratio * self.baseline.value >= 1.0 + shape.depth:
                continue
            new = self.tries[:2].max() < MIN_REPEATS
            on = bucket.enabled and (new or max(speeds) > self.baseline.value * (1.0 - LOSS_SHARE))
            trial = min(loss * TRIAL / rows, balance.limit)  # No larger credit can be saved up.
            due = bucket.steps_since >= bucket.cooldown and balance.covers(trial)
            return shape if on or due else None
        return None

    def learn(self, report: StepReport, ratio: float) -> None:
        """Update rates and times with a step that took `ratio` plain steps."""
        allowed = max(report.allowed)
        counts = self._level_counts(report) if allowed else []
        if self._merged and report.proposed:
            gain = self._drafts.gain_without_model(report) / report.rows
            self.baseline.learn(1.0 + gain - self.baseline.value)
        if report.prompt_tokens:
            return
        if not allowed or (self._merged and not report.used_draft_model):
            self._bucket(report.rows).steps_since += 1
        else:
            self.observe(report.rows, allowed, counts, ratio)

    def _level_counts(self, report: StepReport) -> list[LevelCounts]:
        """Return the counts of each row that had draft tokens."""
        if self._account.costs.measured.drafts_in_step:  # Count emitted tokens.
            counts = zip(report.tokens, report.draft_tokens, strict=True)
            width = self._width
            return [
                LevelCounts(min(len(t), -(-n // width)), len(t) - 1) for t, n in counts if t and n
            ]
        learnt, depth = self._drafts.learn(report.proposed, report.tokens), self.shapes[0].depth
        # Of a draft that ended early, the level that could have followed counts as wrong.
        return [
            LevelCounts(tried + (tried == right and tried < depth), right)
            for tried, right in learnt
        ]

    def observe(self, rows: int, most: int, counts: list[LevelCounts], ratio: float) -> None:
        """Update rates and times with a step without prompts that took `ratio` plain steps. counts:
        of each row that drafted, at most `most` tokens.
        """
        # A row near its token limit gets fewer nodes than the shape; a grammar may add nodes.
        shape = max([s for s in self.shapes if s.nodes <= most], default=self.shapes[0])
        bucket = self._bucket(rows)
        bucket.steps += 1
        if not bucket.enabled:
            bucket.enabled = True
            # Observations from before a pause count for PRIOR: the text has changed.
            share = PRIOR / max(float(self.tries.max()), PRIOR)
            self.tries, self.right = share * self.tries, share * self.right
        if self._account.steady:
            mean = bucket.relative_cost.setdefault(shape, Mean())
            mean.learn(ratio - mean.value)
        self._learn(self._alone(shape), counts)
        if self.tries[:2].max() < TRIAL:
            return
        over = max(self.speeds(rows)) / self.baseline.value
        if over < 1.0 - LOSS_SHARE:
            bucket.enabled, bucket.steps_since = False, 0
            bucket.cooldown = min(2 * bucket.cooldown, 2 * PLAIN_EVERY)
        elif over > 1.0 + LOSS_SHARE:
            bucket.cooldown = PLAIN_EVERY // 2

    def _learn(self, alone: bool, counts: list[LevelCounts]) -> None:
        # Levels that were not tried decay half as fast, or they would be tried again too soon.
        first = 0 if alone else 1
        decay = np.full(len(self.tries), DECAY**0.5)
        decay[first : first + max((each.tried for each in counts), default=0)] = DECAY
        self.tries *= decay
        self.right *= decay
        for tried, right in counts:
            self.tries[first : first + tried] += 1.0
            self.right[first : first + right] += 1.0

    def _alone(self, shape: DraftShape) -> bool:
        return self._wide and shape.nodes == 1

    def _bucket(self, rows: int) -> ShapeStats:
        return self.buckets.setdefault((rows - 1).bit_length(), ShapeStats())

    def describe(self) -> dict[str, object]:
        """Return facts for /server_info."""
        return {
            "right_by_level": [round(rate, 3) for rate in self.rates()[1:]],
            "plain_steps_by_rows": {
                f"{1 << power} rows, {shape.nodes} draft tokens": round(mean.value, 2)
                for power, bucket in sorted(self.buckets.items())
                for shape, mean in bucket.relative_cost.copy().items()  # From any thread.
            },
        }
