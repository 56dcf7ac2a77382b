"""The shipped draft with a configuration that lies: `--probe` reads it rightly again.

Probing itself is tested on a small target (tests/train/test_served_head.py).
"""

import json
import shutil

import pytest

from forerun.cli.main import main
from forerun.executors import cpu
from forerun.hub.catalog import shipped_draft

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available())),
]

TRUE = "features=2/15/27,residual=raw,feedback=raw,theta=100000"


@pytest.mark.parametrize(
    "lies",
    [
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}},  # Off by one layer.
        {"norm_before_residual": True, "norm_output": True},
        {"rope_theta": 500.0},
    ],
)
def test_a_probed_run_tells_what_it_tried_and_uses_the_best(tmp_path, lies, capsys):
    draft = shutil.copytree(shipped_draft("smollm2-135m"), tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | lies))
    line = ["run", "Name the planets.", "--max-tokens", "16", "--kv-tokens", "4096", "--json"]
    assert main([*line, "--speculative-draft-model-path", str(draft), "--probe"]) == 0
    out, err = capsys.readouterr()
    print(err)
    assert json.loads(out)["info"]["config"]["draft_reading"] == TRUE
    assert f"used: --draft-reading {TRUE}" in err
    assert err.count(" tokens) ") >= 12 and err.count("(as configured)") == 1
