"""Draft networks as they serve: a trained class with the weights of a file, and what the file of an
EAGLE head says of the model that runs it. Nothing here is part of a step.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.eagle_folder import DraftFile
from forerun.errors import ModelError
from forerun.executors.torch.attention.kv import KvShape
from forerun.executors.torch.decoder.weights import some_rows
from forerun.executors.torch.drafts.draft_cache import DraftCache
from forerun.executors.torch.drafts.draft_layer import DraftLayer
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.memory import check_fits
from forerun.interface.draft_model import DraftModelTraits, FeatureNeeds

M = TypeVar("M", bound=nn.Module)


def for_serving(network: Callable[[], M], weights: Callable[[str], Tensor]) -> M:
    """Return the module that `network` makes, with `weights` by their parameters' names, which are
    not trained; layers' products that read the same rows are one.
    """
    with torch.device("meta"):
        made = network()
    named = {name: weights(name) for name, _ in made.named_parameters()}
    made.load_state_dict(named, assign=True)
    made.requires_grad_(False)
    for module in made.modules():
        if isinstance(module, DraftLayer):
            stack(module)
    return made


def stack(layer: DraftLayer) -> None:
    """Keep matrices that read the same rows one above the other: one product each."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = _stacked(attention.q_proj, attention.k_proj, attention.v_proj)
    layer.stacked = qkv, _stacked(mlp.gate_proj, mlp.up_proj)


def _stacked(*linears: nn.Linear) -> Tensor:
    """Return the weights one above the other, stored once: those of `linears` become views of
    it.
    """
    whole = torch.cat([linear.weight for linear in linears])
    parts = whole.split([len(each.weight) for each in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return whole


def eagle_traits(draft: DraftFile, max_nodes: int) -> DraftModelTraits:
    """Return the traits of a head's model whose passes run at most `max_nodes` nodes: EAGLE-1 reads
    the target's last stream, EAGLE-3 those that its file names.
    """
    head = draft.head
    last = head.algorithm == "eagle1"
    return DraftModelTraits(
        name=head.algorithm,
        cache=head.cache,
        target_ids=draft.target_ids,
        max_nodes=max_nodes,
        features=FeatureNeeds("last") if last else FeatureNeeds("aux", head.features),
    )


def eagle_cache(executor: TorchTarget, draft: DraftFile) -> tuple[DraftCache, dict[str, Any]]:
    """Allocate a head's keys and values. Returns them, and facts of the model for /server_info.
    Raises MemoryPlanError if they or the head's weights do not fit.
    """
    head, limits, dtype = draft.head, executor.limits, executor.dtype
    taken = {
        "draft_weight": head.parameters * dtype.itemsize,
        "draft_cache": DraftCache.bytes(KvShape(head.cache), limits, dtype),
    }
    check_fits(taken, executor.device)
    facts = {
        "algorithm": head.algorithm,
        "vocab": head.vocab,
        "features": list(head.features),
        **{f"{part}_bytes": count for part, count in taken.items()},
    }
    return DraftCache(KvShape(head.cache), limits, executor.device, dtype), facts


def eagle_embedding(executor: TorchTarget, draft: DraftFile) -> Tensor:
    """Return the embedding [V,H] for the head: the target's, or its own if it is not as wide as the
    target. Raises ModelError if it has none.
    """
    head, name = draft.head, "embed_tokens.weight"
    if head.hidden == head.target_hidden:
        return executor.decoder.embedding
    if name not in draft.files or not head.trained_head:
        raise ModelError(
            f"{draft.path}: a head of width {head.hidden} beside a target of width "
            f"{head.target_hidden} needs {name} and lm_head.weight of its own"
        )
    return torch.from_numpy(np.array(draft.tensor(name))).to(executor.device, executor.dtype)


def eagle_weights(
    executor: TorchTarget, checkpoint: Checkpoint, draft: DraftFile
) -> Callable[[str], Tensor]:
    """Return a reader of a head's weights [N,K] or [N] by name, in the target's dtype on its
    device; the output head is the target's if the file has none.
    """
    device, dtype = executor.device, executor.dtype

    def weights(name: str) -> Tensor:
        if name == "lm_head.weight" and not draft.head.trained_head:
            own = "model.embed_tokens.weight" if checkpoint.architecture.tied_head else name
            return some_rows(checkpoint, own, draft.target_ids, device, dtype)
        return torch.from_numpy(np.array(draft.tensor(name))).to(device, dtype)

    return weights
