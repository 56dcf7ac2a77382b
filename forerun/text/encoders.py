"""Builds the encoders of a `tokenizer.json` without control strings, for each place in a text."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from threading import Lock
from typing import Any

import tokenizers
from tokenizers import models

from forerun.errors import ModelError, RequestError
from forerun.machine import trim_memory

Spec = dict[str, Any]


class TextPlace(StrEnum):
    """The place of a part within a text.

    FIRST   at its beginning
    LATER   after a control token, which may be a beginning of its own
    WITHIN  after other text: nothing is put before it
    """

    FIRST = "first"
    LATER = "later"
    WITHIN = "within"


class Encoders:
    """Encodes text without control strings: it cannot produce a control token, whatever the text
    is. Safe to share between threads.

    The encoders are built, from the result of `document`, when the first text is encoded: an engine
    behind a server may never do so, and they take most of a tokenizer's memory. They run without
    the interpreter's lock, which `tokenizers` releases for batches only.
    """

    def __init__(self, document: Callable[[], Spec]) -> None:
        """Store `document`, which returns a `tokenizer.json` document without control strings, as
        from `without_controls`.
        """
        self._document = document
        self._lock = Lock()
        self._made: dict[TextPlace, tokenizers.Tokenizer] = {}
        self._watch: Callable[[Spec], None] = lambda spec: None

    def watch(self, watch: Callable[[Spec], None]) -> None:
        """Set a callback that is called with the document when the encoders have been built."""
        self._watch = watch

    def __call__(self, text: str, first: bool) -> list[int]:
        """Return the ids of a part of a text; see Codec. Raises RequestError if the tokenizer
        cannot split it into words, ModelError if the encoders cannot be built.
        """
        return self._encoded(text, TextPlace.FIRST if first else TextPlace.LATER)

    def within(self, text: str) -> list[int]:
        """Return the ids of text that continues other text. Raises as `__call__`."""
        return self._encoded(text, TextPlace.WITHIN)

    def _encoded(self, text: str, place: TextPlace) -> list[int]:
        with self._lock:
            if not self._made:
                with _refused():
                    spec = self._document()
                    self._made = _for_places(spec)
                self._watch(spec)
                del spec
                trim_memory()  # Else 60 MB remain for 262,144 tokens.
        encoder = self._made[place]
        try:
            ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
        except BaseException as error:
            if not _of_rust(error):
                raise
            message = f"the model's tokenizer cannot cut this text into words: {error}"
            raise RequestError(message) from error


def without_controls(spec: Spec, controls: set[str]) -> Spec:
    """Return a copy of a `tokenizer.json` document without control strings: they are removed from
    the added tokens, the vocabulary and the merges. The other added tokens move into the
    vocabulary, with their ids.
    """
    model = dict(spec["model"])
    added = [token for token in spec.get("added_tokens") or [] if token["content"] not in controls]
    model["vocab"] = dict(model["vocab"])
    for text in controls - {model.get("unk_token")}:
        model["vocab"].pop(text, None)
    model["vocab"] |= {token["content"]: token["id"] for token in added}
    ends = {control[at:] for control in controls for at in range(1, len(control))}
    model["merges"] = [
        (left, right)
        for left, right in _pairs(model["merges"])
        if right not in ends or left + right not in controls
    ]
    return spec | {"model": model, "added_tokens": added, "post_processor": None}


def _for_places(spec: Spec) -> dict[TextPlace, tokenizers.Tokenizer]:
    """Return an encoder for each place, which share one model; the same one for all if places make
    no difference.
    """
    encoders: list[tuple[Spec, tokenizers.Tokenizer]] = []
    found: dict[TextPlace, tokenizers.Tokenizer] = {}
    model = _bpe(spec["model"])
    for place in TextPlace:
        steps = {
            name: _mapped(spec.get(name), partial(_at, place))
            for name in ("normalizer", "pre_tokenizer")
        }
        same = next((encoder for known, encoder in encoders if known == steps), None)
        found[place] = same or _encoder(model, steps, spec.get("added_tokens") or [])
        encoders.append((steps, found[place]))
    return found


def _bpe(model: Spec) -> models.BPE:
    """Build the model directly; through a JSON document it would take three times as long."""
    rest = {name: model[name] for name in _OF_BPE if model.get(name) is not None}
    return models.BPE(model["vocab"], model["merges"], **rest)


_OF_BPE = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")


def _encoder(model: models.BPE, steps: Spec, added: list[Spec]) -> tokenizers.Tokenizer:
    parts = tokenizers.Tokenizer.from_str(json.dumps(steps | {"model": {**_NO_MODEL}}))
    encoder = tokenizers.Tokenizer(model)
    if parts.normalizer is not None:
        encoder.normalizer = parts.normalizer
    if parts.pre_tokenizer is not None:
        encoder.pre_tokenizer = parts.pre_tokenizer
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    encoder.add_tokens(
        [
            tokenizers.AddedToken(
                token["content"], **{name: bool(token.get(name)) for name in flags}
            )
            for token in added
        ]
    )
    return encoder


_NO_MODEL: Spec = {"type": "BPE", "vocab": {}, "merges": []}


def check_parts(spec: Spec) -> None:
    """Raise ModelError if a `tokenizer.json` document cannot be built. Its vocabulary and merges
    are not checked, which are read when they are needed.
    """
    empty = dict.fromkeys(("post_processor", "truncation", "padding"))
    built(spec | empty | {"model": _NO_MODEL, "added_tokens": []})


def _at(place: TextPlace, step: Spec) -> Spec | None:
    """Return a step without additions before a part, if `place` forbids them; None = the step does
    nothing there.
    """
    kind, scheme = step.get("type"), step.get("prepend_scheme")
    if place == TextPlace.FIRST or (place == TextPlace.LATER and scheme != "first"):
        return step
    if kind == "Metaspace":
        return step | {"prepend_scheme": "never", "add_prefix_space": False}
    if kind == "ByteLevel":
        return step | {"add_prefix_space": False}
    return None if kind == "Prepend" else step


def _mapped(step: Spec | None, change: Callable[[Spec], Spec | None]) -> Spec | None:
    """Return a normalizer or pre-tokenizer with `change` applied to each of its steps."""
    members = {"normalizers", "pretokenizers"} & (step or {}).keys()
    if not step or step.get("type") != "Sequence" or not members:
        return change(step) if step else None
    name = members.pop()
    steps = [new for inner in step[name] or [] if (new := _mapped(inner, change)) is not None]
    return step | {name: steps}


def built(spec: Spec) -> tokenizers.Tokenizer:
    """Build the tokenizer of a `tokenizer.json` document. Raises ModelError if tokenizers refuses
    it.
    """
    with _refused():
        return tokenizers.Tokenizer.from_str(json.dumps(spec))


@contextmanager
def _refused() -> Iterator[None]:
    """Convert errors of the library, including a panic, to ModelError, as a context manager."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not _of_rust(error):
            raise
        raise ModelError(f"the tokenizer cannot be built: {error}") from error


def _of_rust(error: BaseException) -> bool:
    """Return whether an exception is a Rust panic, which is not a subclass of Exception."""
    return type(error).__name__ == "PanicException"


def _pairs(merges: list[Any]) -> Iterable[Sequence[str]]:
    """Return the two parts of each merge, which are a pair or one string with a space between."""
    if str not in set(map(type, merges)):
        return merges
    return (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
