"""Counts an n-gram table of ordinary text, for a model whose draft has none.

A text ships with the package (forerun/drafts/text). It is tokenised and counted once for every
tokenizer, in a process of its own at the lowest priority while the model already serves, and stored
in the cache. A first part of it is ready sooner than all of it.

    python -m forerun.build.text_table MODEL REVISION FILE

counts the text with a model's tokenizer into FILE, and prints a line for each of the two parts.
"""

import hashlib
import logging
import lzma
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forerun.cache_dir import cache_dir
from forerun.drafts.ngram_counts import count_ngrams, write_table
from forerun.drafts.ngram_table import NgramTable, read_ngram_table
from forerun.errors import ConfigError, ForerunError
from forerun.hub.catalog import open_model
from forerun.text.tokenizer import Tokenizer

log = logging.getLogger("forerun.build")

TEXT = Path(__file__).parents[1] / "drafts" / "text" / "text.xz"
"""Answers to chats and pieces of documents, separated by form feeds, in an order in which every
beginning is a sample of the whole.
"""
PIECE = 4096
"""Characters of a user's text that are tokenised at once. No n-gram crosses the end of a piece."""
FIRST = 0.25
"""Share of the text that is counted first. (Replayed, answers of Gemma 3 270M at T=0 and .8, eight
draft tokens, tokens a step: 2.45 and 1.47 without a table, 2.71 and 1.66 with this part, 2.81 and
1.73 with all.)"""
FIRST_PART = ".first.safetensors"
MIN_VOCAB = 4096
"""Smaller vocabularies get no table: their tokens are letters and parts of syllables, and four of
them predict little.
"""
VERSION = 2
"""Part of a stored table's name: raised when the text or the way of counting changes."""

_UNSTORED: dict[Path, NgramTable] = {}
"""Tables counted for this process that the cache could not store, by the files they would have."""


def pieces_of(paths: Iterable[Path] = ()) -> list[str]:
    """Return the pieces of these text files; without `paths`, of the text that ships.

    Raises ConfigError naming a file that cannot be read or is no UTF-8.
    """
    if not (paths := list(paths)):
        return lzma.decompress(TEXT.read_bytes()).decode().split("\f")
    pieces = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
        pieces += [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    return pieces


def count(tokenizer: Tokenizer, vocab: int, pieces: Iterable[str]) -> NgramTable:
    """Count the n-grams of texts. vocab: V of the target."""
    tokens: list[int] = []
    starts = [0]
    for piece in pieces:
        tokens += tokenizer.encode_part(piece, False)
        starts.append(len(tokens))
    ids = np.array(tokens, np.int64)
    table = count_ngrams(ids, np.ones(len(ids), np.bool_), np.array(starts), vocab)
    return replace(table, answers=False)


def file_of(tokenizer: Tokenizer, vocab: int) -> Path:
    """Return the file in the cache for the table of a tokenizer, whether it exists or not."""
    name = hashlib.sha256(f"{VERSION} {vocab}\n".encode())
    name.update(tokenizer.pieces.starts.tobytes())
    name.update(tokenizer.pieces.joined)
    return cache_dir() / "tables" / f"{name.hexdigest()[:24]}.safetensors"


def cached_table(tokenizer: Tokenizer, vocab: int) -> NgramTable | None:
    """Return the complete table of a tokenizer from the cache, or, if the cache cannot be written,
    the one counted for this process; None if there is none that can be read.
    """
    path = file_of(tokenizer, vocab)
    with suppress(ForerunError, OSError):
        if path.exists():
            return read_ngram_table(path, vocab)
    return _UNSTORED.get(path)


@dataclass
class TextTable:
    """A table that exists or is being counted.

    sentence  which of these, for the start line
    """

    sentence: str
    _worker: "subprocess.Popen[str] | None" = None
    _reader: threading.Thread | None = None

    @property
    def counting(self) -> bool:
        """Whether the table was not in the cache and has to be counted."""
        return self._worker is not None

    def wait(self) -> None:
        """Wait until the table is counted and in use, or counting has failed."""
        if self._reader is not None:
            self._reader.join()

    def close(self) -> None:
        """End the counting process. Idempotent."""
        if self._worker is not None:
            self._worker.kill()


def load_or_count(
    model: str,
    revision: str | None,
    tokenizer: Tokenizer,
    vocab: int,
    use: Callable[[NgramTable], None],
) -> TextTable:
    """Call `use` with the table of a model's tokenizer: at once if the cache has it or its first
    part; else on another thread once the first part is counted, and again once all is.

    model, revision  its reference, which the counting process opens
    vocab            V of the model
    """
    if (table := cached_table(tokenizer, vocab)) is not None:
        use(table)
        return TextTable("with an n-gram table of ordinary text")
    stored = file_of(tokenizer, vocab)
    with suppress(ForerunError, OSError):
        if (part := stored.with_suffix(FIRST_PART)).exists():
            use(read_ngram_table(part, vocab))
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        path, scratch = stored, None
        if not os.access(stored.parent, os.W_OK):
            raise OSError
    except OSError:  # It is counted again at the next start.
        try:
            scratch = tempfile.TemporaryDirectory(prefix="forerun-table-")
        except OSError:
            return TextTable("without an n-gram table of ordinary text: no folder can be written")
        path = Path(scratch.name, stored.name)
    command = [sys.executable, "-m", "forerun.build.text_table", model, revision or "", str(path)]
    worker = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # Closed when this process ends in any way.
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def wait() -> None:
        assert worker.stdout is not None and worker.stderr is not None
        for line in worker.stdout:
            with suppress(OSError):
                use(table := read_ngram_table(Path(line.strip()), vocab))
                if scratch is not None:
                    _UNSTORED[stored] = table
        errors, code = worker.stderr.read().strip(), worker.wait()
        if code > 0:
            reason = errors.splitlines()[-1] if errors else f"code {code}"
            log.warning("no n-gram table of ordinary text was counted: %s", reason)
        if scratch is not None:
            scratch.cleanup()

    reader = threading.Thread(target=wait, name="forerun-text-table", daemon=True)
    reader.start()
    sentence = "an n-gram table of ordinary text is being counted beside serving"
    return TextTable(sentence, worker, reader)


def _watch_parent() -> None:
    """End this process when its parent ends, which closes standard input."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def _stand_back() -> None:
    """Run only while no other process is ready to run, if the system supports that; else at the
    lowest priority.
    """
    if hasattr(os, "nice"):
        os.nice(19)
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _parts(pieces: list[str]) -> Iterator[list[str]]:
    yield pieces[: int(FIRST * len(pieces))]
    yield pieces


def main() -> None:
    """Count the text with a model's tokenizer in this process (see the module)."""
    threading.Thread(target=_watch_parent, daemon=True).start()
    _stand_back()
    reference, revision, path = sys.argv[1:]
    model, complete, pieces = (
        open_model(reference, revision=revision or None),
        Path(path),
        pieces_of(),
    )
    first = complete.with_suffix(FIRST_PART)
    for part, target in zip(_parts(pieces), (first, complete), strict=True):
        write_table(count(model.tokenizer, model.architecture.vocab, part), target)
        print(target, flush=True)  # noqa: T201 - the parent reads it
    first.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
