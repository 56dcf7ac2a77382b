"""The built-in model drafts for much larger ones that come with no draft."""

from dataclasses import replace

import pytest

from forerun.build import small_draft
from forerun.build.drafting import drafting_sentence, resolved_drafting
from forerun.build.memory import HOST_SHARE, plan_memory
from forerun.build.registry import EXECUTORS
from forerun.build.target import open_target
from forerun.errors import ModelError
from forerun.executors import cpu
from forerun.hub.catalog import open_model
from forerun.options.config import EngineConfig
from tests.models import tiny

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a model of its first layer."""
    root, hf = tmp_path_factory.mktemp("models"), tiny.model("llama")
    first = tiny.model("llama", num_hidden_layers=1)
    first.load_state_dict(hf.state_dict(), strict=False)
    for name, model in (("target", hf), ("small", first)):
        tiny.save_folder(model, root / name)
    return root


@pytest.fixture
def start(folders, monkeypatch):
    """Open the target under some options, where the small model counts `size` bytes."""

    def opened(size=1, **options):
        monkeypatch.setattr(small_draft, "SMALL", str(folders / "small"))
        monkeypatch.setattr(small_draft, "SMALL_BYTES", size)
        config = EngineConfig(
            model=str(folders / "target"), executor="cpu", threads=1, kv_tokens=512, **options
        )
        target = open_target(config)
        target.close()
        return target, drafting_sentence(config, target.config, False, target.fault)

    return opened


def test_it_drafts_beside_n_grams(start, folders):
    target, sentence = start()
    config = target.config
    assert config.speculative_algorithm == "STANDALONE+NGRAM"
    assert config.speculative_draft_model_path == "small"
    assert (config.speculative_num_steps, config.speculative_eagle_topk) == (15, 2)
    assert config.speculative_num_draft_tokens == 16
    assert target.draft_model is not None and target.fault is None
    assert "no draft is given, and small, a much smaller model, is on this machine" in sentence


@pytest.mark.parametrize(
    "options",
    [
        {"size": 1 << 30},
        {"policy": "fixed"},
        {"speculative_algorithm": "NGRAM"},
        {"speculative_draft_model_path": "none"},
    ],
)
def test_it_does_not_where_it_is_no_use_or_not_wanted(start, options):
    target, _ = start(**options)
    assert target.config.speculative_algorithm == "NGRAM"
    assert target.draft_model is None


def test_where_it_is_missing_the_start_says_how_to_get_it(monkeypatch):
    config = EngineConfig(model="m", executor="cpu")
    resolved = resolved_drafting(replace(config, policy="adaptive"), head=False, fault=None)
    large = small_draft.RATIO * small_draft.SMALL_BYTES
    monkeypatch.setattr(small_draft, "is_here", lambda _: False)
    assert "`forerun pull smollm2-135m`" in small_draft.missing(config, resolved, large)
    assert small_draft.missing(config, resolved, large - 1) == ""
    named = replace(config, speculative_draft_model_path="none")
    assert small_draft.missing(named, resolved, large) == ""
    chosen = replace(config, speculative_algorithm="NGRAM")
    assert small_draft.missing(chosen, resolved, large) == ""
    monkeypatch.setattr(small_draft, "is_here", lambda _: True)
    assert small_draft.missing(config, resolved, large) == ""


def test_what_it_cannot_do_costs_nothing(start, monkeypatch):
    """Neither a cached token nor the n-grams."""
    monkeypatch.setattr(small_draft, "fits", lambda *_: False)
    assert start()[0].config.speculative_algorithm == "NGRAM"
    monkeypatch.undo()

    def refused(*_):
        raise ModelError("shares no token")

    monkeypatch.setattr(small_draft, "open_standalone", refused)
    assert start()[0].config.speculative_algorithm == "NGRAM"


def test_what_does_not_load_leaves_n_grams(start, monkeypatch):
    entry = EXECUTORS["cpu"]

    def refused(*_):
        raise ModelError("no such layer")

    monkeypatch.setitem(EXECUTORS, "cpu", replace(entry, draft_model=refused))
    with pytest.warns(UserWarning, match="no such layer"):
        target, _ = start()
    assert target.config.speculative_algorithm == "NGRAM"
    assert target.fault is None


def test_it_takes_no_memory_of_cached_tokens(folders):
    """Where the target alone fills what is free, there is no room for the draft."""
    target = open_model(str(folders / "target"))
    about = target.tokenizer, target.architecture.vocab
    draft = small_draft.open_standalone(str(folders / "small"), None, *about)
    entry, config = EXECUTORS["cpu"], EngineConfig(model="m", chunked_prefill_size=32)
    needs = entry.needs(config, target.architecture, target.checkpoint)
    plan = plan_memory(config, needs, 1 << 36)
    enough = int(sum(plan.describe().values()) / HOST_SHARE) + needs.per_token
    for free, holds in ((enough, False), (1 << 36, True)):
        assert small_draft.fits(config, draft, needs, entry, free) == holds
