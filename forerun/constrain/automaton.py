"""What a grammar library must be able to do: the contract of every matcher behind Matcher."""

from collections.abc import Sequence
from typing import Protocol, Self

from forerun.constrain.grammar import Grammar


class Automaton(Protocol):
    """A place in a compiled grammar. Used by one thread at a time.

    A mask is a function of the tokens taken and of nothing else: on that rests that speculation
    changes no text. An automaton therefore only moves forward: libraries' rollback is not to be
    trusted with that (docs/upstream/llguidance-rollback.md). To come back, keep a fork.
    """

    @property
    def size(self) -> int:
        """Estimated bytes of the compiled grammar."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the text is whole and nothing but its end may follow."""
        ...

    @property
    def error(self) -> str:
        """Why it failed, for good; empty while it has not. Its forks made before have not."""
        ...

    def fork(self) -> Self:
        """Another one at the same place; what becomes of one does not touch the other."""
        ...

    def take(self, token: int) -> bool:
        """Step over `token`. False where it does not fit; then nothing has changed, unless a
        limit was reached (see error).
        """
        ...

    def forced(self) -> list[int]:
        """Tokens that alone can follow, in order; often none. The mask of each allows no other."""
        ...

    def mask(self) -> bytes:
        """Bits of the tokens that may follow, one per id of the tokenizer."""
        ...


class Backend(Protocol):
    """A library that compiles grammars.

    command, init_message  of its compiling process: see SandboxProcess
    """

    @property
    def command(self) -> Sequence[str]:
        """See above."""
        ...

    def init_message(self) -> str | None:
        """See above."""
        ...

    def check(self, grammar: Grammar) -> None:
        """Raise RequestError naming what this library would not honour."""
        ...

    def build(self, grammar: Grammar, compiled: str) -> Automaton | str:
        """An automaton at the beginning of what the process has compiled, or why there is none."""
        ...

    def explained(self, grammar: Grammar, message: str) -> str:
        """A message of the library's in one piece, with the field and the place at fault."""
        ...
