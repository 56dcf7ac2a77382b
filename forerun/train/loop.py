"""The training loop: batches in, checkpoints out, the best one by held-out simulated length."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.executors.torch.eagle import EagleHead
from forerun.train.corpus import Corpus, Piece, batches
from forerun.train.loss import Batch, Vocabulary, simulated_length, ttt_loss
from forerun.train.snapshot import load_snapshot, save_snapshot

Reader = Callable[[list[Piece]], Batch]


class TrainingError(ForerunError):
    """Training ended early; the last checkpoint is usable. The message says why."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How to train. Rates are AdamW's; a step is one batch of about `tokens` tokens."""

    epochs: float = 4.0
    tokens: int = 4096
    length: int = 512
    steps: int = 3
    decay: float = 0.8
    rate: float = 1e-3
    warm_up: float = 0.04
    floor: float = 0.1
    clip: float = 1.0
    check_every: int = 100
    seed: int = 0

    def rate_at(self, step: int, total: int) -> float:
        """Linear warm-up, then a cosine from `rate` to `floor` times it."""
        warm = max(self.warm_up * total, 1.0)
        if step < warm:
            return self.rate * (step + 1) / warm
        done = min((step - warm) / max(total - warm, 1.0), 1.0)
        return self.rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(slots=True)
class Progress:
    """Where training stands. `history` holds one row per check, for the report."""

    step: int = 0
    total: int = 0
    tokens: int = 0
    loss: float = float("nan")
    best: float = 0.0
    history: list[dict[str, float | list[float]]] = field(default_factory=list)


@dataclass(frozen=True)
class Trial:
    """Everything a training run works on."""

    head: EagleHead
    embed: Tensor
    vocabulary: Vocabulary
    corpus: Corpus
    read: Reader
    schedule: Schedule
    folder: Path


def train(trial: Trial, report: Callable[[Progress], None]) -> Progress:
    """Train to the end of the schedule, resuming from the folder's last snapshot if it has one.

    Writes `last` every check and `best` when the held-out simulated length improves. Raises
    TrainingError on NaN or a full disk; a KeyboardInterrupt saves and goes on up.
    """
    schedule = trial.schedule
    trained = [p for p in trial.head.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.0)
    progress = Progress(total=_steps(trial))
    load_snapshot(trial.folder / "last", trial.head, optimiser, progress)
    if progress.step == 0:
        progress.history.append(evaluate(trial, 0))
    try:
        for pieces in _batches_from(trial, progress.step):
            _one_step(trial, optimiser, trained, trial.read(pieces), progress)
            report(progress)
            if progress.step % schedule.check_every == 0 or progress.step == progress.total:
                _check(trial, optimiser, progress)
                report(progress)
            if progress.step >= progress.total:
                break
    except KeyboardInterrupt:
        save_snapshot(trial.folder / "last", trial.head, optimiser, progress)
        raise
    return progress


def _one_step(
    trial: Trial,
    optimiser: torch.optim.Optimizer,
    trained: list[Tensor],
    batch: Batch,
    progress: Progress,
) -> None:
    schedule = trial.schedule
    for group in optimiser.param_groups:
        group["lr"] = schedule.rate_at(progress.step, progress.total)
    total, scores = ttt_loss(
        trial.head, batch, trial.embed, trial.vocabulary, schedule.steps, schedule.decay
    )
    if not math.isfinite(loss := float(total.detach())):
        raise TrainingError(
            f"the loss is {loss} at step {progress.step}; the last checkpoint in "
            f"{trial.folder} is from before. Lower --rate and start again with --resume."
        )
    optimiser.zero_grad(set_to_none=True)
    total.backward()
    torch.nn.utils.clip_grad_norm_(trained, schedule.clip)
    optimiser.step()
    progress.step += 1
    progress.tokens += int(batch.wanted.sum())
    progress.loss = float(scores[0].loss) if scores else float("nan")


def _check(trial: Trial, optimiser: torch.optim.Optimizer, progress: Progress) -> None:
    """Evaluate, keep the best, save. Raises TrainingError where nothing can be written."""
    row = evaluate(trial, progress.step)
    progress.history.append(row)
    length = float(row["length"])  # type: ignore[arg-type]
    try:
        if length > progress.best:
            progress.best = length
            save_snapshot(trial.folder / "best", trial.head, None, progress)
        save_snapshot(trial.folder / "last", trial.head, optimiser, progress)
    except OSError as error:
        raise TrainingError(
            f"the checkpoint could not be written ({error}); the one before is intact in "
            f"{trial.folder}. Free some space and start again with --resume."
        ) from error


def evaluate(trial: Trial, step: int) -> dict[str, float | list[float]]:
    """Held-out loss, agreement per position and simulated chain length."""
    schedule = trial.schedule
    hits = np.zeros(schedule.steps)
    rows = np.zeros(schedule.steps)
    losses = []
    groups = batches(trial.corpus, trial.corpus.held, schedule.length, schedule.tokens, 0)
    with torch.no_grad():
        for pieces in groups:
            _, scores = ttt_loss(
                trial.head, trial.read(pieces), trial.embed, trial.vocabulary, schedule.steps, 1.0
            )
            for index, score in enumerate(scores):
                hits[index] += score.hits
                rows[index] += score.rows
            losses.append(float(scores[0].loss) if scores else 0.0)
    accuracies = (hits / np.maximum(rows, 1)).tolist()
    return {
        "step": float(step),
        "loss": float(np.mean(losses)),
        "accuracy": accuracies,
        "length": simulated_length(accuracies),
    }


def _steps(trial: Trial) -> int:
    schedule = trial.schedule
    one = sum(1 for _ in _epoch(trial, 0))
    return max(math.ceil(one * schedule.epochs), 1)


def _epoch(trial: Trial, number: int) -> Iterator[list[Piece]]:
    schedule = trial.schedule
    seed = schedule.seed * 1000 + number
    return batches(trial.corpus, trial.corpus.training, schedule.length, schedule.tokens, seed)


def _batches_from(trial: Trial, step: int) -> Iterator[list[Piece]]:
    """The endless sequence of batches, from batch `step` on: a function of the seed alone."""
    number = seen = 0
    while True:
        for pieces in _epoch(trial, number):
            seen += 1
            if seen > step:
                yield pieces
        number += 1
