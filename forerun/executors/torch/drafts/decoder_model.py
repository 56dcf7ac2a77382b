"""A whole model as a draft model, in torch: the target's own decoder class with a cache of its own.
It reads tokens alone. Each row's root is run as an additional node, whose keys and values are kept
by slot until the target has decided which token follows (draft_cache.py).
"""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.executors.draft_model import declared_whole
from forerun.executors.torch.decoder.decoder import Decoder
from forerun.executors.torch.decoder.layers import Linear, padded_rows
from forerun.executors.torch.drafts.level_model import LevelModel, Nodes
from forerun.executors.torch.drafts.loading import allocated, head_rows
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.memory import kv_shape
from forerun.executors.torch.triton.kernels import parts_of


class TorchDecoderModel(LevelModel):
    """DraftModel in torch, on the device and in the dtype of its target. Only keys and values are
    passed from one step to the next. Raises MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: TorchTarget, draft: StandaloneDraft) -> None:
        device, dtype, limits = executor.device, executor.dtype, executor.limits
        checkpoint = draft.checkpoint
        shape = kv_shape(checkpoint.architecture)
        declared = declared_whole(draft, limits.max_nodes, runs_roots=True)
        attention = tuple(spec.attention for spec in checkpoint.architecture.layer_specs)
        cache, taken = allocated(executor, draft.parameters, shape, 0, True, attention)
        parts = parts_of(executor.kernels)
        decoder = self._decoder = Decoder(checkpoint, device, dtype, parts=parts)
        # As in the target, rows are padded only if our kernels are not used.
        self._row_sizes = decoder.row_sizes if executor.kernels is None else ()
        if not draft.vocabulary.every(checkpoint.architecture.vocab):
            decoder.head = Linear(head_rows(executor, checkpoint, draft.vocabulary.own_ids))
        self._inputs = torch.from_numpy(draft.vocabulary.inputs.astype(np.int64)).to(device)
        super().__init__(executor, declared, cache, decoder.ropes, decoder.arch.heads, 0)
        self.facts |= taken

    def enter(self, features: Tensor | None) -> Tensor:
        """Return an empty tensor [0,0]: the model reads only tokens."""
        return self.outputs[:0]

    def forward(self, nodes: Nodes, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the nodes through all layers. Returns (hidden [n,H], [n,0]), since this model has no
        feedback.
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
        """Return draft logits [n,Vd] for residual streams [n,H] after the last layer, in the
        decoder's `logits_dtype`.
        """
        return self._decoder.read(self._decoder.final_norm(read))
