"""The contract of draft models (forerun/interface/draft_model.py), every kind on every executor.

A model says what passes over the whole text say; one that is right is accepted whole and one that
is wrong never; no draft changes a text. Counts are exact where the outcome is known. JAX drafts
inside of rounds, where nothing can intercept: there what is proposed is compared with torch's
(tests/parity/test_jax_drafts.py), and blocks that the host asks for with their passes here.
"""

import json
import re
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forerun.build import drafting
from forerun.build.drafting import open_drafts, with_draft
from forerun.build.engine import load
from forerun.build.memory import Needs, plan_memory
from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.client.completion import complete
from forerun.control.policy import Budget, Decision, FixedPolicy
from forerun.drafters import deferred_extend
from forerun.drafters.ngram import NgramDrafter
from forerun.drafts.block_folder import open_block
from forerun.errors import ConfigError, EngineError, ModelError
from forerun.executors import cpu, feature_ring
from forerun.executors.jax import JaxBlockModel
from forerun.executors.torch.attention.kv import KvShape
from forerun.executors.torch.drafts.draft_cache import DraftCache
from forerun.executors.torch.features import TorchFeatureRing
from forerun.hub.catalog import open_model
from forerun.interface.draft_model import DraftBlock, DraftExtension
from forerun.networks.cache_layer import CacheLayer
from forerun.options.config import EngineConfig
from tests import covering
from tests.drafters import toys
from tests.drafters.intercepted import Oracle, PartialOracle, Recorded, beginning_with
from tests.drafters.served import PROMPTS, Cells, requests_for, settings
from tests.drafters.toys import ToyCell
from tests.models import tiny
from tests.parity.blocks import PAIRED, SELECTING, VARIANTS, in_gguf, random_block

JAX = {"max_sequences": 2, "context": 96, "kv_tokens": 256}
PADS = "rows", "nodes", "chunks"
"""Programs of every size are in tests/parity/test_jax_executor.py, rounds of one node and of a
chain that draft below (`resting`), of one row and of two in test_overlap.py.
"""
CHAIN, TREE = (3, 3, 1), (21, 3, 3)
"""Draft tokens, depth, width: of the tree nothing that was grown is cut off."""


NO_CORE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))


def params(cells, slow=()):
    """(executor, name) as parameters; `slow` ones run with the slow tests."""
    return [
        pytest.param(*cell, marks=needs(cell) + [pytest.mark.slow] * (tuple(cell) in slow))
        for cell in cells
    ]


def needs(cell):
    return [NO_CORE] * (cell[0] == "cpu")


def features(cell):
    """What has to occur of cells (executor, name, request): every kind of draft on every
    executor and with every request, every executor too, and which of the kind it is on any of them.
    """
    executor, name, *how = cell
    family, _, which = name.partition(", ")
    together = (executor, family, how) if how else (executor, family)
    return {(family, which)} | covering.pairs(together)


def thinned(cells, others=((),), slow=()):
    """(executor, name) with each of the `others`, as far as `features` asks for them; what only
    cells of `slow` have runs with the slow tests.
    """
    cells = [(*cell, *other) for cell, other in product(cells, others)]
    return covering.thinned(cells, features, needs, lambda cell: cell[:2] in slow)


def on(executor, *names):
    return [(executor, name) for name in names]


@pytest.fixture(scope="module")
def cells(kinds, compiled, quickly):
    opened = Cells(kinds, compiled, PADS)
    toys = {}

    def of(executor, name, **changes):
        if executor == "toy":
            return toys.setdefault(name, ToyCell(name))
        if executor != "jax":
            return opened(executor, name, **changes)
        return opened(executor, name, **JAX | changes)

    yield of
    opened.close()


# --- what is proposed --------------------------------------------------------------------------


def heard_of(executor, cell):
    """The shape of drafts that are heard: a chain, but of blocks on JAX a tree of which a full one
    holds less, so that the host asks for them.
    """
    return (5, cell.depth, 2) if executor == "jax" and cell.model().traits.block_size else None


JAX_BLOCKS = on("jax", *(f"DFLASH, {variant}" for variant in VARIANTS | PAIRED))
SPOKEN = [
    *on("torch", "EAGLE", "STANDALONE, first layers", "NEXTN, mimo", "NEXTN of, glm4_moe"),
    *on("torch", "NEXTN of, deepseek_v3", "NEXTN of, qwen3_next"),
    *on("torch", "NEXTN of, qwen3_5_moe_text", "NEXTN in GGUF, qwen3_5_text"),
    *on("torch", "NEXTN of, glm4_moe_lite"),
    *on("torch", "NEXTN by depth, deepseek", "NEXTN by depth, mimo"),
    *on("torch", "NEXTN in GGUF, glm4_moe", "NEXTN in GGUF, deepseek_v3"),
    *on("torch", *(f"DFLASH, {variant}" for variant in VARIANTS | PAIRED)),
    *on("torch", "ASSISTANT, shared", "ASSISTANT, values of keys", "ASSISTANT, ordered"),
    *on("cpu", "ASSISTANT, shared", "ASSISTANT, values of keys", "ASSISTANT, GGUF"),
    *on("cpu", "EAGLE", "STANDALONE, first layers", "NEXTN, deepseek", "NEXTN, mimo"),
    *on("cpu", "NEXTN, qwen3-next", "NEXTN of, glm4_moe", "NEXTN of, deepseek_v3"),
    *on("cpu", "NEXTN by depth, deepseek", "NEXTN by depth, qwen3-next"),
    *on("cpu", "NEXTN in GGUF, glm4_moe", "NEXTN in GGUF, deepseek_v3"),
    *on("cpu", "NEXTN of, qwen3_5_text", "NEXTN in GGUF, qwen3_5_moe_text"),
    *on("cpu", *(f"DFLASH, {name}" for name in VARIANTS | PAIRED if name not in SELECTING)),
    *JAX_BLOCKS,
]
SELDOM = [
    *JAX_BLOCKS,
    *on("torch", "NEXTN of, deepseek_v3", "NEXTN in GGUF, glm4_moe", "NEXTN of, glm4_moe"),
    *on("torch", "NEXTN of, glm4_moe_lite", "NEXTN of, qwen3_next", "NEXTN in GGUF, deepseek_v3"),
    *on("torch", "NEXTN in GGUF, qwen3_5_text", "NEXTN by depth, mimo"),
    *on("torch", "NEXTN of, qwen3_5_moe_text", "NEXTN by depth, deepseek"),
    *on("torch", "ASSISTANT, shared", "ASSISTANT, values of keys"),
    *on("torch", "DFLASH, own mask", "DFLASH, from the root", "DFLASH, own head and map"),
    *on("torch", "STANDALONE, first layers", "DFLASH, a map, the target's rows"),
    *on("cpu", "NEXTN in GGUF, deepseek_v3", "NEXTN in GGUF, glm4_moe"),
    *on("torch", *(f"DFLASH, {variant}" for variant in PAIRED)),
    *on("cpu", *(f"DFLASH, {variant}" for variant in PAIRED)),
]
"""Block drafters say what passes without a cache say in tests/parity/test_blocks.py."""
FLOAT = 1e-3, 1e-3, 1 - 1e-6
BYTES = 0.3, 0.1, 0.95
EXPERTS_IN_BYTES = 1.0, 0.2, 0.9
"""Of the likeliest tokens' log-probabilities the greatest error, in nats, and its mean over steps;
the least correlation of all log-probabilities. In 8 bits the error is that of a level: every level
of a tree reads what the one above it wrote in 8 bits, so errors add up. What reads or sees
something else is wrong by several nats and correlates by less than 0.5; of experts a choice may
tip.
"""


@pytest.mark.parametrize(
    ("executor", "name"), thinned(SPOKEN, slow=SELDOM) + params(on("cpu", "ASSISTANT, ordered"))
)
def test_what_is_proposed_is_what_passes_without_a_cache_say(cells, executor, name):
    """In trees, after prompts in chunks, in a batch, and behind pages that another text has filled;
    after none, some and all of a block were accepted.
    """
    cell, noted = cells(executor, name), []

    def listen(model):
        noted.append(Recorded(model))
        partly = model.traits.block_size and model.traits.vocab == tiny.VOCAB
        return PartialOracle(noted[0], cell.texts()) if partly else noted[0]

    block = cell.model().traits.block_size
    shape = heard_of(executor, cell) if block else (2 * cell.depth, cell.depth, 2)
    run = cell.served(around=listen, shape=shape)
    if block and noted[0].traits.vocab == tiny.VOCAB:
        assert max(len(item.stats.histogram) for item in run.done) == block + 1
    in_bytes = executor == "cpu"
    worst, alike = np.transpose(errors(cell, noted[0].proposals, cell.kind.reference, in_bytes))
    experts = name.startswith(("NEXTN of", "NEXTN in GGUF"))
    most, usual, least = FLOAT if not in_bytes else EXPERTS_IN_BYTES if experts else BYTES
    assert len(worst) >= 2 * len(cell.prompts)
    assert worst.max() < most and worst.mean() < usual, worst
    assert alike.min() > least and alike.mean() > 0.99, alike
    for other in cell.kind.others:
        wrong, _ = np.transpose(errors(cell, noted[0].proposals, other, in_bytes, 7))
        assert wrong.max() > (0.2 if in_bytes else 1e-2)
        assert wrong.mean() > 2.5 * worst.mean()


CUT = on("cpu", "NEXTN by depth, qwen3-next", "EAGLE")


@pytest.mark.parametrize(("executor", "name"), params(CUT))
def test_what_is_proposed_does_not_depend_on_how_prompts_are_cut(cells, executor, name):
    """Other positions are drafted from, but wherever both draft, they say the same bits."""
    proposals = []
    for size in (40, 23):
        cell, noted = cells(executor, name, chunked_prefill_size=size), []
        shape = (2 * cell.depth, cell.depth, 2)
        cell.served(around=lambda model, to=noted: to.append(Recorded(model)) or to[0], shape=shape)
        every = noted[0].proposals
        proposals.append({(text, path): scores for text, path, scores in every if -1 not in text})
    both = proposals[0].keys() & proposals[1].keys()
    assert len(both) > 100
    assert all(proposals[0][key].tobytes() == proposals[1][key].tobytes() for key in both)


def errors(cell, proposals, reference, by_level=False, most=14):
    """Of `most` steps, evenly spread, over what was drafted in each: the greatest error (by_level:
    divided by the levels that it adds up over), and the least correlation. What another text has
    left in a row's pages is not known: any that goes on as the row does will do.
    """
    steps, ids = {}, cell.model().traits.target_ids
    for text, path, log_probs in proposals:
        steps.setdefault(text, {})[path] = log_probs
    return [
        min(_error(whole, paths, reference, ids, by_level) for whole in _whole(cell, text))
        for text, paths in evenly(list(steps.items()), most)
    ]


def evenly(errors, most):
    """At most so many of a list, evenly spread."""
    most = min(most, len(errors))
    return [errors[place * len(errors) // most] for place in range(most)]


def _whole(cell, text):
    texts = cell.texts()
    return {tuple(texts[which][: len(text)]) for which in beginning_with(texts, text)}


def _error(text, paths, reference, ids, by_level):
    worst, alike = 0.0, 1.0
    for end in paths:
        if any(path[:-1] == end for path in paths if path):
            continue  # Another goes on from it.
        wanted = reference(text, end)
        wanted = wanted if wanted.shape[1] == len(ids) else wanted[:, ids]
        for depth in range(len(end) + 1):
            log_probs, there = paths[end[:depth]], wanted[depth]
            named = np.isfinite(log_probs) & np.isfinite(there)  # A selector names few,
            if np.isneginf(there).any() and (np.isfinite(log_probs) != np.isfinite(there)).any():
                worst = np.inf  # an ordered head exactly those of the clusters that it scores.
            log_probs, there = log_probs[named], there[named]
            error = float(np.abs(log_probs - there)[log_probs.argmax()])
            worst = max(worst, error / (depth + 1) if by_level else error)
            alike = min(alike, float(np.corrcoef(log_probs, there)[0, 1]))
    return worst, alike


# --- what is accepted --------------------------------------------------------------------------

RIGHT = [
    *on("toy", "itself"),
    *on("torch", "STANDALONE, itself", "STANDALONE, renumbered"),
    *on("cpu", "STANDALONE, itself", "STANDALONE, GGUF", "STANDALONE, renumbered"),
    *on("torch", "right, EAGLE", "right, NEXTN"),
    *on("cpu", "right, NEXTN"),
    *on("torch", "qwen, 1", "qwen, 3"),
    *on("cpu", "qwen, 1", "qwen, 3"),
    *on("jax", "right, EAGLE", "right, NEXTN", "STANDALONE, itself", "ASSISTANT, right"),
    *on("torch", "counting, right"),
    *on("cpu", "counting, right"),
    *on("torch", "ASSISTANT, right"),
    *on("cpu", "ASSISTANT, right"),
]


WHOLE = "right, NEXTN", "right, EAGLE", "STANDALONE, itself", "ASSISTANT, right"
"""On JAX with the slow tests; a head that rested, and trees, are in test_overlap.py always."""
SELDOM_RIGHT = [
    *(cell for cell in RIGHT if cell[0] == "torch" and not cell[1].startswith("right")),
    *on("jax", *WHOLE),
]
GREEDY = on("torch", "right, EAGLE") + [cell for cell in RIGHT if cell[0] == "jax"]
"""An EAGLE-1 head has no norm: a scale moves no argmax. What rounds look at of noise is held to
torch's in test_jax_drafts.py. In 8 bits a head is right but for a few (token maps, below).
"""


@pytest.mark.parametrize(
    ("executor", "name", "temperature", "at_once"),
    thinned(RIGHT, [(0.0, 1), (0.8, None)], SELDOM_RIGHT),
)
def test_a_draft_that_is_right_is_accepted_whole(cells, executor, name, temperature, at_once):
    """Alone behind pages that another text has filled, and in a batch; when sampling as far as
    noise is looked at: here, at all tokens of flat distributions.
    """
    temperature *= (executor, name) not in GREEDY
    cell = cells(executor, name)
    run = cell.served(temperature, at_once, around=Recorded)
    assert run.accepted == run.drafted == sum(cell.tokens - steps for steps in run.steps)
    assert run.steps == [cell.steps(cell.depth)] * len(cell.prompts)
    assert run.stats.cached_tokens > 0 or at_once is None


def test_a_greedy_block_is_accepted_whole_at_temperature_zero(cells):
    cell = cells("toy", "block")
    run = cell.served()
    assert run.accepted == run.drafted and run.steps == [cell.steps(3)] * len(cell.prompts)


ORACLES = [
    *on("toy", "itself", "block"),
    *on("torch", "right, EAGLE", "STANDALONE, first layers", "NEXTN, mimo", "counting, right"),
    *on("torch", "DFLASH, both ways"),
    *on("cpu", "right, EAGLE", "STANDALONE, itself", "NEXTN, mimo", "counting, right"),
    *on("cpu", "DFLASH, both ways"),
    *on("cpu", "ASSISTANT, shared"),
    *on("jax", "DFLASH, both ways"),
]


SELDOM_ORACLES = [
    *on("torch", "STANDALONE, first layers", "NEXTN, mimo", "counting, right"),
    *on("jax", "DFLASH, both ways"),
]


@pytest.mark.parametrize(
    ("executor", "name", "temperature"),
    thinned(ORACLES, [(0.0,), (0.8,)], SELDOM_ORACLES),
)
def test_known_tokens_are_accepted_and_wrong_ones_never(cells, executor, name, temperature):
    """The same passes and caches, but the outcome of each draft token is known beforehand."""
    cell = cells(executor, name)
    shape = heard_of(executor, cell)
    run = cell.served(temperature, None, lambda model: half(cell, model, temperature), shape)
    check_half(cell, run)


def half(cell, model, temperature):
    """The right tokens after prompts of an even length, wrong ones after the others."""
    return Oracle(model, cell.texts(temperature), [len(prompt) % 2 for prompt in cell.prompts])


def check_half(cell, run, depth=None):
    """A whole draft and one token more in each step, or one token, while the last steps have less
    than the depth to propose and the prompt's nothing.
    """
    depth, tokens = depth or cell.depth, cell.tokens
    for prompt, item in zip(cell.prompts, run.done, strict=True):
        stats, wrong = item.stats, len(prompt) % 2
        assert stats.steps == (tokens if wrong else cell.steps(depth))
        assert stats.accepted == (0 if wrong else stats.draft_tokens)
        drafted = sum(min(depth, tokens - 1 - step) for step in range(1, tokens))
        assert stats.draft_tokens == (drafted if wrong else tokens - stats.steps)


COUNTED = [(e, f"counting, {which}") for e in ("cpu", "torch") for which in ("swapped", "one")]


@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.slow)])
def test_naive_drafts_one_token_a_step(cells, temperature):
    """Two tokens of every step with the target's own choices, one with wrong ones."""
    cell = cells("torch", "STANDALONE, first layers")
    how = {"shape": (1, 1, 1), "speculative_algorithm": "NAIVE"}
    run = cell.served(temperature, around=lambda model: half(cell, model, temperature), **how)
    check_half(cell, run, 1)


@pytest.mark.parametrize(
    ("executor", "name"),
    params(COUNTED, on("torch", "counting, swapped", "counting, one")),
)
def test_layers_that_are_right_for_their_depth_alone(cells, executor, name):
    """Exactly one token is accepted where the second layer is another's, or the first is all there
    is; in order, all of a chain, beyond the last layer's depth too (above).
    """
    cell = cells(executor, name)
    for prompt, tokens in zip(cell.prompts, cell.plain(), strict=True):
        assert tokens == ((prompt[-1] + 1 + np.arange(cell.tokens)) % tiny.VOCAB).tolist()
    assert cell.served(at_once=1).steps == [cell.steps(1)] * len(cell.prompts)


TEXTS = [
    *on("toy", "itself", "block"),
    *on("torch", "STANDALONE, first layers", "STANDALONE, poorer", "counting, swapped"),
    *on("torch", "DFLASH, both ways", "DFLASH, a map, the target's rows", "DFLASH, DSpark"),
    *on("torch", "DFLASH, DFlash2"),
    *on("rounds", "DFLASH, DSpark"),
    *on("cpu", "STANDALONE, first layers", "STANDALONE, poorer", "NEXTN, mimo"),
    *on("cpu", "counting, swapped", "DFLASH, both ways", "DFLASH, a map, the target's rows"),
    *on("torch", "ASSISTANT, half"),
    *on("cpu", "ASSISTANT, half"),
    *on("cpu", "DFLASH, DSpark, rnn", "DFLASH, DFlash2"),
    *on("jax", "DFLASH, DSpark", "DFLASH, DFlash2"),
]
SELDOM_TEXTS = [
    *on("jax", "DFLASH, DSpark", "DFLASH, DFlash2"),
    *on("torch", "DFLASH, DSpark", "DFLASH, DFlash2", "DFLASH, a map, the target's rows"),
    *on("torch", "DFLASH, both ways", "counting, swapped", "ASSISTANT, half", "STANDALONE, poorer"),
    *on("rounds", "DFLASH, DSpark"),
]
OFTEN = "STANDALONE, first layers", "STANDALONE, poorer"
"""Whose chains accept something, but not all, and whose trees accept more."""
PAGES = {("cpu", "STANDALONE, first layers"): 1, ("cpu", "NEXTN, mimo"): 16}
PAGES |= {("cpu", "DFLASH, both ways"): 1, ("cpu", "DFLASH, a map, the target's rows"): 16}


@pytest.mark.parametrize(
    ("executor", "name", "temperature"),
    thinned(TEXTS, [(0.0,), (0.8,)], SELDOM_TEXTS),
)
def test_a_tree_accepts_more_than_a_chain_and_both_change_nothing(
    cells, executor, name, temperature
):
    pages = PAGES.get((executor, name))
    cell = cells(executor, name, **({"page_size": pages} if pages else {}))
    at_once = None if temperature else 1  # All of them do not always fit into a step.
    tree = cell.served(temperature, at_once, shape=TREE)
    assert 0 < tree.accepted < tree.drafted or cell.model().traits.block_size
    if name in OFTEN:
        chain = cell.served(temperature, at_once, shape=CHAIN)
        assert 0 < chain.accepted < tree.accepted and chain.accepted < chain.drafted < tree.drafted


@pytest.mark.parametrize(("executor", "name"), params(on("cpu", "STANDALONE, first layers")))
def test_sixty_four_tokens(cells, executor, name):
    shape = {"speculative_eagle_topk": 10, "speculative_num_draft_tokens": 64}
    big = {"chunked_prefill_size": 256, "speculative_num_steps": 6}
    cell = cells(executor, name, **shape, **big)
    run = cell.served(shape=(63, 6, 10))
    assert run.accepted > 0 and run.drafted > 32 * len(cell.prompts)


# --- steps without draft tokens ----------------------------------------------------------------

RESTED = {"max_sequences": 2, "context": 160, "kv_tokens": 512, "chunked_prefill_size": 64}


class Resting(FixedPolicy):
    """No draft tokens in spans of a text: so that steps that begin early decide alike."""

    def __init__(self):
        super().__init__(3, 3)

    def decide(self, slots, kv_len, constrained=False):
        if rests(kv_len.min()):
            return Decision("not now", (Budget(0, 0, "not now"),) * len(slots))
        return super().decide(slots, kv_len)


def rests(cached):
    return 12 <= cached < 20 or 30 <= cached < 70


@pytest.fixture
def resting(kinds, compiled, quickly, monkeypatch):
    """(executor, name) -> a cell whose rings hold twenty tokens, and go round in a rest."""
    monkeypatch.setattr(feature_ring, "RING_TOKENS", 20)
    monkeypatch.setattr(deferred_extend, "MAX_LAG", 16)
    monkeypatch.setattr(drafting, "FixedPolicy", lambda *_: Resting())
    opened = Cells(kinds, compiled, ("rows", "chunks"))

    def of(executor, name):
        if executor == "toy":
            monkeypatch.setattr(toys, "FixedPolicy", lambda *_: Resting())
            cell = ToyCell(name)
        else:
            overlap = {"overlap": True} if executor in ("jax", "rounds") else {}
            cell = opened(executor, name, **RESTED | overlap)
        cell.prompts, cell.tokens = PROMPTS[:2], 80
        return cell

    yield of
    opened.close()


LATE = [
    *on("torch", "EAGLE", "NEXTN, mimo", "STANDALONE, first layers", "DFLASH, both ways"),
    *on("cpu", "EAGLE", "NEXTN, mimo", "STANDALONE, first layers", "DFLASH, both ways"),
    *on("cpu", "ASSISTANT, shared"),
    *on("torch", "ASSISTANT, shared"),
    *on("rounds", "EAGLE", "NEXTN, mimo", "STANDALONE, first layers"),
    *on("jax", "NEXTN of, glm4_moe", "NEXTN of, deepseek_v3"),
    *on("jax", "EAGLE", "NEXTN, mimo", "STANDALONE, first layers", "DFLASH, both ways"),
]


SELDOM_LATE = [
    *on("torch", "EAGLE", "NEXTN, mimo", "STANDALONE, first layers", "DFLASH, both ways"),
    *on("torch", "ASSISTANT, shared"),
    *on("rounds", "NEXTN, mimo", "STANDALONE, first layers"),
    *on("jax", *(name for _, name in LATE[-6:])),
]


@pytest.mark.parametrize(("executor", "name"), thinned(LATE, slow=SELDOM_LATE))
def test_after_a_rest_is_proposed_what_passes_without_a_cache_say(resting, executor, name):
    """Of features that were kept meanwhile, more than there are places for at once."""
    cell, noted = resting(executor, name), []

    def listen(model):
        noted.append(Recorded(model))
        return noted[0]

    run = cell.served(around=listen)
    late = [each for each in noted[0].proposals if len(each[0]) > 70]
    worst, alike = np.transpose(errors(cell, late, cell.kind.reference, executor == "cpu"))
    most, usual, least = BYTES if executor == "cpu" else FLOAT
    assert len(worst) >= 2 and worst.max() < most and worst.mean() < usual, worst
    assert alike.min() > least, alike
    assert run.drafted > 0


RESTED_RIGHT = [*RIGHT, *on("rounds", "right, EAGLE", "right, NEXTN")]


@pytest.mark.parametrize(("executor", "name"), thinned(RESTED_RIGHT, slow=SELDOM_RIGHT))
def test_after_a_rest_a_draft_that_is_right_is_accepted_whole(resting, executor, name):
    cell = resting(executor, name)
    run = cell.served(at_once=1)
    assert run.accepted == run.drafted
    assert run.steps == [plain_and_whole(len(prompt), cell.tokens) for prompt in cell.prompts]


def plain_and_whole(prompt, tokens):
    """Steps of a text that rests, and of which every draft is right otherwise."""
    steps = emitted = 1
    while emitted < tokens:
        emitted += 1 if rests(prompt + emitted - 1) else 4
        steps += 1
    return steps


# --- token maps --------------------------------------------------------------------------------

METHODS = "EAGLE", "NEXTN", "STANDALONE"
MAPPED = [(e, f"right, {method}") for e in ("cpu", "torch") for method in METHODS]


@pytest.mark.parametrize(
    ("executor", "name"), params(MAPPED, [cell for cell in MAPPED if cell[0] == "torch"])
)
def test_a_map_bounds_what_is_drafted_and_nothing_else(cells, tmp_path, executor, name):
    """FR-Spec: what is inside is accepted as without it, and nothing outside is ever drafted."""
    emitted = sorted({token for tokens in cells(executor, name).plain() for token in tokens})
    share = {}
    for part, kept in (("all", emitted), ("half", emitted[::2])):
        path = tmp_path / f"{part}.json"
        path.write_text(json.dumps(kept))
        cell, listeners = cells(executor, name, speculative_token_map=str(path)), []

        def listen(model, listeners=listeners):
            listeners.append(Recorded(model))
            return listeners[-1]

        assert cell.model().traits.target_ids.tolist() == kept
        run = cell.served(around=listen)
        share[part] = run.accepted / run.drafted
        assert cell.served(0.8, around=listen).accepted > 0
        paths = [path for each in listeners for _, path, _ in each.proposals]
        drafted = {kept.index(token) for path in paths for token in path}
        assert len(drafted) > 1
    assert share["all"] > 0.95
    assert 0 < share["half"] < share["all"] - 0.1


@pytest.mark.parametrize("method", METHODS)
def test_a_map_of_another_vocabulary_is_refused(kinds, tmp_path, method):
    (tmp_path / "far.json").write_text(json.dumps([5, tiny.VOCAB]))
    config = settings(
        kinds[f"right, {method}"], "torch", speculative_token_map=str(tmp_path / "far.json")
    )
    with pytest.raises(ModelError, match=f"names id {tiny.VOCAB}, outside"):
        open_target(config)


@pytest.mark.parametrize(("executor", "name"), params(on("cpu", "STANDALONE, poorer")))
def test_a_map_limits_what_another_vocabulary_leaves(cells, tmp_path, executor, name):
    path = tmp_path / "map.json"
    path.write_text(json.dumps([id for id in range(tiny.VOCAB) if id % 3]))
    cell = cells(executor, name, speculative_token_map=str(path))
    ids = cell.model().traits.target_ids
    assert ids.tolist() == [id for id in range(290) if id % 3]
    assert 0 < cell.served().accepted < cell.served().drafted


# --- what it is planned for --------------------------------------------------------------------


def test_layers_of_any_number_and_shape_are_counted():
    """In the memory plan and in the cache, page by page; and features that wait for the draft."""
    layers = (CacheLayer(2, 16), CacheLayer(1, 8), CacheLayer(2, 16))
    config = EngineConfig(model="toy", page_size=8, max_sequences=2, chunked_prefill_size=16)
    needs = Needs(context=256, vocab=100, weights=1000, per_token=64, per_node=10)
    draft = SimpleNamespace(
        parameters=500, cache=layers, vocab=40, node_numbers=0, feature_numbers=48
    )
    with_model = with_draft(needs, draft, 4, 2)
    assert with_model.weights == 1000 + 4 * 500
    assert with_model.fixed == TorchFeatureRing.bytes(2, 48, torch.float32) == 4 * 3 * 256 * 48
    assert with_model.per_token == 64 + 4 * 2 * (2 * 16 + 8 + 2 * 16)
    plan = plan_memory(config, with_model, 10**8)
    assert plan.cache == plan.limits.pages * 8 * with_model.per_token
    cache = DraftCache(KvShape(layers), plan.limits, torch.device("cpu"), torch.float32)
    shapes = [cache.layers[layer][0].shape for layer in range(3)]
    assert [(shape[0], shape[2]) for shape in shapes] == [(2, 16), (1, 8), (2, 16)]
    places = {cache.layers[layer][0].data_ptr() for layer in range(3)}
    assert len(places) == 3
    held = sum(2 * 4 * shape.numel() for shape in shapes)
    assert DraftCache.bytes(KvShape(layers), plan.limits, torch.float32) == held
    assert KvShape((CacheLayer(2, 16),)).bytes(plan.limits, torch.float32) < held


def test_every_layer_of_the_draft_is_planned_for(kinds):
    """Weights, keys and values under the target's page ids."""
    kind = kinds["STANDALONE, first layers"]
    for executor, item in (("torch", 4), ("cpu", 2)):
        loaded = load(settings(kind, executor))
        bare = settings(replace(kind, method="OFF", draft=None), executor)
        alone = load(replace(bare, dtype=loaded.config.dtype))
        try:
            added = loaded.info["memory"]["cache"] - alone.info["memory"]["cache"]
            assert added == 1024 * item * 3 * 2 * 2 * 16
            assert loaded.info["memory"]["weights"] > alone.info["memory"]["weights"]
            about = loaded.engine.describe()["drafter"]
            assert about["model"] == kind.draft.name and about["layers"] == 3
            assert about["shared_tokens"] == tiny.VOCAB
        finally:
            loaded.close()
            alone.close()


@pytest.mark.parametrize("name", ["right, EAGLE", "right, NEXTN", "EAGLE", "DFLASH, both ways"])
def test_features_that_wait_for_the_draft_are_planned_for(kinds, name):
    """As many bytes as the executor's ring takes, beside the draft's logits and nodes."""
    with (
        closing(load(settings(kinds[name], "torch"))) as loaded,
        closing(load(settings(replace(kinds[name], method="OFF", draft=None), "torch"))) as alone,
    ):
        target = loaded.target
        draft, nodes = target.draft, target.memory.limits
        rest = nodes.max_nodes * draft.node_numbers + nodes.scored_nodes * (draft.vocab // 4)
        added = target.memory.scratch - alone.target.memory.scratch
        ring = target.executor.describe()["features_bytes"]
        assert added == 4 * rest + ring and ring > 0


def test_only_shared_tokens_are_proposed_and_the_others_are_read(kinds):
    kind = kinds["STANDALONE, poorer"]
    config = settings(kind, "torch")
    model = open_model(config.model)
    vocabulary = open_drafts(config, model).model.vocabulary
    theirs, own = model.tokenizer, open_model(str(kind.draft)).tokenizer
    assert vocabulary.shared == 290 == len(vocabulary.target_ids)
    for mine, id in zip(vocabulary.own_ids, vocabulary.target_ids, strict=True):
        assert own.token_bytes(int(mine)) == theirs.token_bytes(int(id))
    for id in range(290, tiny.VOCAB):
        read = own.token_bytes(int(vocabulary.inputs[id]))
        assert theirs.token_bytes(id).endswith(read) and read


def test_a_draft_must_be_named_and_be_a_model(kinds, tmp_path):
    kind = kinds["STANDALONE, first layers"]
    with pytest.raises(ConfigError, match="STANDALONE, but no draft is named"):
        open_target(settings(replace(kind, draft=None), "torch"))
    nothing = replace(kind, draft=tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_target(settings(nothing, "torch"))
    with pytest.warns(UserWarning, match="speculation is off"):
        target = open_target(settings(nothing, "torch", draft_on_error="disable"))
    assert target.config.speculative_algorithm == "OFF" and "config.json" in target.fault
    target.close()


# --- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["torch", pytest.param("cpu", marks=NO_CORE), "jax"])
def test_bad_blocks_are_refused(cells, executor):
    model = cells(executor, "DFLASH, both ways").model()
    one, pages = np.ones(1, np.int32), np.zeros((1, 4), np.int32)
    with pytest.raises(EngineError, match="not level by level"):
        model.expand(None)
    if executor == "jax":  # It puts blocks of the host's into pages of its own making.
        return
    good = DraftBlock(one, one, one, pages, depth=2, candidates=1)
    assert model.block(good).ids.shape == (1, 2, 1)
    for name, value in {"roots": one * tiny.VOCAB, "kv_len": one * 99, "slots": one * 4,
                        "depth": 5}.items():  # fmt: skip
        with pytest.raises(EngineError, match=f"refused: {name}"):
            model.block(replace(good, **{name: value}))
    no_rows = np.zeros(0, np.int32)
    extension = DraftExtension(one, one, np.array([0, 1], np.int32), one, one, pages, no_rows, 1)
    with pytest.raises(EngineError, match=r"without.* features"):
        model.extend(extension, None)


@pytest.mark.parametrize("executor", ["torch", pytest.param("cpu", marks=NO_CORE), "jax"])
@pytest.mark.parametrize("name", ["EAGLE", "DFLASH, both ways"])
def test_facts_have_the_same_names_on_every_executor(cells, executor, name):
    facts = cells(executor, name).model().describe()
    assert {"algorithm", "vocab", "features"} <= facts.keys()
    assert sum(size for what, size in facts.items() if what.endswith("_bytes")) > 0


@pytest.mark.parametrize(("executor", "name"), params(on("cpu", "STANDALONE, first layers")))
def test_auto_has_n_grams_beside_a_whole_model_on_a_cpu(kinds, executor, name):
    """A folder, not a file: what it holds says what it is. Tokens of both sources are accepted."""
    kind = replace(kinds[name], method="AUTO")
    with closing(load(settings(kind, executor))) as loaded:
        assert loaded.config.speculative_algorithm == "STANDALONE+NGRAM"
        assert f"{kind.draft} is a whole model)" in loaded.info["drafting"]
        complete(loaded.engine, requests_for(PROMPTS[1:3], 100))
        accepted = dict.fromkeys(("ngram", "draft_model"), 0)
        for count in loaded.engine.stats().by_source:
            accepted[count.source] += count.accepted
        assert min(accepted.values()) > 0 and sum(accepted.values()) > 50, accepted
        assert "ngram+standalone" in loaded.engine.describe()["drafter"]["sources"]
        assert set(loaded.engine.describe()["drafter"]["sources"]) == {
            "ngram", "standalone", "ngram+standalone",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "executor"),
    [
        ("DFLASH", "torch"),
        *(pytest.param(name, "cpu", marks=NO_CORE) for name in ("DFLASH", "AUTO")),
    ],
)
def test_a_block_drafter_is_served(kinds, tmp_path, algorithm, executor):
    """By its name, and by AUTO, which has n-grams beside it on a CPU, from a GGUF file; the start
    says what drafts.
    """
    kind = replace(kinds["DFLASH, both ways"], method=algorithm)
    if algorithm == "AUTO":
        draft = open_block(kind.draft, FolderCheckpoint(kind.model).architecture)
        kind = replace(kind, draft=in_gguf(draft, tmp_path / "x.gguf"))
    meant = "DFLASH+NGRAM" if algorithm == "AUTO" else "DFLASH"
    with closing(load(settings(kind, executor, speculative_num_steps=None))) as loaded:
        config = loaded.config
        assert (config.speculative_algorithm, config.speculative_num_steps) == (meant, 4)
        about = loaded.engine.describe()["drafter"]
        assert about.get("dflash", about)["block_size"] == 5
        (item,) = complete(loaded.engine, requests_for(PROMPTS[1:2], 8))[0]
        assert item.stats.draft_tokens > 0 and loaded.engine.fault is None
        assert loaded.info["drafting"].startswith(f"drafting: {meant}, ")
        alone = load(settings(replace(kind, method="OFF", draft=None), executor))
        assert loaded.target.memory.weights > alone.target.memory.weights
        alone.close()


@pytest.mark.parametrize(
    ("name", "width", "message"),
    [
        ("DFLASH, DSpark", 2, "dspark drafts outside of captured rounds.* 5 draft tokens are more"),
        ("DFLASH, DSpark", 1, None),
        ("DFLASH, DFlash2", 1, None),
    ],
)
def test_what_drafts_outside_of_captured_rounds_says_so(cells, caplog, name, width, message):
    cell = cells("torch", name)
    shape = {"speculative_num_draft_tokens": 4 + width, "speculative_eagle_topk": width}
    config = replace(cell.target.config, device="cuda", policy="fixed", **shape)
    lookup = NgramDrafter(1)
    drafting.model_drafter(config, cell.target.memory.limits, cell.model(), lookup, lambda _: None)
    assert re.search(message, caplog.text) if message else not caplog.text


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "EAGLE+NGRAM"])
def test_another_method_for_a_block_drafter_says_which(kinds, algorithm):
    kind = kinds["DFLASH, both ways"]
    with pytest.raises(ConfigError, match="holds a block drafter; use DFLASH"):
        open_target(settings(replace(kind, method=algorithm), "torch"))


def test_a_block_that_does_not_fit_into_a_step_is_refused(cells, tmp_path):
    target = cells("jax", "DFLASH, both ways").target
    draft = random_block(target.executor.decoder.arch, tmp_path, places=41)
    with pytest.raises(ModelError, match=r"does not fit into a step of 40 nodes"):
        JaxBlockModel(target.executor, FolderCheckpoint(Path(target.config.model)), draft)
