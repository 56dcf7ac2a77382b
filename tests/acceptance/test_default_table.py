"""The n-gram table that comes with the default model is used, and draft tokens what its card says.

A useless table cannot be seen in the text, so tokens per step are asserted, on the built-in
prompts, beside lookup alone (docs/draft-smollm2-135m.md).
"""

from dataclasses import replace

import pytest

from forerun.build.engine import open_target
from forerun.errors import ConfigError, ModelError
from forerun.executors import cpu
from forerun.hub.catalog import shipped_draft
from forerun.measure.acceptance import LOOKUP, Question, ask
from forerun.measure.workload import read_prompts, spread
from forerun.options.config import EngineConfig

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available())),
]

SMALL = EngineConfig(kv_tokens=2048, policy="fixed", draft_on_error="stop")


@pytest.fixture(scope="module")
def target():
    target = open_target(EngineConfig(kv_tokens=8192, policy="fixed"))
    yield target
    target.close()


def length(target, temperature, count):
    question = Question("built-in", tuple(spread(read_prompts(), count)), temperature, 64, 8)
    (found,) = ask(target, target.config, question, [LOOKUP], lambda *_: None)
    return found.length


def test_the_table_is_the_default(target):
    assert target.config.speculative_draft_model_path == str(shipped_draft("smollm2-135m"))
    assert target.config.speculative_algorithm == "NGRAM"
    assert target.table is not None and target.draft_model is None


@pytest.mark.parametrize(
    ("temperature", "least", "count"),
    [(0.0, 1.8, 8), pytest.param(0.8, 1.55, 16, marks=pytest.mark.slow)],
)
def test_tokens_per_step(target, temperature, least, count):
    with_table = length(target, temperature, count)
    alone = length(replace(target, table=None), temperature, count)
    assert with_table >= least
    assert with_table > 1.12 * alone


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
        ("", "AUTO", "is no folder"),
        ("ngrams.safetensors", "NGRAM", "is no folder"),
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
