"""The description of an executor for the composition root, which imports only the executor it
uses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forerun.build.memory import CHUNK, Needs
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.interface.draft_model import DraftModel
from forerun.interface.executor import Executor, ExecutorLimits
from forerun.networks.arch import Architecture
from forerun.networks.cache_layer import CacheLayer
from forerun.options.config import EngineConfig
from forerun.types import Ints

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) during a long operation; bytes for files and weights."""


class AnyDraft(Protocol):
    """An opened draft of any kind, for the memory plan and the table of executors."""

    @property
    def kind(self) -> str:
        """The kind of draft, as in a sentence: "EAGLE head"."""
        ...

    @property
    def path(self) -> Path:
        """The file or folder of its weights."""
        ...

    @property
    def parameters(self) -> int:
        """Number of weights that a pass uses."""
        ...

    @property
    def cache(self) -> tuple[CacheLayer, ...]:
        """What each layer caches per position, under the target's page ids; () = no cache of its
        own.
        """
        ...

    @property
    def vocab(self) -> int:
        """Vd, the number of draft ids."""
        ...

    @property
    def node_numbers(self) -> int:
        """Float32 elements of scratch per node of a pass, other than its logits."""
        ...

    @property
    def feature_numbers(self) -> int:
        """F*H, the elements per token that it reads of the target's hidden states; 0 = none."""
        ...

    def limited(self, token_map: Ints) -> "AnyDraft":
        """Return a copy that proposes only the target ids token_map int32[n], ascending.

        Raises ModelError if this kind of draft cannot be limited, or no id is left.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExecutorEntry:
    """One executor: how it is chosen, sized and built, and its draft models.

    Importing an entry imports no executor; calling its functions does.

    name          for --executor
    title         for messages
    unsuited      why it does not suit a configuration without an executor, whose device is decided,
                  as a clause; None if it does. The first suitable entry is chosen
    refusal       why it cannot run a model, as a clause; None if it can
    needs         the memory needs of a model
    draft_item    bytes of a number in a draft model's weights and cache; None: 8 bits in blocks,
                  and 16 bits
    free_memory   free bytes of its device. Raises ConfigError if it has none
    build         raises what the executor raises, and ConfigError if a requirement is missing;
                  reports progress of reading the weights, except for ranks of --tp-size on torch
    draft_model   builds the draft model of a draft of any kind, for this executor and the target's
                  checkpoint. Raises ModelError if the two do not fit, MemoryPlanError
    within        the kinds whose trees steps grow by themselves (Executor.warm_up)
    dtype         the meaning of "auto"; None: bfloat16 on devices of their own, float32 on the CPU
    keeps         whether "auto" keeps quantised matrices in the file's own format
    shards        whether it divides a model over devices
    together      whether needs and free memory are summed over these devices, not of each
    arithmetic    a text that changes when its results may, besides this package's version
    prefill_chunk default tokens of prompts and draft tokens in one step, for a device with so many
                  bytes of memory (None: this machine's)
    """

    name: str
    title: str
    unsuited: Callable[[EngineConfig], str | None]
    refusal: Callable[[Architecture], str | None]
    needs: Callable[[EngineConfig, Architecture, Checkpoint], Needs]
    draft_item: Callable[[EngineConfig], int | None]
    free_memory: Callable[[EngineConfig], int]
    build: Callable[[EngineConfig, Checkpoint, ExecutorLimits, Progress], Executor]
    draft_model: Callable[[Executor, Checkpoint, AnyDraft], DraftModel]
    within: frozenset[str]
    dtype: str | None = None
    shards: bool = False
    together: bool = False
    keeps: bool = False
    arithmetic: Callable[[EngineConfig], str] = lambda config: ""
    prefill_chunk: Callable[[EngineConfig, int | None], int] = lambda config, memory: CHUNK
