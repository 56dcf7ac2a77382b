"""Measure Forerun's server beside its peers' servers, through one HTTP client.

    python bench/peers/over_http.py --out bench/results/peers-http.json      (make bench-peers)

All servers get the same file, threads and requests: chat prompts, greedy, the end of the text
ignored, `--requests` for each stream. The lengths of answers are drawn from a half to three halves
of `--tokens`, and in every stream one request follows the other: where all answers begin at once
and are equally long, they end at once too, and plain decoding never has the smaller batches that
service brings. No prompt's beginning is another's, and no server keeps prompts for later requests.
A visit in which a connection is dropped is made again, reported at once and counted in the results.
Every round visits the numbers of streams, and for each the servers in an order drawn anew, one
running at a time; a server that takes a minute to start is started once a round, before or after
the others.

Figures of a visit: answer tokens per second of all streams, prompts included; the median request's
time to first token and time per output token, in milliseconds. Tables show medians over rounds with
least and most; ratios are of the same round.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.peers.dequantise import write_folder
from bench.peers.environments import ENVIRONMENTS, OUT, interpreter
from bench.peers.servers import SERVERS, Job, Server, fields, running
from bench.peers.sources import SOURCES, missing_tools
from bench.records import ended, keep
from forerun.errors import ForerunError
from forerun.hub.catalog import open_model
from forerun.measure.client import Endpoint, Timing, body_of, find_model, load_level
from forerun.measure.workload import Prompt, read_prompts, spread
from forerun.options.config import SamplingConfig

HERE = Path(__file__).parent
TRIES, PATIENCE = 3, 180.0
"""Visits of a server that drops connections, and seconds after which a pass of its requests counts
as dropped: ik_llama.cpp once kept the last of 48 for nine minutes, with no other at work."""
DROPPED = ("RemoteProtocolError", "ReadError", "WriteError", "ConnectError", "TimeoutError")
"""How httpx calls a connection that ended before its answer did, and what is too long."""
DEFAULT = "smollm2-135m"
RANDOM = {
    "random-1b": "tinyllama",
    "random-lfm2.5-1.2b": "lfm2.5-1.2b",
    "random-qwen3.5-0.8b": "qwen3.5-0.8b",
}
"""Models that are made on first use -> a shape of random_gguf.py."""
console = Console(stderr=True)


class Closing(Endpoint):
    """A connection for each request: kept ones are closed by llama-server now and then, just as the
    next request is sent over them.
    """

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers."""
        return {"Connection": "close"}


@dataclass(frozen=True)
class Work:
    """The requests of one visit, the same for every server.

    warm    sent first, not measured
    bodies  the JSON of each request
    """

    warm: list[dict[str, Any]]
    bodies: list[dict[str, Any]]


def apart(prompt: Prompt, number: int) -> tuple[dict[str, Any], ...]:
    """Return the prompt's messages behind a system message that begins like no other's, so that a
    cache of prompts finds none of it.
    """
    messages = [message for message in prompt.messages if message["role"] != "system"]
    return ({"role": "system", "content": f"{number}. You are a helpful assistant."}, *messages)


class Requests:
    """Makes requests of the built-in prompts, other ones for every call."""

    def __init__(self) -> None:
        self._prompts, self._number = read_prompts(), 0

    def _bodies(self, lengths: list[int]) -> list[dict[str, Any]]:
        """Return a request for each length of an answer, in tokens."""
        shift = self._number % len(self._prompts)
        turned = self._prompts[shift:] + self._prompts[:shift]
        chosen = spread(turned, min(len(lengths), len(turned)))
        bodies = []
        for prompt, length in zip(cycle(chosen), lengths, strict=False):
            self._number += 1
            ask = SamplingConfig(max_tokens=length, ignore_eos=True)
            messages = apart(prompt, self._number)
            bodies.append(body_of(Prompt(prompt.id, prompt.kind, messages), "", ask, None))
        return bodies

    def work(self, streams: int, count: int, tokens: int) -> Work:
        """Return `count` requests of `tokens` each in the mean, and one more per stream to warm up
        with.
        """
        drawn = np.random.default_rng(self._number)
        lengths = drawn.integers(max(1, tokens // 2), tokens + tokens // 2 + 1, count).tolist()
        return Work(self._bodies([8] * streams), self._bodies(lengths))


def figures(timings: list[Timing], seconds: float) -> dict[str, float]:
    """Return the figures of one visit, whose requests took `seconds` together.

    Raises RuntimeError where an answer failed.
    """
    for timing in timings:
        if timing.error:
            raise RuntimeError(timing.error)
    tokens = sum(timing.tokens for timing in timings)
    return {
        "whole": tokens / seconds,
        "first_ms": 1000.0 * statistics.median(timing.first for timing in timings),
        "token_ms": 1000.0 * statistics.median(timing.per_token or 0.0 for timing in timings),
        "tokens": tokens,
        "seconds": seconds,
    }


def answered(
    endpoint: Endpoint, bodies: list[dict[str, Any]], streams: int
) -> tuple[list[Timing], float]:
    """Send all requests, `streams` at a time; as `load_level` returns. Raises RuntimeError where
    that takes longer than PATIENCE.
    """

    async def patiently() -> tuple[list[Timing], float]:
        return await asyncio.wait_for(load_level(endpoint, bodies, streams), PATIENCE)

    try:
        return asyncio.run(patiently())
    except TimeoutError:
        raise RuntimeError(f"TimeoutError: not all answers came in {PATIENCE:.0f} s") from None


def measure(url: str, work: Work, streams: int, more: dict[str, Any]) -> dict[str, float]:
    """Make one visit: a short warm-up, then the requests. Returns its `figures`.

    Raises RuntimeError where an answer failed.
    """
    model = find_model(url, "", None)
    endpoint = Closing(url, model)
    more = more | {"model": model}
    answered(endpoint, [body | more for body in work.warm], streams)
    return figures(*answered(endpoint, [body | more for body in work.bodies], streams))


def measure_patiently(
    name: str, url: str, work: Work, streams: int, more: dict[str, Any]
) -> dict[str, float]:
    """As `measure`, begun again where a connection was dropped, with a line on the console. How
    often is `dropped` beside the figures, which are those of a visit in which none was.

    Raises RuntimeError where a server refuses, or drops connections TRIES times.
    """
    for dropped in range(TRIES):
        try:
            return measure(url, work, streams, more) | {"dropped": dropped}
        except RuntimeError as error:
            if not str(error).startswith(DROPPED) or dropped == TRIES - 1:
                raise
            console.print(
                f"[yellow]{name} at {streams} dropped a connection, once more:[/] {error}"
            )
    raise AssertionError


def model_path(name: str) -> str:
    """Return a name or path for `open_model`; a random model is made on first use."""
    if name not in RANDOM:
        return name
    path = OUT / f"{name}.gguf"
    if not path.exists():
        made = path.with_suffix(".part")
        words = str(open_model(DEFAULT).path)
        line = [str(interpreter("gguf")), str(HERE / "random_gguf.py"), str(made), words]
        subprocess.run([*line, "--shape", RANDOM[name]], check=True)
        made.rename(path)
    return str(path)


Results = dict[str, dict[str, list[dict[str, float]]]]
"""Streams -> server -> figures of each round."""


class Rounds:
    """Makes all visits of a run, and keeps their figures. A server that fails is left out, with its
    error on the console.
    """

    def __init__(self, args: argparse.Namespace, servers: list[Server]) -> None:
        model = open_model(model_path(args.model))
        folder = OUT / "dequantised" / model.path.stem
        if any(server.kind == "vllm" for server in servers):
            write_folder(model, folder)
        self._args, self._servers = args, servers
        self._files = {"gguf": model.path, "folder": folder}
        self._requests, self._draw = Requests(), np.random.default_rng(0)
        self.found: Results = {}

    def _visit(self, server: Server, works: dict[int, Work]) -> None:
        """Start a server, measure it with each number of streams, stop it."""
        works = {n: work for n, work in works.items() if n <= (server.streams or n)}
        if not works:
            return
        args, most = self._args, max(works)
        job = Job(**self._files, threads=args.threads, streams=most, context=args.context)
        try:
            with running(server, job) as (url, start):
                for streams, work in works.items():
                    row = measure_patiently(server.name, url, work, streams, fields(server))
                    rows = self.found.setdefault(str(streams), {}).setdefault(server.name, [])
                    rows.append(row | {"start_seconds": start})
        except (RuntimeError, ForerunError) as error:
            console.print(f"[yellow]{server.name} at {', '.join(map(str, works))}:[/] {error}")

    def _visits(self) -> Iterator[tuple[Server, dict[int, Work]]]:
        """Yield those of one round, in the order in which they are made."""
        args, servers = self._args, self._servers
        counts = {n: max(n * args.requests, args.least) for n in args.streams}
        works = {n: self._requests.work(n, count, args.tokens) for n, count in counts.items()}
        once = [(server, works) for server in servers if server.once]
        first = self._draw.random() < 0.5
        yield from once if first else []
        for streams, work in works.items():
            for index in self._draw.permutation(len(servers)).tolist():
                if not servers[index].once:
                    yield servers[index], {streams: work}
        yield from [] if first else once

    def run(self, after: Callable[[], None]) -> None:
        """Make every round, and call `after` behind each."""
        with Progress(console=console) as progress:
            bar = progress.add_task("visits", total=self._args.rounds)
            for _ in range(self._args.rounds):
                for server, works in self._visits():
                    streams = ", ".join(map(str, works))
                    progress.update(bar, description=f"{server.name}, {streams} streams")
                    self._visit(server, works)
                after()
                progress.advance(bar)


def shown(rows: list[dict[str, float]], base: list[dict[str, float]] | None, key: str) -> str:
    """Return median, least and most, and the ratio to `base`, as text."""
    values = [row[key] for row in rows]
    text = f"{statistics.median(values):.1f} [{min(values):.1f}-{max(values):.1f}]"
    if base and len(base) == len(rows):
        ratios = [row[key] / other[key] for row, other in zip(rows, base, strict=True)]
        text += f" x{statistics.median(ratios):.2f}"
    return text


TITLES = {
    "whole": "answer tokens/s of all streams, prompts included",
    "first_ms": "time to first token, ms",
    "token_ms": "time per output token, ms",
}


def print_tables(found: Results, servers: list[Server]) -> None:
    """Print a table of each figure: servers down, streams across."""
    for key, title in TITLES.items():
        table = Table(title=f"{title} (x: over llama.cpp, same round)")
        table.add_column("server")
        for streams in found:
            table.add_column(f"{streams} streams", justify="right")
        for server in servers:
            cells = [
                shown(rows[server.name], rows.get("llama.cpp"), key) if server.name in rows else "-"
                for rows in found.values()
            ]
            table.add_row(server.name, *cells)
        Console().print(table)
    every = [row for rows in found.values() for part in rows.values() for row in part]
    if dropped := sum(int(row["dropped"]) for row in every):
        Console().print(f"{dropped} visits were made again: a connection was dropped")


def save(out: Path | None, found: Results) -> None:
    """Write the figures of all rounds so far as JSON."""
    if not out:
        return
    packages = {name: ENVIRONMENTS[name].packages for name in sorted(ENVIRONMENTS)}
    keep(out, {"packages": packages, "results": found})


def main() -> None:
    """Parse, measure, print, write."""
    names = [server.name for server in SERVERS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        default=DEFAULT,
        help=f"{' or '.join(RANDOM)}: a billion random weights in Q4_K_M",
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, in the mean")
    parser.add_argument("--requests", type=int, default=4, help="of each stream, one by one")
    parser.add_argument("--least", type=int, default=48, help="requests of a visit, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--servers", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    servers = [server for server in SERVERS if server.name in args.servers]
    if any(server.kind in SOURCES for server in servers) and (lacks := missing_tools()):
        sys.exit(f"this machine lacks {lacks}; install it, or choose others with --servers")
    rounds = Rounds(args, servers)
    rounds.run(lambda: save(args.out, rounds.found))
    print_tables(rounds.found, servers)


if __name__ == "__main__":
    ended(main)
