"""`forerun serve`: serves the OpenAI API on a port."""

import argparse
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

from forerun.build.engine import Loaded
from forerun.cli.command_line import log_notices
from forerun.cli.engine_process import load_served
from forerun.cli.several import Named, in_file, in_folder, on_the_line, sources
from forerun.cli.start_log import StartLog, as_log, model_facts
from forerun.client.engine_process import EngineCommand
from forerun.client.engine_start import EngineProgram, EngineStart
from forerun.errors import ConfigError, reason_of
from forerun.hub.catalog import check_reference
from forerun.options.config import EngineConfig, ServeSettings
from forerun.options.flags import configured_both
from forerun.serve.answers.service import Loader, model_names
from forerun.serve.observe.logs import configure_logs
from forerun.serve.server import run

log = logging.getLogger("forerun")

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(
    arguments: argparse.Namespace,
    program: EngineProgram | None = None,
    begun: EngineStart | None = None,
) -> int:
    """Run the command: serves until a signal ends it. With --json the address is printed as an
    object.

    program  program of the engines' processes; None: engines run in this process
    begun    the process of the only model's engine, if it is already loading
    """
    config, settings = prepared(arguments)
    start = StartLog(as_log(settings), arguments.json, settings.ui)
    source = partial(_source, start, program, begun)
    if arguments.more_models or arguments.models_dir or arguments.models_file:
        run(sources(_models(arguments, config, settings), source), settings, start.listening)
    else:
        check_reference(config.model, config.revision)
        run(source(config), settings, start.listening)
    return 0


def _models(
    arguments: argparse.Namespace, config: EngineConfig, settings: ServeSettings
) -> list[Named]:
    """Return all models to serve: those on the command line, in a folder and in a file. Raises
    ConfigError if --served-name is given, or one cannot be served.
    """
    if settings.served_name:
        raise ConfigError(
            "--served-name names a single model; name several in a file: --models-file."
        )
    named = [arguments.model_word] if arguments.model_word else []
    held = in_folder(Path(arguments.models_dir)) if arguments.models_dir else []
    models = on_the_line([*named, *arguments.more_models, *held], config)
    if arguments.models_file:
        models += in_file(Path(arguments.models_file), arguments.options, config)
    return models


def prepared(arguments: argparse.Namespace) -> tuple[EngineConfig, ServeSettings]:
    """Return the configurations, with the API keys from their file, and set up logging accordingly.
    Raises ConfigError if an option or a key is invalid, or an adapter has the name of the model.
    """
    config, settings = configured_both(EngineConfig, ServeSettings, arguments)
    if settings.api_key_file:
        keys = read_keys(Path(settings.api_key_file))
        settings = replace(settings, api_keys=settings.api_keys + keys)
    names = settings.served_name or model_names(config.model, config.model)
    for name, _ in config.adapters:
        if name in names:
            message = f"lora-modules calls an adapter {name!r}, as the model; give it another name."
            raise ConfigError(message)
    configure_logs(settings.log_level, settings.log_format)
    log_notices(arguments)
    if settings.host not in LOOPBACK and not settings.api_keys:
        log.warning("anyone who can reach %s may use this server; see --api-key", settings.host)
    return config, settings


def _source(
    start: StartLog,
    program: EngineProgram | None,
    begun: EngineStart | None,
    config: EngineConfig,
) -> EngineCommand | Loader:
    """Return the loader of a model, which logs when the model is loaded."""
    if program is None:
        return partial(_load, start, config)
    return EngineCommand(program, config, start.loaded, begun)


def _load(start: StartLog, config: EngineConfig) -> Loaded:
    began = monotonic()
    loaded = load_served(config, start.as_log)
    start.loaded(model_facts(loaded), monotonic() - began)
    return loaded


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys in a file, one per line; empty lines and lines that begin with # are
    ignored. Raises ConfigError if the file cannot be read or has none.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The API keys in {path} cannot be read: {reason_of(error)}.") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no API key.")
    return keys
