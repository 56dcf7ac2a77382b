"""What keys and values in fewer bits are worth at long contexts: steps of one token, in turns.

    python bench/long_context.py [model] [--contexts 16384 32768] [--kv-dtypes same q8_0]
        [--rounds 15] [--threads 2] [--llama-cpp]

Pages hold those of a short random text, over and over, so that no long prompt has to be read; the
model's own limit is ignored. "attention" is a step's time less that of a step behind 16 tokens.
Milliseconds are medians; ratios to the first format, of the same round, have their quartiles. Both
grow alike with a load beside them, so they can be taken on a machine that others use.

--llama-cpp adds llama-server, which has to read the prompts first: `random_gguf.py --shape
attention` makes a model of three layers for that.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import numpy as np

from bench.peers.sources import llama_server
from bench.records import ended, quartiles
from forerun.executors.cpu import CpuExecutor
from forerun.hub.catalog import Model, open_model
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.machine import stamp
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, batch
from forerun.types import Ints

PAGE, TEXT, LITTLE = 16, 512, 16
PORT = 8389


def step(executor: CpuExecutor, tokens: Ints, cached: int) -> float:
    """Run the tokens behind the first `cached` ones. Returns the seconds it took."""
    executor.open(SlotInit(0, TokenText(tokens), len(tokens), Sampling(temperature=0.0)))
    known = tokens[cached:]
    plan = Plan(
        slots=np.zeros(1, np.int32),
        kv_len=np.full(1, cached, np.int32),
        known=(known,),
        samples=np.ones(1, np.bool_),
        max_nodes=np.zeros(1, np.int32),
        max_depth=np.zeros(1, np.int32),
        page_table=np.arange(executor.limits.pages, dtype=np.int32)[None],
        constrained=np.zeros(1, np.bool_),
    )
    began = time.perf_counter()
    executor.finish(executor.begin(plan, batch([known], [Draft()])))
    took = time.perf_counter() - began
    executor.close(0)
    return took


def filled(model: Model, kv_dtype: str, longest: int, threads: int | None) -> CpuExecutor:
    """Return an executor whose pages are all written."""
    pages, vocab = longest // PAGE + 1, model.architecture.vocab
    limits = ExecutorLimits(PAGE, pages, 1, TEXT, pages * PAGE, vocab)
    executor = CpuExecutor(model.checkpoint, limits, threads, kv_dtype=kv_dtype)
    step(executor, np.random.default_rng(0).integers(0, vocab, TEXT).astype(np.int32), 0)
    assert executor.pages is not None, "a model with recurrent layers has no pages to copy"
    contents = [executor.pages.read_page(page) for page in range(TEXT // PAGE)]
    for page in range(len(contents), pages):
        executor.pages.write_page(page, contents[page % len(contents)])
    return executor


class LlamaServer:
    """llama-server with a slot for each context; it times its steps itself."""

    def __init__(self, path: Path, contexts: list[int], threads: int, kv_dtype: str) -> None:
        kind = "f16" if kv_dtype == "same" else kv_dtype
        room = len(contexts) * (max(contexts) + PAGE)
        self._at, self._contexts = f"http://127.0.0.1:{PORT}", contexts
        self._process = subprocess.Popen(
            [
                *(str(llama_server("llama.cpp")), "-m", str(path), "--port", str(PORT)),
                *("-t", str(threads), "-tb", str(threads), "-np", str(len(contexts))),
                *("-c", str(room), "--no-kv-unified", "-cram", "0", "--no-webui"),
                *("-fa", "on", "-ctk", kind, "-ctv", kind),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not self._is_up():
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self._at}/health").status_code == 200
        except httpx.TransportError:
            return False

    def step(self, tokens: Ints, cached: int) -> float:
        """Return the seconds of a step of one token behind `cached` ones, read once."""
        body = {
            "prompt": tokens[:cached].tolist(),
            "id_slot": self._contexts.index(cached),
            "n_predict": 5,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        answer = httpx.post(f"{self._at}/completion", json=body, timeout=3600).raise_for_status()
        return float(answer.json()["timings"]["predicted_per_token_ms"]) / 1000

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--kv-dtypes", nargs="+", default=["same", "q8_0"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--llama-cpp", action="store_true", help="the first format, there too")
    options = parser.parse_args()
    model, longest = open_model(options.model), max(options.contexts)
    made = {kind: filled(model, kind, longest, options.threads) for kind in options.kv_dtypes}
    random = np.random.default_rng(1)
    tokens = random.integers(0, model.architecture.vocab, longest + 1).astype(np.int32)
    contexts = [LITTLE, *options.contexts]
    first = options.kv_dtypes[0]
    ways: dict[str, Callable[[int], float]] = {
        kind: partial(_ours, executor, tokens) for kind, executor in made.items()
    }
    peer = None
    if options.llama_cpp:
        threads = int(made[first].describe()["threads"])
        peer = LlamaServer(model.path, contexts, threads, first)
        ways["llama.cpp"] = partial(peer.step, tokens)
    ms: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds + 1):
        for cached in contexts:
            for way in random.permutation(list(ways)).tolist():
                ms.setdefault((way, cached), []).append(1000 * ways[way](cached))
    if peer is not None:
        peer.close()
    sys.stdout.write(f"{stamp()}\n{model.name}, {made[first].name}\n")
    for way in ways:
        for cached in contexts:
            steps, one = ms[way, cached][1:], ms[first, cached][1:]
            line = f"{way:10} {cached:6} tokens: step {statistics.median(steps):7.2f}"
            if way != first:
                line += f", over {first} {shown(steps, one)}"
                if cached != LITTLE:
                    over = (attention(ms, each, cached) for each in (way, first))
                    line += f", attention {shown(*over)}"
            sys.stdout.write(line + "\n")
    return 0


def _ours(executor: CpuExecutor, tokens: Ints, cached: int) -> float:
    return step(executor, tokens[: cached + 1], cached)


def attention(ms: dict[tuple[str, int], list[float]], kind: str, cached: int) -> list[float]:
    """Return what attention takes in each round."""
    little = statistics.median(ms[kind, LITTLE][1:])
    return [took - little for took in ms[kind, cached][1:]]


def shown(over: list[float], under: list[float]) -> str:
    """Return the median of ratios, and their quartiles, as text."""
    low, middle, high = quartiles([a / b for a, b in zip(over, under, strict=True)])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    ended(main)
