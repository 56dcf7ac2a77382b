"""Autoscaling, simulated: Ray Serve's delays and forerun.ray's policy."""

import random
from functools import partial
from math import ceil
from types import SimpleNamespace

from bench.simulated_fleet import (
    DOCUMENTS,
    LARGE,
    Fleet,
    Replica,
    Router,
    arrive,
    conversations,
    summary,
)
from forerun.ray.scale import QueueAndCache

LOOK, UP, DOWN, START = 10.0, 30.0, 600.0, 40.0
"""Seconds: between two looks of Ray Serve's autoscaling at its replicas; for so long they must be
too few, or too many, before there are others (its defaults); until a new one is ready."""


def profile(share: float) -> float:
    """How many of the most conversations there are, by the share of the time that is over: little,
    then four times as much within a quarter of the time, then little again.
    """
    return min(1.0, max(0.25, 0.25 + 3 * (share - 0.2)) if share < 0.75 else 0.25)


class Scaling:
    """Ray Serve's autoscaling by forerun.ray's policy. used: replicas times seconds."""

    def __init__(self, fleet: Fleet, cache: float, target: float, least: int) -> None:
        self.fleet, self.policy, self.least = fleet, QueueAndCache(target, cache), least
        self.since, self.used, self.peak = 0.0, 0.0, least
        for replica in list(fleet.replicas.values())[least:]:
            replica.taking = False
        self.count = least
        fleet.at(LOOK, self.look)

    def look(self, now: float) -> None:
        """Decide, as Ray does: the wish has to last."""
        there = list(self.fleet.replicas.values())
        self.used += LOOK * self.count
        in_flight = sum(len(each.running) + len(each.waiting) for each in there)
        held = {"cache": {each.name: each.held() / each.device.cache for each in there}}
        context = SimpleNamespace(aggregated_metrics=held, total_num_requests=in_flight)
        wanted = max(self.least, min(ceil(self.policy(context)[0]), len(self.fleet.replicas)))
        if wanted == self.count:
            self.since = now
        elif now - self.since >= (UP if wanted > self.count else DOWN):
            self.change(wanted, now)
        self.fleet.at(now + LOOK, self.look)

    def change(self, wanted: int, now: float) -> None:
        """Start replicas, or drain some."""
        names = list(self.fleet.replicas)
        for name in names[self.count : wanted]:
            self.fleet.at(now + START, partial(self.begun, name))
        for name in names[wanted : self.count]:
            self.fleet.replicas[name].taking = False
        self.count, self.since, self.peak = wanted, now, max(self.peak, wanted)

    def begun(self, name: str, _: float) -> None:
        """It is ready, unless it was ended before."""
        self.fleet.replicas[name].taking = list(self.fleet.replicas).index(name) < self.count


def scaled(cache: float, target: float, load: float, seconds: float, seed: int) -> dict[str, float]:
    """A day in short with autoscaling: what clients saw, and replicas in the mean and at most.

    load  conversations a second at most
    """
    made = [Replica(f"r{index}", LARGE, bounded=True) for index in range(64)]
    fleet, luck = Fleet(made, [Router("prefix")], seed), random.Random(seed)  # noqa: S311
    scaling = Scaling(fleet, cache, target, least=2)
    every = conversations(DOCUMENTS, load, seconds, seed)
    arrive(fleet, [one for one in every if luck.random() < profile(one.begins / seconds)], seconds)
    fleet.run(seconds)
    waits = [1e3 * ((turn.first or 0) - turn.arrived) for turn in fleet.turns]
    rates = [
        turn.answer / max(1e-3, turn.done - turn.first)
        for turn in fleet.turns
        if turn.first and turn.done is not None
    ]
    tokens = sum(turn.answer for turn in fleet.turns) / seconds
    report = summary(waits, rates, tokens, 100 * fleet.cached_tokens / max(1, fleet.prompt_tokens))
    return report | {"replicas_mean": scaling.used / seconds, "replicas_most": scaling.peak}
