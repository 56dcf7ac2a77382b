"""How a head begins: as another draft ended, or saying "no idea" rather than nonsense.

The block is the target's last layer where shapes allow; the output head is the target's own rows
and stays frozen. That head is sharp (the final norm times tied embeddings), so a wrong direction
would be confidently wrong: first losses of three times ln(Vd) were measured. The head's final
norm is therefore scaled to whatever makes the first loss smallest, with 0 (loss exactly ln(Vd))
among the candidates.
"""

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_folder import DraftFile
from forerun.train.loss import DraftVocabulary, TrainingBatch, ttt_loss
from forerun.train.unroll import Unrollable, Unrolling

SCALES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


def start_from_target(
    head: EagleHead, checkpoint: Checkpoint, vocabulary: DraftVocabulary, seed: int
) -> None:
    """Fill `head` in place: the target's last layer on the hidden half of its input, small noise
    elsewhere, the target's final norm and output rows, which stay frozen.

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
        # layer.input_layernorm stays 1: embeddings come to the scale of one, as queries expect.
        head.norm.weight.copy_(target("model.norm.weight"))
        head.lm_head.weight.copy_(vocabulary.rows)
    head.lm_head.weight.requires_grad_(False)


def check_trainable(draft: DraftFile) -> None:
    """Raise ModelError if a draft that can be served cannot be trained here: it is EAGLE-1, or
    of another width than the target.
    """
    head = draft.head
    if head.algorithm != "eagle3":
        raise ModelError(
            f"{draft.path} is an EAGLE-1 head; training goes on from EAGLE-3 heads only. Leave "
            "--start-from out to begin a new one."
        )
    if head.hidden != head.target_hidden:
        raise ModelError(
            f"{draft.path} is {head.hidden} wide beside a target of {head.target_hidden}; training "
            "goes on from heads of the target's width only"
        )


def start_from_draft(head: EagleHead, draft: DraftFile, vocabulary: DraftVocabulary) -> None:
    """Fill `head` in place with a draft's weights. The output head, its own or the target's rows of
    the vocabulary, stays frozen.
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
    """Scale the final norm's weight norm [H], in place, to the smallest first-step loss on `batch`,
    which is returned in nats.

    embed  [V,H] the target's embedding

    At most ln(Vd), because the scale 0 is among the candidates; where 0 is best, 0.001 is kept so
    that gradients pass.
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
