"""Drafts that are published for models: the table that ships, and a user's own before it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, reason_of
from forerun.hub.reference import hub_reference, plain_name
from forerun.options.algorithms import Algorithm, algorithm

SHIPPED = Path(__file__).with_name("known_drafts.toml")
_KEYS = ("model", "algorithm", "draft")


@dataclass(frozen=True, slots=True)
class KnownDraft:
    """A row of a table.

    model   the target's plain name
    method  the algorithm that runs the draft
    draft   its hub id
    """

    model: str
    method: Algorithm
    draft: str

    @property
    def fits(self) -> tuple[str, str, bool]:
        """The target and the kind of draft, of which a table has one row."""
        return (self.model, self.method.kind, self.method.block)


def known_drafts(reference: str, own: str | None = None) -> list[KnownDraft]:
    """Return the drafts for the model of a reference, in any form and from any owner, at most one
    of each kind: those that ship, each replaced by the one of its kind in the file `own`, and the
    others of that file. Contacts no host.

    Raises ConfigError naming the file, and the row of what is wrong in it.
    """
    rows = read_known_drafts(SHIPPED) + (read_known_drafts(Path(own)) if own else [])
    named = _plain(reference)
    return list({row.fits: row for row in rows if row.model == named}.values())


def known_draft(reference: str, method: Algorithm, own: str | None = None) -> str | None:
    """Return the hub id of a draft that `method` runs for the model of a reference; None if none is
    known. own, errors: as of known_drafts.
    """
    found = {row.fits[1:]: row.draft for row in known_drafts(reference, own)}
    return found.get((method.kind, method.block))


def read_known_drafts(path: Path) -> list[KnownDraft]:
    """Read a table (TOML): [[draft]] rows of model, algorithm and draft. Raises ConfigError naming
    the file, and the line or the row of an unknown or missing key, a value that cannot be used, or
    a second draft of one kind for a model.
    """
    try:
        table = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"known drafts: {path} cannot be read: {reason_of(error)}.") from error
    rows, others = table.pop("draft", []), sorted(table)
    if others or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        named = f"the key {others[0]!r}" if others else "a key 'draft' that is no list of tables"
        raise ConfigError(f"known drafts: {path} has {named}; it may hold [[draft]] rows only.")
    read: dict[tuple[str, str, bool], int] = {}
    found = []
    for number, row in enumerate(rows, 1):
        where = f"known drafts: {path}, [[draft]] {number}"
        one = _row(row, where)
        if one.fits in read:
            raise ConfigError(
                f"{where}: [[draft]] {read[one.fits]} has a draft of that kind for "
                f"{row['model']!r} already; remove one."
            )
        read[one.fits] = number
        found.append(one)
    return found


def _row(row: dict[str, Any], where: str) -> KnownDraft:
    unknown, missing = sorted(set(row) - set(_KEYS)), [key for key in _KEYS if key not in row]
    if unknown or missing:
        wrong = f"unknown key {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
        raise ConfigError(f"{where}: {wrong}; a row has {', '.join(_KEYS)}.")
    for key in _KEYS:
        if not isinstance(row[key], str) or not row[key].strip():
            raise ConfigError(f"{where}: {key} is {row[key]!r}, but must be a text.")
    try:
        method = algorithm(row["algorithm"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not method.model or method.lookup:
        raise ConfigError(
            f"{where}: algorithm is {row['algorithm']!r}, which runs no draft alone; write EAGLE3, "
            "DFLASH, NEXTN, STANDALONE or FROZEN_KV_MTP."
        )
    if not _plain(row["model"]):
        raise ConfigError(f"{where}: model is {row['model']!r}, which names none.")
    if hub_reference(row["draft"]) is None:
        raise ConfigError(f"{where}: draft is {row['draft']!r}, which is no hub id.")
    return KnownDraft(_plain(row["model"]), method, row["draft"])


def _plain(reference: str) -> str:
    """Return a model's name without its owner, format and kind of numbers."""
    name = reference.rstrip("/").rsplit("/", 1)[-1].partition(":")[0]
    name = plain_name(name) if name.endswith(".gguf") else name.lower()
    return name.removesuffix("-gguf").removesuffix("-instruct").removeprefix("meta-")
