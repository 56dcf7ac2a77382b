"""A whole model that drafts, in torch: the target's own decoder class over a cache of its own.

It reads tokens alone. Each row's root is run as one node more, and its keys and values wait by slot
until the target has decided what follows (draft_cache.py).
"""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.drafts.whole_draft import WholeDraft
from forerun.executors.torch.decoder.decoder import Decoder
from forerun.executors.torch.decoder.layers import Linear, padded_rows
from forerun.executors.torch.decoder.weights import some_rows
from forerun.executors.torch.drafts.draft_cache import DraftCache
from forerun.executors.torch.drafts.level_model import LevelModel, Nodes
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.memory import check_fits, kv_shape
from forerun.executors.torch.triton.kernels import parts_of
from forerun.interface.draft_model import DraftModelTraits


class TorchDecoderModel(LevelModel):
    """DraftModel in torch, on the device and in the dtype of its target. Nothing but keys and
    values goes from one step to the next.

    Raises MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: TorchTarget, draft: WholeDraft) -> None:
        device, dtype, limits = executor.device, executor.dtype, executor.limits
        checkpoint = draft.checkpoint
        shape = kv_shape(checkpoint.architecture)
        traits = DraftModelTraits(
            name=draft.algorithm,
            cache=draft.cache,
            target_ids=draft.vocabulary.target_ids,
            max_nodes=limits.max_nodes,
            runs_roots=True,
        )
        taken = {
            "draft_weight": draft.parameters * dtype.itemsize,
            "draft_cache": DraftCache.bytes(shape, limits, dtype),
        }
        check_fits(taken, device)
        parts = parts_of(executor.kernels)
        decoder = self._decoder = Decoder(checkpoint, device, dtype, parts=parts)
        # As of the target: rows are padded only where no kernels of ours run.
        self._row_sizes = decoder.row_sizes if executor.kernels is None else ()
        if not draft.vocabulary.every(checkpoint.architecture.vocab):
            decoder.head = self._some_rows(draft, device, dtype)
        self._inputs = torch.from_numpy(draft.vocabulary.inputs.astype(np.int64)).to(device)
        arch = decoder.arch
        attention = tuple(spec.attention for spec in arch.layer_specs)
        cache = DraftCache(shape, limits, device, dtype, roots=True, attention=attention)
        self.facts = {
            "algorithm": draft.algorithm,
            "model": draft.name,
            "layers": arch.layers,
            "vocab": traits.vocab,
            "shared_tokens": draft.vocabulary.shared,
            **{f"{part}_bytes": count for part, count in taken.items()},
        }
        super().__init__(executor, traits, cache, decoder.ropes, arch.heads, 0)

    def _some_rows(self, draft: WholeDraft, device: torch.device, dtype: torch.dtype) -> Linear:
        """Return the output head's rows of the tokens that may be proposed."""
        tied = draft.checkpoint.architecture.tied_head
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return Linear(some_rows(draft.checkpoint, name, draft.vocabulary.own_ids, device, dtype))

    def enter(self, features: Tensor | None) -> Tensor:
        """Return an empty tensor [0,0]: the model reads only tokens."""
        return self.outputs[:0]

    def forward(self, nodes: Nodes, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the nodes through all layers. Returns (hidden [n,H], [n,0]): this model feeds nothing
        back.
        """
        tokens, rotary = self._inputs[nodes.tokens], nodes.rotary
        more = padded_rows(len(tokens), self._row_sizes) - len(tokens)
        if more:
            tokens = F.pad(tokens, (0, more))
            rotary = tuple(
                (F.pad(cos, (0, 0, 0, more)), F.pad(sin, (0, 0, 0, more))) for cos, sin in rotary
            )
        last, _ = self._decoder.forward(tokens, rotary, nodes.attend)
        last = last[: len(nodes.tokens)]
        return last, last[:, :0]

    def logits(self, read: Tensor) -> Tensor:
        """Draft logits [n,Vd] of streams [n,H] after the last layer, in the decoder's
        `logits_dtype`.
        """
        return self._decoder.read(self._decoder.final_norm(read))
