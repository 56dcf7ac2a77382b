"""What runs on a GPU, run on the CPU: bfloat16 products, features computed on the way, a clock."""

import math
from itertools import count

import pytest
import torch

from forerun.drafts.eagle_config import head_for
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.train import loop
from forerun.train.batches import online_reader
from forerun.train.corpus import batches, write_chats
from forerun.train.init import calibrate, start_from_target
from forerun.train.loop import TrainingRun, TrainingSchedule, train
from forerun.train.loss import DraftVocabulary
from forerun.train.target import DenseTarget
from tests.train.test_served import greedy_chats


@pytest.fixture(scope="module")
def corpus(checkpoint, tmp_path_factory):
    chats = list(greedy_chats(checkpoint.path, 12, 30))
    chats += chats[:4]  # What is held out was seen: does anything get learnt at all?
    return write_chats(tmp_path_factory.mktemp("corpus"), chats, held_out=4)


def trial(checkpoint, corpus, folder, dtype, **schedule):
    torch.manual_seed(0)
    target = DenseTarget(checkpoint, "cpu", dtype)
    about = head_for(checkpoint.architecture, 200)
    vocabulary = DraftVocabulary.of(torch.arange(200), target.head)
    read = online_reader(corpus, target, about.features, vocabulary.rows)
    values = {"tokens": 512, "length": 64, "check_every": 1000, "look_every": 5} | schedule
    made = TrainingRun(
        EagleHead(about),
        target.embed,
        vocabulary,
        corpus,
        read,
        TrainingSchedule(**values),
        folder,
        dtype,
    )
    start_from_target(made.head, checkpoint, vocabulary, 0)
    first = next(batches(corpus, corpus.training, 64, 512, 0))
    with made.computing():
        loss = calibrate(made.head, made.head.norm.weight, read(first), made.embed, vocabulary)
    assert loss <= math.log(200) + 0.05
    return made


@pytest.mark.slow
def test_bfloat16_products_learn_as_float32_does(checkpoint, corpus, tmp_path):
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        run = trial(checkpoint, corpus, tmp_path / str(dtype), dtype, epochs=15, rate=1e-2, steps=2)
        assert all(p.dtype == torch.float32 for p in run.head.parameters())
        progress = train(run, lambda p: None)
        assert progress.step == progress.total
        losses[dtype] = [row["loss"] for row in (progress.history[0], progress.history[-1])]
    for first, last in losses.values():
        assert last < first - 0.1
    for a, b in zip(*losses.values(), strict=True):
        assert abs(a - b) < 0.2, losses


def test_the_clock_ends_training_and_the_rate_falls_in_time(
    checkpoint, corpus, tmp_path, monkeypatch
):
    """By a clock on which every step takes a second."""
    monkeypatch.setattr(loop, "monotonic", count().__next__)
    run = trial(
        checkpoint, corpus, tmp_path, torch.float32, epochs=100_000, minutes=0.25, look_every=1
    )
    progress = train(run, lambda p: None)
    assert progress.step == progress.seconds == 15 < progress.total
    assert (tmp_path / "best").exists()
    again = trial(
        checkpoint, corpus, tmp_path, torch.float32, epochs=100_000, minutes=0.25, look_every=1
    )
    assert train(again, lambda p: None).step == progress.step  # The time was spent before.


def test_rate_follows_the_further_of_steps_and_time():
    schedule = TrainingSchedule(rate=1.0, warm_up=0.1, floor=0.1)
    rates = [schedule.rate_at(place, 100) for place in (0, 9.5, 10, 55, 100)]
    assert rates == pytest.approx([0.1, 1.05, 1.0, 0.55, 0.1], abs=1e-6)
