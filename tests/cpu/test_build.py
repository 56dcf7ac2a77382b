"""Building the core: with the compiler that is there, and on machines that have none."""

import importlib.util
import os
import platform
import subprocess
import sys

import pytest

from tests.shape.tree import ROOT

BUILD = ROOT / "csrc" / "build.py"


def build(target, **environment):
    return subprocess.run(
        [sys.executable, str(BUILD), str(target)],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "CXX"} | environment,
    )


def test_no_compiler(tmp_path):
    done = build(tmp_path / "core.so", PATH=str(tmp_path))
    assert done.returncode == 1 and "no C++ compiler found" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_cannot_be_run(tmp_path):
    done = build(tmp_path / "core.so", CXX=str(tmp_path / "c++"))
    assert done.returncode == 1 and "cannot be run" in done.stderr


def test_a_compiler_that_fails_keeps_what_was_there(tmp_path):
    target = tmp_path / "core.so"
    target.write_text("the old one")
    done = build(target, CXX=f"{sys.executable} -c 'raise SystemExit(\"too old\")'")
    assert done.returncode == 1 and "no reason given" not in done.stderr
    assert "too old" in done.stderr
    assert target.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.slow
def test_the_library_is_built_from_these_sources(tmp_path):
    done = build(tmp_path / "core.so")
    assert done.returncode == 0 and not done.stderr
    probe = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).forerun_abi())"
    completed = subprocess.run(
        [sys.executable, "-c", probe, str(tmp_path / "core.so")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(completed.stdout) > 0


def compiler_tool():
    """csrc/build.py as a module."""
    spec = importlib.util.spec_from_file_location("build", BUILD)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Compiles tests/cpu/<name>.cpp with all of csrc and returns the command that runs it, under
    an emulator where one is set (emulated_arm.py)."""
    tool = compiler_tool()
    folder = tmp_path_factory.mktemp("core")
    jobs, objects = [], []
    for source in sorted((ROOT / "csrc").glob("*.cpp")):
        objects.append(str(folder / f"{source.stem}.o"))
        flags = (*tool.FLAGS, *tool.extra_flags(source.name))
        jobs.append([*tool.compiler(), *flags, "-c", str(source), "-o", objects[-1]])
    assert tool.run_all(jobs) == [None] * len(jobs)

    def compile(name, *flags):
        source, made = str(ROOT / "tests" / "cpu" / f"{name}.cpp"), str(folder / name)
        include = f"-I{ROOT / 'csrc'}"
        job = [*tool.compiler(), *tool.FLAGS, *flags, include, source, *objects, "-o", made]
        assert tool.run_all([job]) == [None]
        return [*os.environ.get("RUN_WITH", "").split(), made]

    return compile


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits(program):
    done = subprocess.run(program("same_bits"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("vnni", ("-DEMULATE_VNNI", "-mavx2", "-mfma", "-mf16c")),
        ("512 bits", ("-DEMULATE_WIDE",)),
    ],
)
def test_an_emulated_instruction_set_gives_the_same_bits(program, name, flags):
    """For machines that lack it."""
    if name == "vnni" and platform.machine() != "x86_64":
        pytest.skip("the other instructions of these kernels are x86's")
    made = program("same_bits", *flags)
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout == f"emulated {name}\n"


@pytest.mark.slow
def test_wide_products_in_plain_code_give_the_same_bits(program):
    made = program("wide_bits")
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "7020 products compared" in done.stdout


@pytest.mark.slow
def test_threads_under_stress(program):
    done = subprocess.run(program("pool_test"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
