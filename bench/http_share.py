"""Share of an engine's own speed that streams over HTTP keep, in turns on one machine.

    python -m bench.http_share [MODEL] [--streams 4 16 64] [--tokens 128] [--rounds 5]
        [-- options of serve]

An engine in this process and a server beside it answer the same prompts, plain, one after the
other. The client opens a connection for each stream and only counts events, but it runs on the
same cores. Tokens per second are medians; the share is that of a round.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time

import httpx
import numpy as np

from bench.records import ended, quartiles
from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.client.completion import complete, make_request
from forerun.engine.thread import Engine
from forerun.machine import stamp
from forerun.options.config import EngineConfig

PORT = 8388
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
OWN = ["--speculative-algorithm", "OFF", "--context", "1024", "--kv-tokens", "65536"]


async def stream(seed: int, prompt: list[int], tokens: int) -> int:
    """Return the events of one answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True, "seed": seed}
    content = json.dumps(body | {"temperature": 0.8, "top_p": 1, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=1 << 20)
    writer.write(f"{HEAD}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    events = 0
    while data := await reader.read(1 << 16):
        events += data.count(b"data:")
        if b"[DONE]" in data:
            break
    writer.close()
    return events


async def over_http(prompts: list[list[int]], tokens: int) -> float:
    """Return the tokens per second of all answers at once."""
    began = time.perf_counter()
    await asyncio.gather(*(stream(seed, prompt, tokens) for seed, prompt in enumerate(prompts)))
    return len(prompts) * tokens / (time.perf_counter() - began)


def in_process(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Return the tokens per second of all answers at once."""
    requests = [
        make_request(
            np.array(prompt, np.int32),
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0.8,
            seed=seed,
        )
        for seed, prompt in enumerate(prompts)
    ]
    began = time.perf_counter()
    complete(engine, requests, len(requests))
    return len(prompts) * tokens / (time.perf_counter() - began)


def main() -> int:
    """Print a line for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("options", nargs="*", help="of forerun serve, behind --")
    args = parser.parse_intermixed_args()
    config = EngineConfig(
        model=args.model, speculative_algorithm="OFF", context=1024, kv_tokens=65536
    )
    target = open_target(config)
    engine = make_engine(target, target.config)
    engine.start()
    command = [sys.executable, "-m", "forerun", "serve", args.model, "--port", str(PORT)]
    server = subprocess.Popen(
        [*command, *OWN, *args.options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    sys.stdout.write(f"{stamp()}\n")
    try:
        while not _is_up():
            time.sleep(0.1)
        random = np.random.default_rng(0)
        for streams in args.streams:
            pairs = []
            for count in range(args.rounds + 1):
                prompts = random.integers(0, target.memory.limits.vocab, (streams, 16)).tolist()
                pair = {}
                for side in random.permutation(["http", "engine"]).tolist():
                    if side == "http":
                        pair[side] = asyncio.run(over_http(prompts, args.tokens))
                    else:
                        pair[side] = in_process(engine, prompts, args.tokens)
                if count:
                    pairs.append(pair)
            low, middle, high = quartiles([pair["http"] / pair["engine"] for pair in pairs])
            speeds = {side: statistics.median(pair[side] for pair in pairs) for side in pairs[0]}
            sys.stdout.write(
                f"{streams} streams: HTTP {speeds['http']:.0f}, engine {speeds['engine']:.0f} "
                f"tokens/s, share {middle:.3f} ({low:.3f} to {high:.3f})\n"
            )
            sys.stdout.flush()
    finally:
        server.terminate()
        server.wait()
        engine.shutdown()
        target.close()
    return 0


def _is_up() -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    ended(main)
