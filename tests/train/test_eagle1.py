"""Training an EAGLE-1 head: the loss is the published one, and what was learnt is served."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build.engine import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.drafts.eagle_folder import open_draft
from forerun.errors import ModelError
from forerun.executors import cpu
from forerun.measure.acceptance import agreement, drafting, mean_length
from forerun.options.config import EngineConfig
from forerun.train.eagle1 import noisy, regression_loss
from forerun.train.loss import DenseTargets
from forerun.train.presets import TrainConfig
from forerun.train.student import check_target
from forerun.train.unroll import Unrolling
from tests.models import tiny
from tests.train.simulation import Simulation
from tests.train.test_export import TARGET
from tests.train.test_prediction import served
from tests.train.test_unrolled import make, reads_of, vocabulary_for

NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
FIRST = {"algorithm": "eagle1", "features": (4,), "vocab": 20}


def example(seed=0):
    """A head, and texts in which some tokens of a question are not wanted; the target's choice and
    its distribution follow from its hidden state.
    """
    head, batch, embed = make(seed, **FIRST)
    batch.loss_mask[0, :5] = batch.loss_mask[1, :3] = False
    rows = torch.randn(20, 16, dtype=torch.float64)
    head.lm_head.weight.data.copy_(rows)
    vocabulary, batch = vocabulary_for(batch, rows, torch.arange(20))
    last = batch.features.flatten(0, 1)
    batch = replace(
        batch, teacher=DenseTargets(last, rows), choice=(batch.features @ rows.T).argmax(-1)
    )
    return head, batch, embed, vocabulary


def published(predicted, target, rows, mask):
    """compute_loss of EAGLE's eagle/train/main.py, in NumPy: predicted and target [B,T,H] states,
    the output rows [V,H], mask [B,T].
    """

    def log_softmax(logits):
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))

    chance = np.exp(log_softmax(target @ rows.T))
    ploss = -(mask[..., None] * chance * log_softmax(predicted @ rows.T)).sum() / mask.sum()
    away = np.abs(predicted - target)
    smooth = np.where(away < 1, 0.5 * away**2, away - 0.5)
    vloss = (mask[..., None] * smooth).mean(2).sum() / mask.sum()
    return 1.0 * vloss + 0.1 * ploss


@pytest.mark.parametrize("steps", [1, 3])
def test_the_loss_is_the_published_one(steps):
    """Beside what the head says at each row; one step is EAGLE's own, further ones are the same
    loss of later states.
    """
    head, batch, embed, vocabulary = example()
    total, scores = regression_loss(head, batch, embed, vocabulary, Unrolling(steps, 0.5))
    reads = reads_of(head, batch, embed, steps).detach().numpy()
    states, rows = batch.features.numpy(), head.lm_head.weight.detach().numpy()
    wanted, expected = batch.loss_mask.numpy(), 0.0
    for step in range(steps):
        mask, target = np.zeros(wanted.shape), np.zeros(states.shape)
        target[:, : -step - 1] = states[:, step + 1 :]  # EAGLE moves the states, and zeros behind.
        mask[:, : -step - 2] = wanted[:, step + 2 :]
        expected += 0.5**step * published(reads[step], target, rows, mask)
        right = (reads[step] @ rows.T).argmax(-1) == (target @ rows.T).argmax(-1)
        assert (int(scores[step].hits), scores[step].rows) == ((right * mask).sum(), mask.sum())
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)


def test_the_gradient_is_the_loss_s():
    """Along a random direction of all weights, by differences; the output rows have none."""
    head, batch, embed, vocabulary = example()
    head.lm_head.weight.requires_grad_(False)
    trained = [p for p in head.parameters() if p.requires_grad]
    direction = [torch.randn_like(p) for p in trained]

    def moved(by):
        with torch.no_grad():
            for parameter, way in zip(trained, direction, strict=True):
                parameter.add_(way, alpha=by)
        return regression_loss(head, batch, embed, vocabulary, Unrolling(2))[0]

    slope = torch.autograd.grad(moved(0), trained)
    along = sum(float((g * w).sum()) for g, w in zip(slope, direction, strict=True))
    up, down = (float(moved(by).detach()) for by in (2e-4, -4e-4))
    assert along == pytest.approx((up - down) / 4e-4, rel=1e-2)


def test_noise_is_wider_in_short_texts():
    """(rand - .5) * .2 * 512 / tokens, as EAGLE's AddUniformNoise has it, drawn by the seed."""
    wanted = torch.zeros(2, 512, dtype=torch.bool)
    wanted[0, 500:] = wanted[1, 90:128] = True
    hidden = torch.ones(1024, 32)
    noise = noisy(hidden, wanted, 0.2, 3).view(2, 512, 32) - 1
    for text, width in zip(noise, (0.2, 0.8), strict=True):
        assert 0.49 * width < text.abs().max() <= 0.5 * width + 1e-6
        assert abs(text.mean()) < 0.01 * width
        assert text.std() == pytest.approx(width / 12**0.5, rel=0.02)
    assert torch.equal(noisy(hidden, wanted, 0.2, 3), noisy(hidden, wanted, 0.2, 3))
    assert not torch.equal(noisy(hidden, wanted, 0.2, 3), noisy(hidden, wanted, 0.2, 4))


def test_noise_is_read_and_not_learnt():
    """What the head is to say has none, and evaluation has none at all."""
    head, batch, embed, vocabulary = example()
    plain, few = (
        float(regression_loss(head, batch, embed, vocabulary, Unrolling(1), noise)[0].detach())
        for noise in (0.0, 1e-9)
    )
    assert few == pytest.approx(plain, rel=1e-6)
    loud = float(regression_loss(head, batch, embed, vocabulary, Unrolling(1), 2.0)[0].detach())
    assert loud != pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("change", [{"final_softcap": 30.0}, {"logit_scale": 0.5}])
def test_a_target_that_bends_its_logits_is_refused(change):
    with pytest.raises(ModelError, match="use --method eagle3"):
        check_target(replace(TARGET, **change), TrainConfig(method="eagle"), None)
    check_target(TARGET, TrainConfig(method="eagle"), None)


LEARNING = "--method eagle --steps 2 --answers 12 --held-out 4 --epochs 40 --batch-tokens 160"
LEARNING += " --rate 1e-2 --check-every 80"


@NATIVE
@pytest.mark.slow
def test_what_was_learnt_is_accepted(untrained, tmp_path):
    """By heart, on the core: as a chain and in EAGLE-2's trees, and the texts are the target's; the
    trainer's own number is what is served.
    """
    metrics = untrained.train(tmp_path, *LEARNING.split())
    print(metrics["history"][-1])
    checkpoint = FolderCheckpoint(untrained.model)
    draft = open_draft(tmp_path / "draft", checkpoint.architecture)
    assert draft.head.algorithm == "eagle1" and draft.head.vocab == tiny.VOCAB
    config = EngineConfig(
        model=str(untrained.model), policy="fixed", max_sequences=4, kv_tokens=2048,
        speculative_draft_model_path=str(tmp_path / "draft"), speculative_algorithm="EAGLE",
        draft_on_error="stop",
    )  # fmt: skip
    with closing(open_target(config)) as target:
        chain, tree = served(target, untrained)
        agreed = [agreement(drafting(run)) for run in (chain, tree)]
        prompts = [target.chat.encode(list(each.messages)) for each in untrained.questions]
        known = list(zip(prompts, [np.array(each.tokens) for each in chain], strict=True))
        simulated = Simulation(checkpoint, draft, True, None).length(known, 3)
        print(agreed, simulated, mean_length(drafting(chain)))
        assert abs(mean_length(drafting(chain)) / simulated - 1) < 0.05
        assert agreed[0][0] > 0.8 and agreed[0][1] > 0.7, agreed
        assert agreed[1][0] > agreed[0][0] - 0.02
    # A head that was found somewhere is gone on from: its quality is where training begins.
    more = f"{LEARNING} --start-from {tmp_path / 'draft'} --epochs 1 --rate 1e-7"
    again = untrained.train(tmp_path / "more", *more.split())["history"][0]
    assert again["length"] == pytest.approx(metrics["best_simulated_length"], abs=0.05)
