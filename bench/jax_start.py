"""Seconds until a server on JAX is ready, and until its first text: a first start and the next.

    python -m bench.jax_start [--starts 3]

The command line of SGL-JAX's page (tests/parity/test_jax_commands.py), on two of four CPU devices
that XLA pretends, over a random model of eight layers and an EAGLE-3 head. The first start of each
pair has an empty cache directory, the next one what that left there.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from bench.records import ended
from forerun.machine import stamp
from tests.parity.test_jax_commands import PAGE, completion, save_models, serving

SIZES = {
    **{"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768, "head_dim": 32},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048},
}
FLAGS = [*PAGE.split(), "--device", "cpu", "--executor", "jax", "--tp-size", "2"]
FLAGS += ["--context", "2048"]


def start(place: Path, cache: Path) -> tuple[float, float, dict[str, int]]:
    """Return the seconds from the command until the server is ready and until its first text, and
    what its executor says of programs.
    """
    began = time.perf_counter()
    with serving(place, FLAGS, "forerun", cache) as url:
        ready = time.perf_counter() - began
        facts = httpx.get(url.removesuffix("/v1") + "/server_info", timeout=600).json()["executor"]
        began = time.perf_counter() - ready
        completion(url, max_tokens=1)
        return ready, time.perf_counter() - began, facts


def main() -> None:
    """Print a line for each start, and medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=3, help="pairs of them")
    args = parser.parse_args()
    sys.stdout.write(f"{stamp()}\n")
    times: dict[str, list[tuple[float, float]]] = {"first": [], "next": []}
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder), **SIZES)
        for number in range(args.starts):
            for name, seconds in times.items():
                ready, text, facts = start(Path(folder), Path(folder) / f"cache{number}")
                seconds.append((ready, text))
                programs = f"{facts['compiled']} programs, {facts['to_compile']} left"
                sys.stdout.write(f"{name}: ready {ready:.1f} s, text {text:.1f} s; {programs}\n")
                sys.stdout.flush()
    for name, seconds in times.items():
        ready, text = map(statistics.median, zip(*seconds, strict=True))
        sys.stdout.write(f"{name}: medians: ready {ready:.1f} s, text {text:.1f} s\n")


if __name__ == "__main__":
    ended(main)
