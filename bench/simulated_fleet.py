"""A fleet of replicas, simulated: what each does with its requests, and what clients see.

Each replica steps as an H100 with the 8B shape does (bench/results/h100-rounds.json): a step costs
by its rows, prompts by their tokens beside it, and a prefix that is still cached costs nothing.
Conversations arrive at random: agents with system prompts of their own, some agents far more often
than others, turns that follow each other after a pause. Replicas are slow, die and come back empty,
or stand still until Ray Serve notices. The router is forerun.ray's own code. Everything is seeded.
"""

import heapq
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import log
from statistics import mean, quantiles

from forerun.ray.affinity import OVERLOAD, WEIGHT, Affinity, PrefixAffinity


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
    """Conversations: so many agents, some far more often used (Zipf), with system prompts of their
    own; turns that follow each other after a pause; prompts and answers as of shared chats, which
    are log-normal; a fifth carry a document.

    system, document  blocks of TOKENS tokens
    asked, answer     tokens in the median
    pause             seconds in the mean
    """

    agents: int = 200
    system: int = 10
    document: int = 62
    question: float = 60.0
    answer: float = 180.0
    pause: float = 8.0


LARGE = replace(H100, cache=100_000)
"""With the room that Llama-3-70B has on two devices of 96 GiB (docs/use/scaling.md)."""
DOCUMENTS = Workload(document=500)
"""A fifth carry 32,000 tokens."""
HOT = Workload(agents=1, system=250)
"""One agent alone, with a system prompt of 16,000."""
TOKENS = 64
"""Of a block of 256 characters (forerun.ray.affinity.BLOCK)."""


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a fleet: shares of its replicas, drawn at random, of each kind at least
    one where its share is not 0.

    slow   steps take twice as long, all the time
    dies   half-way; its streams end with an error, and it is back after BACK seconds, empty
    still  half-way it stands still: what it has and is sent waits until it is ended after STILL
    """

    slow: float = 0.0
    dies: float = 0.0
    still: float = 0.0


TROUBLES = {
    "none": Trouble(),
    "slow": Trouble(slow=0.25),
    "deaths": Trouble(dies=0.01),
    "a rack dies": Trouble(dies=0.1),
    "still": Trouble(still=0.01),
    "all": Trouble(slow=0.25, dies=0.01, still=0.01),
}
BACK = 20.0
"""Seconds until another replica has loaded the model (8B, 16 GB, from a disk of 1 GB a second)."""
STILL = 63.0
"""Until Ray Serve ends a replica that answers nothing: three looks of ten seconds each
(forerun.ray.app), the first of them half a period later, and the thirty of --drain-seconds that it
gives to one that drains. So it was measured once."""


@dataclass
class Turn:
    """A request: its text is `blocks`, the last of them new; `answer` tokens come back.

    arrived  when it was sent; a stream that breaks is sent anew
    first    when its first token came, done when its last
    """

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
    """speed: times as fast as others. still: takes requests and does nothing. taking: new requests.
    bounded: running ones have pages, and wait
    for them. cache: blocks that it has, the oldest first.
    """

    name: str
    device: Device = H100
    speed: float = 1.0
    alive: bool = True
    still: bool = False
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
        """Take in waiting ones, while there are slots; what is cached of them is not computed."""
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
        self.numbers, self.lost = count(), 0
        self.turns: list[Turn] = []
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
        if not there:
            self.at(now + 1.0, lambda when: self.ask(turn, when))
            return
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
        if replica.still:
            return
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
        if not replica.alive or replica.still:
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
                if turn.router:
                    turn.router.ended(replica.name)
                self.turns.append(turn)
                turn.retry(turn, now)
        replica.running = [turn for turn in replica.running if turn.done is None]
        self.begin(replica, now)

    def stop(self, replica: Replica, now: float, back: float) -> None:
        """It does nothing any more, and takes what it is sent, until Ray Serve ends it."""
        replica.still = True
        self.at(now + STILL, lambda when: self.kill(replica, when, back))

    def trouble(self, kinds: Trouble, half: float) -> None:
        """Have it come to that; `half`: seconds until the half of the time."""
        every = list(self.replicas.values())

        def some(share: float) -> list[Replica]:
            return self.random.sample(every, max(1, round(share * len(every)))) if share else []

        for each in some(kinds.slow):
            each.speed = 0.5
        for each in some(kinds.dies):
            self.at(half, partial(self.kill, each, back=BACK))
        for each in some(kinds.still):
            self.at(half, partial(self.stop, each, back=BACK))

    def kill(self, replica: Replica, now: float, back: float) -> None:
        """Its streams are lost, each with an error event; clients ask again at once. What has no
        token yet the front gives to another replica.
        """
        replica.alive, replica.stepping, replica.still = False, False, False
        again = [*replica.running, *replica.waiting]
        self.lost += sum(turn.first is not None for turn in again)
        replica.running, self.loads[replica.name] = [], 0
        replica.waiting.clear()
        replica.cache.clear()
        for router in self.routers:
            router.lost(replica.name)
        for turn in again:
            if turn.first is not None:
                turn.left, turn.first, turn.arrived = turn.answer, None, now
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

    def __init__(self, kind: str, overload: float = OVERLOAD, weight: float = WEIGHT) -> None:
        self.kind, self.turn = kind, 0
        self.prefix = PrefixAffinity(overload, weight)
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
        affinity = Affinity(turn.blocks, turn.conversation)
        place = self.prefix.order(affinity, loads)[0]
        self.prefix.sent(affinity, place)
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

    drawn, now = list[Conversation](), 0.0
    while now < seconds:
        system = random_.choices(agents, weights)[0]
        turns, before = [], blocks(work.document * TOKENS if random_.random() < 0.2 else 0)
        for _ in range(random_.choice((1, 1, 1, 2, 3, 4, 6, 8))):
            prompt = before + blocks(random_.lognormvariate(log(work.question), 1.0))
            answer = max(1, round(random_.lognormvariate(log(work.answer), 0.8)))
            turns.append((tuple(prompt), answer, random_.expovariate(1 / work.pause)))
            before = blocks(answer)
        drawn.append(Conversation(len(drawn), now, system, tuple(turns)))
        now += random_.expovariate(rate)
    return drawn


def arrive(fleet: Fleet, pending: Sequence[Conversation], until: float) -> None:
    """Have them sent."""

    def say(one: Conversation, number: int, now: float) -> None:
        def then(turn: Turn, when: float) -> None:
            if number + 1 < len(one.turns) and when < until:
                pause = one.turns[number][2]
                fleet.at(when + pause, partial(say, one, number + 1))

        answer = one.turns[number][1]
        turn = Turn(one.prompt(number), one.number + 1, answer, now, then, left=answer)
        fleet.ask(turn, now)

    for one in pending:
        fleet.at(one.begins, partial(say, one, 0))


@dataclass(frozen=True)
class Case:
    """What is simulated.

    load        conversations a second and replica, for so many seconds
    speculates  chains of three always
    to_the_end  of every answer; else of those that are whole when the time is over
    """

    replicas: int
    load: float
    seconds: float
    seed: int = 1
    device: Device = H100
    work: Workload = Workload()
    trouble: Trouble = Trouble()
    speculates: bool = False
    to_the_end: bool = True


def simulated(case: Case, routers: list[Router]) -> tuple[dict[str, float], list[Turn]]:
    """What clients see that come after a quarter of the time, and all turns."""
    device, seconds = case.device, case.seconds
    made = [Replica(f"r{n}", device, speculates=case.speculates) for n in range(case.replicas)]
    fleet = Fleet(made, routers, case.seed)
    arrive(fleet, conversations(case.work, case.load * case.replicas, seconds, case.seed), seconds)
    fleet.trouble(case.trouble, seconds / 2)
    fleet.run(float("inf") if case.to_the_end else seconds)
    seen = [turn for turn in fleet.turns if turn.arrived > seconds / 4]
    waits = [1e3 * ((turn.first or 0) - turn.arrived) + device.hop for turn in seen]
    rates = [
        (turn.answer - 1) / (turn.done - turn.first)
        for turn in seen
        if turn.done and turn.first and turn.done > turn.first and turn.answer > 8
    ]
    cached = 100 * fleet.cached_tokens / max(1, fleet.prompt_tokens)
    tokens = sum(turn.answer for turn in seen if (turn.done or 0) < seconds) / (seconds * 0.75)
    return summary(waits, rates, tokens, cached) | {"lost": fleet.lost}, fleet.turns


def summary(
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
