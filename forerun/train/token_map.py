"""A token map from text: the ids that occur most, and those that every map needs."""

from pathlib import Path

import numpy as np

from forerun.errors import ConfigError, reason_of
from forerun.text.tokenizer import Tokenizer
from forerun.train.pipeline import forced_ids
from forerun.types import Ints

_PIECE = 1 << 20
"""Characters encoded at a time."""


def token_map(text: Path, tokenizer: Tokenizer, vocab: int, size: int) -> Ints:
    """Return int32[size] ascending target ids for a token map: special tokens, single bytes and
    punctuation, then the most frequent of the file `text` (UTF-8), then the lowest.

    Raises ConfigError if the file cannot be read, or `size` leaves no room beyond what every map
    has or exceeds `vocab`.
    """
    forced = forced_ids(tokenizer)
    if not len(forced) < size <= vocab:
        raise ConfigError(
            f"draft-vocab is {size}; a token map of this model has more than {len(forced)} "
            f"(specials, bytes, punctuation) and at most {vocab}."
        )
    counts = np.zeros(vocab, np.float64)
    try:
        with text.open(encoding="utf-8", errors="replace") as lines:
            while piece := "".join(lines.readlines(_PIECE)):
                counts += np.bincount(tokenizer.encode(piece), minlength=vocab)
    except OSError as error:
        raise ConfigError(f"--token-map {text} cannot be read: {reason_of(error)}") from error
    counts -= np.arange(vocab) / (2 * vocab)  # Ties, unseen ids included, to the lowest id.
    counts[forced] = np.inf
    return np.sort(np.argpartition(-counts, size - 1)[:size]).astype(np.int32)
