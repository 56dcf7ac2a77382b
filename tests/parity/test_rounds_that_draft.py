"""Draft models other than EAGLE heads at the end of captured rounds, against the same models asked
pass by pass: every method x shape x page size x temperature, the texts those of plain decoding.
"""

from collections import Counter
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
from forerun.drafters.confidence import Confidence
from forerun.drafters.model_drafter import ModelDrafter
from forerun.engine.chunked_prefill import PromptPace
from forerun.executors.torch import TorchBlockModel
from forerun.executors.torch.captured.round import CapturedRound
from forerun.executors.torch.drafts.level_model import LevelModel
from forerun.options.config import EngineConfig
from forerun.text.rendering import BYTE_LEVEL_TEMPLATE
from tests.covering import every, rarely, values
from tests.drafters.kinds import other_vocabulary
from tests.drafters.prediction import with_layers
from tests.models import tiny
from tests.parity.blocks import SELECTING, random_block
from tests.parity.tape import Tape, on_tape

PAIRED = {
    "DSpark": {"anchored": True, "pair": "vanilla", "confidence": 128},
    "DSpark, gated": {"pair": "gated", "causal": True},
    "DSpark, rnn": {"anchored": True, "pair": "rnn", "confidence": 64, "interleaved": True},
    "DFlash2": SELECTING["DFlash2"] | {"top_k": 48, "own_embedding": True},
}
"""Block drafters whose tokens depend on those above. What a target says next depends mostly on the
last token: DSpark's tables know it all, of the tokens that are in its map.
"""

CONFIDENT = "DSpark", "DSpark, rnn"

METHODS = {
    "NEXTN": {"speculative_algorithm": "NEXTN", "model": "one layer"},
    "NEXTN, by depth": {"speculative_algorithm": "NEXTN", "model": "three layers"},
    "STANDALONE": {"speculative_algorithm": "STANDALONE", "draft": "first layers"},
    "STANDALONE, other vocabulary": {"speculative_algorithm": "STANDALONE", "draft": "poorer"},
    "STANDALONE, windows": {"speculative_algorithm": "STANDALONE", "draft": "windows"},
    "DFLASH": {"speculative_algorithm": "DFLASH", "draft": "both ways"},
    "DFLASH, causal": {"speculative_algorithm": "DFLASH", "draft": "causal"},
    **{name: {"speculative_algorithm": "DFLASH", "draft": name} for name in PAIRED},
    "NEXTN, states": {"speculative_algorithm": "NEXTN", "model": "nets"},
    "STANDALONE, states": {
        "speculative_algorithm": "STANDALONE", "model": "convolutions", "draft": "first layers"
    },
}  # fmt: skip
"""Draft and model name a folder of `made`."""

BLIND = "DFLASH", "STANDALONE, windows", "STANDALONE, states"
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
        for name, weight in layer.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight")):
                weight.mul_(0.05)


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
    nets = tiny.model("qwen3_5_text", num_hidden_layers=4)
    for layer in nets.model.layers:
        weak(layer)
    last = type(nets.model.layers[-1])(nets.config, 3)
    last.load_state_dict(nets.model.layers[-1].state_dict())
    width = nets.config.hidden_size
    fuse = torch.cat([torch.eye(width), 0.1 * torch.randn(width, width) / width**0.5], 1)
    norms = torch.zeros(width), torch.zeros(width), nets.model.norm.weight.detach().clone()
    with_layers(nets, [(last, *norms, fuse)], root / "nets", "qwen3-next")
    convolutions = tiny.model("lfm2")
    for layer in convolutions.model.layers:
        weak(layer)
    tiny.save_folder(convolutions, root / "convolutions")
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
    for name, changes in PAIRED.items():
        markov(hf, random_block(arch, root / name, **changes | {"vocab": 64, "rank": 64}))
    return root


@torch.no_grad()
def markov(hf, draft):
    """Make the tables the target without layers, and all else of the drafter small; its map has
    the tokens that the target says most.
    """
    file, head = draft.path / "model.safetensors", hf.lm_head.weight
    tensors, wide = load_file(file), head.shape[1]
    above, eye = hf.model.norm(hf.model.embed_tokens.weight), torch.eye(wide)
    likely = (above @ head.T).softmax(-1)
    ids = (likely.sum(0) @ likely).topk(64).indices.sort().values
    tensors["d2t"] = ids - torch.arange(64)
    tensors["norm.weight"] *= 0.01
    after, where = head[ids], "markov_head."
    match draft.head.pair:
        case "gated":
            tensors["markov_head.gate_proj.bias"] = torch.full((wide,), 9.0)
        case "rnn":
            joint = torch.zeros_like(tensors["markov_head.joint_proj.weight"])
            joint[2 * wide :, wide : 2 * wide] = 0.01 * eye  # Where tanh(x) is x.
            tensors["markov_head.joint_proj.weight"], after = joint, 100.0 * after
            tensors["markov_head.joint_proj.bias"] = torch.zeros(3 * wide)
        case "selector":
            # What is read at a place is one number, everywhere the same.
            tensors["embed_tokens.weight"][:, 0] = 1000.0
            tensors["norm.weight"][1:] = 0.0
            first = wide**0.5 * tensors["norm.weight"][0]
            joint = torch.zeros(wide, wide)
            joint[:, 0] = 1.0 / first
            tensors["candidate_selector.hidden_projection.weight"] = joint
            tensors["candidate_selector.predecessor_codebook"] = above
            tensors["candidate_selector.successor_codebook"] = after
    if where + "markov_w1.weight" in tensors:
        tensors |= {f"{where}markov_w1.weight": above, f"{where}markov_w2.weight": after}
    save_file({name: each.contiguous() for name, each in tensors.items()}, file)


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
    found = {"drafts": {}, "passes": 0, "outcomes": []}
    propose = ModelDrafter.propose

    def proposed(self, plan):
        drafts = propose(self, plan)
        for slot, length, draft in zip(plan.slots, plan.kv_len, drafts, strict=True):
            found["drafts"].setdefault(int(slot), []).append((int(length), draft))
        return drafts

    monkeypatch.setattr(ModelDrafter, "propose", proposed)

    def heard(what):
        found["outcomes"].append(what)

    priced(monkeypatch, heard)
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


def priced(monkeypatch, heard=lambda what: None):
    """Trees that a round grows are priced by what was counted before it: the counts stay, and what
    would be counted is heard.
    """
    known, random = Confidence(), np.random.default_rng(2)
    for tenth in random.random(400):
        known.learn(bool(tenth * 100 % 2 < 1), int(tenth * 1000 % 3), tenth, tenth * 1e4 % 3 < 1)
    monkeypatch.setattr(Confidence, "__init__", lambda self: vars(self).update(vars(known)))
    monkeypatch.setattr(Confidence, "learn", lambda self, *what: heard(what))


def noted(seen, run):
    seen |= {"drafts": {}, "passes": 0, "outcomes": []}
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
    # One draft token a step: three times the steps, so that as many can be right.
    requests = asked(temperature, 36 if shape == "one" else 12)
    (found, _), drafts, few = noted(seen, lambda: answered(rounds, requests, shape))
    outcomes = seen["outcomes"]
    (expected, _), others, many = noted(seen, lambda: answered(eager, requests, shape))
    assert tokens(found) == tokens(expected) == plain(eager, requests)
    assert counts(found) == counts(expected)
    same(drafts, others)
    able = temperature or method not in BLIND
    least = 2 if method in PAIRED else 5  # A map of 64 tokens is right less often.
    assert sum(accepted for _, accepted in counts(found)) > (least if able else -1)
    assert few < many / 2
    # Of a last draft that nothing is left to verify rounds count the outcome too, and of a node
    # whose children are no part of a full tree they do not.
    few, many = (
        Counter((*what[:2], round(what[2], 3), what[3]) for what in each)
        for each in (seen["outcomes"], outcomes)
    )
    assert (few - many).total() <= (shape.endswith("tree")) and bool(few) == (method in CONFIDENT)


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
    assert engine.stats().accepted > 0 or method in PAIRED
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
