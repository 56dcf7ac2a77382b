"""The half of `forerun train` that trains a network and needs torch; an n-gram table does not."""

from pathlib import Path

import torch

from forerun.cli.console import say
from forerun.drafts.eagle_folder import DraftFile, open_draft
from forerun.networks.arch import Architecture
from forerun.train.chats import Report, TrainingTarget
from forerun.train.corpus import Corpus
from forerun.train.init import check_trainable
from forerun.train.pipeline import checked_device, make_draft
from forerun.train.presets import TrainConfig
from forerun.train.progress import Progress
from forerun.train.student import check_target


class Trainer:
    """Trains a draft network for a target from generated chats."""

    def __init__(self, source: TrainingTarget, config: TrainConfig) -> None:
        """Raise ModelError if no such network can be trained for the target, and ConfigError if the
        device does not exist, before answers are generated.
        """
        self._source, self._config = source, config
        checked_device(config.train_device)
        if source.threads:
            torch.set_num_threads(source.threads)
        target = source.checkpoint.architecture
        self._start = _start(config, target)
        check_target(target, config, self._start)

    def make_draft(self, corpus: Corpus, out: Path, report: Report) -> Progress:
        """Train on `corpus` and write the draft to `out`/draft, as pipeline.make_draft does."""
        return make_draft(self._source, corpus, self._config, out, report, self._start)


def _start(config: TrainConfig, target: Architecture) -> DraftFile | None:
    """Return the draft to continue training, if one is named, else None. Raises before anything is
    written.
    """
    if config.start_from is None:
        return None
    draft = open_draft(Path(config.start_from), target)
    check_trainable(draft, config.method)
    for warning in draft.warnings:
        say(f"forerun: draft {config.start_from}: {warning}")
    return draft
