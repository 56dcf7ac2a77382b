"""The loop learns, resumes to the bit, keeps the best, and stops without losing anything."""

import errno
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forerun.cli.train_network import Trainer
from forerun.drafts.eagle_config import DraftHead
from forerun.errors import ConfigError, ModelError
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.networks.rope import Rope
from forerun.train.answers import Chat
from forerun.train.batches import stored_reader
from forerun.train.corpus import batches, choose_vocabulary, open_corpus, write_chats, write_whole
from forerun.train.ema import WeightEma
from forerun.train.features import write_features
from forerun.train.init import SCALES, calibrate
from forerun.train.loop import TrainingError, TrainingRun, TrainingSchedule, evaluate, train
from forerun.train.loss import DraftVocabulary
from forerun.train.pipeline import _line
from forerun.train.presets import TrainConfig
from forerun.train.progress import Progress
from forerun.train.shards import Shards
from forerun.train.snapshot import load_snapshot

VOCAB, HIDDEN = 40, 32

HEAD = DraftHead(
    algorithm="eagle3",
    target_hidden=HIDDEN,
    hidden=HIDDEN,
    heads=4,
    kv_heads=2,
    head_size=8,
    ffn=64,
    vocab=VOCAB,
    target_vocab=VOCAB,
    norm_eps=1e-5,
    rope=Rope(10000.0),
    context=256,
    features=(1, 2, 3),
    trained_head=False,
)


EVERY = np.arange(VOCAB, dtype=np.int32)


class Language:
    """A target whose next token is a fixed function of the last two; its features say so."""

    def __init__(self):
        random = np.random.default_rng(5)
        self.table = random.integers(VOCAB, size=(VOCAB, VOCAB))
        self.embed = random.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
        self.mix = random.normal(size=(3, HIDDEN, HIDDEN)).astype(np.float32) / 6

    def chat(self, seed, length=48):
        tokens = list(np.random.default_rng(seed).integers(VOCAB, size=2))
        while len(tokens) < length:
            tokens.append(self.table[tokens[-2], tokens[-1]])
        wanted = np.arange(length) >= 4
        return Chat(np.array(tokens, np.int32), wanted)

    def teach(self, tokens, scored):
        before = np.concatenate([tokens[:1], tokens[:-1]])
        last = 4 * self.embed[self.table[before, tokens]]
        features = np.concatenate([last @ m for m in self.mix], -1)
        return features, last[scored] @ self.embed.T


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    language = Language()
    folder = tmp_path_factory.mktemp("corpus")
    corpus = write_chats(folder, [language.chat(seed % 34) for seed in range(40)], held_out=6)
    write_features(corpus, HEAD, EVERY, language.teach, lambda done, total: None)
    return corpus


def trial(corpus, folder: Path, shards=1, **changes) -> TrainingRun:
    torch.manual_seed(1)
    head = EagleHead(HEAD)
    embed = torch.from_numpy(Language().embed)
    vocabulary = DraftVocabulary.of(torch.arange(VOCAB), embed)
    with torch.no_grad():
        head.lm_head.weight.copy_(vocabulary.rows)
    head.lm_head.weight.requires_grad_(False)
    values = {"epochs": 80, "tokens": 512, "length": 64, "rate": 3e-3, "check_every": 50}
    return TrainingRun(
        head,
        embed,
        vocabulary,
        corpus,
        stored_reader(corpus),
        TrainingSchedule(**values | changes),
        folder,
        shards=Shards(shards),
    )


def test_overfits_and_keeps_the_best(corpus, tmp_path):
    run = trial(corpus, tmp_path, epochs=40, rate=9e-3)
    progress = train(run, lambda p: None)
    last = progress.history[-1]
    assert min(last["accuracy"]) > 0.98, last  # The held-out chats repeat training ones.
    assert progress.best == max(row["length"] for row in progress.history[1:])
    assert (tmp_path / "best" / "state.safetensors").exists()
    assert last["loss"] < progress.history[0]["loss"] / 3


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_resumes_to_the_bit(corpus, tmp_path, shards):
    values = {"epochs": 4, "thin": 0.7, "check_every": 5, "ema": 0.9}
    whole = trial(corpus, tmp_path / "whole", shards, **values)
    train(whole, lambda p: None)

    def stop_at_seven(progress):
        if progress.step == 7:
            raise KeyboardInterrupt

    cut = trial(corpus, tmp_path / "cut", shards, **values)
    with pytest.raises(KeyboardInterrupt):
        train(cut, stop_at_seven)
    again = trial(corpus, tmp_path / "cut", shards, **values)
    progress = train(again, lambda p: None)
    assert progress.step == progress.total
    ends = [load_file(tmp_path / name / "last" / "state.safetensors") for name in ("whole", "cut")]
    assert ends[0].keys() == ends[1].keys()
    assert {name.split(".")[0] for name in ends[0]} == {"head", "optimiser", "average"}
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


@pytest.mark.slow
def test_the_better_of_weights_and_average_is_kept(corpus, tmp_path):
    """At a rate that throws the weights about, their average is far better."""
    run = trial(corpus, tmp_path, epochs=25, rate=3e-2, floor=1.0, ema=0.98)
    progress = train(run, lambda p: None)
    rows = progress.history[1:]
    assert progress.best == max(max(row["length"], row["averaged"]) for row in rows)
    assert progress.best == max(row["averaged"] for row in rows)
    last = [p.clone() for p in run.head.parameters()]
    assert load_snapshot(tmp_path / "best", run.head, None, Progress())
    assert evaluate(run, 0)["length"] == progress.best
    assert any(not torch.equal(a, b) for a, b in zip(last, run.head.parameters(), strict=True))


def test_an_average_is_what_it_says():
    module = torch.nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(0.0)
    ema = WeightEma(module, 0.5)
    for step, value in enumerate((1.0, 2.0, 3.0, 4.0), 1):
        module.weight.data.fill_(value)
        ema.update(step)
    # New values count 10/11, 10/12, 10/13, 10/14: from `WARM`, not yet from the decay of 0.5.
    expected = 0.0
    for step, value in enumerate((1.0, 2.0, 3.0, 4.0), 1):
        expected += (value - expected) * 10 / (step + 10)
    assert ema.weights["weight"].item() == pytest.approx(expected)
    with ema.worn():
        assert module.weight.item() == pytest.approx(expected)
    assert module.weight.item() == 4.0
    for _ in range(20):
        before = ema.weights["weight"].item()
        ema.update(10**6)
        assert ema.weights["weight"].item() == pytest.approx((before + 4.0) / 2)


def test_an_average_may_begin_later(corpus, tmp_path):
    train(trial(corpus, tmp_path, epochs=1), lambda p: None)
    run = trial(corpus, tmp_path, epochs=2, ema=0.9, check_every=1)
    progress = train(run, lambda p: None)
    assert progress.step == progress.total == 2 * progress.history[1]["step"]
    assert "averaged" in progress.history[-1]


def test_shards_learn_the_same(corpus, tmp_path):
    heads = []
    for shards in (1, 3):
        run = trial(corpus, tmp_path / str(shards), shards, epochs=1, check_every=99)
        train(run, lambda p: None)
        heads.append(run.head)
    for (name, a), b in zip(heads[0].named_parameters(), heads[1].parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-3), name


def test_nan_keeps_the_last_checkpoint(corpus, tmp_path):
    run = trial(corpus, tmp_path, epochs=4, check_every=4)
    read, poison = run.read, []

    def bad_read(pieces):
        batch = read(pieces)
        if poison:
            batch.features[0, 5] = float("nan")
        return batch

    def report(progress):
        if progress.step == 6:
            poison.append(True)

    bad = TrainingRun(run.head, run.embed, run.vocabulary, corpus, bad_read, run.schedule, tmp_path)
    with pytest.raises(TrainingError, match="nan at step 6"):
        train(bad, report)
    fresh = trial(corpus, tmp_path, epochs=4, check_every=4)
    assert train(fresh, lambda p: None).step > 6
    assert all(torch.isfinite(p).all() for p in fresh.head.parameters())


def test_full_disk_is_a_message(corpus, tmp_path, monkeypatch):
    run = trial(corpus, tmp_path, epochs=2, check_every=3)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forerun.train.snapshot.save_file", full)
    with pytest.raises(TrainingError, match="No space left"):
        train(run, lambda p: None)


def test_features_that_do_not_fit_are_refused_before_the_work(tmp_path, monkeypatch):
    language = Language()
    small = write_chats(tmp_path, [language.chat(seed) for seed in range(3)], held_out=1)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ModelError, match="has 1,000 free"):
        write_features(small, HEAD, EVERY, language.teach, lambda done, total: None)
    assert not (tmp_path / "features.npy").exists()


def test_features_go_on_unless_the_vocabulary_changed(tmp_path):
    language, seen = Language(), []

    def teach(tokens, scored):
        seen.append(len(tokens))
        return language.teach(tokens, scored)

    small = write_chats(tmp_path, [language.chat(seed) for seed in range(3)], held_out=1)
    for ids, runs in ((EVERY, 3), (EVERY, 3), (EVERY[:-1], 6)):
        write_features(small, HEAD, ids, teach, lambda done, total: None)
        assert len(seen) == runs


def test_checkpoint_of_another_head_is_refused(corpus, tmp_path):
    train(trial(corpus, tmp_path, epochs=1), lambda p: None)
    other = trial(corpus, tmp_path, epochs=1)
    other.head.fc = torch.nn.Linear(3 * HIDDEN, HIDDEN + 1, bias=False)
    with pytest.raises(ModelError, match="another head"):
        train(other, lambda p: None)


def test_first_loss_is_no_worse_than_no_idea(corpus, tmp_path):
    run = trial(corpus, tmp_path)
    with torch.no_grad():
        run.head.lm_head.weight.mul_(20)  # Very sharp: any wrong direction costs dearly.
        run.vocabulary.rows.copy_(run.head.lm_head.weight)
    batch = run.read(next(batches(corpus, corpus.training, 64, 512, 0)))
    loss = calibrate(run.head, run.head.norm.weight, batch, run.embed, run.vocabulary)
    assert loss <= math.log(VOCAB) + 1e-4
    assert 0.0 in SCALES


def test_an_epoch_sees_every_chat_once(corpus):
    groups = list(batches(corpus, corpus.training, 64, 512, 3))
    begins = sorted(p.begin for group in groups for p in group)
    assert begins == [int(s) for s in corpus.starts[: len(corpus.training)]]


def test_batches_are_of_answer_tokens(tmp_path):
    """Steps of as many answer tokens, whatever the prompts; memory is bounded all the same."""
    random = np.random.default_rng(2)
    chats = []
    for _ in range(60):
        prompt_len, answered = random.integers(4, 20), random.integers(20, 40)
        wanted = np.arange(prompt_len + answered) >= prompt_len
        chats.append(Chat(np.zeros(len(wanted), np.int32), wanted))
    even = write_chats(tmp_path / "even", chats, held_out=1)
    groups = list(batches(even, even.training, 64, 200, 3))
    counts = [sum(int(even.loss_mask[p.begin : p.end].sum()) for p in group) for group in groups]
    assert all(160 < count <= 200 for count in sorted(counts)[1:])
    wordy = [Chat(np.zeros(64, np.int32), np.arange(64) >= 62) for _ in range(20)]
    long = write_chats(tmp_path / "long", wordy, held_out=1)
    assert {len(g) for g in batches(long, long.training, 64, 200, 3)} == {6, 1}  # 6 x 64 <= 400


def test_vocabulary_has_the_forced_and_the_frequent(corpus):
    forced = np.array([0, 39], np.int32)
    ids = choose_vocabulary(corpus, 10, VOCAB, forced)
    assert len(ids) == 10
    assert {0, 39} <= set(ids.tolist())
    assert (np.diff(ids) > 0).all()
    answers = np.concatenate(
        [corpus.tokens[corpus.span(c)][corpus.loss_mask[corpus.span(c)]] for c in corpus.training]
    )
    counts = np.bincount(answers, minlength=VOCAB)
    outside = [i for i in range(VOCAB) if i not in ids]
    assert counts[outside].max() <= np.sort(counts[ids])[2]


def test_a_file_that_cannot_be_written_is_none(tmp_path, monkeypatch):
    """Else it would count as finished: a corpus, what features there are, what eval reads."""
    file, write = tmp_path / "corpus.json", Path.write_text

    def full(path, text, **how):
        write(path, text[:1], **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    write_whole(file, "{}")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, '{"held_out": 1}')
    assert file.read_text() == "{}"


def test_a_device_that_is_none_is_refused_before_answers_are_written(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, why in (("gpu", "is no torch device"), ("cuda", "sees no GPU"), ("cuda:3", "no GPU")):
        with pytest.raises(ConfigError, match=f"train-device is {name}, .*{why}"):
            Trainer(None, TrainConfig(train_device=name))


def test_the_speed_is_that_of_all_runs_together():
    row = {"step": 4.0, "loss": 1.0, "accuracy": [0.5], "length": 1.5}
    assert _line(Progress(tokens=900, seconds=30.0, history=[row])).endswith(", 30 tokens/s")


def test_an_unfinished_corpus_is_refused(tmp_path):
    with pytest.raises(ModelError, match="generate it again"):
        open_corpus(tmp_path)


def test_features_beyond_float16_are_kept(tmp_path):
    """Some of Gemma's reach 103,789: as float16 they were inf, and the loss nan."""

    class Reads:
        features, target_hidden = (1,), 4

    chat = Chat(np.arange(6, dtype=np.int32), np.arange(6) >= 2)
    corpus = write_chats(tmp_path, [chat, replace(chat, number=1)], 1)
    values = np.full((6, 4), 103_789.0, np.float32)
    teacher = lambda tokens, scored: (values, np.zeros((len(scored), 8), np.float32))  # noqa: E731
    write_features(corpus, Reads(), np.arange(8, dtype=np.int32), teacher, lambda *_: None)
    (batch,) = [stored_reader(corpus)(each) for each in batches(corpus, range(1), 9, 99, 0)]
    assert batch.features.shape == (1, 6, 4)
    assert (batch.features / 103_789.0 - 1.0).abs().max() < 0.005
