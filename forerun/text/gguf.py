"""Converts the tokenizer of a GGUF file to the `tokenizer.json` that its author published.

A GGUF has tokens, merges or scores, and the *name* of the rule that splits text into words before
merging (`tokenizer.ggml.pre`); `pre_tokenizers` has the rules.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forerun.errors import ModelError
from forerun.text.pieces import SPACE_MARK
from forerun.text.pre_tokenizers import NOT_BYTE_LEVEL, PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<eos>",
    "<end_of_utterance>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
)
"""Names of added tokens that end a turn, llama.cpp's list."""
_OF_HTML = "</s>"
"""Ends a turn only if it is a control token: Gemma's tokens for HTML are text."""
_END_OF_MESSAGE = "<|end|>"
"""In gpt-oss's format (and Solar's) a turn has several messages, each of which ends with this."""
_NO_ID = (-1, (1 << 32) - 1)
"""Values for a token that does not exist."""
_SEVERAL_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
"""Token pairs that identify such a format; one pair is enough."""


class GgufTokenizer(NamedTuple):
    """A GGUF file's tokenizer.

    spec     as a `tokenizer.json` document
    eos_ids  the end-of-text ids, the declared one first
    bos_id   the begin-of-text id; None if there is none
    twins    ids that the document leaves out, because their text is empty or that of another id;
             with their texts
    """

    spec: dict[str, Any]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    twins: dict[int, str]


def tokenizer_json(metadata: Mapping[str, Any], merges: bool = True) -> GgufTokenizer:
    """Read a GGUF file's tokenizer.

    metadata  the file's keys as plain Python values
    merges    False leaves out the merges, which only encoding needs: for 262k scored tokens they
              take seconds

    Raises ModelError naming the key that is missing, wrong or of an unknown kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = [*_strings(metadata, "tokenizer.ggml.tokens")]
    types: Sequence[int] = list(metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    twins, types = _without_twins(tokens, types)
    if kind == "gpt2":
        spec = _byte_level(metadata, tokens, types, merges)
        begin = _pre_tokenizer(metadata).begins
    elif kind == "llama":
        spec = _sentence_piece(metadata, tokens, types, _scored(metadata, tokens, types, merges))
        begin = True
    elif kind == "gemma4":
        types = _with_end(tokens, types)
        spec = _sentence_piece(metadata, tokens, types, _stated(metadata, merges))
        spec["pre_tokenizer"] = _LINES
        begin = True
    else:
        raise ModelError(
            f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE), "
            "'llama' and 'gemma4' (SentencePiece BPE)"
        )
    spec["added_tokens"] = [
        _added(index, tokens[index], types[index] == CONTROL)
        for index in np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED))).tolist()
    ]
    bos, eos = (_id(metadata, name, len(tokens)) for name in ("bos", "eos"))
    before = bos if metadata.get("tokenizer.ggml.add_bos_token", begin) else None
    behind = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if before is not None or behind is not None:
        spec["post_processor"] = _around(tokens, before, behind)
    return GgufTokenizer(spec, _ends(metadata, tokens, types), bos, twins)


def _with_end(tokens: Sequence[str], types: Sequence[int]) -> Sequence[int]:
    """Return the types with Gemma 4's `<eos>` as a control token: its converter marks it as
    text.
    """
    eos = tokens.index("<eos>") if "<eos>" in tokens else -1
    return [CONTROL if id == eos and kind == NORMAL else kind for id, kind in enumerate(types)]


def _without_twins(
    tokens: Sequence[str], types: Sequence[int]
) -> tuple[dict[int, str], Sequence[int]]:
    """Return the ids whose text is empty or that of another id, with their texts; and the types, in
    which those ids are UNUSED. Of several ids with one text the last is used, as in llama.cpp,
    unless it is UNUSED itself. Control tokens among them have no text.
    """
    if len(set(tokens)) == len(tokens) and all(tokens):
        return {}, types
    spelled = {token: id for id, token in enumerate(tokens) if types[id] == UNUSED}
    spelled |= {token: id for id, token in enumerate(tokens) if types[id] != UNUSED}
    twins = {id: token for id, token in enumerate(tokens) if not token or spelled[token] != id}
    if not twins:
        return {}, types
    kinds = [UNUSED if id in twins else kind for id, kind in enumerate(types)]
    texts = {id: "" if types[id] == CONTROL else token for id, token in twins.items()}
    return texts, kinds


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], merged: bool
) -> dict[str, Any]:
    pre = _pre_tokenizer(metadata)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [split | {"pattern": {"Regex": regex}} for regex in pre.splits]
    steps.append(level | {"use_regex": False})
    return {
        "normalizer": {"type": "NFC"} if pre.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.whole_words,
            "vocab": _vocab(tokens, types),
            "merges": _stated(metadata, merged),
        },
    }


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if isinstance(name, str) and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    why = "is not written as bytes" if name in NOT_BYTE_LEVEL else "is unknown"
    raise ModelError(
        f"tokenizer.ggml.pre is {name!r}, which {why}; these are read: "
        f"{', '.join(sorted(PRE_TOKENIZERS))}"
    )


_LINES = {"type": "Split", "pattern": {"Regex": "\\n+"}, "behavior": "Isolated", "invert": False}
"""Gemma 4's text is split at runs of line breaks, and nowhere else."""


def _stated(metadata: Mapping[str, Any], merged: bool) -> list[list[str]]:
    """Return the merges in the file; none unless `merged`. Raises ModelError if they are no
    strings.
    """
    merges = _strings(metadata, "tokenizer.ggml.merges")
    return [merge.split(" ", 1) for merge in merges] if merged else []


def _scored(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], merged: bool
) -> list[tuple[str, str]]:
    """Return the merges derived from the tokens' scores; none unless `merged`. Raises ModelError
    without scores.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("tokenizer.ggml.scores is missing or not as long as the tokens")
    return derived_merges(tokens, types, scores) if merged else []


def _sentence_piece(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """Return a tokenizer like Llama 2's tokenizer.json: a space is added before the text, and after
    control tokens, even if there is one, so that decoding can remove it.
    """
    spaced = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    marks: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    ]
    if spaced:
        marks.insert(0, {"type": "Prepend", "prepend": SPACE_MARK})
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaced:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _id(metadata, "unknown", len(tokens))
    return {
        "normalizer": {"type": "Sequence", "normalizers": marks},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": None if unknown is None else tokens[unknown],
            "vocab": _vocab(tokens, types),
            "merges": merges,
        },
    }


def derived_merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary, best score first. Every way to split a token
    into two tokens is a merge with that token's score. Ties between tokens go to the longer left
    part, then to the longer right part, as in transformers.
    """
    index = {token: id for id, token in enumerate(tokens) if types[id] == NORMAL}
    merges: list[tuple[str, str]] = []
    ranks: list[float] = []
    for token, id in index.items():
        pairs: list[tuple[int, int, str, str]] = []
        for at in range(1, len(token)):
            left = index.get(token[:at])
            right = None if left is None else index.get(token[at:])
            if left is not None and right is not None:
                pairs.append((left, right, token[:at], token[at:]))
        for *_, before, behind in sorted(pairs):
            merges.append((before, behind))
            ranks += (-len(behind), -len(before), -float(scores[id]))
    # By the last key first; equal ones keep their order.
    order = np.lexsort(np.array(ranks, np.float64).reshape(-1, 3).T)
    return [merges[place] for place in order.tolist()]


def _vocab(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Return the vocabulary without the entries that only pad the table."""
    used = np.flatnonzero(np.asarray(types) != UNUSED).tolist()
    return dict(zip(map(tokens.__getitem__, used), used, strict=True))


def _added(index: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text, "special": special, **flags}


def _around(tokens: Sequence[str], before: int | None, behind: int | None) -> dict[str, Any]:
    """Return a post-processor that puts one token before a text, and one after it; None: none."""
    ids = [id for id in (before, behind) if id is not None]
    begin, end = (
        [] if id is None else [{"SpecialToken": {"id": tokens[id], "type_id": 0}}]
        for id in (before, behind)
    )
    body = [{"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [*begin, body[0], *end],
        "pair": [*begin, *body, *end],
        "special_tokens": {
            tokens[id]: {"id": tokens[id], "ids": [id], "tokens": [tokens[id]]} for id in ids
        },
    }


def _ends(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[int, ...]:
    """Return the end-of-text ids: the declared one first, then added tokens whose names are known
    to end a turn.
    """
    declared = [_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    added = np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED))).tolist()
    controls = {tokens[index]: index for index in added}
    several = any(pair <= controls.keys() for pair in _SEVERAL_MESSAGES)
    ends = [name for name in _ENDS if not (several and name == _END_OF_MESSAGE)]
    named = sorted(
        controls[name]
        for name in ends
        if name in controls and (name != _OF_HTML or types[controls[name]] == CONTROL)
    )
    return tuple(dict.fromkeys([index for index in declared if index is not None] + named))


def _id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None or value in _NO_ID:
        return None
    if not 0 <= int(value) < count:
        raise ModelError(f"{key} is {value}, but there are {count} tokens")
    return int(value)


def _strings(metadata: Mapping[str, Any], key: str) -> Sequence[str]:
    values = metadata.get(key)
    if not isinstance(values, Sequence) or set(map(type, values)) - {str}:
        raise ModelError(f"{key} is missing or is not a list of strings")
    return values
