"""Draft models other than EAGLE heads at the end of captured rounds, against the same models asked
pass by pass: every method x shape x page size x temperature, the texts those of plain decoding.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.client.completion import make_request
from forerun.drafters.model_drafter import ModelDrafter
from forerun.engine.prompt_pace import PromptPace
from forerun.executors.torch import TorchBlockModel
from forerun.executors.torch.captured.round import CapturedRound
from forerun.executors.torch.drafts.level_model import LevelModel
from forerun.options.config import EngineConfig
from forerun.text.rendering import BYTE_LEVEL_TEMPLATE
from tests.covering import every, rarely, values
from tests.drafters.kinds import other_vocabulary
from tests.drafters.prediction import with_layers
from tests.models import tiny
from tests.parity.blocks import random_block
from tests.parity.tape import Tape, on_tape

METHODS = {
    "NEXTN": {"speculative_algorithm": "NEXTN", "model": "one layer"},
    "NEXTN, by depth": {"speculative_algorithm": "NEXTN", "model": "three layers"},
    "STANDALONE": {"speculative_algorithm": "STANDALONE", "draft": "first layers"},
    "STANDALONE, other vocabulary": {"speculative_algorithm": "STANDALONE", "draft": "poorer"},
    "STANDALONE, windows": {"speculative_algorithm": "STANDALONE", "draft": "windows"},
    "DFLASH": {"speculative_algorithm": "DFLASH", "draft": "both ways"},
    "DFLASH, causal": {"speculative_algorithm": "DFLASH", "draft": "causal"},
}
"""Draft and model name a folder of `made`."""

BLIND = "DFLASH", "STANDALONE, windows"
"""Random drafters that know only what the position's noise decides, nothing without it."""

SHAPES = {
    "one": (1, 1, 1),
    "chain": (4, 4, 1),
    "tree": (12, 4, 4),
    "whole tree": (9, 3, 3),
}
"""Draft tokens, depth, width; deeper than there are prediction layers."""

CELLS = rarely(
    every(METHODS, SHAPES, (1, 16, 64), (0.0, 0.8, 1.0)),
    [("NEXTN, by depth", "tree", 16, 1.0)],
)
"""Method, shape, page size, temperature."""


def weak(layer):
    """What a layer adds becomes small: the last token decides mostly, so drafts are often right."""
    with torch.no_grad():
        layer.self_attn.o_proj.weight.mul_(0.05)
        layer.mlp.down_proj.weight.mul_(0.05)


def prediction_layer(hf, seed):
    torch.manual_seed(seed)
    made, width = LlamaDecoderLayer(hf.config, 0), hf.config.hidden_size
    with torch.no_grad():
        for weight in made.parameters():
            spread = 0.2 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, spread)
    weak(made)
    fuse = torch.cat([torch.eye(width), 0.1 * torch.randn(width, width) / width**0.5], 1)
    norms = torch.ones(width), torch.ones(width), hf.model.norm.weight.detach().clone()
    return made, *norms, fuse


def make(root):
    """Folders by name."""
    hf = tiny.model("llama")
    for layer in hf.model.layers:
        weak(layer)
    layers = [prediction_layer(hf, seed) for seed in (5, 6, 7)]
    with_layers(hf, layers[:1], root / "one layer", "deepseek")
    with_layers(hf, layers, root / "three layers", "deepseek")
    tiny.save_folder(hf, root / "target")
    first = tiny.model("llama", num_hidden_layers=1)
    first.load_state_dict(hf.state_dict(), strict=False)
    tiny.save_folder(first, root / "first layers")
    turned = np.roll(np.arange(tiny.VOCAB), 3)
    other_vocabulary(hf, root / "poorer", turned[turned < 290])
    windows = tiny.model("gemma3_text")
    for layer in windows.model.layers:
        weak(layer)
    tiny.save_folder(windows, root / "windows")
    arch = FolderCheckpoint(root / "target").architecture
    random_block(arch, root / "both ways", features=(1, 2))
    # From the root alone the first draft token is known as well as above.
    random_block(arch, root / "causal", features=(0, 1), causal=True, anchored=True)
    file = root / "causal" / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.05
    tensors["norm.weight"] = hf.model.norm.weight.detach().clone()
    save_file(tensors, file)
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def targets(made):
    """By method and page size: with captured rounds, without them, and the tape."""
    opened = {}

    def of(method, page=16):
        if (method, page) not in opened:
            tape = Tape()
            with pytest.MonkeyPatch.context() as patch:
                on_tape(patch, tape, warm=False)
                rounds = open_target(configured(made, method, page, overlap=True))
                rounds = replace(rounds, config=replace(rounds.config, overlap=False))
            opened[method, page] = rounds, open_target(configured(made, method, page)), tape
        return opened[method, page]

    yield of
    for rounds, eager, _ in opened.values():
        rounds.close()
        eager.close()


def configured(made, method, page, device="cpu", **changes):
    asked = METHODS[method] | changes
    draft = asked.pop("draft", None)
    return EngineConfig(
        model=str(made / asked.pop("model", "target")),
        speculative_draft_model_path=str(made / draft) if draft else None,
        executor="torch",
        device=device,
        dtype="float32",
        chat_template=BYTE_LEVEL_TEMPLATE,  # Rendered here: no process begins.
        policy="fixed",
        draft_on_error="stop",
        max_sequences=5,
        chunked_prefill_size=128,
        context=192,
        kv_tokens=1536,
        page_size=page,
        threads=1,
        **asked,
    )


BEGIN = np.random.default_rng(3).integers(3, 300, 70).astype(np.int32)
PROMPTS = [BEGIN[:9], BEGIN[:1], BEGIN[20:50], BEGIN, BEGIN, np.append(BEGIN[:64], np.int32(7))]
"""Some begin as others do, so that their pages are found again."""


def asked(temperature, length=12):
    return [
        make_request(
            prompt, max_tokens=length + n % 5, ignore_eos=True, temperature=temperature, seed=n
        )
        for n, prompt in enumerate(PROMPTS)
    ]


def answered(target, requests, shape, pause=3, **changes):
    """What is said to the requests, one more of which comes every `pause` steps; the statistics."""
    nodes, depth, width = SHAPES[shape]
    changes = {
        "speculative_num_draft_tokens": nodes + 1,
        "speculative_num_steps": depth,
        "speculative_eagle_topk": width,
    } | changes
    engine = make_engine(target, replace(target.config, **changes))
    heard, waiting, steps = [[] for _ in requests], list(requests), 0
    while engine.step_once() or waiting:
        if waiting and steps % pause == 0:
            engine.submit(waiting[0], heard[-len(waiting)].append)
            waiting = waiting[1:]
        steps += 1
    engine.check()
    engine.shutdown()
    return heard, engine.stats()


def plain(target, requests):
    return tokens(answered(target, requests, "one", speculative_algorithm="OFF")[0])


def tokens(heard):
    return [[token for news in mine for token in news.tokens] for mine in heard]


def counts(heard):
    """Draft tokens verified and accepted, by request."""
    return [(mine[-1].stats.draft_tokens, mine[-1].stats.accepted) for mine in heard]


@pytest.fixture
def seen(monkeypatch):
    """What is proposed, by slot and cached tokens, and how many passes are asked for."""
    found = {"drafts": {}, "passes": 0}
    propose = ModelDrafter.propose

    def proposed(self, plan):
        drafts = propose(self, plan)
        for slot, length, draft in zip(plan.slots, plan.kv_len, drafts, strict=True):
            found["drafts"].setdefault(int(slot), []).append((int(length), draft))
        return drafts

    monkeypatch.setattr(ModelDrafter, "propose", proposed)
    # How prompts are cut beside rows that decode depends on time.
    monkeypatch.setattr(PromptPace, "bound", lambda pace, room: room)
    for owner, names in (
        (LevelModel, ("extend", "expand")),
        (TorchBlockModel, ("extend", "block")),
    ):
        for name in names:
            call = getattr(owner, name)

            def counted(self, *work, call=call):
                found["passes"] += 1
                return call(self, *work)

            monkeypatch.setattr(owner, name, counted)
    return found


def noted(seen, run):
    seen["drafts"], seen["passes"] = {}, 0
    return run(), seen["drafts"], seen["passes"]


def same(one, other):
    """Drafts of the same steps, but for the last bits of their scores and the order of nodes."""
    assert one.keys() == other.keys()
    for slot, mine in one.items():
        assert len(mine) == len(other[slot])
        for (length, draft), (there, expected) in zip(mine, other[slot], strict=True):
            assert length == there
            found, wanted = paths(draft), paths(expected)
            assert found.keys() == wanted.keys()
            scores = [[each[path] for path in wanted] for each in (found, wanted)]
            np.testing.assert_allclose(*scores, rtol=2e-3, atol=1e-6)


def paths(draft):
    """Scores by the tokens from the root on."""
    above = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        above.append((*(above[parent] if parent >= 0 else ()), token))
    return dict(zip(above, draft.score.tolist(), strict=True))


@pytest.mark.parametrize(("method", "shape", "page", "temperature"), CELLS)
def test_drafts_and_texts_are_those_of_single_passes(
    targets, seen, method, shape, page, temperature
):
    rounds, eager, _ = targets(method, page)
    requests = asked(temperature)
    (found, _), drafts, few = noted(seen, lambda: answered(rounds, requests, shape))
    (expected, _), others, many = noted(seen, lambda: answered(eager, requests, shape))
    assert tokens(found) == tokens(expected) == plain(eager, requests)
    assert counts(found) == counts(expected)
    same(drafts, others)
    able = temperature or method not in BLIND
    assert sum(accepted for _, accepted in counts(found)) > (5 if able else -1)
    assert few < many / 2


@pytest.mark.parametrize(
    ("method", "shape"),
    rarely(
        every(METHODS, ["tree", "chain"]),
        [("DFLASH", "chain")],
        values,
    ),
)
def test_a_step_is_one_replay_and_one_wait(targets, seen, monkeypatch, method, shape):
    """Nothing else is launched, nothing else is read."""
    rounds, _, tape = targets(method)
    reads = dict.fromkeys(("cpu", "item", "tolist", "__bool__", "__int__", "__float__"), 0)
    for name in reads:
        call = getattr(torch.Tensor, name)

        def counting(*args, name=name, call=call):
            reads[name] += 1
            return call(*args)

        monkeypatch.setattr(torch.Tensor, name, counting)
    waits, read = [], CapturedRound.read

    def waited(self):
        waits.append(self)
        return read(self)

    monkeypatch.setattr(CapturedRound, "read", waited)
    requests = asked(0.8, 15)[:3]
    for _ in range(2):
        answered(rounds, requests, shape)  # Captures what will run.
    nodes, depth, width = SHAPES[shape]
    changes = {
        "speculative_num_draft_tokens": nodes + 1,
        "speculative_num_steps": depth,
        "speculative_eagle_topk": width,
    }
    engine = make_engine(rounds, replace(rounds.config, **changes))
    for request in requests[:1]:
        engine.submit(request, lambda news: None)
    engine.step_once()  # The prompt,
    engine.step_once()  # and the step whose draft tokens it has brought.
    captured = tape.captures
    for _ in range(3):
        before = dict(reads), len(waits), tape.launched, tape.replays, seen["passes"]
        assert engine.step_once()
        assert tape.captures == captured
        after = dict(reads), len(waits), tape.launched, tape.replays, seen["passes"]
        assert after == (before[0], before[1] + 1, before[2] + 1, before[3] + 1, before[4])
    assert engine.stats().accepted > 0
    engine.shutdown()


@pytest.mark.parametrize(
    ("method", "shape", "page", "temperature"),
    rarely(
        every(METHODS, ["chain", "tree"], [1, 16], [0.0, 0.8]),
        [("DFLASH", "tree", 16, 0.8)],
        values,
    ),
)
def test_with_overlap(targets, method, shape, page, temperature):
    """The next round begins before this one is read, on what it leaves on the device."""
    rounds, eager, tape = targets(method, page)
    requests = asked(temperature)
    expected, _ = answered(eager, requests, shape)
    found, stats = answered(rounds, requests, shape, overlap=True)
    assert tokens(found) == tokens(expected)
    assert stats.carried > 0.3 * stats.steps and tape.launched == tape.done
    assert [accepted for _, accepted in counts(found)] == [
        accepted for _, accepted in counts(expected)
    ]
