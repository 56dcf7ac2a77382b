"""Provides the token map of a draft model: the named one, or one counted in ordinary text.

With 150,000 tokens and more, a draft's output head takes most of its time on a CPU, and ordinary
text uses few of them. A map that is not named is counted in the text that ships (text_table.py),
once for every tokenizer, and stored in the cache. drafts/token_map.py reads and writes maps.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np

from forerun.build import text_table
from forerun.build.drafting import NO_DRAFT, DraftParts
from forerun.build.executor_entry import AnyDraft
from forerun.drafts.token_map import read_token_map, write_token_map
from forerun.errors import ConfigError, ModelError, reason_of
from forerun.hub import huggingface
from forerun.hub.catalog import Model
from forerun.options.config import EngineConfig
from forerun.text.tokenizer import Tokenizer
from forerun.types import AnyArray, Ints

log = logging.getLogger("forerun.build")

MIN_VOCAB = 150_000
"""Draft models that score fewer tokens get no counted map."""
SIZE = 32_768
"""Tokens of a counted map. (Gemma 3's tokenizer of 262,144, a map counted in three quarters of the
text covers these shares of the fourth: 4,096 .852, 8,192 .904, 16,384 .939, 32,768 .964, 65,536
.981.)
"""
_PIECE = 1 << 20
"""Characters of a user's text that are encoded at a time."""


def with_token_map(config: EngineConfig, target: Model, parts: DraftParts) -> DraftParts:
    """Return the parts with the draft model limited to the named token map; if none is named, to a
    counted one, provided that the draft runs on a CPU and scores MIN_VOCAB tokens or more. Raises
    ModelError for a named map that does not fit, DownloadError.
    """
    named, draft, vocab = config.speculative_token_map, parts.model, target.architecture.vocab
    if draft is None or named == NO_DRAFT:
        return parts
    if named is not None:
        ids = read_token_map(huggingface.token_map_fetched(named), vocab)
        return replace(parts, model=draft.limited(ids), token_map=named)
    if not _wants_map(config, draft):
        return parts
    path = text_table.file_of(target.tokenizer, vocab).with_suffix(f".{SIZE}.tokens.json")
    counted = _counted(target, path, vocab)
    if counted is None:
        return parts
    return replace(parts, model=draft.limited(counted), token_map=str(path))


def sized(config: EngineConfig, draft: AnyDraft) -> AnyDraft:
    """Return a draft of the size that with_token_map gives it, with arbitrary ids; fetches and
    counts nothing.
    """
    named = config.speculative_token_map
    if named == NO_DRAFT:
        return draft
    if named is not None and Path(named).is_file():
        return draft.limited(read_token_map(Path(named), draft.vocab))
    if named is None and not _wants_map(config, draft):
        return draft
    return draft.limited(np.arange(min(SIZE, draft.vocab), dtype=np.int32))


def _wants_map(config: EngineConfig, draft: AnyDraft) -> bool:
    if config.device != "cpu" or draft.vocab < MIN_VOCAB:
        return False
    try:
        draft.limited(np.arange(1, dtype=np.int32))
    except ModelError:  # It brings its own, or scores few tokens by other means.
        return False
    return True


def _counted(target: Model, path: Path, vocab: int) -> Ints | None:
    """Return the counted map in the cache file `path`, counting it if there is none, or a damaged
    one; None, with a warning, if the file cannot be written.
    """
    with suppress(ModelError):
        return read_token_map(path, vocab)
    log.info("counting which tokens of %s ordinary text uses, once", target.name)
    counts = _counts(target.tokenizer, vocab, text_table.pieces_of())
    ids, scratch = (
        most_frequent(counts, target.tokenizer, SIZE),
        path.with_suffix(f".{os.getpid()}"),
    )
    try:
        write_token_map(ids, scratch)
        scratch.replace(path)
    except OSError as error:
        log.warning("no token map is kept, so drafts score all %d tokens: %s", vocab, error)
        return None
    return ids


def token_map(text: Path, tokenizer: Tokenizer, vocab: int, size: int) -> Ints:
    """Return most_frequent of the tokens of a file of UTF-8 text. Raises ConfigError if the file
    cannot be read, or as most_frequent.
    """
    try:
        with text.open(encoding="utf-8", errors="replace") as lines:
            counts = _counts(tokenizer, vocab, _pieces(lines))
    except OSError as error:
        raise ConfigError(f"--token-map {text} cannot be read: {reason_of(error)}") from error
    return most_frequent(counts, tokenizer, size)


def _pieces(lines: IO[str]) -> Iterator[str]:
    while piece := "".join(lines.readlines(_PIECE)):
        yield piece


def _counts(tokenizer: Tokenizer, vocab: int, pieces: Iterable[str]) -> AnyArray:
    counts = np.zeros(vocab, np.int64)
    for piece in pieces:
        counts += np.bincount(tokenizer.encode(piece), minlength=vocab)
    return counts


def most_frequent(counts: AnyArray, tokenizer: Tokenizer, size: int) -> Ints:
    """Return int32[size] ascending target ids for a token map: special tokens, single bytes and
    punctuation, then those of the highest counts [V], then the lowest ids. Raises ConfigError if
    `size` leaves no room beyond what every map has, or exceeds V.
    """
    forced, vocab = forced_ids(tokenizer), len(counts)
    if not len(forced) < size <= vocab:
        raise ConfigError(
            f"draft-vocab is {size}; a token map of this model has more than {len(forced)} "
            f"(specials, bytes, punctuation) and at most {vocab}."
        )
    # Ties, unseen ids included, to the lowest id.
    order = counts - np.arange(vocab) / (2 * vocab)
    order[forced] = np.inf
    return np.sort(np.argpartition(-order, size - 1)[:size]).astype(np.int32)


def forced_ids(tokenizer: Tokenizer) -> Ints:
    """Return int32[.] ascending ids that every draft vocabulary has: special tokens, single bytes,
    pure punctuation. Answers never contain the special ones, so counting would omit them, and
    constrained text uses many bytes and punctuation tokens.
    """
    ids = set(tokenizer.special_ids)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if len(text) == 1 or (text and not any(c > 127 or chr(c).isalnum() for c in text)):
            ids.add(token)
    return np.array(sorted(ids), np.int32)
