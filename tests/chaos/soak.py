"""A server under mixed traffic for hours: `make soak`, or `make soak MINUTES=10`.

    python -m tests.chaos.soak [--minutes 120] [--model smollm2-135m] [--out FILE]

Clients ask golden requests of every kind without a pause, some leave in the middle, some bring new
grammars, and now and then every child process is killed. Answers are compared with golden ones. Of
memory, file descriptors, threads and the time of a step a sample is taken again and again; a line
through the samples after the first quarter may not rise by more than LIMITS says over its length.

Ends with code 1 where an answer was wrong or something grows.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.chaos.real_server import GOLDEN, Load, Real, forerun_serve, new, wait_for
from tests.e2e.processes import request_bytes

LIMITS = {"memory": 0.05, "files": 0.05, "threads": 0.05, "step": 0.5}
"""How much a line through the samples may rise, of its value at the beginning. The time of a step
is the machine's as well, which may have other work."""
SAMPLES = 120
KILL_EVERY = 10
"""Samples between two kills of all children."""


def steps(server: Real) -> tuple[float, float]:
    """Steps so far, and the seconds that they took."""
    page = server.http.get("/metrics").text
    count = re.search(r"(?m)^forerun:steps_total\{[^}]*\} (\S+)", page)
    seconds = re.search(r"(?m)^forerun:step_seconds_sum\{[^}]*\} (\S+)", page)
    return float(count[1]), float(seconds[1])


def leave(server: Real) -> None:
    """Some clients that ask for much and go."""
    for _ in range(5):
        with suppress(OSError), server.connect() as sock:
            body = {"prompt": "Hi", "max_tokens": 500, "ignore_eos": True, "stream": True}
            sock.sendall(request_bytes("/v1/completions", body))
            sock.recv(200)


def soak(server: Real, minutes: float, names: tuple[str, ...]) -> tuple[dict, Load]:
    """Samples by what was measured, and the load that ran."""
    samples: dict[str, list[float]] = {name: [] for name in LIMITS}
    began, interval = time.monotonic(), 60 * minutes / SAMPLES
    count, seconds = steps(server)
    with Load(server, names=names) as load:
        for number in range(1, SAMPLES + 1):
            due = began + number * interval
            # Until the sample is due there is always an answer to wait for.
            while time.monotonic() < due:
                done = load.done
                assert wait_for(lambda done=done: load.done > done), "nobody is answered"
            leave(server)
            route, body = new(number)
            server.http.post(route, json=body)
            if number % KILL_EVERY == 0:
                for child in server.children():
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            new_count, new_seconds = steps(server)
            samples["step"].append((new_seconds - seconds) / max(1.0, new_count - count))
            count, seconds = new_count, new_seconds
            samples["memory"].append(server.resident())
            samples["files"].append(server.files())
            samples["threads"].append(server.threads())
    return samples, load


def rise(values: list[float]) -> float:
    """How much a line through the last three quarters rises, of its value where it begins."""
    kept = values[len(values) // 4 :]
    slope, start = np.polyfit(np.arange(len(kept)), kept, 1)
    return float(slope * len(kept) / start)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--model", default="toy", help="toy, or what `forerun serve --model` takes")
    parser.add_argument("--out", type=Path, help="a JSON file for the samples")
    given = parser.parse_args()
    flags = () if given.model == "toy" else ("--model", given.model)
    names = tuple(GOLDEN) if given.model == "toy" else ("greedy", "drawn", "chat", "regex")
    with tempfile.TemporaryDirectory() as folder, forerun_serve(Path(folder), *flags) as server:
        server.golden = {name: server.answer(name) for name in names}
        server.kill_children(KILL_EVERY, names)  # What a kill takes at first, it takes once.
        samples, load = soak(server, given.minutes, names)
        assert wait_for(lambda: not server.held())
        same = {name: server.answer(name) for name in names} == server.golden
    rises = {name: rise(values) for name, values in samples.items()}
    grown = {name: share for name, share in rises.items() if share > LIMITS[name]}
    report = {"minutes": given.minutes, "answers": load.done, "wrong": len(load.wrong),
              "refused": len(load.refused), "broken": len(load.broken), "rise": rises,
              "samples": samples}  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps(report) + "\n")
    print(f"{load.done} answers, {len(load.wrong)} wrong, {len(load.refused)} refused, "
          f"{len(load.broken)} broken; rise over the run: "
          + ", ".join(f"{name} {share:+.1%}" for name, share in rises.items()))  # fmt: skip
    for (name, message), count in Counter(
        (name, error["message"]) for name, _, error in load.refused
    ).most_common():
        print(f"refused {count} times, {name}: {message}")
    return 1 if grown or load.wrong or load.broken or not same else 0


if __name__ == "__main__":
    sys.exit(main())
