"""`forerun train` from end to end: answers, vocabulary, features, head, training, export.

    prompts or none -> chats (answers/, corpus/) -> features -> start -> loop -> draft/

Every stage writes its result to the output folder and is skipped if it is already there, so an
interrupted run continues where it stopped.
"""

import json
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from forerun.build.token_map import forced_ids
from forerun.drafts.eagle_folder import DraftFile
from forerun.errors import ConfigError, ModelError
from forerun.train.batches import online_reader, stored_reader
from forerun.train.chats import Report, TrainingTarget
from forerun.train.corpus import Corpus, batches, choose_vocabulary, write_whole
from forerun.train.features import write_features
from forerun.train.loop import TrainingRun, TrainingSchedule, train
from forerun.train.loss import DraftVocabulary
from forerun.train.presets import TrainConfig
from forerun.train.progress import Progress, TrainingMetrics
from forerun.train.shards import Shards
from forerun.train.snapshot import load_snapshot
from forerun.train.student import (
    Student,
    block_student,
    eagle1_student,
    eagle_student,
    prediction_student,
)
from forerun.train.target import DenseTarget, embeddings
from forerun.train.teacher import Teacher, core_teacher, dense_teacher
from forerun.types import Ints


def _dense(source: TrainingTarget, name: str) -> DenseTarget:
    """Return the target on a torch device: float32 on the CPU, bfloat16 elsewhere."""
    device = checked_device(name)
    return DenseTarget(
        source.checkpoint, name, torch.float32 if device.type == "cpu" else torch.bfloat16
    )


def checked_device(name: str) -> torch.device:
    """Return the torch device of this name. Raises ConfigError if it does not exist."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"train-device is {name}, which is no torch device: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
        raise ConfigError(f"train-device is {name}, but torch sees {seen}; use --train-device cpu")
    return device


def make_draft(
    source: TrainingTarget,
    corpus: Corpus,
    config: TrainConfig,
    out: Path,
    report: Report,
    start: DraftFile | None = None,
) -> Progress:
    """Run stages 2 to 5: vocabulary, features, initial weights, training, export to `out`/draft.

    start   a head to continue training; None = a new one
    report  called with (what, done, total)

    Continues an interrupted run. Returns the final progress. Raises TrainingError if training ends
    early, ConfigError and ModelError if target or draft cannot be trained.
    """
    torch.manual_seed(config.seed)
    device = torch.device(config.train_device)
    ids = _vocabulary(source, corpus, config, start)
    student = _student(source, ids, config, start)
    about = student.about
    if device.type == "cpu":
        with _teacher(source, about.features, corpus) as teacher:
            write_features(corpus, about, ids, teacher, lambda d, t: report("features", d, t))
        embed, rows = embeddings(source.checkpoint)
        vocabulary = DraftVocabulary.of(torch.from_numpy(ids).long(), rows)
        read = stored_reader(corpus)
        compute = torch.bfloat16 if config.train_bfloat16 else torch.float32
    else:
        target = _dense(source, config.train_device)
        vocabulary = DraftVocabulary.of(torch.from_numpy(ids).long().to(device), target.head)
        embed, compute = target.embed, target.dtype
        read = online_reader(corpus, target, about.features, vocabulary.rows)
    trial = TrainingRun(
        head=student.head.to(device),
        embed=embed,
        vocabulary=vocabulary,
        corpus=corpus,
        read=read,
        schedule=_schedule(config, device),
        folder=out,
        compute=compute,
        shards=Shards.on(device),
        loss_of=student.loss_of,
    )
    schedule = trial.schedule
    first = next(batches(corpus, corpus.training, schedule.length, schedule.tokens, config.seed))
    student.begin(trial, read(first))

    def show(progress: Progress) -> None:
        report(_line(progress), progress.step, progress.total)

    progress = train(trial, show)
    finish(trial, student, progress, config, source.name)
    return progress


def _schedule(config: TrainConfig, device: torch.device) -> TrainingSchedule:
    return TrainingSchedule(
        epochs=config.epochs,
        tokens=config.batch_tokens,
        length=config.length,
        steps=config.steps,
        decay=config.decay,
        thin=config.thin,
        rate=config.rate,
        check_every=config.check_every,
        seed=config.seed,
        minutes=config.train_minutes,
        look_every=1 if device.type == "cpu" else 25,
        ema=config.ema,
    )


def _student(
    source: TrainingTarget, ids: Ints, config: TrainConfig, start: DraftFile | None
) -> Student:
    if config.method == "block":
        return block_student(source.checkpoint, ids, config)
    if config.method == "mtp":
        return prediction_student(source.checkpoint, ids, config)
    make_student = eagle1_student if config.method == "eagle" else eagle_student
    return make_student(source.checkpoint, ids, config, start)


def _vocabulary(
    source: TrainingTarget, corpus: Corpus, config: TrainConfig, start: DraftFile | None
) -> Ints:
    """Return int32[Vd], the target ids of the draft vocabulary."""
    if start is not None:
        return start.target_ids
    vocab = source.checkpoint.architecture.vocab
    size = vocab if config.method == "eagle" else config.draft_vocab
    return choose_vocabulary(corpus, size, vocab, forced_ids(source.tokenizer))


def _teacher(
    source: TrainingTarget, features: tuple[int, ...], corpus: Corpus
) -> AbstractContextManager[Teacher]:
    """Return the compiled core if it supports this target and serving would use it, else torch."""
    if source.core:
        longest = corpus.longest
        return core_teacher(source.checkpoint, features, longest, source.threads)
    return dense_teacher(_dense(source, "cpu"), features)


def finish(
    trial: TrainingRun, student: Student, progress: Progress, config: TrainConfig, name: str
) -> None:
    """Load the best checkpoint into the student, export it to folder/draft, and write metrics.json
    next to that. Raises ModelError if there is no checkpoint, OSError.
    """
    if not load_snapshot(trial.folder / "best", trial.head, None, Progress()):
        raise ModelError(f"{trial.folder} holds no checkpoint to export")
    student.export(trial.folder / "draft")
    metrics: TrainingMetrics = {
        "target": name,
        "config": asdict(config),
        "answer_tokens": int(np.asarray(trial.corpus.loss_mask).sum()),
        "chats": trial.corpus.chats,
        "best_simulated_length": progress.best,
        "history": progress.history,
    }
    write_whole(trial.folder / "metrics.json", json.dumps(metrics, indent=1))


def _line(progress: Progress) -> str:
    """Return the progress line: loss, agreement per position, simulated length, and answer tokens
    per second over all runs.
    """
    if not progress.history:
        return f"training: loss {progress.loss:.3f}"
    last = progress.history[-1]
    accuracy = " ".join(f"{a:.2f}" for a in last["accuracy"])
    speed = progress.tokens / max(progress.seconds, 1e-9)
    return (
        f"training: loss {progress.loss:.2f}, agreement {accuracy}, "
        f"length {last['length']:.3f} (best {progress.best:.3f}), {speed:.0f} tokens/s"
    )
