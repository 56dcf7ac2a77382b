"""Models in Anthropic's list: for requests with the header anthropic-version."""

from datetime import UTC, datetime
from typing import Any


def model_card(name: str, created: int, context: int | None) -> dict[str, Any]:
    """Return the entry of one model in /v1/models, in Anthropic's format. created: seconds since
    1970; context: None = it is not loaded.
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
    """Return a page of models, the only one; at least one card."""
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return {"data": cards, "has_more": False, **ends}
