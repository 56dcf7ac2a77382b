"""Converts text to token ids and back, with the same results as the model author's own tokenizer.

A user's text must never become a control token such as `<|im_end|>`. So text is cut at control
strings only on request, and the encoder for the rest does not know them. Decoding works on bytes,
because a token may be half a character.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ModelError, RequestError
from forerun.text.encoders import Encoders, built, check_parts, without_controls
from forerun.text.gguf import tokenizer_json
from forerun.text.length_bound import UNKNOWN, LengthBound, length_bound
from forerun.text.pieces import Pieces, PieceTable, pieces_of
from forerun.text.tokenizer_limits import (
    check_limits,
    prefix_of,
    served,
    suffix_of,
    without_foreign,
)
from forerun.types import Bools, Ints

_AT_ONCE = 1 << 16
"""Ids that are converted while no other thread can run: about a millisecond."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class Codec(Protocol):
    """Encodes text in which control strings are ordinary text."""

    def __call__(self, text: str, first: bool) -> list[int]:
        """Return the ids of `text`, which has no lone surrogate; `first` = it begins the whole
        text.
        """
        ...


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A string that is one token wherever it occurs.

    control       users cannot write it (end of turn and the like)
    before, after it includes the white space on that side
    whole_word    it counts only if no letter is adjacent to it
    """

    id: int
    text: str
    control: bool
    before: bool = False
    after: bool = False
    whole_word: bool = False


@dataclass(frozen=True, slots=True)
class TextEnds:
    """The ids with which texts begin and end.

    eos_ids  ids that end a text, the declared one first
    bos_id   begin-of-text id, if there is one
    prefix   ids that the model expects before an ordinary text
    suffix   ids that it expects after a text for an embedding
    named    texts of special tokens in the model's files, by their names in chat templates
             (`eos_token`); None if the files declare that there is none
    """

    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    named: Mapping[str, str | None] = field(default_factory=dict)


class Tokenizer:
    """Encodes and decodes. Immutable; safe to share between threads.

    vocab_size      one more than the largest id
    added           text -> token that is matched as a whole, control or not
    special_ids     ids of the control tokens, including added tokens that end a text
    eos_ids         ids that end a text, the declared one first
    bos_id          begin-of-text id, if there is one
    suffix          ids after a text for an embedding
    ends            all of these, as TextEnds
    plain           encodes parts of a text
    bound           returns the bound of the number of tokens of a text
    pieces          bytes that each id below vocab_size stands for; other ids stand for none
    names           texts of special tokens by their names in chat templates: bos_token, eos_token
                    and the like, as far as there are any
    leading_spaces  most spaces that decoding removes at the beginning (SentencePiece: 1)
    """

    def __init__(
        self,
        plain: Codec,
        pieces: Pieces,
        added: Iterable[AddedToken],
        ends: TextEnds,
        whole: Callable[[], dict[str, Any]] | None = None,
        bound: Callable[[], LengthBound] = lambda: UNKNOWN,
        within: Callable[[str], list[int]] | None = None,
    ) -> None:
        """Store the parts of a tokenizer.

        whole   returns its `tokenizer.json` document; None = there is none
        within  encodes text that continues other text; None = as any later part
        """
        self.added = {token.text: token for token in added}
        self.special_ids = frozenset(token.id for token in self.added.values() if token.control)
        table = pieces.table
        self.pieces = table if isinstance(table, PieceTable) else PieceTable.of(table)
        self.vocab_size = len(table)
        self.eos_ids = ends.eos_ids
        self.bos_id = ends.bos_id
        self.suffix = ends.suffix
        self.leading_spaces = pieces.leading_spaces
        self.ends = ends
        self.plain = plain
        self._whole = whole
        self._within = within or (lambda text: plain(text, False))
        self.bound = bound
        outside = [id for id in self.eos_ids if not 0 <= id < self.vocab_size]
        if outside:
            raise ModelError(f"end-of-text ids {outside} are not below {self.vocab_size}")
        first = {"bos_token": ends.bos_id, "eos_token": next(iter(ends.eos_ids), None)}
        texts = {name: self._text(id) for name, id in first.items() if id is not None}
        self.names = {name: text for name, text in {**texts, **ends.named}.items() if text}

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Pattern of control strings, compiled on first use: with thousands, as in Gemma, it takes
        a tenth of the start.
        """
        return matcher(token.text for token in self.added.values() if token.control)

    @cached_property
    def control_within(self) -> dict[str, int]:
        """Ids, by text, of the control tokens that do not end a text."""
        ends = set(self.eos_ids)
        return {
            text: token.id
            for text, token in self.added.items()
            if token.control and token.id not in ends
        }

    @classmethod
    def byte_level(cls) -> Self:
        """Return a tokenizer whose ids 0..255 are bytes, 256..258 the control tokens of ChatML.
        Needs no file.
        """
        names = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        added = [AddedToken(256 + index, text, True) for index, text in enumerate(names)]
        table = [bytes([value]) for value in range(256)] + [name.encode() for name in names]
        return cls(
            lambda text, first: list(text.encode()),
            Pieces(tuple(table), 0),
            added,
            TextEnds((added[1].id, added[2].id)),
            bound=lambda: LengthBound(max(map(len, table)), ascii=False, blanks=1),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        again: Callable[[], Mapping[str, Any]] | None = None,
    ) -> Self:
        """Return the tokenizer of the `tokenizer.*` keys of a GGUF file, given as plain Python
        values.

        again  returns the keys again, when a text is encoded; None = `metadata` is kept

        Raises ModelError naming the key that is missing or of an unknown kind.
        """
        known = tokenizer_json(metadata, merges=False)
        again = again or (lambda: metadata)
        return cls._from_json(
            known.spec,
            known.eos_ids,
            known.bos_id,
            lambda: tokenizer_json(again()).spec,
            twins=known.twins,
        )

    @classmethod
    def from_file(
        cls,
        path: Path | str,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        names: Mapping[str, str | None] | None = None,
        vocab: int | None = None,
    ) -> Self:
        """Return the tokenizer of a `tokenizer.json`; end-of-text and begin-of-text ids come from
        the model's configuration files.

        names  special tokens in other files of the tokenizer (TextEnds.named): `bos_token`
               overrides `bos_id`, `eos_token` is added to `eos_ids`
        vocab  added tokens with ids from this on are dropped: the model has no embeddings for them
               (images and the like)

        Raises ModelError if the file cannot be read, exceeds the limits (check_limits), or is of an
        unsupported kind.
        """
        spec = document(Path(path), vocab)
        whole = partial(_unpacked, zlib.compress(json.dumps(spec).encode(), 1))
        return cls._from_json(spec, tuple(eos_ids), bos_id, whole, names or {})

    @classmethod
    def _from_json(
        cls,
        spec: dict[str, Any],
        eos_ids: tuple[int, ...],
        bos_id: int | None,
        whole: Callable[[], dict[str, Any]],
        names: Mapping[str, str | None] | None = None,
        twins: Mapping[int, str] | None = None,
    ) -> Self:
        """Return the tokenizer of a `tokenizer.json` document, without keeping it: `whole` returns
        it again, with its merges, when a text is encoded.
        """
        named = names or {}
        try:
            spec = served(spec)
            check_limits(spec)
            added = [_added_token(token) for token in spec.get("added_tokens") or []]
            pieces = pieces_of(spec, twins)
            check_parts(spec)
            vocab = spec["model"]["vocab"] | {token.text: token.id for token in added}
            # Text that is no token cannot be sampled: it ends nothing.
            known = {name: vocab.get(text) for name, text in named.items() if text}
            eos_id = known.get("eos_token")
            if eos_id is not None:
                eos_ids = tuple(dict.fromkeys([*eos_ids, eos_id]))
            # What ends a text is no part of one, whatever the file calls it.
            added = [replace(one, control=one.control or one.id in eos_ids) for one in added]
            controls = {token.text for token in added if token.control}
            codec = Encoders(lambda: without_controls(_checked(whole()), controls))
            around = prefix_of(spec), suffix_of(spec)
        except ModelError:
            raise
        except Exception as error:  # A part of another type than it must have.
            raise ModelError(f"the tokenizer cannot be built: {error!r}") from error
        bos_id = known.get("bos_token") if "bos_token" in named else bos_id
        ends = TextEnds(eos_ids, bos_id, *around, named)
        texts = [token.text for token in added]
        parts = {name: value for name, value in spec.items() if name != "model"}
        bound = cache(lambda: length_bound(parts, pieces.table, texts))
        return cls(codec, pieces, added, ends, whole, bound, codec.within)

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`. Raises ModelError for a tokenizer of bytes, OSError if the disk
        refuses.
        """
        if self._whole is None:
            raise ModelError("a tokenizer of bytes has no file")
        path.write_text(built(self._whole()).to_str(pretty=True), encoding="utf-8")

    def warm_up(self) -> None:
        """Build the encoders, which the first text would have to wait for: a fraction of a second,
        with 262k scored tokens some seconds. An engine behind a server, which gets ids, needs them
        only for grammars. Raises ModelError if the file is damaged.
        """
        self.encode_part("", first=True)
        self.least_tokens("")
        self._controls.search("")

    def encode(self, text: str, specials: bool = False, bos: bool = False) -> Ints:
        """Return int32[T], the ids of `text`.

        specials  control strings in the text become their ids; else they are ordinary text
        bos       begin with the ids that the model expects before an ordinary text

        Raises RequestError if the text has a lone surrogate.
        """
        ids = list(self.ends.prefix) if bos else []
        parts = self.split(text, self._controls) if specials else iter([text])
        for index, part in enumerate(parts):
            ids += [part] if isinstance(part, int) else self.encode_part(part, index == 0)
        return as_ids(ids)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of `text`, without encoding it; 0 if that is
        unknown.
        """
        return self.bound().lower_bound(text)

    def encode_part(self, text: str, first: bool) -> list[int]:
        """Return the ids of a part of a text, in which control strings are ordinary text.

        first  it begins the whole text (SentencePiece puts a space there); else it follows a
               control token

        Raises RequestError if it has a lone surrogate, or the tokenizer cannot split it into words.
        """
        _check_unicode(text)
        return self.plain(text, first)

    def encode_within(self, text: str) -> list[int]:
        """Return the ids of text that continues other text: no space is put before it. Raises as
        encode_part.
        """
        _check_unicode(text)
        return self._within(text)

    def split(self, text: str, strings: re.Pattern[str]) -> Iterator[str | int]:
        """Cut the text at the added tokens that `strings` (see matcher) matches: yields their ids
        and the texts between them, in order, without empty texts.
        """
        start = 0
        for match in strings.finditer(text):
            token = self.added[match[0]]
            left, right = match.span()
            if token.whole_word and (_is_word(text, left - 1) or _is_word(text, right)):
                continue
            while token.before and left > start and text[left - 1].isspace():
                left -= 1
            while token.after and right < len(text) and text[right].isspace():
                right += 1
            if left > start:
                yield text[start:left]
            yield token.id
            start = right
        if start < len(text):
            yield text[start:]

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that token `id` stands for, possibly half a character; b"" for an id
        without a token.
        """
        return self.pieces[id] if 0 <= id < len(self.pieces) else b""

    def _text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that are not valid UTF-8 become U+FFFD.

        skip_special  skip control tokens
        """
        skipped: Iterable[int] = self.special_ids if skip_special else ()
        parts = [self.token_bytes(int(id)) for id in ids if int(id) not in skipped]
        first = next((index for index, part in enumerate(parts) if part), None)
        if first is not None:
            parts[first] = self.without_lead(parts[first])
        return b"".join(parts).decode("utf-8", "replace")

    def whole_tokens(self, vocab: int) -> Bools:
        """Return bool[vocab]: ids whose bytes are whole characters and that are no special
        tokens.
        """
        whole = np.zeros(vocab, np.bool_)
        for token, piece in enumerate(self.pieces[:vocab]):
            whole[token] = bool(piece) and (piece.isascii() or _is_text(piece))
        whole[[token for token in self.special_ids if token < vocab]] = False
        return whole

    def without_lead(self, piece: bytes) -> bytes:
        """Return the first non-empty piece of a text without the spaces that encoding put there."""
        spaces = len(piece) - len(piece.lstrip(b" "))
        return piece[min(spaces, self.leading_spaces) :]


def document(path: Path, vocab: int | None) -> dict[str, Any]:
    """Return a `tokenizer.json` without added tokens whose ids are `vocab` or more. Raises
    ModelError if it is damaged or no BPE.
    """
    try:
        spec = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read the tokenizer {path}: {error}") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise ModelError(f"{path} is not a tokenizer.json: it has no object named 'model'")
    if spec["model"].get("type") != "BPE":
        raise ModelError(
            f"{path}: the tokenizer's model is {spec['model'].get('type')!r}; "
            "only 'BPE' is supported"
        )
    try:
        return spec if vocab is None else without_foreign(spec, vocab)
    except Exception as error:  # A part of another type than it must have.
        raise ModelError(f"{path}: the tokenizer cannot be built: {error!r}") from error


def _unpacked(packed: bytes) -> dict[str, Any]:
    """Return the document that `from_file` compressed, because the file may change or be
    deleted.
    """
    spec: dict[str, Any] = json.loads(zlib.decompress(packed))
    return spec


def _checked(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a document that is used. Raises ModelError if it exceeds a limit."""
    spec = served(spec)
    check_limits(spec)
    return spec


def matcher(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the strings, the longest if several begin at one place;
    a pattern that matches nothing if there are none.
    """
    longest_first = sorted(filter(None, strings), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _is_word(text: str, index: int) -> bool:
    return 0 <= index < len(text) and re.match(r"\w", text[index]) is not None


def as_ids(numbers: Sequence[int], kind: Any = np.int32) -> NDArray[Any]:
    """Return ids as an array [T] of `kind`, converted in parts, so that other threads run in
    between.
    """
    ids: NDArray[Any] = np.empty(len(numbers), kind)
    for start in range(0, len(ids), _AT_ONCE):
        ids[start : start + _AT_ONCE] = numbers[start : start + _AT_ONCE]
    return ids


def as_numbers(ids: Ints) -> list[int]:
    """Return the ids int32[T] as Python numbers, converted in parts, so that other threads run in
    between.
    """
    numbers: list[int] = []
    for start in range(0, len(ids), _AT_ONCE):
        numbers += ids[start : start + _AT_ONCE].tolist()
    return numbers


def _check_unicode(text: str) -> None:
    bad = _SURROGATE.search(text)
    if bad:
        raise RequestError(
            f"the text has a lone surrogate (U+{ord(bad[0]):04X}) at character "
            f"{bad.start()}; send valid Unicode"
        )


def _added_token(token: dict[str, Any]) -> AddedToken:
    flags = [bool(token.get(name)) for name in ("special", "lstrip", "rstrip", "single_word")]
    return AddedToken(int(token["id"]), str(token["content"]), *flags)


def _is_text(piece: bytes) -> bool:
    try:
        return bool(piece.decode())
    except UnicodeDecodeError:
        return False
