"""The Ray Serve application: the front and the replicas."""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from forerun.options.config import EngineConfig, ServeSettings
from forerun.ray.front import Front
from forerun.ray.replica import READY_SECONDS, Replica
from forerun.ray.router import PrefixRouter
from forerun.ray.scale import QueueAndCache, Scale, read

HEALTH_SECONDS, HEALTH_TIMEOUT = 5, 10
"""HEALTH_SECONDS is the interval between two health checks of a replica, HEALTH_TIMEOUT the time
that it has to answer one, both in seconds. A replica that fails three checks is restarted: one that
hangs is found after about 33 seconds, and then has the time of a drain to end.
"""

TRIES = 3
"""Attempts to start a replica, in case the hub does not answer. A faulty model fails each time."""


def replicas(
    config: EngineConfig,
    settings: ServeSettings,
    scale: Scale,
    tries: int = TRIES,
    ready: float = READY_SECONDS,
) -> serve.Application:
    """Return the application of the replicas without a front. Ray Serve does the health checks,
    drains and restarts; a draining replica has `settings.drain_seconds` for its running requests.

    tries  failed starts, before any replica has started, after which Ray gives up
    ready  seconds for each replica to load its model
    """
    how: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.most:
        how = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scale.replicas,
                max_replicas=scale.most,
                target_ongoing_requests=scale.target,
                policy=AutoscalingPolicy(
                    policy_function=f"{QueueAndCache.__module__}:{QueueAndCache.__name__}",
                    policy_kwargs={"target": scale.target, "cache": scale.cache},
                ),
            )
        }
    deployment = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=config.max_sequences + config.max_waiting,
        max_constructor_retry_count=tries,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        **how,
    )
    return deployment.bind(config, settings, ready)


def application(config: EngineConfig, settings: ServeSettings, scale: Scale) -> serve.Application:
    """Return the Ray Serve application: replicas behind a front, which receives requests from Ray's
    proxies. Does not start it.
    """
    front = serve.deployment(
        Front, name="Front", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(replicas(config, settings, scale), settings)


def builder(options: dict[str, str]) -> serve.Application:
    """Return the application from options as text, for `serve run forerun.ray.app:builder model=...
    replicas=2` and for the YAML of KubeRay. Raises ConfigError for an unknown option.
    """
    return application(*read(options))
