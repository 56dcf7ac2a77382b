"""The progress of a training run, as stored in checkpoints and metrics.json."""

from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict


class Check(TypedDict):
    """One evaluation on held-out answers.

    step      updates before it
    loss      of the first draft token, nats
    accuracy  agreement with the target by position
    length    simulated tokens per step of a chain
    averaged  the simulated length with the averaged weights, if there are any
    """

    step: float
    loss: float
    accuracy: list[float]
    length: float
    averaged: NotRequired[float]


@dataclass(slots=True)
class Progress:
    """The progress of a training run. Plain values only: checkpoints store it as JSON.

    step     updates so far
    seconds  training time so far, of all runs together
    total    updates of the whole schedule
    tokens   answer tokens trained on
    loss     of the first draft token when last read, nats
    best     simulated length of the best checkpoint
    history  every check, oldest first
    """

    step: int = 0
    seconds: float = 0.0
    total: int = 0
    tokens: int = 0
    loss: float = float("nan")
    best: float = 0.0
    history: list[Check] = field(default_factory=list)


class TrainingMetrics(TypedDict):
    """The contents of metrics.json.

    target   the model that the draft is for
    config   the fields of forerun.train.presets.TrainConfig
    """

    target: str
    config: dict[str, Any]
    answer_tokens: int
    chats: int
    best_simulated_length: float
    history: list[Check]
