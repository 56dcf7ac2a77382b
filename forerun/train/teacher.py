"""Computes the target's hidden states and logits at every token of a chat, for the trainer.

There are two implementations: the compiled core, which serving uses too and which is about four
times as fast, and dense float32 on torch, for targets or machines that the core does not support.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.executors.cpu import HiddenStates
from forerun.train.target import DenseTarget
from forerun.types import Floats, Ints

Teacher = Callable[[Ints, Ints], tuple[Floats, Floats]]
"""Token ids int32[T] of one chat and ascending positions int32[n] -> features [T,F*H] and logits
[n,V] of the token after each of these positions.
"""


@contextmanager
def core_teacher(
    checkpoint: Checkpoint, features: tuple[int, ...], longest: int, threads: int | None = None
) -> Iterator[Teacher]:
    """Yield the Teacher on the compiled core, for chats of at most `longest` tokens, as a context
    manager that frees the core at its end.

    features  hidden states to return, as transformers numbers them
    threads   None = the core's own choice

    Raises as CpuExecutor does.
    """
    states = HiddenStates(checkpoint, features, longest, threads)
    try:
        yield states.run
    finally:
        states.shutdown()


@contextmanager
def dense_teacher(target: DenseTarget, features: tuple[int, ...]) -> Iterator[Teacher]:
    """Yield the Teacher that runs `target` on the CPU in one causal pass, as a context manager.
    Slower than `core_teacher`.
    """

    @torch.no_grad()
    def teach(tokens: Ints, scored: Ints) -> tuple[Floats, Floats]:
        """Implement Teacher; both results are in the CPU's memory."""
        found, last = target.run(torch.tensor(tokens, dtype=torch.int64)[None], features)
        logits = target.logits(last[0, torch.from_numpy(np.asarray(scored, np.int64))])
        return found[0].numpy(), logits.numpy()

    yield teach
