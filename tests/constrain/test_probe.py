"""What the compiling process calls expensive, by a clock that the test turns."""

from itertools import pairwise

import pytest

from forerun.constrain.isolation import probe

SLOW = 0.01


class Clock:
    """The processor time of a thread that works only where an automaton says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Timed:
    """Takes any of 16 tokens for ever; `cost` says what each takes, by number of the automaton that
    it was forked from and of the token: seconds, or None for a limit.
    """

    complete, error = False, ""

    def __init__(self, clock, cost, number, taken=0):
        self._clock, self._cost, self._number, self._taken = clock, cost, number, taken

    def fork(self):
        return Timed(self._clock, self._cost, self._number, self._taken)

    def mask(self):
        return b"\xff\xff"

    def take(self, token):
        self._taken += 1
        seconds = self._cost(self._number, self._taken)
        self.error = "a limit was reached" if seconds is None else ""
        self._clock.now += seconds or 0.0
        return seconds is not None


@pytest.fixture
def findings(monkeypatch):
    """What the probe says of automata of such cost, and how many it began."""
    clock = Clock()
    monkeypatch.setattr(probe, "thread_time", clock)

    def ask(cost):
        begun = []

        def begin():
            begun.append(Timed(clock, cost, len(begun)))
            return begun[-1]

        return probe.expensive(begin, frozenset(), SLOW), len(begun)

    return ask


def once(step, seconds):
    """A cost of nothing, but for the first time that the first automaton takes this token."""
    left = [seconds]
    return lambda number, taken: left.pop() if left and (number, taken) == (0, step) else 0.0


@pytest.mark.parametrize("step", [1, 20, probe.STEPS])
def test_a_bad_moment_of_the_machine_makes_no_grammar_expensive(findings, step):
    assert findings(once(step, 2 * SLOW)) == (False, 2)


@pytest.mark.parametrize("step", [1, 20, probe.STEPS])
def test_a_step_that_is_slow_again_does(findings, step):
    assert findings(lambda number, taken: 2 * SLOW * (taken == step)) == (True, 2)


def test_another_step_that_is_slow_the_second_time_does_not(findings):
    costs = {(0, 20): 2 * SLOW, (1, 10): 2 * SLOW}
    assert findings(lambda *place: costs.pop(place, 0.0)) == (False, 2)


def test_what_used_up_the_patience_in_one_step_is_not_tried_again(findings):
    assert findings(once(20, 2 * probe.PATIENCE)) == (True, 1)


def test_a_limit_is_no_matter_of_time(findings):
    assert findings(lambda number, taken: None if taken == 20 else 0.0) == (True, 1)


def test_what_is_quick_is_not_walked_twice(findings):
    assert findings(lambda number, taken: SLOW / 1000) == (False, 1)


def test_many_quick_steps_end_the_search(findings):
    steps = []

    def cost(number, taken):
        steps.append(taken)
        return SLOW / 2

    assert findings(cost) == (False, 1)
    assert sum(b < a for a, b in pairwise(steps)) < probe.WALKS - 1, "not all walks"
