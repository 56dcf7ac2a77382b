"""Reads the chat template of a configuration, and its variables."""

from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, RequestError
from forerun.options.config import EngineConfig
from forerun.text.chat import RESERVED
from forerun.text.escape import check_json
from forerun.text.json_text import JsonFault, read_json
from forerun.text.known_templates import KNOWN


def template_source(config: EngineConfig, own: str | None) -> str | None:
    """Return the Jinja source of the chat template to use: the configured one, which is a name of
    KNOWN, a template itself, or a file with one; else the model's `own`, which may be None.

    Raises ConfigError if the option is none of these.
    """
    given = config.chat_template
    if given is None:
        return own
    if given in KNOWN:
        return KNOWN[given]
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat-template is {given}, which cannot be read ({error}). Give a file with a Jinja "
            f"template, the template itself, or one of {', '.join(KNOWN)}."
        ) from error


def template_variables(config: EngineConfig) -> dict[str, Any]:
    """Return the configured variables of the chat template. Raises ConfigError if the option is
    not a JSON object, or sets a variable that belongs to requests.
    """
    name = "chat-template-kwargs"
    try:
        found = read_json(config.chat_template_kwargs or "{}")
        check_json(found, name)
    except (JsonFault, RequestError) as error:
        raise ConfigError(f"{name} is not a JSON object: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is {config.chat_template_kwargs}, but must be a JSON object.")
    if own := RESERVED & found.keys():
        raise ConfigError(f"{name} cannot set {min(own)}: it is different in each request.")
    return found
