"""Two real replicas under the load that bench/fleet.py simulates: do the curves agree?

    forerun serve smollm2-135m --replicas 2 --port 8000 --threads 1 --max-sequences 8 \
        --kv-tokens 16384 --context 2048 --speculative-algorithm OFF
    python bench/fleet_real.py http://127.0.0.1:8000 --loads 0.25 0.5 1 --out FILE

What a step, a prompt token and the way to a replica cost is measured first, one request or a full
batch at a time; the simulation is told these numbers and the same conversations, and nothing else.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import httpx

from bench.simulated_fleet import (
    SMALL,
    TOKENS,
    Case,
    Conversation,
    Device,
    Router,
    conversations,
    simulated,
    told,
)

WORDS = (
    "the and for are but not you all any can had her was one our out day get has him his how man "
    "new now old see two way who boy did its let put say she too use"
)
"""Of one token each, with the blank before them: 64 of them are a block, and 256 characters."""
CHUNK, ROWS, CACHE = 512, 8, 16_384


def text(blocks: Sequence[int]) -> str:
    """The same for the same block."""
    return "".join(
        "".join(f" {word}" for word in random.Random(block).choices(WORDS.split(), k=TOKENS))  # noqa: S311
        for block in blocks
    )


class Client:
    """Asks, and counts."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx.AsyncClient(base_url=url, limits=limits, timeout=300)
        self.prompt_tokens = self.cached_tokens = 0

    async def ask(self, blocks: Sequence[int], answer: int) -> tuple[float, float]:
        """Milliseconds to the first token, and to the last."""
        body: dict[str, Any] = {"prompt": text(blocks), "max_tokens": answer, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        began, first, last = monotonic(), 0.0, 0.0
        async with self.http.stream("POST", "/v1/completions", json=body) as stream:
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if event["choices"]:
                    last = monotonic()
                    first = first or last
                if usage := event.get("usage"):
                    self.prompt_tokens += usage["prompt_tokens"]
                    self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        return 1e3 * (first - began), 1e3 * (last - began)


async def measured(client: Client, replicas: int) -> Device:
    """What a replica costs, by requests of its own."""
    fresh = iter(range(1 << 40, 1 << 41))

    def new(blocks: int) -> list[int]:
        return [next(fresh) for _ in range(blocks)]

    async def batch(rows: int) -> float:
        """Milliseconds of a step of so many rows on every replica."""
        asked = [client.ask(new(1), 64) for _ in range(rows * replicas)]
        return median((last - first) / 63 for first, last in await asyncio.gather(*asked))

    for _ in range(60):
        await client.ask(new(1), 8)
    short = median([(await client.ask(new(1), 1))[0] for _ in range(15)])
    long = median([(await client.ask(new(17), 1))[0] for _ in range(15)])
    prefill = 16 * TOKENS / (long - short)
    one = median([await batch(1) for _ in range(3)])
    many = median([await batch(ROWS) for _ in range(3)])
    step = {1: one, ROWS: many}
    hop = short - TOKENS / prefill - one
    return Device(step, step, 1.0, prefill, CHUNK, ROWS, CACHE, hop)


async def replayed(client: Client, asked: Sequence[Conversation], until: float) -> dict[str, float]:
    """Ask the conversations when they are due; what is seen after a quarter of the time."""
    began, seen = monotonic(), []

    async def say(one: Conversation) -> None:
        await asyncio.sleep(one.begins - (monotonic() - began))
        for number, (_, answer, pause) in enumerate(one.turns):
            now = monotonic() - began
            if now >= until:
                return
            first, last = await client.ask(one.prompt(number), answer)
            if now > until / 4 and now + last / 1e3 <= until:
                seen.append((first, last, answer))
            await asyncio.sleep(pause)

    await asyncio.gather(*map(say, asked))
    rates = [1e3 * (n - 1) / (last - first) for first, last, n in seen if n > 8 and last > first]
    tokens = sum(n for _, _, n in seen) / (until * 0.75)
    cached = 100 * client.cached_tokens / max(1, client.prompt_tokens)
    return told([first for first, _, _ in seen], rates, tokens, cached)


def main() -> None:
    """Measure, replay and simulate; print a pair of lines for each load."""
    parser = argparse.ArgumentParser(description="Hold the simulation to real replicas.")
    parser.add_argument("url")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []

    def say(what: dict[str, Any]) -> None:
        found.append({k: round(v, 2) if isinstance(v, float) else v for k, v in what.items()})
        sys.stdout.write(json.dumps(found[-1]) + "\n")
        sys.stdout.flush()

    async def run() -> None:
        device = await measured(Client(options.url), options.replicas)
        say({"step": device.step, "prefill": device.prefill, "hop": device.hop})
        for seed, load in enumerate(options.loads, 1):
            rate = load * options.replicas
            asked = conversations(SMALL, rate, options.seconds, seed)
            # Blocks of its own for each load: what one has left in the caches helps no other.
            shift = seed << 32
            client = Client(options.url)
            moved = [shifted(one, shift) for one in asked]
            say({"load": load, "of": "replicas"} | await replayed(client, moved, options.seconds))
            case = Case(
                options.replicas, load, options.seconds, seed, device, SMALL, to_the_end=False
            )
            say({"load": load, "of": "simulation"} | simulated(case, [Router("prefix")])[0])

    asyncio.run(run())
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def shifted(one: Conversation, by: int) -> Conversation:
    """The same with other blocks."""
    turns = tuple((tuple(b + by for b in blocks), n, pause) for blocks, n, pause in one.turns)
    return Conversation(one.number, one.begins, tuple(b + by for b in one.system), turns)


if __name__ == "__main__":
    main()
