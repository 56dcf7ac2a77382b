"""The data of a sequence that executors and drafters receive when it gets a slot."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from forerun.speculative.sampling import Sampling
from forerun.types import Ints


class SequenceText(Protocol):
    """The decided tokens of a sequence, prompt and output.

    There is one copy. The engine extends it once per step, between `Executor.finish` and
    `Drafter.observe`; executors and drafters only read it.
    """

    @property
    def tokens(self) -> Ints:
        """int32[total], a read-only view of the tokens decided so far."""
        ...

    @property
    def total(self) -> int:
        """The number of tokens."""
        ...


class TokenText:
    """A SequenceText that no engine extends, for timing steps and replaying answers."""

    def __init__(self, tokens: Sequence[int] | Ints) -> None:
        self.tokens: Ints = np.array(tokens, np.int32)

    @property
    def total(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Append decided tokens."""
        self.tokens = np.append(self.tokens, np.array(tokens, np.int32))


@dataclass(frozen=True, slots=True)
class SlotInit:
    """The data of a sequence that an executor needs when it gets a slot.

    text        all its decided tokens, now and later: the sampler's history, since a plan omits
                tokens that are in the prefix cache. It begins with the prompt, and with output
                after a preemption
    prompt_len  how many of them are the prompt: output position n = index - prompt_len
    prediction  int32[.] the text that the client expects as output, for drafters; often empty
    cached      how many of them are in pages already, from Executor.reusable_prefix_len
    pages       int32[.] its pages; the first ones hold the `cached` tokens
    shared      how many of them fill pages that are cached or on disk; more than `cached` if a
                recurrent state or a window is missing for some
    salt        cached text is shared only among sequences of the same salt
    tenant      64 bits; what is learned from its answer is used only for sequences of this tenant
    adapter     number of its adapter (Executor.adapt); -1 = none
    """

    slot: int
    text: SequenceText
    prompt_len: int
    sampling: Sampling
    prediction: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    cached: int = 0
    pages: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    shared: int = 0
    salt: bytes = b""
    tenant: int = 0
    adapter: int = -1
