"""Tuned profiles: what `forerun tune` found best for one model on one machine, kept on disk."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forerun import __version__
from forerun.config import EngineConfig
from forerun.errors import ConfigError
from forerun.hub.cache_dir import cache_dir
from forerun.machine import cpu_name

_TUNED = ("speculation", "draft_nodes", "draft_depth", "policy")
"""Fields of EngineConfig that a profile decides, where the user decided none of them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to speculate: fields of EngineConfig of the same names."""

    speculation: str
    draft_nodes: int
    draft_depth: int
    policy: str

    @property
    def name(self) -> str:
        """For tables: off, or policy, nodes and depth."""
        if self.speculation == "off":
            return "off"
        return f"{self.policy} {self.draft_nodes} nodes, {self.draft_depth} deep"

    def on(self, config: EngineConfig) -> EngineConfig:
        """`config` with this setting in it."""
        return replace(config, **asdict(self))


def path_of(config: EngineConfig) -> Path:
    """Where the profile is kept that belongs to a resolved configuration.

    Keyed by what decides speed: model, executor, threads, drafter, version and machine.
    """
    target = [config.model, config.executor, config.device, config.dtype, config.threads]
    drafter = [config.speculation, config.draft, config.draft_width]
    key = json.dumps([target, drafter, __version__, cpu_name()])
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{name}.json"


def save(config: EngineConfig, setting: Setting, facts: dict[str, Any]) -> Path:
    """Keep what was found for a resolved configuration. Raises ConfigError where it cannot."""
    path = path_of(config)
    text = json.dumps({"setting": asdict(setting), **facts}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be written ({error})") from error
    return path


def find(asked: EngineConfig, resolved: EngineConfig) -> Setting | None:
    """The setting kept for `resolved`; None where there is none, or where the user `asked` for
    one of the fields that it decides. A file that cannot be read counts as none.
    """
    usual = EngineConfig()
    if any(getattr(asked, name) != getattr(usual, name) for name in _TUNED):
        return None
    try:
        setting = Setting(**json.loads(path_of(resolved).read_text())["setting"])
        setting.on(resolved)
    except (OSError, ValueError, TypeError, KeyError, ConfigError):
        return None
    return setting
