"""One account of time, in plain steps (steps without draft tokens): speculation lives on a credit.

Every estimate can be wrong: what draft tokens bring, and what they cost. So the account books the
result as well. A step that took m times as long as a plain one and gave each row t tokens gained
t - m plain steps. A loss is taken from a credit that grows by LOSS_SHARE of a step in every step;
a step may draft only while the credit covers its worst loss. Over n steps
speculation can therefore lose CREDIT + LOSS_SHARE * n plain steps at most.
"""

from dataclasses import dataclass, field

from forerun.control.constants import CREDIT, DECAY, LOSS_SHARE, MIN_REPEATS, OUTLIER
from forerun.control.costs import LiveCosts, Mean
from forerun.control.report import StepReport
from forerun.control.step_costs import StepCosts


@dataclass(slots=True)
class Returns:
    """Running means over the steps that were allowed draft tokens.

    brought, paid  tokens per row, and the step's time in plain steps
    look   plain steps that a search for draft tokens takes: the step's extra time if it found none
    """

    brought: Mean = field(default_factory=lambda: Mean(1.0 + LOSS_SHARE, MIN_REPEATS))
    paid: Mean = field(default_factory=lambda: Mean(1.0, MIN_REPEATS))
    look: Mean = field(default_factory=lambda: Mean(0.0, MIN_REPEATS))

    @property
    def speed(self) -> float:
        """Tokens per time, relative to plain decoding."""
        return self.brought.value / self.paid.value

    def learn(self, brought: float, paid: float, look: float, drafted: bool) -> None:
        """Learn from a step if it `drafted`; older steps lose weight anyway: texts change."""
        for mean, value in ((self.brought, brought), (self.paid, paid), (self.look, look)):
            mean.seen *= DECAY
            if drafted:
                mean.learn(value - mean.value)


class Account:
    """The cost of steps on this machine now, and the gain or loss of speculation so far.

    costs   of steps, corrected by every step. If rounds of a device grow draft tokens, steps of
            equal size differ in time, so only plain steps correct them
    saved   plain steps saved so far; negative: lost
    steady  the last step was of the same kind as the one before it, so its time is typical
    empty   the credit is used up: no draft tokens until it is back at CREDIT
    """

    def __init__(self, measured: StepCosts) -> None:
        self.costs, self.saved, self._credit_limit = LiveCosts(measured), 0.0, 4.0 * CREDIT
        # On a device a search for draft tokens delays the next step, so learning takes more credit.
        self.credit = self._credit_limit if measured.padded else CREDIT
        self.empty, self.times_empty = False, 0
        self._returns: dict[int, Returns] = {}  # By powers of two of rows.
        # The last step: whether it had a prompt, its rows, most draft tokens allowed to a row.
        self._last_prefill, self._last_rows, self._last_allowed, self.steady = False, 1, 0, False

    def of(self, rows: int) -> Returns:
        """Return the means for about so many rows: what pays beside 1 row may not beside 16."""
        return self._returns.setdefault((rows - 1).bit_length(), Returns())

    def covers(self, loss: float) -> bool:
        """Return whether the credit covers a loss of so many plain steps."""
        return not self.empty and loss <= self.credit

    @property
    def stake(self) -> float:
        """Plain steps that the coming step may lose: 1, or CREDIT once the largest credit was
        saved.
        """
        return min(max(self.credit, 0.0), CREDIT if self.saved >= self._credit_limit else 1.0)

    def price(self, rows: int, cached: int) -> float:
        """Return the tokens, of all rows, that the time of a plain step brings on average."""
        return rows * max(1.0, self.of(rows).speed) * self.costs.late(rows, cached)

    def observe(self, report: StepReport) -> float:
        """Learn from a step, unless it says nothing about decoding: it has a prompt, or it began
        late for another reason than draft tokens. Returns the plain steps that it took, without
        masks: a plain step under a grammar needs them too.
        """
        prompt, before, allowed = self._last_prefill, self._last_allowed, max(report.allowed)
        self._last_prefill = report.prompt_tokens > 0
        self._last_allowed, self.steady = allowed, False
        self._last_rows = rows = report.rows
        costs, in_round = self.costs, self.costs.measured.in_round
        cached = report.cached * rows // report.nodes
        # Whether it would have begun early without draft tokens; under a grammar no step does.
        can_carry = costs.seen(rows, True) > 0.0 and not report.constrained
        plain, late = costs.plain(rows, cached, can_carry), can_carry and not report.carried
        total, look = _unmasked(report) / plain, report.ms["draft"] / plain
        returns, found_none = self.of(rows), allowed > 0 and not any(report.draft_tokens)
        if report.prompt_tokens or (late and (prompt or in_round)):
            return total
        known = costs.seen(rows, can_carry) >= MIN_REPEATS
        self.steady = known and not prompt and before == allowed and not late
        if in_round and (allowed or before):
            paid = min(total, look + OUTLIER * max(report.nodes / rows, 2.0))
        elif found_none and not late:
            costs.follow(total / (1.0 + max(look, returns.look.value)))
            paid = min(total, OUTLIER)
            look = paid - 1.0
        else:
            without = costs.late(rows, cached) if late else 1.0
            paid = look + without * self._learn(report, cached, plain, without, late)
            look = max(look + without - 1.0, returns.look.value)
        if known or not in_round:
            brought = sum(map(len, report.tokens)) / rows
            returns.learn(brought, paid, look, allowed > 0)
            self._settle(brought - paid, allowed > 0 or before > 0)
        return total

    def _learn(
        self, report: StepReport, cached: int, plain: float, without: float, late: bool
    ) -> float:
        """Correct the costs. Returns the step's time without drafting, in steps of `plain` x
        `without` milliseconds, and at most what its draft tokens can explain.
        """
        rows, costs, nodes = report.rows, self.costs, report.nodes
        ms = _unmasked(report) - report.ms["draft"]
        if costs.measured.padded:
            nodes = rows * (1 + max(report.draft_tokens))
        if nodes == rows:
            costs.learn_plain(rows, cached, report.carried, ms)
            return 1.0
        ratio, bound = ms / plain / without, OUTLIER * costs.at_most(rows, nodes, cached)
        if not late or costs.seen(rows, False):
            costs.learn(rows, nodes, cached, ratio)
        return min(ratio, bound)

    def _settle(self, gain: float, drafted: bool) -> None:
        """Book a step's gain in plain steps (negative: a loss). `drafted`: due to speculation."""
        self.saved += gain * drafted
        self.credit = min(self.credit + LOSS_SHARE + gain * drafted, self._credit_limit)
        if self.credit < 0.0 and not self.empty:
            self.empty, self.times_empty = True, self.times_empty + 1
        elif self.credit >= CREDIT:
            self.empty = False

    def describe(self) -> dict[str, object]:
        """Return facts for /server_info."""
        return {
            "step_ms_by_nodes": self.costs.describe(),
            "step_time_over_startup": round(self.costs.pace, 2),
            "plain_steps_saved": round(self.saved, 1),
            "speed_over_plain": round(self.of(self._last_rows).speed, 3),
            "credit": round(self.credit, 1),
            "disabled": self.empty,
            "times_disabled": self.times_empty,
        }


def _unmasked(report: StepReport) -> float:
    return sum(report.ms.values()) - report.ms["mask"]
