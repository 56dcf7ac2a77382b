"""An executor driven by hand: sequences, shuffled pages, any chunks and any trees.

with Driver(executor) as driver:
    driver.open(0, tokens, sampling)
    result = driver.step([Row(0, known=5), Row(1, draft=tree)])
    result.logits(row, node)
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pytest
import torch

from forerun.executors.cpu import CpuExecutor
from forerun.interface.executor import Executor, ExecutorLimits
from forerun.interface.next_draft import OnDeviceDraftSpec
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, NodeMasks, TreeBatch, batch
from tests.models import tiny

EVERYTHING = Sampling(temperature=0.0, prompt_logprobs=0, logprobs=0)
"""Greedy, and the logits of every node are computed."""


SHAPED = [
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.001},
    {"repetition_penalty": 1.7, "temperature": 0.0},
    {"repetition_penalty": 0.7, "frequency_penalty": 0.37, "presence_penalty": -0.9},
    {"logit_bias": ((9, 4.0), (5, -100.0), (600, 7.25))},
    {"min_tokens": 9, "stop_tokens": (9, 11)},
    {"frequency_penalty": 1.3, "top_p": 0.95, "temperature": 1.7, "logit_bias": ((3, 2.0),)},
    {"top_k": 1},
    {"top_p": 0.0},
    {"top_p": 1e-30, "top_k": 7},
    {"min_p": 1.0},
    {"temperature": 0.0, "top_p": 0.5},
    {},
]
"""Sampling parameters beyond a temperature, each alone and some together."""


MasksOf = Callable[[Plan, TreeBatch], NodeMasks]


def first_is_fast(values: list) -> list:
    """Parameters of a test: the first runs always, the others with the slow tests."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


@dataclass
class Row:
    """What one sequence does in a step. known None = all its tokens not yet cached."""

    slot: int
    known: int | None = None
    draft: Draft = field(default_factory=Draft)


@dataclass
class Sequence:
    """text: as the executor reads it."""

    text: TokenText
    tokens: list[int]
    kv_len: int
    pages: list[int]


def scored(executor: CpuExecutor) -> list[int]:
    """The nodes of the core's last step whose logits may be needed."""
    buffers = executor._buffers
    return buffers._arrays["scored_nodes"][: buffers.step.scored].tolist()


@dataclass
class Result:
    plan: Plan
    trees: TreeBatch
    round: Round
    outcome: Outcome
    executor: Executor

    def logits(self, row: int, node: int) -> torch.Tensor:
        """float32[V] of node `node` of row `row`, counted from the row's first; before the next
        step.
        """
        node += self.trees.start[row]
        if hasattr(self.round, "logits_of"):
            return torch.from_numpy(self.round.logits_of(node))
        if isinstance(self.executor, CpuExecutor):
            return torch.from_numpy(self.executor._logits_of(node))
        if hasattr(self.round, "place"):
            rows = self.round.place[node : node + 1]
            return torch.from_numpy(self.executor.programs.logits(rows)[0])
        return torch.from_numpy(self._of_node(node))

    @cached_property
    def _of_node(self) -> Callable[[int], np.ndarray]:
        """Kept, because what it makes for one node is that of hundreds."""
        return self.executor.logits_of(self.round)

    def every(self) -> torch.Tensor:
        """float32[M,V] of all nodes of a step of one row, where all are wanted."""
        return torch.stack([self.logits(0, node) for node in self.trees.nodes(0)])

    def emitted(self, row: int) -> list[int]:
        return self.outcome.tokens[row, : self.outcome.n_tokens[row]].tolist()


class Driver:
    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor, self.limits = executor, executor.limits
        self._random = np.random.default_rng(seed)
        self._free = self._random.permutation(self.limits.pages).tolist()
        self.sequences: dict[int, Sequence] = {}

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *_: object) -> None:
        for slot in list(self.sequences):
            self.close(slot)

    def open(self, slot: int, tokens, sampling: Sampling = EVERYTHING, prompt_len=None) -> None:
        tokens = np.asarray(tokens, np.int32)
        prompt_len = len(tokens) if prompt_len is None else prompt_len
        text = TokenText(tokens)
        self.executor.open(SlotInit(slot, text, prompt_len, sampling))
        self.sequences[slot] = Sequence(text, tokens.tolist(), 0, [])

    def close(self, slot: int) -> None:
        self.executor.close(slot)
        self._free += self.sequences.pop(slot).pages
        self._random.shuffle(self._free)

    def plan(self, rows: list[Row]) -> tuple[Plan, TreeBatch]:
        size, chosen = self.limits.page_size, [self.sequences[row.slot] for row in rows]
        known = []
        for row, sequence in zip(rows, chosen, strict=True):
            left = sequence.tokens[sequence.kv_len :]
            known.append(np.array(left[: row.known or len(left)], np.int32))
            wanted = sequence.kv_len + len(known[-1]) + len(row.draft)
            while len(sequence.pages) * size < wanted:
                sequence.pages.append(self._free.pop())
        table = np.full((len(rows), max(len(s.pages) for s in chosen)), -1, np.int32)
        for line, sequence in zip(table, chosen, strict=True):
            line[: len(sequence.pages)] = sequence.pages
        ends = [s.kv_len + len(k) == len(s.tokens) for s, k in zip(chosen, known, strict=True)]
        draft_tokens = np.array([len(row.draft) for row in rows], np.int32)
        plan = Plan(
            slots=np.array([row.slot for row in rows], np.int32),
            kv_len=np.array([s.kv_len for s in chosen], np.int32),
            known=tuple(known),
            samples=np.array(ends),
            max_nodes=draft_tokens,
            max_depth=draft_tokens,
            page_table=table,
            constrained=np.zeros(len(rows), np.bool_),
        )
        return plan, batch(known, [row.draft for row in rows])

    def step(
        self,
        rows: list[Row],
        masks_of: MasksOf | None = None,
        on_device_draft: OnDeviceDraftSpec | None = None,
    ) -> Result:
        """masks_of: (plan, trees) -> masks; then every row is held by a grammar."""
        plan, trees = self.plan(rows)
        plan.constrained[:] = masks_of is not None
        begun = self.executor.begin(replace(plan, on_device_draft=on_device_draft), trees)
        masks = masks_of(plan, trees) if masks_of is not None else None
        outcome = self.executor.finish(begun, masks)
        result = Result(plan, trees, begun, outcome, self.executor)
        for index, row in enumerate(rows):
            sequence = self.sequences[row.slot]
            sequence.kv_len += outcome.committed(plan)[index]
            sequence.tokens += result.emitted(index)
            sequence.text.append(result.emitted(index))
        return result


def limits(vocab: int, **changes: int) -> ExecutorLimits:
    numbers = {"page_size": 16, "pages": 96, "slots": 4, "max_nodes": 384, "context": 512}
    return ExecutorLimits(**numbers | changes, vocab=vocab)


def as_draft(tokens, parents) -> Draft:
    tokens, parents = np.array(tokens, np.int32), np.array(parents, np.int32)
    return Draft(tokens, parents, np.zeros(len(tokens), np.float32))


def chain_draft(tokens) -> Draft:
    return as_draft(tokens, np.arange(len(tokens)) - 1)


def logits_in_chunks(executor, tokens, chunks=(None,)):
    """float32[T,V] of a text that is run in chunks of these lengths."""
    with Driver(executor) as driver:
        driver.open(0, tokens)
        return torch.cat([driver.step([Row(0, known=chunk)]).every() for chunk in chunks])


def paths_of_a_tree(executor, random, length=40, last=7):
    """Run a text of `length` tokens and, together with its `last` ones, a tree; yield each longest
    path with the text before it, and the logits [n,V] of its draft tokens.
    """
    prompt = random.integers(0, tiny.VOCAB, length)
    parents = [-1, 0, 1, 2, 3, 4, -1, 6, 7, 1, 9, 10]
    draft = as_draft(random.integers(0, tiny.VOCAB, len(parents)), parents)
    with Driver(executor) as driver:
        driver.open(0, prompt)
        driver.step([Row(0, known=length - last)])
        result = driver.step([Row(0, draft=draft)])
        logits = [result.logits(0, last + node) for node in range(len(parents))]
    for leaf in (5, 8, 11):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        yield np.concatenate([prompt, draft.tokens[path]]), torch.stack([logits[n] for n in path])


def emitted_behind(executor, text, kept):
    """Return what follows `text` where a sequence continues behind its first `kept` tokens, whose
    pages and state another one has left.
    """
    greedy, whole = Sampling(temperature=0.0), TokenText(np.array(text, np.int32))
    with Driver(executor, seed=2) as driver:
        driver.open(1, text[:kept], greedy)
        driver.step([Row(1)])
        pages = driver.sequences[1].pages
        executor.open(SlotInit(2, whole, kept, greedy, cached=kept, shared=kept))
        driver.sequences[2] = Sequence(whole, list(text), kept, pages)
        again = driver.step([Row(2)]).emitted(0)
        driver.sequences[2].pages = driver.sequences[2].pages[len(pages) :]
        return again


def emitted_within_a_page(executor, text, sampling, count=6):
    """Return the tokens of a text that continues within a copy of another's last page, right after
    drafted tokens were written there, and of the same text that nothing was copied for.
    """
    with Driver(executor, seed=2) as driver:
        for slot in (0, 1):
            driver.open(slot, text, sampling)
            driver.step([Row(slot)])
        for _ in range(count + 5):
            driver.step([Row(0)])
        whole, size = driver.sequences[0].tokens, executor.limits.page_size
        driver.step([Row(1, draft=chain_draft(whole[len(text) + 1 : len(text) + 5]))])
        known, copy = driver.sequences[1], driver._free.pop()
        kept = known.kv_len
        full = kept // size
        assert kept == len(text) + 5 and kept % size, "what was drafted is right, and in a page"
        assert executor.copy_page(known.pages[full], copy)
        driver.open(2, whole[: kept + 1], sampling, prompt_len=len(text))
        own = driver.sequences[2]
        own.kv_len, own.pages = kept, [*known.pages[:full], copy]
        for _ in range(count):
            driver.step([Row(2), Row(1)])
        own.pages = own.pages[full:]
        assert known.tokens == own.tokens
        return own.tokens, whole[: len(own.tokens)]
