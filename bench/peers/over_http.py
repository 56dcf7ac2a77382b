"""Forerun's server beside its peers' servers, as one HTTP client sees them.

    python bench/peers/over_http.py --out bench/results/peers-http.json      (make bench-peers)

The same file, prompts, number of answer tokens and threads for all; greedy, end of text ignored.
A visit in which a connection is dropped is made again, said at once and counted in the results.
Every round visits the numbers of streams, and for each the servers in an order drawn anew, one
running at a time. Whole: answer tokens per second of all streams, prompts included. Decoding:
answer tokens per second from each answer's first token on, times the streams. Medians over rounds
with their quartiles; ratios are of the same round.
"""

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from dequantise import write_folder
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from servers import SERVERS, Job, Server, missing_tools, running

from forerun.hub.catalog import open_model
from forerun.machine import stamp
from forerun.measure.client import Endpoint, Timing, body_of, find_model, load_level
from forerun.measure.workload import Prompt, read_prompts, spread
from forerun.options.config import AskConfig

ROOT = Path(__file__).parents[2]
TRIES = 3
DROPPED = ("RemoteProtocolError", "ReadError", "WriteError", "ConnectError")
"""How httpx calls a connection that ended before its answer did."""
console = Console(stderr=True)


def speeds(timings: list[Timing], seconds: float, streams: int) -> dict[str, float]:
    """Raises RuntimeError where an answer failed."""
    failed = [timing.error for timing in timings if timing.error]
    if failed:
        raise RuntimeError(failed[0])
    per_token = [timing.per_token for timing in timings if timing.per_token]
    return {
        "whole": sum(timing.tokens for timing in timings) / seconds,
        "decoding": min(streams, len(timings)) / statistics.mean(per_token),
        "first_ms": 1000.0 * statistics.median(timing.first for timing in timings),
        "tokens": sum(timing.tokens for timing in timings),
    }


def asked(url: str, prompts: list[Prompt], streams: int, tokens: int) -> dict[str, float]:
    """One visit: a short warm-up, then every prompt once, `streams` at a time."""
    model = find_model(url, "", None)
    ask = AskConfig(max_tokens=tokens, ignore_eos=True)
    bodies = [body_of(prompt, model, ask, None) for prompt in prompts]
    endpoint = Endpoint(url, model)
    warm = [body | {"max_tokens": 8} for body in bodies[:streams]]
    asyncio.run(load_level(endpoint, warm, streams))
    timings, seconds = asyncio.run(load_level(endpoint, bodies, streams))
    return speeds(timings, seconds, streams)


def patiently(
    name: str, url: str, prompts: list[Prompt], streams: int, tokens: int
) -> dict[str, float]:
    """`asked`, once more from its beginning where a connection was dropped: never silently. How
    often is written beside the figures, which are those of a visit in which none was.

    Raises RuntimeError where a server refuses, or drops connections TRIES times.
    """
    for dropped in range(TRIES):
        try:
            return asked(url, prompts, streams, tokens) | {"dropped": dropped}
        except RuntimeError as error:
            if not str(error).startswith(DROPPED) or dropped == TRIES - 1:
                raise
            console.print(
                f"[yellow]{name} at {streams} dropped a connection, once more:[/] {error}"
            )
    raise AssertionError


def visit(server: Server, job: Job, prompts: list[Prompt], tokens: int) -> dict[str, float]:
    """Start a server, ask, stop it."""
    with running(server, job) as (url, start_seconds):
        found = patiently(server.name, url, prompts, job.streams, tokens)
        return found | {"start_seconds": start_seconds}


def measure(args: argparse.Namespace, servers: list[Server]) -> dict[str, Any]:
    """Rounds by streams and server. A server that fails is left out, with a word."""
    model = open_model(args.model)
    if any(server.kind == "vllm" for server in servers):
        write_folder(model, args.folder)
    draw, texts = np.random.default_rng(0), read_prompts()
    found: dict[str, Any] = {}
    with Progress(console=console) as progress:
        bar = progress.add_task("visits", total=args.rounds * len(args.streams) * len(servers))
        for number in range(args.rounds):
            for streams in args.streams:
                count = max(streams, args.single if streams == 1 else streams)
                # Other prompts in every round, the same for all servers of it.
                shift = (number * count) % len(texts)
                prompts = spread(texts[shift:] + texts[:shift], min(count, len(texts)))
                prompts = (prompts * (-(-count // len(prompts))))[:count]
                job = Job(model.path, args.folder, args.threads, streams, args.context)
                for index in draw.permutation(len(servers)).tolist():
                    server = servers[index]
                    progress.update(bar, description=f"{server.name}, {streams} streams")
                    try:
                        row = visit(server, job, prompts, args.tokens)
                        found.setdefault(str(streams), {}).setdefault(server.name, []).append(row)
                    except RuntimeError as error:
                        console.print(f"[yellow]{server.name} at {streams}:[/] {error}")
                    progress.advance(bar)
    return found


def shown(rows: list[dict[str, float]], base: list[dict[str, float]] | None, key: str) -> str:
    """Median, quartiles, and the ratio to `base`."""
    values = [row[key] for row in rows]
    low, high = (np.quantile(values, q) for q in (0.25, 0.75))
    text = f"{statistics.median(values):.0f} [{low:.0f}-{high:.0f}]"
    if base and len(base) == len(rows):
        ratios = [row[key] / other[key] for row, other in zip(rows, base, strict=True)]
        text += f" x{statistics.median(ratios):.2f}"
    return text


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--single", type=int, default=6, help="prompts of a one-stream visit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--servers", nargs="+", default=[server.name for server in SERVERS])
    parser.add_argument("--folder", type=Path, default=ROOT / "bench/out/dequantised")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    servers = [server for server in SERVERS if server.name in args.servers]
    if "llama.cpp" in args.servers and (lacks := missing_tools()):
        sys.exit(f"this machine lacks {lacks}; install it, or leave llama.cpp out with --servers")
    found = measure(args, servers)
    for key, title in (("whole", "prompts included"), ("decoding", "decoding alone")):
        table = Table(title=f"tokens/s of all streams, {title} (x: over llama.cpp, same round)")
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
    if args.out:
        record = {"machine": stamp(), "command": sys.argv, "results": found}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
