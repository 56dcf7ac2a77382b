"""Names of the tools of /v1/responses in the prompt, and the client's names for them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.serve.dialects.responses.free_tools import SHELL

Names = Mapping[tuple[str | None, str], str]
"""(namespace or None, client's name of a tool) -> the model's name of it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool in the client's terms.

    namespace  the group that it is in (Codex); None = in none
    kind       function, custom or local_shell
    """

    name: str
    namespace: str | None
    kind: str


def known_names(tools: Iterable[tuple[str | None, str]]) -> list[str]:
    """Return the model's names of tools, given as (namespace, name): the name, with the namespace
    before it if several tools have that name.
    """
    pairs = list(tools)
    counts = Counter(name for _, name in pairs)
    return [f"{space}__{name}" if space and counts[name] > 1 else name for space, name in pairs]


def offers(tools: list[dict[str, Any]]) -> dict[str, Offer]:
    """Return tools by the model's names.

    tools  checked, as `each_tool` returns them
    """
    found = [Offer(one.get("name", SHELL), one.get("namespace"), str(one["type"])) for one in tools]
    names = known_names((one.namespace, one.name) for one in found)
    return dict(zip(names, found, strict=True))
