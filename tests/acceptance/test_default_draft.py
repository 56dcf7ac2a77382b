"""Head and n-gram table that come with the default model reach what their card says, and so do both
in one tree (docs/reference/draft-smollm2-135m.md).

A broken draft cannot be seen in the text, nor a useless table, nor trees that are merged wrongly or
scored so that the wrong nodes are left out. So tokens per step are asserted, on built-in prompts:
of the head the aims of a draft trained on a CPU, which it exceeds; of the table also beside lookup
alone; of both 2.25 were counted, 1.67 of the head alone and 1.84 of n-grams (on MT-bench 2.35, 1.88
and 1.84). Plain decoding answers each question once, for all of them.
"""

import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from forerun.build.target import open_target
from forerun.errors import ConfigError, ModelError
from forerun.executors import cpu
from forerun.hub.catalog import shipped_draft
from forerun.measure.acceptance import (
    CHAIN,
    LOOKUP,
    TREE,
    Question,
    agreement,
    drafting,
    mean_length,
    serve,
    shaped,
)
from forerun.measure.workload import read_prompts, spread
from forerun.options.config import EngineConfig

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available())),
]

AT_LEAST = {(CHAIN, 0.0): 1.35, (TREE, 0.0): 1.5, (CHAIN, 0.8): 1.2}
SMALL = EngineConfig(kv_tokens=2048, policy="fixed", draft_on_error="stop")


@pytest.fixture(scope="module")
def target():
    """A target that takes every algorithm."""
    target = open_target(
        EngineConfig(kv_tokens=8192, policy="fixed", speculative_algorithm="EAGLE+NGRAM")
    )
    yield target
    target.close()


@pytest.fixture(scope="module")
def served(target):
    """(algorithm, shape, count of prompts, ...) -> tokens per step and the levels' agreement, of
    answers that are those of plain decoding.
    """

    def tokens(opened, config, count, temperature):
        question = Question("built-in", tuple(spread(read_prompts(), count)), temperature, 64, 8)
        done, _ = serve(opened, config, question, lambda *_: None)
        return done, [each.tokens for each in done]

    @cache
    def plain(count, temperature):
        config = replace(target.config, speculative_algorithm="OFF")
        return tokens(target, config, count, temperature)[1]

    def ask(algorithm, shape, count=8, temperature=0.0, opened=None):
        opened = opened or target
        config = shaped(replace(opened.config, speculative_algorithm=algorithm), shape)
        done, count_accepted = tokens(opened, config, count, temperature)
        assert count_accepted == plain(count, temperature) and len(count_accepted) == count
        histogram = drafting(done)
        return mean_length(histogram), agreement(histogram)

    return ask


# --- the head ----------------------------------------------------------------------------------


def test_the_default_model_comes_with_a_draft(target):
    assert target.config.speculative_draft_model_path == str(shipped_draft("smollm2-135m"))
    assert target.config.speculative_algorithm == "EAGLE+NGRAM" and target.draft_model is not None


@pytest.mark.parametrize(
    ("shape", "temperature", "count"),
    [
        (CHAIN, 0.0, 4),
        pytest.param(CHAIN, 0.0, 16, marks=pytest.mark.slow),
        pytest.param(TREE, 0.0, 16, marks=pytest.mark.slow),
        pytest.param(CHAIN, 0.8, 16, marks=pytest.mark.slow),
    ],
)
def test_acceptance_length(served, shape, temperature, count):
    length, agreed = served("EAGLE", shape, count, temperature)
    assert length >= AT_LEAST[shape, temperature]
    # A draft token that follows a right one is about as good: the head's cache holds true features.
    assert agreed[1] > 0.6 * agreed[0]


@pytest.mark.slow
def test_a_pickled_head_drafts_as_well(target, served, tmp_path, monkeypatch):
    """As most of the EAGLE family is published: the same text, the same draft tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shipped, folder = shipped_draft("smollm2-135m"), tmp_path / "head"
    folder.mkdir()
    shutil.copy(shipped / "config.json", folder)
    torch.save(load_file(shipped / "model.safetensors"), folder / "pytorch_model.bin")
    named = {"speculative_draft_model_path": str(folder), "speculative_algorithm": "EAGLE"}
    pickled = open_target(replace(target.config, **named))
    length, _ = served("EAGLE", CHAIN, opened=pickled)
    pickled.close()
    assert length >= AT_LEAST[CHAIN, 0.0]


# --- both --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_draft_more_than_either(served):
    length, _ = served("EAGLE+NGRAM", TREE)
    assert length >= 2.1


@pytest.mark.slow
@pytest.mark.parametrize("one", ["EAGLE", "NGRAM"])
def test_one_alone_drafts_less(served, one):
    assert served("EAGLE+NGRAM", TREE)[0] > 1.1 * served(one, TREE)[0]


# --- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "least", "count"),
    [(0.0, 1.8, 8), pytest.param(0.8, 1.55, 16, marks=pytest.mark.slow)],
)
def test_tokens_per_step(target, served, temperature, least, count):
    with_table, _ = served("NGRAM", LOOKUP, count, temperature)
    alone, _ = served("NGRAM", LOOKUP, count, temperature, replace(target, table=None))
    assert with_table >= least
    assert with_table > 1.12 * alone


def test_the_table_is_the_default():
    target = open_target(SMALL)
    assert target.config.speculative_draft_model_path == str(shipped_draft("smollm2-135m"))
    assert target.config.speculative_algorithm == "NGRAM"
    assert target.table is not None and target.draft_model is None
    target.close()


def test_none_means_no_draft_at_all():
    target = open_target(replace(SMALL, speculative_draft_model_path="none"))
    assert target.table is None and target.config.speculative_draft_model_path is None
    assert target.config.speculative_algorithm == "NGRAM"
    target.close()
    for speculation in ("EAGLE", "EAGLE+NGRAM"):
        config = replace(SMALL, speculative_draft_model_path="none")
        with pytest.raises(ConfigError, match="no draft is named"):
            open_target(replace(config, speculative_algorithm=speculation))


@pytest.mark.parametrize(
    ("draft", "speculation", "message"),
    [
        ("", "AUTO", "is neither a folder nor a hub id"),
        ("ngrams.safetensors", "NGRAM", "is neither a folder nor a hub id"),
        (".", "EAGLE", "no head; use --speculative-algorithm NGRAM"),
        (".", "EAGLE+NGRAM", "no head; use --speculative-algorithm NGRAM"),
    ],
)
def test_a_table_alone_has_no_head(tmp_path, monkeypatch, draft, speculation, message):
    shipped = shipped_draft("smollm2-135m") / "ngrams.safetensors"
    (tmp_path / "ngrams.safetensors").write_bytes(shipped.read_bytes())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        open_target(
            replace(SMALL, speculative_draft_model_path=draft, speculative_algorithm=speculation)
        )


def test_a_table_alone_in_a_folder(tmp_path):
    shipped = shipped_draft("smollm2-135m") / "ngrams.safetensors"
    (tmp_path / "ngrams.safetensors").write_bytes(shipped.read_bytes())
    target = open_target(replace(SMALL, speculative_draft_model_path=str(tmp_path)))
    assert target.config.speculative_algorithm == "NGRAM" and target.table is not None
    target.close()


def test_a_folder_without_a_table(tmp_path):
    with pytest.raises(ModelError, match=r"holds no ngrams\.safetensors"):
        open_target(
            replace(
                SMALL, speculative_draft_model_path=str(tmp_path), speculative_algorithm="NGRAM"
            )
        )
    config = replace(SMALL, speculative_draft_model_path=str(tmp_path), draft_on_error="disable")
    with pytest.warns(UserWarning, match="speculation is off"):
        target = open_target(config)
    assert target.config.speculative_algorithm == "OFF" and target.fault is not None
    target.close()
