"""The smoke preset, and what the trainer promises of the shipped draft beside what is served.

What breaks a draft is noticed on a small target: tests/train/test_served_head.py.
"""

import json

import numpy as np
import pytest

from forerun.cli.main import main
from forerun.executors import cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available())),
]


def test_the_smoke_preset_trains_a_draft(tmp_path, capsys):
    assert main(["train", "--preset", "smoke", "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    losses = [row["loss"] for row in metrics["history"]]
    # A head that knows nothing begins at log V, and a little above it by its small random logits.
    unknowing = np.log(metrics["config"]["draft_vocab"])
    assert losses[0] < unknowing + 0.05 and losses[-1] < unknowing - 2
    capsys.readouterr()
    line = [
        "run",
        "Hello",
        "--speculative-draft-model-path",
        str(tmp_path / "draft"),
        "--kv-tokens",
        "2048",
        "--json",
    ]
    assert main([*line, "--max-tokens", "16", "--policy", "fixed", "--compare"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["same_text"] and report["speculation"]["draft_tokens"] > 0


def test_served_is_what_was_simulated(capsys):
    """The shipped draft, on prompts it was not trained on."""
    line = [
        "eval",
        "--speculative-algorithm",
        "eagle",
        "--simulate",
        "--json",
        "--temperatures",
        "0",
    ]
    assert main([*line, "--count", "24", "--tokens", "96", "--kv-tokens", "8192"]) == 0
    chain = json.loads(capsys.readouterr().out)["findings"][0]
    print(f"simulated {chain['simulated']:.3f}, served {chain['length']:.3f}")
    assert chain["shape"] == "chain of 3"
    assert chain["length"] > 1.3
    assert abs(chain["length"] / chain["simulated"] - 1) < 0.02
