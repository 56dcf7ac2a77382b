"""A whole model as a draft model on the compiled core, with its target's threads."""

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np

from forerun.drafts.whole_draft import WholeDraft
from forerun.errors import EngineError, MemoryPlanError
from forerun.executors.cpu import native
from forerun.executors.cpu.draft_pass import CpuDraftPass, commit, page_slots, run
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.latent import sizes_of
from forerun.executors.cpu.limits import check_runs
from forerun.executors.cpu.places import RopeTable
from forerun.executors.cpu.token_rows import TokenRows
from forerun.executors.cpu.weights import Packer, cache_bytes_per_token
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftExtension,
    DraftLevel,
    DraftModelTraits,
)
from forerun.interface.features import Features
from forerun.types import Ints


class CpuDecoderModel:
    """DraftModel on the compiled core, in its own file's 4 to 8 bits; floats become 8.

    It reads tokens alone. Each row's root runs as one more node, and its keys and values stay in a
    place of the row's slot until the target has decided the next token.

    Raises ModelError for a model that the core cannot run, MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: CpuExecutor, draft: WholeDraft) -> None:
        arch, vocabulary = draft.checkpoint.architecture, draft.vocabulary
        check_runs(arch)
        self.traits = DraftModelTraits(
            name=draft.algorithm,
            cache=draft.cache,
            target_ids=vocabulary.target_ids,
            max_nodes=executor.limits.max_nodes,
        )
        self._executor, self._draft, self._library = executor, draft, native.load()
        self._inputs = vocabulary.inputs
        every = vocabulary.every(arch.vocab)
        rows = None if every else vocabulary.own_ids
        packer = Packer(self._library, draft.checkpoint, rows, dtype="q8_0")
        self._weight_bytes = packer.planned_bytes()
        self._model = self._open()
        packer.load(self._model)
        self._logits = np.empty((0, draft.vocab), np.float32)
        vectors = draft.checkpoint.architecture.token_vector
        self._token_rows = TokenRows(draft.checkpoint) if vectors else None

    def _open(self) -> int:
        arch, limits = self._draft.checkpoint.architecture, self._executor.limits
        sizes = native.Sizes(
            layers=arch.layers,
            hidden=arch.hidden,
            heads=arch.heads,
            kv_heads=arch.kv_heads,
            head_size=arch.head_size,
            ffn=arch.ffn,
            vocab=self._draft.vocab,
            page_size=limits.page_size,
            pages=limits.pages,
            # The roots of an extension run beside its tokens, and every slot stores one.
            max_nodes=limits.max_nodes + 2 * limits.slots,
            context=limits.context + limits.max_nodes + 1,
            threads=1,
            cache_item=2,
            cache_bytes=cache_bytes_per_token(arch.caches, 2),
            vectors=arch.token_vector,
            norm_eps=arch.norm_eps,
            **sizes_of(arch.latent),
        )
        model: int | None = self._library.forerun_open_decoder(
            self._executor.native_model(),
            ctypes.byref(sizes),
            limits.slots,
            ctypes.byref(RopeTable(arch.ropes)),
            self._weight_bytes,
        )
        if model is None:
            raise MemoryPlanError(
                f"the draft model ({self._weight_bytes:,} bytes and its cache) does not fit: "
                f"{self._library.forerun_error().decode()}; lower the number of cached tokens"
            )
        self._executor.model.adopt(model, 0)
        return model

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run the n tokens that became permanent, and each row's root; write the tokens' entries to
        pages.

        features  ignored: the model reads tokens alone

        Returns Candidates [s,k]. Raises EngineError, and changes nothing, for an invalid extension.
        """
        limits, rows = self._executor.limits, len(extension.kv_len)
        row = np.repeat(np.arange(rows), np.diff(extension.start))
        count = len(row)
        start = (extension.start + np.arange(rows + 1)).astype(np.int32)
        token_nodes, root_nodes = np.arange(count) + row, start[1:] - 1
        tokens = np.empty(count + rows, np.int32)
        tokens[token_nodes] = extension.tokens
        tokens[root_nodes] = extension.next_tokens[extension.start[1:] - 1]
        places = np.empty(count + rows, np.int32)
        places[token_nodes] = page_slots(extension, limits)
        behind = limits.pages * limits.page_size + limits.max_nodes + limits.slots
        places[root_nodes] = behind + extension.slots
        candidates = self._run(
            CpuDraftPass(
                tokens=self._own_ids(tokens),
                sources=np.zeros(count + rows, np.int32),
                parents=np.full(count + rows, -1, np.int32),
                start=start,
                kv_len=extension.kv_len,
                slots=extension.slots,
                pages=extension.pages,
                first=0,
                scored=(extension.scored + row[extension.scored] + 1).astype(np.int32),
                extend=True,
            ),
            extension.candidates,
        )
        commit(self._library, self._model, places)
        return candidates

    def expand(self, level: DraftLevel) -> Candidates:
        """Run one level of n draft tokens. Returns Candidates [n,k]. Raises EngineError for a bad
        one.
        """
        nodes = np.arange(len(level.tokens), dtype=np.int32)
        work = CpuDraftPass(
            tokens=self._own_ids(level.tokens),
            sources=np.zeros_like(nodes),
            parents=level.parents,
            start=level.start,
            kv_len=level.kv_len,
            slots=level.slots,
            pages=level.pages,
            first=level.first,
            scored=nodes,
            extend=False,
        )
        return self._run(work, level.candidates)

    def block(self, block: DraftBlock) -> BlockCandidates:
        """Raise EngineError: a whole model proposes level by level."""
        raise EngineError("a whole model proposes level by level, not a block")

    def _own_ids(self, tokens: Ints) -> Ints:
        """Return the draft's own ids of target ids."""
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(self._inputs):
            raise EngineError("a draft step was refused: a token out of range")
        own: Ints = self._inputs[tokens]
        return own

    def _run(self, work: CpuDraftPass, candidates: int) -> Candidates:
        if len(work.scored) > len(self._logits):
            self._logits = np.empty((len(work.scored), self.traits.vocab), np.float32)
        if self._token_rows is not None:
            work = replace(work, token_rows=self._token_rows.of(work.tokens))
        return run(self._library, self._model, work, self._logits, candidates)

    def describe(self) -> dict[str, Any]:
        """Return algorithm, model, layers, vocab, shared_tokens and weight_bytes for
        /server_info.
        """
        return {
            "algorithm": self._draft.algorithm,
            "model": self._draft.name,
            "layers": self._draft.checkpoint.architecture.layers,
            "vocab": self.traits.vocab,
            "shared_tokens": self._draft.vocabulary.shared,
            "weight_bytes": self._weight_bytes,
        }
