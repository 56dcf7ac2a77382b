"""The fields of a conversation about reasoning, as several services write them."""

from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.serve.bodies.fields import (
    Declaration,
    Unused,
    accept,
    boolean,
    integer,
    only,
    part,
    takes,
    text,
    whatever,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NO_BUDGET = -1
"""Value of a thinking budget: only max_tokens limits the reasoning."""
thinking_budget = integer(NO_BUDGET, 2**31 - 1)
_WORDS = {"enabled": True, "adaptive": None, "auto": None, "disabled": False}


@takes({"enum": [True, False, *_WORDS]})
def _enabled(value: Any, where: str) -> bool | None:
    """Read whether to reason, as a flag or a word; None = the template decides."""
    known = only(True, False, *_WORDS, why="it is one of these")(value, where)
    return known if isinstance(known, bool) else _WORDS[str(known)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions(Declaration):
    """`reasoning` (OpenRouter) or `thinking` (Z.ai, DeepSeek, Moonshot, LiteLLM).

    enabled  whether to reason; None = the effort or the template decides
    """

    effort: str | None = accept(only(*EFFORTS, why="these are the efforts"))
    max_tokens: int | None = accept(thinking_budget)
    enabled: bool | None = accept(_enabled)

    renamed: ClassVar[dict[str, str]] = {"budget_tokens": "max_tokens", "type": "enabled"}
    unused: ClassVar[dict[str, Unused]] = {
        "exclude": Unused(boolean),
        "summary": Unused(text(64)),
        "keep": Unused(whatever),
        "clear_thinking": Unused(boolean),
    }

    @property
    def requested_effort(self) -> str | None:
        """The requested effort; "none" = no reasoning, None = the template's default."""
        if self.enabled is False:
            return "none"
        return self.effort or ("medium" if self.enabled else None)


_object = part(ReasoningOptions)


@takes({"anyOf": [boolean.schema, {"enum": [*EFFORTS]}, _object.schema]})
def reasoning(value: Any, where: str) -> ReasoningOptions:
    """Read an object with the options, a flag (`enable_thinking` of Qwen's services) or an effort
    (Ollama's `think`).
    """
    if isinstance(value, str):
        return ReasoningOptions(effort=only(*EFFORTS, why="these are the efforts")(value, where))
    return ReasoningOptions(enabled=value) if isinstance(value, bool) else _object(value, where)
