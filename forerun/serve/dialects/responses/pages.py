"""Pages of the items of a stored request, in OpenAI's format."""

from collections.abc import Mapping
from typing import Any

from forerun.errors import RequestError
from forerun.serve.bodies.fields import shown

MOST = 100
"""Most items of a page, if the client limits them; without a limit all items are one page."""


def page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of items, the newest first unless the query's `order` is asc. Raises
    RequestError naming the parameter.
    """
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, not {shown(order)}.", "order")
    left = items[::-1] if order == "desc" else items
    if after is not None:
        places = [place for place, one in enumerate(left, 1) if one["id"] == after]
        if not places:
            raise RequestError(f"after: there is no item {shown(after)}.", "after")
        left = left[places[0] :]
    data = left[: _limit(query, len(left))]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": len(data) < len(left), **ends}


def _limit(query: Mapping[str, str], every: int) -> int:
    given = query.get("limit")
    if given is None:
        return every
    known = given.isascii() and given.isdigit() and len(given) <= len(str(MOST))
    if not known or not 1 <= int(given) <= MOST:
        raise RequestError(f"limit must be 1 to {MOST}, not {shown(given)}.", "limit")
    return int(given)
