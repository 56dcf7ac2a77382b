"""What executors and drafters get to know of a sequence that takes a slot."""

from dataclasses import dataclass, field

import numpy as np

from forerun.speculative.sampling import Sampling
from forerun.types import Ints


@dataclass(frozen=True, slots=True)
class SlotInit:
    """What an executor must know of a sequence when it takes a slot.

    tokens      int32[T] all tokens decided so far (prompt, and output after a preemption); the
                sampler's history, since a plan omits tokens found in the prefix cache
    prompt_len  how many of them are the prompt: output position n = index - prompt_len
    prediction  int32[.] the text that the client expects as output, for drafters; often empty
    cached      how many of them are in pages already, from Executor.resumable
    shared      how many of them fill cached pages; more than `cached` if recurrent states are
                missing for some
    salt        cached text is shared only among sequences of the same salt
    tenant      64 bits; n-grams counted of its answer draft only for sequences of the same tenant
    """

    slot: int
    tokens: Ints
    prompt_len: int
    sampling: Sampling
    prediction: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    cached: int = 0
    shared: int = 0
    salt: bytes = b""
    tenant: int = 0
