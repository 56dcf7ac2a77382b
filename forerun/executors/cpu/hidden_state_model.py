"""The base of draft models on the compiled core that read the target's hidden states. As it is,
those that read one beside the next token: the target's at first, then their own output
(csrc/draft.h, EagleHead).
"""

import ctypes

import numpy as np

from forerun.errors import EngineError, MemoryPlanError
from forerun.executors.cpu import native
from forerun.executors.cpu.draft_pass import CpuDraftPass, commit, page_slots, run
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.features import CpuFeatures
from forerun.executors.cpu.places import RopeTable
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftExtension,
    DraftLevel,
    DraftModelTraits,
)
from forerun.interface.features import Features, HostFeatures
from forerun.types import Floats


class CpuHiddenStateModel:
    """The DraftModel contract around a native model from `open_native`. Subclasses set `traits`,
    `_weight_bytes` and `_model`.
    """

    traits: DraftModelTraits
    _weight_bytes: int
    _model: int

    def __init__(self, executor: CpuExecutor) -> None:
        self._executor, self._library = executor, native.load()
        self._logits: Floats = np.empty((0, 0), np.float32)

    def open_native(
        self,
        sizes: native.Sizes,
        kind: native.HeadKind | native.BlockKind,
        features: tuple[int, ...],
        ropes: RopeTable,
    ) -> int:
        """Return the core's handle of a new draft model without tensors, which uses the target's
        threads; the target stores `features` for it from now on.

        kind      of a draft head, or of a block drafter
        features  hidden states, as transformers numbers them

        Raises MemoryPlanError if it does not fit.
        """
        aux_layers = np.array(features, np.int32)
        blocks = isinstance(kind, native.BlockKind)
        opened = self._library.forerun_open_block if blocks else self._library.forerun_open_draft
        model: int | None = opened(
            self._executor.native_model(),
            ctypes.byref(sizes),
            ctypes.byref(kind),
            aux_layers.ctypes.data,
            ctypes.byref(ropes),
            self._weight_bytes,
        )
        if model is None:
            raise MemoryPlanError(
                f"the {'block drafter' if blocks else 'draft head'} ({self._weight_bytes:,} bytes "
                f"and its cache) does not fit: {self._library.forerun_error().decode()}; lower the "
                "number of cached tokens"
            )
        self._executor.model.adopt(model, len(features) * int(kind.width))
        return model

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run the token after each one that became permanent, beside the latter's features; write
        pages.

        features  one row per token, of this executor's last step or from a host ring

        Returns Candidates [s,k]. Raises EngineError, and changes nothing, for bad input.
        """
        work = pass_of_extension(extension, features)
        places = page_slots(extension, self._executor.limits)
        candidates = self._run(work, extension.candidates)
        commit(self._library, self._model, places)
        return candidates

    def expand(self, level: DraftLevel) -> Candidates:
        """Run one level of n draft tokens. Returns Candidates [n,k]. Raises EngineError for a bad
        one.
        """
        return self._run(pass_of_level(level), level.candidates)

    def block(self, block: DraftBlock) -> BlockCandidates:
        """Raise EngineError: a draft head proposes level by level."""
        raise EngineError("a draft head proposes level by level, not a block")

    def _run(self, work: CpuDraftPass, candidates: int) -> Candidates:
        return run(
            self._library, self._model, work, self._logits_buffer(len(work.scored)), candidates
        )

    def _logits_buffer(self, scored: int) -> Floats:
        """Return float32[scored or more,.] for logits, as many a row as are scored at once."""
        if scored > len(self._logits) or not self._logits.size:
            self._logits = np.empty((max(1, scored), self._scored_at_once), np.float32)
        return self._logits

    @property
    def _scored_at_once(self) -> int:
        """How many draft ids are scored at a node: all of them."""
        return self.traits.vocab


def pass_of_extension(extension: DraftExtension, features: Features | None) -> CpuDraftPass:
    """Return a pass over the token after each one that became permanent, beside the latter's
    features, with the candidates that the extension wants.

    Raises EngineError if features are missing, of another executor, or not one row per token.
    """
    count = len(extension.tokens)
    sources, host_features = np.zeros(count, np.int32), None
    if isinstance(features, HostFeatures):
        host_features = np.ascontiguousarray(features.values, np.float32)
    elif isinstance(features, CpuFeatures):
        sources = features.nodes.astype(np.int32)
    else:
        raise EngineError("a draft head was extended without features of the compiled core")
    if len(sources if host_features is None else host_features) != count:
        raise EngineError("an extension whose features are not one row per token")
    return CpuDraftPass(
        tokens=extension.next_tokens,
        sources=sources,
        parents=np.full(count, -1, np.int32),
        start=extension.start,
        kv_len=extension.kv_len,
        slots=extension.slots,
        pages=extension.pages,
        first=0,
        scored=extension.scored,
        extend=True,
        features=host_features,
    )


def pass_of_level(level: DraftLevel) -> CpuDraftPass:
    """Return a pass over a level's draft tokens, all scored; each reads its parent's output."""
    slot_outputs = -1 - np.repeat(level.slots, np.diff(level.start))
    return CpuDraftPass(
        tokens=level.tokens,
        sources=np.where(level.parents < 0, slot_outputs, level.parents),
        parents=level.parents,
        start=level.start,
        kv_len=level.kv_len,
        slots=level.slots,
        pages=level.pages,
        first=level.first,
        scored=np.arange(len(level.tokens), dtype=np.int32),
        extend=False,
    )
