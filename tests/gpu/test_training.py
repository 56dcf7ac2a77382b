"""Generating and training on CUDA, at the size of a toy."""

import numpy as np
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from forerun.train.answers import Ask, Chat
from forerun.train.chats import TrainingTarget
from forerun.train.corpus import write_chats
from forerun.train.generate import DenseAuthor
from forerun.train.pipeline import make_draft
from forerun.train.presets import PRESETS, TrainConfig
from forerun.train.target import DenseTarget
from tests.models import tiny
from tests.train.test_generate import outputs, prompts

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


def test_greedy_text_of_the_dense_author_is_the_cpus(checkpoint, device):
    """In float32: captured programs against plain calls. Near-ties may split one text."""
    asks = [Ask(p, 0.0, 0, 5 + 7 * i % 50) for i, p in enumerate(prompts(24))]
    there, here = (
        outputs(DenseAuthor(DenseTarget(checkpoint(), d, torch.float32), [2], 5, 300, 60), asks)
        for d in (device, "cpu")
    )
    assert sum(there[key] == here[key] for key in here) >= len(asks) - 2


def test_programs_are_captured_and_replayed(checkpoint, device):
    author = DenseAuthor(DenseTarget(checkpoint(), device, DTYPES[device]), [2], 64, 512, 60)
    for longest in (70, 400):
        asks = [Ask(p, 0.8, i, 60) for i, p in enumerate(prompts(200, longest))]
        found = outputs(author, asks)
        assert all(0 < len(ids) <= 60 for ids in found.values())
        assert len({tuple(ids) for ids in found.values()}) > 190, "noise must move on in replays"
    if device == "cuda":
        assert author._programs.captured == (256, 512)


def chats(checkpoint, device):
    """Texts the target wrote itself, so that there is something to learn."""
    author = DenseAuthor(DenseTarget(checkpoint, device, DTYPES[device]), [], 64, 200, 60)
    asks = [Ask(p, 0.0, i, 60) for i, p in enumerate(prompts(96, 20))]
    for key, ids in outputs(author, asks).items():
        tokens = np.concatenate([asks[key].prompt, np.array(ids, np.int32)])
        yield Chat(tokens, np.arange(len(tokens)) >= len(asks[key].prompt))


def test_a_draft_is_trained_within_its_minutes(folder, device, tmp_path):
    model = folder("llama", layers=6)
    checkpoint = FolderCheckpoint(model)
    tokenizer = Tokenizer.from_file(model / "tokenizer.json", (2,))
    source = TrainingTarget(
        checkpoint, tokenizer, ChatTemplate(tiny.CHAT_TEMPLATE, tokenizer), "tiny"
    )
    corpus = write_chats(tmp_path / "corpus", list(chats(checkpoint, device)), held_out=8)
    config = TrainConfig(
        train_device=device,
        draft_vocab=256,
        epochs=10_000,
        train_minutes=0.15,
        batch_tokens=2048,
        length=80,
        steps=3,
        check_every=40,
    )
    progress = make_draft(source, corpus, config, tmp_path, lambda *_: None)
    assert progress.step < progress.total, "time, not epochs, must have ended it"
    assert 8 < progress.seconds < 30
    first, last = progress.history[0], progress.history[-1]
    assert last["loss"] < first["loss"]
    assert (tmp_path / "draft" / "model.safetensors").exists()


def test_the_gpu_preset_fits_the_time_it_names():
    config = PRESETS["gpu-25min"][1]
    assert config.answer_minutes + config.train_minutes <= 22
    assert config.author == "dense"
    assert config.train_device == "cuda"
