"""Never slower than plain decoding: guessing lives on a credit of time.

Every estimate can be wrong: of what guesses bring, of what they cost. So the outcome is kept as
well. A step that took m times as long as a plain one and gave its rows t tokens each has won
t - m plain steps. Losses are paid from a credit that grows by SHARE of a step in every step; when
it is used up, speculation rests until there is some again. Over n steps it can therefore lose
START + SHARE * n plain steps at most, and what it had won before up to MOST.
"""

from forerun.spec.costs import LiveCosts, StepCosts

START = 2.0
"""Plain steps of credit that speculation begins with, and begins again with after a rest."""
SHARE = 0.015
"""Credit that every step adds, in plain steps."""
STAKE = 0.25
"""Share of the credit that one step may lose: sixteen wrong guesses beside four rows would cost
more than the credit there is at first."""
MOST = 8.0
"""Credit at most: what was won long ago must not be lost at leisure."""
HOPE = 0.1
"""What guessing is believed to win per step before it was tried, in plain steps."""
LATELY = 0.05
"""Share of what is believed of it that comes from the last step with guesses or a look for some."""
HICCUP = 1.5
"""A step that took longer than this times what is believed of it was interrupted by something
else; no more is put down to its guesses."""

RESTING = "off: lately guessing took more time than it saved"


class Ledger:
    """What steps cost on this machine now, and what guessing has won or lost.

    resting  speculation has used up its credit: no guesses in the coming step
    won      plain steps won so far
    lately   won per step that guesses were looked for in, a mean of the last few of these
    """

    def __init__(self, measured: StepCosts) -> None:
        self.costs = LiveCosts(measured)
        self.resting = False
        self.rests = 0
        self.won = 0.0
        self.lately = HOPE
        self._credit = START

    def ran(
        self,
        rows: int,
        nodes: int,
        cached: int,
        tokens: int,
        ms: float,
        drafting_ms: float,
        looked: bool = True,
    ) -> None:
        """A step without prefill is over.

        rows         sequences it advanced; `nodes` known tokens and guesses
        cached       cached tokens that the nodes see, summed over the nodes
        tokens       that came out
        ms           the whole step but for drafting; drafting_ms: that
        looked       whether some row was allowed guesses
        """
        believed = self.costs.step_ms_of(nodes, cached)
        plain = spent = believed
        if nodes > rows:
            plain = self.costs.step_ms_of(rows, cached * rows // nodes)
            spent = min(ms, HICCUP * believed)
        self.costs.learn(nodes, ms, believed)
        gain = tokens / rows - (spent + drafting_ms) / plain
        if looked:
            self.lately += LATELY * (gain - self.lately)
        self._settle(gain)

    def _settle(self, gain: float) -> None:
        """`gain` plain steps were won (< 0: lost) in the last step."""
        self.won += gain
        # What a resting drafter still costs is no reason to rest longer.
        self._credit = min(self._credit + SHARE + (0.0 if self.resting else gain), MOST)
        if self._credit < 0.0 and not self.resting:
            self.resting, self.rests = True, self.rests + 1
        elif self._credit >= START:
            self.resting = False

    @property
    def dearest(self) -> float:
        """How many times the time of a plain step a step with guesses may take, all being wrong."""
        return 1.0 + STAKE * max(self._credit, 0.0)

    def describe(self) -> dict[str, object]:
        """Facts for /server_info."""
        return {
            "step_ms": self.costs.describe(),
            "slowdown": round(self.costs.slowdown, 2),
            "plain_steps_saved": round(self.won, 1),
            "saved_per_step_lately": round(self.lately, 3),
            "resting": self.resting,
            "rests": self.rests,
        }
