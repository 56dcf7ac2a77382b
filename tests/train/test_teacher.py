"""The compiled core teaches what dense float32 teaches, in any chunks."""

import numpy as np
import pytest
import torch

from forerun.drafts.eagle_config import head_for
from forerun.errors import EngineError
from forerun.executors import cpu
from forerun.executors.cpu import hidden_states
from forerun.train import pipeline, teacher
from forerun.train.answers import Chat
from forerun.train.chats import TrainingTarget
from forerun.train.corpus import write_chats
from forerun.train.features import distil
from forerun.train.target import DenseTarget
from forerun.train.teacher import core_teacher, dense_teacher

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
FEATURES = (1, 3, 4)
TOKENS = np.random.default_rng(0).integers(200, size=45).astype(np.int32)
SCORED = np.array([3, 4, 5, 20, 21, 40, 44], np.int32)


def cosine(a, b):
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def test_passes_are_those_of_the_references(checkpoint):
    dense = DenseTarget(checkpoint, "cpu", torch.float32)
    with (
        core_teacher(checkpoint, FEATURES, 64, threads=2) as core,
        dense_teacher(dense, FEATURES) as slow,
    ):
        fast, wanted = core(TOKENS, SCORED), slow(TOKENS, SCORED)
    for a, b in zip(fast, wanted, strict=True):
        assert a.shape == b.shape
        assert np.median(cosine(a, b)) > 0.995  # Random weights make 8 bits look worse than they
        assert cosine(a, b).min() > 0.95  # are: the real model reaches 0.999 everywhere.
    # A feature off by one layer would not pass for the right one.
    width = checkpoint.architecture.hidden
    assert cosine(fast[0][:, :width], wanted[0][:, width : 2 * width]).max() < 0.95


def test_chunks_change_no_bit(checkpoint, monkeypatch):
    results = []
    for chunk in (512, 16):
        monkeypatch.setattr(hidden_states, "CHUNK", chunk)
        with core_teacher(checkpoint, FEATURES, 64, threads=1) as core:
            core(TOKENS[::-1], SCORED)  # What ran before is forgotten.
            results.append(core(TOKENS, SCORED))
            with pytest.raises(EngineError, match="65 tokens"):
                core(np.zeros(65, np.int32), SCORED)
    for whole, cut in zip(*results, strict=True):
        assert np.array_equal(whole, cut)


def test_distilled_are_the_likeliest_of_the_draft_vocabulary():
    logits = np.array([[0.0, 5.0, 1.0, 4.0, 3.0]], np.float32)
    choice, likely, chance = distil(logits, np.array([0, 2, 3, 4], np.int32), 2)
    assert choice.tolist() == [1]
    assert likely.tolist() == [[2, 3]]
    assert chance[0] == pytest.approx(np.exp([4, 3]) / np.exp([4, 3]).sum())


def test_threads_reach_the_core_teacher(checkpoint, monkeypatch, tmp_path):
    """`forerun train --threads` is meant for the features too."""
    seen = []
    true = teacher.HiddenStates

    def watched(checkpoint, features, longest, threads):
        seen.append(threads)
        return true(checkpoint, features, longest, threads)

    monkeypatch.setattr(teacher, "HiddenStates", watched)
    chats = [Chat(np.arange(9, dtype=np.int32), np.arange(9) > 3)] * 2
    corpus = write_chats(tmp_path, chats, 1)
    about = head_for(checkpoint.architecture, 10)
    source = TrainingTarget(checkpoint, None, None, "tiny", core=True, threads=1)
    with pipeline._teacher(source, about.features, corpus) as teach:
        features, _ = teach(np.arange(9, dtype=np.int32), np.array([4], np.int32))
    assert seen == [1]
    assert features.shape == (9, 3 * checkpoint.architecture.hidden)
