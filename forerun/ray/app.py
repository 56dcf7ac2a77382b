"""The Ray Serve application: replicas of the server, and the front before them."""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from forerun.options.config import EngineConfig, ServeSettings
from forerun.ray.front import Front
from forerun.ray.replica import Replica
from forerun.ray.router import PrefixRouter
from forerun.ray.scale import Scale, read

HEALTH_SECONDS = 5
"""Between two looks at a replica's health; three that fail, and it is started anew."""


def application(config: EngineConfig, settings: ServeSettings, scale: Scale) -> serve.Application:
    """The application that `serve.run` runs: streaming, health, drain and restarts are Ray
    Serve's; a replica that drains has `settings.drain_seconds` for what it runs.
    """
    how: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.most:
        how = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scale.replicas,
                max_replicas=scale.most,
                target_ongoing_requests=scale.target,
            )
        }
    replica = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=config.max_sequences + config.max_waiting,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        **how,
    )
    front = serve.deployment(
        Front, name="Front", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(replica.bind(config, settings), settings)


def builder(options: dict[str, str]) -> serve.Application:
    """The same from words, for `serve run forerun.ray.app:builder model=... replicas=2` and for the
    YAML of KubeRay. Raises ConfigError for a word that is no option.
    """
    return application(*read(options))
