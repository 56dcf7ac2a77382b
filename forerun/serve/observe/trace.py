"""`speculative_trace`: what each step of a request did (docs/reference/trace.md has the format)."""

from collections.abc import Iterable
from typing import Any

from forerun.engine.trace import DraftRow, StepTrace
from forerun.text.tokenizer import Tokenizer

FIELD = "speculative_trace"


def traced(steps: Iterable[StepTrace], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the JSON of consecutive steps of one choice (docs/reference/trace.md); `tokenizer`
    decodes token ids.
    """
    return [_step(step, tokenizer) for step in steps]


def _step(step: StepTrace, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "step": step.number,
        "position": step.position,
        "ms": round(step.ms, 3),
        "tokens": [_token(token, tokenizer) for token in step.tokens],
        "nodes": _nodes(step.nodes, tokenizer),
        "accepted": step.nodes.accepted,
        "left_out": step.left_out,
        "allowed": step.allowed,
        "reason": step.reason,
    }


def _nodes(row: DraftRow, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    columns = zip(row.tokens, row.parents, row.scores, row.sources, strict=True)
    return [
        {
            **_token(token, tokenizer),
            "parent": parent,
            "score": round(score, 4),
            "source": source.name.lower(),
        }
        for token, parent, score, source in columns
    ]


def _token(token: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a token's id and text; also its bytes if they are not whole characters."""
    piece = tokenizer.token_bytes(token)
    text = piece.decode("utf-8", "replace")
    complete = "\ufffd" not in text
    return (
        {"id": token, "text": text} if complete else {"id": token, "text": text, "bytes": [*piece]}
    )
