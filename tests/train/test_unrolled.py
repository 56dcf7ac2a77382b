"""Unrolled training equals step-by-step serving, and the loss is what it says."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from forerun.drafts.eagle_config import DraftHead
from forerun.executors.torch.decoder.elementwise import rotation
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.networks.rope import Rope
from forerun.train.loss import (
    DenseTargets,
    DraftVocabulary,
    LikeliestTargets,
    TrainingBatch,
    simulated_length,
    ttt_loss,
)
from forerun.train.unroll import Unrolling, turns, unrolled

SWITCHES = [
    {},
    {"normed_residual": True},
    {"normed_feedback": True},
    {"feature_norm": "joint"},
    {"feature_norm": "each", "normed_feedback": True},
    {"algorithm": "eagle1", "features": (4,), "fc_bias": True},
]


def description(**changes):
    values = {
        "algorithm": "eagle3",
        "target_hidden": 16,
        "hidden": 16,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 8,
        "ffn": 24,
        "vocab": 12,
        "target_vocab": 20,
        "norm_eps": 1e-5,
        "rope": Rope(10000.0),
        "context": 64,
        "features": (1, 2, 3),
    }
    return DraftHead(**values | changes)


def make(seed=0, **changes):
    torch.manual_seed(seed)
    head = EagleHead(description(**changes)).double()
    for parameter in head.parameters():
        parameter.data.normal_(std=0.3)
    width = 16 * (1 if changes.get("algorithm") == "eagle1" else 3)
    tokens = torch.randint(20, (2, 9))
    batch = TrainingBatch(
        tokens=tokens,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        features=torch.randn(2, 9, width, dtype=torch.float64),
        choice=torch.randint(20, (2, 9)),
        teacher=DenseTargets(torch.randn(18, 16, dtype=torch.float64), torch.empty(0)),
    )
    return head, batch, torch.randn(20, 16, dtype=torch.float64)


def reads_of(head, batch, embed, steps, thin=1.0):
    """[steps,B,T,H], zero in rows that do not run."""
    steps_ = turns(batch.loss_mask, Unrolling(steps, thin=thin), seed=3)
    hidden = head.fuse(batch.features.flatten(0, 1))
    reads = unrolled(head, batch.tokens, hidden, embed, steps_)
    none = torch.zeros(batch.tokens.numel(), 16, dtype=torch.float64)
    every = [none.index_copy(0, t.rows, read) for t, read in zip(steps_, reads, strict=True)]
    return torch.stack(every).view(steps, *batch.tokens.shape, 16)


def vocabulary_for(batch, embed, ids):
    """The draft vocabulary, and the batch with a teacher over it."""
    vocabulary = DraftVocabulary.of(ids, embed)
    return vocabulary, replace(batch, teacher=DenseTargets(batch.teacher.last, vocabulary.rows))


def served(head, batch, embed, sequence, row, steps):
    """What serving computes for a round that starts after `row`: one token at a time."""
    frequencies = torch.from_numpy(head.head.rope.frequencies(8))
    keys, values, reads = [], [], []

    def attend(_layer, heads):
        q, k, v = heads.turned()
        keys.append(k)
        values.append(v)
        past_k, past_v = torch.stack(keys, 1), torch.stack(values, 1)
        k2, v2 = past_k.repeat_interleave(2, 0), past_v.repeat_interleave(2, 0)
        weights = ((k2 @ q.unsqueeze(-1)).squeeze(-1) * 8**-0.5).softmax(-1)
        return (weights.unsqueeze(-1) * v2).sum(1)

    def run(position, token, hidden):
        cos, sin = rotation(torch.tensor(position), frequencies, 1.0)
        return head(token, embed, hidden, (cos.double(), sin.double()), attend)

    for q in range(row + 1):  # True features: draft-extend.
        token = batch.tokens[sequence, q + 1]
        read, hidden = run(q, token, head.fuse(batch.features[sequence, q]))
    reads.append(read)
    for step in range(1, steps):  # Own draft tokens: drafting.
        token = batch.tokens[sequence, row + 1 + step]
        read, hidden = run(row + step, token, hidden)
        reads.append(read)
    return torch.stack(reads)


@pytest.mark.parametrize("changes", SWITCHES)
def test_unrolled_is_served(changes):
    head, batch, embed = make(**changes)
    batch.loss_mask[1] = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=torch.bool)  # Two answers.
    reads = reads_of(head, batch, embed, 3)
    for row in (0, 1, 4, 5):
        expected = served(head, batch, embed, 1, row, 3)
        run = reads[:, 1, row].abs().sum(-1) > 0
        asks = batch.loss_mask[1, row + 2 : row + 5].tolist()
        assert run.tolist() == [any(asks[step:]) for step in range(3)]
        assert torch.allclose(reads[run, 1, row], expected[run], atol=1e-6), changes


def plain_loss(head, batch, vocabulary, reads, decay):
    """The loss as the definition reads, row by row."""
    total = 0.0
    for step, read in enumerate(reads):
        losses = []
        for b in range(2):
            for q in range(9 - step - 2):
                choice = batch.choice[b, q + step + 1]
                if batch.loss_mask[b, q + step + 2] and vocabulary.draft_ids[choice] >= 0:
                    ids, chance = batch.teacher.at(torch.tensor([9 * b + q + step + 1]))
                    teacher = torch.zeros(12, dtype=torch.float64)
                    teacher[slice(None) if ids is None else ids[0]] = chance[0].double()
                    losses.append(-(teacher * F.log_softmax(head.logits(read[b, q]), -1)).sum())
        total = total + decay**step * torch.stack(losses).mean()
    return total


@pytest.mark.parametrize("likely", [False, True])
def test_loss_and_gradient_are_the_plain_ones(likely):
    head, batch, embed = make()
    batch.loss_mask[0, :4] = False
    ids = torch.tensor([0, 1, 3, 4, 6, 7, 9, 11, 13, 15, 17, 19])
    vocabulary, batch = vocabulary_for(batch, embed, ids)
    if likely:
        chance = torch.rand(18, 3)
        best = torch.rand(18, 12).argsort(-1)[:, :3]
        batch = replace(
            batch, teacher=LikeliestTargets(best, chance / chance.sum(-1, keepdim=True))
        )
    loss, scores = ttt_loss(head, batch, embed, vocabulary, Unrolling(3))
    loss.backward()
    got = {n: p.grad for n, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    plain = plain_loss(head, batch, vocabulary, reads_of(head, batch, embed, 3), 0.8)
    plain.backward()
    assert math.isclose(float(loss.detach()), float(plain.detach()), rel_tol=1e-5)
    for name, gradient in got.items():
        wanted = dict(head.named_parameters())[name].grad
        assert torch.allclose(gradient, wanted, atol=1e-6), name
    assert [s.rows for s in scores] == [12, 11, 10]
    assert all(a.rows >= b.rows for a, b in pairwise(scores))


def test_prompt_tokens_teach_nothing():
    head, batch, embed = make()
    batch.loss_mask[:, :6] = False
    vocabulary, batch = vocabulary_for(batch, embed, torch.arange(12))
    before, _ = ttt_loss(head, batch, embed, vocabulary, Unrolling(2))
    batch.teacher.last.view(2, 9, 16)[:, :5] += 1.0  # Teachers of tokens 1..5, all unwanted.
    batch.choice[:, :5] = 19
    after, _ = ttt_loss(head, batch, embed, vocabulary, Unrolling(2))
    assert float(before) == float(after)


def test_simulated_length():
    assert simulated_length([]) == 1.0
    assert simulated_length([0.5, 0.5, 1.0]) == pytest.approx(1 + 0.5 + 0.25 + 0.25)


def test_thinned_rows_see_what_they_saw():
    head, batch, embed = make()
    whole, thin = (reads_of(head, batch, embed, 3, thin) for thin in (1.0, 0.6))
    run = thin.abs().sum(-1) > 0
    assert run[0].sum() > run[1].sum() > run[2].sum() > 0
    assert torch.allclose(thin[run], whole[run])
    assert torch.equal(reads_of(head, batch, embed, 3, 0.6), thin), "drawn by the seed alone"
