"""The server holds what /openapi.json says: schemathesis asks whatever it allows and forbids."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("schemathesis")

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
          "negative_data_rejection")  # fmt: skip


def test_never_a_5xx_and_what_is_forbidden_is_refused(small, tmp_path):
    program = Path(sys.executable).with_name("schemathesis")
    line = [program, "run", f"{small.root}/openapi.json", "--checks", ",".join(CHECKS), "-n", "25",
            "--seed", "1", "--phases", "fuzzing", "--suppress-health-check", "all",
            "--max-time", "200", "--continue-on-failure"]  # fmt: skip
    found = subprocess.run(line, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert small.http.get("/health").json()["status"] == "ok"
