"""A folder into which this user may not look: another user's cache, `lost+found`."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from forerun.cli.several import in_folder
from forerun.errors import ModelError, unusable
from tests.models import tiny
from tests.shape.tree import ROOT

RIGHTS = "-dac_override,-dac_read_search"


def program(environment, *line):
    """Run Python without the rights by which root reads everything."""
    prefix = ["setpriv", "--inh-caps", RIGHTS, "--bounding-set", RIGHTS]
    if os.geteuid():
        prefix = []
    elif not shutil.which("setpriv"):
        pytest.skip("root without setpriv may look everywhere")
    return subprocess.run(
        [*prefix, sys.executable, *line],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def closed(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


def test_a_cache_of_another_user_is_none(closed, tmp_path):
    """What needs nothing of it works: a model of the user's own, the list, the doctor."""
    caches = {"XDG_CACHE_HOME": str(closed), "HF_HOME": str(closed / "hub")}
    model = tiny.save_folder(tiny.model("llama"), tmp_path / "model")
    done = program(
        caches,
        "-c",
        "import sys; from forerun.cli.main import main\n"
        "from forerun.hub.catalog import is_here\n"
        "assert not is_here('smollm2-135m')\n"
        "assert main(['models', 'rm', 'smollm2-135m']) == 3\n"
        "assert main(['models', 'list', '--json']) == 0\n"
        "assert main(['doctor', '--no-torch', '--json']) == 0\n"
        "sys.exit(main(['run', sys.argv[1], 'Hi', '--max-tokens', '3']))",
        str(model),
    )
    assert done.returncode == 0, done.stderr
    first, _, rest = done.stdout.partition("\n]\n")
    assert [row["path"] for row in json.loads(first + "]")] == [None]
    assert '"writable": false' in rest


@pytest.mark.parametrize("command", ["run", "serve"])
def test_what_is_named_in_a_closed_folder_is_named_in_the_answer(closed, command):
    for named in ((str(closed),), ("toy", "--speculative-draft-model-path", str(closed / "draft"))):
        line = (*named, "Hi") if command == "run" else (*named, "--port", "0")
        done = program({}, "-m", "forerun", command, *line)
        assert done.returncode in (2, 3), done
        assert str(closed) in done.stderr and "Permission denied" in done.stderr
        assert "Traceback" not in done.stderr, done.stderr


def test_closed_folders_among_models_are_passed_over(closed, tmp_path):
    (tmp_path / "x.gguf").touch()
    done = program(
        {},
        "-c",
        "import sys; from pathlib import Path; from forerun.cli.several import in_folder\n"
        "print(*in_folder(Path(sys.argv[1])))",
        str(tmp_path),
    )
    assert done.stdout.split() == [str(tmp_path / "x.gguf")], done.stderr
    closed.chmod(0o700)
    (closed / "config.json").touch()
    assert in_folder(tmp_path) == [str(closed), str(tmp_path / "x.gguf")]


def test_errors_of_the_system_are_distinguished_from_our_own(tmp_path):
    try:
        (tmp_path / ("x" * 300)).stat()
    except OSError as error:
        assert isinstance(sentence := unusable(error), ModelError) and "x" * 300 in str(sentence)
    assert unusable(FileNotFoundError(2, "No such file", "x")) is None
    assert unusable(PermissionError("no name")) is None and unusable(ValueError()) is None
