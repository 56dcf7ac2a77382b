"""`forerun serve`: the OpenAI API on a port."""

import argparse
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from forerun.build.engine import Loaded
from forerun.cli.console import emit_json, load_shown, say
from forerun.cli.probing import probed
from forerun.errors import ConfigError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.options.flags import configured
from forerun.serve.server import run

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(arguments: argparse.Namespace) -> int:
    """Run the command: serves until a signal ends it. With --json the address is an object."""
    config, settings = configured(EngineConfig, arguments), configured(ServeSettings, arguments)
    if settings.api_key_file:
        keys = read_keys(Path(settings.api_key_file))
        settings = replace(settings, api_keys=settings.api_keys + keys)
    level = settings.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")
    if settings.host not in LOOPBACK and not settings.api_keys:
        say(f"forerun: anyone who can reach {settings.host} may use this server; see --api-key")
    run(
        partial(_load, config, arguments.probe),
        settings,
        partial(_announce, as_json=arguments.json, ui=settings.ui),
    )
    return 0


def _load(config: EngineConfig, probe: bool) -> Loaded:
    loaded = load_shown(probed(config, probe)[0])
    device = loaded.target.device
    if device is not None and not device.gpu:  # Of a GPU `load_shown` has told.
        say(device.sentence())
    say(loaded.info["drafting"])
    say(f"{loaded.name}: {loaded.target.memory.sentence()}")
    return loaded


def _announce(url: str, as_json: bool, ui: bool) -> None:
    if as_json:
        emit_json({"url": url})
    else:
        say(f"listening on {url}")
        if ui:
            say(f"web UI at {url.removesuffix('v1')}")


def read_keys(path: Path) -> tuple[str, ...]:
    """API keys, one per line; empty lines and lines that begin with # do not count.

    Raises ConfigError where the file cannot be read or holds none.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The API keys in {path} cannot be read: {error}.") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no API key.")
    return keys
