"""`forerun serve`: the OpenAI API on a port."""

import argparse
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

from forerun.build.engine import Loaded, load
from forerun.cli.console import load_with_progress, plain_warnings
from forerun.cli.probing import probed
from forerun.cli.several import in_folder, sources
from forerun.cli.start_log import StartLog
from forerun.errors import ConfigError
from forerun.hub.catalog import check_reference
from forerun.options.config import EngineConfig, ServeSettings
from forerun.options.flags import configured
from forerun.serve.logs import configure_logs
from forerun.serve.server import run

log = logging.getLogger("forerun")

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(arguments: argparse.Namespace) -> int:
    """Run the command: serves until a signal ends it. With --json the address is an object."""
    config, settings = prepared(arguments)
    start = StartLog(settings.log_format == "json", arguments.json, settings.ui)
    loader = partial(_load, arguments.probe, start)
    if arguments.more_models or arguments.models_dir:
        named = [arguments.model_word] if arguments.model_word else []
        held = in_folder(Path(arguments.models_dir)) if arguments.models_dir else []
        every = sources([*named, *arguments.more_models, *held], config, loader)
        run(every, settings, start.listening)
    else:
        check_reference(config.model, config.revision)
        run(partial(loader, config), settings, start.listening)
    return 0


def prepared(arguments: argparse.Namespace) -> tuple[EngineConfig, ServeSettings]:
    """The configurations, keys read from their file; logs go where they say from now on.

    Raises ConfigError.
    """
    config, settings = configured(EngineConfig, arguments), configured(ServeSettings, arguments)
    if settings.api_key_file:
        keys = read_keys(Path(settings.api_key_file))
        settings = replace(settings, api_keys=settings.api_keys + keys)
    configure_logs(settings.log_level, settings.log_format)
    if settings.host not in LOOPBACK and not settings.api_keys:
        log.warning("anyone who can reach %s may use this server; see --api-key", settings.host)
    return config, settings


def _load(probe: bool, start: StartLog, config: EngineConfig) -> Loaded:
    began = monotonic()
    config = probed(config, probe)[0]
    if start.as_log:
        with plain_warnings(log.warning):
            loaded = load(config)
    else:
        loaded = load_with_progress(config)
    start.loaded(loaded, began)
    return loaded


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
