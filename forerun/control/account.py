"""The account of what speculation gained and lost, in plain steps (steps without draft tokens).

Estimates of what draft tokens bring and cost can be wrong, so their result is recorded as well. A
step that took m times as long as a plain one and gave each row t tokens gained t - m plain steps. A
loss is taken from a credit that grows by LOSS_SHARE of a step in every step; a step may draft only
while the credit covers its worst loss (`Balance`). Over n steps speculation can therefore lose
CREDIT + LOSS_SHARE * n plain steps at most.
"""

from dataclasses import dataclass, field

from forerun.control.constants import (
    CREDIT,
    DECAY,
    DOUBT,
    FIRST_RETURNS,
    FIRST_TOKENS,
    LOSS_SHARE,
    MIN_REPEATS,
    OUTLIER,
)
from forerun.control.costs import LiveCosts, Mean
from forerun.control.report import StepReport
from forerun.control.step_costs import StepCosts


@dataclass(slots=True)
class Returns:
    """Running means over the steps that were allowed to draft.

    tokens  emitted tokens per row
    time    the step's time, in plain steps
    search  the time of a search for draft tokens, in plain steps: a step's extra time if the search
            has no result
    """

    tokens: Mean = field(default_factory=lambda: Mean(FIRST_TOKENS, FIRST_RETURNS))
    time: Mean = field(default_factory=lambda: Mean(1.0, FIRST_RETURNS))
    search: Mean = field(default_factory=lambda: Mean(0.0, MIN_REPEATS))

    @property
    def speed(self) -> float:
        """Tokens per time, relative to plain decoding."""
        return self.tokens.value / self.time.value

    def learn(self, tokens: float, time: float, search: float, drafted: bool) -> None:
        """Update the means with a step if it `drafted`. Older steps lose weight in any case,
        because texts change.
        """
        for mean, value in ((self.tokens, tokens), (self.time, time), (self.search, search)):
            mean.seen *= DECAY
            if drafted:
                mean.learn(value - mean.value)


class Balance:
    """The gain or loss so far of one source of draft tokens, in plain steps, relative to decoding
    without it.

    limit   largest credit
    credit  plain steps that it may lose
    saved   plain steps saved so far; negative: lost
    empty   the credit is used up: no draft tokens until it is back at half of CREDIT
    returns  means over steps, by powers of two of rows
    """

    def __init__(self, credit: float = CREDIT) -> None:
        self.limit, self.credit, self.saved = 4.0 * CREDIT, credit, 0.0
        self.empty, self.times_empty = False, 0
        self.returns: dict[int, Returns] = {}

    def of(self, rows: int) -> Returns:
        """Return the means for steps of about `rows` rows (the next power of two): what pays with 1
        row may not with 16.
        """
        return self.returns.setdefault((rows - 1).bit_length(), Returns())

    def covers(self, loss: float) -> bool:
        """Return whether the credit covers a loss of `loss` plain steps."""
        return not self.empty and loss <= self.credit

    @property
    def max_loss(self) -> float:
        """Plain steps that the coming step may lose: 1, or CREDIT once the largest credit was
        saved.
        """
        return min(max(self.credit, 0.0), CREDIT if self.saved >= self.limit else 1.0)

    def book(self, gain: float) -> None:
        """Book a step's gain in plain steps (negative: a loss); 0 for a step that the source had no
        part in.
        """
        self.saved += gain
        self.credit = min(self.credit + LOSS_SHARE + gain, self.limit)
        if self.credit < 0.0 and not self.empty:
            self.empty, self.times_empty = True, self.times_empty + 1
        elif self.credit >= CREDIT / 2.0:
            self.empty = False


class Account:
    """The cost of steps on this machine now, and the gain or loss of speculation so far.

    merged  drafters without a draft model share trees with one, and each side has a balance: a
            draft model that loses does not disable n-grams that pay

    costs   of steps, corrected by every step. If rounds of a device grow draft tokens, steps of
            equal size differ in time, so only plain steps correct them
    main    against plain decoding: of steps without a draft model, or of all if only one source
            drafts
    model   of steps in which a draft model drafts, against steps without it
    steady  the last step was of the same kind as the one before it, so its time is typical
    last_with_model  whether a draft model had a part in the last draft
    """

    def __init__(self, measured: StepCosts, merged: bool = False) -> None:
        self.costs = LiveCosts(measured)
        # On a device a search for draft tokens delays the next step, so learning takes more credit.
        self.main = Balance(4.0 * CREDIT if measured.padded else CREDIT)
        # (Simulated, twelve pairs of n-grams and a head, 30 starts of each on a busy machine: a
        # head that pays stayed disabled in two with CREDIT, in one with four times that.)
        self.model = Balance(4.0 * CREDIT) if merged else self.main
        self.last_with_model = self.steady = False
        self._last = StepReport(1, [[]], [0], [0], 1, 0, 0, False, {}, used_draft_model=False)
        # Slow steps that wait for the next, and whether nodes can take that long; the last step's
        # time over the expected one.
        self._slow: list[tuple[StepReport, float, bool]] = []
        self._over = 0.0
        # Milliseconds that drafters take in steps without draft tokens, searching or not.
        self._idle = Mean()

    def balance(self, with_draft_model: bool) -> Balance:
        """Return the balance of steps with or without a draft model."""
        return self.model if with_draft_model else self.main

    def step_value(self, rows: int, cached: int, with_draft_model: bool) -> float:
        """Return the tokens, summed over the rows, that steps with or without a draft model bring
        on average in the time of a plain step.
        """
        speed = self.balance(with_draft_model).of(rows).speed
        return rows * max(1.0, speed) * self.costs.non_overlapped_slowdown(rows, cached)

    @property
    def in_doubt(self) -> bool:
        """Whether DOUBT consecutive steps with draft tokens were slow. Then a plain step shows
        whether the machine is slow, or draft tokens cost more than estimated.
        """
        return len(self._slow) >= DOUBT

    def observe(self, report: StepReport, baseline_speed: float = 1.0) -> float:
        """Update costs and balances with a finished step. Returns the step's time in plain steps,
        without masks (a plain step under a grammar needs them too).

        baseline_speed  speed without the draft model, relative to plain decoding

        A step with a prompt, or one that began late for another reason than draft tokens, updates
        nothing, as it is not about decoding. A slow step with draft tokens waits for those after
        it. If the next is not slow although as large, or nodes cannot take that long, it was
        interrupted; if a plain one is slow as well, the machine is: neither says anything about
        draft tokens.
        """
        costs, rows, cached = self.costs, report.rows, report.cached * report.rows // report.nodes
        if costs.measured.drafts_in_step or report.prompt_tokens or costs.seen(rows, True):
            return self._observe(report, baseline_speed)
        took = (_unmasked(report) - report.ms["draft"]) / costs.plain(rows, cached, False)
        over = took / costs.relative_cost(rows, report.nodes, cached)
        known, before = costs.seen(rows, False) >= MIN_REPEATS, self._over
        self._over = over if known else 0.0
        if known and max(report.allowed) and over > OUTLIER and not self.in_doubt:
            possible = took <= OUTLIER * costs.upper_bound(rows, report.nodes)
            self._slow.append((report, baseline_speed, possible))
            self._last, self.steady = report, False
            return took
        waiting, alone, self._slow = self._slow, not self.in_doubt, []
        if known and took < 1.0 / OUTLIER:  # No step takes less than a plain one.
            costs.scale_pace(took)
        elif not max(report.allowed) and min(over, before) > OUTLIER:
            costs.scale_pace(min(over, before))
        else:
            for slow, baseline_then, possible in waiting:
                if possible and not (alone and report.nodes >= slow.nodes):
                    self._observe(slow, baseline_then)
        return self._observe(report, baseline_speed)

    def _observe(self, report: StepReport, baseline_speed: float) -> float:
        """Update costs and balances with one step. Returns as `observe`."""
        last, self._last, self.steady = self._last, report, False
        rows, allowed, before = report.rows, max(report.allowed), max(last.allowed)
        costs, drafts_in_step = self.costs, self.costs.measured.drafts_in_step
        cached = report.cached * rows // report.nodes
        # Whether the step would have been carried without draft tokens; under a grammar none is.
        can_carry = costs.seen(rows, True) > 0.0 and not report.constrained
        plain, late = costs.plain(rows, cached, can_carry), can_carry and not report.carried
        beyond_idle = report.ms["draft"] - self._idle.value
        self._idle.learn(beyond_idle, weight=float(not (allowed or report.prompt_tokens)))
        total, search = _unmasked(report) / plain, max(0.0, beyond_idle) / plain
        # Behind its last draft the model reads what was accepted: that step is its own, too.
        if allowed:
            self.last_with_model = report.used_draft_model or last.used_draft_model
        balance = self.balance(self.last_with_model)
        returns, found_none = balance.of(rows), allowed > 0 and not any(report.draft_tokens)
        if report.prompt_tokens or (late and (last.prompt_tokens or drafts_in_step)):
            return total
        known = costs.seen(rows, can_carry) >= MIN_REPEATS
        self.steady = known and not last.prompt_tokens and before == allowed and not late
        if drafts_in_step and (allowed or before):
            time = min(total, search + OUTLIER * max(report.nodes / rows, 2.0))
        elif found_none and not late:
            costs.update_pace(total / (1.0 + max(search, returns.search.value)))
            # A search takes more of the host's time than drafting; the estimate of that rises
            # gradually. The rest is what a plain step takes now.
            search = min(total - 1.0, max(2.0 * search, OUTLIER * returns.search.value))
            time = 1.0 + search
        else:
            without = costs.non_overlapped_slowdown(rows, cached) if late else 1.0
            time = search + without * self._learn(report, cached, plain, without, late)
            search = max(search + without - 1.0, returns.search.value)
        if known or not drafts_in_step:
            tokens = sum(map(len, report.tokens)) / rows
            returns.learn(tokens, time, search, allowed > 0)
            gain = tokens - time * (baseline_speed if balance is not self.main else 1.0)
            for each in {self.main, self.model}:
                each.book(gain if each is balance and (allowed or before) else 0.0)
        return total

    def _learn(
        self, report: StepReport, cached: int, plain: float, without: float, late: bool
    ) -> float:
        """Correct the costs. Returns the step's time without drafting, in units of `plain` x
        `without` milliseconds, limited to what its draft tokens can explain.
        """
        rows, costs, nodes = report.rows, self.costs, report.nodes
        ms = _unmasked(report) - report.ms["draft"]
        if costs.measured.padded:
            nodes = rows * (1 + max(report.draft_tokens))
        if nodes == rows:
            costs.learn_plain(rows, cached, report.carried, ms)
            return 1.0
        ratio = ms / plain / without
        bound = OUTLIER * costs.worst_case(rows, nodes, cached)
        bound = min(bound, costs.upper_bound(rows, nodes))
        if not late or costs.seen(rows, False):
            costs.learn(rows, nodes, cached, ratio)
        return min(ratio, bound)

    def describe(self) -> dict[str, object]:
        """Return facts for /server_info."""
        return {
            "step_ms_by_nodes": self.costs.describe(),
            "step_time_over_startup": round(self.costs.pace, 2),
            "plain_steps_saved": round(self.main.saved, 1),
            "speed_over_plain": round(
                self.balance(self.last_with_model).of(self._last.rows).speed, 3
            ),
            "credit": round(self.main.credit, 1),
            "disabled": self.main.empty,
            "times_disabled": self.main.times_empty,
        }


def _unmasked(report: StepReport) -> float:
    return sum(report.ms.values()) - report.ms["mask"]
