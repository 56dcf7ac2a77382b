"""A server under mixed traffic for hours: `make soak`, or `make soak MINUTES=10`.

    python -m tests.chaos.soak [--minutes 120] [--model smollm2-135m] [--out FILE]

Clients ask golden requests of every kind without a pause, some leave in the middle, some bring
new grammars, and now and then every child process is killed. Answers are compared with golden
ones. Again and again the clients pause, and when nothing is held any more a sample is taken of
memory, file descriptors, threads and the processor time of a step; a line through the samples of
the second half may not rise by more than LIMITS says over its length.

Samples are taken at rest because a request under a grammar that runs in a process of its own has
two threads and three file descriptors for as long as it lasts: how many of those there are at one
moment is chance. What remains are pools, which keep the threads that were once needed at one time;
the first half is for them, and for the heaps that malloc keeps for each thread.

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

from tests.worlds.real_server import GOLDEN, Load, Real, forerun_serve, new, wait_for
from tests.worlds.servers import request_bytes

LIMITS = {"memory": 0.033, "files": 0.033, "threads": 0.033, "step": 0.33}
"""How much a line through the samples of the second half may rise, of its value at its beginning:
5 % (of the time of a step 50 %) over three quarters of the run, as much an hour, over half of it.
"""
CLIENTS = 4
SAMPLES = 120
KILL_EVERY = 10
"""Samples between two kills of all children."""


def steps(server: Real) -> tuple[float, float]:
    """Steps so far, and the seconds of processor time that the server has used: a neighbour that
    keeps the machine busy makes a step longer, and takes no processor time of ours.
    """
    page = server.http.get("/metrics").text
    count = re.search(r"(?m)^forerun:steps_total\{[^}]*\} (\S+)", page)
    return float(count[1]), server.processor_seconds()


def leave(server: Real) -> None:
    """Some clients that ask for much and go."""
    for _ in range(5):
        with suppress(OSError), server.connect() as sock:
            body = {"prompt": "Hi", "max_tokens": 500, "ignore_eos": True, "stream": True}
            sock.sendall(request_bytes("/v1/completions", body))
            sock.recv(200)


def soak(server: Real, minutes: float, names: tuple[str, ...]) -> tuple[dict, list[Load]]:
    """Samples by what was measured, and the loads that ran between them."""
    samples: dict[str, list[float]] = {name: [] for name in LIMITS}
    loads: list[Load] = []
    began, interval = time.monotonic(), 60 * minutes / SAMPLES
    count, seconds = steps(server)
    for number in range(1, SAMPLES + 1):
        due = began + number * interval
        with Load(server, CLIENTS, names) as load:
            leave(server)
            route, body = new(number)
            server.http.post(route, json=body)
            if number % KILL_EVERY == 0:
                kill(server)
            # Until the sample is due there is always an answer to wait for.
            while time.monotonic() < due or not load.done:
                done = load.done
                assert wait_for(lambda done=done, load=load: load.done > done), "no answer"
        loads.append(load)
        rest(server)
        new_count, new_seconds = steps(server)
        samples["step"].append((new_seconds - seconds) / max(1.0, new_count - count))
        count, seconds = new_count, new_seconds
        samples["memory"].append(server.resident())
        samples["files"].append(server.files())
        samples["threads"].append(server.threads())
    return samples, loads


def kill(server: Real) -> None:
    """All its children."""
    for child in server.children():
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def rest(server: Real) -> None:
    """Wait until nothing is held, by a request or for one."""
    assert wait_for(lambda: not server.held()), server.load()
    assert wait_for(lambda: not server.children("matcher_worker")), "a matcher outlives its request"


def rise(values: list[float]) -> float:
    """How much a line through the second half rises, of its value where it begins."""
    kept = values[len(values) // 2 :]
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
    with (
        tempfile.TemporaryDirectory() as folder,
        forerun_serve(Path(folder), *flags, measured=False) as server,
    ):
        server.golden = {name: server.answer(name) for name in names}
        server.kill_children(KILL_EVERY, names)  # What a kill takes at first, it takes once.
        # Many more clients than there will be, so that no pool has to grow for chance later: with
        # twice as many, four threads came in two hours beside other load.
        with Load(server, 10 * CLIENTS, (*names, "new")) as load:
            assert wait_for(lambda: load.done >= 400)
        samples, loads = soak(server, given.minutes, names)
        same = {name: server.answer(name) for name in names} == server.golden
    rises = {name: rise(values) for name, values in samples.items()}
    grown = {name: share for name, share in rises.items() if share > LIMITS[name]}
    answers = sum(load.done for load in loads)
    wrong, refused, broken = (
        [one for load in loads for one in getattr(load, kind)]
        for kind in ("wrong", "refused", "broken")
    )
    report = {"minutes": given.minutes, "answers": answers, "wrong": len(wrong),
              "refused": len(refused), "broken": len(broken), "rise": rises,
              "samples": samples}  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps(report) + "\n")
    print(f"{answers} answers, {len(wrong)} wrong, {len(refused)} refused, {len(broken)} broken; "
          "rise over the second half: "
          + ", ".join(f"{name} {share:+.1%}" for name, share in rises.items()))  # fmt: skip
    for (name, message), count in Counter(
        (name, error["message"]) for name, _, error in refused
    ).most_common():
        print(f"refused {count} times, {name}: {message}")
    for (name, error), count in Counter(broken).most_common():
        print(f"broken {count} times, {name}: {error}")
    for name in grown:
        print(f"{name} grows: {samples[name]}")
    return 1 if grown or wrong or broken or not same else 0


if __name__ == "__main__":
    sys.exit(main())
