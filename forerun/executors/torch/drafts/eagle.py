"""An EAGLE draft head in torch: the network for training and serving, and the draft model that runs
it next to its target.

EAGLE-3 (arXiv 2503.01840, section 3): features from inside the target are fused to one hidden
state; one decoder layer reads it together with the embedding of the next token; its output is fed
back as the next hidden state. EAGLE-1/2 heads (arXiv 2401.15077) fuse embedding and hidden state
first. Attention is passed in by the caller (draft_layer.py).
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.eagle_config import DraftHead
from forerun.drafts.eagle_folder import DraftFile
from forerun.executors.draft_model import declared_head
from forerun.executors.torch.attention.kv import KvShape
from forerun.executors.torch.decoder.elementwise import Elementwise, Rotary
from forerun.executors.torch.drafts.draft_layer import (
    TRAINED,
    Attend,
    DraftLayer,
    LayerShape,
    Norm,
)
from forerun.executors.torch.drafts.level_model import LevelModel, Nodes
from forerun.executors.torch.drafts.loading import (
    allocated,
    eagle_embedding,
    eagle_weights,
    for_serving,
)
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.triton.kernels import parts_of


class EagleHead(nn.Module):
    """A draft head. Parameter names are the canonical tensor names of forerun.drafts.eagle_config.
    `lm_head` is always a parameter, even if it is a copy of the target's; the trainer freezes it.
    """

    def __init__(self, head: DraftHead, parts: Elementwise = TRAINED) -> None:
        super().__init__()
        self.head, self.parts = head, parts
        width = 2 * head.hidden
        if head.algorithm == "eagle3":
            width = head.target_hidden * len(head.features)
            self.norm = Norm(head.hidden, head.norm_eps)
        self.fc = nn.Linear(width, head.hidden, bias=head.fc_bias)
        if head.feature_norm == "joint":
            self.input_norm = Norm(width, head.norm_eps)
        if head.feature_norm == "each":
            self.fc_norm = nn.ModuleList(
                Norm(head.target_hidden, head.norm_eps) for _ in head.features
            )
        self.layers = nn.ModuleList([DraftLayer(_shape(head), parts)])
        self.lm_head = nn.Linear(head.hidden, head.vocab, bias=False)

    @property
    def layer(self) -> DraftLayer:
        """The one decoder layer, by its type."""
        (layer,) = self.layers
        assert isinstance(layer, DraftLayer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        """Return hidden states [..., H] for the target's features [..., F*H], F concatenated
        features. EAGLE-1's single feature is already the hidden state.
        """
        if self.head.algorithm == "eagle1":
            return features
        about, norm = self.head, self.parts.norm
        if about.feature_norm == "joint":
            features = norm(features, self.input_norm.weight, about.norm_eps)
        if about.feature_norm == "each":
            weights = [each.get_parameter("weight") for each in self.fc_norm]
            chunks = zip(features.split(about.target_hidden, -1), weights, strict=True)
            features = torch.cat([norm(c, weight, about.norm_eps) for c, weight in chunks], -1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self,
        tokens: Tensor,
        embedding: Tensor,
        hidden: Tensor,
        rotary: Rotary,
        attend: Attend,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one draft step over next tokens int[...], rows of `embedding` [V,H], and hidden
        states [..., H]. Returns the inputs of the output head and of the next step, both [..., H];
        they differ unless `normed_feedback`.

        rotary  of the rows' positions
        only    int64[R]: these of N rows [N,H] are computed to the end, with results [R,H]; all N
                provide keys and values
        """
        layer, about, parts = self.layer, self.head, self.parts
        if about.algorithm == "eagle1":
            embedded = F.embedding(tokens, embedding).to(hidden.dtype)
            residual = x = self.fc(torch.cat([embedded, hidden], -1))
        else:
            norms = layer.entry_norm(), layer.entry_norm("hidden_norm")
            x = parts.draft_inputs(tokens, embedding, hidden, norms, about.norm_eps)
            residual = x[..., about.hidden :] if about.normed_residual else hidden
        residual, fed = layer.run(x, residual, rotary, attend, 0, only)
        if about.algorithm == "eagle1":
            output = residual + fed
            return output, output
        output, read = parts.add_norm(residual, fed, self.norm.weight, about.norm_eps)
        return read, read if about.normed_feedback else output

    def logits(self, read: Tensor) -> Tensor:
        """Return draft logits [..., Vd] for the first result of `forward`."""
        logits: Tensor = self.lm_head(read)
        return logits


def _shape(head: DraftHead) -> LayerShape:
    norms = ("input_layernorm", "hidden_norm") if head.algorithm == "eagle3" else ()
    sizes = head.hidden, head.heads, head.kv_heads, head.head_size, head.ffn, head.norm_eps
    return LayerShape(*sizes, input_width=head.input_width, entry_norms=norms)


class TorchEagleModel(LevelModel):
    """DraftModel in torch, on the device and in the dtype of its target.

    Raises ModelError for a head without an embedding of its width, MemoryPlanError if it does
    not fit.
    """

    def __init__(self, executor: TorchTarget, checkpoint: Checkpoint, draft: DraftFile) -> None:
        head = self._about = draft.head
        cache, taken = allocated(executor, head.parameters, KvShape(head.cache))
        declared = declared_head(draft, executor.limits.max_nodes)
        ropes = ((head.rope, head.head_size),)
        super().__init__(executor, declared, cache, ropes, head.heads, head.hidden)
        self.facts |= taken
        self._embedding = eagle_embedding(executor, draft)
        weights, parts = eagle_weights(executor, checkpoint, draft), parts_of(executor.kernels)
        self._module = for_serving(lambda: EagleHead(head, parts), weights)
        executor.request_aux_hidden_states(head.features)

    def enter(self, features: Tensor | None) -> Tensor:
        """Return hidden states [n,H], fused from the target's features [n,F*H]."""
        assert features is not None, "the traits ask for features"
        if self._about.algorithm == "eagle1":
            return self._executor.decoder.final_norm(features)
        return self._module.fuse(features)

    def forward(self, nodes: Nodes, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of `logits` and of a next draft step, [n,H] each."""
        return self._module.forward(
            nodes.tokens, self._embedding, hidden, nodes.rotary[0], nodes.attend
        )

    def logits(self, read: Tensor) -> Tensor:
        """Return draft logits [n,Vd] for the first result of `forward`, [n,H]."""
        return self._module.logits(read)
