"""Caches tokenizers on disk in the form that encoding and decoding need: deriving one of 262,144
tokens takes three seconds, with scores five.

A file's name is a hash of the tokenizer's source and of the code that derives it, and the file has
a checksum. It is used only if all of it is valid; in doubt the tokenizer is derived again. If the
directory cannot be written, nothing is stored.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from forerun.cache_dir import cache_dir, write_cached
from forerun.checkpoints.mapped import check_fetched, mapped
from forerun.errors import ModelError
from forerun.text.encoders import Encoders, Spec
from forerun.text.gguf import tokenizer_json
from forerun.text.length_bound import LengthBound
from forerun.text.pieces import Pieces, PieceTable
from forerun.text.tokenizer import AddedToken, TextEnds, Tokenizer, document

LEAST = 1 << 14
"""Least tokens of a vocabulary that is stored: smaller ones take less than a tenth of a second."""
FILES = 8
"""Most files; the oldest are deleted."""
VERSION = b"forerun tokenizer 1\n"
"""Beginning of a file; changed when the format changes."""


class _Strings(NamedTuple):
    """Concatenated strings, and the end of each as int32. They are in the mapped file, whose pages
    are read when they are needed.
    """

    joined: memoryview
    ends: memoryview


class _Stored(NamedTuple):
    """A tokenizer's parts, and the document of its encoders: `words` of the ids int32 `ids`, and
    `merges`, int32 pairs of indices of words; `spec` is the rest.
    """

    added: list[AddedToken]
    pieces: _Strings
    leading_spaces: int
    ends: TextEnds
    bound: LengthBound
    words: _Strings
    ids: memoryview
    merges: memoryview
    spec: dict[str, Any]


def gguf_tokenizer(
    metadata: Mapping[str, Any], again: Callable[[], Mapping[str, Any]], digest: bytes
) -> Tokenizer:
    """Return the tokenizer of a GGUF file, as `Tokenizer.from_gguf`, from the cache if possible.
    digest: hash of its header.
    """
    return _stored_or(
        b"gguf" + digest,
        lambda: tokenizer_json(again()).spec,
        lambda: Tokenizer.from_gguf(metadata, again),
    )


def file_tokenizer(
    path: Path,
    eos_ids: tuple[int, ...],
    bos_id: int | None,
    names: Mapping[str, str | None],
    vocab: int,
) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, as `Tokenizer.from_file`, from the cache if
    possible.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read the tokenizer {path}: {error}") from error
    check_fetched(path, content)
    around = json.dumps((eos_ids, bos_id, sorted(names.items()), vocab)).encode()
    return _stored_or(
        b"json" + sha256(content).digest() + around,
        lambda: document(path, vocab),
        lambda: Tokenizer.from_file(path, eos_ids, bos_id, names, vocab),
    )


def _stored_or(
    source: bytes, whole: Callable[[], Spec], derive: Callable[[], Tokenizer]
) -> Tokenizer:
    """Return the stored tokenizer for `source`, else the result of `derive`, which is stored when
    its encoders are built.

    source  identifies everything that the tokenizer depends on, except the code
    whole   returns its `tokenizer.json` document, for a stored tokenizer
    """
    path = cache_dir() / "tokenizers" / f"{sha256(_code() + source).hexdigest()}.tokenizer"
    stored = _read(path)
    if stored is not None:
        return _made(stored, whole)
    tokenizer = derive()
    if tokenizer.vocab_size >= LEAST and isinstance(tokenizer.plain, Encoders):
        tokenizer.plain.watch(lambda spec: _keep(path, tokenizer, spec))
    return tokenizer


@cache
def _code() -> bytes:
    """Return a hash of the code that derives tokenizers, which is in this folder."""
    hashed = sha256(VERSION)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        hashed.update(file.read_bytes())
    return hashed.digest()


def _made(stored: _Stored, whole: Callable[[], Spec]) -> Tokenizer:
    ends = array("I", [0])
    ends.frombytes(stored.pieces.ends)
    pieces = Pieces(PieceTable(bytes(stored.pieces.joined), ends), stored.leading_spaces)
    codec = Encoders(lambda: _document(stored))
    return Tokenizer(
        codec, pieces, stored.added, stored.ends, whole, lambda: stored.bound, codec.within
    )


def _document(stored: _Stored) -> Spec:
    """Return the complete document of the encoders."""
    text = str(stored.words.joined, "utf-8", "surrogatepass")
    ends = [0, *np.frombuffer(stored.words.ends, np.int32).tolist()]
    words = [text[start:end] for start, end in pairwise(ends)]
    left, right = (
        map(words.__getitem__, side.tolist())
        for side in np.frombuffer(stored.merges, np.int32).reshape(-1, 2).T
    )
    vocab = dict(zip(words, np.frombuffer(stored.ids, np.int32).tolist(), strict=True))
    model = {"vocab": vocab, "merges": [*zip(left, right, strict=True)]}
    return stored.spec | {"model": stored.spec["model"] | model}


def _flat(numbers: Iterable[int]) -> memoryview:
    return memoryview(np.array([*numbers], np.int32).tobytes())


def _keep(path: Path, tokenizer: Tokenizer, spec: Spec) -> None:
    """Write the file, if there is room for it and the document fits its format."""
    model = spec["model"]
    places = {word: place for place, word in enumerate(model["vocab"])}
    pieces = tokenizer.pieces
    try:
        merges = [places[part] for pair in model["merges"] for part in pair]
        words = "".join(places).encode("utf-8", "surrogatepass")
    except KeyError:  # A merge of what is no word: the encoders refuse it.
        return
    stored = _Stored(
        [*tokenizer.added.values()],
        _Strings(memoryview(pieces.joined), _flat(pieces.starts[1:])),
        tokenizer.leading_spaces,
        tokenizer.ends,
        tokenizer.bound(),
        _Strings(memoryview(words), _flat(accumulate(map(len, places)))),
        _flat(model["vocab"].values()),
        _flat(merges),
        spec | {"model": {name: model[name] for name in model if name not in {"vocab", "merges"}}},
    )
    # msgpack holds no integer beyond 64 bits, no lone surrogate and no very deep list.
    with suppress(OSError, OverflowError, UnicodeEncodeError, RecursionError):
        body = msgspec.msgpack.encode(stored)
        write_cached(path, VERSION + sha256(body).digest() + body, FILES)


def _read(path: Path) -> _Stored | None:
    """Return the contents of a file, mapped; None if there is none or it is not valid."""
    try:
        content = mapped(path).data
    except ModelError:
        return None
    body = content[len(VERSION) + 32 :]
    head = VERSION + sha256(body).digest()
    if content[: len(head)] != head:
        return None
    try:
        return msgspec.msgpack.decode(body, type=_Stored)
    except msgspec.MsgspecError:
        return None
