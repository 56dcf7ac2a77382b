"""Computes the bytes that each token id stands for, from the decoder of a `tokenizer.json`."""

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self, overload

from forerun.errors import ModelError

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HARMLESS = {"Fuse", "ByteFallback"}


class PieceTable(Sequence[bytes]):
    """Bytes of every id, in one object: 262,144 separate objects would take 15 MB more.

    joined  the bytes of all ids, concatenated
    starts  V+1 numbers: the bytes of id i are joined[starts[i]:starts[i + 1]]
    """

    def __init__(self, joined: bytes, starts: "array[int]") -> None:
        self.joined, self.starts = joined, starts

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> Self:
        """Return the table of these pieces."""
        every = [*pieces]
        return cls(b"".join(every), array("I", accumulate(map(len, every), initial=0)))

    def __len__(self) -> int:
        """Return V."""
        return len(self.starts) - 1

    @overload
    def __getitem__(self, id: int) -> bytes: ...
    @overload
    def __getitem__(self, id: slice) -> list[bytes]: ...
    def __getitem__(self, id: int | slice) -> bytes | list[bytes]:
        """Return the bytes of an id, or a list of them for a slice. Raises IndexError for an
        unknown id.
        """
        places = range(len(self))[id]
        starts, joined = self.starts, self.joined
        if isinstance(places, range):
            return [joined[starts[place] : starts[place + 1]] for place in places]
        return joined[starts[places] : starts[places + 1]]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes of every id, and the effect of decoding on the beginning of a text.

    table           V entries; empty for an id without a token
    leading_spaces  most spaces that decoding removes from the first non-empty token (SentencePiece:
                    1)
    """

    table: Sequence[bytes]
    leading_spaces: int


def byte_alphabet() -> dict[int, str]:
    """Return, by byte, the printable character that stands for it in byte-level BPE: GPT-2's table
    of 256.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    table = {value: chr(value) for value in printable}
    table |= {value: chr(256 + index) for index, value in enumerate(others)}
    return table


# For str.translate. Characters of no byte map to one outside of Latin-1.
_BYTE_LETTERS = dict.fromkeys(range(256), "\ufffd") | {
    ord(letter): chr(value) for value, letter in byte_alphabet().items()
}


def pieces_of(spec: dict[str, Any], twins: Mapping[int, str] | None = None) -> Pieces:
    """Return the bytes of every id of a `tokenizer.json` document. Raises ModelError for a decoder
    that is neither byte-level nor SentencePiece's, or for ids far beyond the number of tokens.

    twins  ids that the document leaves out, because their text is empty or that of other ids; with
           their texts
    """
    decoder = spec.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    texts = spec["model"]["vocab"]
    vocab = dict(zip(map(int, texts.values()), texts, strict=True)) | dict(twins or {})
    added = {int(token["id"]): token["content"] for token in spec.get("added_tokens") or []}
    if kinds == ["ByteLevel"]:
        pieces = {id: _byte_level(text) for id, text in vocab.items()}
        return Pieces(_table(pieces | {id: _utf8(text) for id, text in added.items()}), 0)
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
    pieces = _spaced(vocab | added)
    if spec["model"].get("byte_fallback"):
        pieces |= _single_bytes(vocab | added)
    return Pieces(_table(pieces), leading)


def _plain_step(step: dict[str, Any]) -> bool:
    """Return whether a decoder step only converts space marks and byte tokens."""
    if step.get("type") == "Replace":
        return step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "
    return step.get("type") in _HARMLESS | {"Metaspace"}


def _table(pieces: Mapping[int, bytes]) -> PieceTable:
    """Return the bytes by id; empty for an id in between without a token."""
    size = max(pieces, default=-1) + 1
    if size > 4 * len(pieces) + 1024:
        raise ModelError(f"the tokenizer numbers {len(pieces)} tokens up to {size - 1}")
    if size == len(pieces):
        return PieceTable.of(map(pieces.__getitem__, range(size)))
    return PieceTable.of(pieces.get(id, b"") for id in range(size))


def _utf8(text: str) -> bytes:
    """Return the bytes of an added token, which stands for its own text even if other tokens use
    its letters for bytes.
    """
    return text.encode("utf-8", "replace")


def _byte_level(text: str) -> bytes:
    try:
        return text.translate(_BYTE_LETTERS).encode("latin-1")
    except UnicodeEncodeError:  # Not written in the characters of bytes.
        return _utf8(text)


def _spaced(texts: Mapping[int, str]) -> dict[int, bytes]:
    """Return the bytes of SentencePiece's tokens, converted together: one by one takes six times as
    long.
    """
    joined = "".join(texts.values())
    mark = next(mark for mark in map(chr, range(0x10FFFF, 0, -1)) if mark not in joined)
    spaced = mark.join(texts.values()).replace(SPACE_MARK, " ").encode("utf-8", "replace")
    return dict(zip(texts, spaced.split(mark.encode()), strict=True)) if texts else {}


def _single_bytes(texts: Mapping[int, str]) -> dict[int, bytes]:
    """Return the bytes of the tokens that stand for one byte, such as <0x0A>."""
    named = {id: _BYTE_TOKEN.fullmatch(text) for id, text in texts.items() if text[:3] == "<0x"}
    return {id: bytes([int(match[1], 16)]) for id, match in named.items() if match}
