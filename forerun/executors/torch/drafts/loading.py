"""Loading of draft networks for serving: the trained class with the weights of a file, and the
properties of an EAGLE head's file. Not used during a step.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.block_folder import BlockFile
from forerun.drafts.eagle_folder import DraftFile
from forerun.errors import ModelError
from forerun.executors.torch.attention.kv import KvShape
from forerun.executors.torch.decoder.weights import some_rows
from forerun.executors.torch.drafts.draft_cache import DraftCache
from forerun.executors.torch.drafts.draft_layer import DraftLayer
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.memory import check_fits
from forerun.networks.layer_spec import AttentionSpec
from forerun.types import Ints

M = TypeVar("M", bound=nn.Module)


def for_serving(network: Callable[[], M], weights: Callable[[str], Tensor]) -> M:
    """Return the module that `network` creates, with `weights` by parameter name, without
    gradients; a layer's products that read the same rows are stacked.
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
    """Stack the layer's matrices that read the same rows, so that each group is one product."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = _stacked(attention.q_proj, attention.k_proj, attention.v_proj)
    layer.stacked = qkv, _stacked(mlp.gate_proj, mlp.up_proj)


def _stacked(*linears: nn.Linear) -> Tensor:
    """Return the weights stacked by rows, stored once: those of `linears` become views of the
    result.
    """
    whole = torch.cat([linear.weight for linear in linears])
    parts = whole.split([len(each.weight) for each in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return whole


def allocated(
    executor: TorchTarget,
    parameters: int,
    shape: KvShape,
    more: int = 0,
    roots: bool = False,
    attention: tuple[AttentionSpec, ...] = (),
    begins: tuple[int, ...] = (),
) -> tuple[DraftCache, dict[str, Any]]:
    """Allocate the cache of a draft model, which needs `more` bytes in addition to its parameters.
    Returns the cache, and bytes by purpose for /server_info. Raises MemoryPlanError if that does
    not fit. Other arguments: as of DraftCache.
    """
    limits, device, dtype = executor.limits, executor.device, executor.dtype
    taken = {
        "draft_weight": parameters * dtype.itemsize,
        "draft_cache": DraftCache.bytes(shape, limits, dtype) + more,
    }
    check_fits(taken, device)
    cache = DraftCache(shape, limits, device, dtype, roots, attention, begins)
    return cache, {f"{part}_bytes": count for part, count in taken.items()}


def read_tensor(executor: TorchTarget, draft: DraftFile | BlockFile, name: str) -> Tensor:
    """Return a tensor of a draft's file, in the target's dtype on its device. Raises KeyError for
    an unknown name, ModelError if a number is not finite.
    """
    return torch.from_numpy(np.array(draft.tensor(name))).to(executor.device, executor.dtype)


def head_rows(executor: TorchTarget, checkpoint: Checkpoint, which: Ints) -> Tensor:
    """Return [n,H], the output head's rows of tokens int32[n], in the target's dtype on its device;
    reads nothing else of it.
    """
    name = checkpoint.architecture.head_tensor
    return some_rows(checkpoint, name, which, executor.device, executor.dtype)


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
    return read_tensor(executor, draft, name)


def eagle_weights(
    executor: TorchTarget, checkpoint: Checkpoint, draft: DraftFile
) -> Callable[[str], Tensor]:
    """Return a function that reads a head's weight [N,K] or [N] by name, in the target's dtype on
    its device; the output head is the target's if the file has none. It raises KeyError for an
    unknown name, ModelError if a number is not finite.
    """

    def weights(name: str) -> Tensor:
        if name == "lm_head.weight" and not draft.head.trained_head:
            return head_rows(executor, checkpoint, draft.target_ids)
        return read_tensor(executor, draft, name)

    return weights
