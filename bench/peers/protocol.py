"""The line protocol between `run.py` and its workers. Standard library only.

Every engine under test lives in a process (and virtual environment) of its own and answers one
JSON line per JSON line: `load`, then any number of `run`s. Only one worker is busy at a time.
"""

import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Load:
    """What a worker is told once. `speculation` is the engine's own prompt lookup, or off."""

    gguf: str
    folder: str
    threads: int
    context: int
    streams: int
    speculation: bool


@dataclass(frozen=True)
class Stream:
    """One prompt's answer: seconds from the start of the run, and the tokens it got."""

    first: float
    last: float
    tokens: list[int]


class Peer(Protocol):
    """An engine under test. Greedy, exactly `max_tokens` per prompt, end-of-text ignored."""

    def load(self, load: Load) -> None:
        """Ready to answer when this returns."""
        ...

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
        """Answer all prompts at once, as many streams as there are prompts."""
        ...


def resident_mb() -> float:
    """Peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(peer: Peer) -> None:
    """Answer commands from stdin until it closes. Whatever a library prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    born = time.perf_counter()
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        reply: dict[str, Any]
        if command["do"] == "load":
            peer.load(Load(**command["load"]))
            reply = {"start_seconds": time.perf_counter() - born, "resident_mb": resident_mb()}
        else:
            begin = time.perf_counter()
            streams = peer.run(command["prompts"], command["max_tokens"])
            reply = {
                "seconds": time.perf_counter() - begin,
                "streams": [asdict(stream) for stream in streams],
                "resident_mb": resident_mb(),
            }
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
