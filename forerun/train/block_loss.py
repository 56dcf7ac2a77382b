"""The loss of a block drafter: many blocks of every text at once, none of which sees another.

A block begins at an anchor: a token of the text whose successor belongs to an answer. Its places
see the features of the positions before the anchor, and each other; what each is to say is the
target's own distribution there, given the true text. (DFlash's weights exp(-(k-1)/gamma) are a
decay.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forerun.executors.torch.decoder.elementwise import Rotary, rotation
from forerun.executors.torch.drafts.block import BlockDrafter
from forerun.executors.torch.drafts.draft_layer import TrainedHeads
from forerun.train.loss import DraftVocabulary, StepScore, TrainingBatch, summed_loss


@dataclass(frozen=True, slots=True)
class Anchors:
    """Which blocks a batch is trained on.

    places  int64[B,N]  position of each block's root; 0 if there are fewer
    kept    bool[B,N]   which are real
    """

    places: Tensor
    kept: Tensor

    @staticmethod
    def drawn(wanted: Tensor, most: int, seed: int) -> "Anchors":
        """At most `most` blocks per text, drawn by `seed` among positions whose successor belongs
        to an answer.

        wanted  bool[B,T], on the CPU
        """
        begins = torch.zeros_like(wanted)
        begins[:, 1:-1] = wanted[:, 2:]  # A root has something before it.
        noise = torch.rand(wanted.shape, generator=torch.Generator().manual_seed(seed))
        value, place = noise.masked_fill(~begins, torch.inf).sort(1)
        count = min(most, wanted.shape[1])
        kept = value[:, :count] < torch.inf
        return Anchors(place[:, :count].masked_fill(~kept, 0), kept)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How blocks are trained on.

    anchors  blocks of a text in one step
    decay    weight of each further draft token
    judging  hits are counted, which trains nothing and costs the output head once more
    """

    anchors: int
    decay: float = 1.0
    judging: bool = False


def block_loss(
    drafter: BlockDrafter,
    batch: TrainingBatch,
    embed: Tensor,
    vocabulary: DraftVocabulary,
    plan: BlockPlan,
    seed: int = 0,
) -> tuple[Tensor, list[StepScore]]:
    """The sum over draft tokens of decay**k times the mean soft cross-entropy in nats, a scalar
    with a gradient, and each draft token's score.

    embed  [V,H] the target's embedding
    plan   blocks per text, decay, and whether hits are counted
    seed   draws the blocks

    A score's hits of its rows are blocks that are right up to here, of those that were right
    before: so `simulated_length` of their quotients is the mean length of a chain. Where the
    target's choice lies outside of the draft vocabulary, a draft token is wrong and in no loss.
    """
    device = batch.tokens.device
    chosen = Anchors.drawn(batch.wanted, plan.anchors, seed)
    anchors = Anchors(chosen.places.to(device), chosen.kept.to(device))
    head, first = drafter.head, 0 if drafter.head.anchored else 1
    read = _read(drafter, batch, embed, anchors)[:, :, first:]
    weight = drafter.lm_head.weight if head.own_head else vocabulary.rows
    length, depth = batch.tokens.shape[1], head.depth
    total = torch.zeros((), dtype=torch.float32, device=device)
    scores, alive = [], anchors.kept
    wanted = batch.wanted.to(device)
    row = torch.arange(len(batch.tokens), device=device)[:, None] * length
    real = anchors.kept
    for step in range(depth):
        teacher = (anchors.places + step).clamp(max=length - 1)
        here = (teacher + 1).clamp(max=length - 1)
        real = real & wanted.gather(1, here) & (anchors.places + step + 1 < length)
        flat = (row + teacher)[real]
        choice = vocabulary.draft_ids[batch.choice.flatten()[flat]]
        reachable = choice >= 0
        states = read[:, :, step][real]
        loss, _ = summed_loss(
            states[reachable], weight, batch.teacher, flat[reachable], choice[reachable]
        )
        loss = loss / reachable.sum().clamp_min(1)
        total = total + plan.decay**step * loss
        alive = alive & real
        before = int(alive.sum())
        if plan.judging:
            right = torch.zeros_like(real)
            right[real] = (states.detach() @ weight.T).argmax(-1) == choice
            alive = alive & right
        scores.append(StepScore(loss.detach(), alive.sum(), before))
    return total, scores


def _read(drafter: BlockDrafter, batch: TrainingBatch, embed: Tensor, anchors: Anchors) -> Tensor:
    """What the output head reads, [B,N,places,H]."""
    head, (texts, count) = drafter.head, anchors.places.shape
    length, device = batch.tokens.shape[1], batch.tokens.device
    before = _rotary(drafter, torch.arange(length, device=device))
    kept = drafter.context(batch.features.to(drafter.fc.weight.dtype), before)
    tokens = torch.full((texts, count, head.places), max(head.mask, 0), device=device)
    tokens[:, :, 0] = batch.tokens.gather(1, anchors.places)
    x = drafter.embedded(tokens, embed).flatten(1, 2)
    position = anchors.places[:, :, None] + torch.arange(head.places, device=device)
    seen = _seen(head.causal, head.places, anchors, length)

    def attend(layer: int, heads: TrainedHeads) -> Tensor:
        before = kept[layer].turned()[1:]
        queries, *own = heads.turned()
        every = (torch.cat(pair, 1) for pair in zip(before, own, strict=True))
        q, k, v = (part.transpose(1, 2).to(heads.values.dtype) for part in (queries, *every))
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=seen[:, None], enable_gqa=head.heads != head.kv_heads
        )
        rows: Tensor = mixed.transpose(1, 2)
        return rows

    read: Tensor = drafter(x, _rotary(drafter, position.flatten(1)), attend)
    blocks: Tensor = read.unflatten(1, (count, head.places))
    return blocks


def _seen(causal: bool, places: int, anchors: Anchors, length: int) -> Tensor:
    """bool[B,N*places,T+N*places]: the features before its own anchor, and its own block."""
    device, count = anchors.places.device, anchors.places.shape[1]
    root = anchors.places.repeat_interleave(places, 1)[:, :, None]
    context = torch.arange(length, device=device) < root
    block = torch.arange(count, device=device).repeat_interleave(places)
    own = block[:, None] == block
    if causal:
        place = torch.arange(count * places, device=device)
        own = own & (place[:, None] >= place)
    return torch.cat([context, own.expand(len(root), -1, -1)], -1)


def _rotary(drafter: BlockDrafter, position: Tensor) -> Rotary:
    rope = drafter.head.rope
    frequencies = torch.from_numpy(rope.frequencies(drafter.head.head_size)).to(position.device)
    return rotation(position, frequencies, rope.attention_factor)
