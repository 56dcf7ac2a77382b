"""How much of the speed of its steps a server passes on: streams over HTTP, and the same steps in
this process without it, in turns.

    python bench/http_share.py --delay 0.0015 [--model toy] [--streams 64] [--tokens 150]

`alone` is the engine in this process, `one` a server with the engine in its process, `two` a server
and an engine. The clients run on the same processors. With --delay every step of the toy waits so
many seconds, as for a device.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console

from bench.records import ended
from forerun.build.engine import Loaded, load
from forerun.client.completion import complete, make_request
from forerun.engine.request import Request
from forerun.executors.toy import ToyExecutor
from forerun.options.config import EngineConfig

FIRSTS = 9
"""Requests for one token, of which the median is the time to the first."""


class Turn(NamedTuple):
    """Tokens per second of all streams, seconds to a first token, and processor milliseconds of a
    step by process.
    """

    rate: float
    first: float
    processor_ms: list[float]


def processor_seconds(pids: list[int]) -> list[float]:
    """Used so far, by process."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return [(int(one[11]) + int(one[12])) / os.sysconf("SC_CLK_TCK") for one in fields]


def alone(loaded: Loaded, arguments: argparse.Namespace, turn: int) -> Turn:
    """Without a server."""

    def asked(text: str, tokens: int) -> Request:
        return make_request(loaded.tokenizer.encode(text), max_tokens=tokens)

    texts = [f"Tell me about item {turn} {i}" for i in range(arguments.streams)]
    requests = [asked(text, arguments.tokens) for text in texts]
    pids, before = [os.getpid()], loaded.engine.stats().steps
    used, began = processor_seconds(pids), time.perf_counter()
    complete(loaded.engine, requests)
    seconds, steps = time.perf_counter() - began, loaded.engine.stats().steps - before
    spent = [1000 * (b - a) / steps for a, b in zip(used, processor_seconds(pids), strict=True)]
    firsts = []
    for i in range(FIRSTS):
        request = asked(f"Another {turn} {i}", 1)
        began = time.perf_counter()
        complete(loaded.engine, [request])
        firsts.append(time.perf_counter() - began)
    rate = arguments.streams * arguments.tokens / seconds
    return Turn(rate, statistics.median(firsts), spent)


async def stream(root: httpx.URL, text: str, tokens: int) -> float:
    """Read one answer; seconds to its first piece. Over a bare socket: httpx takes longer to read a
    piece than the server to make it.
    """
    asked = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**asked, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(root.host, root.port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    began, first = time.perf_counter(), 0.0
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    while piece := await reader.read(65536):
        if not first and b"data:" in piece:
            first = time.perf_counter() - began
        if b"[DONE]" in piece:
            break
    writer.close()
    return first


async def served(root: httpx.URL, arguments: argparse.Namespace, turn: int) -> Turn:
    """Over HTTP."""
    async with httpx.AsyncClient(base_url=root, trust_env=False, timeout=60) as http:

        async def steps() -> int:
            return int((await http.get("/server_info")).json()["stats"]["steps"])

        health = (await http.get("/health")).json()
        pids = list(dict.fromkeys((health["server_pid"], health["engine_pid"])))
        texts = [f"Tell me about item {turn} {i}" for i in range(arguments.streams)]
        before, used, began = await steps(), processor_seconds(pids), time.perf_counter()
        await asyncio.gather(*(stream(root, text, arguments.tokens) for text in texts))
        seconds, made = time.perf_counter() - began, await steps() - before
        spent = [1000 * (b - a) / made for a, b in zip(used, processor_seconds(pids), strict=True)]
        firsts = [await stream(root, f"Another {turn} {i}", 1) for i in range(FIRSTS)]
    rate = arguments.streams * arguments.tokens / seconds
    return Turn(rate, statistics.median(firsts), spent)


@contextmanager
def server(arguments: argparse.Namespace, parted: bool) -> Iterator[httpx.URL]:
    """A server process of tests.e2e.toy_server, loaded."""
    options = {"model": arguments.model, "config": config(arguments), "delay": arguments.delay}
    options["settings"] = {"engine_process": parted, "log_level": "warning"}
    line = [sys.executable, "-m", "tests.e2e.toy_server", json.dumps(options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(line, **pipes) as process:  # type: ignore[call-overload]
        try:
            root = httpx.URL(process.stdout.readline().strip().removesuffix("/v1"))
            while httpx.get(root.join("/health"), trust_env=False).status_code != 200:
                time.sleep(0.1)
            yield root
        finally:
            process.terminate()


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding, with a slot for every stream."""
    slots = max(64, arguments.streams)
    found: dict[str, Any] = {"max_sequences": slots, "speculative_algorithm": "NONE"}
    return found | ({"kv_tokens": 1024 * slots} if arguments.model == "toy" else {})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="toy")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    loaded = load(EngineConfig(model=arguments.model, **config(arguments)))
    if arguments.delay:
        if not isinstance(executor := loaded.target.executor, ToyExecutor):
            parser.error("--delay is for --model toy")
        executor.delay = arguments.delay
    turns: dict[str, list[Turn]] = {"alone": [], "one": [], "two": []}
    with server(arguments, False) as one, server(arguments, True) as two:
        for turn in range(arguments.turns + 1):
            found = {"alone": alone(loaded, arguments, turn)}
            found["one"] = asyncio.run(served(one, arguments, turn))
            found["two"] = asyncio.run(served(two, arguments, turn))
            for name, value in found.items() if turn else ():  # The first warms up.
                turns[name].append(value)
    loaded.close()
    for name, rows in turns.items():
        pairs = zip(rows, turns["alone"], strict=True)
        shares = [row.rate / base.rate for row, base in pairs]
        first = 1000 * statistics.median(row.first for row in rows)
        spent = ", ".join(f"{ms:.1f}" for ms in rows[-1].processor_ms)
        Console().print(
            f"{name:<6} {statistics.median(row.rate for row in rows):8.0f} tok/s, "
            f"{statistics.median(shares):.3f} of alone ({min(shares):.3f}-{max(shares):.3f}), "
            f"first token {first:.1f} ms, processor ms a step: {spent}"
        )


if __name__ == "__main__":
    ended(main)
