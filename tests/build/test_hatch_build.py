"""Making a wheel leaves the checkout's own compiled core alone, with a compiler and without."""

import runpy
import shutil
import zipfile

import pytest

pytest.importorskip("hatchling")

from hatchling.builders.wheel import WheelBuilder

from tests.shape.tree import ROOT

CORE = "forerun/executors/cpu/_core.so"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a compiler that copies nothing, and the core of an editable installation."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("forerun/__init__.py", "forerun/version.py", "forerun/executors/cpu/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".gitignore").write_text("*.so\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / CORE).write_text("mine")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/build.py").write_text(
        "import os, sys\n"
        "if os.environ['COMPILER'] == 'none':\n    sys.exit('no C++ compiler found')\n"
        "open(sys.argv[1], 'w').write('new')\n"
    )
    return tmp_path


@pytest.mark.parametrize("compiler", ["none", "some"])
def test_a_wheel_has_its_own_core(checkout, tmp_path_factory, monkeypatch, capfd, compiler):
    monkeypatch.setenv("COMPILER", compiler)
    out = tmp_path_factory.mktemp("dist")
    (made,) = WheelBuilder(str(checkout)).build(directory=str(out), versions=["standard"])
    assert (checkout / CORE).read_text() == "mine"
    with zipfile.ZipFile(made) as wheel:
        held = wheel.read(CORE).decode() if CORE in wheel.namelist() else None
    assert held == ("new" if compiler == "some" else None)
    assert ("compiled core was not built" in capfd.readouterr().err) == (compiler == "none")
    assert made.endswith("any.whl") == (compiler == "none")


@pytest.mark.parametrize(("compiler", "left"), [("some", "new"), ("none", None)])
def test_an_editable_installation_compiles_in_place(checkout, monkeypatch, compiler, left):
    monkeypatch.setenv("COMPILER", compiler)
    made = runpy.run_path(str(checkout / "hatch_build.py"))["CustomBuildHook"]
    hook = made(str(checkout), {}, None, None, "", "wheel")
    hook.initialize("editable", {})
    hook.finalize("editable", {}, "")
    library = (checkout / CORE).read_text() if (checkout / CORE).exists() else None
    assert library == left, "better none than one of other sources"


def test_what_tools_leave_behind_is_no_part_of_an_archive():
    """Hatchling reads this file only, and none that a cache brings along."""
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {f"/{tag.parent.name}/" for tag in ROOT.glob(".*/CACHEDIR.TAG")} <= set(ignored)
