"""Training on CUDA, at the size of a toy."""

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from forerun.train.chats import TrainingTarget
from forerun.train.corpus import write_chats
from forerun.train.pipeline import make_draft
from forerun.train.presets import PRESETS, TrainConfig
from tests.models import tiny
from tests.train.test_served import greedy_chats


def test_a_draft_is_trained_within_its_minutes(folder, device, tmp_path):
    model = folder("llama", layers=6)
    checkpoint = FolderCheckpoint(model)
    tokenizer = Tokenizer.from_file(model / "tokenizer.json", (2,))
    source = TrainingTarget(
        checkpoint, tokenizer, ChatTemplate(tiny.CHAT_TEMPLATE, tokenizer), "tiny"
    )
    corpus = write_chats(tmp_path / "corpus", list(greedy_chats(model, 96, 60, device)), held_out=8)
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
    assert config.train_device == "cuda"
