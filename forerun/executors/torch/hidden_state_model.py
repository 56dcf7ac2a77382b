"""What draft models in torch have in common that read a hidden state beside the next token: the
target's at first, then what they made themselves.

Positions (EAGLE, section 4.1): the draft's position q pairs feature f_q with token t_{q+1} and
predicts t_{q+2}; so after n decided tokens, the last not yet run, both caches hold n - 1.

Nothing here asks for the same bits in any batch: a draft that differs in its last bit costs at
most an acceptance, never the text.
"""

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.torch.draft_cache import (
    DraftCache,
    DraftPass,
    check_extension,
    check_level,
)
from forerun.executors.torch.features import on_device
from forerun.executors.torch.target import TorchTarget
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftLevel,
    DraftModelTraits,
    Extension,
)
from forerun.interface.features import Features
from forerun.types import AnyArray, Ints


class HiddenStateModel:
    """The DraftModel contract around `enter`, `forward` and `logits`.

    hidden  width of what is fed back
    """

    def __init__(
        self, executor: TorchTarget, traits: DraftModelTraits, cache: DraftCache, hidden: int
    ) -> None:
        self.traits = traits
        self._executor, self._cache, limits = executor, cache, executor.limits
        # What the next draft step receives: of draft nodes, and of the last extension by slot.
        self._outputs = torch.zeros(
            limits.max_nodes + limits.slots + 1, hidden, device=executor.device,
            dtype=executor.dtype,
        )  # fmt: skip

    def enter(self, features: Tensor) -> Tensor:
        """The hidden state [n,H] that an extension reads, from the target's features [n,F]."""
        raise NotImplementedError

    def forward(self, work: DraftPass, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What `logits` reads, and what a next step receives, both [n,H]."""
        raise NotImplementedError

    def logits(self, read: Tensor) -> Tensor:
        """[n,Vd]."""
        raise NotImplementedError

    @torch.inference_mode()
    def extend(self, extension: Extension, features: Features | None) -> Candidates:
        """Run the tokens after those that became permanent, beside these' features."""
        executor = self._executor
        if features is None:
            raise EngineError("a draft head was extended without the target's features")
        check_extension(extension, self.traits, executor.limits.vocab, executor.limits)
        streams = on_device(features, executor.device, executor.dtype)
        if len(streams) != len(extension.tokens):
            raise EngineError("an extension whose features are not one row per token")
        work = self._cache.extension(extension)
        read, outputs = self.forward(work, self.enter(streams))
        self._cache.commit(extension)
        kept = self.index(executor.limits.max_nodes + extension.slots)
        self._outputs[kept] = outputs[self.index(work.ends)]
        return self._candidates(read, work.scored, extension.candidates)

    @torch.inference_mode()
    def expand(self, level: DraftLevel) -> Candidates:
        """Run draft tokens."""
        limits, count = self._executor.limits, len(level.tokens)
        check_level(level, self.traits, limits.vocab, limits)
        work = self._cache.level(level)
        kept = limits.max_nodes + np.repeat(level.slots, np.diff(level.start))
        above = self.index(np.where(level.parents < 0, kept, level.parents))
        read, outputs = self.forward(work, self._outputs[above])
        self._outputs[level.first : level.first + count] = outputs
        return self._candidates(read, work.scored, level.candidates)

    def block(self, block: DraftBlock) -> BlockCandidates:
        """It proposes level by level. Raises EngineError."""
        raise EngineError("a draft head proposes level by level, not a block")

    def _candidates(self, read: Tensor, scored: Ints, count: int) -> Candidates:
        return likeliest(self.logits(read[self.index(scored)]), count)

    def index(self, values: AnyArray) -> Tensor:
        """int64 on the device."""
        return indices(values, self._executor.device)


def indices(values: AnyArray, device: torch.device) -> Tensor:
    """int64 on the device."""
    return torch.from_numpy(values.astype(np.int64)).to(device)


def likeliest(logits: Tensor, count: int) -> Candidates:
    """The best `count` of each row of logits [s,Vd]."""
    logits = logits.float()
    best, ids = logits.topk(min(count, logits.shape[-1]), -1)
    log_probs = best - logits.logsumexp(-1, keepdim=True)
    return Candidates(ids.int().cpu().numpy(), log_probs.cpu().numpy())
