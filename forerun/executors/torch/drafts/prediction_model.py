"""The target's own MTP layers in torch. Their computation is described in
drafts/prediction_layers.py, the storage of their inputs in executors/layer_states.py. Positions are
as for an EAGLE head (level_model.py).
"""

import torch
from torch import Tensor

from forerun.checkpoints.prediction_naming import (
    EMBEDDING_NORM,
    FINAL_NORM,
    FUSE,
    HIDDEN_NORM,
)
from forerun.drafts.prediction_layers import (
    PredictionLayers,
)
from forerun.executors.draft_model import declared_layers
from forerun.executors.layer_states import LayerStates, layer_read, layers_at
from forerun.executors.torch.attention.kv import KvShape
from forerun.executors.torch.decoder.decoder import Block
from forerun.executors.torch.decoder.elementwise import Elementwise
from forerun.executors.torch.decoder.layers import Linear
from forerun.executors.torch.decoder.weights import Weights
from forerun.executors.torch.drafts.level_model import LevelModel, Nodes
from forerun.executors.torch.drafts.loading import allocated
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.triton.kernels import parts_of


class _Layer:
    """One MTP layer."""

    def __init__(
        self, number: int, draft: PredictionLayers, weights: Weights, parts: Elementwise
    ) -> None:
        arch = draft.architecture
        self._parts, self._eps, self._hidden_first = parts, arch.norm_eps, draft.hidden_first
        self._block = Block(weights, number, arch.layer_specs[number], arch, parts)
        self._norms = [
            weights.norm(draft.own(number, part))
            for part in (EMBEDDING_NORM, HIDDEN_NORM, FINAL_NORM)
        ]
        self._fuse = weights.linear(draft.own(number, FUSE).removesuffix(".weight"))
        # The columns of the fuse's input that are zeroed at position 0.
        embedding = slice(arch.hidden, None) if draft.hidden_first else slice(arch.hidden)
        self._zeroed = embedding if draft.zeroed and number == 0 else None

    def __call__(self, embedding: Tensor, hidden: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """Return outputs [n,H] for nodes with hidden states [n,H]: after the layer's final norm,
        and the input of the next draft step.
        """
        eps, (of_embedding, of_hidden, final) = self._eps, self._norms
        norms = of_embedding, of_hidden
        inputs = self._parts.draft_inputs(
            nodes.tokens, embedding, hidden, norms, eps, self._hidden_first
        )
        if self._zeroed is not None and nodes.position is not None:
            inputs[:, self._zeroed] *= (nodes.position != 0).unsqueeze(1)
        x = self._fuse(inputs)
        entering, normed = self._block.enter(x, None)
        x, more = self._block(entering, normed, nodes.rotary[0], nodes.attend, ())
        assert more is not None, "no prediction layer is scaled"
        normed = self._parts.add_norm(x, more, final, eps)[1]
        return normed, normed


class TorchPredictionModel(LevelModel):
    """DraftModel in torch, on the device and in the dtype of its target, whose embedding and head
    it uses.

    Raises MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: TorchTarget, draft: PredictionLayers) -> None:
        arch, limits = draft.architecture, executor.limits
        device, dtype = executor.device, executor.dtype
        states = LayerStates(limits) if draft.count > 1 else None
        rows = states.rows if states is not None else limits.max_nodes + limits.slots + 1
        cache, taken = allocated(
            executor,
            draft.parameters,
            KvShape(draft.cache),
            rows * draft.count * arch.hidden * dtype.itemsize,
            attention=tuple(spec.attention for spec in arch.layer_specs),
            begins=tuple(range(draft.count)),
        )
        ropes = (arch.rope_of(arch.layer_specs[0]),)
        declared, width = declared_layers(draft, limits.max_nodes), draft.count * arch.hidden
        super().__init__(executor, declared, cache, ropes, arch.heads, width, states)
        self.facts |= taken
        self._draft, self._arch = draft, arch
        weights = Weights(draft, device, dtype, Linear, finite=True)
        parts = parts_of(executor.kernels)
        self._layers = [_Layer(number, draft, weights, parts) for number in range(draft.count)]
        self._embedding = self._own_embedding(weights)
        self._head = self._own_head(weights)
        executor.request_aux_hidden_states((executor.decoder.arch.layers,))

    def _own_embedding(self, weights: Weights) -> Tensor:
        name = "model.embed_tokens.weight"
        if name in self._draft.files:
            return weights.matrix(name)
        return self._executor.decoder.embedding

    def _own_head(self, weights: Weights) -> Linear | None:
        """Return the head if it is not the target's, or has only some of its rows."""
        name = "lm_head.weight"
        if self._draft.vocab == self._arch.vocab and name not in self._draft.files:
            return None
        if name not in self._draft.names():
            name = "model.embed_tokens.weight"
        return Linear(weights.matrix(name).index_select(0, self.ids))

    def enter(self, features: Tensor | None) -> Tensor:
        """Return [n,H], the target's last residual stream [n,H] after its final norm."""
        assert features is not None, "the traits ask for features"
        return self._executor.decoder.final_norm(features)

    def forward(self, nodes: Nodes, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run permanent tokens through all layers; draft tokens through the layer of their depth,
        and through those of greater depths, for deeper levels. Outputs are concatenated.
        """
        layers, depth, count = self._layers, nodes.depth, len(self._layers)
        embedding = self._embedding
        if depth == 0:
            first, carried = layers[0](embedding, hidden, nodes)
            outputs = [carried]
            for number in range(1, count):
                before = nodes.before(number - 1, outputs[-1])
                outputs.append(layers[number](embedding, before, nodes)[1])
            return first, _joined(outputs)
        given, running = hidden.chunk(count, -1), layers_at(depth, count)
        outputs, read = list(given), hidden
        for number in running:
            before = given[layer_read(number, depth, count)]
            normed, outputs[number] = layers[number](embedding, before, nodes)
            read = normed if number == running[0] else read
        return read, _joined(outputs)

    def logits(self, read: Tensor) -> Tensor:
        """Return draft logits [n,Vd] for the layers' result [n,H], by the draft's own head or the
        target's.
        """
        if self._head is not None:
            return self._head(read)
        return self._executor.decoder.read(read)


def _joined(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
