"""What only several GPUs can show of tensor parallelism (docs/scaling.md).

    python bench/nccl.py texts MODEL --sizes 1 2            the same texts, and tokens per second
    torchrun --nproc-per-node 2 bench/nccl.py sums          the sum of a layer, by NCCL and by
                                                            torch's symmetric memory

`texts` opens the model once per size and dtype and asks the same prompts: in float32 the tokens
must be equal, in bfloat16 it counts the texts that part. On a machine without GPUs both run on the
CPU (--device cpu), over gloo, as a rehearsal.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from time import perf_counter

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from forerun.build.engine import encode_chat, open_target
from forerun.client.completion import make_request
from forerun.engine.request import Request
from forerun.measure.prove import answers
from forerun.options.config import EngineConfig

PROMPTS = (
    "Why is the sky blue?",
    "Write a function that sorts a list of pairs.",
    "Name the planets, from the sun on.",
    "Tell a story about a lighthouse.",
)
ROWS = (1, 8, 64, 512)
Sum = Callable[[torch.Tensor], object]
HIDDEN = 8192
"""Of a 70B model."""


def texts(options: argparse.Namespace) -> None:
    """Tokens of every size, launched kernel by kernel and in captured rounds, against the first
    size's.
    """
    for dtype in options.dtypes:
        reference = None
        for size, eager in product(options.sizes, (True, False)):
            config = EngineConfig(
                model=options.model, executor="torch", device=options.device, dtype=dtype,
                tp_size=size, disable_cuda_graph=eager, speculative_algorithm=options.algorithm,
                policy="fixed",
            )  # fmt: skip
            target = open_target(config)
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
                f"{dtype}, {size} ranks, {launched}: {statistics.median(rates):.1f} tokens/s "
                f"({rates[0]:.1f} to {rates[-1]:.1f}), {parted} of {len(tokens)} texts part"
            )
            if dtype == "float32" and parted:
                raise SystemExit("in float32 the texts must be equal")


def renamed(request: Request, number: int) -> Request:
    """The same request once more."""
    return replace(request, id=f"{request.id}-{number}")


def sums(options: argparse.Namespace) -> None:
    """Milliseconds of one sum [rows, HIDDEN] of 16 bits, by rows."""
    cpu = options.device == "cpu"
    dist.init_process_group("gloo" if cpu else "nccl")
    rank, group = dist.get_rank(), dist.group.WORLD
    device = torch.device("cpu" if cpu else f"cuda:{rank}")
    ways: dict[str, Sum] = {"all_reduce": dist.all_reduce}
    if not cpu:
        torch.cuda.set_device(device)
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


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("texts", "sums"))
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--algorithm", default="NGRAM")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    {"texts": texts, "sums": sums}[options.what](options)


if __name__ == "__main__":
    main()
