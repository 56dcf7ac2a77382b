"""Never slower than plain decoding: speculation lives on a credit of time.

Every estimate can be wrong: of what draft tokens bring, of what they cost. So the outcome is kept
as well. A step that took m times as long as a plain one and gave its rows t tokens each has won
t - m plain steps. Losses are paid from a credit that grows by SHARE of a step in every step; when
it is used up, speculation rests until there is some again. Over n steps it can therefore lose
START + SHARE * n plain steps at most, and what it had won before up to MOST.
"""

from forerun.control.cost_model import LiveCosts, StepCosts

START = 2.0
"""Plain steps of credit that speculation begins with, and begins again with after a rest."""
SHARE = 0.015
"""Credit that every step adds, in plain steps."""
MAX_LOSS_SHARE = 0.25
"""Share of the credit that one step may lose: sixteen wrong draft tokens beside four rows would
cost more than the credit there is at first."""
MOST = 8.0
"""Credit at most: what was won long ago must not be lost at leisure."""
INITIAL_GAIN = 0.1
"""What speculation is believed to win per step before it was tried, in plain steps."""
GAIN_EMA_WEIGHT = 0.05
"""Share of what is believed of it that comes from the last step with draft tokens or a look for
some."""
OUTLIER_FACTOR = 1.5
"""A step that took longer than this times what is believed of it was interrupted by something
else; no more is put down to its draft tokens."""

DISABLED = "off: lately speculation took more time than it saved"


class SlowdownGuard:
    """What steps cost on this machine now, and what speculation has won or lost.

    disabled  speculation has used up its credit: no draft tokens in the coming step
    won      plain steps won so far
    gain_ema  won per step that drafts were looked for in, a mean of the last few of these
    """

    def __init__(self, measured: StepCosts) -> None:
        self.costs = LiveCosts(measured)
        self.disabled = False
        self.rests = 0
        self.won = 0.0
        self.gain_ema = INITIAL_GAIN
        self._credit = START

    def ran(
        self,
        rows: int,
        nodes: int,
        cached: int,
        tokens: int,
        ms: float,
        drafting_ms: float,
        drafting_allowed: bool = True,
    ) -> None:
        """A step without prefill is over.

        rows         sequences it advanced; `nodes` known tokens and draft tokens
        cached       cached tokens that the nodes see, summed over the nodes
        tokens       that came out
        ms           the whole step but for drafting; drafting_ms: that
        drafting_allowed  whether some row was allowed draft tokens
        """
        believed = self.costs.step_ms_of(nodes, cached)
        plain = spent = believed
        if nodes > rows:
            plain = self.costs.step_ms_of(rows, cached * rows // nodes)
            spent = min(ms, OUTLIER_FACTOR * believed)
        self.costs.learn(nodes, ms, believed)
        gain = tokens / rows - (spent + drafting_ms) / plain
        if drafting_allowed:
            self.gain_ema += GAIN_EMA_WEIGHT * (gain - self.gain_ema)
        self._settle(gain)

    def _settle(self, gain: float) -> None:
        """`gain` plain steps were won (< 0: lost) in the last step."""
        self.won += gain
        # What a disabled drafter still costs is no reason to rest longer.
        self._credit = min(self._credit + SHARE + (0.0 if self.disabled else gain), MOST)
        if self._credit < 0.0 and not self.disabled:
            self.disabled, self.rests = True, self.rests + 1
        elif self._credit >= START:
            self.disabled = False

    @property
    def max_slowdown(self) -> float:
        """How many times the time of a plain step a step with draft tokens may take, all being
        wrong.
        """
        return 1.0 + MAX_LOSS_SHARE * max(self._credit, 0.0)

    def describe(self) -> dict[str, object]:
        """Facts for /server_info."""
        return {
            "step_ms": self.costs.describe(),
            "slowdown": round(self.costs.slowdown, 2),
            "plain_steps_saved": round(self.won, 1),
            "saved_per_step_lately": round(self.gain_ema, 3),
            "resting": self.disabled,
            "rests": self.rests,
        }
