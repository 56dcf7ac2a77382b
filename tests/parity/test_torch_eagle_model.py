"""A draft head in torch, over pages and trees, against one token at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from forerun.build.engine import load, make_engine, open_target
from forerun.client.completion import complete, make_request
from forerun.errors import EngineError, ModelError
from forerun.executors.torch import TorchEagleModel, TorchExecutor
from forerun.executors.torch.decoder.layers import rotation
from forerun.models.draft_folder import open_draft
from forerun.models.folder import FolderCheckpoint
from forerun.options.config import EngineConfig
from tests.models import tiny
from tests.parity.driver import Driver, Row, limits
from tests.parity.heads import (
    SWITCHES,
    Twin,
    check_few_children,
    check_refusals,
    compare,
    level,
    within,
)


@pytest.fixture(scope="module")
def checkpoint(folder):
    return FolderCheckpoint(folder)


@pytest.mark.parametrize("changes", SWITCHES)
def test_extensions_and_trees_are_the_unrolled_forward(dense, checkpoint, tmp_path, changes):
    # Log-probabilities down to -50: float32 rounds them by some 1e-5 at best.
    executor = TorchExecutor(checkpoint, limits(tiny.VOCAB))
    compare(Twin(dense, tmp_path, changes), executor, within(1e-5), TorchEagleModel)


def test_few_children_are_the_best_of_all(dense, checkpoint, tmp_path):
    """In bfloat16, in which it is still the same head."""
    executor = TorchExecutor(checkpoint, limits(tiny.VOCAB), dtype="bfloat16")
    twin = Twin(dense, tmp_path, {})
    pairs = check_few_children(twin, executor, TorchEagleModel)
    assert TorchEagleModel(executor, checkpoint, twin.draft).describe()["draft_cache_bytes"] > 0
    for found, wanted in zip(*pairs, strict=True):
        assert np.corrcoef(found, wanted)[0, 1] > 0.99


def test_bad_passes_are_refused(dense, checkpoint, tmp_path):
    """By name."""
    executor = TorchExecutor(checkpoint, limits(tiny.VOCAB))
    twin = Twin(dense, tmp_path, {})
    check_refusals(twin, executor, TorchEagleModel)
    one, rows = np.ones(1, np.int32), [(0, 2, [0])]
    with pytest.raises(EngineError, match="refused: parents"):
        TorchEagleModel(executor, checkpoint, twin.draft).expand(level([5], one, [0, 1], rows))
    with Driver(executor) as driver:
        driver.open(0, [1, 2, 3])
        features = driver.step([Row(0)]).outcome.features
        for node in (-one, one * 3):
            with pytest.raises(EngineError, match=r"outside of 0\.\.2"):
                features.select(node)


def test_a_narrow_head_without_its_embedding_is_refused(dense, checkpoint, tmp_path):
    twin = Twin(dense, tmp_path, {"hidden": 48, "trained_head": True})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["embed_tokens.weight"]
    save_file(tensors, file)
    executor = TorchExecutor(checkpoint, limits(tiny.VOCAB))
    with pytest.raises(ModelError, match="needs embed_tokens"):
        TorchEagleModel(executor, checkpoint, open_draft(tmp_path, twin.dense.arch))


# --- served ------------------------------------------------------------------------------


def _unrolled(twin, features, texts, steps):
    """Logits [B,T,Vd] of `steps` draft tokens after each token, as training computes them."""
    length, keys, values = texts.shape[1], [], []
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def attend(_layer, found):
        qkv = found.turned()
        heads, size = qkv[0].shape[2:]
        q, k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in qkv)
        keys.append(k)
        values.append(v)
        scores = [(q @ keys[0].mT).masked_fill(future, -torch.inf)]
        scores += [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
        weights = (torch.cat(scores, -1) * size**-0.5).softmax(-1)
        mixed = weights[..., :length] @ values[0]
        for index, value in enumerate(values[1:]):
            mixed = mixed + weights[..., length + index, None] * value
        return mixed.transpose(1, 2)

    hidden = twin.head.fuse(features)
    for step in range(steps):
        places = torch.arange(length)
        turn = rotation(places + step, twin.frequencies, 1.0)
        tokens = texts[:, (places + step + 1).clamp(max=length - 1)]
        read, hidden = twin.head(tokens, twin.embed, hidden, turn, attend)
        yield twin.head.logits(read)


def learn(dense, folder, begin=None):
    """A head that has read half of a few texts of the target, and the texts; begin: how, int[B,T],
    or anyhow.
    """
    random = np.random.default_rng(5)
    texts = torch.from_numpy(random.integers(3, tiny.VOCAB, (12, 12)) if begin is None else begin)
    for _ in range(60):
        _, choices = dense.run(texts, ())
        texts = torch.cat([texts, choices[:, -1:]], 1)
    ids = texts.unique()
    twin = Twin(dense, folder, {}, ids.tolist())
    texts_read = texts[::2]
    features, choices = dense.run(texts_read, twin.head.head.features)
    wanted = torch.bucketize(choices.contiguous(), ids)
    for parameter in twin.head.parameters():
        if parameter.dim() == 2:
            parameter.data *= 0.4
    twin.head.lm_head.weight.data.copy_(dense.head[ids])
    twin.head.lm_head.weight.requires_grad_(False)
    optimiser = torch.optim.AdamW([p for p in twin.head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(120):
        loss = sum(
            F.cross_entropy(logits[:, : -step - 1].flatten(0, 1), wanted[:, step + 1 :].flatten())
            for step, logits in enumerate(_unrolled(twin, features, texts_read, 3))
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for parameter in twin.head.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    twin.export()
    return twin, texts.numpy().astype(np.int32)


@pytest.fixture(scope="module")
def target(folder, learned):
    target = opened(folder, learned[0])
    yield target
    target.close()


def opened(folder, twin, device="cpu", **changes):
    """The target with the twin's head, in float32."""
    return open_target(opened_config(folder, twin, device, **changes))


def opened_config(folder, twin, device="cpu", **changes):
    config = EngineConfig(
        model=str(folder),
        executor="torch",
        device=device,
        dtype="float32",
        speculative_draft_model_path=str(twin.folder),
        policy="fixed",
        max_sequences=6,
        chunked_prefill_size=64,
        kv_tokens=2048,
    )
    return replace(config, **changes)


def serve(target, prompts, speculation="EAGLE", tokens=60, temperature=0.0, **changes):
    """Completions of the prompts on one fresh engine, all at once; with at_once=1, in turn."""
    at_once = changes.pop("at_once", None)
    chain = {"speculative_num_draft_tokens": 4, "speculative_num_steps": 3}
    config = replace(target.config, speculative_algorithm=speculation, **chain)
    engine = make_engine(target, replace(config, **changes))
    engine.start()
    try:
        requests = [
            make_request(
                prompt, max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=seed
            )
            for seed, prompt in enumerate(prompts)
        ]
        return [choices[0] for choices in complete(engine, requests, at_once)]
    finally:
        engine.shutdown()


def simulated(twin, text, prompt_len, depth=3):
    """Steps by number of accepted draft tokens of a greedy chain, from the unrolled forward."""
    best = twin.ids[twin.log_probs(text, depth).argmax(-1).numpy()]
    counts = [0] * (depth + 1)
    decided = prompt_len + 1
    counts[0] += 1  # The prompt's own step.
    while decided < len(text):
        row = decided - 2
        allowed = min(depth, len(text) - decided - 1)
        accepted = 0
        while accepted < allowed and best[accepted, row] == text[row + accepted + 2]:
            accepted += 1
        counts[accepted] += 1
        decided += accepted + 1
    return counts


def counted(completions, depth=3):
    total = np.zeros(depth + 1, int)
    for item in completions:
        total[: len(item.stats.histogram)] += item.stats.histogram
    return total.tolist()


def test_served_is_what_the_unrolled_forward_says(target, learned):
    """Text and every step's acceptance, for prompts it was trained on and others, in a batch."""
    twin, texts = learned
    prompts = list(texts[:, :12])
    plain = serve(target, prompts, "OFF")
    served = serve(target, prompts)
    assert [item.tokens for item in served] == [item.tokens for item in plain]
    expected = np.zeros(4, int)
    for prompt, item in zip(prompts, served, strict=True):
        expected += simulated(twin, np.concatenate([prompt, item.tokens]), len(prompt))
    assert counted(served) == expected.tolist()
    assert min(expected[0], expected[3]) > 50 and expected.min() > 0, expected


@pytest.mark.parametrize(
    ("temperature", "shape"), [(0.8, (3, 3, 1)), (0.0, (16, 5, 4)), (0.8, (16, 5, 4))]
)
def test_no_guess_changes_the_text(target, learned, temperature, shape):
    """The greedy chain is above."""
    prompts = list(learned[1][:, :12])
    plain = serve(target, prompts, "OFF", 40, temperature)
    nodes, depth, width = shape
    served = serve(
        target, prompts, "EAGLE", 40, temperature,
        speculative_num_draft_tokens=nodes + 1, speculative_num_steps=depth,
        speculative_eagle_topk=width,
    )  # fmt: skip
    assert [item.tokens for item in served] == [item.tokens for item in plain]
    assert sum(item.stats.accepted for item in served) > 0


def test_the_price_of_a_head_is_measured(folder, target, learned):
    """With the adaptive policy, whatever it decides, the text is the same."""
    adaptive = open_target(replace(target.config, policy="adaptive"))
    try:
        assert adaptive.costs.draft_ms > 0 and adaptive.costs.follow_ms > 0
        prompts = list(learned[1][:4, :12])
        served = serve(adaptive, prompts)
        assert [item.tokens for item in served] == [
            item.tokens for item in serve(target, prompts, "OFF")
        ]
    finally:
        adaptive.close()


def test_a_tree_accepts_more_than_a_chain(target, learned):
    prompts = list(learned[1][1::2, :12])  # Not trained on.
    chain = serve(target, prompts)
    tree = serve(
        target,
        prompts,
        speculative_num_draft_tokens=17,
        speculative_num_steps=3,
        speculative_eagle_topk=4,
    )
    assert sum(item.stats.steps for item in tree) < sum(item.stats.steps for item in chain)


def test_a_reused_prefix_keeps_what_the_draft_needs(target, learned):
    """Each text served alone, then continued from its middle: the pages found change nothing."""
    twin, texts = learned
    prompts = [text[:length] for text in texts[:4] for length in (12, 49, 50)]
    served = serve(target, prompts, tokens=20, at_once=1)
    expected = np.zeros(4, int)
    for prompt, item in zip(prompts, served, strict=True):
        expected += simulated(twin, np.concatenate([prompt, item.tokens]), len(prompt))
    assert counted(served) == expected.tolist()


def test_lookup_and_head_together(target, learned):
    """The same text, in no more steps than the better of the two takes, but for a few."""
    prompts = [np.concatenate([text[:40], text[20:40]]) for text in learned[1]]
    plain = serve(target, prompts, "OFF")
    steps = {}
    for speculation in ("EAGLE", "NGRAM", "EAGLE+NGRAM"):
        served = serve(target, prompts, speculation)
        assert [item.tokens for item in served] == [item.tokens for item in plain]
        steps[speculation] = sum(item.stats.steps for item in served)
    assert steps["EAGLE+NGRAM"] < 1.02 * min(steps.values()), steps


@pytest.mark.parametrize("damage", ["gone", "too narrow"])
def test_a_draft_that_cannot_be_used_disables_speculation(folder, dense, tmp_path, damage):
    if damage == "too narrow":
        twin = Twin(dense, tmp_path, {"hidden": 48, "trained_head": True})
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["embed_tokens.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        assert twin.draft
    config = EngineConfig(
        model=str(folder),
        executor="torch",
        speculative_draft_model_path=str(tmp_path),
        max_sequences=2,
        kv_tokens=512,
    )
    with pytest.raises(ModelError):
        open_target(replace(config, draft_on_error="stop"))
    with pytest.warns(UserWarning, match="speculation is off: "):
        loaded = load(config)
    try:
        assert loaded.config.speculative_algorithm == "OFF"
        assert loaded.engine.fault.startswith("speculation is off: ")
        assert loaded.engine.describe()["drafter"]["fault"] == loaded.engine.fault
        request = make_request(np.array([5, 6, 7], np.int32), max_tokens=4, ignore_eos=True)
        assert len(complete(loaded.engine, [request])[0][0].tokens) == 4
    finally:
        loaded.close()
