"""Training an EAGLE-1 head (arXiv 2401.15077); EAGLE-2 (arXiv 2406.16858) is the same head with
dynamic trees.

The head predicts the target's next hidden state after the final norm, from which the target's own
output rows compute logits. It is trained by regression: the smooth L1 loss between the two states,
plus a tenth of the cross-entropy between the token distributions computed from them. Uniform noise
is added to the states it reads, because its own outputs will have errors.
"""

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.eagle_config import DraftHead
from forerun.errors import ModelError
from forerun.executors.torch.decoder.elementwise import rms_norm
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.networks.arch import Architecture
from forerun.train.loss import DraftVocabulary, StepScore, TrainingBatch, step_loss
from forerun.train.unroll import Unrolling, turns, unrolled

CLASSIFICATION = 0.1
"""Weight of the cross-entropy relative to the regression."""

NOISE_TOKENS = 512
"""Length of a text, in tokens, in which the noise is as wide as the option says; it is wider in
shorter ones.
"""


class Eagle1Head(EagleHead):
    """An EAGLE-1 head whose feature is the target's last residual stream, before the final norm."""

    target_norm: Tensor

    def __init__(self, head: DraftHead, checkpoint: Checkpoint) -> None:
        super().__init__(head)
        target = checkpoint.architecture
        norm = torch.from_numpy(checkpoint.tensor("model.norm.weight") + target.norm_offset)
        self._eps = target.norm_eps
        self.register_buffer("target_norm", norm, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's hidden states [...,H] after its final norm, from its last residual
        stream.
        """
        return rms_norm(features, self.target_norm, self._eps)


def unserved(target: Architecture) -> None:
    """Raise ModelError for a target whose logits are not just the product with its output rows."""
    if target.logit_scale != 1.0 or target.final_softcap is not None:
        raise ModelError(
            "an EAGLE-1 head is trained through the target's output rows, and this target scales "
            "or caps its logits; use --method eagle3"
        )


def start_regression(head: EagleHead, vocabulary: DraftVocabulary, seed: int) -> None:
    """Initialise `head` in place with small random weights drawn from `seed`; its output rows are
    those of the vocabulary and are frozen.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name == "lm_head.weight":
                parameter.copy_(vocabulary.rows)
            elif parameter.dim() == 2:
                spread = parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    head.lm_head.weight.requires_grad_(False)


def regression_loss(
    head: EagleHead,
    batch: TrainingBatch,
    embed: Tensor,
    vocabulary: DraftVocabulary,
    plan: Unrolling,
    noise: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, list[StepScore]]:
    """Return the sum over unrolled steps of decay**s times EAGLE's loss, a scalar with a gradient,
    and each step's score, whose loss is the cross-entropy. One step is EAGLE's own training;
    further steps read the head's own states, as in HASS (arXiv 2408.15766).

    embed  [V,H] the target's embedding
    plan   steps, decay, and the share of rows that continues
    noise  see `noisy`
    seed   draws the noise and the rows that continue
    """
    true = head.fuse(batch.features.flatten(0, 1))
    read = noisy(true, batch.loss_mask, noise, seed) if noise else true
    steps = turns(batch.loss_mask, plan, seed, true.device)
    total = torch.zeros((), dtype=torch.float32, device=true.device)
    scores = []
    for step, (output, turn) in enumerate(
        zip(unrolled(head, batch.tokens, read, embed, steps), steps, strict=True)
    ):
        # Row q predicts the state at q + step + 1, which gives the logits of the next token.
        rows, teachers = turn.scored, turn.rows[turn.scored] + step + 1
        entropy, score = step_loss(output, rows, teachers, head.lm_head.weight, batch, vocabulary)
        predicted, teacher_states = (
            output.index_select(0, rows).float(),
            true.index_select(0, teachers),
        )
        numbers = max(predicted.numel(), 1)
        regression = smooth_l1_loss(predicted, teacher_states.float(), reduction="sum") / numbers
        scores.append(score)
        total = total + plan.decay**step * (regression + CLASSIFICATION * entropy)
    return total, scores


def noisy(hidden: Tensor, loss_mask: Tensor, noise: float, seed: int) -> Tensor:
    """Return hidden states [B*T,H] with uniform noise drawn from `seed`, of width `noise` in a text
    of NOISE_TOKENS tokens and inversely proportional to the length in others, as in EAGLE's
    trainer.

    loss_mask  bool[B,T] tokens of answers, the last of which ends a text; on the CPU
    """
    places = torch.arange(1, loss_mask.shape[1] + 1)
    lengths = (loss_mask * places).amax(1).clamp_min(1)
    width = (noise * NOISE_TOKENS / lengths).to(hidden.device)
    generator = torch.Generator(hidden.device).manual_seed(seed)
    drawn = torch.rand(hidden.shape, generator=generator, device=hidden.device) - 0.5
    return hidden + drawn * width.repeat_interleave(loss_mask.shape[1])[:, None]
