"""The engine with overlap over captured rounds, against the engine without it.

The tape does what is launched only when somebody waits for it: whatever the host reads too early,
or overwrites too early, shows in the text.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.api import make_engine
from forerun.completion import make_request
from forerun.drafters.heads import HeadDrafter
from forerun.executors.torch import executor, rounds
from forerun.models.folder import FolderCheckpoint
from tests.models import tiny
from tests.parity.tape import Tape
from tests.parity.test_torch_drafting import KERNELS, mixed
from tests.parity.test_torch_head import Target, learn, opened

OFF = {"speculation": "off"}
SHAPES = [OFF] + [
    {"speculation": "head", "draft_nodes": nodes, "draft_depth": depth, "draft_width": width}
    for nodes, depth, width in [(1, 1, 1), (5, 5, 1), (15, 5, 4), (9, 3, 3)]
]
"""No drafter; chains; trees of which all, or the best, are verified."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = tiny.model("llama", max_position_embeddings=512, num_hidden_layers=6)
    return tiny.save_folder(hf, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def learned(folder, tmp_path_factory):
    return learn(Target(FolderCheckpoint(folder)), tmp_path_factory.mktemp("draft"))


@pytest.fixture(autouse=True)
def few_captures(monkeypatch):
    monkeypatch.setattr(rounds, "COMMON", ())


@pytest.fixture(scope="module")
def slow(folder, learned):
    """The target and head on a device that is slow, and its tape."""
    tape = Tape()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "kernels_for", lambda device: KERNELS)
        patch.setattr(executor, "recorder", lambda device: tape)
        target = opened(folder, learned[0], max_step_nodes=128, context=128)
    yield target, tape
    target.close()


@pytest.fixture(scope="module")
def eager(folder, learned):
    target = opened(folder, learned[0], max_step_nodes=128, context=128)
    yield target
    target.close()


@pytest.fixture
def trees(monkeypatch):
    """What every slot ran, in order: (kv_len, tokens, parents), as drafters are told."""
    seen = {}
    observe = HeadDrafter.observe

    def observed(self, plan, trees, outcome):
        for row, slot in enumerate(plan.slots.tolist()):
            nodes = trees.nodes(row)
            mine = slice(nodes.start, nodes.stop)
            parents = np.where(trees.parents[mine] < 0, -1, trees.parents[mine] - nodes.start)
            ran = int(plan.kv_len[row]), trees.tokens[mine].tolist(), parents.tolist()
            seen.setdefault(slot, []).append(ran)
        observe(self, plan, trees, outcome)

    monkeypatch.setattr(HeadDrafter, "observe", observed)
    return seen


def answered(target, requests, overlap, pause=0, **changes):
    """What the requests are told, and the engine's statistics. One comes every `pause` steps."""
    engine = make_engine(target, replace(target.config, overlap=overlap, **changes))
    said, waiting, steps = [[] for _ in requests], list(requests), 0
    busy = True
    while busy or waiting:
        while waiting and steps % max(pause, 1) == 0:
            engine.submit(waiting.pop(0), said[-1 - len(waiting)].append)
            if pause:
                break
        busy = engine.step_once()
        steps += 1
    engine.check()
    engine.shutdown()
    return said, engine.stats()


def tokens(said):
    return [[token for news in heard for token in news.tokens] for heard in said]


def asked(texts, temperature, lengths=(30, 17, 24)):
    return [
        make_request(text[:12], max_tokens=length, ignore_eos=True, temperature=temperature, seed=n)
        for n, (text, length) in enumerate(zip(texts, lengths, strict=False))
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES)
def test_texts_and_trees_are_those_without_overlap(slow, eager, learned, trees, temperature, shape):
    requests = asked(learned[1], temperature)
    expected, _ = answered(eager, requests, False, **shape)
    before = {slot: list(ran) for slot, ran in trees.items()}
    trees.clear()
    found, stats = answered(slow[0], requests, True, **shape)
    assert tokens(found) == tokens(expected)
    # All but prompts, the steps after them and the last ones.
    assert stats.carried > 0.6 * stats.steps > 5
    assert trees.keys() == before.keys()
    for slot, ran in trees.items():
        # A row that has ended runs once more at most.
        assert ran[: len(before[slot])] == before[slot]
        assert len(ran) - len(before[slot]) in (0, 1)
    accepted = [heard[-1].stats.accepted for heard in found]
    assert accepted == [heard[-1].stats.accepted for heard in expected]
    assert (sum(accepted) > 0) == (shape is not OFF)


@pytest.mark.parametrize("shape", [OFF, SHAPES[2], SHAPES[4]])
def test_requests_that_come_and_go(slow, eager, learned, shape):
    """Also rows with penalties and reports, prompts between rounds, and waiting for a slot."""
    requests = mixed(np.concatenate([learned[1]] * 2)[:14])
    expected, _ = answered(eager, requests, False, pause=2, **shape)
    found, stats = answered(slow[0], requests, True, pause=2, **shape)
    assert tokens(found) == tokens(expected)
    assert stats.carried > 5
