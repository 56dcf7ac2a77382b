"""What executors and drafters are told of a sequence that takes a slot."""

from dataclasses import dataclass, field

import numpy as np

from forerun.speculative.sampling import Sampling
from forerun.types import Ints


@dataclass(frozen=True, slots=True)
class SlotInit:
    """What an executor must know of a sequence when it takes a slot.

    tokens      int32[T] all tokens decided so far (prompt, and output after a preemption);
                the sampler's history, which prefix-cache hits never show in a plan
    prompt_len  how many of them are the prompt: output position n = index - prompt_len
    prediction  int32[.] what the client expects behind the prompt, for drafters; often nothing
    cached      how many of them are in pages already: what Executor.resumable said of them
    shared      how many of them fill pages that were cached; more than `cached` where recurrent
                states were not there for all
    salt        what is kept of its text is for sequences of the same salt alone
    """

    slot: int
    tokens: Ints
    prompt_len: int
    sampling: Sampling
    prediction: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    cached: int = 0
    shared: int = 0
    salt: bytes = b""
