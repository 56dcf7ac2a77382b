"""The loss functions: soft cross-entropy against the target in training-time test, step by step;
and that of a block drafter, with many independent blocks of every text at once.

A block begins at an anchor: a token of the text whose successor belongs to an answer. Its places
attend to the features of the positions before the anchor and to each other; the label of each place
is the target's own distribution at that position of the true text. (DFlash's weights
exp(-(k-1)/gamma) are a decay.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forerun.executors.torch.decoder.elementwise import Rotary, rotation
from forerun.executors.torch.drafts.block import BlockDrafter
from forerun.executors.torch.drafts.draft_layer import TrainedHeads
from forerun.train.pairs import PairedDrafter
from forerun.train.unroll import Unrollable, Unrolling, turns, unrolled


class Teacher(Protocol):
    """The target's distributions over the draft vocabulary, at every token of a batch."""

    def at(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return, for flat positions int64[n], draft ids int64[n,K], or None for all Vd in order,
        and their probabilities float32[n,K or Vd], which sum to one.
        """
        ...


@dataclass(frozen=True)
class LikeliestTargets:
    """Distributions over the K most probable draft ids of each position, normalised to one: ids and
    chance [B*T,K].
    """

    ids: Tensor
    chance: Tensor

    def at(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the stored ids int64[n,K] and probabilities [n,K] of flat positions int64[n]."""
        return self.ids[rows], self.chance[rows]


@dataclass(frozen=True)
class DenseTargets:
    """Distributions over the whole draft vocabulary, computed when needed. last [B*T,H]: the
    target's hidden states after its final norm; head [Vd,H]: its output rows.
    """

    last: Tensor
    head: Tensor

    def at(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return None, for all draft ids, and the softmax float32[n,Vd] over the draft vocabulary
        at flat positions int64[n].
        """
        return None, (self.last[rows] @ self.head.T).float().softmax(-1)


@dataclass(frozen=True)
class TrainingBatch:
    """B sequences of T tokens, padded at the end.

    tokens    int64[B,T]
    loss_mask bool[B,T]   whether the token is part of an answer: the loss counts predictions of
                          these; always on the CPU, so that selecting rows waits for no device
    features  [B,T,F*H]   the target's hidden states at the head's feature layers
    choice    int64[B,T]  the target's argmax over the full vocabulary for the next token; undefined
                          where the next token is not part of an answer
    teacher               the target's distribution for the next token, likewise
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Tensor
    choice: Tensor
    teacher: Teacher


@dataclass(frozen=True)
class DraftVocabulary:
    """The draft vocabulary: target_ids int64[Vd] ascending; rows [Vd,H] the target's output rows of
    these.
    """

    target_ids: Tensor
    rows: Tensor
    draft_ids: Tensor
    """int64[V]: the draft id of each target id, or -1."""

    @staticmethod
    def of(target_ids: Tensor, head: Tensor) -> "DraftVocabulary":
        """Return the vocabulary of target_ids int64[Vd], ascending. head [V,H]: the target's output
        rows, of which those of the vocabulary are copied.
        """
        draft_ids = torch.full((len(head),), -1, dtype=torch.int64, device=head.device)
        draft_ids[target_ids] = torch.arange(len(target_ids), device=head.device)
        return DraftVocabulary(target_ids, head[target_ids].contiguous(), draft_ids)


class _FusedCrossEntropy(torch.autograd.Function):
    """Soft cross-entropy summed over rows, computed in chunks so that never all logits are in
    memory.

    `forward` also computes the gradient, because the output head is frozen except for columns at
    its end. Returns (loss sum, right): for each row whether the draft's argmax is the target's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        read: Tensor,
        weight: Tensor,
        teacher: Teacher,
        at: Tensor,
        choice: Tensor,
        after: Tensor | None = None,
    ) -> Any:
        """Return (loss sum, right). read [R,H], or [R,H+r] with `after`: input of the output head,
        with a gradient. weight [Vd,H]: the draft head. at int64[R]: the teacher's positions. choice
        int64[R]: the draft id of the target's choice, or -1 for a row outside the loss. after
        [Vd,r]: further columns of the head, with a gradient.
        """
        total, width = read.new_zeros((), dtype=torch.float32), weight.shape[1]
        right = torch.zeros(len(read), dtype=torch.bool, device=read.device)
        gradient = torch.empty_like(read)
        of_after = None if after is None else torch.zeros_like(after)
        weight = weight if after is None else torch.cat([weight, after], 1)
        # On the CPU a chunk should fit into the caches.
        chunk = max(1, (1 << (21 if read.device.type == "cpu" else 25)) // len(weight))
        for begin in range(0, len(read), chunk):
            part = slice(begin, begin + chunk)
            logits = (read[part] @ weight.T).float()
            top = logits.amax(-1, keepdim=True)
            best = logits.gather(1, choice[part, None].clamp_min(0)) == top
            inside = choice[part, None] >= 0
            right[part] = (best & inside).flatten()
            ids, chance = teacher.at(at[part])
            expected = chance * (logits if ids is None else logits.gather(1, ids))
            slope = logits.sub_(top).exp_()
            sums = slope.sum(-1, keepdim=True)
            loss = sums.log() + top - expected.sum(-1, keepdim=True)
            total += loss.masked_fill_(~inside, 0).sum()
            if ids is None:
                slope.addcmul_(chance, sums, value=-1)
            else:
                slope.scatter_add_(1, ids, chance * -sums)
            gradient[part] = (slope.to(read.dtype) @ weight) * (inside / sums)
            if of_after is not None:
                of_after += (slope * (inside / sums)).to(read.dtype).T @ read[part, width:]
        ctx.save_for_backward(gradient, of_after)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of the loss with respect to `read` and `after`."""
        gradient, of_after = ctx.saved_tensors
        scale = grads[0].to(gradient.dtype)
        of_after = None if of_after is None else of_after * scale
        return gradient * scale, None, None, None, None, of_after


summed_loss: Callable[
    [Tensor, Tensor, Teacher, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]
] = _FusedCrossEntropy.apply
"""(read, weight, teacher, at, choice, after) as in _FusedCrossEntropy -> loss sum and right."""


@dataclass(frozen=True)
class StepScore:
    """The result of one unrolled step over a batch: loss, a mean in nats; hits, how many of `rows`
    answer tokens were predicted. loss and hits are on the device, so reading them waits for it.
    """

    loss: Tensor
    hits: Tensor
    rows: int


def ttt_loss(
    head: Unrollable,
    batch: TrainingBatch,
    embed: Tensor,
    vocabulary: DraftVocabulary,
    plan: Unrolling,
    seed: int = 0,
) -> tuple[Tensor, list[StepScore]]:
    """Compute the loss of training-time test (EAGLE-3, arXiv 2503.01840, section 3.2). Returns the
    sum over steps of decay**s times the mean soft cross-entropy in nats, a scalar with a gradient,
    and each step's score.

    embed  [V,H] the target's embedding
    plan   steps, decay, and the share of rows that continues
    seed   draws the rows that continue, if not all do

    The teacher is the target's distribution renormalised over the draft vocabulary. Rows whose
    full-vocabulary argmax is outside it are excluded from the loss, but count as misses in the
    score, as in serving.
    """
    device = batch.tokens.device
    total = torch.zeros((), dtype=torch.float32, device=device)
    scores = []
    steps = turns(batch.loss_mask, plan, seed, device)
    hidden = head.fuse(batch.features.flatten(0, 1))
    reads = unrolled(head, batch.tokens, hidden, embed, steps)
    for step, (read, turn) in enumerate(zip(reads, steps, strict=True)):
        # Row q predicts the token at q + step + 2, whose teacher is the target at q + step + 1.
        teachers = turn.rows[turn.scored] + step + 1
        weight = head.lm_head.weight
        loss, score = step_loss(read, turn.scored, teachers, weight, batch, vocabulary)
        scores.append(score)
        total = total + plan.decay**step * loss
    return total, scores


def step_loss(
    read: Tensor,
    rows: Tensor,
    teachers: Tensor,
    weight: Tensor,
    batch: TrainingBatch,
    vocabulary: DraftVocabulary,
) -> tuple[Tensor, StepScore]:
    """Return the mean soft cross-entropy in nats of one unrolled step, with a gradient, and its
    score.

    read      [R,H] the output head's input
    rows      int64[n] the rows of `read` that predict an answer token
    teachers  int64[n] flat positions of the target's distributions for these tokens
    weight    [Vd,H] the output head
    """
    count = len(rows)
    choice = vocabulary.draft_ids[batch.choice.flatten()[teachers]]
    reachable = choice >= 0
    if read.device.type == "cpu":  # Else selecting rows would wait for the device.
        rows, teachers, choice = (x[reachable] for x in (rows, teachers, choice))
        reachable = reachable[reachable]
    loss, right = summed_loss(
        read.index_select(0, rows),
        weight,
        batch.teacher,
        teachers,
        torch.where(reachable, choice, -1),
        None,
    )
    loss = loss / reachable.sum().clamp_min(1)
    return loss, StepScore(loss.detach(), right.sum(), count)


def simulated_length(accuracies: list[float]) -> float:
    """Return the mean tokens per step of a draft chain including the target's own: 1 + the sum over
    j of the product of the first j accuracies. accuracies[i]: probability that draft token i agrees
    with the target, given that those before it did, on text that the target generated. 1.0 for [].
    """
    length = product = 1.0
    for accuracy in accuracies:
        product *= accuracy
        length += product
    return length


@dataclass(frozen=True, slots=True)
class Anchors:
    """The blocks that a batch is trained on.

    places  int64[B,N]  position of each block's root; 0 for missing blocks
    valid   bool[B,N]   whether the block exists
    """

    places: Tensor
    valid: Tensor

    @staticmethod
    def drawn(loss_mask: Tensor, max_blocks: int, seed: int) -> "Anchors":
        """Draw at most `max_blocks` blocks per text, by `seed`, among the positions whose successor
        belongs to an answer.

        loss_mask  bool[B,T], tokens of answers, on the CPU
        """
        begins = torch.zeros_like(loss_mask)
        begins[:, 1:-1] = loss_mask[:, 2:]  # A root is never the first token.
        noise = torch.rand(loss_mask.shape, generator=torch.Generator().manual_seed(seed))
        value, place = noise.masked_fill(~begins, torch.inf).sort(1)
        count = min(max_blocks, loss_mask.shape[1])
        valid = value[:, :count] < torch.inf
        return Anchors(place[:, :count].masked_fill(~valid, 0), valid)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The weights by which blocks are trained.

    anchors  blocks of each text in one step
    decay    factor of the loss weight from one draft token to the next
    """

    anchors: int
    decay: float = 1.0


def block_loss(
    drafter: BlockDrafter,
    batch: TrainingBatch,
    embed: Tensor,
    vocabulary: DraftVocabulary,
    plan: BlockPlan,
    seed: int = 0,
) -> tuple[Tensor, list[StepScore]]:
    """Return the sum over draft tokens of decay**k times the mean soft cross-entropy in nats, a
    scalar with a gradient, and each draft token's score.

    embed  [V,H] the target's embedding
    plan   blocks per text, and decay
    seed   draws the blocks

    In a score, `rows` are the blocks whose earlier draft tokens are all right, `hits` those that
    are right at this one too, so that `simulated_length` of the quotients is the mean length of a
    chain. If the target's choice is outside the draft vocabulary, the draft token counts as wrong
    and is excluded from the loss. A drafter with tables (PairedDrafter) reads the previous token of
    the text itself; the loss of its confidence is added.
    """
    device = batch.tokens.device
    chosen = Anchors.drawn(batch.loss_mask, plan.anchors, seed)
    anchors = Anchors(chosen.places.to(device), chosen.valid.to(device))
    head, first = drafter.head, 0 if drafter.head.anchored else 1
    read = _read(drafter, batch, embed, anchors)[:, :, first:]
    weight = drafter.lm_head.weight if head.own_head else vocabulary.rows
    length, depth = batch.tokens.shape[1], head.depth
    total = torch.zeros((), dtype=torch.float32, device=device)
    scores, alive = [], anchors.valid
    loss_mask = batch.loss_mask.to(device)
    row = torch.arange(len(batch.tokens), device=device)[:, None] * length
    real = anchors.valid
    for step in range(depth):
        teacher = (anchors.places + step).clamp(max=length - 1)
        here = (teacher + 1).clamp(max=length - 1)
        real = real & loss_mask.gather(1, here) & (anchors.places + step + 1 < length)
        flat = (row + teacher)[real]
        choice = vocabulary.draft_ids[batch.choice.flatten()[flat]]
        reachable = choice >= 0
        states, flat, after = read[:, :, step][real][reachable], flat[reachable], None
        if isinstance(drafter, PairedDrafter):
            above = drafter.above(batch.tokens.flatten()[flat]).to(states.dtype)
            states, after = torch.cat([states, above], -1), drafter.markov_head.markov_w2.weight
        loss, hit = summed_loss(states, weight, batch.teacher, flat, choice[reachable], after)
        count = reachable.sum().clamp_min(1)
        if isinstance(drafter, PairedDrafter):
            total = total + plan.decay**step * drafter.unsure(states, hit) / count
        loss = loss / count
        total = total + plan.decay**step * loss
        alive = alive & real
        before = int(alive.sum())
        right = torch.zeros_like(real)
        right[real] = torch.zeros_like(reachable).masked_scatter(reachable, hit)
        alive = alive & right
        scores.append(StepScore(loss.detach(), alive.sum(), before))
    return total, scores


def _read(drafter: BlockDrafter, batch: TrainingBatch, embed: Tensor, anchors: Anchors) -> Tensor:
    """Return the output head's input [B,N,places,H]."""
    head, (texts, count) = drafter.head, anchors.places.shape
    length, device = batch.tokens.shape[1], batch.tokens.device
    before = _rotary(drafter, torch.arange(length, device=device))
    context = drafter.context(batch.features.to(drafter.fc.weight.dtype), before)
    tokens = torch.full((texts, count, head.places), max(head.mask, 0), device=device)
    tokens[:, :, 0] = batch.tokens.gather(1, anchors.places)
    x = drafter.embedded(tokens, embed).flatten(1, 2)
    position = anchors.places[:, :, None] + torch.arange(head.places, device=device)
    seen = _seen(head.causal, head.places, anchors, length)

    def attend(layer: int, heads: TrainedHeads) -> Tensor:
        before = context[layer].turned()[1:]
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
    """Return the attention mask bool[B,N*places,T+N*places]: a place sees the features before its
    block's anchor, and its own block.
    """
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
