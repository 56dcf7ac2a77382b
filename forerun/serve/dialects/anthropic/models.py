"""The model that is served, in Anthropic's list: for requests with the header anthropic-version."""

from datetime import UTC, datetime
from typing import Any

from forerun.serve.answers.service import Served


def model_card(served: Served) -> dict[str, Any]:
    """Return the entry of one model in /v1/models, in Anthropic's format."""
    created = datetime.fromtimestamp(served.created, UTC)
    return {
        "id": served.name,
        "type": "model",
        "display_name": served.name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": served.loaded.context,
        "max_tokens": served.loaded.context,
    }


def listed(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a page of models, the only one; at least one card."""
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return {"data": cards, "has_more": False, **ends}
