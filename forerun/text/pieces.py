"""The bytes that each token id stands for, read from the decoder of a `tokenizer.json`."""

import re
from dataclasses import dataclass
from typing import Any

from forerun.errors import ModelError

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HARMLESS = {"Fuse", "ByteFallback"}


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes of every id, and what decoding does to the front of a text.

    bytes           V entries; empty for an id that no token has
    leading_spaces  spaces taken off the first non-empty token at most (SentencePiece: 1)
    """

    bytes: tuple[bytes, ...]
    leading_spaces: int


def byte_alphabet() -> dict[int, str]:
    """By byte, the printable character that byte-level BPE writes for it: GPT-2's table of 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    table = {value: chr(value) for value in printable}
    table |= {value: chr(256 + index) for index, value in enumerate(others)}
    return table


# For str.translate. What stands for no byte becomes what Latin-1 cannot hold.
_BYTE_LETTERS = dict.fromkeys(range(256), "\ufffd") | {
    ord(letter): chr(value) for value, letter in byte_alphabet().items()
}


def pieces_of(spec: dict[str, Any]) -> Pieces:
    """The bytes of every id of a `tokenizer.json` document. Raises ModelError for a decoder that is
    neither byte-level nor SentencePiece's, or for ids far beyond the number of tokens.
    """
    decoder = spec.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    vocab: dict[str, int] = dict(spec["model"]["vocab"])
    vocab |= {token["content"]: int(token["id"]) for token in spec.get("added_tokens") or []}
    if kinds == ["ByteLevel"]:
        return Pieces(_table(vocab, _byte_level), 0)
    leading = 0
    for step in steps:
        if step.get("type") == "Strip" and step.get("content") == " " and not step.get("stop"):
            leading += int(step.get("start", 0))
        elif step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never":
            leading = 1
        elif not _plain_step(step):
            raise ModelError(
                f"the tokenizer decodes with {kinds}, which is not supported; "
                "byte-level BPE and SentencePiece-style BPE are"
            )
    fallback = bool(spec["model"].get("byte_fallback"))
    return Pieces(_table(vocab, _sentence_piece if fallback else _spaced), leading)


def _plain_step(step: dict[str, Any]) -> bool:
    """Whether a decoder step does nothing beyond turning space marks and byte tokens back."""
    if step.get("type") == "Replace":
        return step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "
    return step.get("type") in _HARMLESS | {"Metaspace"}


def _table(vocab: dict[str, int], convert: Any) -> tuple[bytes, ...]:
    size = max(vocab.values(), default=-1) + 1
    if size > 4 * len(vocab) + 1024:
        raise ModelError(f"the tokenizer numbers {len(vocab)} tokens up to {size - 1}")
    table = [b""] * size
    for text, index in vocab.items():
        table[index] = convert(text)
    return tuple(table)


def _byte_level(text: str) -> bytes:
    try:
        return text.translate(_BYTE_LETTERS).encode("latin-1")
    except UnicodeEncodeError:  # Not written in the letters that stand for bytes.
        return text.encode("utf-8", "replace")


def _spaced(text: str) -> bytes:
    return text.replace(SPACE_MARK, " ").encode("utf-8", "replace")


def _sentence_piece(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else _spaced(text)
