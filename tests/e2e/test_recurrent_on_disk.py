"""Recurrent states on disk: a restart continues behind what was read before, with the same text."""

import os
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from forerun.build import page_store
from forerun.build.engine import load
from forerun.client.completion import complete, make_request
from forerun.engine import disk_pages
from forerun.engine.thread import Engine
from forerun.errors import EngineError
from forerun.executors import cpu
from forerun.executors.state_slots import StateSlots
from forerun.interface.executor import ExecutorLimits
from tests.drafters.kinds import Kinds
from tests.e2e.test_equality_matrix import numbers, recurrent
from tests.models import tiny

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
PROMPT = np.random.default_rng(5).integers(5, 60, 60).astype(np.int32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {
        "qwen3_5_text": Kinds(root)["NEXTN of, qwen3_5_text"].model,
        "lfm2": tiny.save_folder(tiny.model("lfm2"), root / "lfm2"),
    }


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.setattr(page_store, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(disk_pages, "LEAST_SECONDS", 10.0)
    monkeypatch.setattr(disk_pages, "LEAST_READ", 1)
    attach = Engine.attach_store

    def short_prompts_too(engine, store, beside=None):
        attach(engine, store, least=16, beside=beside)

    monkeypatch.setattr(Engine, "attach_store", short_prompts_too)


def served(config, *prompts, salt=""):
    """(cached tokens, tokens) of each prompt, asked in turn, and what the store did."""
    with closing(load(config)) as loaded:
        results = []
        for prompt in prompts:
            request = make_request(prompt, max_tokens=9, temperature=0.8, seed=3)
            ((done,),) = complete(loaded.engine, [replace(request, cache_salt=salt)])
            results.append((done.cached_tokens, done.tokens))
        return results, loaded.engine.stats().store


@pytest.mark.parametrize(
    ("family", "executor", "algorithm", "page"),
    [
        ("qwen3_5_text", "cpu", "NEXTN", 4),
        ("lfm2", "cpu", "NGRAM", 1),
        ("lfm2", "torch", "OFF", 16),
        pytest.param("qwen3_5_text", "torch", "NEXTN", 1, marks=pytest.mark.slow),
    ],
)
def test_a_restart_continues_behind_a_state(folders, tmp_path, family, executor, algorithm, page):
    config = recurrent(folders[family], page, speculative_algorithm=algorithm, **numbers(executor))
    (plain,), _ = served(config, PROMPT)
    config = replace(config, kv_store=str(tmp_path / "kv"), kv_store_size=1 << 24)
    long = np.append(PROMPT, PROMPT[:5])
    (first,), _ = served(config, PROMPT)
    (again, longer), read = served(config, PROMPT, long)
    assert first == plain == (0, again[1])
    assert again[0] >= 59 // page * page - page and read.hits == 1
    assert longer[1] == served(replace(config, kv_store=None, kv_store_size=None), long)[0][0][1]
    other, missed = served(config, PROMPT, salt="another")
    assert other[0][0] == 0 and missed.hits == 0


def test_a_state_is_kept_where_texts_part_that_another_server_read(folders, tmp_path):
    config = recurrent(folders["lfm2"], 4, **numbers("cpu"))
    config = replace(config, kv_store=str(tmp_path / "kv"), kv_store_size=1 << 24)
    for tail, expected in ((6, 0), (7, 0), (8, 48)):
        ((cached, _),), _ = served(config, np.append(PROMPT[:50], [tail] * 20).astype(np.int32))
        assert cached == expected


def test_a_damaged_state_is_a_miss(folders, tmp_path):
    config = recurrent(folders["lfm2"], 4, **numbers("cpu"))
    config = replace(config, kv_store=str(tmp_path / "kv"), kv_store_size=1 << 24)
    (first,), _ = served(config, PROMPT)
    (file,) = (tmp_path / "kv").glob("*/*.states")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    (again,), store = served(config, PROMPT)
    assert again == first and store.hits == store.tokens == 0 and store.misses == {"corrupt": 1}
    (file,) = (tmp_path / "kv").glob("*/*.states")
    os.utime(file, (0, 0))
    (third,), store = served(config, PROMPT)  # It was written anew.
    assert third[0] > 0 and third[1] == first[1] and store.hits == 1
    assert file.stat().st_mtime > 0, "what is used goes last"


def test_states_that_do_not_fit(folders, monkeypatch):
    executor = load(recurrent(folders["lfm2"], 4, **numbers("cpu"))).target.executor
    states = executor.state_contents
    with pytest.raises(EngineError, match="bytes are not a state of"):
        states.write_state(PROMPT, b"x")
    assert states.read_state(PROMPT) is None
    monkeypatch.setattr(states, "put", None)  # As if the device had no memory left.
    with pytest.raises(TypeError):
        states.write_state(PROMPT, bytes(states.state_bytes))
    assert states.read_state(PROMPT) is None, "the row holds the state of another text"
    states.book.check()


def test_the_book_takes_the_row_of_the_oldest():
    limits = ExecutorLimits(4, 8, 1, 8, 64, 99, checkpoints=2)
    book = StateSlots(limits)
    rows = [book.insert(PROMPT[:length]) for length in (4, 8, 12)]
    assert rows == [1, 2, 1] and book.lengths(PROMPT) == [8, 12]
    assert book.row(PROMPT[:4]) is None and book.row(PROMPT[:8]) == 2
    assert book.lengths(PROMPT, b"salt") == [] and book.lengths(PROMPT[:9]) == [8]
    book.check()
    assert StateSlots(replace(limits, checkpoints=0)).insert(PROMPT[:4]) is None
