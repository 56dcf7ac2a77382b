"""Checks SentencePiece's normalisation table in a `tokenizer.json` (`Precompiled`) before
`tokenizers` uses it, which trusts every offset in it. The format: SentencePiece's normalizer.cc
(bytes of a double-array trie, then replacements that end with NUL) and darts-clone's dictionary.h
(the trie's units).
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ModelError

_LEAF = 1 << 8
_MOST_BYTES = 16 << 20
_Units = NDArray[np.int64]


def check_charsmap(encoded: Any, longest: int) -> None:
    """Raise ModelError if the table is damaged, or replaces one character by more than `longest`
    bytes.

    encoded  the value of `precompiled_charsmap`, base64
    """
    if not isinstance(encoded, str) or len(encoded) > _MOST_BYTES:
        raise ModelError("the tokenizer's precompiled_charsmap is no text, or too long")
    try:
        data = base64.b64decode(encoded, validate=True)
        size = int.from_bytes(data[:4], "little")
        if size % 4 or not 4 <= size <= len(data) - 4:
            raise ValueError(f"a trie of {size} bytes in {len(data)}")
        units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
        replacements = data[4 + size :]
        replacements.decode("utf-8")
        starts = _leaves(units)
        _check_replacements(replacements, starts, longest)
    except (ValueError, IndexError) as error:
        raise ModelError(f"the tokenizer's precompiled_charsmap is damaged: {error}") from error


def _leaves(units: _Units) -> _Units:
    """Return the offsets of all replacements that any text can reach. Raises IndexError if a text
    leads out of the trie.
    """
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    labels = units & ((1 << 31) | 0xFF)
    seen = np.zeros(len(units), np.bool_)
    bases, leaves = offsets[:1], [np.empty(0, np.int64)]
    letters = np.arange(1, 256)
    while len(bases):
        # What does not carry its letter as a label belongs to another node, or to none.
        places = (bases[:, None] ^ letters).reshape(-1)
        reached = labels[places] == np.broadcast_to(letters, (len(bases), 255)).reshape(-1)
        nodes = np.unique(places[reached])
        nodes = nodes[~seen[nodes]]
        seen[nodes] = True
        bases = nodes ^ offsets[nodes]
        ends = bases[(units[nodes] & _LEAF) != 0]
        leaves.append(units[ends] & ((1 << 31) - 1))
    return np.concatenate(leaves)


def _check_replacements(text: bytes, starts: _Units, longest: int) -> None:
    ends = [*np.flatnonzero(np.frombuffer(text, np.uint8) == 0).tolist(), len(text)]
    for start in np.unique(starts).tolist():
        if start > len(text) or (start < len(text) and text[start] & 0xC0 == 0x80):
            raise ValueError(f"a replacement at byte {start}, which begins no character")
        if ends[np.searchsorted(ends, start)] - start > longest:
            raise ValueError(f"a replacement of more than {longest} bytes")
