"""What a `tokenizer.json` may ask for, checked before anything is built of it."""

from collections.abc import Iterator
from typing import Any

from forerun.errors import ModelError

MOST_PER_LETTER = 64
"""Characters that replacements in normalizers may make of one: those of published models make one
of one. A few kilobytes of file could make 2^28, of each that a client sends."""

MOST_MERGES = 16
"""Merges for each token of the vocabulary: at most one for each place where it can be cut in two.
Gemma's file has two."""


def check_limits(spec: dict[str, Any]) -> None:
    """Raise ModelError, naming the part, where a `tokenizer.json` document asks for too much:
    normalizers that multiply text beyond MOST_PER_LETTER, or more than MOST_MERGES merges per
    token.
    """
    letters = 1.0
    for step in steps(spec.get("normalizer"), "normalizers"):
        if step.get("type") == "Replace":
            pattern, content = step.get("pattern") or {}, len(str(step.get("content", "")))
            replaced = pattern.get("String")
            letters *= max(1.0, content / len(replaced) if replaced else 1.0 + content)
    if letters > MOST_PER_LETTER:
        raise ModelError(
            f"the tokenizer's normalizer makes {letters:.0f} characters of one; at most "
            f"{MOST_PER_LETTER} are taken"
        )
    merges, tokens = spec["model"].get("merges") or [], len(spec["model"].get("vocab") or [])
    if len(merges) > MOST_MERGES * tokens:
        raise ModelError(
            f"the tokenizer has {len(merges)} merges for {tokens} tokens; at most {MOST_MERGES} "
            "for each are taken"
        )


def steps(step: dict[str, Any] | None, members: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer: itself, or the members of sequences, however
    nested.

    members  the key of a sequence's members. None has no steps
    """
    if not step:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for member in step.get(members) or []:
        yield from steps(member, members)
