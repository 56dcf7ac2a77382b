"""Pages on disk of a loaded model: which engines share them, and what users see."""

import os
import shutil
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from forerun.build import page_store
from forerun.build.engine import load
from forerun.cli.start_log import model_facts
from forerun.client.completion import complete, make_request
from forerun.constrain.grammar import Grammar
from forerun.engine import disk_pages
from forerun.errors import ConfigError
from forerun.executors import cpu
from forerun.options.config import EngineConfig
from forerun.options.fields import parse_integer
from tests.models import tiny

native = pytest.mark.skipif(bool(cpu.available()), reason="no compiled core on this machine")
TOY = EngineConfig(model="toy", context=2048, kv_tokens=8192)
PROMPT = np.random.default_rng(3).integers(97, 120, 1100).astype(np.int32)


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.setattr(page_store, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(disk_pages, "LEAST_SECONDS", 10.0)


def served(config, prompt=PROMPT, start=None):
    """(cached tokens, text, info, stats) of a prompt, by a server that begins and ends."""
    with closing(load(config)) as loaded:
        ((done,),) = complete(loaded.engine, [make_request(prompt, max_tokens=8)])
        if start is not None:
            start.update(model_facts(loaded))
        return done.cached_tokens, done.text, loaded.info["kv_store"], loaded.engine.stats()


def test_a_restart_finds_what_was_read(tmp_path):
    config, start = replace(TOY, kv_store=str(tmp_path / "kv"), kv_store_size=10**7), {}
    cached, text, line, _ = served(config)
    assert cached == 0 and line.endswith("kv, at most 10.0 MB, now 0 B; 0 tokens of this model")
    again = served(config, start=start)
    assert again[:2] == (1088, text) and again[3].store.tokens == 1088
    line = "; 1,088 tokens of this model, n-grams of 8 tokens of answers"
    assert start["kv-store"].endswith(line)
    assert served(replace(config, page_size=8))[0] == 0
    assert served(TOY)[2] is None


def test_a_grammar_goes_on_behind_pages_from_disk(tmp_path):
    config = replace(TOY, kv_store=str(tmp_path / "kv"))
    texts = []
    for cached in (0, 1088):
        with closing(load(config)) as loaded:
            grammar = loaded.target.compile(Grammar("regex", "(abc|de){2,4}!"))
            request = make_request(PROMPT, max_tokens=20, grammar=grammar)
            ((done,),) = complete(loaded.engine, [request])
        assert done.cached_tokens == cached
        texts.append(done.text)
    assert texts[0] == texts[1] and texts[0].endswith("!")


def test_a_restart_drafts_as_before(tmp_path, monkeypatch):
    """By what was counted, for this model; by what steps cost, on this machine."""
    config = EngineConfig(
        model="toy", context=512, kv_tokens=4096, policy="adaptive", kv_store=str(tmp_path / "kv")
    )
    lines = []
    for changes in ({}, {}, {"page_size": 8}, {"speculative_num_steps": 3}):
        with closing(load(replace(config, **changes))) as loaded:
            for number in range(0 if lines else 9):
                request = make_request(PROMPT[number:40], max_tokens=60, temperature=1.0)
                complete(loaded.engine, [request])
        lines.append(loaded.info["kv_store"])
    assert lines[0].endswith("0 tokens of this model")
    assert lines[1].endswith("tokens of answers, learnt costs of steps")
    assert lines[2].endswith("0 tokens of this model")
    assert lines[3].endswith("tokens of answers")  # Other drafts have other costs.
    monkeypatch.setattr(page_store, "cores", lambda: 999)
    loaded = load(config)
    loaded.close()
    assert loaded.info["kv_store"].endswith("tokens of answers")


@native
@pytest.mark.parametrize("executor", ["cpu", pytest.param("torch", marks=pytest.mark.slow)])
def test_layers_with_a_window_give_pages_back_beside_a_store(tmp_path, executor):
    folder = tiny.save_folder(tiny.model("gemma3_text", max_position_embeddings=2048), tmp_path)
    config = EngineConfig(
        model=str(folder), executor=executor, device="cpu", threads=1, context=1200,
        kv_tokens=4096, max_sequences=1, dtype="file" if executor == "cpu" else "float32",
    )  # fmt: skip
    cached, text, *_ = served(config)
    assert cached == 0
    config = replace(config, kv_store=str(tmp_path / "kv"))
    for expected in (0, 1088):
        cached, tokens, _, stats = served(config, start=(start := {}))
        assert (cached, tokens, stats.store.hits) == (expected, text, bool(expected))
        assert "for the last 25 tokens" in start["memory"]


@native
def test_other_weights_of_the_same_name_share_nothing(tmp_path):
    folder = tmp_path / "model"
    config = EngineConfig(
        model=str(folder), executor="cpu", kv_store=str(tmp_path / "kv"), threads=1, context=1200,
        speculative_draft_model_path="none", kv_tokens=4096, max_sequences=2, policy="fixed",
    )  # fmt: skip
    models = [tiny.model("llama", max_position_embeddings=2048) for _ in range(2)]
    for value in models[1].parameters():
        value.data += 0.01
    texts, hashed = [], []
    for hf in models:
        shutil.rmtree(folder, ignore_errors=True)
        tiny.save_folder(hf, folder)
        cached, text, *_ = served(config)
        texts.append(text)
        assert cached == 0
        assert served(config)[:2] == (1088, text)
    os.utime(folder / "model.safetensors", ns=(1, 1))  # Hashed again, found equal.
    assert served(config)[:2] == (1088, texts[1])
    assert served(replace(config, dtype="q8_0"))[0] == 0
    narrow = replace(config, kv_dtype="q8_0")
    cached, text, *_ = served(narrow, start=(start := {}))
    assert (
        cached == 0 and " in q8_0 (filled" in start["memory"] and served(narrow)[:2] == (1088, text)
    )
    load(config, lambda what, *_: hashed.append(what)).close()
    assert not [what for what in hashed if "kv-store" in what]  # No file is read for it twice.
    assert len(list((tmp_path / "kv").glob("*/"))) == 4


def test_what_cannot_be_kept(tmp_path):
    with pytest.raises(
        ConfigError, match="kv-store-size limits the size of the kv-store folder, but"
    ):
        EngineConfig(model="toy", kv_store_size=1 << 20)
    with pytest.raises(ConfigError, match="kv-store-size is 5, but must be at least 65536"):
        replace(TOY, kv_store="x", kv_store_size=5)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv-store .*/file cannot be used \(.*name another"):
        load(replace(TOY, kv_store=str(tmp_path / "file")))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10GB", 10**10), ("10 GB", 10**10), ("1.5GiB", 3 << 29), ("2TB", 2 * 10**12),
        ("10G", 10 << 30), ("10g", 10**10), ("64MiB", 64 << 20), ("7", 7),
    ],
)  # fmt: skip
def test_sizes(text, number):
    assert parse_integer(text) == number


@pytest.mark.parametrize("text", ["10XB", "GB", "", "10GBB", "1e3", "-", "10 bytes"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError):
        parse_integer(text)


@pytest.mark.parametrize("name", ["", " ", "~no-such-user/kv"])
def test_a_name_of_no_folder_is_refused(name):
    with pytest.raises(ConfigError, match=r"kv-store is empty|home of a user"):
        page_store._folder(name)


def test_a_full_disk_keeps_no_part_of_a_list_of_hashes(tmp_path, monkeypatch):
    def part(path, text):
        with path.open("w") as file:
            file.write(text[:7])
        raise OSError(28, "No space left on device")

    (tmp_path / "weights").write_bytes(b"weights")
    monkeypatch.setattr(page_store.Path, "write_text", part)
    assert len(page_store._hashes([tmp_path / "weights"], lambda *_: None)) == 1
    assert [*(tmp_path / "cache").iterdir()] == []
