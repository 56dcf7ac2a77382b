"""What a number format costs in accuracy: perplexity of plain text under each of several.

    python bench/perplexity.py [model] [--device cuda] [--dtypes bfloat16,float8] [--tokens 20000]
        [--kv-dtype same,float8]
    python bench/perplexity.py FOLDER --device cpu --dtypes float32,file,q8_0
    python bench/perplexity.py --device cpu --dtypes file --kv-dtype same,q8_0

Formats of the compiled core (file, q8_0, q4_1, q4_k) run there, the others with torch.

The text is this repository's own documentation, cut into pieces of 512 tokens that are scored from
their second token on. Prints a table: mean negative log-likelihood in nats, perplexity, and the
difference to the first format. With other text: --text FILE.
"""

import argparse
import math
import sys
from itertools import product
from pathlib import Path

import numpy as np

from bench.records import ended
from forerun.executors.cpu import CpuExecutor
from forerun.executors.torch import TorchExecutor
from forerun.hub.catalog import open_model
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.options.config import NATIVE_DTYPES
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, batch
from forerun.types import Ints

PIECE, PAGE = 512, 16


def surprise(executor: TorchExecutor | CpuExecutor, tokens: Ints) -> float:
    """Sum of negative log-likelihoods, in nats, of all tokens but the first."""
    executor.open(SlotInit(0, TokenText(tokens), len(tokens), Sampling(prompt_logprobs=0)))
    try:
        plan = Plan(
            slots=np.zeros(1, np.int32),
            kv_len=np.zeros(1, np.int32),
            known=(tokens,),
            samples=np.ones(1, np.bool_),
            max_nodes=np.zeros(1, np.int32),
            max_depth=np.zeros(1, np.int32),
            page_table=np.arange(PIECE // PAGE + 1, dtype=np.int32)[None],
            constrained=np.zeros(1, np.bool_),
        )
        trees = batch([tokens], [Draft()])
        (reports,) = executor.finish(executor.begin(plan, trees)).prompt_logprobs
        return -sum(report.logprob for report in reports)
    finally:
        executor.close(0)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", default="bfloat16,float8")
    parser.add_argument("--kv-dtype", default="same", help="of pages; several: each of them")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    model = open_model(options.model)
    files = [options.text] if options.text else sorted(Path("docs").rglob("*.md"))
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    tokens = model.tokenizer.encode(text)[: options.tokens].astype(np.int32)
    pieces = [tokens[at : at + PIECE] for at in range(0, len(tokens) - 1, PIECE)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    counted = sum(len(piece) - 1 for piece in pieces)
    limits = ExecutorLimits(PAGE, PIECE // PAGE + 1, 1, PIECE, PIECE, model.architecture.vocab)
    first = None
    sys.stdout.write(f"{model.name} on {options.device}, {counted:,} tokens of plain text\n")
    kinds = product(options.dtypes.split(","), options.kv_dtype.split(","))
    for dtype, kv_dtype in kinds:
        executor: TorchExecutor | CpuExecutor
        if dtype in NATIVE_DTYPES:
            executor = CpuExecutor(model.checkpoint, limits, dtype=dtype, kv_dtype=kv_dtype)
        else:
            executor = TorchExecutor(
                model.checkpoint, limits, options.device, dtype, kv_dtype=kv_dtype
            )
        nats = sum(surprise(executor, piece) for piece in pieces) / counted
        executor.shutdown()
        first = nats if first is None else first
        line = f"{dtype:10} pages {kv_dtype:8} {nats:8.4f} nats  perplexity {math.exp(nats):8.3f}"
        sys.stdout.write(f"{line}  {100 * (math.exp(nats - first) - 1):+.2f} %\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    ended(main)
