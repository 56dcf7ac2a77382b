"""What the trainer promises is what the server reaches; what breaks a draft is noticed."""

import json
from dataclasses import replace
from time import monotonic

import numpy as np
import pytest

from forerun.api import encode_chat, open_target
from forerun.bench.acceptance import CHAIN, guessing, mean_length, shaped
from forerun.bench.prove import answers
from forerun.cli import main
from forerun.completion import make_request
from forerun.config import EngineConfig
from forerun.drafters import heads
from forerun.executors import cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available())),
]

QUESTIONS = ["Why is the sky blue?", "Name the planets.", "How do I boil an egg?", "What is 2+2?"]


def test_the_smoke_preset_trains_a_draft_in_a_minute(tmp_path, capsys):
    started = monotonic()
    assert main(["train", "--preset", "smoke", "--out", str(tmp_path)]) == 0
    assert monotonic() - started < 60
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    losses = [row["loss"] for row in metrics["history"]]
    assert losses[0] <= np.log(metrics["config"]["draft_vocab"])
    assert losses[-1] < losses[0] - 0.3
    capsys.readouterr()
    line = ["run", "Hello", "--draft", str(tmp_path / "draft"), "--kv-tokens", "2048", "--json"]
    assert main([*line, "--max-tokens", "16", "--policy", "fixed", "--compare"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["same_text"] and report["speculation"]["guesses"] > 0


def test_served_is_what_was_simulated(capsys):
    """The shipped draft, on prompts it was not trained on."""
    line = ["eval", "--speculation", "head", "--simulate", "--json", "--temperatures", "0"]
    assert main([*line, "--count", "24", "--tokens", "96", "--kv-tokens", "8192"]) == 0
    chain = json.loads(capsys.readouterr().out)["findings"][0]
    print(f"simulated {chain['simulated']:.3f}, served {chain['length']:.3f}")
    assert chain["shape"] == CHAIN.name
    assert chain["length"] > 1.3
    assert abs(chain["length"] / chain["simulated"] - 1) < 0.02


@pytest.fixture(scope="module")
def target():
    target = open_target(EngineConfig(speculation="head", kv_tokens=4096, policy="fixed"))
    yield target
    target.close()


def serve(target):
    requests = [
        make_request(
            encode_chat(target, [{"role": "user", "content": text}]),
            max_tokens=96,
            ignore_eos=True,
        )
        for text in QUESTIONS
    ]
    done, _ = answers(
        target, replace(shaped(target.config, CHAIN), speculation="head"), requests, 1
    )
    return [item.tokens for item in done], mean_length(guessing(done))


def test_a_starved_draft_is_noticed(target, monkeypatch):
    """Features of the wrong node: the text stays, the acceptance falls."""
    told, good = serve(target)
    true_pass = heads.HeadPass

    def wrong(**fields):
        if (fields["parents"] == -1).all() and (fields["sources"] >= 0).all():
            fields["sources"] = np.zeros_like(fields["sources"])
        return true_pass(**fields)

    monkeypatch.setattr(heads, "HeadPass", wrong)
    again, bad = serve(target)
    assert told == again
    print(f"good {good:.3f}, starved {bad:.3f}")
    assert bad - 1 < 0.7 * (good - 1)
