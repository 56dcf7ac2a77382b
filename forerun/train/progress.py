"""Where a training run stands: what its checkpoints keep and metrics.json shows."""

from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict


class Check(TypedDict):
    """One look at held-out answers.

    step      updates before it
    loss      of the first draft token, nats
    accuracy  agreement with the target by position
    length    simulated tokens per step of a chain
    averaged  the same of the averaged weights, where an average is kept
    """

    step: float
    loss: float
    accuracy: list[float]
    length: float
    averaged: NotRequired[float]


@dataclass(slots=True)
class Progress:
    """Where training stands. Plain values only: checkpoints keep it as JSON.

    step     updates so far
    seconds  spent training so far, in all runs together
    total    updates of the whole schedule
    tokens   answer tokens learnt from
    loss     of the first draft token when last looked at, nats
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
    """What metrics.json holds.

    target   the model that the draft is for
    config   the fields of forerun.train.presets.TrainConfig
    """

    target: str
    config: dict[str, Any]
    answer_tokens: int
    chats: int
    best_simulated_length: float
    history: list[Check]
