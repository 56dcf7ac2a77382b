"""Lists of models in Anthropic's format, for requests with the header anthropic-version."""

from datetime import UTC, datetime
from typing import Any


def model_card(name: str, created: int, context: int | None) -> dict[str, Any]:
    """Return a model's entry in /v1/models, in Anthropic's format.

    created  seconds since 1970
    context  tokens; None = it is not loaded
    """
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def listed(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the list of models as one page; `cards` has at least one entry."""
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return {"data": cards, "has_more": False, **ends}
