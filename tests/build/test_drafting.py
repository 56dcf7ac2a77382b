from dataclasses import replace
from types import SimpleNamespace

import pytest

from forerun.build import engine
from forerun.build.drafting import drafting_sentence, resolved_drafting, with_shipped
from forerun.build.registry import choose_executor
from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import ConfigError, ModelError
from forerun.executors import cpu
from forerun.options.config import EngineConfig
from tests.models import tiny
from tests.worlds.configs import small


def test_what_train_worked_in_names_its_draft(tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    config = EngineConfig(speculative_draft_model_path=str(tmp_path))
    assert with_shipped(config).speculative_draft_model_path == str(tmp_path / "draft")
    (tmp_path / "config.json").write_text("{}")
    assert with_shipped(config) == config


def test_auto_is_decided():
    auto = EngineConfig(speculative_num_steps=3, device="cpu")
    for head, fault, device, algorithm in (
        (True, None, "cpu", "EAGLE+NGRAM"), (True, None, "cuda", "EAGLE"),
        (False, None, "cpu", "NGRAM"), (False, None, "cuda", "NGRAM"),
        (True, "broken", "cpu", "OFF"),
    ):  # fmt: skip
        chosen = resolved_drafting(replace(auto, device=device), head, fault)
        assert chosen.speculative_algorithm == algorithm
        assert (chosen.speculative_num_steps, chosen.speculative_num_draft_tokens) == (3, 4)
    wide = replace(auto, speculative_eagle_topk=4)
    assert resolved_drafting(wide, True, None).draft_shape.width == 4
    with pytest.raises(ConfigError, match="NGRAM branches where the text did"):
        resolved_drafting(wide, False, None)


def automatic(layered=False, **options):
    return with_shipped(EngineConfig(model="m", **options), layered).speculative_algorithm


def test_auto_takes_what_the_checkpoint_and_the_name_offer():
    assert automatic() == "AUTO"  # NGRAM, once it is known that there is no draft.
    for executor in ("cpu", "torch"):
        assert automatic(layered=True, executor=executor, device="cpu") == "NEXTN+NGRAM"
    assert automatic(layered=True, executor="torch", device="cuda") == "NEXTN"
    assert automatic(layered=True, executor="jax", device="tpu") == "NEXTN"
    small = {"speculative_draft_model_path": "small.gguf"}
    assert automatic(device="cpu", **small) == "STANDALONE+NGRAM"
    assert automatic(device="cuda", **small) == "STANDALONE"
    named = {"speculative_draft_model_path": "none", "executor": "torch", "device": "cuda"}
    assert automatic(layered=True, **named) == "AUTO"


def test_a_gguf_file_is_a_draft_whatever_its_name(tmp_path):
    """Those of Ollama have no ending."""
    (tmp_path / "sha256-0f").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "notes").write_bytes(b"else" + bytes(20))
    for name, algorithm in (("sha256-0f", "STANDALONE+NGRAM"), ("notes", "AUTO")):
        draft = {"speculative_draft_model_path": str(tmp_path / name)}
        assert automatic(device="cpu", **draft) == algorithm


def test_the_start_says_what_drafts_and_why():
    config = EngineConfig(model="m")
    ngram = resolved_drafting(config, head=False, fault=None)
    assert "NGRAM" in drafting_sentence(config, ngram, False, None)
    sentence = drafting_sentence(config, ngram, False, None)
    assert "no draft is given; --speculative-algorithm OFF is plain decoding)" in sentence
    assert "so far, finished answers (" in sentence and "table" not in sentence
    uncounted = replace(ngram, speculative_ngram_capacity=0)
    assert "lookup in the text so far (AUTO" in drafting_sentence(config, uncounted, False, None)
    beside = drafting_sentence(config, ngram, True, None, own=False)
    assert "so far, the draft's n-gram table, finished answers (" in beside
    tabled = drafting_sentence(config, ngram, True, None)
    assert "so far, the draft's n-gram table (" in tabled and "has an n-gram table" in tabled
    off = resolved_drafting(config, head=False, fault="the draft has no fc.weight")
    assert drafting_sentence(config, off, False, "the draft has no fc.weight") == (
        "drafting: OFF (the draft has no fc.weight)"
    )
    requested = EngineConfig(model="m", speculative_algorithm="NGRAM")
    assert drafting_sentence(requested, ngram, False, None).endswith("(as requested)")
    requested = replace(requested, speculative_algorithm="EAGLE3")
    with_draft = replace(requested, speculative_draft_model_path="folder")
    sentence = drafting_sentence(requested, with_draft, False, None)
    assert "(as requested, by the draft that comes with the model; chains of 8" in sentence
    assert "SGLang's trees are --speculative-num-steps 5" in sentence
    mapped = replace(with_draft, speculative_token_map="map.json")
    assert "; of the tokens in map.json)" in drafting_sentence(mapped, mapped, False, None)
    for size in ({"speculative_num_steps": 3}, {"speculative_eagle_topk": 2}):
        sized = replace(with_draft, **size)
        assert drafting_sentence(sized, sized, False, None).endswith("(as requested, by folder)")
    naive = replace(with_draft, speculative_algorithm="NAIVE_EAGLE", device="cpu")
    assert "--policy fixed drafts always)" in drafting_sentence(naive, naive, False, None)
    for other in ({"policy": "fixed"}, {"device": "cuda"}):
        elsewhere = replace(naive, **other)
        assert "drafts always" not in drafting_sentence(elsewhere, elsewhere, False, None)
    layers = replace(requested, speculative_algorithm="NEXTN")
    assert drafting_sentence(requested, layers, False, None).endswith("by the target's own layers)")


def test_the_start_names_what_the_hub_has():
    """What drafts is n-grams until one is named."""
    config = EngineConfig(model="unsloth/Qwen3-8B-GGUF:Q8_0")
    ngram = resolved_drafting(config, head=False, fault=None)
    sentence = drafting_sentence(config, ngram, False, None)
    there = "; the hub has AngelSlim/Qwen3-8B_eagle3 (EAGLE3), z-lab/Qwen3-8B-DFlash-b16 "
    assert there in sentence
    assert sentence.endswith("(DFLASH): --speculative-draft-model-path takes one)")
    for other in (
        {"model": "m"}, {"speculative_draft_model_path": "none"}, {"speculative_algorithm": "NGRAM"}
    ):  # fmt: skip
        sentence = drafting_sentence(replace(config, **other), ngram, False, None)
        assert "the hub" not in sentence


def test_an_unknown_head_is_named_with_what_there_is():
    config = EngineConfig(model="org/model", speculative_algorithm="EAGLE3")
    with pytest.raises(ConfigError, match=r"none comes with org/model; add .*-path FOLDER\."):
        with_shipped(config)
    with pytest.raises(ConfigError, match=r"FOLDER, or use NEXTN: .* layers of its own\."):
        with_shipped(config, layered=True)
    llama = "Llama-3.1-8B-Instruct"
    for name in (f"meta-llama/{llama}", f"bartowski/Meta-{llama}-GGUF:Q4_K_M"):
        with pytest.raises(ConfigError, match=r"FOLDER, such as yuhuili/EAGLE3-LLaMA3.1-Instruct"):
            with_shipped(replace(config, model=name))
    with pytest.raises(ConfigError, match=r"FOLDER\."):
        with_shipped(replace(config, model="Qwen/Qwen3-14B"))
    block = replace(config, speculative_algorithm="DFLASH", model=f"meta-llama/{llama}")
    with pytest.raises(ConfigError, match=r"FOLDER\."):  # No EAGLE head.
        with_shipped(block)
    with pytest.raises(ConfigError, match=r"such as LiquidAI/LFM2\.5-1\.2B-Instruct-DSpark\."):
        with_shipped(replace(block, model="unsloth/LFM2.5-1.2B-Instruct-GGUF:Q8_0"))


def test_ngrams_alone_may_fill_a_step_of_sixteen_where_nodes_are_bought():
    def most(**changes):
        config = EngineConfig(model="m", executor="cpu", policy="adaptive", **changes)
        return resolved_drafting(config, head=False, fault=None).speculative_num_draft_tokens

    assert most() == 16
    assert most(speculative_num_draft_tokens=5) == 5 and most(speculative_num_steps=3) == 4
    for other in ({"policy": "fixed"}, {"executor": "torch"}):
        config = replace(EngineConfig(model="m", executor="cpu", policy="adaptive"), **other)
        resolved = resolved_drafting(config, head=False, fault=None)
        assert resolved.speculative_num_draft_tokens == 9


@pytest.mark.parametrize(("answers", "counts"), [(True, False), (False, True), (None, True)])
def test_answers_are_counted_beside_a_table_that_has_none(monkeypatch, answers, counts):
    """A table of `train --text` once switched the cache of answers off."""
    table = None if answers is None else SimpleNamespace(answers=answers)
    memory = SimpleNamespace(limits=SimpleNamespace(slots=4))
    monkeypatch.setattr(engine, "ngram_drafter", lambda slots, table, capacity: capacity)
    capacity = engine._lookup(EngineConfig(), SimpleNamespace(table=table, memory=memory))
    assert bool(capacity) is counts


def test_what_cannot_run_recurrent_layers_says_so(tmp_path):
    model = tiny.save_folder(tiny.model("qwen3_next"), tmp_path / "model")
    target = tiny.save_folder(tiny.model("llama"), tmp_path / "target")
    with pytest.raises(ConfigError, match="2 key heads of a gated delta net do not divide by that"):
        open_target(small(model, tp_size=4))
    if cpu.available() is None:
        auto = small(model, "auto", dtype="auto")
        arch = FolderCheckpoint(model).architecture
        assert choose_executor(auto, arch).executor == "cpu"
    with pytest.raises(ModelError, match="which a draft model cannot have"):
        open_target(small(target, draft=model, speculative_algorithm="STANDALONE"))
