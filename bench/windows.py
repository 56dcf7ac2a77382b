"""How many windows to keep: what prefix hits lose where layers with a window give pages back.

    python -m bench.windows [--window 512] [--page-size 16] [--windows 1 2 4 8 16 32] [--json OUT]

Conversations of agents that edit files (bench/agent_edits.py) take turns; all begin with the same
long instructions, and each third one begins anew with its file as it is then (`compacted`). Their
tokens are those of the default model. They go through the real prefix index, page tables and window
pages; no model and no clock has a part in it. Pages of layers without a window are never short, so
that only window pages decide behind which cached tokens a text can continue.

Printed, for so many conversations that take turns: tokens of a prompt on average; how many of them
a cache that keeps every page finds; and by the number of whole windows there is room for, beside a
step's, how many of the found tokens are computed again, in percent.
"""

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from bench.agent_edits import PACKAGE, conversation
from bench.records import ended, keep
from forerun.build.memory import CHUNK
from forerun.build.target import open_text
from forerun.cache.prefix import PrefixIndex
from forerun.cache.table import PageTable
from forerun.executors.window_pages import WindowPages
from forerun.interface.executor import ExecutorLimits, window_pages_of
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.options.config import EngineConfig
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NO_DRAFT, TreeBatch, batch
from forerun.text.tokenizer import Tokenizer
from forerun.types import Ints

Turn = tuple[Ints, Ints]
"""A prompt and its answer."""

DECODED = 8
"""Tokens of an answer in one step: how many does not matter, but there are fewer steps."""

NONE = np.zeros(1, np.int32)


class Cache:
    """One sequence at a time, over pages that never run out; windows: whole ones, 0 = all kept."""

    def __init__(self, turns: Sequence[Turn], window: int, page: int, windows: int) -> None:
        longest = max(len(prompt) + len(answer) for prompt, answer in turns)
        total = sum(len(prompt) + len(answer) for prompt, answer in turns)
        each = window_pages_of(longest, window, page)
        limits = ExecutorLimits(
            page_size=page,
            pages=total // page + len(turns) + 1,
            slots=1,
            max_nodes=CHUNK,
            context=longest,
            vocab=1,
            window=window,
            window_pages=windows * each + -(-CHUNK // page),
        )
        self._index = PrefixIndex(limits.pages, page)
        self._windows = WindowPages(limits) if windows else None

    def run(self, prompt: Ints, answer: Ints) -> int:
        """Return how many tokens of the prompt are found."""
        table, windows, text = PageTable(self._index), self._windows, np.append(prompt, answer)
        shared = table.start(prompt[:-1])
        if windows is not None:
            pages = np.array(table.pages, np.int32)
            table.shorten(windows.reusable_prefix_len(pages))
            pages = np.array(table.pages, np.int32)
            start = TokenText(prompt), len(prompt), Sampling()
            windows.open(SlotInit(0, *start, cached=table.length, pages=pages, shared=shared))
        length = table.length
        steps = [*range(length, len(prompt), CHUNK), *range(len(prompt), len(text), DECODED)]
        for begin, end in pairwise([*steps, len(text)]):
            assert table.reserve(end - begin), "pages ran out"
            if windows is not None:
                windows.begin(*_step(table, text[begin:end]))
            table.commit(end - begin, text)
        if windows is not None:
            windows.close(0)
        table.release()
        return length


def _step(table: PageTable, known: Ints) -> tuple[Plan, TreeBatch]:
    """Return a step of one sequence that reads these tokens."""
    length, pages = np.array([table.length], np.int32), np.array(table.pages, np.int32)[None]
    plan = Plan(NONE, length, (known,), NONE > 0, NONE, NONE, pages, NONE > 0)
    return plan, batch([known], [NO_DRAFT])


def talks(tokenizer: Tokenizer, edits: int) -> list[list[Turn]]:
    """Return the conversations about the package's files, of so many edits each."""
    files = [
        path for path in sorted(PACKAGE.rglob("*.py")) if 60 <= path.read_text().count("\n") <= 200
    ]
    order = np.random.default_rng(0).permutation(len(files)).tolist()
    return [
        [
            (tokenizer.encode(turn.prompt), tokenizer.encode(turn.answer))
            for turn in conversation(files[place], edits, True, number % 3 == 2, number)
        ]
        for number, place in enumerate(order)
    ]


def interleaved(talks: Sequence[list[Turn]], at_once: int, turns: int) -> list[Turn]:
    """Return turns of so many conversations, one after another; a new one for each that ends."""
    left, running, order = deque(talks), deque[deque[Turn]](), list[Turn]()
    for _ in count():
        while len(running) < at_once and left:
            running.append(deque(left.popleft()))
        if not running or len(order) == turns:
            return order
        talk = running.popleft()
        order.append(talk.popleft())
        if talk:
            running.append(talk)
    return order


def main() -> None:
    """Play all of them, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--page-size", type=int, default=EngineConfig().page_size)
    parser.add_argument("--windows", type=int, nargs="+", default=(1, 2, 3, 4, 6, 8, 16, 32))
    parser.add_argument("--conversations", type=int, nargs="+", default=(1, 2, 4, 8, 16))
    parser.add_argument("--turns", type=int, default=96, help="in all")
    parser.add_argument("--edits", type=int, default=4, help="of a file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer, _ = open_text(EngineConfig())
    all_talks, table = talks(tokenizer, options.edits), list[dict[str, object]]()
    named = "".join(f"{windows:8}" for windows in options.windows)
    sys.stdout.write(f"conversations  tokens   found{named}\n")
    for at_once in options.conversations:
        turns = interleaved(all_talks, at_once, options.turns)
        results = {}
        for windows in (0, *options.windows):
            cache = Cache(turns, options.window + 1, options.page_size, windows)
            results[windows] = sum(cache.run(*turn) for turn in turns)
        again = {each: 1 - results[each] / results[0] for each in options.windows}
        tokens = sum(len(prompt) for prompt, _ in turns) / len(turns)
        figures = "".join(f"{100 * again[each]:8.1f}" for each in options.windows)
        sys.stdout.write(f"{at_once:13} {tokens:7.0f} {results[0] / len(turns):7.0f}{figures}\n")
        sys.stdout.flush()
        facts = {"conversations": at_once, "tokens": tokens, "found": results[0] / len(turns)}
        table.append(facts | {"again": again})
    if options.json:
        keep(options.json, {"settings": vars(options), "table": table})


if __name__ == "__main__":
    ended(main)
