"""An n-gram table of ordinary text: counted beside serving, kept by tokenizer, drafted by."""

import sys
import threading
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from forerun.build import text_table
from forerun.build.drafting import with_shipped
from forerun.build.engine import make_engine, text_table_of
from forerun.build.target import open_target
from forerun.cli import console
from forerun.client.completion import complete, make_request
from forerun.drafters.native_ngram import CpuNgramDrafter
from forerun.drafts.ngram_counts import write_table
from forerun.options.config import EngineConfig
from forerun.text.tokenizer import Tokenizer
from tests.worlds.servers import run_program

MODEL = "smollm2-135m"
WITHOUT_DRAFT = {"model": MODEL, "speculative_draft_model_path": "none", "policy": "fixed"}
PROMPT = "The capital of France is a city that"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(text_table, "cache_dir", lambda: tmp_path)
    return tmp_path / "tables"


@pytest.fixture(scope="module")
def target():
    made = open_target(EngineConfig(**WITHOUT_DRAFT))
    yield made
    made.close()


class TableLog:
    """Remembers tables, and lets a test wait for so many."""

    def __init__(self):
        self.tables, self._more = [], threading.Condition()

    def __call__(self, table):
        with self._more:
            self.tables.append(table)
            self._more.notify_all()

    def wait(self, count):
        with self._more:
            assert self._more.wait_for(lambda: len(self.tables) >= count, 600)


def open_target_config(draft):
    """The configuration that a target has whose draft is named so."""
    return with_shipped(EngineConfig(model=MODEL, speculative_draft_model_path=draft))


def test_none_excludes_the_table_beside_prediction_layers_too():
    for draft, wanted in ((None, True), ("none", False)):
        config = EngineConfig(
            speculative_algorithm="NEXTN+NGRAM", speculative_draft_model_path=draft
        )
        assert with_shipped(config, layered=True).speculative_ngram_text is wanted


def small(tokenizer, vocab):
    """The table of a small part of the text."""
    return text_table.count(tokenizer, vocab, text_table.pieces_of()[:240])


def test_the_text_ships_whole():
    pieces = text_table.pieces_of()
    assert len(pieces) > 4000 and all(0 < len(piece) < 100_000 for piece in pieces)
    assert 4_000_000 < sum(map(len, pieces)) < 5_000_000
    # Any beginning is a sample: code, prose and other scripts.
    first = "".join(pieces[: len(pieces) // 4])
    assert "def " in first and "fn " in first and any(ord(c) > 0x3000 for c in first)


@pytest.mark.model
@pytest.mark.slow
def test_a_table_is_counted_beside_serving_and_kept(cache, target):
    vocab, used = target.memory.limits.vocab, TableLog()
    made = text_table.load_or_count(MODEL, None, target.tokenizer, vocab, used)
    assert "being counted" in made.sentence
    used.wait(2)
    first, whole = used.tables
    assert 1000 < first.contexts < whole.contexts
    again = TableLog()
    kept = text_table.load_or_count(MODEL, None, target.tokenizer, vocab, again)
    assert "with" in kept.sentence and again.tables[0].contexts == whole.contexts
    made.close()


@pytest.mark.model
def test_a_kept_table_is_used_at_once_and_a_damaged_one_is_not(cache, target):
    vocab, path = target.memory.limits.vocab, text_table.file_of(target.tokenizer, 49152)
    path.parent.mkdir(parents=True)
    write_table(small(target.tokenizer, vocab), path)
    used = TableLog()
    assert text_table.load_or_count(MODEL, None, target.tokenizer, vocab, used)._worker is None
    assert used.tables[0].contexts > 1000
    path.write_bytes(path.read_bytes()[:1000])
    made = text_table.load_or_count(MODEL, None, target.tokenizer, vocab, used)
    assert len(used.tables) == 1 and made._worker.poll() is None
    made.close()
    assert made._worker.wait(60) != 0


@pytest.mark.model
def test_an_engine_made_to_be_measured_has_the_kept_table(cache, monkeypatch):
    """As `load` gives it to one that serves: what is tuned is what runs."""
    used = []
    monkeypatch.setattr(CpuNgramDrafter, "use", lambda self, table: used.append(table))
    config = EngineConfig(model=MODEL, policy="fixed", executor="cpu", context=512, kv_tokens=512)
    with closing(open_target(config)) as shipped:
        bare = replace(shipped, table=None)
        assert text_table_of(shipped) is None
        make_engine(bare, bare.config).shutdown()
        assert not used  # None is kept.
        path = text_table.file_of(bare.tokenizer, bare.memory.limits.vocab)
        path.parent.mkdir(parents=True)
        write_table(small(bare.tokenizer, bare.memory.limits.vocab), path)
        for changes in ({}, {"speculative_ngram_text": False}, {"speculative_algorithm": "OFF"}):
            make_engine(bare, replace(bare.config, **changes)).shutdown()
        assert len(used) == 1 and used[0].contexts > 1000
        tables = []
        made = text_table_of(bare, tables.append)
        made.wait()
        assert not made.counting and len(tables) == 1
    assert not open_target_config("none").speculative_ngram_text


def test_interrupting_the_count_of_a_table_closes_what_was_loaded(monkeypatch):
    closed = []

    class Counted:
        counting = True

        def wait(self):
            raise KeyboardInterrupt

        def close(self):
            closed.append("table")

    opened = SimpleNamespace(device=None, close=lambda: closed.append("target"))
    monkeypatch.setattr(console, "open_target", lambda config, report: opened)
    monkeypatch.setattr(console, "text_table_of", lambda target: Counted())
    with pytest.raises(KeyboardInterrupt):
        console.open_shown(EngineConfig(model="toy"))
    assert closed == ["table", "target"]


@pytest.mark.model
def test_a_first_part_is_used_while_all_is_counted(cache, target):
    vocab, path = target.memory.limits.vocab, text_table.file_of(target.tokenizer, 49152)
    path.parent.mkdir(parents=True)
    write_table(small(target.tokenizer, vocab), path.with_suffix(text_table.FIRST_PART))
    used = TableLog()
    made = text_table.load_or_count(MODEL, None, target.tokenizer, vocab, used)
    assert len(used.tables) == 1 and made._worker is not None
    made.close()


def test_what_cannot_be_counted_is_a_warning(cache, caplog):
    """And the model serves without: here there is none of that name."""
    made = text_table.load_or_count(
        "no/such-model-here", None, Tokenizer.byte_level(), 300, TableLog()
    )
    assert made._worker.wait(120) != 0
    for thread in threading.enumerate():
        if thread.name == "forerun-text-table":
            thread.join(60)
    assert "no n-gram table of ordinary text" in caplog.text


def test_a_table_that_the_cache_cannot_store_is_the_process_own(cache, monkeypatch, tmp_path):
    """What is measured where the cache is read-only has it, too. A copy stands for the counting."""
    tokenizer, ready, used = Tokenizer.byte_level(), tmp_path / "ready", TableLog()
    write_table(text_table.count(tokenizer, 300, ["so it goes, " * 99]), ready)
    copies = "import shutil, sys; print(shutil.copy(*sys.argv[1:]))"
    popen = text_table.subprocess.Popen
    monkeypatch.setattr(text_table.os, "access", lambda path, mode: False)
    monkeypatch.setattr(
        text_table.subprocess,
        "Popen",
        lambda command, **pipes: popen(
            [sys.executable, "-c", copies, str(ready), command[-1]], **pipes
        ),
    )
    text_table.load_or_count("any", None, tokenizer, 300, used).wait()
    assert text_table.cached_table(tokenizer, 300) is used.tables[0]
    assert not text_table.file_of(tokenizer, 300).exists()


def test_without_a_folder_that_can_be_written_none_is_counted(cache, monkeypatch, tmp_path):
    """As in a container whose file systems are all read-only: it serves without the table."""
    monkeypatch.setattr(text_table.os, "access", lambda path, mode: False)
    monkeypatch.setattr(text_table.tempfile, "tempdir", str(tmp_path / "none"))
    made = text_table.load_or_count("any", None, Tokenizer.byte_level(), 300, TableLog())
    assert not made.counting and made.sentence.startswith("without an n-gram table")
    made.wait()
    made.close()


def test_tables_belong_to_tokenizers(cache):
    tokenizer = Tokenizer.byte_level()
    assert text_table.file_of(tokenizer, 300) == text_table.file_of(Tokenizer.byte_level(), 300)
    assert text_table.file_of(tokenizer, 300) != text_table.file_of(tokenizer, 301)


@pytest.mark.slow
@pytest.mark.model
def test_a_table_of_ordinary_text_drafts_for_a_model_without_one(target):
    """Acceptance: of the default model without the table of its own answers, on a text that does
    not repeat itself, and the text is the same.
    """
    prompts = ("A good way to learn a new language is to", "The function returns a list of")
    requests = [
        make_request(np.array(target.tokenizer.encode(prompt), np.int32), max_tokens=48,
                     temperature=0.0, ignore_eos=True)
        for prompt in prompts
    ]  # fmt: skip
    table = text_table.count(
        target.tokenizer, target.memory.limits.vocab, text_table.pieces_of()[:1200]
    )
    accepted, texts = [], []
    for tables in ((), (table,)):
        config = target.config
        engine = make_engine(target, config)
        for each in tables:
            engine._parts.drafter._drafter.use(each)
        engine.start()
        done = complete(engine, requests, 1)
        accepted.append(sum(choice.stats.accepted for (choice,) in done))
        texts.append([choice.tokens for (choice,) in done])
        engine.shutdown()
    assert texts[0] == texts[1]
    assert accepted[1] >= accepted[0] + 6, accepted


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have priorities only")
def test_counting_runs_only_while_no_other_process_wants_the_processor():
    """At the lowest priority alone it made the first answers of a server half as fast."""
    program = "import os; from forerun.build import text_table as t; t._stand_back(); "
    program += "print(os.sched_getscheduler(0) == os.SCHED_IDLE, os.nice(0))"
    assert run_program(program).stdout.split() == ["True", "19"]
