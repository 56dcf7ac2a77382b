"""`forerun serve --replicas N`: replicas with Ray Serve on this machine, and the front in this
process.
"""

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import ray
from ray import serve
from ray.serve.api import RunTarget
from ray.serve.handle import DeploymentHandle

from forerun.build.device import choose_device, cuda_devices
from forerun.errors import ConfigError, EngineError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.ray.app import replicas
from forerun.ray.front import Door, Front
from forerun.ray.replica import READY_SECONDS
from forerun.ray.scale import Scale
from forerun.serve.server import Server, allow_connections, listen, url, uvicorn_config

log = logging.getLogger("forerun.ray")

LOOK, LATER_LOOK = 0.2, 1.0
"""Seconds between two checks of the replicas' state: until requests are accepted, and after
that.
"""
GRACE = 30.0
"""Seconds, beyond replica.READY_SECONDS, for Ray to pass on a replica's report that its time is
over.
"""
RAISED = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception): (.+)$", re.MULTILINE)
"""Matches the message of an exception in the traceback that Ray returns."""


def run(
    config: EngineConfig, settings: ServeSettings, count: int, announce: Callable[[str], None]
) -> None:
    """Serve `count` replicas until a signal ends it; returns when all is cleaned up. The replicas
    share the machine's processors unless `config.threads` is set; each takes `tp_size` GPUs.

    announce  called with the URL once every replica has loaded its model, or at least one has and
              another cannot: the server then runs with those, and logs why the other failed

    The first signal drains, as in `forerun serve`. Raises ConfigError if it cannot listen or there
    are too few GPUs, EngineError if Ray does not start or no replica does.
    """
    config, gpus = on_devices(config, count)
    ended = threading.Event()
    with listen(settings.host, settings.port) as listening:
        allow_connections()
        _start()
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # ray.init has set its own.
            signal.signal(each, lambda *_: ended.set())
        scale = Scale(count, cpus=min(1.0, len(os.sched_getaffinity(0)) / count), gpus=gpus)
        try:
            handle = begun(config, settings, scale, ended)
            if handle is not None:
                watch = threading.Thread(target=watched, args=(count, ended), daemon=True)
                watch.start()
                answer(handle, settings, listening, announce)
        finally:
            ended.set()
            serve.shutdown()
            ray.shutdown()


def _start() -> None:
    """Start a Ray cluster on this machine. Raises EngineError if it does not start, which Ray
    reports with exceptions of many classes.
    """
    try:
        ray.init(include_dashboard=False, log_to_driver=False)
    except Exception as error:
        why = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        raise EngineError(
            f"Ray does not start on this machine ({why}); it may be too busy or have too little "
            "memory. Its logs are in /tmp/ray/session_latest/logs."
        ) from error


def on_devices(config: EngineConfig, count: int) -> tuple[EngineConfig, int]:
    """Return the configuration of each of `count` replicas, with its device and its share of the
    processors, and its number of GPUs. Raises ConfigError if there are too few.
    """
    cores = len(os.sched_getaffinity(0))
    config = replace(config, threads=config.threads or max(1, cores // count))
    device = choose_device(config).device
    if not device.startswith("cuda"):
        return config, 0
    if device != "cuda":
        raise ConfigError(
            f"device is {device}, but Ray gives each replica GPUs of its own, numbered from 0; use "
            "--device cuda."
        )
    there, each = cuda_devices(), config.tp_size
    if count * each <= there:
        return replace(config, device=device), each
    able = there // each
    do = f"lower --replicas to {able}" if able else "lower --tp-size"
    seen = f"torch sees {there} CUDA device{'s' * (there != 1)} here; {do}"
    if not there:
        seen = "torch sees no CUDA device here; leave --device out to run on the CPU"
    raise ConfigError(
        f"replicas is {count}, and each takes {each} GPU{'s' * (each > 1)}, but {seen}."
    )


def begun(
    config: EngineConfig, settings: ServeSettings, scale: Scale, ended: threading.Event
) -> DeploymentHandle | None:
    """Start the replicas. Returns their handle once all of them, or all that can, have loaded the
    model; None if they were ended before. Raises as `run`.
    """
    count = scale.replicas
    serve.start(proxy_location="Disabled")
    app = replicas(config, settings, scale, count, READY_SECONDS)
    (handle,) = serve.run_many(
        [RunTarget(app, route_prefix=None)], wait_for_applications_running=False
    )
    state = look()
    for _ in range(int((READY_SECONDS + GRACE) / LOOK)):
        state = look()
        if state.running == count or (state.running and state.fault):
            return handle
        if state.over:
            raise EngineError(f"no replica could begin: {state.fault}")
        if ended.wait(LOOK):
            return None
    if state.running:
        return handle
    raise EngineError(f"no replica was ready within {READY_SECONDS:,.0f} seconds. {state.fault}")


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The state of the replicas.

    running  number of replicas that serve
    fault    message of a failed replica, since the last time that all of them ran; "" = none
    over     whether none has started and Ray has given up
    """

    running: int
    fault: str
    over: bool


def look() -> ReplicaState:
    """Return the state of the replicas as Ray Serve reports it."""
    (one,) = serve.status().applications.values()
    if not one.deployments:
        return ReplicaState(0, "", False)
    (deployment,) = one.deployments.values()
    running = deployment.replica_states.get("RUNNING", 0)
    return ReplicaState(
        running, fault(deployment.message), one.status == "DEPLOY_FAILED" and not running
    )


def watched(count: int, ended: threading.Event) -> None:
    """Log the number of serving replicas whenever it changes, and why the others do not serve,
    until `ended` is set.
    """
    before = ReplicaState(count, "", False)
    while not ended.is_set():
        try:
            now = look()
        except Exception as error:  # noqa: BLE001 - Ray raises many classes.
            log.debug("Ray does not report the replicas' state: %s", error)
            now = before
        if now.running == count != before.running:
            log.info("all %d replicas are ready", count)
        elif now.running < count and now != before:
            why = now.fault or "The others load the model."
            log.warning("replicas ready: %d of %d. %s", now.running, count, why)
        before = now
        ended.wait(LATER_LOOK)


def fault(message: str) -> str:
    """Return the last error in Ray's message, for users; the whole message if it has none."""
    if found := RAISED.findall(message):
        return str(found[-1])
    if message.rstrip().endswith("ActorDiedError()"):
        return "A replica's process died while it loaded its model, perhaps for lack of memory."
    return message


def answer(
    handle: DeploymentHandle,
    settings: ServeSettings,
    listening: socket.socket,
    announce: Callable[[str], None],
) -> None:
    """Serve until a signal ends it. The front runs in this process: Ray's own proxy would add a hop
    to every request.
    """
    door = Door(Front(handle, settings), settings)
    announce(url(listening, settings))
    Server(uvicorn_config(door, settings), door).run(sockets=[listening])
