"""Prediction layers, one per depth, against the paper's rows; exact counts where the outcome is
known.
"""

import json
from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from forerun.build.engine import open_target
from forerun.errors import ModelError
from forerun.models.folder import FolderCheckpoint
from forerun.models.prediction_layers import open_prediction_layers
from tests.drafters.draft_models import Told
from tests.drafters.served import answered, asked
from tests.drafters.test_nextn import (
    EXECUTORS,
    NAMINGS,
    NATIVE,
    _error,
    dense,
    open_plain,
    random_layer,
    settings,
    with_layers,
)
from tests.models import tiny

COUNT, STEPS, TOKENS = 3, 4, 13
"""Layers, draft tokens of a chain (one is beyond the layers), tokens of an answer."""
_LONG = np.random.default_rng(8).integers(3, 300, 41).astype(np.int32)
PROMPTS = [_LONG[:1], _LONG[1:3], _LONG, np.append(_LONG[:32], np.int32(7))]
"""Shorter than the layers are many, in several steps, behind pages of another."""


@pytest.fixture(scope="module")
def random(tmp_path_factory):
    """A random target with random layers: the model, the layers and the folder by naming."""
    hf, root = tiny.model("llama"), tmp_path_factory.mktemp("depths")
    layers = [random_layer(hf, 5 + depth) for depth in range(COUNT)]
    shared = [(made, *layers[0][1:]) for made, *_ in layers]
    return {
        name: (hf, mine, with_layers(hf, mine, root / name, name))
        for name, mine in (("deepseek", layers), ("mimo", layers), ("qwen3-next", shared))
    }


def configured(folder, executor, **changes):
    return settings(folder, executor, **{"speculative_num_steps": STEPS} | changes)


def served(target, at_once=1, temperature=0.0):
    """Choices of all prompts, the later ones behind the pages of the earlier."""
    return answered(target, target.config, asked(PROMPTS, TOKENS, temperature, 3), at_once)[0]


def texts_of(folder, executor, temperature=0.0):
    plain = open_plain(folder, executor)
    try:
        return [item.tokens for item in served(plain, temperature=temperature)]
    finally:
        plain.close()


@pytest.mark.parametrize(
    ("executor", "naming"),
    [
        pytest.param("cpu", "deepseek", marks=NATIVE),
        pytest.param("cpu", "qwen3-next", marks=NATIVE),
        ("torch", "deepseek"),
        ("torch", "mimo"),
    ],
)
def test_every_depth_is_its_layers(random, executor, naming, monkeypatch):
    """Every chain that was proposed, from each layer's own keys and values."""
    hf, layers, folder = random[naming]
    target, asked = open_target(configured(folder, executor)), []
    kind = type(target.draft_model)

    def noted(verb):
        made = getattr(kind, verb)

        def call(self, work, *rest):
            found = made(self, work, *rest)
            asked.append((work, found))
            return found

        return call

    for verb in ("extend", "expand"):
        monkeypatch.setattr(kind, verb, noted(verb))
    try:
        assert target.draft_model.describe()["layers"] == COUNT
        done = served(target)
    finally:
        target.close()
    assert [item.tokens for item in done] == texts_of(folder, executor)
    worst = [
        error
        for at, item in enumerate(asked)
        if (error := compared(hf, layers, naming, asked, at, done)) is not None
    ]
    assert len(worst) > 2 * len(PROMPTS)
    # Float32, and 8 bits, where what reads or sees something else is wrong by several nats.
    most, usual = (1e-3, 1e-3) if executor == "torch" else (1.0, 0.3)
    assert max(worst) < most and np.mean(worst) < usual


def compared(hf, layers, naming, asked, at, done):
    """The greatest difference of a chain's log-probabilities; None where none was drafted."""
    work, found = asked[at]
    if not hasattr(work, "next_tokens") or not len(work.scored):
        return None
    length, root = int(work.kv_len[0]) + len(work.tokens) + 1, int(work.next_tokens[-1])
    below = list(takewhile(lambda item: hasattr(item[0], "parents"), asked[at + 1 :]))
    if not below:
        return None
    chain = [int(level.tokens[0]) for level, _ in below]
    mine = [found, *(after for _, after in below)]
    errors = []
    for prompt, item in zip(PROMPTS, done, strict=True):
        text = [*prompt.tolist(), *item.tokens][:length]
        if text[length - len(work.tokens) - 1 :] == [*work.tokens.tolist(), root]:
            wanted = dense(hf, layers, naming == "mimo", text, chain)
            errors.append(max(map(_error, mine, wanted)))
    return min(errors)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A target that says t + 1 after t, and layers each of which knows that only from the outputs
    of the layer before it, the last also from its own. By name: the layers' order.
    """
    hf = tiny.model("llama")
    half = hf.config.hidden_size // 2
    turn, vectors = turns(half)
    marks = [torch.linalg.qr(torch.randn(half, half, generator=seeded(n)))[0] for n in range(2)]
    zeros = torch.zeros(half, half)
    with torch.no_grad():
        for block in hf.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        hf.model.norm.weight.fill_(1.0)
        hf.model.embed_tokens.weight.copy_(torch.cat([vectors, 0 * vectors], 1))
        hf.lm_head.weight.copy_(torch.cat([vectors.roll(1, 0), 0 * vectors], 1))
    identity = torch.eye(half)
    # What a layer reads of the hidden state's two halves, and the mark that it leaves.
    reads = [(identity, -2 * marks[0].T), (zeros, marks[0].T), (zeros, marks[1].T)]
    leaves = [marks[0], marks[1], marks[1]]
    layers = []
    for read, mark in zip(reads, leaves, strict=True):
        token = turn @ torch.cat(read, 1)
        hidden = torch.cat([token, mark @ token])
        made = LlamaDecoderLayer(hf.config, 0)
        with torch.no_grad():
            made.self_attn.o_proj.weight.zero_()
            made.mlp.down_proj.weight.zero_()
        ones = [torch.ones(2 * half)] * 3
        layers.append((made, *ones, torch.cat([0 * hidden, hidden], 1)))
    root = tmp_path_factory.mktemp("exact")
    orders = {"right": (0, 1, 2), "swapped": (0, 2, 1), "one": (0,)}
    return {
        name: with_layers(hf, [layers[n] for n in order], root / name, "deepseek")
        for name, order in orders.items()
    }


def seeded(number):
    return torch.Generator().manual_seed(number)


def turns(size):
    """An orthogonal matrix [size,size], and vectors [V,size], each of which it makes the next."""
    angles = torch.randperm(tiny.VOCAB // 2, generator=seeded(1))[: size // 2] + 1
    angles = 2 * torch.pi * angles / tiny.VOCAB
    turn = torch.zeros(size, size)
    pair = torch.arange(0, size, 2)
    turn[pair, pair] = turn[pair + 1, pair + 1] = angles.cos()
    turn[pair + 1, pair], turn[pair, pair + 1] = angles.sin(), -angles.sin()
    at = torch.arange(tiny.VOCAB)[:, None] * angles
    return turn, torch.stack([at.cos(), at.sin()], -1).flatten(1)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("order", "accepted_each"), [("right", STEPS), ("swapped", 1), ("one", 1)])
def test_layers_that_are_right_for_their_depth_alone(exact, executor, order, accepted_each):
    """All of a chain is accepted, beyond the last layer's depth too; where the second layer is
    another's, or the first is all there is, exactly one.
    """
    texts = texts_of(exact[order], executor)
    for prompt, tokens in zip(PROMPTS, texts, strict=True):
        assert tokens == ((prompt[-1] + 1 + np.arange(TOKENS)) % tiny.VOCAB).tolist()
    target = open_target(configured(exact[order], executor))
    try:
        done = served(target, at_once=None)
        assert [item.tokens for item in done] == texts
        steps = 1 + -(-(TOKENS - 1) // (1 + accepted_each))
        assert [item.stats.steps for item in done] == [steps] * len(PROMPTS)
        assert [item.stats.accepted for item in done] == [TOKENS - steps] * len(PROMPTS)
        whole = [[*p, *t] for p, t in zip(PROMPTS, texts, strict=True)]
        told = replace(target, draft_model=Told(target.draft_model, whole, 1))
        assert [item.stats.accepted for item in served(told)] == [0] * len(PROMPTS)
    finally:
        target.close()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_change_nothing(exact, executor, temperature):
    folder = exact["swapped"]
    shape = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 16, "page_size": 1}
    target = open_target(configured(folder, executor, **shape))
    try:
        done = served(target, at_once=None, temperature=temperature)
        assert [item.tokens for item in done] == texts_of(folder, executor, temperature)
        assert 0 < sum(i.stats.accepted for i in done) < sum(i.stats.draft_tokens for i in done)
    finally:
        target.close()


def test_layers_that_no_depth_reaches_are_left_out(random):
    target = open_target(configured(random["mimo"][2], "torch", speculative_num_steps=2))
    try:
        assert target.draft_model.describe()["layers"] == 2
        assert len(target.draft_model.traits.cache) == 2
    finally:
        target.close()


@pytest.mark.parametrize("naming", NAMINGS)
def test_what_a_further_layer_lacks_or_has_too_much_is_named(random, tmp_path, naming):
    hf, layers, _ = random[naming]
    folder = with_layers(hf, layers, tmp_path, naming, {})
    first = NAMINGS[naming][0]
    last = first.replace(first[-2], str(int(first[-2]) + 2))
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{last}mlp.up_proj.weight"]
    tensors[f"{last}self_attn.k_norm.weight"] = torch.ones(16)
    tensors[f"{last}self_attn.o_proj.weight"] = torch.ones(3, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        opened(folder)
    for fault in (f"missing {last}mlp.up_proj.weight", f"unexpected {last}self_attn.k_norm.weight",
                  f"{last}self_attn.o_proj.weight is [3, 64], not [64, 64]"):  # fmt: skip
        assert fault in str(caught.value)


def opened(folder):
    checkpoint = FolderCheckpoint(folder)
    declared = checkpoint.config["num_nextn_predict_layers"]
    return open_prediction_layers(checkpoint, checkpoint.prediction_files, declared)


def test_numbers_counts_and_copies_that_contradict_each_other(random, tmp_path):
    hf, layers, _ = random["deepseek"]
    folder = with_layers(hf, layers, tmp_path, "deepseek")
    whole = load_file(folder / "model.safetensors")
    other = {"model.layers.3.embed_tokens.weight": whole["lm_head.weight"].clone()}
    save_file(whole | other, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.3\.embed_tokens\.weight is another"):
        opened(folder)
    gap = {name: values for name, values in whole.items() if not name.startswith("model.layers.3.")}
    save_file(gap, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"have the numbers \[2, 4\]; they must count from 2 on"):
        opened(folder)
    save_file(whole, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"promises 2 prediction layers .* those of 3"):
        opened(folder)
