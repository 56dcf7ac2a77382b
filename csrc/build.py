"""Compile the core: `python csrc/build.py [library]`. Needs nothing but a C++ compiler.

hatch_build.py runs this on installation; run it by hand while working on csrc/.
Ends with code 1 and the reason on standard error where the library could not be built.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parent / "forerun" / "executors" / "cpu" / "_core.so"
# Products may not be fused or reordered: the same bits on every machine are a promise.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno")
STRICT = ("-Wall", "-Wextra", "-Wno-psabi", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
AVX2 = ("-O3", "-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
X86 = {
    "isa_avx2.cpp": AVX2,
    "isa_avxvnni.cpp": (*AVX2, "-mavxvnni"),
    "isa_avx512vnni.cpp": (*AVX2, "-mavx512vl", "-mavx512vnni"),
    "isa_avx512.cpp": (*AVX2, *AVX512),
    "isa_amx.cpp": (*AVX2, *AVX512, "-mamx-tile", "-mamx-int8"),
}
ARM = {
    "isa_neon.cpp": (
        "-O3",
        "-march=armv8.2-a+dotprod",
    )
}
NAMES = ("c++", "g++", "clang++")


def extra_flags(source: str) -> tuple[str, ...]:
    """What one file needs to use its instruction set on this kind of machine."""
    machine = platform.machine().lower()
    table = (
        X86 if machine in ("x86_64", "amd64") else ARM if machine in ("aarch64", "arm64") else {}
    )
    return table.get(source, ())


def compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, or the first of the usual names."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        sys.exit(f"no C++ compiler found (tried $CXX, {', '.join(NAMES)})")
    return [found]


def run_all(commands: list[list[str]]) -> list[str | None]:
    """Run commands, as many at a time as there are processors. None or what went wrong, each."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(run, commands))


def run(command: list[str]) -> str | None:
    """None, or what went wrong."""
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        return f"{command[0]} cannot be run: {error}"
    return done.stderr.strip()[:4000] or "no reason given" if done.returncode else None


def build(target: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile every csrc/*.cpp and link them to `target`, replacing it at once.

    extra  more flags for compiler and linker, which come last: what a sanitizer needs
           (tests/chaos/sanitize.py)
    """
    command = compiler()
    with tempfile.TemporaryDirectory() as folder:
        # What takes longest first: kernels, once for each instruction set.
        sources = sorted(HERE.glob("*.cpp"), key=lambda path: (path.name[:4] != "isa_", path))
        objects = [str(Path(folder, f"{source.stem}.o")) for source in sources]
        plain = [
            [*command, *FLAGS, *STRICT, *extra, "-c", str(source), "-o", output]
            for source, output in zip(sources, objects, strict=True)
        ]
        tuned = [
            [*job, *extra_flags(source.name), *extra]
            for job, source in zip(plain, sources, strict=True)
        ]
        # A compiler may not know the newest instructions; such a file is then empty.
        again = [job for job, fault in zip(plain, run_all(tuned), strict=True) if fault is not None]
        # A new file, not new contents: a process that runs the old library keeps it.
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        link = [*command, *extra, "-shared", "-pthread", *sorted(objects), "-o", str(staged)]
        try:
            for fault in (*run_all(again), *run_all([link])):
                if fault is not None:
                    sys.exit(f"{command[0]} failed:\n{fault}")
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the core.")
    parser.add_argument("library", nargs="?", type=Path, default=LIBRARY, help="file to write")
    build(parser.parse_args().library)
