"""Reads GGUF checkpoints: canonical names, canonical row order, floats on demand."""

from hashlib import sha256
from pathlib import Path

from forerun.checkpoints.checkpoint import check_complete
from forerun.checkpoints.gguf.config import architecture_of
from forerun.checkpoints.gguf.header import GgufFile, Value, parsed_header
from forerun.checkpoints.gguf.naming import AnyStored, divided, stored_tensors
from forerun.checkpoints.gguf.parts import read_gguf
from forerun.checkpoints.mapped import Packed
from forerun.networks.arch import Architecture
from forerun.types import Floats


class GgufCheckpoint:
    """A GGUF file, possibly in several parts, as a Checkpoint.

    llama.cpp stores the query and key rows of Llama models with each head's halves interleaved, for
    a rotation of neighbouring pairs, and all experts' matrices as one tensor. Here rows are
    reordered and experts separated, so `tensor` and `packed` always have the half-split order of
    `forerun.networks.rope`.

    prediction_files  as in FolderCheckpoint, of the layers that the metadata declare
    """

    def __init__(self, path: Path, context: int | None = None) -> None:
        """Map and check the file. Raises ModelError naming the fault.

        context  of the longest text, if the model depends on it (Architecture.for_context)
        """
        self._file = read_gguf(path)
        self.architecture: Architecture = architecture_of(self._file).for_context(context)
        self._stored: dict[str, AnyStored] = stored_tensors(self._file, self.architecture)
        parts = [part for item in self._stored.values() for part in item.parts]
        expected = {part.name: part.piece.stored_shape for part in parts}
        own, behind = divided(self._file, self.architecture)
        check_complete(self.architecture, own, path, expected)
        self.prediction_files: dict[str, GgufFile] = dict.fromkeys(behind, self._file)

    @property
    def path(self) -> Path:
        """The file that it is read from."""
        return self._file.path

    @property
    def metadata(self) -> dict[str, Value]:
        """All keys and values of the header, including tokenizer and chat template."""
        return self._file.metadata

    def header_digest(self) -> bytes:
        """Return a hash of the header."""
        return sha256(self._file.data[: self._file.end].data).digest()

    def drop_vocabulary(self) -> None:
        """Drop the lists of tokens, scores and merges, tens of megabytes, from `metadata`;
        `reread_metadata` reads them again.
        """
        for name in ("tokens", "scores", "token_type", "merges"):
            self.metadata.pop(f"tokenizer.ggml.{name}", None)

    def reread_metadata(self) -> dict[str, Value]:
        """Return all metadata, read again from the mapping, which works even if the file was moved
        or deleted.
        """
        return parsed_header(self._file.path, self._file.data).metadata

    def names(self) -> tuple[str, ...]:
        """Return the canonical names of all tensors (arch.expected_tensors)."""
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor of that canonical name. Raises KeyError for an unknown
        one.
        """
        return self._stored[name].piece.shape

    def tensor(self, name: str) -> Floats:
        """Return the tensor as float32, of its `shape`; a read-only view of the file if that is how
        it is stored. Raises KeyError for an unknown name.
        """
        return self._stored[name].floats()

    def packed(self, name: str) -> Packed | None:
        """Return a matrix as stored, rows in canonical order; None for a vector. Raises KeyError
        for an unknown name.
        """
        return self._stored[name].packed()
