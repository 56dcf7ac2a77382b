"""Gemma 4's assistant: files, and how it is chosen. What it says: test_contract.py."""

import json
import shutil
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from forerun.build import beside
from forerun.build.beside import assistant_beside, with_beside
from forerun.build.drafting import drafting_sentence, open_drafts, with_shipped
from forerun.build.engine import load
from forerun.build.sizing import described, sizing
from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.drafts.assistant import holds_assistant, open_assistant
from forerun.errors import ConfigError, EngineError, ModelError
from forerun.hub.catalog import open_model
from forerun.interface.draft_model import DraftExtension, DraftLevel
from forerun.measure.prove import Trial
from forerun.options.alias import speculative_config
from forerun.options.config import EngineConfig
from tests.drafters import assistants
from tests.drafters.served import Cells, in_rounds, settings
from tests.drafters.test_contract import NO_CORE
from tests.e2e.test_equality_matrix import PROMPTS, proved
from tests.models import tiny

EXECUTORS = [pytest.param("cpu", marks=NO_CORE), "torch", "jax"]


@pytest.fixture(scope="module")
def cells(kinds, compiled, quickly):
    opened = Cells(kinds, compiled)
    yield opened
    opened.close()


# --- what it says ------------------------------------------------------------------------------


@NO_CORE
def test_in_8_bits_beside_a_target_in_8_bits(cells):
    """On two threads: one that is right is right but for a few tokens."""
    run = cells("cpu", "ASSISTANT, right", dtype="q8_0", threads=2).served()
    assert run.accepted > 0.9 * run.drafted


@pytest.mark.parametrize(
    ("executor", "page"),
    [
        *(pytest.param("cpu", page, marks=NO_CORE) for page in (1, 16)),
        *(pytest.param("torch", page, marks=pytest.mark.slow) for page in (1, 16)),
    ],
)
def test_texts_do_not_depend_on_it(kinds, executor, page):
    """Trees, shared prefixes, little room, so that sequences are preempted."""
    kind = kinds["ASSISTANT, half"]
    config = settings(
        kind, executor, page_size=page, chunked_prefill_size=320, kv_tokens=176, context=None
    )
    trial = Trial(PROMPTS[-4:], tokens=6, temperatures=(0.0, 1.0), group=4, mixed=True)
    proved(config, trial, shapes=("tree",))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_bad_passes_are_refused(cells, executor):
    model = cells(executor, "ASSISTANT, shared").model()
    one, none = np.ones(1, np.int32), np.zeros(0, np.int32)
    ends, pages = np.array([0, 2], np.int32), np.zeros((1, 4), np.int32)
    with pytest.raises(EngineError, match="needs a token in the cache"):
        model.expand(DraftLevel(one, -one, ends // 2, 0 * one, one, pages, 0, 1))
    two = np.ones(2, np.int32)
    with pytest.raises(EngineError, match=r"without (the target's )?features"):
        model.extend(DraftExtension(two, two, ends, one, one, pages, none, 1), None)
    with pytest.raises(EngineError, match="not a block"):
        model.block(None)


# --- files -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(kinds):
    return FolderCheckpoint(kinds["ASSISTANT, shared"].model).architecture


@pytest.fixture
def folder(kinds, tmp_path):
    return shutil.copytree(kinds["ASSISTANT, ordered"].draft, tmp_path / "assistant")


def changed(folder, tensors=lambda _: None, inner=None, **keys):
    config = json.loads((folder / "config.json").read_text()) | keys
    config["text_config"] |= inner or {}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    tensors(stored)
    save_file(stored, folder / "model.safetensors")
    return folder


def with_keys(tensors):
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.norm.weight"].clone()


def repeating(tensors):
    tensors["masked_embedding.token_ordering"] //= 2


def test_what_transformers_writes_is_read(kinds, target, folder):
    opened = open_assistant(folder, target)
    assert [spec.reads for spec in opened.architecture.layer_specs] == [0, 0, 0, 1]
    assert opened.cache == () and opened.vocab == tiny.VOCAB and opened.warnings == ()
    assert opened.clusters.tokens.shape == (assistants.CLUSTERS, 32)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "token_ordering" not in name:
            assert np.array_equal(opened.tensor(name), tensor.numpy())
    with pytest.raises(ModelError, match="scores few tokens already"):
        opened.limited(np.arange(5, dtype=np.int32))
    plain = open_assistant(kinds["ASSISTANT, shared"].draft, target)
    assert plain.limited(np.arange(5, dtype=np.int32)).vocab == 5


def test_a_file_is_the_folder(kinds, target):
    """As llama.cpp's converter writes it; it leaves the order of the head out."""
    kind = kinds["ASSISTANT, GGUF"]
    opened = open_assistant(kind.draft, target)
    plain = open_assistant(kinds["ASSISTANT, shared"].draft, target)
    assert opened.warnings == () and set(opened.names()) == set(plain.names())
    for one, two in zip(
        opened.architecture.layer_specs, plain.architecture.layer_specs, strict=True
    ):
        assert replace(one, rope=two.rope) == two
    assert holds_assistant(kind.draft) and opened.clusters is None
    for name in opened.names():
        assert np.array_equal(opened.tensor(name), plain.tensor(name))
    with pytest.raises(ModelError, match="an assistant, which drafts for a Gemma 4"):
        GgufCheckpoint(kind.draft)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"backbone_hidden_size": 32}, "a width of 32, the target's is 64"),
        ({"output_multiplier": 2.0}, "output_multiplier"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["Gemma4ForCausalLM"]}, "architectures"),
        ({"num_centroids": 7}, "7 clusters"),
        ({"centroid_intermediate_top_k": 11}, "of which 11 are scored"),
        ({"use_ordered_embeddings": False}, "unexpected masked_embedding"),
        ({"inner": {"num_kv_shared_layers": 2}}, "num_kv_shared_layers"),
        ({"inner": {"use_double_wide_mlp": True}}, "use_double_wide_mlp"),
        ({"inner": {"laurel_rank": 4}}, "laurel_rank"),
        ({"inner": {"sliding_window": 25}}, "a window of 25, the target's is 24"),
        ({"inner": {"vocab_size": 160}}, "a vocabulary of 160"),
        (
            {"inner": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320}},
            "no per-layer embeddings",
        ),
        ({"tensors": lambda t: t.pop("post_projection.weight")}, "missing post_projection"),
        ({"tensors": with_keys}, "unexpected model.layers.0.self_attn.k_proj"),
        ({"tensors": repeating}, "does not name each of the 320 tokens once"),
    ],
)  # fmt: skip
def test_what_would_change_it_is_named(target, folder, changes, named):
    with pytest.raises(ModelError, match=named):
        open_assistant(changed(folder, **changes), target)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention.shared_kv_layers": 2}, "shared_kv_layers"),
        ({"nextn_predict_layers": 2}, "nextn_predict_layers"),
        ({"altup.num_inputs": 4}, "altup"),
        ({"embedding_length_out": 32}, "a width of 32"),
        ({"attention.key_length_swa": 8, "attention.value_length_swa": 8,
          "rope.dimension_count_swa": 8}, "reads 2 heads of 8, the target keeps 2 heads of 16"),
    ],
)  # fmt: skip
def test_metadata_that_would_change_it_is_named(kinds, target, tmp_path, changes, named):
    made = assistants.beside(tiny.model("gemma4_text"))
    path = assistants.in_gguf(made, tmp_path / "x.gguf", **changes)
    with pytest.raises(ModelError, match=named):
        open_assistant(path, target)


def test_other_rotary_positions_are_a_warning(target, folder):
    ropes = json.loads((folder / "config.json").read_text())["text_config"]["rope_parameters"]
    ropes["sliding_attention"]["rope_theta"] = 5.0
    opened = open_assistant(changed(folder, inner={"rope_parameters": ropes}), target)
    assert opened.warnings == (
        "its rotary positions are not the target's: few draft tokens may be accepted",
    )


# --- how it is chosen --------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["EAGLE", "MTP", "STANDALONE", "AUTO", "frozen-kv-mtp"])
def test_names_of_other_servers_mean_it(kinds, algorithm):
    draft = str(kinds["ASSISTANT, shared"].draft)
    config = EngineConfig(
        model="m", speculative_algorithm=algorithm, speculative_draft_model_path=draft
    )
    assert with_shipped(config).speculative_algorithm == "FROZEN_KV_MTP"
    for other in ("EAGLE3", "DFLASH", "EAGLE+NGRAM"):
        with pytest.raises(ConfigError, match="holds an assistant; use FROZEN_KV_MTP"):
            with_beside(EngineConfig(
                speculative_algorithm=other, speculative_draft_model_path=draft
            ))  # fmt: skip


def test_an_option_of_vllm_means_it(kinds):
    draft = str(kinds["ASSISTANT, shared"].draft)
    for said in ({"method": "mtp"}, {}):
        keys = json.dumps(said | {"model": draft, "num_speculative_tokens": 4})
        config = EngineConfig(model="m", **speculative_config("x", keys))
        assert with_shipped(config).speculative_algorithm == "FROZEN_KV_MTP"


@pytest.mark.parametrize("draft", ["folder", "GGUF"])
def test_auto_takes_the_one_beside_the_model(kinds, tmp_path, draft):
    """And says so; the memory plan counts it."""
    kind = kinds["ASSISTANT, half"]
    model = shutil.copytree(kind.model, tmp_path / "Gemma")
    beside = tmp_path / "gemma-assistant"
    if draft == "GGUF":
        hf = tiny.model("gemma4_text")
        beside = assistants.in_gguf(assistants.beside(hf), tmp_path / "gemma-assistant-F16.gguf")
        model = tiny.write_gguf(hf, tmp_path / "gemma-Q8_0.gguf")
    else:
        shutil.copytree(kind.draft, beside)
    (tmp_path / "gemma-assistant-other").mkdir()
    config = settings(kind, "torch", model=str(model), speculative_algorithm="AUTO",
                      speculative_draft_model_path=None)  # fmt: skip
    with closing(load(config)) as loaded:
        assert loaded.config.speculative_algorithm == "FROZEN_KV_MTP+NGRAM"
        assert f"(AUTO: {beside} is the model's assistant" in loaded.info["drafting"]
        assert "lies beside it" in loaded.info["drafting"]
        assert "frozen_kv_mtp" in str(loaded.engine.describe()["drafter"])
    planned = sizing(config, described(config), 10**10)
    assert planned.draft == 4 * open_assistant(beside, architecture_at(model)).parameters
    rounds = EngineConfig(model=str(model), executor="torch", device="cuda")
    assert sizing(rounds, described(config), 10**10).draft == 0


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"text_config": 5}, "text_config is 5"),
        ({"model_type": ["gemma4_assistant"]}, None),
        ({}, "model.safetensors"),
    ],
)
def test_auto_drafts_as_without_one_that_does_not_open(kinds, tmp_path, config, says):
    """It was not named: a warning says why it is left out, and n-grams draft."""
    kind = kinds["ASSISTANT, half"]
    model = shutil.copytree(kind.model, tmp_path / "Gemma")
    copy = shutil.copytree(kind.draft, tmp_path / "gemma-assistant")
    about = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(about | config))
    (copy / "model.safetensors").unlink()
    wanted = settings(kind, "torch", model=str(model), speculative_algorithm="AUTO", device="cpu",
                     speculative_draft_model_path=None, speculative_num_steps=None)  # fmt: skip
    arch = architecture_at(model)
    with pytest.warns(UserWarning, match=f"is left out: .*{says}") if says else nullcontext():
        chosen = with_beside(wanted, target=SimpleNamespace(architecture=arch))
    assert chosen == wanted
    if says == "model.safetensors":
        with pytest.warns(UserWarning, match="is left out"):
            loaded = load(wanted)
        try:
            assert loaded.config.speculative_algorithm == "NGRAM"
        finally:
            loaded.close()


def test_a_link_goes_by_its_own_name(kinds, tmp_path, monkeypatch):
    """As files of a hub's cache, which lie under a hash elsewhere."""
    stored, folder = tmp_path / "blobs", tmp_path / "snapshot"
    for each in (stored, folder):
        each.mkdir()
    (stored / "0a1b").touch()
    (folder / "gemma-Q8_0.gguf").symlink_to(stored / "0a1b")
    link = folder / "gemma-assistant"
    link.symlink_to(kinds["ASSISTANT, shared"].draft)
    assert assistant_beside(str(folder / "gemma-Q8_0.gguf")) == link
    monkeypatch.chdir(folder)
    assert assistant_beside("gemma-Q8_0.gguf") == link
    assert assistant_beside(".") is None


def architecture_at(path):
    return open_model(str(path)).architecture


def test_a_hub_id_has_the_published_one_where_it_is_on_this_machine(kinds, monkeypatch):
    names, draft = [], kinds["ASSISTANT, shared"].draft
    monkeypatch.setattr(beside.huggingface, "here", lambda name: names.append(name) or draft)
    for name in ("google/gemma-4-E2B-it", "unsloth/gemma-4-E2B-it-GGUF:Q4_K_M"):
        assert assistant_beside(name) == draft
    assert names == ["google/gemma-4-E2B-it-assistant"] * 2
    assert assistant_beside("google/gemma-3-4b-it") is None and len(names) == 2
    monkeypatch.setattr(beside.huggingface, "here", lambda name: None)
    wanted = EngineConfig(model="google/gemma-4-31B-it", speculative_algorithm="FROZEN_KV_MTP")
    with pytest.raises(ConfigError, match="FOLDER, such as google/gemma-4-31B-it-assistant"):
        with_shipped(wanted)
    named = EngineConfig(model="m", speculative_draft_model_path="x")
    sentence = drafting_sentence(named, EngineConfig(speculative_algorithm="FROZEN_KV_MTP",
                             speculative_draft_model_path="x"), False, None)  # fmt: skip
    assert sentence.endswith("(AUTO: x is the model's assistant)")


def test_where_it_cannot_run_a_sentence_says_so(kinds, tmp_path):
    kind = kinds["ASSISTANT, shared"]
    with in_rounds(), pytest.raises(ModelError, match=r"outside of captured.*--disable-cuda-graph"):
        open_target(settings(kinds["ASSISTANT, right"], "torch"))
    with pytest.raises(ModelError, match="an assistant drafts for a Gemma 4"):
        open_model(str(kind.draft))
    wrong = settings(kind, "torch", speculative_draft_model_path=str(kind.model))
    with pytest.raises(ConfigError, match="holds no assistant"):
        open_drafts(wrong, open_model(wrong.model))
