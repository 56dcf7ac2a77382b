"""The server holds what /openapi.json says: schemathesis asks whatever it allows and forbids, one
round of all operations after the other until the time is over.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds.real_server import NIGHTLY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
pytest.importorskip("schemathesis")

SECONDS = 1200 if NIGHTLY else 170
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
          "negative_data_rejection")  # fmt: skip
CONFIG = """[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429]

[[operations]]
include-path-regex = ".*(chat|messages|responses).*"
checks.negative_data_rejection.expected-statuses = [200, 400, 401, 404, 413, 415, 422, 429]
"""
"""How a server may refuse. 413: what breaks `maxItems` may be too large to be read at all. What an
earlier turn of a conversation holds is left out and named instead of refused, which no schema can
say.
"""


def test_never_a_5xx_and_what_is_forbidden_is_refused(small, tmp_path):
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    program = Path(sys.executable).with_name("schemathesis")
    line = [program, "run", f"{small.root}/openapi.json", "--checks", ",".join(CHECKS), "-n", "25",
            "--seed", "1", "--phases", "fuzzing", "--suppress-health-check", "all", "--workers",
            "2", "--max-time", str(SECONDS), "--continue-on-failure"]  # fmt: skip
    done = subprocess.run(line, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = re.search(r"Selected: (\d+)/\d+\s+Tested: (\d+)", done.stdout)
    assert counts and counts[1] == counts[2], done.stdout[-2000:]
    assert small.http.get("/health").json()["status"] == "ok"
