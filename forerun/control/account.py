"""One account of time: speculation lives on a credit of plain steps.

Every estimate can be wrong: of what draft tokens bring, of what they cost. So the outcome is kept
as well. A step that took m times as long as a plain one and gave its rows t tokens each has won
t - m plain steps. Losses are paid from a credit that grows by LOSS_SHARE of a step in every step;
draft tokens are asked for only while it covers the worst loss of the coming step. Over n steps
speculation can therefore lose CREDIT + LOSS_SHARE * n plain steps at most.
"""

from forerun.control.constants import CREDIT, DECAY, LOSS_SHARE, MIN_REPEATS, OUTLIER
from forerun.control.costs import LiveCosts, Mean
from forerun.control.report import StepReport
from forerun.control.step_costs import StepCosts


class Account:
    """What steps take on this machine now, and what speculation has won or lost.

    costs   of steps, corrected by every step. Where draft tokens are grown in the rounds of a
            device, steps of as many nodes do not take the same: only plain steps teach them
    saved   plain steps saved so far; negative: lost
    brought, paid  of a step that draft tokens were asked for in: tokens of a row, and plain steps
            that it took; means of the last few
    look    plain steps that looking for draft tokens takes on the host, a mean of the last few:
            found or not, the step cannot be carried
    steady  the last step was like the one before it: it took what such steps take
    empty   the credit is used up: no draft tokens until there is CREDIT again
    """

    def __init__(self, measured: StepCosts) -> None:
        self.costs, self.saved, self._most = LiveCosts(measured), 0.0, 4.0 * CREDIT
        # A device's look keeps the next step from beginning early: it takes some of them to tell.
        self.credit = self._most if measured.padded else CREDIT
        self.empty, self.times_empty = False, 0
        self.brought = Mean(1.0 + LOSS_SHARE, MIN_REPEATS)
        self.paid, self.look = Mean(1.0, MIN_REPEATS), Mean(0.0, MIN_REPEATS)
        # Of the step before: whether it had a prompt, and what a row was allowed at most.
        self._prompt, self._before, self.steady = False, 0, False

    @property
    def speed(self) -> float:
        """Of steps that draft tokens were asked for in, over plain decoding; a mean of the last."""
        return self.brought.value / self.paid.value

    def covers(self, loss: float) -> bool:
        """Whether the credit covers a loss of so many plain steps."""
        return not self.empty and loss <= self.credit

    def observe(self, report: StepReport) -> float:
        """Learn from a step, unless it says nothing of decoding: it has a prompt, or something else
        than draft tokens kept it from beginning early. How many plain steps it took, without masks:
        a plain step under a grammar needs them too.
        """
        prompt, before, asked = self._prompt, self._before, max(report.allowed)
        self._prompt, self._before, self.steady = report.prefill, asked, False
        rows, costs, in_round = report.rows, self.costs, self.costs.measured.in_round
        cached = report.cached * rows // report.nodes
        # What it would have been without draft tokens: under a grammar no step is carried.
        ahead = costs.seen(rows, True) > 0.0 and not report.constrained
        plain, late = costs.plain(rows, cached, ahead), ahead and not report.carried
        whole, look = (report.total_ms - report.ms["mask"]) / plain, report.ms["draft"] / plain
        if report.prefill or (late and (prompt or in_round)):
            return whole
        known = costs.seen(rows, ahead) >= MIN_REPEATS
        self.steady = known and not prompt and before == asked and not late
        if in_round and (asked or before):
            paid = min(whole, look + OUTLIER * max(report.nodes / rows, 2.0))
        else:
            without = costs.late(rows, cached) if late else 1.0
            paid = look + without * self._learn(report, cached, plain, without, late)
            look += without - 1.0
        if known or not in_round:
            brought = sum(map(len, report.tokens)) / rows
            self._mean(brought, paid, look, asked > 0)
            self._settle(brought - paid, asked > 0 or before > 0)
        return whole

    def _learn(
        self, report: StepReport, cached: int, plain: float, without: float, late: bool
    ) -> float:
        """Teach the costs. Plain steps (`without` of them, as it is late) that the step took,
        drafting not counted, and no more than is the fault of draft tokens.
        """
        rows, costs, nodes = report.rows, self.costs, report.nodes
        ms = report.total_ms - report.ms["mask"] - report.ms["draft"]
        if costs.measured.padded:
            nodes = rows * (1 + max(report.draft_tokens))
        if nodes == rows:
            costs.learn_plain(rows, cached, report.carried, ms)
            return 1.0
        ratio, most = ms / plain / without, OUTLIER * costs.at_most(rows, nodes, cached)
        if not late or costs.seen(rows, False):
            costs.learn(rows, nodes, cached, ratio)
        return min(ratio, most)

    def _mean(self, brought: float, paid: float, look: float, asked: bool) -> None:
        """What was seen counts for less with every step: the text becomes another."""
        for mean, value in ((self.brought, brought), (self.paid, paid), (self.look, look)):
            mean.seen *= DECAY
            if asked:
                mean.learn(value - mean.value)

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
            "speed_over_plain": round(self.speed, 3),
            "credit": round(self.credit, 1),
            "disabled": self.empty,
            "times_disabled": self.times_empty,
        }
