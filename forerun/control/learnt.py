"""Saves and restores what an adaptive policy learned while serving: costs of steps, gains and
losses, how often draft tokens were right. A restored policy decides as the saved one did.
"""

from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

import msgspec
import numpy as np

from forerun.control.account import Balance, Returns
from forerun.control.adaptive import AdaptivePolicy
from forerun.control.costs import LiveCosts, Mean
from forerun.control.shapes import Shapes, ShapeStats
from forerun.control.step_costs import StepCosts

LEAST_STEPS = 64
"""Fewest steps in a saved state for it to replace the measurements of a new start."""

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class _Costs:
    """State of LiveCosts. plain: (rows, context, whether carried) and the mean of such plain steps,
    the newest context last.
    """

    measured: StepCosts
    steps: int
    pace: float
    corrections: list[Mean]
    largest_seen: int
    plain: list[tuple[int, int, bool, Mean]]


@dataclass(frozen=True, slots=True)
class _Balance:
    """State of Balance."""

    credit: float
    saved: float
    empty: bool
    times_empty: int
    returns: dict[int, Returns]


@dataclass(frozen=True, slots=True)
class _Shapes:
    """State of Shapes."""

    baseline: Mean
    buckets: dict[int, ShapeStats]
    tries: list[float]
    right: list[float]


@dataclass(frozen=True, slots=True)
class _Policy:
    """State of AdaptivePolicy.

    calibration  draft tokens that were expected to be right, and that were
    model        None if the draft model has no balance of its own
    shapes       None without a draft model
    with_model   whether a draft model had a part in the last draft
    """

    costs: _Costs
    main: _Balance
    model: _Balance | None
    calibration: tuple[float, float]
    shapes: _Shapes | None
    counters: tuple[int, int, int]
    with_model: bool


class PolicyLearner:
    """The Learner of an adaptive policy."""

    def __init__(self, policy: AdaptivePolicy) -> None:
        self._policy = policy

    def learnt(self) -> bytes:
        """Implement Learner.learnt."""
        policy, account = self._policy, self._policy.account
        calibration, own = policy.drafts.calibration, account.model is not account.main
        state = _Policy(
            costs=_costs_of(account.costs),
            main=_balance_of(account.main),
            model=_balance_of(account.model) if own else None,
            calibration=(calibration.expected, calibration.right),
            shapes=_shapes_of(policy.shapes) if policy.shapes is not None else None,
            counters=(policy.since_allowed, policy.in_a_row, policy.pause),
            with_model=account.last_with_model,
        )
        return msgspec.msgpack.encode(state)

    def relearn(self, learnt: bytes) -> bool:
        """Implement Learner.relearn."""
        policy, account, state = self._policy, self._policy.account, decoded(learnt, _Policy)
        if state is None or not _fits(policy, state):
            return False
        account.costs = _live_costs(state.costs)
        _restore_balance(account.main, state.main)
        if state.model is not None:
            _restore_balance(account.model, state.model)
        calibration = policy.drafts.calibration
        calibration.expected, calibration.right = state.calibration
        if policy.shapes is not None and state.shapes is not None:
            policy.shapes.baseline = state.shapes.baseline
            policy.shapes.buckets = state.shapes.buckets
            policy.shapes.tries = np.array(state.shapes.tries)
            policy.shapes.right = np.array(state.shapes.right)
        policy.since_allowed, policy.in_a_row, policy.pause = state.counters
        account.last_with_model = state.with_model
        return True


def decoded(learnt: bytes, kind: type[State]) -> State | None:
    """Return the state of type `kind` that msgpack `learnt` encodes; None if the bytes encode
    something else, or a number that is not finite.
    """
    try:
        state = msgspec.msgpack.decode(learnt, type=kind)
    except (msgspec.MsgspecError, ValueError, TypeError):
        return None
    return state if _finite(msgspec.to_builtins(state)) else None


def _finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return not isinstance(value, float) or isfinite(value)


def _fits(policy: AdaptivePolicy, state: _Policy) -> bool:
    """Return whether a saved state has the configuration of `policy`, and at least LEAST_STEPS
    steps.
    """
    account, shapes, costs = policy.account, policy.shapes, state.costs
    measured, now = costs.measured, account.costs.measured
    alike = (measured.drafts_in_step, measured.padded) == (now.drafts_in_step, now.padded)
    alike = alike and 2 <= len(measured.nodes) == len(measured.verify_ms)
    drafted = sum(each.steps for each in state.shapes.buckets.values()) if state.shapes else 0
    alike = alike and costs.steps + drafted >= LEAST_STEPS
    if not alike or len(costs.corrections) != len(LiveCosts(measured).counts):
        return False
    if (state.model is None) != (account.model is account.main):
        return False
    if shapes is None or state.shapes is None:
        return shapes is None and state.shapes is None
    counts = {len(state.shapes.tries), len(state.shapes.right)}
    known = {shape for bucket in state.shapes.buckets.values() for shape in bucket.relative_cost}
    return counts == {len(shapes.tries)} and known <= set(shapes.shapes)


def _costs_of(costs: LiveCosts) -> _Costs:
    newest = [costs.plain_means[key] for key in costs.plain_means if key[1] is None]
    plain = [(*key, mean) for key, mean in costs.plain_means.items()]
    plain.sort(key=lambda each: any(each[3] is mean for mean in newest))
    return _Costs(
        measured=costs.measured,
        steps=costs.steps,
        pace=costs.log_pace,
        corrections=costs.corrections,
        largest_seen=costs.largest_seen,
        plain=[(rows, at, carried, mean) for rows, at, carried, mean in plain if at is not None],
    )


def _live_costs(state: _Costs) -> LiveCosts:
    costs = LiveCosts(state.measured)
    costs.steps, costs.log_pace = state.steps, state.pace
    costs.corrections, costs.largest_seen = state.corrections, state.largest_seen
    for rows, context, carried, mean in state.plain:
        costs.plain_means[rows, context, carried] = costs.plain_means[rows, None, carried] = mean
    return costs


def _balance_of(balance: Balance) -> _Balance:
    about = balance.credit, balance.saved, balance.empty, balance.times_empty
    return _Balance(*about, balance.returns)


def _restore_balance(balance: Balance, state: _Balance) -> None:
    balance.credit, balance.saved = min(state.credit, balance.limit), state.saved
    balance.empty, balance.times_empty = state.empty, state.times_empty
    balance.returns = state.returns


def _shapes_of(shapes: Shapes) -> _Shapes:
    tries, right = shapes.tries.tolist(), shapes.right.tolist()
    return _Shapes(shapes.baseline, shapes.buckets, tries, right)
