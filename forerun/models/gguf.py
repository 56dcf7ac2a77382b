"""GGUF checkpoints: canonical names, canonical row order, floats on demand."""

from pathlib import Path

from forerun.models.arch import Architecture
from forerun.models.checkpoint import check_whole
from forerun.models.gguf_config import architecture_of
from forerun.models.gguf_header import Value, read_header
from forerun.models.gguf_latent import HeldInTwo
from forerun.models.gguf_naming import held_in_two, of_the_model, stored_parts
from forerun.models.mapped import Packed
from forerun.models.naming import Held
from forerun.types import Floats


class GgufCheckpoint:
    """A GGUF file as a Checkpoint.

    llama.cpp stores the query and key rows of Llama models with each head's halves
    interleaved, for a rotation of neighbouring pairs, and all experts' matrices as one tensor; they
    are put back and taken apart here, so `tensor` and `packed` are always in the half-split order
    of `forerun.models.rope`.
    """

    def __init__(self, path: Path, context: int | None = None) -> None:
        """Map and check the file; ModelError names what is wrong with it.

        context  of the longest text, where the model depends on it (Architecture.for_context)
        """
        self._file = read_header(path)
        self.architecture: Architecture = architecture_of(self._file).for_context(context)
        parts = stored_parts(self._file, self.architecture)
        in_two = held_in_two(self._file, self.architecture)
        halves = [half for held in in_two.values() for half in (held.into, held.out_of)]
        whole = {source: piece.whole for source, piece in parts.values()}
        whole |= {half.name: half.piece.whole for half in halves}
        check_whole(self.architecture, of_the_model(self._file, self.architecture), path, whole)
        self._held: dict[str, Held | HeldInTwo] = {
            name: Held(self._file, *part) for name, part in parts.items()
        }
        self._held |= in_two

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def metadata(self) -> dict[str, Value]:
        """Everything the header says; the tokenizer and chat template live here."""
        return self._file.metadata

    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors."""
        return tuple(self._held)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; KeyError for an unknown name."""
        return self._held[name].piece.shape

    def tensor(self, name: str) -> Floats:
        """The tensor as float32; a read-only view of the file where that is how it is stored."""
        return self._held[name].floats()

    def packed(self, name: str) -> Packed | None:
        """A matrix as stored, rows in canonical order; None for a vector."""
        return self._held[name].packed()
