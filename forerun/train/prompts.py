"""Reads the chats to answer from a file; invalid lines are recorded and skipped."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Problems:
    """The lines and answers that were skipped, and why: invalid lines, and the number of answers
    with loops and of empty ones.
    """

    bad_lines: list[str] = field(default_factory=list)
    loops: int = 0
    empty: int = 0


def read_prompts(path: Path, problems: Problems) -> Iterator[Messages]:
    """Yield the chats of a jsonl file, each ending with a user's turn: {"messages": [...]},
    {"turns": [...]} (the first turn) or {"prompt": "..."}.

    An invalid line is recorded in problems.bad_lines and skipped. Raises OSError if the file cannot
    be read, when iteration begins.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _messages(json.loads(line))
            except KeyError:
                problems.bad_lines.append(f"{path}:{number}: no messages, turns or prompt")
            except (ValueError, TypeError, IndexError, RecursionError) as error:
                problems.bad_lines.append(f"{path}:{number}: {error}")


def _messages(record: Any) -> Messages:
    """Return the chat of one record. Raises ValueError, KeyError or TypeError if it has none."""
    if "messages" in record:
        messages = [{"role": m["role"], "content": str(m["content"])} for m in record["messages"]]
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if not messages:
            raise ValueError("no user message")
        return messages
    text = record["turns"][0] if "turns" in record else record["prompt"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the prompt is not a text")
    return [{"role": "user", "content": text}]
