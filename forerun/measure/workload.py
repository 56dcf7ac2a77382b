"""Prompts to measure and to prove with."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
"""Written for Forerun: explaining, code, JSON, repetition, reading, sums, other languages,
stories, lists, and conversations of several turns."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that waits for an answer. `kind` groups prompts in reports."""

    id: str
    kind: str
    messages: tuple[dict[str, Any], ...]

    @property
    def text(self) -> str:
        """The content of the last message, for models without a chat template."""
        return str(self.messages[-1]["content"])


def read_prompts(path: Path | None = None) -> list[Prompt]:
    """Prompts of a jsonl file: one object per line with `messages`, or with `prompt` (text); `id`
    and `kind` are optional. None reads the built-in ones.

    Raises ConfigError, which names file and line, for a file that cannot be read, a bad line, or no
    prompt at all.
    """
    path = path or BUILT_IN
    try:
        # A line of JSON may hold U+2028, at which splitlines() would tear it.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"The prompts in {path} cannot be read: {reason}.") from error
    prompts = [
        _prompt(line, f"{path}, line {number}", number)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt.")
    return prompts


def spread(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """`count` prompts, evenly spaced over all so that every kind has its part; all of them for
    None.

    Raises ConfigError if `count` is below 1 or there are fewer.
    """
    if count is None:
        return list(prompts)
    if not 1 <= count <= len(prompts):
        raise ConfigError(f"{count} prompts were asked for, but there are 1 to {len(prompts)}.")
    return [prompts[index * len(prompts) // count] for index in range(count)]


def labelled(prompt: Prompt, label: str) -> Prompt:
    """A copy of the prompt with `label` before its first message, so that no prefix is shared."""
    first, *rest = prompt.messages
    return replace(prompt, messages=(first | {"content": label + first["content"]}, *rest))


def _prompt(line: str, where: str, number: int) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}.") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not an object.")
    messages = entry.get("messages")
    if messages is None and isinstance(entry.get("prompt"), str):
        messages = [{"role": "user", "content": entry["prompt"]}]
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise ConfigError(f"{where} needs `messages` (role and content each) or `prompt`.")
    return Prompt(str(entry.get("id", number)), str(entry.get("kind", "any")), tuple(messages))


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(k), str) for k in ("role", "content")
    )
