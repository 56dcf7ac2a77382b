"""Prompts for measurements and proofs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ConfigError, reason_of

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
"""Prompts written for Forerun: explanations, code, JSON, repetition, reading, arithmetic, other
languages, stories, lists, and conversations of several turns.
"""
LEVELS = 1, 4, 16
"""Default numbers of requests, or sequences, in flight to measure."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that ends with a user message. `kind` groups prompts in reports."""

    id: str
    kind: str
    messages: tuple[dict[str, Any], ...]

    @property
    def text(self) -> str:
        """The content of the last message, for models without a chat template."""
        return str(self.messages[-1]["content"])


def read_prompts(path: str | Path | None = None) -> list[Prompt]:
    """Return the prompts in a jsonl file: one object per line with `messages`, or with `prompt`
    (text); `id` and `kind` are optional. None reads the built-in ones. Raises ConfigError, naming
    file and line, for a file that cannot be read, an invalid line, or no prompt at all.
    """
    path = Path(path or BUILT_IN)
    try:
        # A line of JSON may contain U+2028, at which splitlines() would split it.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The prompts in {path} cannot be read: {reason_of(error)}.") from error
    prompts = [
        _prompt(line, f"{path}, line {number}", number)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt.")
    return prompts


def spread(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """Return `count` prompts, evenly spaced so that every kind is included; all of them for None.
    Raises ConfigError if `count` is below 1 or there are fewer.
    """
    if count is None:
        return list(prompts)
    if not 1 <= count <= len(prompts):
        raise ConfigError(
            f"{count} prompts cannot be taken of {len(prompts)}; choose 1 to {len(prompts)}."
        )
    return [prompts[index * len(prompts) // count] for index in range(count)]


def labelled(prompt: Prompt, label: str) -> Prompt:
    """Return a copy of the prompt with `label` prepended to its first message, so that no prefix is
    shared.
    """
    first, *rest = prompt.messages
    return replace(prompt, messages=(first | {"content": label + first["content"]}, *rest))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of generated requests in tokens, each drawn uniformly from `ratio` times it to all of
    it.

    prompt  None: use the prompts of a file
    answer  None: the request's max_tokens
    """

    prompt: int | None = None
    answer: int | None = None
    ratio: float = 1.0

    def draw(self, longest: int, random: np.random.Generator) -> int:
        """Return one length, in tokens, drawn from `ratio` * `longest` to `longest`."""
        return int(random.integers(max(1, round(self.ratio * longest)), longest + 1))


class GeneratedPrompts:
    """Generates prompts of a given length in tokens, by the server's own count, from random words
    of the built-in prompts.

    counts  {number of words: prompt tokens that the server reported}, for at least two lengths

    Raises ConfigError if longer prompts do not have more tokens.
    """

    def __init__(self, counts: dict[int, int]) -> None:
        (few, least), *_, (many, most) = sorted(counts.items())
        if most <= least:
            raise ConfigError(
                f"The server reports {least} prompt tokens for {few} words and {most} for {many}, "
                "so prompts of a length in tokens cannot be made for it; leave --input-len out."
            )
        self._per_word = (most - least) / (many - few)
        self._around = least - few * self._per_word

    def make(self, tokens: int, random: np.random.Generator) -> Prompt:
        """Return a prompt of about `tokens` tokens."""
        return words_of(round((tokens - self._around) / self._per_word), random)


def words_of(count: int, random: np.random.Generator) -> Prompt:
    """Return a prompt of `count` random words of the built-in prompts; of one word if `count` is
    less.
    """
    text = " ".join(random.choice(_words(), max(1, count)).tolist())
    return Prompt("made", "made", ({"role": "user", "content": text},))


@cache
def _words() -> list[str]:
    return " ".join(prompt.text for prompt in read_prompts()).split()


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
