"""Memory and start of `forerun serve`: seconds until it is ready, and megabytes of each process.

    python bench/server_memory.py smollm2-135m [--rounds 3] [-- options of serve]

Linux only. Megabytes are proportional set sizes (/proc/PID/smaps_rollup): pages that processes
share count once. Measured when the server is ready, and after a JSON answer, for which the engine
makes the encoder and the grammar library's vocabulary.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
from rich.console import Console

PORT = 8391
ADDRESS = f"http://127.0.0.1:{PORT}"


def family(pid: int) -> list[int]:
    """Return the process and all that it started, directly or not."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            pids += family(int(child))
    return pids


def megabytes(pid: int) -> float:
    """Return the proportional set size of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def ready(process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers. Raises RuntimeError if it ends."""
    while process.poll() is None:
        try:
            if httpx.get(f"{ADDRESS}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise RuntimeError(f"the server ended with {process.returncode}")


def main() -> int:
    """Start servers one after the other and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("options", nargs="*", help="of forerun serve, behind --")
    args = parser.parse_intermixed_args()
    command = [sys.executable, "-m", "forerun", "serve", args.model, "--port", str(PORT)]
    seconds, idle, structured = [], [], []
    for _ in range(args.rounds):
        begin = time.monotonic()
        process = subprocess.Popen(
            [*command, *args.options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            ready(process)
            seconds.append(time.monotonic() - begin)
            idle.append(sorted(map(megabytes, family(process.pid)), reverse=True))
            body = {
                "model": args.model,
                "prompt": "{",
                "max_tokens": 8,
                "response_format": {"type": "json_object"},
            }
            answer = httpx.post(f"{ADDRESS}/v1/completions", json=body, timeout=300)
            answer.raise_for_status()
            structured.append(sum(map(megabytes, family(process.pid))))
        finally:
            process.terminate()
            process.wait()
    console, each = Console(), ", ".join(f"{time:.1f}" for time in seconds)
    console.print(f"ready after {statistics.median(seconds):.1f} s ({each})")
    sizes = ", ".join(f"{size:.0f}" for size in idle[-1])
    console.print(f"MB when ready: {statistics.median(map(sum, idle)):.0f}; by process {sizes}")
    console.print(f"MB after a JSON answer: {statistics.median(structured):.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
