"""What the trainer would say of a draft on answers that were served, beside what was served.

A draft that is served otherwise than it was trained is slow and otherwise healthy; nearly every
such mistake makes these two numbers differ.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.eagle_folder import DraftFile
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.train.eagle1 import Eagle1Head
from forerun.train.init import check_trainable, start_from_draft
from forerun.train.loss import (
    DraftVocabulary,
    LikeliestTargets,
    TrainingBatch,
    simulated_length,
    ttt_loss,
)
from forerun.train.target import DenseTarget, embeddings
from forerun.train.teacher import Teacher, core_teacher, dense_teacher
from forerun.train.unroll import Unrolling
from forerun.types import Floats, Ints


class Simulation:
    """The trainer's view of one draft, on the CPU. Raises ModelError for one that is not trained
    here.

    core, threads  features are the compiled core's, which serves; else those of dense float32
    """

    def __init__(
        self, checkpoint: Checkpoint, draft: DraftFile, core: bool, threads: int | None
    ) -> None:
        check_trainable(draft)
        self._checkpoint, self._core, self._threads = checkpoint, core, threads
        self._embed, rows = embeddings(checkpoint)
        ids = torch.from_numpy(draft.target_ids).long()
        self._vocabulary = DraftVocabulary.of(ids, rows)
        first = draft.head.algorithm == "eagle1"
        self._head = Eagle1Head(draft.head, checkpoint) if first else EagleHead(draft.head)
        start_from_draft(self._head, draft, self._vocabulary)

    def length(self, chats: Sequence[tuple[Ints, Ints]], steps: int) -> float:
        """Return the simulated tokens per step (`simulated_length`) of a chain of `steps` draft
        tokens on chats of prompt and greedy answer, int32[.] each. Computes the head's hits, no
        loss.
        """
        hits, rows = np.zeros(steps), np.zeros(steps)
        with self._teacher(max(len(prompt) + len(answer) for prompt, answer in chats)) as teach:
            for prompt, answer in chats:
                tokens = np.concatenate([prompt, answer]).astype(np.int32)
                features, _ = teach(tokens, np.zeros(0, np.int32))
                scores = self._scores(tokens, len(prompt), features, steps)
                for step, (right, count) in enumerate(scores):
                    hits[step] += right
                    rows[step] += count
        return simulated_length((hits / np.maximum(rows, 1)).tolist())

    def _teacher(self, longest: int) -> AbstractContextManager[Teacher]:
        features = self._head.head.features
        if self._core:
            return core_teacher(self._checkpoint, features, longest, self._threads)
        return dense_teacher(DenseTarget(self._checkpoint, "cpu", torch.float32), features)

    @torch.no_grad()
    def _scores(
        self, tokens: Ints, prompt_len: int, features: Floats, steps: int
    ) -> list[tuple[int, int]]:
        """Return for every unrolled step how often the draft token is the answer's token, and of
        how many.
        """
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        wanted = torch.zeros_like(ids, dtype=torch.bool)
        wanted[:, prompt_len + 1 :] = True  # The prompt's own step says the first token.
        # What was served is the target's choice, whatever this pass would have said.
        choice = torch.cat([ids[:, 1:], ids[:, -1:]], 1)
        unused = torch.zeros(len(tokens), 1)  # Hits are wanted, no loss.
        batch = TrainingBatch(
            ids,
            wanted,
            torch.from_numpy(features)[None],
            choice,
            LikeliestTargets(unused.long(), unused),
        )
        _, scores = ttt_loss(self._head, batch, self._embed, self._vocabulary, Unrolling(steps))
        return [(int(score.hits), score.rows) for score in scores]
