"""The choices at nodes of a shared model's step: all ranks compute them together."""

import torch
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.group import Group
from forerun.executors.torch.triton.kernels import Best
from forerun.speculative.accept import NOTHING


def chosen_together(
    logits: Tensor, noise: NodeNoise, group: Group, best: Best, vocab: int
) -> Tensor:
    """Return int32[M] on every rank: the result of kernels.Choose for all ranks' logits [M,V/N]
    side by side, of which these are one's. Launches only.
    """
    own, ids = best(logits, noise, group.tp.span(vocab).start)
    parts = torch.stack(group.everywhere(torch.stack([own.view(torch.int32), ids])))
    scores, tokens = parts[:, 0].view(torch.float32), parts[:, 1]
    # NaN and infinity go on to the greatest; of equals the lowest token is the first rank's.
    top = scores.amax(0)
    token = torch.where(scores == top, tokens, torch.iinfo(torch.int32).max).amin(0)
    return torch.where(top.isfinite(), token, NOTHING)
