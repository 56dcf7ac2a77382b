"""Names by which the model knows the tools of /v1/responses, and what they are to the client."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.serve.dialects.responses.free_tools import SHELL

Names = Mapping[tuple[str | None, str], str]
"""(Namespace or None, own name of a tool) -> the name by which the model knows it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as its client knows it.

    namespace  the group that it is in (Codex); None = in none
    kind       function, custom or local_shell
    """

    name: str
    namespace: str | None
    kind: str


def known_names(tools: Iterable[tuple[str | None, str]]) -> list[str]:
    """Return the names for the model, of tools by namespace and own name: their own, behind the
    namespace where several have the same.
    """
    pairs = list(tools)
    counts = Counter(name for _, name in pairs)
    return [f"{space}__{name}" if space and counts[name] > 1 else name for space, name in pairs]


def offers(tools: list[dict[str, Any]]) -> dict[str, Offer]:
    """Return tools by the names for the model; `tools`: as `each_tool` gives them, checked."""
    found = [Offer(one.get("name", SHELL), one.get("namespace"), str(one["type"])) for one in tools]
    names = known_names((one.namespace, one.name) for one in found)
    return dict(zip(names, found, strict=True))
