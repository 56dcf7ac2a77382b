"""`forerun serve`: a model behind the OpenAI API."""

import argparse
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from forerun.commands.console import emit_json, load_shown, say
from forerun.config import EngineConfig, ServeSettings
from forerun.errors import ConfigError
from forerun.flags import configured
from forerun.serve.server import run


def main(arguments: argparse.Namespace) -> int:
    """Run the command until a signal ends it."""
    settings = configured(ServeSettings, arguments)
    if arguments.api_key_file is not None:
        settings = replace(settings, api_keys=settings.api_keys + _keys(arguments.api_key_file))
    config = configured(EngineConfig, arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    announce = _as_json if arguments.json else partial(_as_sentence, config.model)
    run(partial(load_shown, config), settings, announce)
    return 0


def _as_sentence(model: str, url: str) -> None:
    say(f"Forerun listens on {url} and loads {model}. Ctrl-C ends it.")


def _as_json(url: str) -> None:
    emit_json({"url": url})


def _keys(path: str) -> tuple[str, ...]:
    """One key per line; blank lines do not count."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}.") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"{path} holds no API key.")
    return keys
