"""What llama.cpp's own routes may say."""

from dataclasses import dataclass
from typing import Any

from forerun.serve.fields import accept, boolean, need, text
from forerun.serve.messages import messages
from forerun.serve.schema import template_options
from forerun.serve.tools import Tool, tools


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateBody:
    """POST /apply-template."""

    model: str | None = accept(text(256, 1))
    messages: tuple[dict[str, Any], ...] = need(messages)
    tools: tuple[Tool, ...] = accept(tools, ())
    add_generation_prompt: bool | None = accept(boolean)
    chat_template_kwargs: dict[str, Any] | None = accept(template_options)
