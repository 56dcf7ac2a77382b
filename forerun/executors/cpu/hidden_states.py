"""Computes hidden states and logits of whole token sequences on the compiled core, as in
serving.
"""

import ctypes

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.executors.cpu.executor import CpuExecutor
from forerun.interface.executor import ExecutorLimits
from forerun.types import Floats, Ints

CHUNK = 512
"""Most tokens of one pass: their logits take 100 MB at a vocabulary of 49,152."""

PAGE = 16


class HiddenStates:
    """Runs one sequence at a time, of at most `longest` tokens; nothing is kept between calls.

    features  which hidden states: i = input of layer i (transformers' hidden_states[i])

    Raises the same errors as CpuExecutor.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        features: tuple[int, ...],
        longest: int,
        threads: int | None = None,
    ) -> None:
        arch = checkpoint.architecture
        limits = ExecutorLimits(
            page_size=PAGE,
            pages=-(-longest // PAGE),
            slots=1,
            max_nodes=min(CHUNK, longest),
            context=longest,
            vocab=arch.vocab,
        )
        self._executor = CpuExecutor(checkpoint, limits, threads)
        self._library = native.load()
        self._width = arch.hidden * len(features)
        self._pages = np.arange(limits.pages, dtype=np.int32)
        aux_layers = np.array(features, np.int32)
        self._library.forerun_request_aux_hidden_states(
            self._model(), aux_layers.ctypes.data, len(aux_layers)
        )

    def run(self, tokens: Ints, scored: Ints) -> tuple[Floats, Floats]:
        """Run a text, int32[T] tokens. Returns its features float32[T,F*H], and logits float32[n,V]
        at the positions `scored` int32[n], ascending.

        Raises EngineError if T exceeds `longest` or a token is out of range.
        """
        limits = self._executor.limits
        if len(tokens) > limits.context:
            raise EngineError(f"{len(tokens)} tokens; the longest sequence is {limits.context}")
        features = np.empty((len(tokens), self._width), np.float32)
        logits = np.empty((len(scored), limits.vocab), np.float32)
        for begin in range(0, len(tokens), limits.max_nodes):
            end = min(begin + limits.max_nodes, len(tokens))
            first, last = np.searchsorted(scored, (begin, end))
            self._chunk(tokens[begin:end], begin, scored[first:last] - begin, logits[first:last])
            chunk_features = features[begin:end]
            self._library.forerun_aux_hidden_states(
                self._model(), end - begin, chunk_features.ctypes.data
            )
        return features, logits

    def _chunk(self, tokens: Ints, kv_len: int, scored: Ints, logits: Floats) -> None:
        """Run one pass over a chain of tokens that follows `kv_len` committed ones."""
        count = len(tokens)
        chain = np.arange(count, dtype=np.int32)
        arrays = {
            "tokens": tokens,
            "parents": chain - 1,
            "depth": chain,
            "start": [0, count],
            "known": [count],
            "kv_len": [kv_len],
            "pages": self._pages,
            "scored_nodes": scored,
        }
        int_arrays = {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}
        step = native.StepArrays(
            rows=1,
            nodes=count,
            page_width=len(self._pages),
            scored=len(scored),
            logits=logits.ctypes.data,
            **{name: array.ctypes.data for name, array in int_arrays.items()},
        )
        if self._library.forerun_forward(self._model(), ctypes.byref(step), None):
            raise EngineError(f"a pass was refused: {self._library.forerun_error().decode()}")

    def _model(self) -> int:
        return self._executor.native_model()

    def shutdown(self) -> None:
        """Free the core's threads and memory. Idempotent."""
        self._executor.shutdown()
