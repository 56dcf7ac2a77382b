"""guidellm loads the server and counts what it gets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds.servers import PYTHON, ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("guidellm")


def test_guidellm(real, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    line = [PYTHON, "-m", "forerun", "models", "show", "smollm2-135m", "--tokenizer", tokenizer]
    subprocess.run(line, check=True, capture_output=True, cwd=ROOT)
    program, report = Path(sys.executable).with_name("guidellm"), tmp_path / "report.json"
    data = json.dumps({"prompt_tokens": 20, "output_tokens": 8})
    line = [program, "benchmark", "run", "--target", real.root, "--model", "smollm2-135m",
            "--processor", tokenizer, "--rate-type", "concurrent", "--rate", "2",
            "--max-requests", "4", "--data", data, "--output-path", report,
            "--disable-progress"]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(line, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)
    requests = benchmark["requests"]["successful"]
    assert {request["output_tokens"] for request in requests} == {8}
