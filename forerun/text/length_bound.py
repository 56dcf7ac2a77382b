"""Computes a lower bound of a text's tokens from its bytes, so that texts that are certainly too
long for a context can be rejected without encoding them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.text.pieces import SPACE_MARK
from forerun.text.tokenizer_limits import steps

_PRINTABLE = bytes(range(33, 127))
_SPACE = b" \t\n\r"
_BLANK = bytes(value for value in range(128) if value not in _PRINTABLE)
_COMPOSING = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip"}
_CUTTING = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"}


@dataclass(frozen=True, slots=True)
class LengthBound:
    """A bound that is valid for every text.

    longest   most visible bytes that one token stands for; 0: unknown for this tokenizer
    ascii     only ASCII bytes are counted, because a normalizer may shorten or drop the rest
    blanks    most spaces, tabs and line breaks that one token stands for; 0: they may be dropped
    """

    longest: int
    ascii: bool
    blanks: int = 0

    def lower_bound(self, text: str) -> int:
        """Return a lower bound of the tokens of `text`, whether control strings in it are
        recognised or not; 0 if it is unknown. Takes a millisecond per megabyte. Lone surrogates are
        not counted.
        """
        if not self.longest:
            return 0
        encoding = "ascii" if self.ascii else "utf-8"
        data = text.replace(SPACE_MARK, "").encode(encoding, "ignore")
        bound = -(-len(data.translate(None, _BLANK)) // self.longest)
        return max(bound, -(-_spaces(data) // self.blanks)) if self.blanks else bound


UNKNOWN = LengthBound(0, ascii=True)
"""No bound is known: any text may have no tokens."""


def length_bound(
    spec: dict[str, Any], pieces: Sequence[bytes], added: Iterable[str]
) -> LengthBound:
    """Return the bound for a `tokenizer.json` document.

    pieces  the bytes that each id stands for
    added   texts of the added tokens

    White space is not counted if a normalizer or an added token may drop it; control characters
    never are. If a step may drop anything else, the bound is UNKNOWN.
    """
    normalizers = list(steps(spec.get("normalizer"), "normalizers"))
    cuts = steps(spec.get("pre_tokenizer"), "pretokenizers")
    known = not spec.get("truncation")
    known = known and all(_keeps_ascii(step) for step in normalizers)
    known = known and all(_cuts_only(step) for step in cuts)
    single = {piece[0] for piece in pieces if len(piece) == 1}
    if not known or not single.issuperset(_PRINTABLE):
        return UNKNOWN
    tokens = sorted(
        [*pieces, *(text.encode("utf-8", "replace") for text in added)], key=len, reverse=True
    )
    longest = _most(tokens, lambda token: len(token.translate(None, _BLANK)))
    swallowing = any(
        token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens") or []
    )
    exact = len(single) == 256 and not swallowing
    exact = exact and not any(step.get("type") in _COMPOSING for step in normalizers)
    counts_spaces = not swallowing and single.issuperset(_SPACE)
    counts_spaces = counts_spaces and not any(step.get("type") == "Strip" for step in normalizers)
    return LengthBound(longest, not exact, _most(tokens, _spaces) if counts_spaces else 0)


def _most(tokens: Iterable[bytes], count: Callable[[bytes], int]) -> int:
    """Return the largest count of bytes in a token. tokens: the longest first."""
    largest = 0
    for token in tokens:
        if len(token) <= largest:
            break
        largest = max(largest, count(token))
    return largest


def _spaces(data: bytes) -> int:
    return len(data) - len(data.translate(None, _SPACE))


def _keeps_ascii(step: dict[str, Any]) -> bool:
    """Return whether a normalizer's output has at least as many printable ASCII characters as its
    input.
    """
    if step.get("type") == "Replace":
        return step.get("pattern") == {"String": " "}
    return step.get("type") in _COMPOSING | {"Prepend"}


def _cuts_only(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer removes nothing but white space."""
    keeps = str(step.get("behavior", "Isolated")).lower() != "removed"
    return step.get("type") in _CUTTING and keeps
