"""A whole model as a draft model on the compiled core, sharing its target's threads."""

import ctypes
from dataclasses import replace

import numpy as np

from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.errors import EngineError
from forerun.executors.cpu.draft_model import CpuDraftModel, CpuDraftPass
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.limits import check_runs
from forerun.executors.cpu.places import RopeTable, sizes_for
from forerun.executors.cpu.token_rows import TokenRows
from forerun.executors.cpu.weights import Packer, cache_bytes_per_token
from forerun.executors.draft_model import declared_whole, with_roots
from forerun.interface.draft_model import Candidates, DraftExtension
from forerun.interface.features import Features
from forerun.types import Ints


class CpuDecoderModel(CpuDraftModel):
    """DraftModel on the compiled core, with the 2 to 8 bits of its own file; floats become 8 bits.

    It reads tokens only. Each row's root runs as one more node, and its keys and values are stored
    by slot until the target has decided the next token.

    Raises ModelError for a model that the core cannot run, MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: CpuExecutor, draft: StandaloneDraft) -> None:
        arch, vocabulary = draft.checkpoint.architecture, draft.vocabulary
        check_runs(arch)
        super().__init__(executor, declared_whole(draft, executor.limits.max_nodes))
        self._inputs = vocabulary.inputs
        every = vocabulary.every(arch.vocab)
        rows = None if every else vocabulary.own_ids
        packer = Packer(draft.checkpoint, rows, dtype="q8_0")
        self._model = self._open(draft, packer.planned_bytes())
        packer.load(self._model)
        self._token_rows = TokenRows(draft.checkpoint) if arch.token_vector else None

    def _open(self, draft: StandaloneDraft, weight_bytes: int) -> int:
        arch, limits = draft.checkpoint.architecture, self._executor.limits
        sizes = sizes_for(
            arch,
            limits,
            arch.layers,
            vocab=draft.vocab,
            # The roots of an extension run with its tokens, and every slot stores one.
            max_nodes=limits.max_nodes + 2 * limits.slots,
            context=limits.context + limits.max_nodes + 1,
            cache_item=2,
            cache_bytes=cache_bytes_per_token(arch.caches, 2),
            vectors=arch.token_vector,
        )
        model = self._library.forerun_open_decoder(
            self._executor.native_model(),
            ctypes.byref(sizes),
            limits.slots,
            ctypes.byref(RopeTable(arch.ropes)),
            weight_bytes,
        )
        return self.adopted(model, 0, weight_bytes)

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run the n tokens that became permanent, and each row's root; write the tokens' keys and
        values to pages.

        features  ignored: the model reads tokens only

        Returns Candidates [s,k]. Raises EngineError, and changes nothing, for an invalid extension.
        """
        limits, chains = self._executor.limits, with_roots(extension)
        places = np.empty(len(chains.tokens), np.int32)
        places[chains.own] = self.page_slots(extension)
        behind = limits.pages * limits.page_size + limits.max_nodes + limits.slots
        places[chains.start[1:] - 1] = behind + extension.slots
        work = CpuDraftPass(
            tokens=chains.tokens,
            sources=np.zeros_like(places),
            parents=np.full_like(places, -1),
            start=chains.start,
            kv_len=extension.kv_len,
            slots=extension.slots,
            pages=extension.pages,
            first=0,
            scored=chains.scored,
            extend=True,
        )
        candidates = self.run(work, extension.candidates)
        self.commit(self._model, places)
        return candidates

    def run(self, work: CpuDraftPass, candidates: int, model: int | None = None) -> Candidates:
        """Run one pass over target ids; see CpuDraftModel.run. Raises EngineError for a token out
        of range.
        """
        work = replace(work, tokens=self._own_ids(work.tokens))
        if self._token_rows is not None:
            work = replace(work, token_rows=self._token_rows.of(work.tokens))
        return super().run(work, candidates)

    def _own_ids(self, tokens: Ints) -> Ints:
        """Return the draft's own ids of target ids int32[n]. Raises EngineError for an id out of
        range.
        """
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(self._inputs):
            raise EngineError("a draft step was refused: a token out of range")
        own: Ints = self._inputs[tokens]
        return own
