"""A fleet of replicas, simulated: which router, and whether to speculate under load.

    python bench/fleet.py routers|constants|speculation|scaling [--replicas 8 64] [--out FILE]

Each replica steps as an H100 with the 8B shape does (bench/results/h100-rounds.json): a step costs
by its rows, prompts by their tokens beside it, and a prefix that is still cached costs nothing.
Conversations arrive at random: agents with system prompts of their own, some agents far more often
than others, turns that follow each other after a pause. Replicas die and come back empty; some are
slow. Router and autoscaling are forerun.ray's own code. Everything is seeded: the same command
prints the same. `--plot FILE` draws it (SVG).
"""

import argparse
import heapq
import json
import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from math import ceil, log
from pathlib import Path
from statistics import mean, quantiles
from types import SimpleNamespace
from typing import Any

from bench.plots import charts
from forerun.ray.affinity import Affinity, PrefixAffinity
from forerun.ray.scale import QueueAndCache


@dataclass(frozen=True)
class Device:
    """What a replica runs on.

    step     milliseconds of a plain step by rows, between them on a line, and beyond
    chain    the same with three draft tokens of a head
    tokens   of such a step
    prefill  prompt tokens a millisecond
    chunk    of them in one step at most
    rows     that run at once
    cache    tokens of the prefix cache
    hop      milliseconds of a first token that are no step's: the network, the router
    """

    step: dict[int, float]
    chain: dict[int, float]
    tokens: float
    prefill: float
    chunk: int
    rows: int
    cache: int
    hop: float = 0.0

    def step_ms(self, rows: int, speculates: bool) -> float:
        """Milliseconds of a step of so many rows."""
        costs = self.chain if speculates else self.step
        (few, low), (many, high) = costs.items()
        return low + (high - low) * (rows - few) / (many - few)


H100 = Device(
    step={1: 6.96, 64: 10.35},
    chain={1: 8.50, 64: 14.33},
    # A head that is right .7, .7, .7 gives 1 + .7 + .49 + .34 = 2.5; this one .63, .6, .6.
    tokens=2.2,
    prefill=39.8,
    chunk=2048,
    rows=64,
    cache=400_000,
)
"""The 8B shape (bench/results/h100-rounds.json)."""


@dataclass(frozen=True)
class Workload:
    """Conversations: so many agents, some far more often asked (Zipf), with system prompts of their
    own; turns that follow each other after a pause; prompts and answers as of shared chats, which
    are log-normal; a fifth carry a document.

    system, document  blocks of TOKENS tokens
    asked, answer     tokens in the median
    pause             seconds in the mean
    """

    agents: int = 200
    system: int = 10
    document: int = 62
    asked: float = 60.0
    answer: float = 180.0
    pause: float = 8.0


LARGE = replace(H100, cache=100_000)
"""With the room that Llama-3-70B has on two devices of 96 GiB (docs/scaling.md)."""
DOCUMENTS = Workload(document=500)
"""A fifth carry 32,000 tokens."""
HOT = Workload(agents=1, system=250)
"""One agent alone, with a system prompt of 16,000."""
SMALL = Workload(agents=12, system=5, document=10, asked=30.0, answer=12.0, pause=3.0)
"""What two replicas of the default model on two cores can be asked."""
TOKENS = 64
"""Of a block of 256 characters (forerun.ray.affinity.BLOCK)."""


@dataclass
class Turn:
    """A request: its text is `blocks`, the last of them new; `answer` tokens come back."""

    blocks: tuple[int, ...]
    conversation: int
    answer: int
    arrived: float
    retry: Callable[["Turn", float], None]
    left: int = 0
    uncached: int = 0
    router: "Router | None" = None
    first: float | None = None
    done: float | None = None


@dataclass
class Replica:
    """speed: times as fast as others. taking: new requests. bounded: who runs has pages, and waits
    for them. cache: blocks that it has, the oldest first.
    """

    name: str
    device: Device = H100
    speed: float = 1.0
    alive: bool = True
    taking: bool = True
    speculates: bool = False
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    waiting: deque[Turn] = field(default_factory=deque)
    running: list[Turn] = field(default_factory=list)
    stepping: bool = False
    bounded: bool = False

    def held(self, more: Sequence[Turn] = ()) -> int:
        """Tokens that have pages, shared ones once, where `more` ran too."""
        turns = [*self.running, *more]
        blocks = len({block for turn in turns for block in turn.blocks})
        return blocks * TOKENS + sum(turn.answer for turn in turns)

    def admit(self) -> list[Turn]:
        """Take in who waits, while there are slots; what is cached of them need not be computed."""
        taken = []
        while self.waiting and len(self.running) < self.device.rows:
            if self.bounded and self.running and self.held([self.waiting[0]]) > self.device.cache:
                break
            turn = self.waiting.popleft()
            known = 0
            for block in turn.blocks:
                if block not in self.cache:
                    break
                self.cache.move_to_end(block)
                known += 1
            turn.uncached = (len(turn.blocks) - known) * TOKENS + TOKENS // 2
            self.running.append(turn)
            taken.append(turn)
        return taken

    def keep(self, blocks: Sequence[int]) -> None:
        """Cache blocks; the longest unused go."""
        for block in blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.device.cache // TOKENS:
            self.cache.popitem(last=False)


class Fleet:
    """One run. route: (turn, loads by name) -> name."""

    def __init__(self, replicas: list[Replica], routers: list["Router"], seed: int) -> None:
        self.replicas = {replica.name: replica for replica in replicas}
        self.routers, self.random = routers, random.Random(seed)  # noqa: S311
        self.clients = random.Random(seed)  # noqa: S311
        self.loads = {replica.name: 0 for replica in replicas}
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers, self.turns, self.lost = count(), [], 0
        self.prompt_tokens = self.cached_tokens = 0

    def at(self, when: float, what: Callable[[float], None]) -> None:
        """Call `what` at a time."""
        heapq.heappush(self.events, (when, next(self.numbers), what))

    def run(self, until: float) -> None:
        """Until a time."""
        while self.events and self.events[0][0] <= until:
            when, _, what = heapq.heappop(self.events)
            what(when)

    def ask(self, turn: Turn, now: float) -> None:
        """A client asks one of the routers, whichever."""
        there = [name for name, each in self.replicas.items() if each.alive and each.taking]
        turn.router = self.clients.choice(self.routers)
        name = turn.router.place(turn, there)
        self.loads[name] += 1
        turn.router.said[name] = self.loads[name]
        replica = self.replicas[name]
        replica.waiting.append(turn)
        if not replica.stepping:
            self.begin(replica, now)

    def begin(self, replica: Replica, now: float) -> None:
        """A step begins, where there is work."""
        for turn in replica.admit():
            self.prompt_tokens += len(turn.blocks) * TOKENS
            self.cached_tokens += len(turn.blocks) * TOKENS + TOKENS // 2 - turn.uncached
        replica.stepping = bool(replica.running)
        if not replica.stepping:
            return
        device = replica.device
        prompts, room = 0, device.chunk
        decoding = []
        for turn in replica.running:
            if turn.uncached:
                part = min(room, turn.uncached)
                turn.uncached -= part
                prompts, room = prompts + part, room - part
            if not turn.uncached:
                decoding.append(turn)
        took = device.step_ms(max(1, len(decoding)), replica.speculates) + prompts / device.prefill
        end = now + took / 1e3 / replica.speed
        self.at(end, lambda when: self.end(replica, decoding, when))

    def end(self, replica: Replica, decoding: list[Turn], now: float) -> None:
        """A step is over: those that decoded have tokens."""
        if not replica.alive:
            return
        for turn in decoding:
            each = replica.device.tokens if replica.speculates else 1.0
            whole = int(each) + (self.random.random() < each - int(each))
            if turn.first is None:
                turn.first = now
                replica.keep(turn.blocks)
            turn.left -= whole
            if turn.left <= 0:
                turn.done = now
                self.loads[replica.name] -= 1
                turn.router.ended(replica.name)
                self.turns.append(turn)
                turn.retry(turn, now)
        replica.running = [turn for turn in replica.running if turn.done is None]
        self.begin(replica, now)

    def kill(self, replica: Replica, now: float, back: float) -> None:
        """Its streams are lost, each with an error event; clients ask again at once."""
        replica.alive, replica.stepping = False, False
        again = [*replica.running, *replica.waiting]
        self.lost += len(again)
        replica.running, self.loads[replica.name] = [], 0
        replica.waiting.clear()
        replica.cache.clear()
        for router in self.routers:
            router.lost(replica.name)
        for turn in again:
            turn.left, turn.first = turn.answer, None
            self.ask(turn, now)

        def revive(when: float) -> None:
            replica.alive = True

        self.at(now + back, revive)


class Router:
    """Round robin, least load, or forerun.ray's.

    sent  requests of its own that each replica has
    said  what each replica had when this router last sent it one, less its own that ended since:
          all that it knows of what other routers send (Ray Serve's rejection protocol)
    """

    def __init__(self, kind: str, **options: float) -> None:
        self.kind, self.turn = kind, 0
        self.prefix = PrefixAffinity(**options)
        self.sent: Counter[str] = Counter()
        self.said: Counter[str] = Counter()

    def place(self, turn: Turn, names: list[str]) -> str:
        """The replica that a request goes to."""
        name = self.chosen(turn, {name: max(self.sent[name], self.said[name]) for name in names})
        self.sent[name] += 1
        return name

    def ended(self, name: str) -> None:
        """One of its requests is over."""
        self.sent[name] -= 1
        self.said[name] -= 1

    def chosen(self, turn: Turn, loads: dict[str, int]) -> str:
        """The replica, by loads that are known."""
        self.turn += 1
        if self.kind == "round robin":
            return list(loads)[self.turn % len(loads)]
        if self.kind == "least load":
            return min(loads, key=lambda name: loads[name])
        asked = Affinity(turn.blocks, turn.conversation)
        place = self.prefix.order(asked, loads)[0]
        self.prefix.sent(asked, place)
        return place

    def lost(self, name: str) -> None:
        """A replica died, with all that it had."""
        self.prefix.lost(name)
        self.sent[name] = self.said[name] = 0


@dataclass(frozen=True)
class Conversation:
    """begins: seconds; turns: (new blocks, tokens of the answer, pause before the next)."""

    number: int
    begins: float
    system: tuple[int, ...]
    turns: tuple[tuple[tuple[int, ...], int, float], ...]

    def prompt(self, turn: int) -> tuple[int, ...]:
        """All blocks of a turn's text. An answer is as many new blocks."""
        said = list(self.system)
        for blocks, _, _ in self.turns[: turn + 1]:
            said += blocks
        return tuple(said)


def conversations(work: Workload, rate: float, seconds: float, seed: int) -> list[Conversation]:
    """So many a second, of 1 to 8 turns."""
    random_, names = random.Random(seed), count(1)  # noqa: S311
    agents = [tuple(next(names) for _ in range(work.system)) for _ in range(work.agents)]
    weights = [1 / rank for rank in range(1, len(agents) + 1)]

    def blocks(tokens: float) -> list[int]:
        return [next(names) for _ in range(max(1, round(tokens / TOKENS)))]

    found, now = [], 0.0
    while now < seconds:
        system = random_.choices(agents, weights)[0]
        turns, before = [], blocks(work.document * TOKENS if random_.random() < 0.2 else 0)
        for _ in range(random_.choice((1, 1, 1, 2, 3, 4, 6, 8))):
            asked = before + blocks(random_.lognormvariate(log(work.asked), 1.0))
            answer = max(1, round(random_.lognormvariate(log(work.answer), 0.8)))
            turns.append((tuple(asked), answer, random_.expovariate(1 / work.pause)))
            before = blocks(answer)
        found.append(Conversation(len(found), now, system, tuple(turns)))
        now += random_.expovariate(rate)
    return found


def arrive(fleet: Fleet, asked: Sequence[Conversation], until: float) -> None:
    """Have them asked."""

    def say(one: Conversation, number: int, now: float) -> None:
        def then(turn: Turn, when: float) -> None:
            if number + 1 < len(one.turns) and when < until:
                pause = one.turns[number][2]
                fleet.at(when + pause, lambda t: say(one, number + 1, t))

        answer = one.turns[number][1]
        turn = Turn(one.prompt(number), one.number + 1, answer, now, then, left=answer)
        fleet.ask(turn, now)

    for one in asked:
        fleet.at(one.begins, lambda now, one=one: say(one, 0, now))


def simulated(
    replicas: int,
    load: float,
    routers: list[Router],
    seconds: float,
    seed: int = 1,
    device: Device = H100,
    work: Workload | None = None,
    **how: bool,
) -> dict[str, float]:
    """What clients see after a quarter of the time.

    load  conversations a second and replica
    how   speculates: chains of three always; trouble: a quarter of the replicas is half as fast,
          and one of each hundred dies half-way, at least one; hot: HOT
    """
    speculates, trouble, hot = how["speculates"], how["trouble"], how["hot"]
    work = work or (HOT if hot else Workload())
    made = [Replica(f"r{index}", device, speculates=speculates) for index in range(replicas)]
    if trouble:
        for replica in made[::4]:
            replica.speed = 0.5
    fleet = Fleet(made, routers, seed)
    arrive(fleet, conversations(work, load * replicas, seconds, seed), seconds)
    if trouble and replicas > 1:
        for victim in made[1::100]:
            fleet.at(seconds / 2, lambda now, victim=victim: fleet.kill(victim, now, 20.0))
    fleet.run(seconds)
    seen = [turn for turn in fleet.turns if turn.arrived > seconds / 4]
    waits = [1e3 * ((turn.first or 0) - turn.arrived) + device.hop for turn in seen]
    rates = [
        (turn.answer - 1) / (turn.done - turn.first)
        for turn in seen
        if turn.done and turn.first and turn.done > turn.first and turn.answer > 8
    ]
    cached = 100 * fleet.cached_tokens / max(1, fleet.prompt_tokens)
    tokens = sum(turn.answer for turn in seen) / (seconds * 0.75)
    return told(waits, rates, tokens, cached) | {"lost": fleet.lost}


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
        asked = sum(len(each.running) + len(each.waiting) for each in there)
        held = {"cache": {each.name: each.held() / each.device.cache for each in there}}
        context = SimpleNamespace(aggregated_metrics=held, total_num_requests=asked)
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
            self.fleet.at(now + START, lambda _, name=name: self.begun(name))
        for name in names[wanted : self.count]:
            self.fleet.replicas[name].taking = False
        self.count, self.since, self.peak = wanted, now, max(self.peak, wanted)

    def begun(self, name: str) -> None:
        """It is ready, unless it was ended before."""
        self.fleet.replicas[name].taking = list(self.fleet.replicas).index(name) < self.count


def scaled(cache: float, target: float, load: float, seconds: float, seed: int) -> dict[str, float]:
    """A day in short with autoscaling: what clients saw, and replicas in the mean and at most.

    load  conversations a second at most
    """
    made = [Replica(f"r{index}", LARGE, bounded=True) for index in range(64)]
    fleet, asked = Fleet(made, [Router("prefix")], seed), random.Random(seed)  # noqa: S311
    scaling = Scaling(fleet, cache, target, least=2)
    every = conversations(DOCUMENTS, load, seconds, seed)
    arrive(fleet, [one for one in every if asked.random() < profile(one.begins / seconds)], seconds)
    fleet.run(seconds)
    waits = [1e3 * ((turn.first or 0) - turn.arrived) for turn in fleet.turns]
    rates = [turn.answer / max(1e-3, turn.done - turn.first) for turn in fleet.turns if turn.first]
    tokens = sum(turn.answer for turn in fleet.turns) / seconds
    found = told(waits, rates, tokens, 100 * fleet.cached_tokens / max(1, fleet.prompt_tokens))
    return found | {"replicas_mean": scaling.used / seconds, "replicas_most": scaling.peak}


def told(
    waits: Sequence[float], rates: Sequence[float], tokens: float, cached: float
) -> dict[str, float]:
    """What clients saw: milliseconds to first tokens, tokens a second of each answer and of all."""
    if len(waits) < 2 or len(rates) < 2:
        raise SystemExit("too few answers: raise --seconds or --loads")
    return {
        "answers": len(waits),
        "first_token_ms_mean": mean(waits),
        "first_token_ms_p50": quantiles(waits, n=100)[49],
        "first_token_ms_p99": quantiles(waits, n=100)[98],
        "tokens_per_s": tokens,
        "tokens_per_s_each_p50": quantiles(rates, n=100)[49],
        "cached_percent": cached,
    }


def averaged(seeds: int, *args: Any, **more: Any) -> dict[str, float]:
    """The mean of several runs, and of the slowest first tokens the greatest."""
    (kind, options), routers = args[2], args[4]
    runs = [
        simulated(
            *(args[0], args[1], [Router(kind, **options) for _ in range(routers)], args[3], seed),
            **more,
        )
        for seed in range(1, seeds + 1)
    ]
    found = {name: mean(run[name] for run in runs) for name in runs[0]}
    return found | {"first_token_ms_p99_worst": max(run["first_token_ms_p99"] for run in runs)}


PREFIX = ("prefix", {})
ROUTERS = (("round robin", {}), ("least load", {}), PREFIX)
CONSTANTS = tuple(
    ("prefix", {"overload": overload, "weight": weight})
    for overload in (1.25, 2.0, 1e9)
    for weight in (0.0, 0.5, 1.0, 2.0, 4.0, 16.0)
)


def main() -> None:
    """Run one part; print a line for each point, and write all as JSON."""
    parser = argparse.ArgumentParser(description="Simulate a fleet of replicas.")
    parser.add_argument("part", choices=("routers", "constants", "speculation", "scaling"))
    parser.add_argument("--replicas", type=int, nargs="+", default=[8])
    parser.add_argument("--routers", type=int, default=1, help="that know nothing of each other")
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 3.0, 5.0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hot", action="store_true", help="one system prompt, 16,000 tokens")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG of what --out has")
    asked = parser.parse_args()
    found = scaling_points(asked) if asked.part == "scaling" else points(asked)
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if asked.plot:
        asked.plot.write_text(drawn(asked.part, found))


def say(point: dict[str, Any]) -> dict[str, Any]:
    """Print a line of it; as it is kept."""
    kept = {name: round(v, 2) if isinstance(v, float) else v for name, v in point.items()}
    sys.stdout.write(json.dumps(kept) + "\n")
    sys.stdout.flush()
    return kept


def drawn(part: str, found: list[dict[str, Any]]) -> str:
    """An SVG of the points of a part: mean first tokens; of scaling, replicas too."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in found:
        if part == "scaling":
            name = "with the queue's target" if point["target"] < 1e9 else "by the cache alone"
            for value in ("first_token_ms_mean", "replicas_mean"):
                lines = panels.setdefault(value.replace("_", " "), {}).setdefault(name, [])
                lines.append((point["cache"], point[value]))
            continue
        title = f"{point['replicas']} replicas{', trouble' if point['trouble'] else ''}"
        name = point["router"] + (" drafting" if point["speculates"] else "")
        name += f" {point['overload']:g}, {point['weight']:g}" if part == "constants" else ""
        lines = panels.setdefault(title, {}).setdefault(name, [])
        lines.append((point["load"], point["first_token_ms_mean"]))
    if part == "scaling":
        return charts(panels, "share of pages that sequences shall hold", "see above")
    return charts(panels, "conversations a second and replica", "ms to first token, mean")


def scaling_points(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """By shares of the cache, with the queue's target beside it and without."""
    found = []
    for load, target, cache in product(asked.loads, (16.0, 1e9), (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)):
        runs = [
            scaled(cache, target, load, asked.seconds, seed) for seed in range(1, asked.seeds + 1)
        ]
        point = {name: mean(run[name] for run in runs) for name in runs[0]}
        found.append(say({"load": load, "target": target, "cache": cache} | point))
    return found


def points(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Of routers, constants or speculation."""
    routers = {"routers": ROUTERS, "constants": CONSTANTS, "speculation": (PREFIX,)}[asked.part]
    speculation = (False, True) if asked.part == "speculation" else (False,)
    troubles = (False,) if asked.part == "speculation" else (False, True)
    found = []
    for replicas, load, trouble, speculates, router in product(
        asked.replicas, asked.loads, troubles, speculation, routers
    ):
        how = {"trouble": trouble, "speculates": speculates, "hot": asked.hot}
        point = averaged(
            *(asked.seeds, replicas, load, router, asked.seconds, asked.routers), **how
        )
        about = {
            "replicas": replicas,
            "routers": asked.routers,
            "load": load,
            "router": router[0],
            **router[1],
            **how,
        }
        found.append(say(about | {name: round(value, 1) for name, value in point.items()}))
    return found


if __name__ == "__main__":
    main()
