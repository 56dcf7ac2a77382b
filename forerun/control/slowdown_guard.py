"""Never slower than plain decoding: speculation lives on a credit of time.

Every estimate can be wrong: of what draft tokens bring, of what they cost. So the outcome is kept
as well. A step that took m times as long as a plain one and gave its rows t tokens each has won
t - m plain steps. Losses are paid from a credit that grows by LOSS_SHARE of a step in every step;
when it is used up, speculation is disabled until there is CREDIT again. Over n steps it can
therefore lose CREDIT + LOSS_SHARE * n plain steps at most, and of what it won before MAX_CREDIT.
"""

from forerun.control.constants import (
    CREDIT,
    DECAY,
    INITIAL_SPEED,
    LOSS_SHARE,
    MAX_CREDIT,
    MIN_REPEATS,
    NEW_SHARE,
    OUTLIER_FACTOR,
)
from forerun.control.cost_model import LiveCosts
from forerun.control.report import StepReport
from forerun.control.step_costs import StepCosts


class SlowdownGuard:
    """What steps cost on this machine now, and what speculation has won or lost.

    costs           of steps, corrected by every step
    disabled        speculation has used up its credit: no draft tokens in the coming step
    times_disabled  how often it was
    saved           plain steps saved so far; negative: lost
    """

    def __init__(self, measured: StepCosts) -> None:
        self.costs = LiveCosts(measured)
        self.disabled = False
        self.times_disabled = 0
        self.saved = 0.0
        self._credit = CREDIT
        self._brought, self._paid, self._looks = INITIAL_SPEED, 1.0, MIN_REPEATS

    @property
    def speed(self) -> float:
        """How many times as fast as plain decoding steps are that draft tokens were looked for in;
        a mean of the last few of these.
        """
        return self._brought / self._paid

    @property
    def max_loss(self) -> float:
        """Plain steps that the coming step may lose if all that is uncertain in it is wrong."""
        return CREDIT * max(self._credit, 0.0) / MAX_CREDIT

    @property
    def max_new_loss(self) -> float:
        """The same of a step larger than those seen, if it takes as long as it may."""
        return max(NEW_SHARE * self._credit, self.max_loss)

    def observe(self, report: StepReport) -> None:
        """Learn from a step. One with a prefill says nothing of decoding.

        Masks are not counted: a plain step under a grammar needs them too.
        """
        if report.prefill:
            return
        rows, nodes = report.rows, report.nodes
        ms = report.total_ms - report.ms["draft"] - report.ms["mask"]
        believed = plain = spent = self.costs.one(nodes, report.cached)
        if nodes > rows:
            plain = self.costs.one(rows, report.cached * rows // nodes)
            spent = min(ms, OUTLIER_FACTOR * self.costs.at_most(nodes, report.cached, believed))
        self.costs.learn(nodes, ms, believed)
        brought = sum(map(len, report.tokens)) / rows
        paid = (spent + report.ms["draft"]) / plain
        if any(report.allowed):
            # A plain mean at first, in which what is believed before counts for a few.
            self._looks += 1
            weight = max(1.0 - DECAY, 1.0 / self._looks)
            self._brought += weight * (brought - self._brought)
            self._paid += weight * (paid - self._paid)
        self._settle(brought - paid)

    def _settle(self, gain: float) -> None:
        """`gain` plain steps were won (< 0: lost) in the last step."""
        self.saved += gain
        # What a disabled drafter still costs is no reason to stay disabled for longer.
        self._credit = min(self._credit + LOSS_SHARE + (0.0 if self.disabled else gain), MAX_CREDIT)
        if self._credit < 0.0 and not self.disabled:
            self.disabled, self.times_disabled = True, self.times_disabled + 1
        elif self._credit >= CREDIT:
            self.disabled = False

    def describe(self) -> dict[str, object]:
        """Facts for /server_info."""
        return {
            "step_ms_by_nodes": self.costs.describe(),
            "step_time_over_startup": round(self.costs.pace, 2),
            "plain_steps_saved": round(self.saved, 1),
            "speed_over_plain": round(self.speed, 3),
            "disabled": self.disabled,
            "times_disabled": self.times_disabled,
        }
