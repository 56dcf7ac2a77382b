"""The number of replicas and their resources, and the parsing of options for them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from forerun.errors import ConfigError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.options.flags import own_option


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of replicas, and the resources that Ray reserves for each.

    replicas  the least number of replicas
    most      the greatest number, if there is work for them; 0 = always `replicas`
    target    mean number of requests per replica that autoscaling aims at
    cache     share of the KV cache's pages held by sequences that autoscaling aims at (chosen by
              simulation: docs/use/replicas.md)
    cpus, gpus  that each replica reserves
    """

    replicas: int = 1
    most: int = 0
    target: float = 16.0
    cache: float = 0.7
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}; it must be at least 1.")
        if self.most and self.most < self.replicas:
            raise ConfigError(f"most is {self.most}, fewer than replicas, {self.replicas}.")
        if self.target <= 0:
            raise ConfigError(f"target is {self.target}; it must be above 0.")
        if not 0 < self.cache <= 1:
            raise ConfigError(f"cache is {self.cache}; it must be above 0 and at most 1.")


class QueueAndCache:
    """Ray Serve's autoscaling policy: enough replicas for the number of requests and for the number
    of KV pages held by sequences, whichever needs more. Ray applies bounds and delays.

    target, cache  see Scale
    """

    def __init__(self, target: float, cache: float) -> None:
        self._target, self._cache = target, cache

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas needed, and {}, the policy's state. context: Ray's
        AutoscalingContext, with the replicas' `cache` (Replica.record_autoscaling_stats).
        """
        held = sum((context.aggregated_metrics or {}).get("cache", {}).values())
        return max(context.total_num_requests / self._target, held / self._cache), {}


def read(words: Mapping[str, Any]) -> tuple[EngineConfig, ServeSettings, Scale]:
    """Return the configurations for `words`, options by the name of the flag without its leading
    dashes, or of the field: model=..., max-sequences=8, replicas=2. Raises one ConfigError that
    lists all unknown options and all invalid values.
    """
    options = {name.replace("_", "-"): str(value) for name, value in words.items()}
    problems: list[str] = []
    config, settings = _of(EngineConfig, options, problems), _of(ServeSettings, options, problems)
    numbers = {item.name: item.type for item in fields(Scale)}
    scale: dict[str, Any] = {}
    for name in numbers.keys() & options.keys():
        text = options.pop(name)
        try:
            scale[name] = int(text) if numbers[name] is int else float(text)
        except ValueError:
            problems.append(f"{name} takes a number, not {text!r}.")
    problems += [f"{name} is not an option of replicas, serve or the engine." for name in options]
    if problems:
        raise ConfigError("\n".join(problems))
    found = EngineConfig(**config), ServeSettings(**settings), Scale(**scale)
    device, each = found[0].device, found[0].tp_size
    gpus = found[2].gpus
    if device.startswith("cuda") and (gpus == 0 or gpus < each > 1):
        raise ConfigError(
            f"device is {device}, but gpus is {gpus:g}: Ray hides GPUs from replicas that do not "
            f"reserve them; set gpus={each}."
        )
    return found


def _of(kind: type[Any], options: dict[str, str], problems: list[str]) -> dict[str, Any]:
    """Return the values that `options` has for the fields of `kind`, and remove these options from
    `options`; adds a message per invalid value to `problems`.
    """
    found: dict[str, Any] = {}
    for item in fields(kind):
        option = own_option(item)
        if option.name not in options:
            continue
        try:
            found |= option.assign(option.name, options.pop(option.name))
        except ConfigError as error:
            problems.append(str(error))
    return found
