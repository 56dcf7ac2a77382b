"""What only several GPUs show of tensor parallelism (docs/use/scaling.md): all of it, in one go.

    python bench/nccl.py MODEL --sizes 1 2 [--draft HEAD] [--experts]

texts  the model is opened once per size and dtype, launched kernel by kernel and in captured
       rounds, and asked the same prompts, plain, by n-grams and with the head: in float32 the
       tokens must be equal, in bfloat16 it counts the texts that part
lost   the last rank is killed, or stopped, while streams run: seconds until the last has its error
sums   milliseconds of a layer's sum by NCCL and by torch's symmetric memory

--parts picks some of them, and --experts divides a mixture's experts among the ranks. On a machine
without GPUs all of it runs on the CPU (--device cpu), over gloo, as a rehearsal.
"""

import argparse
import logging
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from bench.records import ended
from forerun.build.engine import encode_chat, make_engine
from forerun.build.target import open_target
from forerun.client.completion import make_request
from forerun.engine.request import Delta, Request
from forerun.measure.prove import answers
from forerun.options.config import EngineConfig
from forerun.types import RequestId

PROMPTS = (
    "Why is the sky blue?",
    "Write a function that sorts a list of pairs.",
    "Name the planets, from the sun on.",
    "Tell a story about a lighthouse.",
)
ROWS = (1, 8, 64, 512)
Sum = Callable[[torch.Tensor], object]
PATIENCE, WITHIN = 300.0, 2.0
"""Seconds for a stream to begin or end at all, and for its error after a fault."""
HIDDEN = 8192
"""Of a 70B model."""


def texts(options: argparse.Namespace) -> None:
    """Tokens of every size, launched kernel by kernel and in captured rounds, against the first
    size's.
    """
    drafts = [{"speculative_algorithm": "OFF"}, {"speculative_algorithm": "NGRAM"}]
    if options.draft:
        drafts.append({"speculative_draft_model_path": options.draft})
    for dtype in options.dtypes:
        reference = None
        for size, eager, draft in product(options.sizes, (True, False), drafts):
            target = open_target(config(options, size, eager, dtype=dtype, **draft))
            try:
                requests = [
                    make_request(
                        encode_chat(target, [{"role": "user", "content": prompt}]),
                        max_tokens=options.tokens, temperature=0.0, ignore_eos=True,
                    )
                    for prompt in PROMPTS
                ]  # fmt: skip
                runs = [
                    answers(target, target.config, [renamed(r, n) for r in requests], 4)
                    for n in range(options.repeats)
                ]
            finally:
                target.close()
            tokens = [item.tokens for item in runs[0].done]
            reference = reference or tokens
            parted = sum(a != b for a, b in zip(reference, tokens, strict=True))
            rates = sorted(sum(map(len, tokens)) / run.seconds for run in runs)
            launched = "eager" if eager else "captured"
            say(
                f"{dtype}, {size} ranks, {launched}, {target.config.speculative_algorithm}: "
                f"{statistics.median(rates):.1f} tokens/s "
                f"({rates[0]:.1f} to {rates[-1]:.1f}), {parted} of {len(tokens)} texts part"
            )
            if dtype == "float32" and parted:
                raise SystemExit("in float32 the texts must be equal")


def config(options: argparse.Namespace, size: int, eager: bool, **more: Any) -> EngineConfig:
    """Of the model among so many ranks."""
    return EngineConfig(
        model=options.model, executor="torch", device=options.device, tp_size=size,
        ep_size=0 if options.experts and size > 1 else 1, disable_cuda_graph=eager, policy="fixed",
        **more,
    )  # fmt: skip


def lost(options: argparse.Namespace) -> None:
    """Seconds from a fault of the last rank to the last stream's error."""
    logging.getLogger("forerun").setLevel(logging.CRITICAL)
    size = max(options.sizes)
    for eager, sent in product((True, False), (signal.SIGKILL, signal.SIGSTOP)):
        target = open_target(config(options, size, eager, dtype=options.dtypes[0]))
        engine = make_engine(target, target.config)
        engine.start()
        begun, ended = SimpleQueue[Delta](), SimpleQueue[Delta]()

        def heard(delta: Delta, begun: Any = begun, ended: Any = ended) -> None:
            (ended if delta.finish else begun).put(delta)

        for n in range(3):
            prompt = np.arange(5, 25, dtype=np.int32)
            request = make_request(prompt, max_tokens=options.context, ignore_eos=True, seed=n)
            engine.submit(request, heard)
        begun.get(timeout=PATIENCE)
        facts: dict[str, Any] = target.executor.describe()
        os.kill(facts["ranks"][-1]["pid"], sent)
        since = perf_counter()
        last = [ended.get(timeout=PATIENCE) for _ in range(3)]
        took = perf_counter() - since
        engine.shutdown()
        target.close()
        launched, what = "eager" if eager else "captured", signal.Signals(sent).name
        say(f"{size} ranks, {launched}, {what}: {took:.2f} s; {last[-1].error}")
        if any(delta.error is None for delta in last):
            raise SystemExit("a stream ended without an error")
        if took > WITHIN:
            raise SystemExit(f"streams had their errors later than {WITHIN} s")


def renamed(request: Request, number: int) -> Request:
    """The same request once more."""
    return replace(request, id=RequestId(f"{request.id}-{number}"))


def sums(options: argparse.Namespace) -> None:
    """Milliseconds of one sum [rows, HIDDEN] of 16 bits, by rows."""
    cpu = options.device == "cpu"
    dist.init_process_group("gloo" if cpu else "nccl")
    rank, group = dist.get_rank(), dist.group.WORLD
    device = torch.device("cpu" if cpu else f"cuda:{rank}")
    ways: dict[str, Sum] = {"all_reduce": dist.all_reduce}
    if not cpu:
        torch.cuda.set_device(device)
        assert group is not None
        name = group.group_name

        def shared(x: torch.Tensor) -> torch.Tensor:
            summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name)
            return summed

        ways["symmetric memory, one shot"] = shared
    for rows in ROWS:
        for what, way in ways.items():
            if what == "all_reduce":
                x = torch.ones(rows, HIDDEN, dtype=torch.bfloat16, device=device)
            else:
                x = symmetric.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
                symmetric.rendezvous(x, name)
            times = [timed(way, x, options.repeats) for _ in range(5)]
            if rank == 0:
                say(f"{rows} rows, {what}: {statistics.median(times):.4f} ms "
                      f"({min(times):.4f} to {max(times):.4f})")  # fmt: skip
    dist.destroy_process_group()


def timed(way: Sum, x: torch.Tensor, count: int) -> float:
    """Milliseconds of each of `count` calls."""
    way(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    begun = perf_counter()
    for _ in range(count):
        way(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return 1000.0 * (perf_counter() - begun) / count


def say(line: str) -> None:
    """A line of the result."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def all_sums(options: argparse.Namespace) -> None:
    """`sums`, by a process for each rank."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    line += [str(max(options.sizes)), __file__, options.model, "--parts", "one-rank-of-sums"]
    line += ["--device", options.device, "--repeats", str(options.repeats)]
    subprocess.run(line, check=True)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--parts", nargs="+", default=["texts", "lost", "sums"],
        choices=("texts", "lost", "sums", "one-rank-of-sums"),
    )  # fmt: skip
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--draft", help="a draft head, for texts")
    parser.add_argument("--experts", action="store_true", help="as --ep-size 0")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a stream of lost")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    parts = {"texts": texts, "lost": lost, "sums": all_sums, "one-rank-of-sums": sums}
    for part in options.parts:
        parts[part](options)


if __name__ == "__main__":
    ended(main)
