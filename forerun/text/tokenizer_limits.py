"""Limits of a `tokenizer.json`, checked before anything is built from it."""

from collections.abc import Iterator
from typing import Any

from forerun.errors import ModelError
from forerun.text.charsmap import check_charsmap

MOST_PER_LETTER = 64
"""Most characters that replacements in normalizers may produce from one: those of published models
produce one. A few kilobytes of file could produce 2^28 from each character of a client.
"""

MOST_MERGES = 16
"""Most merges per token of the vocabulary: at most one for each place where it can be split.
Gemma's file has two.
"""

MOST_AROUND = 16
"""Most tokens that a post-processor may put around a text: published models put one or two."""

_PARTS = frozenset(
    {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer"}
    | {"post_processor", "decoder", "model"}
)
_OF_MODEL = frozenset(
    {"type", "dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "vocab"}
    | {"merges"}
)
_OFF = {"version": "1.0", "truncation": None, "padding": None}


def served(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a `tokenizer.json` document without settings for training: `truncation` and
    `padding` would cut or lengthen requests, `dropout` would make encoding random. Raises
    ModelError naming any other setting that is not supported.
    """
    model = spec["model"]
    unknown = [name for name in spec if name not in _PARTS and spec[name]]
    unknown += [f"model.{name}" for name in model if name not in _OF_MODEL and model[name]]
    if unknown:
        raise ModelError(f"the tokenizer's {', '.join(sorted(unknown)[:8])} is not supported")
    known = {name: model[name] for name in model if name in _OF_MODEL}
    parts = {name: spec[name] for name in spec if name in _PARTS}
    return parts | _OFF | {"model": known | {"dropout": None}}


def without_foreign(spec: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return a copy of a `tokenizer.json` document without added tokens whose ids are
    `vocab_size` or more.
    """
    added = spec.get("added_tokens") or []
    foreign = {token["content"] for token in added if int(token["id"]) >= vocab_size}
    vocab = spec["model"].get("vocab") or {}
    known = {text: id for text, id in vocab.items() if text not in foreign}
    remaining = [token for token in added if token["content"] not in foreign]
    return spec | {"added_tokens": remaining, "model": spec["model"] | {"vocab": known}}


def check_limits(spec: dict[str, Any]) -> None:
    """Raise ModelError, naming the part, if a `tokenizer.json` document exceeds a limit:
    normalizers that multiply text beyond MOST_PER_LETTER, more than MOST_MERGES merges per token,
    or more than MOST_AROUND tokens around a text.
    """
    letters = 1.0
    for step in steps(spec.get("normalizer"), "normalizers"):
        if step.get("type") == "Replace":
            pattern, content = step.get("pattern") or {}, len(str(step.get("content", "")))
            replaced = pattern.get("String")
            letters *= max(1.0, content / len(replaced) if replaced else 1.0 + content)
        elif step.get("type") == "Precompiled":
            check_charsmap(step.get("precompiled_charsmap"), MOST_PER_LETTER)
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
    around = sum(map(_tokens_around, steps(spec.get("post_processor"), "processors")))
    if around > MOST_AROUND:
        raise ModelError(
            f"the tokenizer's post_processor puts {around} tokens around a text; at most "
            f"{MOST_AROUND} are taken"
        )


def prefix_of(spec: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that the post-processor of a `tokenizer.json` document puts before a text.
    Those after a text are `suffix_of`: an answer could not continue from there.
    """
    before: list[int] = []
    for step in steps(spec.get("post_processor"), "processors"):
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            before = [int(step["cls"][1]), *before]
        tokens, ids = step.get("special_tokens") or {}, list[int]()
        for piece in step.get("single") or []:
            if "SpecialToken" not in piece:
                break
            ids += tokens[piece["SpecialToken"]["id"]]["ids"]
        before = [*ids, *before]
    return tuple(before)


def suffix_of(spec: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that the post-processor of a `tokenizer.json` document puts after a whole
    text, as embedding models expect.
    """
    behind: list[int] = []
    for step in steps(spec.get("post_processor"), "processors"):
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            behind.append(int(step["sep"][1]))
        tokens, pieces = step.get("special_tokens") or {}, step.get("single") or []
        texts = [place for place, piece in enumerate(pieces) if "SpecialToken" not in piece]
        for piece in pieces[texts[-1] + 1 :] if texts else []:
            behind += tokens[piece["SpecialToken"]["id"]]["ids"]
    return tuple(behind)


def _tokens_around(step: dict[str, Any]) -> int:
    tokens = step.get("special_tokens") or {}
    names = [
        piece["SpecialToken"]["id"] for piece in step.get("single") or [] if "SpecialToken" in piece
    ]
    return sum(len((tokens.get(name) or {}).get("ids") or []) for name in names)


def steps(step: dict[str, Any] | None, members: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer: itself, or the members of sequences at any
    depth; nothing for None.

    members  the key of a sequence's members
    """
    if not step:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for member in step.get(members) or []:
        yield from steps(member, members)
