"""Vocabularies of all kinds that models have, each learned from texts like those they will write.

Real ones, of the package mistral-common (Apache 2.0), where it is installed: `make vocabularies`.
"""

import base64
import json
import struct
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from forerun.text.tokenizer import Tokenizer
from forerun.text.tokenizer_limits import without_foreign
from tests.text.corpus import TEXTS

SPOKEN = (
    'Call it: {"name": "weather", "arguments": {"city": "Rome", "days": 3}} and [1, 2, 3]',
    '{"a": [], "b": {}}',
    '{"first_name": "Ada", "age": 36, "kind": "human"}, {"b": null, "c": true}, {"d": -2.5e3}',
    "<tool_call>\n</tool_call> [TOOL_CALLS] yes no way Ab 12",
)
MARK = "\u2581"
PREPEND = {"type": "Prepend", "prepend": MARK}
MARKED = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
CONTROLS = ("<unk>", "<s>", "</s>", "<think>", "</think>")
"""Their ids are 0 to 4; the last two are no control tokens."""
BIG = 262_144


def _sequence(members: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", members: steps}


@cache
def _sentence_piece() -> tuple[dict[str, int], list[list[str]]]:
    """Vocabulary and merges, control tokens and bytes first."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=1200, show_progress=False)
    made.train_from_iterator(
        [text for text in (*SPOKEN * 9, *TEXTS[:8]) for _ in range(3)], trainer
    )
    model = json.loads(made.to_str())["model"]
    tokens = [*CONTROLS, *(f"<0x{value:02X}>" for value in range(256))]
    tokens += sorted(model["vocab"], key=model["vocab"].get)
    return {token: id for id, token in enumerate(dict.fromkeys(tokens))}, model["merges"]


def sentence_piece(spacing: str, size: int = 0) -> dict[str, Any]:
    """A tokenizer.json that puts a space before texts as `spacing` says: "prepend" (Llama 2, whose
    GGUF files say the same), a Metaspace scheme, or "none".

    size  tokens in all, made up by words that no merge leads to
    """
    vocab, merges = _sentence_piece()
    vocab = dict(vocab)
    for number in range(len(vocab), size):
        vocab[f"{MARK}w{number:x}"] = number
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    steps = [MARKED | {"pattern": {"String": MARK}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizer = {"prepend": [PREPEND, MARKED], "none": [MARKED]}.get(spacing, [])
    scheme = {"type": "Metaspace", "replacement": MARK, "split": False, "prepend_scheme": spacing}
    return {
        "added_tokens": [_added(id, text, id < 3) for id, text in enumerate(CONTROLS)],
        "normalizer": _sequence("normalizers", normalizer) if normalizer else None,
        "pre_tokenizer": None if normalizer else scheme,
        "post_processor": None,
        "decoder": _sequence("decoders", steps + [strip] * (spacing not in ("none", "never"))),
        "model": {
            **{"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
            **{"vocab": vocab, "merges": merges},
        },
    }


@cache
def _byte_level() -> str:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=list(CONTROLS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator([text for text in (*SPOKEN * 9, *TEXTS) for _ in range(3)], trainer)
    return made.to_str()


def byte_level(spaced: bool = False, composed: bool = False, foreign: int = 0) -> dict[str, Any]:
    """A byte-level tokenizer.json.

    spaced    a space is put before every text (RoBERTa, BLOOM)
    composed  text is brought to NFC first
    foreign   added tokens beyond the ids that the model has
    """
    spec: dict[str, Any] = json.loads(_byte_level())
    spec["pre_tokenizer"]["add_prefix_space"] = spaced
    for token in spec["added_tokens"]:
        token["special"] = token["id"] < 3
    if composed:
        spec["normalizer"] = {"type": "NFC"}
    size = len(spec["model"]["vocab"])
    spec["added_tokens"] += [_added(size + n, f"<image {n}>", False) for n in range(foreign)]
    return spec


def _added(id: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": text, "special": special, **flags}


SMALL = {
    "byte-level": byte_level(),
    "byte-level with a space": byte_level(spaced=True),
    "byte-level composed": byte_level(composed=True),
    "byte-level with foreign tokens": without_foreign(byte_level(foreign=3), 1200),
    **{name: sentence_piece(name) for name in ("prepend", "first", "always", "never", "none")},
}
"""tokenizer.json documents of 1,200 tokens."""


@cache
def vocabulary(name: str) -> Tokenizer:
    """The tokenizer of one of SMALL, of "large", or of REAL."""
    if name in REAL:
        return Tokenizer.from_gguf(_real(name))
    spec = sentence_piece("prepend", BIG) if name == "large" else SMALL[name]
    return Tokenizer._from_json(spec, (2,), 1, lambda: spec)


def _data() -> Path | None:
    spec = find_spec("mistral_common")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) / "data" if places else None


REAL = {
    "Mistral 7B v0.1": "tokenizer.model.v1",
    "Mistral 7B v0.3": "mistral_instruct_tokenizer_240323.model.v3",
    "Mistral Nemo": "tekken_240718.json",
}


def real_ones() -> list[str]:
    """The names in REAL that are on this machine."""
    data = _data()
    return [name for name, file in REAL.items() if data and (data / file).is_file()]


def _real(name: str) -> dict[str, Any]:
    """A vocabulary of Mistral's as a GGUF file has it."""
    data = _data()
    assert data is not None
    content = (data / REAL[name]).read_bytes()
    vocabulary = _tekken(json.loads(content)) if content[:1] == b"{" else _protobuf(content)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (vocabulary | ends).items()}


def _protobuf(content: bytes) -> dict[str, Any]:
    """SentencePiece's model: pieces in field 1, each of text, score and type."""
    pieces = [dict(_fields(value)) for field, value in _fields(content) if field == 1]
    return {
        "model": "llama",
        "tokens": [piece[1].decode() for piece in pieces],
        "scores": [struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0 for piece in pieces],
        "token_type": [piece.get(3, 1) for piece in pieces],
    }


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """A protobuf message's fields: number and value."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, data[at : at + size]
        at += size


def _tekken(content: dict[str, Any]) -> dict[str, Any]:
    """Tekken: bytes by rank; the merges are what each token is made of by lower ranks."""
    config = content["config"]
    specials = int(config["default_num_special_tokens"])
    listed = content["vocab"][: int(config["default_vocab_size"]) - specials]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in listed}
    letters = dict(pre_tokenizer_letters())
    merges = [
        [("".join(letters[value] for value in part)) for part in parts]
        for token in ranks
        if len(token) > 1 and len(parts := _parts(token, ranks)) == 2
    ]
    named = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{n}>" for n in range(3, specials))]
    tokens = named + ["".join(letters[value] for value in token) for token in ranks]
    types = [3] * specials + [1] * len(ranks)
    merged = [" ".join(merge) for merge in merges]
    return {
        "model": "gpt2",
        "pre": "tekken",
        "tokens": tokens,
        "token_type": types,
        "merges": merged,
    }


def pre_tokenizer_letters() -> dict[int, str]:
    """The letter that stands for each byte."""
    from forerun.text.pieces import byte_alphabet

    return byte_alphabet()


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """What merging by ranks below the token's own leaves of it."""
    parts = [bytes([value]) for value in token]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)]
        rank, at = min(pairs)
        if rank >= ranks[token]:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
