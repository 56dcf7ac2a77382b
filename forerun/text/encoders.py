"""Encoders of a `tokenizer.json` that know no control strings, for each place in a text."""

import json
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from threading import Lock
from typing import Any

import tokenizers

from forerun.errors import ModelError, RequestError

Spec = dict[str, Any]


class TextPlace(StrEnum):
    """The place of a part within a text.

    FIRST   at its beginning
    LATER   behind a control token, which may be a beginning of its own
    WITHIN  behind other text: nothing is put before it
    """

    FIRST = "first"
    LATER = "later"
    WITHIN = "within"


class Encoders:
    """Encodes text in which no control string counts: it cannot produce a control token, whatever
    the text says. Safe to share between threads.

    The encoders are made when the first text is encoded, which an engine behind a server never
    does. They run without the interpreter's lock, which `tokenizers` lets go of for batches only.
    """

    def __init__(self, spec: Spec, controls: set[str]) -> None:
        self._spec, self._controls = spec, controls
        self._lock = Lock()
        self._made: dict[TextPlace, tokenizers.Tokenizer] = {}

    def __call__(self, text: str, first: bool) -> list[int]:
        """Return the ids of a part of a text; see Codec. Raises RequestError if the tokenizer
        cannot cut it into words, ModelError if the encoders cannot be built.
        """
        return self._encoded(text, TextPlace.FIRST if first else TextPlace.LATER)

    def within(self, text: str) -> list[int]:
        """Return the ids of text that continues other text. Raises as a call does."""
        return self._encoded(text, TextPlace.WITHIN)

    def _encoded(self, text: str, place: TextPlace) -> list[int]:
        with self._lock:
            if not self._made:
                self._made = _for_places(without_controls(self._spec, self._controls))
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
    kept = [token for token in spec.get("added_tokens") or [] if token["content"] not in controls]
    absent = controls - {model.get("unk_token")}
    vocab = {text: id for text, id in model["vocab"].items() if text not in absent}
    model["vocab"] = vocab | {token["content"]: token["id"] for token in kept}
    model["merges"] = [merge for merge in model["merges"] if _joined(merge) not in controls]
    return spec | {"model": model, "added_tokens": kept, "post_processor": None}


def _for_places(spec: Spec) -> dict[TextPlace, tokenizers.Tokenizer]:
    """Return an encoder for each place; one for all if places make no difference. Raises
    ModelError.
    """
    made: list[tuple[Spec, tokenizers.Tokenizer]] = []
    found: dict[TextPlace, tokenizers.Tokenizer] = {}
    for place in TextPlace:
        steps = {
            name: _mapped(spec.get(name), partial(_at, place))
            for name in ("normalizer", "pre_tokenizer")
        }
        same = next((encoder for known, encoder in made if known == steps), None)
        found[place] = same or built(spec | steps)
        made.append((steps, found[place]))
    return found


def _at(place: TextPlace, step: Spec) -> Spec | None:
    """Return a step that puts nothing before a part at `place` where it should not; None = no
    step.
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
    kept = [new for inner in step[name] or [] if (new := _mapped(inner, change)) is not None]
    return step | {name: kept}


def built(spec: Spec) -> tokenizers.Tokenizer:
    """Build the tokenizer of a `tokenizer.json` document. Raises ModelError."""
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except BaseException as error:
        if not isinstance(error, Exception) and not _of_rust(error):
            raise
        raise ModelError(f"the tokenizer cannot be built: {error}") from error


def _of_rust(error: BaseException) -> bool:
    """Return whether an exception is a panic of Rust, which is no Exception."""
    return type(error).__name__ == "PanicException"


def _joined(merge: str | list[str]) -> str:
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)
