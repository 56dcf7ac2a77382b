"""Initial weights of a head: those of another draft, or weights with which its first predictions
are uniform rather than wrong.

The layer is the target's last one if the shapes agree; the output head consists of the target's own
rows and is frozen. That head is sharp (the final norm times tied embeddings), so that a wrong
direction would give confident wrong predictions: first losses of three times ln(Vd) were measured.
The head's final norm is therefore scaled to minimise the first loss, with 0 (loss exactly ln(Vd))
among the candidates.

A block drafter starts with attention heads that look at the root and at the newest features. With
the target's weights, attention looks at the block's own masks, states that the target's layers
never saw: features then reach no draft token, and the loss stays at that of unigrams. With random
weights it is uniform. So the queries and keys of the first layer start as two fixed linear readings
plus small noise: a third of the heads finds the root, the others find features, the newest ones
first. Values and outputs are random, the feed-forward is the target's if the shapes agree.
"""

from typing import cast

import torch
from torch import Tensor

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.eagle_folder import DraftFile
from forerun.errors import ModelError
from forerun.executors.torch.drafts.block import BlockDrafter
from forerun.executors.torch.drafts.draft_layer import DraftLayer, Norm
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.train.loss import DraftVocabulary, TrainingBatch, ttt_loss
from forerun.train.unroll import Unrollable, Unrolling

SCALES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


def start_from_target(
    head: EagleHead, checkpoint: Checkpoint, vocabulary: DraftVocabulary, seed: int
) -> None:
    """Initialise `head` in place: the target's last layer on the hidden half of its input, small
    noise elsewhere, and the target's final norm and output rows, which are frozen.

    vocabulary  whose rows the output head gets
    seed        of the noise

    Raises ModelError if the target lacks a tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    last = f"model.layers.{checkpoint.architecture.layers - 1}."
    layer, width = head.layer, head.head.hidden

    def target(name: str) -> Tensor:
        return torch.from_numpy(checkpoint.tensor(name).copy())

    def small(parameter: Tensor, std: float = 0.02) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            small(weight)
            weight[:, -width:] = target(f"{last}self_attn.{name}.weight")
        layer.self_attn.o_proj.weight.copy_(target(f"{last}self_attn.o_proj.weight"))
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(target(f"{last}mlp.{name}.weight"))
        layer.entry_norm("hidden_norm").copy_(target(f"{last}input_layernorm.weight"))
        layer.post_attention_layernorm.weight.copy_(
            target(f"{last}post_attention_layernorm.weight")
        )
        small(head.fc.weight, 0.01)
        head.fc.weight[:, -width:] += torch.eye(width, device=head.fc.weight.device)
        # layer.input_layernorm stays 1: it scales embeddings to one, as queries expect.
        head.norm.weight.copy_(target("model.norm.weight"))
        head.lm_head.weight.copy_(vocabulary.rows)
    head.lm_head.weight.requires_grad_(False)


def check_trainable(draft: DraftFile, method: str | None = None) -> None:
    """Raise ModelError if a draft cannot be trained further, although it can be served: by `method`
    (None: by its own method), or at all because its width differs from the target's.
    """
    head = draft.head
    name, own = {"eagle1": ("EAGLE-1", "eagle"), "eagle3": ("EAGLE-3", "eagle3")}[head.algorithm]
    if method not in (None, own):
        raise ModelError(f"{draft.path} is an {name} head; use --method {own} to go on from it")
    if head.hidden != head.target_hidden:
        raise ModelError(
            f"{draft.path} is {head.hidden} wide beside a target of {head.target_hidden}; training "
            "goes on from heads of the target's width only"
        )


def start_from_draft(head: EagleHead, draft: DraftFile, vocabulary: DraftVocabulary) -> None:
    """Initialise `head` in place with a draft's weights. The output head, the draft's own or the
    target's rows of the vocabulary, is frozen.
    """
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name == "lm_head.weight" and not draft.head.trained_head:
                parameter.copy_(vocabulary.rows)
            else:
                parameter.copy_(torch.from_numpy(draft.tensor(name).copy()))
    head.lm_head.weight.requires_grad_(False)


def calibrate(
    head: Unrollable, norm: Tensor, batch: TrainingBatch, embed: Tensor, vocabulary: DraftVocabulary
) -> float:
    """Scale the final norm's weight `norm` [H], in place, to minimise the first-step loss on
    `batch`. Returns that loss in nats.

    embed  [V,H] the target's embedding

    The result is at most ln(Vd), because the scale 0 is among the candidates; if 0 is best, 0.001
    is used so that gradients pass.
    """
    original = norm.detach().clone()
    losses = {}
    with torch.no_grad():
        for scale in SCALES:
            norm.copy_(original * scale)
            losses[scale] = float(ttt_loss(head, batch, embed, vocabulary, Unrolling(steps=1))[0])
        best = min(losses, key=lambda scale: losses[scale])
        # At exactly 0 no gradient would reach the block.
        norm.copy_(original * (best or 1e-3))
    return losses[best]


SHARPNESS = 16.0
"""Initial difference in attention logit, approximately, between what a head looks for and the
rest.
"""

SPREAD = 2.0
"""Standard deviation of the first logits, about the value that training reaches. With a smaller one
the first loss is smaller, but the final norm then grows by one learning rate per step.
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
    """Initialise `drafter` in place as the module describes; `seed` draws the random weights.

    checkpoint   the target's, for final norm and feed-forward
    embed, rows  the target's embedding [V,H] and its output rows of the draft vocabulary [Vd,H]
    batch        whose answers are used as samples of features and tokens

    Raises ModelError if the target lacks a tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    target, head = checkpoint.architecture, drafter.head
    loss_mask = batch.loss_mask.to(embed.device)
    features, tokens = batch.features[loss_mask].float(), embed[batch.tokens[loss_mask]].float()

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
    """Set a mask's embedding to the mean of all tokens plus twice a random direction orthogonal to
    it, of the same length.
    """
    mean = tokens.mean(0)
    other = torch.randn(mean.shape, generator=generator).to(mean.device)
    other -= mean * (other @ mean) / (mean @ mean)
    mask.copy_(mean + 2 * other * mean.norm() / other.norm())


def _look(drafter: BlockDrafter, tokens: Tensor, context: Tensor) -> None:
    """Set the queries and keys of the first layer. Scores have rank one: (the query's reading)
    times (the key's reading) times a sum of cosines of the distance, over the faster half of the
    rotary frequencies, which is largest at small distances.
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
    """Return [K,H] from K sets of vectors [n,H]: direction k whose product with the vectors of set
    k is about 1 and with those of the other sets about 0, by least squares.
    """
    alike = sum((kind.T @ kind / len(kind) for kind in kinds), torch.zeros(()).to(kinds[0]))
    alike = alike + 0.01 * alike.diagonal().mean() * torch.eye(len(alike)).to(alike)
    means = torch.stack([kind.mean(0) for kind in kinds])
    found: Tensor = torch.linalg.solve(alike, means.T).T
    return found
