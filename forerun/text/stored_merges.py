"""Merges that the scores of a vocabulary imply, kept in the cache directory: 262,144 scores take
seconds.

A file is found by a hash of the vocabulary and holds a checksum, then pairs of ids in their order.
It is believed only if all of it is as it was written and its ids are of this vocabulary: any doubt
is a miss, and they are derived again. Where the directory cannot be written, nothing is kept.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np

from forerun.cache_dir import cache_dir

Merges = list[tuple[str, str]]
Derive = Callable[[Sequence[str], Sequence[int], Sequence[float]], Merges]

LEAST = 1 << 16
"""Tokens of a vocabulary that is worth a file: fewer take less than a second."""
MOST_PAIRS = 64
"""Most pairs of a token, on average; a larger file is not read, and none is written."""
FILES = 8
"""Most files; the ones written longest ago go."""
VERSION = b"forerun merges 1\n"
"""The beginning of a file, raised when merges are derived in another way."""


def stored_merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], derive: Derive
) -> Merges:
    """Return `derive(tokens, types, scores)`, which is the same in every process, or what it
    returned for this vocabulary before.
    """
    if len(tokens) < LEAST:
        return derive(tokens, types, scores)
    path = cache_dir() / "tokenizers" / f"{_name(tokens, types, scores)}.merges"
    merges = _read(path, tokens)
    if merges is None:
        merges = derive(tokens, types, scores)
        if len(merges) <= MOST_PAIRS * len(tokens):
            with suppress(OSError):
                _write(path, tokens, merges)
    return merges


def _name(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> str:
    """Return the hash of a vocabulary."""
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    hashed = sha256(VERSION)
    for part in (lengths, np.asarray(types, np.int64), np.asarray(scores, np.float64)):
        hashed.update(part.tobytes())
    hashed.update("".join(tokens).encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()


def _read(path: Path, tokens: Sequence[str]) -> Merges | None:
    """Return the merges in a file; None if there is none or anything of it is not as written."""
    most = len(VERSION) + 32 + 8 * MOST_PAIRS * len(tokens)
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError:
        return None
    body = content[len(VERSION) + 32 :]
    whole = content == VERSION + sha256(body).digest() + body and len(content) <= most
    if not whole or len(body) % 8:
        return None
    pairs = np.frombuffer(body, np.int32).reshape(-1, 2)
    if pairs.size and not 0 <= pairs.min() <= pairs.max() < len(tokens):
        return None
    left, right = ([tokens[id] for id in side.tolist()] for side in pairs.T)
    return [*zip(left, right, strict=True)]


def _write(path: Path, tokens: Sequence[str], merges: Merges) -> None:
    """Write the file at once, and delete the oldest beyond FILES. Raises OSError."""
    ids = {token: id for id, token in enumerate(tokens)}
    flat = [ids[part] for pair in merges for part in pair]
    body = np.array(flat, np.int32).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".merges-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(VERSION + sha256(body).digest() + body)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    old = sorted(path.parent.glob("*.merges"), key=lambda one: one.stat().st_mtime_ns)
    for one in old[:-FILES]:
        one.unlink(missing_ok=True)
