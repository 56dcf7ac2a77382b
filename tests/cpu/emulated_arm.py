"""Run tests of the compiled core as on an ARM machine, under qemu-user: `make test-arm`.

    python -m tests.cpu.emulated_arm [pytest's arguments]

Everything lies in build/arm: Debian's Python for aarch64, wheels of the dependencies for aarch64,
the core from a cross compiler, and a wheel with it. Without arguments: all of tests/cpu, and one
answer of the default model from the installed wheel.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "arm"
COMPILER = "aarch64-linux-gnu-g++"
NEEDS = ("qemu-aarch64", COMPILER, "apt-get", "dpkg")
TO_INSTALL = """\
This needs Debian with qemu-user, a cross compiler and the list of its aarch64 packages:
    dpkg --add-architecture arm64 && apt-get update
    apt-get install qemu-user g++-aarch64-linux-gnu"""
DEBIAN = (
    *("python3.11", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "libgomp1", "zlib1g", "libexpat1", "libssl3", "libffi8"),
    *("libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1", "libcrypt1", "libncursesw6"),
    *("libtinfo6", "libreadline8"),
)
TESTS = ("pytest", "pytest-timeout", "hypothesis", "hatchling")
ORACLES = ("torch==2.8.0", "transformers", "sympy", "mpmath", "networkx", "jinja2", "markupsafe")
ORACLES += ("fsspec", "filelock", "regex", "requests", "packaging", "tqdm")
"""Without their own dependencies, which pip would choose for this machine. The newest torch whose
wheel for aarch64 needs no CUDA."""
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (34, 31, 28, 17)]
PLATFORMS += ["manylinux2014_aarch64"]


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command, in the checkout unless elsewhere; its failure ends this program."""
    done = subprocess.run(command, cwd=cwd, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def add_python() -> None:
    """Unpack Debian's packages."""
    packages, root = HOME / "packages", HOME / "root"
    if root.exists():
        return
    packages.mkdir(parents=True, exist_ok=True)
    names = [f"{name}:arm64" for name in DEBIAN]
    command = ["apt-get", "download", "-q", *names]
    if subprocess.run(command, cwd=packages, check=False).returncode:
        sys.exit(TO_INSTALL)
    for package in sorted(packages.glob("*.deb")):
        run("dpkg", "-x", package, root)


def add_wheels() -> None:
    """Install the dependencies for aarch64."""
    ready = HOME / "site" / ".ready"
    if ready.exists():
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    line = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:"]
    line += ["--python-version", "3.11", "--implementation", "cp", "--target", str(ready.parent)]
    line += [part for name in PLATFORMS for part in ("--platform", name)]
    constraints = HOME / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in lines if not line.startswith("torch")))
    line += ["--upgrade", "-c", str(constraints)]
    run(*line, *project["dependencies"], *TESTS)
    run(*line, "--no-deps", *ORACLES)
    ready.touch()


def launcher(name: str, code: Path) -> Path:
    """Write a command that is Python on aarch64, with the package in `code`; return its path."""
    command, custom, emulator = HOME / name, HOME / "custom", shutil.which("qemu-aarch64")
    custom.mkdir(exist_ok=True)
    # Programs that start Python again start this command: the system cannot run the other.
    (custom / "sitecustomize.py").write_text(
        "import os, sys\nsys.executable = sys._base_executable = os.environ['EMULATED']\n"
    )
    script(
        command,
        f"export EMULATED={command} QEMU_LD_PREFIX={HOME / 'root'}\n"
        f"export RUN_WITH='{emulator} -cpu max' OMP_NUM_THREADS=1\n"
        f"export PYTHONPATH={custom}:{code}:{HOME / 'site'}\n"
        f'exec {emulator} -cpu max {HOME / "root/usr/bin/python3.11"} "$@"\n',
    )
    return command


def script(path: Path, lines: str) -> None:
    """Write a command of the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}")
    path.chmod(0o755)


def add_compiler() -> None:
    """Put the cross compiler before others in the PATH. (In CXX it would be the compiler of tests
    that say another, or none.)
    """
    script(HOME / "bin" / "c++", f'exec {shutil.which(COMPILER)} "$@"\n')
    os.environ["PATH"] = f"{HOME / 'bin'}:{os.environ['PATH']}"


def copy_of_the_checkout() -> Path:
    """Copy what git tracks, so that the core of this machine stays where it is."""
    tree = HOME / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT).decode()
    for name in filter(None, tracked.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    return tree


def answer_from_the_wheel(python: Path, tree: Path) -> None:
    """Build the wheel, and let the package that it installs answer."""
    dist, installed = HOME / "dist", HOME / "installed"
    for folder in (dist, installed):
        shutil.rmtree(folder, ignore_errors=True)
    build = [python, "-m", "hatchling", "build", "-t", "wheel", "-d", dist]
    subprocess.run(build, cwd=tree, check=False)
    wheel = next(dist.glob("*_aarch64.whl"), None)
    if wheel is None:
        sys.exit("no wheel for aarch64 was built")
    zipfile.ZipFile(wheel).extractall(installed)
    command = launcher("installed-python", installed)
    words = ("run", "smollm2-135m", "Say hello", "--max-tokens", "6", "--executor", "cpu")
    run(command, "-m", "forerun", *words, cwd=installed)  # Not the checkout's package.


def main() -> int:
    """Set up what is missing, build and test."""
    if any(shutil.which(name) is None for name in NEEDS):
        sys.exit(TO_INSTALL)
    add_python()
    add_wheels()
    add_compiler()
    tree = copy_of_the_checkout()
    python = launcher("python", tree)
    run(python, tree / "csrc" / "build.py")
    if not sys.argv[1:]:
        answer_from_the_wheel(python, tree)
    arguments = sys.argv[1:] or ["tests/cpu"]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=3600"]
    return subprocess.run([*command, *arguments], cwd=tree, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
