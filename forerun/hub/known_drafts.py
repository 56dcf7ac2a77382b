"""Published drafts by target model: known_drafts.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.hub.reference import plain_name
from forerun.options.algorithms import Algorithm, algorithm


@dataclass(frozen=True, slots=True)
class KnownDraft:
    """A row of the table.

    model   the target's name, as `_plain` returns it
    method  the algorithm that runs the draft
    draft   the draft's hub id
    """

    model: str
    method: Algorithm
    draft: str


def known_drafts(reference: str) -> list[KnownDraft]:
    """Return the drafts for the model of a reference, whatever its format and owner, at most one
    per algorithm. Contacts no host.
    """
    named = _plain(reference)
    return [row for row in table() if row.model == named]


def known_draft(reference: str, method: Algorithm) -> str | None:
    """Return the hub id of a draft that `method` runs for the model of a reference; None if none is
    known.
    """
    kind = method.kind, method.block
    found = (row for row in known_drafts(reference) if (row.method.kind, row.method.block) == kind)
    return next((row.draft for row in found), None)


@cache
def table() -> tuple[KnownDraft, ...]:
    """Return all rows of known_drafts.toml."""
    path = Path(__file__).with_name("known_drafts.toml")
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["draft"]
    return tuple(
        KnownDraft(_plain(row["model"]), algorithm(row["algorithm"]), row["draft"]) for row in rows
    )


def _plain(reference: str) -> str:
    """Return a model's name without its owner, file format and quantisation."""
    name = reference.rstrip("/").rsplit("/", 1)[-1].partition(":")[0]
    name = plain_name(name) if name.endswith(".gguf") else name.lower()
    return name.removesuffix("-gguf").removesuffix("-instruct").removeprefix("meta-")
