"""Reads the chat template of a configuration."""

from pathlib import Path

from forerun.errors import ConfigError
from forerun.options.config import EngineConfig
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
