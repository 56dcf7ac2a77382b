"""Never slower than plain decoding: speculation lives on a credit of time.

Every estimate can be wrong: of what draft tokens bring, of what they cost. So the outcome is kept
as well. A step that took m times as long as a plain one and gave its rows t tokens each has won
t - m plain steps. Losses are paid from a credit that grows by LOSS_SHARE of a step in every step;
when it is used up, speculation is disabled until there is CREDIT again. Over n steps it can
therefore lose CREDIT + LOSS_SHARE * n plain steps at most, and of what it won before MAX_CREDIT.
"""

from collections.abc import Iterable

from forerun.control.acceptance import CERTAIN
from forerun.control.constants import (
    CREDIT,
    DECAY,
    INITIAL_SPEED,
    LOSS_SHARE,
    MAX_CREDIT,
    MIN_REPEATS,
    NEW_OUTLIER,
    NEW_SHARE,
    OUTLIER_FACTOR,
)
from forerun.control.cost_model import LiveCosts
from forerun.control.report import StepReport
from forerun.control.step_costs import StepCosts


class SlowdownGuard:
    """What steps cost on this machine now, and what speculation has won or lost.

    costs           of steps, corrected by every step
    late            how many times as long a step takes that is not carried, where steps are
    disabled        speculation has used up its credit: no draft tokens in the coming step
    times_disabled  how often it was
    saved           plain steps saved so far; negative: lost
    gain            the same of a step that draft tokens were looked for in, a mean of the last few

    free  draft tokens are looked for on the host, in the text: no step is carried on from one that
          does, and the loss is theirs
    """

    def __init__(self, measured: StepCosts, free: bool = False) -> None:
        self.costs = LiveCosts(measured)
        self.disabled, self.times_disabled = False, 0
        self.saved = self.gain = 0.0
        self._credit = CREDIT
        self._brought, self._paid, self._looks = INITIAL_SPEED, 1.0, MIN_REPEATS
        self.late, self._late_steps = 1.0, 0
        # Steps that were carried; whether draft tokens were looked for in the last step, which no
        # step is carried on from; whether it had a prompt, which none is either.
        self._carried, self._looked, self._prompt = 0, False, True
        self._free = free

    @property
    def speed(self) -> float:
        """How many times as fast as plain decoding steps are that draft tokens were looked for in;
        a mean of the last few of these.
        """
        return self._brought / self._paid

    @property
    def plain_at_once(self) -> int:
        """Plain steps in a row that tell what one takes: what follows a prompt or a look is not
        carried, where steps are.
        """
        return MIN_REPEATS if self._carried else 1

    @property
    def max_loss(self) -> float:
        """Plain steps that the coming step may lose if all that is uncertain in it is wrong."""
        return CREDIT * max(self._credit, 0.0) / MAX_CREDIT

    @property
    def max_new_loss(self) -> float:
        """The same of a step larger than those seen; twice as large can always be tried."""
        return NEW_SHARE * max(self._credit, CREDIT)

    def worthwhile(
        self, worth: list[float], ms: Iterable[tuple[float, float]], plain: float, rows: int
    ) -> tuple[int, float]:
        """How many of the candidates, best first, bring most beyond what their time would bring
        elsewhere, of those that can be afforded if all that is not certain turns out wrong; and
        how many tokens that is.

        worth  tokens that each brings
        ms     of a step of `rows` rows with the first, the first two, ... (`plain`: with none):
               what is believed, and what it may take if that is wrong
        """
        price = rows * max(1.0, self.speed)
        most_longer, most_new = self.max_loss * plain, self.max_new_loss * plain
        best, most, tokens, certain, certain_longest = 0, 0.0, 0.0, plain, plain
        for number, (value, (time, longest)) in enumerate(zip(worth, ms, strict=True), 1):
            tokens += value
            if value >= CERTAIN:
                certain, certain_longest = time, longest
            if time - certain > most_longer or longest - certain_longest > most_new:
                break
            won = tokens - price * (time / plain - 1.0)
            if won > most:
                best, most = number, won
        return best, most

    def observe(self, report: StepReport) -> None:
        """Learn from a step. One with a prefill says nothing of decoding.

        Masks are not counted: a plain step under a grammar needs them too.
        """
        if report.prefill:
            self._prompt = True
            return
        rows, nodes = report.rows, report.nodes
        ms = report.total_ms - report.ms["draft"] - report.ms["mask"]
        believed = plain = self.costs.one(nodes, report.cached)
        late = self._lateness(report, ms / believed)
        spent = late * believed
        if nodes > rows:
            plain = self.costs.one(rows, report.cached * rows // nodes)
            longest = late * self.costs.at_most(nodes, report.cached, believed)
            spent = min(ms, OUTLIER_FACTOR * longest)
        asked, before = any(report.allowed), self._looked
        self._looked = self._free and asked and self._carried > 0
        if report.constrained or self._prompt or not (self._looked or before):
            plain *= late  # It would not have been carried either.
        self._prompt = False
        self.costs.learn(nodes, ms / late, believed)
        brought = sum(map(len, report.tokens)) / rows
        paid = (spent + report.ms["draft"]) / plain
        if asked:
            # A plain mean at first, in which what is believed before counts for a few.
            self._looks += 1
            weight = max(1.0 - DECAY, 1.0 / self._looks)
            self._brought += weight * (brought - self._brought)
            self._paid += weight * (paid - self._paid)
            self.gain += weight * (brought - paid - self.gain)
        self._settle(brought - paid, asked or before)

    def _lateness(self, report: StepReport, ratio: float) -> float:
        """How many times as long the step took as one that is carried; ratio: as what is believed,
        which is said of carried steps once there are such. Steps without draft tokens teach it.
        """
        self._carried += report.carried
        if report.carried or self._carried < MIN_REPEATS:
            return 1.0
        if report.nodes == report.rows:
            self._late_steps += 1
            weight = max(1.0 - DECAY, 1.0 / self._late_steps)
            self.late += weight * (min(max(ratio, 1.0), NEW_OUTLIER) - self.late)
        return self.late

    def _settle(self, gain: float, asked: bool) -> None:
        """`gain` plain steps were won (< 0: lost) in the last step; whether a drafter was asked."""
        self.saved += gain
        # What a drafter costs that is not asked is no reason to ask it less.
        gain *= asked and not self.disabled
        self._credit = min(self._credit + LOSS_SHARE + gain, MAX_CREDIT)
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
            "late_over_carried": round(self.late, 2),
            "disabled": self.disabled,
            "times_disabled": self.times_disabled,
        }
