"""Stores the setting that `forerun tune` measured as the fastest for a model on a machine."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forerun.cache_dir import cache_dir
from forerun.errors import ConfigError
from forerun.machine import cpu_name
from forerun.options.config import EngineConfig
from forerun.version import __version__

_TUNED = (
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "policy",
)
"""Fields of EngineConfig that a profile decides, unless the user decided one of them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of speculation: resolved values of the fields of EngineConfig of these names.
    top-k None: as configured.
    """

    speculative_algorithm: str
    speculative_num_draft_tokens: int
    speculative_num_steps: int
    policy: str
    speculative_eagle_topk: int | None = None

    @property
    def name(self) -> str:
        """The setting as a table shows it: off, or policy, draft tokens and depth."""
        if self.speculative_algorithm == "OFF":
            return "off"
        nodes = self.speculative_num_draft_tokens - 1
        wide = f", top-k {self.speculative_eagle_topk}" if self.speculative_eagle_topk else ""
        return f"{self.policy} {nodes} draft tokens, {self.speculative_num_steps} deep{wide}"

    def on(self, config: EngineConfig) -> EngineConfig:
        """Return a copy of `config` with this setting. Raises ConfigError if they contradict each
        other.
        """
        decided = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(config, **decided)


def path_of(config: EngineConfig) -> Path:
    """Return the file for the profile of a resolved configuration, whether it exists or not. Its
    name depends on everything that decides speed: model, executor, threads, devices, drafter,
    version and machine.
    """
    key = key_of(config, __version__, cpu_name())
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{name}.json"


def key_of(config: EngineConfig, version: str, processor: str) -> str:
    """Return the key of a profile, as JSON text: configurations with the same key have the same
    speed.
    """
    target = [_place(config.model), config.executor, config.device, config.dtype, config.threads]
    target += [config.kv_dtype, config.tp_size, config.disable_cuda_graph]
    draft = _place(config.speculative_draft_model_path)
    drafter = [config.speculative_algorithm, draft, config.draft_shape.width]
    return json.dumps([target, drafter, version, processor])


def _place(reference: str | None) -> str | None:
    """Return a reference that does not depend on the current folder: a path becomes absolute."""
    path = Path(reference) if reference else None
    return str(path.absolute()) if path is not None and path.exists() else reference


def save(config: EngineConfig, setting: Setting, facts: dict[str, Any]) -> Path:
    """Write the profile of a resolved configuration, with facts about its measurement, and return
    its file. Raises ConfigError if it cannot be written.
    """
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


def forget(name: str) -> int:
    """Delete all profiles of the model called `name` and return their number. Other files are left
    alone.
    """
    removed = 0
    for path in (cache_dir() / "profiles").glob("*.json"):
        try:
            if json.loads(path.read_text()).get("model") == name:
                path.unlink()
                removed += 1
        except (OSError, ValueError, AttributeError):
            continue  # Not a profile, and so none of this model.
    return removed


def find(requested: EngineConfig, resolved: EngineConfig) -> Setting | None:
    """Return the stored setting for `resolved`; None if there is none, or if the user `asked` for
    one of its fields. An unreadable file counts as none.
    """
    usual = EngineConfig()
    if any(getattr(requested, name) != getattr(usual, name) for name in _TUNED):
        return None
    try:
        setting = Setting(**json.loads(path_of(resolved).read_text())["setting"])
        setting.on(resolved)
    except (OSError, ValueError, TypeError, KeyError, ConfigError):
        return None
    return setting
