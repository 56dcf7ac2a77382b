"""`forerun serve --replicas N`: replicas by Ray Serve on this machine alone, and the front in this
process.
"""

import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import ray
from ray import serve
from ray.serve.api import RunTarget
from ray.serve.handle import DeploymentHandle

from forerun.errors import ConfigError, EngineError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.ray.app import replicas
from forerun.ray.front import Door, Front
from forerun.ray.scale import Scale
from forerun.serve.server import Server, allow_connections, listen, url, uvicorn_config

READY_SECONDS = 1800
"""Replicas that have not loaded their model by then never will."""
LOOK = 0.2
"""Seconds between two looks at how they do."""
RAISED = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception): (.+)$", re.MULTILINE)
"""What a replica failed with, in the traceback that Ray gives."""


def run(
    config: EngineConfig, settings: ServeSettings, count: int, announce: Callable[[str], None]
) -> None:
    """Serve `count` replicas until a signal ends it; returns when all is cleaned up. They share the
    machine's processors where `config.threads` says nothing; of its GPUs each takes `tp_size`.

    announce  is told the URL once every replica has loaded its model

    The first signal drains, as `forerun serve` does. Raises ConfigError where it cannot listen or
    there are too few GPUs, EngineError where Ray or a replica does not begin.
    """
    ended = threading.Event()
    with listen(settings.host, settings.port) as listening:
        allow_connections()
        _start()
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # ray.init has set its own.
            signal.signal(each, lambda *_: ended.set())
        try:
            handle = begun(config, settings, count, ended)
            if handle is not None:
                answer(handle, settings, listening, announce)
        finally:
            serve.shutdown()
            ray.shutdown()


def _start() -> None:
    """Start a Ray cluster on this machine. Raises EngineError where it does not come up: Ray says
    so by exceptions of many kinds.
    """
    try:
        ray.init(include_dashboard=False, log_to_driver=False)
    except Exception as error:
        why = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        raise EngineError(
            f"Ray does not start on this machine ({why}); it may be too busy or have too little "
            "memory. Its logs are in /tmp/ray/session_latest/logs."
        ) from error


def begun(
    config: EngineConfig, settings: ServeSettings, count: int, ended: threading.Event
) -> DeploymentHandle | None:
    """The replicas, all of them loaded; None: they were ended before. Raises as `run`."""
    cores = len(os.sched_getaffinity(0))
    config = replace(config, threads=config.threads or max(1, cores // count))
    gpus = config.tp_size if config.device.startswith("cuda") else 0
    there = int(ray.cluster_resources().get("GPU", 0))
    if gpus * count > there:
        raise ConfigError(
            f"replicas: {count} of {gpus} GPU{'s' * (gpus > 1)} each are {gpus * count}; "
            f"Ray sees {there} here."
        )
    scale = Scale(replicas=count, cpus=min(1.0, cores / count), gpus=gpus)
    serve.start(proxy_location="Disabled")
    app = replicas(config, settings, scale, tries=1)
    (handle,) = serve.run_many(
        [RunTarget(app, route_prefix=None)], wait_for_applications_running=False
    )
    for _ in range(int(READY_SECONDS / LOOK)):
        (one,) = serve.status().applications.values()
        if one.status == "RUNNING":
            return handle
        if one.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            (deployment,) = one.deployments.values()
            raise EngineError(f"no replica could begin: {fault(deployment.message)}")
        if ended.wait(LOOK):
            return None
    (deployment,) = one.deployments.values()
    raise EngineError(
        f"{count} replicas were not ready within {READY_SECONDS:,} seconds. "
        f"{deployment.message or 'They are still loading.'}"
    )


def fault(message: str) -> str:
    """The last error that Ray's message has; all of it where it has none."""
    found = RAISED.findall(message)
    return found[-1] if found else message


def answer(
    handle: DeploymentHandle,
    settings: ServeSettings,
    listening: socket.socket,
    announce: Callable[[str], None],
) -> None:
    """Serve until a signal ends it. The front is in this process: Ray's own proxy would be another
    one on every request's way.
    """
    door = Door(Front(handle, settings), settings)
    announce(url(listening, settings))
    Server(uvicorn_config(door, settings), door).run(sockets=[listening])
