"""The chat template of a configuration."""

from pathlib import Path

from forerun.errors import ConfigError
from forerun.options.config import EngineConfig
from forerun.text.known_templates import KNOWN


def template_source(config: EngineConfig, own: str | None) -> str | None:
    """The Jinja source of the chat template to use: the configured one, which is a name of KNOWN, a
    template itself, or a file with one; else the model's `own`, which may be None.

    Raises ConfigError if what is configured is none of these.
    """
    given = config.chat_template
    if given is None:
        return own
    if given in KNOWN:
        return KNOWN[given]
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat-template is a file with a Jinja template, the template itself, or one of "
            f"{', '.join(KNOWN)}; {given} is none of these ({error})."
        ) from error
