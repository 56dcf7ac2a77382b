"""The training loop: trains on batches, writes checkpoints, and keeps the best one by simulated
acceptance length on held-out chats.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from forerun.errors import ForerunError
from forerun.train.corpus import ChatPiece, Corpus, batches
from forerun.train.ema import WeightEma
from forerun.train.loss import DraftVocabulary, StepScore, TrainingBatch, simulated_length, ttt_loss
from forerun.train.progress import Check, Progress
from forerun.train.shards import Shards
from forerun.train.snapshot import load_snapshot, save_snapshot
from forerun.train.unroll import Unrollable, Unrolling

Reader = Callable[[list[ChatPiece]], TrainingBatch]


LossOf = Callable[["TrainingRun", TrainingBatch, int, bool], tuple[Tensor, list[StepScore]]]
"""(trial, batch, seed, whether it only evaluates) -> the loss, and the score of every draft
token.
"""


class TrainingError(ForerunError):
    """Training ended early for the reason in the message; the last checkpoint is usable."""


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """The length and the rates of training. Rates are AdamW's; a step is one batch of about
    `tokens` answer tokens.

    minutes     train at most this long, including earlier runs: the learning rate then falls with
                the elapsed time, so that it reaches its floor on any machine; 0 = off
    look_every  steps between reads of the loss, each of which waits for the device
    ema         decay of the weights' running average, 0 = no average
    """

    epochs: float = 4.0
    tokens: int = 4096
    length: int = 512
    steps: int = 3
    decay: float = 0.8
    thin: float = 1.0
    rate: float = 1e-3
    warm_up: float = 0.04
    floor: float = 0.1
    clip: float = 1.0
    check_every: int = 100
    seed: int = 0
    minutes: float = 0.0
    look_every: int = 1
    ema: float = 0.0

    def unrolling(self, judging: bool) -> Unrolling:
        """Return the unrolling; for an evaluation (judging) with all rows and without decay."""
        if judging:
            return Unrolling(self.steps)
        return Unrolling(self.steps, self.decay, self.thin)

    def rate_at(self, step: float, total: int) -> float:
        """Return the learning rate at update `step` of `total`: linear warm-up, then a cosine down
        to floor * rate.
        """
        warm = max(self.warm_up * total, 1.0)
        if step < warm:
            return self.rate * (step + 1) / warm
        done = min((step - warm) / max(total - warm, 1.0), 1.0)
        return self.rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


def unrolled_loss(
    trial: "TrainingRun", batch: TrainingBatch, seed: int, judging: bool
) -> tuple[Tensor, list[StepScore]]:
    """Return the loss of a network that reads its own outputs, by `ttt_loss`. See LossOf."""
    plan = trial.schedule.unrolling(judging)
    head = cast(Unrollable, trial.head)
    return ttt_loss(head, batch, trial.embed, trial.vocabulary, plan, seed)


@dataclass(frozen=True)
class TrainingRun:
    """The inputs of a training run.

    loss_of  the loss to minimise
    compute  dtype of the matrix products; the head's own weights stay float32
    """

    head: nn.Module
    embed: Tensor
    vocabulary: DraftVocabulary
    corpus: Corpus
    read: Reader
    schedule: TrainingSchedule
    folder: Path
    compute: torch.dtype = torch.float32
    shards: Shards = field(default_factory=lambda: Shards(1))
    loss_of: LossOf = unrolled_loss

    def computing(self) -> AbstractContextManager[object]:
        """Return a context in which matrix products of the head run in `compute`
        (torch.autocast).
        """
        device = self.embed.device.type
        return torch.autocast(device, self.compute, enabled=self.compute != torch.float32)


def train(trial: TrainingRun, report: Callable[[Progress], None]) -> Progress:
    """Train to the end of the schedule; continues from the folder's last snapshot, if there is one.

    report  called after every read of the loss and every check

    Writes `last` at every check, and `best` when the held-out simulated length improves, with the
    weights or with their average. Raises TrainingError if the loss is not finite or the disk is
    full; a KeyboardInterrupt saves and is re-raised.
    """
    schedule = trial.schedule
    trained = [p for p in trial.head.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.0)
    ema = WeightEma(trial.head, schedule.ema) if schedule.ema else None
    run = _Run(trial, optimiser, trained, ema)
    progress = Progress()
    load_snapshot(trial.folder / "last", trial.head, optimiser, progress, ema)
    progress.total = _steps(trial)  # Of this schedule, which may be longer.
    if progress.step == 0:
        progress.history.append(evaluate(trial, 0))
        with _written(trial):  # The initial weights may be the best.
            _keep_best(trial, progress.history[0]["length"], progress)
    started = monotonic() - progress.seconds
    try:
        for pieces in _batches_from(trial, progress.step):
            if _over(schedule, progress):
                break
            score = _one_step(run, pieces, progress)
            progress.seconds = monotonic() - started
            checks = progress.step % schedule.check_every == 0 or _over(schedule, progress)
            if checks or progress.step % schedule.look_every == 0:
                _attend(trial, score, progress)
                report(progress)
            if checks:
                _check(run, progress)
                report(progress)
    except KeyboardInterrupt:
        if all(bool(weight.isfinite().all()) for weight in trained):
            run.save(progress)
        raise
    return progress


@dataclass(frozen=True, slots=True)
class _Run:
    """The state of a run apart from its progress."""

    trial: TrainingRun
    optimiser: torch.optim.Optimizer
    trained: list[nn.Parameter]
    ema: WeightEma | None

    def save(self, progress: Progress) -> None:
        """Write the checkpoint to continue from. Raises OSError if the disk refuses."""
        folder = self.trial.folder / "last"
        save_snapshot(folder, self.trial.head, self.optimiser, progress, self.ema)


def _one_step(run: _Run, pieces: list[ChatPiece], progress: Progress) -> Tensor:
    """Run one update. Returns the loss of the first unrolled step, on the device."""
    trial, trained = run.trial, run.trained
    schedule = trial.schedule
    place = _done(schedule, progress) * progress.total
    for group in run.optimiser.param_groups:
        group["lr"] = schedule.rate_at(place, progress.total)
    seed = schedule.seed + progress.step
    parts = trial.shards.map(
        lambda part: _slope(trial, trained, part, seed), trial.shards.split(pieces)
    )
    answer_tokens = sum(part.answer_tokens for part in parts)
    for index, parameter in enumerate(trained):
        mean = [part.gradients[index] * (part.answer_tokens / answer_tokens) for part in parts]
        parameter.grad = torch.stack(mean).sum(0) if mean[1:] else mean[0]
    torch.nn.utils.clip_grad_norm_(trained, schedule.clip)
    run.optimiser.step()
    progress.step += 1
    if run.ema is not None:
        run.ema.update(progress.step)
    progress.tokens += answer_tokens
    return torch.stack([part.loss * (part.answer_tokens / answer_tokens) for part in parts]).sum()


@dataclass(frozen=True, slots=True)
class _Slope:
    """The result of one part of a batch: gradients of its mean loss, the first step's loss, and its
    number of answer tokens.
    """

    gradients: tuple[Tensor, ...]
    loss: Tensor
    answer_tokens: int


def _slope(
    trial: TrainingRun, trained: Sequence[Tensor], pieces: list[ChatPiece], seed: int
) -> _Slope:
    batch = trial.read(pieces)
    with trial.computing():
        total, scores = trial.loss_of(trial, batch, seed, False)
    gradients = torch.autograd.grad(total, trained)
    return _Slope(gradients, scores[0].loss, max(int(batch.loss_mask.sum()), 1))


def _done(schedule: TrainingSchedule, progress: Progress) -> float:
    """Return the finished share of the training, 0 to 1: by steps or by time, whichever is
    greater.
    """
    by_time = progress.seconds / (60 * schedule.minutes) if schedule.minutes else 0.0
    return min(max(progress.step / progress.total, by_time), 1.0)


def _over(schedule: TrainingSchedule, progress: Progress) -> bool:
    return _done(schedule, progress) >= 1.0


def _attend(trial: TrainingRun, loss: Tensor, progress: Progress) -> None:
    """Wait for the device and read the loss. Raises TrainingError if it is not finite. Later losses
    would not be finite either, so a check now and then is enough.
    """
    progress.loss = float(loss)
    if not math.isfinite(progress.loss):
        raise TrainingError(
            f"the loss is {progress.loss} at step {progress.step - 1} or shortly before; the "
            f"last checkpoint in {trial.folder} is from before. Lower --rate, start the same "
            "command again."
        )


def _check(run: _Run, progress: Progress) -> None:
    """Evaluate, store the best head, and save a checkpoint. Raises TrainingError if it cannot be
    written.
    """
    trial, ema = run.trial, run.ema
    row = evaluate(trial, progress.step)
    progress.history.append(row)
    with _written(trial):
        _keep_best(trial, row["length"], progress)
        if ema is not None:
            with ema.worn():
                averaged = evaluate(trial, progress.step)["length"]
                row["averaged"] = averaged
                _keep_best(trial, averaged, progress)
        run.save(progress)


@contextmanager
def _written(trial: TrainingRun) -> Iterator[None]:
    """Return a context manager that turns errors of writing checkpoints into TrainingError."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"the checkpoint could not be written ({error}); the one before is intact in "
            f"{trial.folder}. Free some space, start the same command again."
        ) from error


def _keep_best(trial: TrainingRun, length: float, progress: Progress) -> None:
    """Write the current head if its held-out simulated length is the best so far."""
    if length > progress.best:
        progress.best = length
        save_snapshot(trial.folder / "best", trial.head, None, progress)


def evaluate(trial: TrainingRun, step: int) -> Check:
    """Evaluate the head on the held-out chats: first-step loss in nats, agreement with the target
    by position, simulated acceptance length. `step` is only recorded. Changes no weight.
    """
    schedule = trial.schedule
    groups = batches(trial.corpus, trial.corpus.held, schedule.length, schedule.tokens, 0)
    scores = trial.shards.map(lambda pieces: _scores(trial, pieces), list(groups))
    hits = np.array([[int(score.hits) for score in batch] for batch in scores]).sum(0)
    rows = np.array([[score.rows for score in batch] for batch in scores]).sum(0)
    losses = [float(batch[0].loss) for batch in scores]
    accuracies: list[float] = (hits / np.maximum(rows, 1)).tolist()
    return {
        "step": float(step),
        "loss": float(np.mean(losses)),
        "accuracy": accuracies,
        "length": simulated_length(accuracies),
    }


@torch.no_grad()
def _scores(trial: TrainingRun, pieces: list[ChatPiece]) -> list[StepScore]:
    with trial.computing():
        return trial.loss_of(trial, trial.read(pieces), 0, True)[1]


def _steps(trial: TrainingRun) -> int:
    schedule = trial.schedule
    one = sum(1 for _ in _epoch(trial, 0))
    return max(math.ceil(one * schedule.epochs), 1)


def _epoch(trial: TrainingRun, number: int) -> Iterator[list[ChatPiece]]:
    schedule = trial.schedule
    seed = schedule.seed * 1000 + number
    return batches(trial.corpus, trial.corpus.training, schedule.length, schedule.tokens, seed)


def _batches_from(trial: TrainingRun, step: int) -> Iterator[list[ChatPiece]]:
    """Yield the endless sequence of batches, a function of the seed alone, from batch `step` on."""
    number = seen = 0
    while True:
        for pieces in _epoch(trial, number):
            seen += 1
            if seen > step:
                yield pieces
        number += 1
