"""Chats on disk, with the target's hidden states and distributions at every token: written once,
memory-mapped for training. The files, for C chats with T tokens:

tokens.npy   int32[T]     all chats, one after the other
wanted.npy   bool[T]      token belongs to an answer
starts.npy   int64[C+1]   chat c has tokens starts[c]:starts[c+1]; the last `held_out` chats are
                          for selecting a checkpoint
features.npy uint16[T,F*H]  bits of bfloat16, since some states exceed float16's range (Gemma's
                          reach 103,789); as in train.loss.TrainingBatch

and, where the next token belongs to an answer (elsewhere 0):

choice.npy   int32[T]     the target's argmax for the next token, over the full vocabulary
likely.npy   int32[T,K]   the K most probable draft ids
chance.npy   float16[T,K] their probabilities, normalised to sum to one
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.errors import ModelError
from forerun.train.answers import Chat
from forerun.types import AnyArray, Ints

CROWD = 2


@dataclass(frozen=True, slots=True)
class Corpus:
    """A folder of C chats with T tokens, memory-mapped.

    tokens, loss_mask, starts  int32[T], bool[T] and int64[C+1] of tokens, wanted and starts.npy
    held_out  number of chats, the last ones, that select a checkpoint and are not trained on
    """

    folder: Path
    tokens: Ints
    loss_mask: AnyArray
    starts: AnyArray
    held_out: int

    @property
    def chats(self) -> int:
        """C, the number of chats."""
        return len(self.starts) - 1

    def span(self, chat: int) -> slice:
        """Return the slice of chat `chat`, 0 to C-1, in the flat arrays."""
        return slice(int(self.starts[chat]), int(self.starts[chat + 1]))

    def scored(self, chat: int) -> Ints:
        """Return int32[n], the positions within the chat, ascending, whose next token belongs to an
        answer; the teacher's distributions are stored for these.
        """
        loss_mask = np.asarray(self.loss_mask[self.span(chat)])
        return np.flatnonzero(loss_mask[1:]).astype(np.int32)

    @property
    def longest(self) -> int:
        """Tokens of the longest chat, held-out ones included."""
        return int(np.diff(self.starts).max())

    @property
    def training(self) -> range:
        """Numbers of the chats to train on: all but the last `held_out`."""
        return range(self.chats - self.held_out)

    @property
    def held(self) -> range:
        """Numbers of the chats to select a checkpoint by: the last `held_out`."""
        return range(self.chats - self.held_out, self.chats)


def write_chats(folder: Path, chats: list[Chat], held_out: int) -> Corpus:
    """Store chats in the order of their numbers, and return them memory-mapped.

    folder    created if missing; a corpus in it is replaced
    held_out  chats for evaluation; at least one chat remains for training and, of two or more,
              one for evaluation

    Raises ModelError if there is no chat.
    """
    if not chats:
        raise ModelError("the target wrote no usable answer; nothing to train on")
    chats = sorted(chats, key=lambda chat: chat.number)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = min(max(held_out, 1), len(chats) - 1)
    starts = np.zeros(len(chats) + 1, np.int64)
    starts[1:] = np.cumsum([len(chat.tokens) for chat in chats])
    np.save(folder / "tokens.npy", np.concatenate([chat.tokens for chat in chats]))
    np.save(folder / "wanted.npy", np.concatenate([chat.loss_mask for chat in chats]))
    np.save(folder / "starts.npy", starts)
    write_whole(folder / "corpus.json", json.dumps({"held_out": held_out}))
    return open_corpus(folder)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, since the next run would take a truncated one for complete. Raises
    OSError if the disk refuses.
    """
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def open_corpus(folder: Path) -> Corpus:
    """Memory-map a stored corpus. Raises ModelError if a file is missing, truncated or of another
    corpus.
    """
    try:
        facts = json.loads((folder / "corpus.json").read_text())
        tokens, loss_mask, starts = (
            np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in ("tokens", "wanted", "starts")
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} is no finished corpus ({error}); generate it again") from None
    if len(tokens) != len(loss_mask) or starts[-1] != len(tokens):
        raise ModelError(f"{folder}: the corpus files do not belong together; generate it again")
    return Corpus(folder, tokens, loss_mask, starts, int(facts["held_out"]))


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """A range of a chat's tokens that is one row of a batch."""

    begin: int
    end: int


def batches(
    corpus: Corpus, chats: range, length: int, tokens: int, seed: int
) -> Iterator[list[ChatPiece]]:
    """Yield the batches of one epoch over `chats`: lists of pieces, each the last `length` tokens
    at most of a chat, shuffled by `seed`, with similar lengths together.

    tokens  approximate number of answer tokens in a batch: the loss is a mean over those, so that
            all steps have a similar variance

    A batch with long questions and short answers ends earlier: at CROWD times as many tokens of all
    kinds including padding, which limits the memory.
    """
    random = np.random.default_rng(seed)
    pieces = []
    for chat in chats:
        span = corpus.span(chat)
        begin = max(span.start, span.stop - length)
        pieces.append(ChatPiece(begin, span.stop))
    random.shuffle(pieces)
    groups: list[list[ChatPiece]] = []
    window = 512
    for at in range(0, len(pieces), window):
        ordered = sorted(pieces[at : at + window], key=lambda p: p.end - p.begin)
        group: list[ChatPiece] = []
        answers = 0
        for piece in ordered:
            answer_tokens = int(np.count_nonzero(corpus.loss_mask[piece.begin : piece.end]))
            padded = (len(group) + 1) * (piece.end - piece.begin)
            if group and (answers + answer_tokens > tokens or padded > CROWD * tokens):
                groups.append(group)
                group, answers = [], 0
            group.append(piece)
            answers += answer_tokens
        groups.append(group)
    random.shuffle(groups)
    yield from (group for group in groups if group)


def choose_vocabulary(corpus: Corpus, size: int, vocab: int, forced: Ints) -> Ints:
    """Return int32[Vd], ascending target ids: the `forced` ones, then the most frequent in the
    training answers, then the lowest ids (in merge order these are the commonest tokens). All ids
    if size >= vocab.
    """
    if size >= vocab:
        return np.arange(vocab, dtype=np.int32)
    counts = np.zeros(vocab, np.float64)
    for chat in corpus.training:
        span = corpus.span(chat)
        answer = np.asarray(corpus.tokens[span])[np.asarray(corpus.loss_mask[span])]
        counts += np.bincount(answer, minlength=vocab)
    counts -= np.arange(vocab) / (2 * vocab)  # The lowest id wins ties.
    counts[forced] = np.inf
    chosen = np.argpartition(-counts, size - 1)[:size]
    return np.sort(chosen).astype(np.int32)
