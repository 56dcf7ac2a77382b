"""Token maps: three formats, one of which is a program that is not run."""

import json
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from forerun.build import token_map as counted
from forerun.build.drafting import DraftParts
from forerun.build.sizing import described, sizing
from forerun.build.token_map import forced_ids, token_map
from forerun.client.llm import LLM
from forerun.drafts.token_map import read_token_map, write_token_map
from forerun.errors import ConfigError, ModelError
from forerun.executors import cpu
from forerun.options.config import EngineConfig
from forerun.text.tokenizer import Tokenizer
from tests.drafters.prediction import random_layer, with_layers
from tests.models import tiny

IDS = [*range(0, 3000, 2), 255, 256, 65535, 65536, 70001]
VOCAB = 70002


def archive(path, program):
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("freq/data.pkl", program)
        made.writestr("freq/version", "3\n")
    return path


def test_every_format_says_the_same(tmp_path):
    torch.save(IDS, tmp_path / "freq.pt")
    save_file({"ids": np.array(IDS, np.int64)}, tmp_path / "a.safetensors")
    save_file({"hot": np.array(IDS, np.int32)}, tmp_path / "b.safetensors")
    write_token_map(np.array(IDS, np.int32), tmp_path / "c.json")
    for name in ("freq.pt", "a.safetensors", "b.safetensors", "c.json"):
        token_map = read_token_map(tmp_path / name, VOCAB)
        assert token_map.tolist() == sorted(set(IDS)) and token_map.dtype == np.int32
    for protocol in (2, 3, 4, 5):
        for ids in ([7], [1, 2], IDS):
            path = archive(tmp_path / "p.pt", pickle.dumps(ids, protocol))
            assert read_token_map(path, VOCAB).tolist() == sorted(set(ids))


class Call:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("held", [Call(), [1, Call()], {"a": 1}, (1, 2), [1.5], ["x"], [[1]], 7])
def test_nothing_else_is_read_and_nothing_is_executed(tmp_path, held, capsys):
    path = archive(tmp_path / "x.pt", pickle.dumps(held, 2))
    with pytest.raises(ModelError, match="not a plain list of token ids"):
        read_token_map(path, VOCAB)
    assert capsys.readouterr().out == ""


def test_damage_is_one_sentence(tmp_path):
    whole = pickle.dumps(IDS, 2)
    for end in (0, 1, 2, 5, 40, len(whole) - 1):
        with pytest.raises(ModelError, match="not a plain list"):
            read_token_map(archive(tmp_path / "cut.pt", whole[:end]), VOCAB)
    (tmp_path / "old.pt").write_bytes(whole)
    (tmp_path / "word.json").write_text('["a"]')
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "x.bin").write_text("[]")
    save_file({"a": np.zeros((2, 2), np.int64)}, tmp_path / "flat.safetensors")
    for name, problem in (
        ("old.pt", "cannot be read as a torch archive"), ("word.json", "a JSON list of token ids"),
        ("none.json", "names no token"), ("x.bin", "must be .json"), ("y.pt", "there is no token"),
        ("flat.safetensors", "one vector"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=problem):
            read_token_map(tmp_path / name, VOCAB)
    (tmp_path / "far.json").write_text(json.dumps([5, 320]))
    with pytest.raises(ModelError, match=r"names id 320, outside 0\.\.319"):
        read_token_map(tmp_path / "far.json", 320)


def test_a_damaged_archive_is_one_sentence(tmp_path):
    """Bit by bit: zipfile has a different exception for many of them."""
    whole = archive(tmp_path / "x.pt", pickle.dumps([1, 2, 3], 2)).read_bytes()
    refused = 0
    for bit in range(8 * len(whole)):
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        (tmp_path / "x.pt").write_bytes(spoilt)
        try:
            assert read_token_map(tmp_path / "x.pt", VOCAB).tolist() == [1, 2, 3]
        except ModelError:
            refused += 1
    assert refused > 400, "what is stored, its sums and its lengths"


def test_a_list_of_single_appends_takes_linear_time(tmp_path):
    """Half a million ids, each appended by an instruction of its own: no copy of what is there."""
    count = 500_000
    program = b"\x80\x02]" + b"K\x07a" * count + b"."
    assert read_token_map(archive(tmp_path / "x.pt", program), VOCAB).tolist() == [7]


def test_a_map_is_counted_from_text(tmp_path):
    spec = tmp_path / "tokenizer.json"
    tiny.tokenizer().save(str(spec))
    tokenizer = Tokenizer.from_file(spec)
    text = tmp_path / "text"
    text.write_text("the quick brown fox " * 50)
    size = len(forced_ids(tokenizer)) + 4
    ids = token_map(text, tokenizer, tiny.VOCAB, size)
    assert len(ids) == size and {*forced_ids(tokenizer).tolist()} <= {*ids.tolist()}
    free = np.bincount(tokenizer.encode(text.read_text()), minlength=tiny.VOCAB)
    free[forced_ids(tokenizer)] = 0
    assert {*np.argsort(-free, kind="stable")[:4].tolist()} <= {*ids.tolist()}
    with pytest.raises(ConfigError, match="draft-vocab is 3"):
        token_map(text, tokenizer, tiny.VOCAB, 3)


@pytest.fixture(scope="module")
def layered(tmp_path_factory):
    hf = tiny.model("llama")
    return str(
        with_layers(hf, [random_layer(hf, 1)], tmp_path_factory.mktemp("layered"), "deepseek")
    )


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """Every vocabulary is large; the texts that were counted so far."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(counted, "MIN_VOCAB", 1)
    monkeypatch.setattr(counted, "SIZE", tiny.VOCAB - 20)
    runs = []

    def pieces_of():
        runs.append(["the quick brown fox"])
        return runs[-1]

    monkeypatch.setattr(counted.text_table, "pieces_of", pieces_of)
    return runs


def answered(model, **options):
    """The ids of an answer, and what the start says of the engine."""
    options = {"context": 64, "max_sequences": 1, "policy": "fixed", "threads": 1} | options
    with LLM(model, executor="cpu", speculative_algorithm="NEXTN", **options) as llm:
        (answer,) = llm.generate("the quick brown", max_tokens=12, temperature=0, ignore_eos=True)
        drafter = llm.loaded.engine.describe()["drafter"]
        return answer.tokens, llm.loaded, drafter


@pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
def test_a_large_vocabulary_is_drafted_from_a_counted_map(layered, counting):
    whole, loaded, drafter = answered(layered, speculative_token_map="none")
    assert not counting and loaded.config.speculative_token_map is None
    assert "draft_vocabulary" not in drafter and "of the tokens in" not in loaded.info["drafting"]
    for _ in range(2):  # The second start reads what the first has counted.
        limited, loaded, drafter = answered(layered)
        assert limited == whole and len(counting) == 1
        named = loaded.config.speculative_token_map
        assert f"of the tokens in {named}" in loaded.info["drafting"]
        held = read_token_map(Path(named), tiny.VOCAB)
        left_out = np.mean([id not in held for id in whole])
        share = {"size": tiny.VOCAB - 20, "left_out": round(float(left_out), 4)}
        assert drafter["draft_vocabulary"] == share


@pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
def test_a_map_that_cannot_be_kept_costs_nothing(layered, counting, monkeypatch, caplog):
    def full(ids, path):
        raise OSError("the disk is full")

    monkeypatch.setattr(counted, "write_token_map", full)
    _, loaded, _ = answered(layered)
    assert loaded.config.speculative_token_map is None and "NEXTN" in loaded.info["drafting"]
    assert "drafts score all" in caplog.text and "the disk is full" in caplog.text


@pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
def test_a_plan_counts_the_map_that_loading_would_make(layered, counting, tmp_path):
    """The rows of its tokens are a copy; planning counts no text."""

    def weights(**options):
        config = EngineConfig(
            model=layered, executor="cpu", speculative_algorithm="NEXTN", context=64, **options
        )
        return sizing(config, described(config), 1 << 33).draft

    named = tmp_path / "map.json"
    write_token_map(np.arange(100, dtype=np.int32), named)
    whole, rows = weights(speculative_token_map="none"), tiny.VOCAB - 20
    row = 64 * 34 // 32
    assert weights() - whole == rows * row and not counting
    assert weights(speculative_token_map=str(named)) - whole == 100 * row


def test_no_map_is_counted_for_drafts_that_take_none(counting):
    """Small vocabularies, other devices, drafts with a vocabulary of their own."""

    def limited(_):
        raise ModelError("it brings its own")

    config, target = EngineConfig(model="m", device="cpu"), SimpleNamespace(
        tokenizer=None, architecture=SimpleNamespace(vocab=tiny.VOCAB)
    )  # fmt: skip
    own = DraftParts(SimpleNamespace(vocab=200_000, limited=limited))
    assert counted.with_token_map(config, target, own) is own
    other = replace(config, device="cuda")
    assert counted.with_token_map(other, target, own) is own
    small = DraftParts(SimpleNamespace(vocab=0))
    assert counted.with_token_map(config, target, small) is small and not counting


@pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
@pytest.mark.parametrize("damage", ["", "[1, 2", "[]", "[999999]"])
def test_a_damaged_map_in_the_cache_is_counted_again(layered, counting, damage):
    """It once turned speculation off, at every start."""
    _, loaded, _ = answered(layered)
    path = Path(loaded.config.speculative_token_map)
    sound = path.read_text()
    path.write_text(damage)
    _, loaded, _ = answered(layered)
    assert "NEXTN" in loaded.info["drafting"]
    assert len(counting) == 2 and path.read_text() == sound


def test_a_named_map_that_nothing_uses_is_an_error_and_none_is_not(tmp_path):
    folder = tiny.save_folder(tiny.model("llama"), tmp_path / "plain")
    named = tmp_path / "map.json"
    write_token_map(np.arange(100, dtype=np.int32), named)
    how = {"context": 64, "max_sequences": 1, "executor": "cpu"}
    with pytest.raises(ConfigError, match="NGRAM has none; leave it out"):
        LLM(str(folder), speculative_token_map=str(named), **how)
    with LLM(str(folder), speculative_token_map="none", **how) as llm:
        assert "NGRAM" in llm.loaded.info["drafting"] and "none" not in llm.loaded.info["drafting"]
