"""How a block drafter begins: with heads that look at the root and at the newest features.

Taken over from the target, attention looks at the block's own masks, states the target's layers
never saw: features then reach no draft token, and the loss stays at that of unigrams. Taken at
random it looks everywhere alike. So the first layer's queries and keys begin as two fixed readings
beside small noise: a third of the heads finds the root, the others find features, the newest ones
first. Values and outputs are random, the feed-forward is the target's where shapes allow.
"""

from typing import cast

import torch
from torch import Tensor

from forerun.executors.torch.drafts.block import BlockDrafter
from forerun.executors.torch.drafts.draft_layer import DraftLayer, Norm
from forerun.models.checkpoint import Checkpoint
from forerun.train.loss import TrainingBatch

SHARPNESS = 16.0
"""Of the first attention: what is sought outweighs the rest by exp of this, about."""

SPREAD = 2.0
"""Standard deviation of the first logits: about where training takes it. Less has a smaller first
loss, and the final norm then grows by one learning rate a step.
"""


@torch.no_grad()
def start_block(
    drafter: BlockDrafter,
    checkpoint: Checkpoint,
    embed: Tensor,
    rows: Tensor,
    batch: TrainingBatch,
    seed: int,
) -> None:
    """Fill `drafter` in place as the module says; `seed` draws what is random.

    checkpoint   the target's, for final norm and feed-forward
    embed, rows  the target's embedding [V,H] and its output rows of the draft vocabulary [Vd,H]
    batch        its answers say what features and tokens look like

    Raises ModelError if the target lacks a tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    target, head = checkpoint.architecture, drafter.head
    wanted = batch.wanted.to(embed.device)
    features, tokens = batch.features[wanted].float(), embed[batch.tokens[wanted]].float()

    def noise(parameter: Tensor, std: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    width = head.hidden
    noise(drafter.fc.weight, 0.02)
    drafter.fc.weight[:, -width:] += torch.eye(width, device=embed.device)
    streams = features.split(head.target_hidden, 1)
    sizes = torch.stack([stream.pow(2).mean().sqrt() for stream in streams]).clamp_min(1e-6)
    drafter.fc.weight /= sizes.repeat_interleave(head.target_hidden)
    _start_mask(drafter.mask_embedding, tokens, generator)
    begin = target.layers - head.layers
    for number, module in enumerate(drafter.layers):
        assert isinstance(module, DraftLayer)
        attention = module.self_attn
        noise(attention.q_proj.weight, 0.02)
        noise(attention.k_proj.weight, 0.02)
        noise(attention.v_proj.weight, width**-0.5)
        noise(attention.o_proj.weight, width**-0.5)
        for name, parameter in module.named_parameters():
            if name.startswith(("mlp", "post_attention")) and not target.beyond_llama():
                stored = checkpoint.tensor(f"model.layers.{max(begin + number, 0)}.{name}")
                parameter.copy_(torch.from_numpy(stored.copy()))
    _look(drafter, tokens, drafter.read_features(features))
    norm = torch.from_numpy(checkpoint.tensor("model.norm.weight").copy()).to(rows.device)
    spread = (rows.float() * norm).pow(2).sum(1).mean().sqrt()
    drafter.norm.weight.copy_(norm * (SPREAD / spread))


def _start_mask(mask: Tensor, tokens: Tensor, generator: torch.Generator) -> None:
    """What tokens have in common, and twice as much of what none of them has."""
    mean = tokens.mean(0)
    other = torch.randn(mean.shape, generator=generator).to(mean.device)
    other -= mean * (other @ mean) / (mean @ mean)
    mask.copy_(mean + 2 * other * mean.norm() / other.norm())


def _look(drafter: BlockDrafter, tokens: Tensor, context: Tensor) -> None:
    """Set what the first layer's heads look at.

    Scores are of rank one: (a place's reading) times (a key's reading) times a sum of cosines of
    the distance, of the faster half of the rotary frequencies, which is greatest where near.
    """
    head, layer = drafter.head, drafter.layer(0)
    size = head.head_size
    entering = cast(Norm, layer.input_layernorm)
    kinds = [entering(tokens), entering(drafter.mask_embedding[None])]
    kinds.append(context)
    root, mask, feature = _readings(kinds)
    fast = torch.zeros(size, 1, device=tokens.device)
    fast[: size // 4] = (SHARPNESS * size**0.5 / (size // 4)) ** 0.5
    layer.self_attn.q_proj.weight += (fast * (root + mask)).repeat(head.heads, 1)
    finders = (head.kv_heads + 1) // 3
    keys = [root] * finders + [feature] * (head.kv_heads - finders)
    layer.self_attn.k_proj.weight += torch.cat([fast * key for key in keys])


def _readings(kinds: list[Tensor]) -> Tensor:
    """[K,H] from K sets of vectors [n,H]: each reads 1 of its own set and 0 of the others, as
    nearly as one direction can.
    """
    alike = sum((kind.T @ kind / len(kind) for kind in kinds), torch.zeros(()).to(kinds[0]))
    alike = alike + 0.01 * alike.diagonal().mean() * torch.eye(len(alike)).to(alike)
    means = torch.stack([kind.mean(0) for kind in kinds])
    found: Tensor = torch.linalg.solve(alike, means.T).T
    return found
