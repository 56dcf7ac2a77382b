"""The smoke preset, and what the trainer promises of the shipped draft beside what is served.

What breaks a draft is noticed on a small target: tests/train/test_served_head.py.
"""

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from forerun.build.target import open_target
from forerun.cli.main import main
from forerun.executors import cpu
from forerun.hub.catalog import open_model
from forerun.measure.acceptance import CHAIN, Question, drafting, mean_length, serve, shaped
from forerun.measure.prove import encode
from forerun.measure.workload import read_prompts, spread
from forerun.options.config import EngineConfig
from tests.train.simulation import Simulation

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


def test_served_is_what_was_simulated():
    """The shipped draft, on prompts it was not trained on."""
    config = EngineConfig(speculative_algorithm="EAGLE", kv_tokens=8192, draft_on_error="stop")
    question = Question("built in", tuple(spread(read_prompts(), 24)), 0.0, 96, 1)
    with closing(open_target(config)) as target:
        without = replace(target.config, speculative_algorithm="OFF")
        plain, _ = serve(target, without, question, lambda *_: None)
        served, _ = serve(target, shaped(target.config, CHAIN), question, lambda *_: None)
        prompts = [encode(target, prompt, question.tokens) for prompt in question.prompts]
        checkpoint, draft = open_model(config.model).checkpoint, target.draft
    known = [(text, np.array(answer.tokens)) for text, answer in zip(prompts, plain, strict=True)]
    simulated = Simulation(checkpoint, draft, True, None).length(known, CHAIN.depth)
    length = mean_length(drafting(served))
    print(f"simulated {simulated:.3f}, served {length:.3f}")
    assert length > 1.3
    assert abs(length / simulated - 1) < 0.02
