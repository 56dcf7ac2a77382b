"""`forerun serve --replicas N`: the Ray Serve application on this machine alone."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import ray
from ray import serve

from forerun.errors import ConfigError, EngineError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.ray.app import application
from forerun.ray.scale import Scale


def run(
    config: EngineConfig, settings: ServeSettings, count: int, announce: Callable[[str], None]
) -> None:
    """Serve `count` replicas until a signal ends it; returns when all is cleaned up. They share the
    machine's processors where `config.threads` says nothing; of its GPUs each takes `tp_size`.

    announce  is told the URL once every replica has loaded its model

    Raises ConfigError for what Ray Serve's proxy does not do, EngineError where no replica begins.
    """
    if settings.ssl_certfile:
        raise ConfigError("ssl-certfile: replicas have no TLS; put a proxy before them.")
    if settings.port == 0:
        raise ConfigError("port is 0: replicas need a port that is named.")
    ended = threading.Event()
    cores = len(os.sched_getaffinity(0))
    config = replace(config, threads=config.threads or max(1, cores // count))
    gpus = config.tp_size if config.device.startswith("cuda") else 0
    ray.init(include_dashboard=False, log_to_driver=False)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # ray.init has set its own.
        signal.signal(each, lambda *_: ended.set())
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        scale = Scale(replicas=count, cpus=min(1.0, cores / count), gpus=gpus)
        try:
            serve.run(application(config, settings, scale))
        except RuntimeError as error:
            raise EngineError(f"no replica could begin: {error}") from error
        announce(f"http://{settings.host}:{settings.port}/v1")
        ended.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
