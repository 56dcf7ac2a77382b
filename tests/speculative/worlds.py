"""A small target that can be enumerated, random trees, and both ways to decode.

Eight tokens; the logits after a prefix depend on its last two tokens and are multiples of one
half, so ties are common, with some of them -inf, so zero mass is too.
"""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
from hypothesis import strategies as st

from forerun.executors.host_sampler import HostSampler
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.accept import NOTHING, choose
from forerun.speculative.sampling import History, Sampling, process
from forerun.speculative.tree import Draft, NodeMasks, TreeBatch, batch
from forerun.types import Floats, Ints

V = 8
PROMPT = (1, 2, 2, 5)
Drafter = Callable[[list[int]], Draft]
NO_DRAFT = Draft()


def _table() -> Floats:
    random = np.random.default_rng(8)
    table = np.round(random.normal(0, 3, (V, V, V))) / 2
    table[random.random(table.shape) < 0.15] = -np.inf
    table[:, :, 3] = np.maximum(table[:, :, 3], -1)  # Something is always possible.
    return table.astype(np.float32)


TABLE = _table()


def logits_after(tokens: list[int]) -> Floats:
    return TABLE[tokens[-2], tokens[-1]]


def allowed_after(tokens: list[int]) -> list[int]:
    """A grammar: two neighbours are never both even, and 7 follows 3 only."""
    last = tokens[-1]
    return [t for t in range(V) if (t % 2 or last % 2) and (t != 7 or last == 3)]


def bits(allowed: list[int]) -> np.ndarray:
    return np.array([sum(1 << token for token in allowed)], np.uint32)


def prefix_of(tokens: list[int], trees: TreeBatch, node: int) -> list[int]:
    """All tokens up to and including flat `node` of a one-row tree whose root ends `tokens`."""
    path: list[int] = []
    while node > trees.root(0):
        path.insert(0, int(trees.tokens[node]))
        node = int(trees.parents[node])
    return tokens + path


def node_masks(tokens: list[int], trees: TreeBatch) -> NodeMasks:
    rows = [bits(allowed_after(prefix_of(tokens, trees, n))) for n in range(len(trees.tokens))]
    return NodeMasks(np.arange(len(rows), dtype=np.int32), np.stack(rows))


def plan_of(
    slots: list[int], kv_len: list[int], known: list[list[int]], samples: list[bool]
) -> Plan:
    rows = len(slots)
    return Plan(
        slots=np.array(slots, np.int32),
        kv_len=np.array(kv_len, np.int32),
        known=tuple(np.array(chain, np.int32) for chain in known),
        samples=np.array(samples),
        max_nodes=np.full(rows, 64, np.int32),
        max_depth=np.full(rows, 64, np.int32),
        page_table=np.full((rows, 1), -1, np.int32),
        constrained=np.zeros(rows, np.bool_),
    )


def speculate(
    sampling: Sampling, drafter: Drafter, count: int, grammar: bool = False
) -> tuple[list[int], list[Outcome]]:
    """`count` tokens through the real sampler, one row, with draft tokens from `drafter`.

    Fewer where the row fails.
    """
    sampler = HostSampler(1, V)
    tokens = list(PROMPT)
    text = TokenText(tokens)
    sampler.open(SlotInit(0, text, len(tokens), sampling))
    outcomes: list[Outcome] = []
    while len(tokens) < len(PROMPT) + count:
        plan = plan_of([0], [len(tokens) - 1], [tokens[-1:]], [True])
        trees = batch(list(plan.known), [drafter(tokens)])
        masks = node_masks(tokens, trees) if grammar else None

        def logits(node: int, before: list[int] = tokens, trees: TreeBatch = trees) -> Floats:
            return logits_after(prefix_of(before, trees, node))

        outcome = sampler.finish(Round(plan, trees), logits, masks)
        outcomes.append(outcome)
        if not outcome.finite[0]:
            break
        tokens = tokens + outcome.output_tokens[0]
        text.append(outcome.output_tokens[0])
    return tokens[len(PROMPT) : len(PROMPT) + count], outcomes


def decode(sampling: Sampling, count: int, grammar: bool = False) -> list[int]:
    """`count` tokens by the definition, one at a time, with no tree anywhere.

    Fewer where nothing can follow.
    """
    tokens = list(PROMPT)
    for position in range(count):
        history = History(np.array(tokens, np.int32), len(PROMPT))
        mask = bits(allowed_after(tokens)) if grammar else None
        processed = process(logits_after(tokens), sampling, history, (), mask)
        token = choose(processed, sampling, position)
        if token == NOTHING:
            break
        tokens.append(token)
    return tokens[len(PROMPT) :]


def joint(sampling: Sampling, count: int, grammar: bool = False) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first `count` tokens, by enumeration."""
    result = {}
    for text in product(range(V), repeat=count):
        chance = 1.0
        for length in range(count):
            chance *= _next(sampling, list(text[:length]), grammar)[text[length]]
        result[text] = chance
    return result


def _next(sampling: Sampling, output: list[int], grammar: bool) -> np.ndarray:
    tokens = [*PROMPT, *output]
    mask = bits(allowed_after(tokens)) if grammar else None
    history = History(np.array(tokens, np.int32), len(PROMPT))
    processed = process(logits_after(tokens), sampling, history, (), mask).astype(np.float64)
    weights = np.exp(processed - processed.max())
    return weights / weights.sum()


@st.composite
def drafts(draw: st.DrawFn, most: int = 10) -> Draft:
    """Any tree, duplicate children included."""
    count = draw(st.integers(0, most))
    tokens = draw(st.lists(st.integers(0, V - 1), min_size=count, max_size=count))
    parents = [draw(st.integers(-1, index - 1)) for index in range(count)]
    return as_draft(tokens, parents)


def as_draft(tokens: list[int], parents: list[int]) -> Draft:
    scores = np.zeros(len(tokens), np.float32)
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), scores)


def random_draft(random: np.random.Generator, most: int = 12) -> Draft:
    """A random tree of bushes and chains."""
    count = int(random.integers(0, most + 1))
    parents = [int(random.integers(max(-1, i - 5), i)) for i in range(count)]
    return as_draft(random.integers(0, V, count).tolist(), parents)


def full_draft(depth: int) -> Draft:
    """Every path of `depth` tokens: accepts everything."""
    tokens, parents, level = [], [], [-1]
    for _ in range(depth):
        begin = len(tokens)
        for parent in level:
            tokens += range(V)
            parents += [parent] * V
        level = list(range(begin, len(tokens)))
    return as_draft(tokens, parents)


def paths(trees: TreeBatch, row: int) -> Iterator[tuple[int, Ints]]:
    """(flat node, its path from the row's first node, itself included), by walking parents."""
    for node in trees.nodes(row):
        path = [node]
        while trees.parents[path[0]] >= 0:
            path.insert(0, int(trees.parents[path[0]]))
        yield node, np.array(path)
