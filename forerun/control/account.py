"""One account of time: speculation lives on a credit of plain steps.

Every estimate can be wrong: of what draft tokens bring, of what they cost. So the outcome is kept
as well. A step that took m times as long as a plain one and gave its rows t tokens each has won
t - m plain steps. Losses are paid from a credit that grows by LOSS_SHARE of a step in every step;
draft tokens are asked for only while it covers the worst loss of the coming step. Over n steps
speculation can therefore lose CREDIT + LOSS_SHARE * n plain steps at most.
"""

from dataclasses import dataclass, field

from forerun.control.constants import CREDIT, DECAY, LOSS_SHARE, MIN_REPEATS, OUTLIER
from forerun.control.costs import LiveCosts, Mean
from forerun.control.report import StepReport
from forerun.control.step_costs import StepCosts


@dataclass(slots=True)
class Returns:
    """Of steps that draft tokens were asked for in, means of the last few.

    brought, paid  tokens of a row, and plain steps that the step took
    look   plain steps that looking for draft tokens takes: all that a step takes beyond a plain one
           where nothing was found
    """

    brought: Mean = field(default_factory=lambda: Mean(1.0 + LOSS_SHARE, MIN_REPEATS))
    paid: Mean = field(default_factory=lambda: Mean(1.0, MIN_REPEATS))
    look: Mean = field(default_factory=lambda: Mean(0.0, MIN_REPEATS))

    @property
    def speed(self) -> float:
        """Over plain decoding."""
        return self.brought.value / self.paid.value

    def learn(self, brought: float, paid: float, look: float, asked: bool) -> None:
        """What was seen counts for less with every step: the text becomes another."""
        for mean, value in ((self.brought, brought), (self.paid, paid), (self.look, look)):
            mean.seen *= DECAY
            if asked:
                mean.learn(value - mean.value)


class Account:
    """What steps take on this machine now, and what speculation has won or lost.

    costs   of steps, corrected by every step. Where draft tokens are grown in the rounds of a
            device, steps of as many nodes do not take the same: only plain steps teach them
    saved   plain steps saved so far; negative: lost
    steady  the last step was like the one before it: it took what such steps take
    empty   the credit is used up: no draft tokens until there is CREDIT again
    """

    def __init__(self, measured: StepCosts) -> None:
        self.costs, self.saved, self._most = LiveCosts(measured), 0.0, 4.0 * CREDIT
        # A device's look keeps the next step from beginning early: it takes some of them to tell.
        self.credit = self._most if measured.padded else CREDIT
        self.empty, self.times_empty = False, 0
        self._returns: dict[int, Returns] = {}  # By powers of two of rows.
        # Of the step before: whether it had a prompt, its rows, what one was allowed at most.
        self._prompt, self._rows, self._before, self.steady = False, 1, 0, False

    def of(self, rows: int) -> Returns:
        """Of steps of about so many rows. What pays beside one row need not beside sixteen."""
        return self._returns.setdefault((rows - 1).bit_length(), Returns())

    def covers(self, loss: float) -> bool:
        """Whether the credit covers a loss of so many plain steps."""
        return not self.empty and loss <= self.credit

    @property
    def stake(self) -> float:
        """Plain steps that the coming step may lose: one, CREDIT once all it holds was saved."""
        return min(max(self.credit, 0.0), CREDIT if self.saved >= self._most else 1.0)

    def price(self, rows: int, cached: int) -> float:
        """Tokens that as much time as a plain step takes would bring elsewhere, of all rows."""
        return rows * max(1.0, self.of(rows).speed) * self.costs.late(rows, cached)

    def observe(self, report: StepReport) -> float:
        """Learn from a step, unless it says nothing of decoding: it has a prompt, or something else
        than draft tokens kept it from beginning early. How many plain steps it took, without masks:
        a plain step under a grammar needs them too.
        """
        prompt, before, asked = self._prompt, self._before, max(report.allowed)
        self._prompt, self._before, self.steady = report.prefill, asked, False
        self._rows = rows = report.rows
        costs, in_round = self.costs, self.costs.measured.in_round
        cached = report.cached * rows // report.nodes
        # What it would have been without draft tokens: under a grammar no step is carried.
        ahead = costs.seen(rows, True) > 0.0 and not report.constrained
        plain, late = costs.plain(rows, cached, ahead), ahead and not report.carried
        whole, look = _unmasked(report) / plain, report.ms["draft"] / plain
        returns, nothing_found = self.of(rows), asked > 0 and not any(report.draft_tokens)
        if report.prefill or (late and (prompt or in_round)):
            return whole
        known = costs.seen(rows, ahead) >= MIN_REPEATS
        self.steady = known and not prompt and before == asked and not late
        if in_round and (asked or before):
            paid = min(whole, look + OUTLIER * max(report.nodes / rows, 2.0))
        elif nothing_found and not late:
            costs.follow(whole / (1.0 + max(look, returns.look.value)))
            paid = min(whole, OUTLIER)
            look = paid - 1.0
        else:
            without = costs.late(rows, cached) if late else 1.0
            paid = look + without * self._learn(report, cached, plain, without, late)
            look = max(look + without - 1.0, returns.look.value)
        if known or not in_round:
            brought = sum(map(len, report.tokens)) / rows
            returns.learn(brought, paid, look, asked > 0)
            self._settle(brought - paid, asked > 0 or before > 0)
        return whole

    def _learn(
        self, report: StepReport, cached: int, plain: float, without: float, late: bool
    ) -> float:
        """Teach the costs. Plain steps (`without` of them, as it is late) that the step took,
        drafting not counted, and no more than is the fault of draft tokens.
        """
        rows, costs, nodes = report.rows, self.costs, report.nodes
        ms = _unmasked(report) - report.ms["draft"]
        if costs.measured.padded:
            nodes = rows * (1 + max(report.draft_tokens))
        if nodes == rows:
            costs.learn_plain(rows, cached, report.carried, ms)
            return 1.0
        ratio, most = ms / plain / without, OUTLIER * costs.at_most(rows, nodes, cached)
        if not late or costs.seen(rows, False):
            costs.learn(rows, nodes, cached, ratio)
        return min(ratio, most)

    def _settle(self, gain: float, asked: bool) -> None:
        """So many plain steps were won (< 0: lost); asked: draft tokens have a part in that."""
        self.saved += gain * asked
        self.credit = min(self.credit + LOSS_SHARE + gain * asked, self._most)
        if self.credit < 0.0 and not self.empty:
            self.empty, self.times_empty = True, self.times_empty + 1
        elif self.credit >= CREDIT:
            self.empty = False

    def describe(self) -> dict[str, object]:
        """Facts for /server_info."""
        return {
            "step_ms_by_nodes": self.costs.describe(),
            "step_time_over_startup": round(self.costs.pace, 2),
            "plain_steps_saved": round(self.saved, 1),
            "speed_over_plain": round(self.of(self._rows).speed, 3),
            "credit": round(self.credit, 1),
            "disabled": self.empty,
            "times_disabled": self.times_empty,
        }


def _unmasked(report: StepReport) -> float:
    return sum(report.ms.values()) - report.ms["mask"]
