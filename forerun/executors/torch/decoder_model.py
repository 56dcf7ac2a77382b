"""A whole model that drafts, in torch: the target's own decoder class over a cache of its own.

It reads tokens alone. Each row's root is run as one node more, and its keys and values wait by slot
until the target has decided what follows (draft_cache.py).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.torch.decoder import Decoder, apart
from forerun.executors.torch.draft_cache import (
    DraftCache,
    DraftPass,
    check_extension,
    check_level,
)
from forerun.executors.torch.executor import check_fits
from forerun.executors.torch.layers import PLAIN, Linear, padded_rows
from forerun.executors.torch.target import TorchTarget
from forerun.executors.torch.weights import some_rows
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftLevel,
    DraftModelTraits,
    Extension,
)
from forerun.interface.features import Features
from forerun.models.whole_draft import WholeDraft
from forerun.types import AnyArray


class TorchDecoderModel:
    """DraftModel in torch, on the device and in the dtype of its target.

    Raises MemoryPlanError where it does not fit.
    """

    def __init__(self, executor: TorchTarget, draft: WholeDraft) -> None:
        self._limits, self._device, self._about = executor.limits, executor.device, draft
        self.traits = DraftModelTraits(
            name=draft.algorithm,
            cache=draft.cache,
            target_ids=draft.vocabulary.target_ids,
            max_nodes=executor.limits.max_nodes,
        )
        dtype, checkpoint = executor.dtype, draft.checkpoint
        self._bytes = {
            "draft_weight": draft.parameters * dtype.itemsize,
            "draft_cache": DraftCache.bytes(draft.cache, executor.limits, dtype),
        }
        check_fits(self._bytes, self._device)
        parts = executor.kernels.parts if executor.kernels is not None else PLAIN
        self._decoder = Decoder(checkpoint, self._device, dtype, parts=parts)
        if not draft.vocabulary.every(checkpoint.architecture.vocab):
            self._decoder.head = self._some_rows(draft, dtype)
        self._inputs = torch.from_numpy(draft.vocabulary.inputs.astype(np.int64)).to(self._device)
        attention = tuple(spec.attention for spec in checkpoint.architecture.layer_specs)
        self._cache = DraftCache(
            draft.cache, executor.limits, self._device, dtype, roots=True, attention=attention
        )

    def _some_rows(self, draft: WholeDraft, dtype: torch.dtype) -> Linear:
        """The output head's rows of the tokens that may be proposed."""
        tied = draft.checkpoint.architecture.tied_head
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        which = draft.vocabulary.own_ids
        return Linear(some_rows(draft.checkpoint, name, which, self._device, dtype))

    @torch.inference_mode()
    def extend(self, extension: Extension, features: Features | None) -> Candidates:
        """Run the tokens that became permanent, and each row's root."""
        check_extension(extension, self.traits, self._limits.vocab, self._limits)
        found = self._run(self._cache.extension(extension), extension.candidates)
        self._cache.commit(extension)
        return found

    @torch.inference_mode()
    def expand(self, level: DraftLevel) -> Candidates:
        """Run draft tokens."""
        check_level(level, self.traits, self._limits.vocab, self._limits)
        return self._run(self._cache.level(level), level.candidates)

    def block(self, block: DraftBlock) -> BlockCandidates:
        """A decoder proposes level by level. Raises EngineError."""
        raise EngineError("a whole model proposes level by level, not a block")

    def _run(self, work: DraftPass, candidates: int) -> Candidates:
        decoder = self._decoder
        rows = padded_rows(len(work.tokens), decoder.row_sizes)
        tokens = self._inputs[self._index(work.tokens, rows)]
        rotary = decoder.rotary(self._index(work.position, rows))
        last, _ = decoder.forward(tokens, rotary, apart(work.attend))
        logits = decoder.logits(last[self._index(work.scored, len(work.scored))])
        best, ids = logits.topk(min(candidates, self.traits.vocab), -1)
        log_probs = best - logits.logsumexp(-1, keepdim=True)
        return Candidates(ids.int().cpu().numpy(), log_probs.cpu().numpy())

    def _index(self, values: AnyArray, rows: int) -> Tensor:
        """int64[rows] on the device: values, then zeros."""
        out = np.zeros(rows, np.int64)
        out[: len(values)] = values
        return torch.from_numpy(out).to(self._device)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": self._about.algorithm,
            "model": self._about.name,
            "layers": len(self._about.cache),
            "vocab": self.traits.vocab,
            "shared_tokens": self._about.vocabulary.shared,
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }
