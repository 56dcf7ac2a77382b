"""What the n-gram cache brings after so many tokens of answers to other questions.

    python bench/ngram_cache.py --counted other.jsonl --prompts held.jsonl --json out.json

The default model answers both files of chats without a draft, half of `--counted` at T=0 and half
at .8, and `--prompts` once at each temperature. The held-out answers are then replayed through the
n-gram drafter, `--draft-tokens` in every step: from the text alone, by the shipped table, and by
a cache that has counted the first `--after` tokens of the other answers; it counts held-out answers
as they end, as it would in service. No clock has a part in it.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from bench.records import ended, keep
from bench.replay import Answer, accepted, answers_to
from forerun.build.with_cpu import ngram_drafter
from forerun.drafts.ngram_table import FILE, read_ngram_table
from forerun.hub.catalog import shipped_draft
from forerun.interface.drafter import Drafter
from forerun.interface.plan import Outcome, Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.options.config import EngineConfig

VOCAB = 49152


def plan_of(nodes: int, depth: int) -> Plan:
    """One row that may have so many draft tokens."""
    return Plan(
        slots=np.zeros(1, np.int32),
        kv_len=np.zeros(1, np.int32),
        known=(np.zeros(1, np.int32),),
        samples=np.ones(1, np.bool_),
        max_nodes=np.array([nodes], np.int32),
        max_depth=np.array([depth], np.int32),
        page_table=np.zeros((1, 1), np.int32),
        constrained=np.zeros(1, np.bool_),
    )


def play(drafter: Drafter, answer: Answer, nodes: int) -> int:
    """Give one answer; returns the steps it took after its first token."""
    first, steps = answer.output[:1], 0
    text = TokenText(np.append(answer.prompt, first))
    drafter.begin(SlotInit(0, text, len(answer.prompt), answer.sampling))
    left = answer.output[1:]
    while left:
        plan = plan_of(nodes, len(left) - 1)
        (draft,) = drafter.propose(plan)
        said = left[: accepted(draft, left) + 1]
        outcome = Outcome(
            np.array([len(said)], np.int32),
            np.array([said], np.int32),
            np.array([len(draft)], np.int32),
            np.ones(1, np.bool_),
        )
        text.append(said)
        drafter.observe(plan, None, outcome)  # type: ignore[arg-type]
        left, steps = left[len(said) :], steps + 1
    drafter.end(0)
    return steps


def tokens_per_step(drafter: Drafter, held: list[Answer], nodes: int) -> float:
    """Over all answers, their first tokens left out."""
    answered = [answer for answer in held if answer.output]
    steps = sum(play(drafter, answer, nodes) for answer in answered)
    return sum(len(answer.output) - 1 for answer in answered) / steps


def main() -> None:
    """Answer, replay, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counted", type=Path, help="jsonl of chats (default: built in)")
    parser.add_argument("--prompts", type=Path, help="jsonl of held-out chats (default: built in)")
    parser.add_argument("--count", type=int, default=1000, help="prompts of each file, at most")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    parser.add_argument("--after", type=int, nargs="+", default=[0, 2000, 8000, 32000, 128000])
    parser.add_argument("--capacity", type=int, default=EngineConfig().speculative_ngram_capacity)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    others = answers_to(options.counted, (0.0, 0.8), options.count, options.tokens)
    table = read_ngram_table(Path(shipped_draft("smollm2-135m") or "") / FILE, VOCAB)
    rows: list[dict[str, float | str]] = []
    for temperature in (0.0, 0.8):
        held = answers_to(options.prompts, (temperature,), options.count, options.tokens)
        drafters = {
            "text alone": ngram_drafter(1),
            "shipped table": ngram_drafter(1, table),
            **{
                f"cache after {least}": ngram_drafter(1, None, options.capacity)
                for least in options.after
            },
        }
        for least in options.after:
            counted, rest = 0, iter(others)
            while counted < least and (other := next(rest, None)):
                play(drafters[f"cache after {least}"], other, 1)
                counted += len(other.output)
        for name, drafter in drafters.items():
            result = tokens_per_step(drafter, held, options.draft_tokens)
            rows.append({"temperature": temperature, "drafts": name, "tokens_per_step": result})
            sys.stdout.write(f"T={temperature:g}  {name:20} {result:.3f} tokens a step\n")
            sys.stdout.flush()
    if options.json:
        keep(options.json, {"settings": vars(options), "results": rows})


if __name__ == "__main__":
    ended(main)
