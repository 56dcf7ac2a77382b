"""The networks that `forerun train` trains, by method: EAGLE heads, a block drafter, an MTP
layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.block_config import BlockHead, default_block_features
from forerun.drafts.eagle_config import head_for
from forerun.drafts.eagle_folder import DraftFile
from forerun.executors.torch.drafts.block import BlockDrafter
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.networks.arch import Architecture
from forerun.train.eagle1 import Eagle1Head, regression_loss, start_regression, unserved
from forerun.train.export import export_block, export_head
from forerun.train.features import ReadsFeatures
from forerun.train.init import calibrate, start_block, start_from_draft, start_from_target
from forerun.train.loop import LossOf, TrainingRun, unrolled_loss
from forerun.train.loss import BlockPlan, StepScore, TrainingBatch, block_loss
from forerun.train.pairs import PairedDrafter
from forerun.train.prediction import (
    PredictionLayer,
    PredictionSpec,
    export_prediction,
    start_layer,
)
from forerun.train.presets import TrainConfig
from forerun.types import Ints


@dataclass(frozen=True)
class Student:
    """A network to train.

    about    its description
    head     its weights, float32
    begin    (trial, a first batch): initialises the weights; a resumed run overwrites them
    export   writes it as a folder that servers load
    loss_of  the loss to minimise
    """

    about: ReadsFeatures
    head: nn.Module
    begin: Callable[[TrainingRun, TrainingBatch], None]
    export: Callable[[Path], None]
    loss_of: LossOf


def check_target(target: Architecture, config: TrainConfig, start: DraftFile | None) -> None:
    """Raise ModelError if no draft of config.method can be trained for `target`. Called before
    answers are generated, which takes hours.
    """
    if config.method == "mtp":
        PredictionSpec(target, config.draft_vocab)
    elif config.method == "block":
        block_for(target, config.draft_vocab, config).check_against(target, "train")
    elif config.method == "eagle":
        unserved(target)
    elif config.method == "eagle3" and start is None:
        head_for(target, config.draft_vocab)


def eagle_student(
    checkpoint: Checkpoint, ids: Ints, config: TrainConfig, start: DraftFile | None
) -> Student:
    """Return an EAGLE-3 head for the draft vocabulary ids int32[Vd], new or with the weights of
    `start`. Raises ModelError if the target cannot have one.
    """
    about = head_for(checkpoint.architecture, len(ids)) if start is None else start.head
    head = EagleHead(about)

    def begin(trial: TrainingRun, first: TrainingBatch) -> None:
        if start is not None:
            start_from_draft(head, start, trial.vocabulary)
            return
        start_from_target(head, checkpoint, trial.vocabulary, config.seed)
        with trial.computing():
            calibrate(head, head.norm.weight, first, trial.embed, trial.vocabulary)

    return Student(about, head, begin, lambda to: export_head(head, ids, to), unrolled_loss)


def eagle1_student(
    checkpoint: Checkpoint, ids: Ints, config: TrainConfig, start: DraftFile | None
) -> Student:
    """Return an EAGLE-1 head, whose vocabulary is all ids int32[V], new or with the weights of
    `start`.
    """
    about = head_for(checkpoint.architecture, len(ids), "eagle1") if start is None else start.head
    head = Eagle1Head(about, checkpoint)

    def begin(trial: TrainingRun, first: TrainingBatch) -> None:
        if start is None:
            start_regression(head, trial.vocabulary, config.seed)
        else:
            start_from_draft(head, start, trial.vocabulary)

    def loss_of(
        trial: TrainingRun, batch: TrainingBatch, seed: int, judging: bool
    ) -> tuple[Tensor, list[StepScore]]:
        plan, noise = trial.schedule.unrolling(judging), 0.0 if judging else config.feature_noise
        return regression_loss(head, batch, trial.embed, trial.vocabulary, plan, noise, seed)

    return Student(about, head, begin, lambda to: export_head(head, ids, to), loss_of)


def prediction_student(checkpoint: Checkpoint, ids: Ints, config: TrainConfig) -> Student:
    """Return a new MTP layer for the draft vocabulary ids int32[Vd]. Raises ModelError for a target
    for which none can be trained.
    """
    about = PredictionSpec(checkpoint.architecture, len(ids))
    layer = PredictionLayer(about)

    def begin(trial: TrainingRun, first: TrainingBatch) -> None:
        start_layer(layer, checkpoint, trial.vocabulary, config.seed)
        with trial.computing():
            norm = layer.final_norm.weight
            calibrate(layer, norm, first, trial.embed, trial.vocabulary)

    return Student(about, layer, begin, lambda to: export_prediction(layer, ids, to), unrolled_loss)


def block_for(target: Architecture, vocab: int, config: TrainConfig) -> BlockHead:
    """Return the description of a block drafter for `target` with `vocab` draft ids: as wide as the
    target's layers, with a mask embedding of its own, and with as many key heads as query heads,
    since features reach the block through values alone.
    """
    return BlockHead(
        layers=config.block_layers,
        hidden=target.hidden,
        heads=target.heads,
        kv_heads=target.heads,
        head_size=target.head_size,
        ffn=target.ffn,
        vocab=vocab,
        target_vocab=target.vocab,
        target_hidden=target.hidden,
        norm_eps=target.norm_eps,
        rope=replace(target.rope),
        context=target.context,
        features=default_block_features(target.layers, config.block_features),
        places=config.steps + (not config.block_causal),
        mask=0,
        anchored=config.block_causal,
        causal=config.block_causal,
        qk_norm=False,
        own_mask=True,
        pair="vanilla" if config.block_rank else "",
        rank=config.block_rank,
        confidence=(target.hidden + config.block_rank) if config.block_rank else 0,
    )


def block_student(checkpoint: Checkpoint, ids: Ints, config: TrainConfig) -> Student:
    """Return a new block drafter of config.steps draft tokens for the draft vocabulary ids
    int32[Vd]. Seeds torch. Raises ModelError if it does not suit the target.
    """
    target = checkpoint.architecture
    about = block_for(target, len(ids), config)
    about.check_against(target, "train")
    torch.manual_seed(config.seed)
    drafter = PairedDrafter(about) if about.pair else BlockDrafter(about)

    def loss_of(
        trial: TrainingRun, batch: TrainingBatch, seed: int, judging: bool
    ) -> tuple[Tensor, list[StepScore]]:
        plan = BlockPlan(config.block_anchors, config.decay)
        return block_loss(drafter, batch, trial.embed, trial.vocabulary, plan, seed)

    def begin(trial: TrainingRun, first: TrainingBatch) -> None:
        rows = trial.vocabulary.rows
        start_block(drafter, checkpoint, trial.embed, rows, first, config.seed)

    def export(folder: Path) -> None:
        export_block(about, dict(drafter.named_parameters()), ids, folder, target.layers)

    return Student(about, drafter, begin, export, loss_of)
