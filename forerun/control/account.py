"""One account of time: speculation lives on a credit of plain steps.

Every estimate can be wrong: of what draft tokens bring, of what they cost. So the outcome is kept
as well. A step that took m times as long as a plain one and gave its rows t tokens each has won
t - m plain steps. Losses are paid from a credit that grows by LOSS_SHARE of a step in every step;
draft tokens are asked for only while it covers the worst loss of the coming step. Over n steps
speculation can therefore lose CREDIT + LOSS_SHARE * n plain steps at most.
"""

from forerun.control.constants import CREDIT, DECAY, LOSS_SHARE, MIN_REPEATS, OUTLIER, PLAIN_EVERY
from forerun.control.cost_model import LiveCosts
from forerun.control.report import StepReport
from forerun.control.step_costs import StepCosts


class Account:
    """What a plain step takes on this machine now, and what speculation has won or lost.

    costs   of steps by nodes, corrected by every step
    late    how many times as long a plain step takes that is not carried, where steps are
    saved   plain steps saved so far; negative: lost
    gain    the same of a step that draft tokens were asked for in, a mean of the last few
    steady  the last step was like the one before it: it took what such steps take
    empty   the credit is used up: no draft tokens until there is CREDIT again

    in_round  draft tokens are grown in the rounds of a device, so that steps of as many nodes do
              not take the same: only plain steps teach `costs`
    losing    see Shapes
    free      draft tokens are looked for on the host: no step is carried on from one that does
    """

    def __init__(
        self, measured: StepCosts, in_round: bool = False, free: bool = False, losing: bool = False
    ) -> None:
        self.costs, self._in_round, self._free = LiveCosts(measured), in_round, free
        self.saved = self.gain = 0.0
        # What goes plain in rounds stays plain for its answer: going back takes a run-up.
        self._refill = 8.0 * CREDIT if losing else CREDIT
        self._most = max(4.0 * CREDIT, self._refill)
        # A device's look keeps the next step from beginning early: it takes some of them to tell.
        self.credit = self._most if measured.padded else self._refill
        self.empty, self.times_empty = False, 0
        self._brought, self._paid, self._asked = 1.0 + LOSS_SHARE, 1.0, MIN_REPEATS
        self._look, self._rest = 0.0, 0
        self.late, self._late_steps, self._carried = 1.0, 0, 0
        # Of the step before: whether it had a prompt, and what a row was allowed at most.
        self._prompt, self._before, self.steady = True, 0, False

    @property
    def speed(self) -> float:
        """How many times as fast as plain decoding steps are that draft tokens were asked for in;
        a mean of the last few.
        """
        return self._brought / self._paid

    def covers(self, loss: float) -> bool:
        """Whether the credit covers a loss of so many plain steps."""
        return not self.empty and loss <= self.credit

    @property
    def look_loss(self) -> float:
        """Plain steps that looking for draft tokens takes on the host, found or not: a step that
        looks is not carried.
        """
        return self._look + self.late - 1.0

    @property
    def sure(self) -> bool:
        """Whether enough plain steps were seen to know what they take: carried ones, and one after
        a look for draft tokens, which is not.
        """
        enough = not self._in_round or self.costs.steps >= MIN_REPEATS
        some_carried = 0 < self._carried < MIN_REPEATS
        return (
            enough and not some_carried and not (self._asked > MIN_REPEATS and self._late_unknown)
        )

    @property
    def _late_unknown(self) -> bool:
        """Whether no plain step told yet what one takes that is not carried, where others are."""
        return self._free and self._carried >= MIN_REPEATS and not self._late_steps

    def plain_ms(self, report: StepReport) -> float:
        """What a step with the same rows takes that has no draft tokens."""
        return self.costs.one(report.rows, report.cached * report.rows // report.nodes)

    def observe(self, report: StepReport) -> None:
        """Learn from a step. One with a prompt says nothing of decoding.

        Masks are not counted: a plain step under a grammar needs them too.
        """
        prompt, before, asked = self._prompt, self._before, max(report.allowed)
        self._prompt, self._before, self.steady = report.prefill, asked, False
        if report.prefill:
            return
        rows, padded = report.rows, self.costs.measured.padded
        nodes = rows * (1 + max(report.draft_tokens)) if padded else report.nodes
        ms = report.total_ms - report.ms["draft"] - report.ms["mask"]
        plain, believed = self.plain_ms(report), self.costs.one(nodes, report.cached)
        late = self._lateness(report, ms / believed)
        self._carried += report.carried
        alone = self._carried < MIN_REPEATS
        self.steady = not prompt and before == asked and (report.carried or alone)
        spent = late * believed
        if self._in_round and (asked or before):
            spent = min(ms, OUTLIER * late * plain * max(nodes / rows, 2.0))
        elif nodes > rows:
            spent = min(ms, OUTLIER * late * self.costs.at_most(nodes, report.cached, believed))
        known = nodes == rows or not self._late_unknown
        if known and (not self._in_round or (self.steady and not asked)):
            self.costs.learn(nodes, ms / late, believed)
        if report.constrained or prompt or self._in_round or not (asked or before):
            plain *= late  # It would not have been carried either.
        brought, paid = sum(map(len, report.tokens)) / rows, (spent + report.ms["draft"]) / plain
        if self._in_round and not self.sure:
            return
        self._rest = 0 if asked else self._rest + 1
        if self._rest >= PLAIN_EVERY // 2:
            self._asked = 1  # The text is another: what was seen counts for little.
        if asked:
            # A plain mean at first, in which what is believed before counts for a few.
            self._asked += 1
            weight = max(1.0 - DECAY, 1.0 / self._asked)
            self._brought += weight * (brought - self._brought)
            self._paid += weight * (paid - self._paid)
            self._look += weight * (report.ms["draft"] / plain - self._look)
            self.gain += weight * (brought - paid - self.gain)
        self._settle(brought - paid, asked > 0 or before > 0)

    def _lateness(self, report: StepReport, ratio: float) -> float:
        """How many times as long the step took as one that is carried; ratio: as what is believed,
        which is said of carried steps once there are such. Plain steps teach it.
        """
        if report.carried or self._carried < MIN_REPEATS:
            return 1.0
        if report.nodes == report.rows:
            self._late_steps += 1
            weight = max(1.0 - DECAY, 1.0 / self._late_steps)
            self.late += weight * (min(max(ratio, 1.0), 2.0 * OUTLIER) - self.late)
        return self.late

    def _settle(self, gain: float, asked: bool) -> None:
        """`gain` plain steps were won (< 0: lost) in the last step; whether draft tokens, or a step
        before that had some, have a part in that.
        """
        self.saved += gain
        self.credit = min(self.credit + LOSS_SHARE + gain * asked, self._most)
        if self.credit < 0.0 and not self.empty:
            self.empty, self.times_empty = True, self.times_empty + 1
        elif self.credit >= self._refill:
            self.empty = False

    def describe(self) -> dict[str, object]:
        """Facts for /server_info."""
        return {
            "step_ms_by_nodes": self.costs.describe(),
            "step_time_over_startup": round(self.costs.pace, 2),
            "plain_steps_saved": round(self.saved, 1),
            "speed_over_plain": round(self.speed, 3),
            "late_over_carried": round(self.late, 2),
            "credit": round(self.credit, 1),
            "disabled": self.empty,
            "times_disabled": self.times_empty,
        }
