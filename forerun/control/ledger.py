"""What draft tokens of one source brought and cost, and the credit that they live on."""

from dataclasses import dataclass, field

from forerun.control.constants import CREDIT, DECAY, LOSS_SHARE, MIN_REPEATS
from forerun.control.costs import Mean


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


class Ledger:
    """The gain or loss of one source of draft tokens so far, in plain steps, against decoding
    without it.

    limit   largest credit
    credit  plain steps that it may lose
    saved   plain steps saved so far; negative: lost
    empty   the credit is used up: no draft tokens until it is back at CREDIT
    """

    def __init__(self, credit: float = CREDIT) -> None:
        self.limit, self.credit, self.saved = 4.0 * CREDIT, credit, 0.0
        self.empty, self.times_empty = False, 0
        self._returns: dict[int, Returns] = {}  # By powers of two of rows.

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
