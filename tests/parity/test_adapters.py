"""LoRA adapters beside the weights: the text of merged weights, mixed in one batch, in any chunks,
with any drafts.
"""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch

from forerun.checkpoints.adapter import read_adapter
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.control.policy import FixedPolicy
from forerun.drafters.ngram import NgramDrafter
from forerun.engine.thread import Engine, EngineOptions
from forerun.executors import cpu
from forerun.executors.cpu import AdaptedCpuExecutor
from forerun.executors.torch import TorchExecutor
from forerun.interface.executor import ExecutorLimits
from forerun.interface.grammars import NoGrammars
from tests.covering import every, rarely
from tests.engine.test_embeddings import embed, vector
from tests.engine.toys import TOKENIZER, ask, run
from tests.models import tiny
from tests.models.lora import merged, save_adapter

NATIVE = pytest.mark.skipif(bool(cpu.available()), reason="the compiled core is not built")
KINDS = [TorchExecutor, pytest.param(AdaptedCpuExecutor, marks=NATIVE)]
LIMITS = ExecutorLimits(16, 64, 6, 40, 160, tiny.VOCAB)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, two adapters of different ranks and modules, and the models that they make."""
    folder = tmp_path_factory.mktemp("adapters")
    hf = tiny.model("qwen3", max_position_embeddings=512)
    checkpoint = FolderCheckpoint(tiny.save_folder(hf, folder / "base"))
    some = r"model\.layers\.1\.(self_attn\.[qv]_proj|mlp\.down_proj)"
    folders = [
        save_adapter(hf, folder / "one", 1, rank=4),
        save_adapter(hf, folder / "two", 2, some, rank=9, use_rslora=True),
    ]
    names = ("one", "two")
    adapters = tuple(map(read_adapter, names, folders, [checkpoint.architecture] * 2))
    models = [hf]
    for each in folders:
        other = tiny.model("qwen3", max_position_embeddings=512)
        weights = {name: torch.from_numpy(value) for name, value in merged(hf, each).items()}
        other.load_state_dict(weights)
        models.append(other)
    return checkpoint, adapters, models


def engine_on(executor, adapters, draft):
    policy, lookup = FixedPolicy(*(draft, draft)), NgramDrafter(executor.limits.slots)
    named = tuple((one.name, one.digest) for one in adapters)
    options = EngineOptions(adapters=named)
    return Engine(executor, lookup, policy, TOKENIZER, NoGrammars(), options)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_merged_weights(world, kind):
    checkpoint, adapters, models = world
    executor = kind(checkpoint, LIMITS)
    executor.adapt(adapters)
    random = np.random.default_rng(3)
    texts = [random.integers(8, 250, n).astype(np.int32) for n in (70, 5)]
    requests = [
        replace(ask(f"{t}{a}", text, 12, stop_tokens=()), adapter=a)
        for t, text in enumerate(texts)
        for a in (-1, 0, 1)
    ]
    vectors = [replace(embed(f"v{a}", b"some words"), adapter=a) for a in (-1, 0, 1)]
    together = run(engine_on(executor, adapters, 0), *requests, *vectors, check=False)
    drafted = run(engine_on(executor, adapters, 4), *requests, *vectors, check=False)
    for number, one in enumerate(requests):
        hf = models[one.adapter + 1]
        tokens = together.tokens(one.id)
        assert tokens == drafted.tokens(one.id)
        alone = run(engine_on(executor, adapters, 3 * (number % 2)), one, check=False)
        assert alone.tokens(one.id) == tokens
        with torch.inference_mode():
            ids = torch.from_numpy(np.concatenate([one.prompt, tokens[:-1]]).astype(np.int64))
            logits = hf(ids[None]).logits[0, len(one.prompt) - 1 :]
        best = logits.max(-1).values
        assert (best - logits[torch.arange(12), tokens] < 1e-3).all()
    for one in vectors:
        with torch.inference_mode():
            ids = torch.tensor(list(b"some words"))[None]
            states = models[one.adapter + 1].model(ids).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector(together, one.id), states, atol=1e-4)
    assert len({tuple(together.tokens(f"0{a}")) for a in (-1, 0, 1)}) == 3
    executor.shutdown()


@NATIVE
def test_quantised_weights_and_their_adapters_read_the_same_numbers(world):
    """In few bits: near the merged model's hidden states, and with the same bits in any batch."""
    checkpoint, adapters, models = world
    executor = AdaptedCpuExecutor(checkpoint, LIMITS, 2, dtype="q8_0")
    executor.adapt(adapters)
    requests = [replace(embed(f"v{a}", b"some words that are read"), adapter=a) for a in (-1, 0, 1)]
    more = replace(ask("text", "Hello", 20), adapter=1)
    together = run(engine_on(executor, adapters, 4), *requests, more, check=False)
    for one in requests:
        alone = run(engine_on(executor, adapters, 0), one, check=False)
        assert vector(alone, one.id).tobytes() == vector(together, one.id).tobytes()
        with torch.inference_mode():
            ids = torch.from_numpy(one.prompt.astype(np.int64))[None]
            states = models[one.adapter + 1].model(ids).last_hidden_state[0].mean(0).numpy()
        mean = vector(alone, one.id)
        assert np.dot(mean, states) / np.linalg.norm(mean) / np.linalg.norm(states) > 0.995
    executor.shutdown()


def test_cached_prefixes_are_apart_by_adapter(world):
    checkpoint, adapters, _ = world
    executor = TorchExecutor(checkpoint, LIMITS)
    executor.adapt(adapters)
    engine = engine_on(executor, adapters, 0)
    cached = []
    for number, adapter in enumerate((-1, 0, 1, 0, -1)):
        one = replace(ask(f"r{number}", "The same beginning of all. " * 3, 3), adapter=adapter)
        cached.append(run(engine, one, check=False).of(one.id)[0].cached_tokens)
    assert cached[:3] == [0, 0, 0] and cached[3] == cached[4] > 0
    counts = {one.name: one for one in engine.stats().by_adapter}
    assert counts.keys() == {"one", "two"} and counts["one"].steps > 0
    executor.shutdown()


FAMILIES = {
    "qwen3_5_moe_text": {"linear_value_head_dim": 16},
    "lfm2": {},
    "deepseek_v3": {"qk_nope_head_dim": 32, "v_head_dim": 32},
    "gpt_oss": {},
    "gemma4_text": {},
}
"""Gated attention, delta nets, experts, short convolutions, latent attention, vectors of tokens."""
LEFT_OUT = r".*(kv_b_proj|shared_expert_gate|per_layer_model_projection)"


def by_peft(family, folder):
    """A tiny checkpoint, and peft's model with an adapter of all that can have one, saved."""
    hf = tiny.model(family, max_position_embeddings=512, **FAMILIES[family])
    checkpoint = FolderCheckpoint(tiny.save_folder(hf, folder / "base"))
    experts = [name for name, value in hf.named_parameters() if ".experts." in name]
    matrices = [name for name in experts if name.endswith("_proj")]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules="all-linear",
        exclude_modules=LEFT_OUT,
        target_parameters=matrices or None,
    )
    adapted = peft.get_peft_model(hf, config).eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for name, weight in adapted.named_parameters():
            if ".lora_B." in name:
                weight.normal_(0, 0.3)
    adapted.save_pretrained(folder / "a")
    return checkpoint, adapted, read_adapter("a", folder / "a", checkpoint.architecture)


@pytest.fixture(scope="module")
def of_family(request, tmp_path_factory):
    return by_peft(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    ("of_family", "kind"),
    [
        *(pytest.param(family, AdaptedCpuExecutor, marks=NATIVE) for family in FAMILIES),
        *rarely(every(FAMILIES, [TorchExecutor]), [("lfm2", TorchExecutor)], None),
    ],
    indirect=["of_family"],
)
def test_layers_of_every_kind_run_what_peft_runs(of_family, kind):
    checkpoint, adapted, adapter = of_family
    executor = kind(checkpoint, replace(LIMITS, checkpoints=8))
    executor.adapt((adapter,))
    text = np.random.default_rng(3).integers(8, 250, 20).astype(np.int32)
    requests = [replace(ask(f"{a}", text, 8, stop_tokens=()), adapter=a) for a in (-1, 0)]
    together = run(engine_on(executor, (adapter,), 0), *requests, check=False)
    drafted = run(engine_on(executor, (adapter,), 4), *requests, check=False)
    for one in requests:
        tokens = together.tokens(one.id)
        assert tokens == drafted.tokens(one.id)
        ids = torch.from_numpy(np.concatenate([text, tokens[:-1]]).astype(np.int64))[None]
        with (
            torch.inference_mode(),
            nullcontext() if one.adapter == 0 else adapted.disable_adapter(),
        ):
            logits = adapted(ids).logits[0, len(text) - 1 :]
        best = logits.max(-1).values
        assert (best - logits[torch.arange(8), tokens] < 1e-3).all()
    assert together.tokens("-1") != together.tokens("0")
    executor.shutdown()
