"""Which chat template a configuration asks for."""

from pathlib import Path

from forerun.errors import ConfigError
from forerun.options.config import EngineConfig


def template_source(config: EngineConfig, own: str | None) -> str | None:
    """The chat template that was named, else the model's own. Raises ConfigError."""
    if config.chat_template is None:
        return own
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat-template names a file with a Jinja template, but {config.chat_template} cannot "
            f"be read ({error})."
        ) from error
