"""Computes the memory of a model from its configuration and the headers of its files, without
reading weights or allocating anything.
"""

from dataclasses import dataclass, replace

from forerun.build.beside import with_beside
from forerun.build.draft_file import (
    holds_draft_file,
    holds_model,
    names_gguf_model,
    open_draft_file,
)
from forerun.build.drafting import AUTO, NO_DRAFT, own_layers, with_draft
from forerun.build.executor_entry import AnyDraft
from forerun.build.memory import MemoryPlan, Needs, plan_memory
from forerun.build.registry import EXECUTORS, choose_executor
from forerun.build.shapes import SHAPES, PlannedCheckpoint, RandomCheckpoint
from forerun.build.small_draft import SMALL, fits, wants_small
from forerun.build.token_map import sized
from forerun.cache_dir import home_path
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.folder import config_of
from forerun.checkpoints.quantised.config import read_method
from forerun.drafts.ngram_table import FILE as TABLE
from forerun.drafts.standalone_draft import StandaloneDraft, equal_vocabulary
from forerun.errors import ConfigError, MemoryPlanError
from forerun.hub import huggingface
from forerun.hub.catalog import BUILT_IN, is_here, open_model
from forerun.hub.reference import hub_reference
from forerun.networks.arch import Architecture
from forerun.networks.config_json import architecture_from
from forerun.options.config import EngineConfig

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Described:
    """A model opened as far as planning needs it.

    checkpoint  its files, opened; or random numbers if there is only a configuration
    stored      whether these are the real files, so that the bytes of their numbers are known
    """

    name: str
    checkpoint: Checkpoint
    stored: bool

    @property
    def architecture(self) -> Architecture:
        """The model's sizes and layers."""
        return self.checkpoint.architecture


@dataclass(frozen=True, slots=True)
class Sizing:
    """The memory of a model, in bytes on each of `config.tp_size` devices; summed over all for an
    executor that counts them together (ExecutorEntry.together).

    config   with every "auto" replaced
    needs    including the draft's
    draft    the draft model's part of the weights
    memory   usable bytes
    plan     its division; None if the model does not fit
    refusal  why it does not fit
    """

    model: Described
    config: EngineConfig
    needs: Needs
    draft: int
    memory: int
    plan: MemoryPlan | None
    refusal: str


def described(config: EngineConfig) -> Described:
    """Open the named model as far as planning needs it. Of a hub id that is not on this machine
    only config.json is fetched; a well-known model's shape (build/shapes.py) needs no file. Raises
    ModelError, DownloadError if it cannot be fetched.
    """
    path = home_path(config.model)
    if config.model in SHAPES.keys() - BUILT_IN.keys() and not path.exists():
        return Described(config.model, RandomCheckpoint(SHAPES[config.model]), False)
    hub = None if path.exists() or config.model in BUILT_IN else hub_reference(config.model)
    if hub is not None and hub.file is None:
        path = huggingface.config_fetched(hub.repository, revision=config.revision)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        name = hub.name if hub is not None else path.resolve().name
        about = config_of(path)
        read_method(about)  # First: a file for another program has other keys too.
        arch = architecture_from(about, path).for_context(config.context)
        return Described(name, PlannedCheckpoint(arch, about), False)
    model = open_model(config.model, revision=config.revision, context=config.context)
    return Described(model.name, model.checkpoint, True)


def sizing(config: EngineConfig, model: Described, memory: int | None) -> Sizing:
    """Compute the memory that `model` needs under `config`, and whether it fits; allocates nothing.

    memory  bytes of each device; None: this machine's free bytes

    Raises ConfigError if the options contradict the model or the machine, ModelError for a draft
    that cannot be used.
    """
    arch = model.architecture
    config = choose_executor(config, arch, model.checkpoint)
    entry = EXECUTORS[config.executor]
    chunk = config.chunked_prefill_size or entry.prefill_chunk(config, memory)
    config = replace(config, chunked_prefill_size=chunk)
    needs = entry.needs(config, arch, model.checkpoint)
    draft = _draft(config, model.checkpoint)
    total = needs
    if memory is None:
        free = entry.free_memory(config)
    else:
        free = memory * config.tp_size if entry.together else memory
    unnamed = config.speculative_draft_model_path is None and draft is None
    if unnamed and wants_small(config, needs.weights) and is_here(SMALL):
        small = _whole(config, SMALL, model.checkpoint)
        draft = small if fits(config, small, needs, entry, free) else None
    if draft is not None:
        draft = sized(config, draft)
        total = with_draft(needs, draft, entry.draft_item(config), config.max_sequences)
    plan, refusal = _planned(config, total, free)
    return Sizing(model, config, total, total.weights - needs.weights, free, plan, refusal)


def _draft(config: EngineConfig, target: Checkpoint) -> AnyDraft | None:
    """Open the draft model in the configured folder, or the target's own layers. Reads no weights,
    and of a whole model only config.json.
    """
    layered = bool(getattr(target, "prediction_files", None))
    config = with_beside(config, layered, target)
    named = config.speculative_draft_model_path
    if named in (None, NO_DRAFT) or not config.speculates:
        return own_layers(config, target)
    folder = home_path(named)
    if holds_draft_file(folder):
        return open_draft_file(config, folder, target)
    auto = config.algorithm.name == AUTO
    if config.algorithm.kind == "whole" or (
        auto and (names_gguf_model(named) or holds_model(named))
    ):
        return _whole(config, named, target)
    if not folder.exists() and (hub := hub_reference(named)) is not None:
        revision = config.speculative_draft_model_revision
        folder = huggingface.here(hub.repository, revision=revision) or folder
    if not (folder / "config.json").is_file():
        if (folder / TABLE).is_file():  # A few megabytes on the host, which no plan counts.
            return None
        raise ConfigError(
            f"speculative-draft-model-path is {named}, but there is no config.json in it. The "
            "memory of a draft is computed from a folder on this machine: download it first."
        )
    return open_draft_file(config, folder, target)


def _whole(config: EngineConfig, named: str, target: Checkpoint) -> StandaloneDraft:
    """Open a whole model that drafts as far as planning needs it, assuming that it has all of the
    target's tokens.
    """
    revision = config.speculative_draft_model_revision
    draft = described(replace(config, model=named, revision=revision, context=None))
    vocabulary = equal_vocabulary(target.architecture.vocab, draft.architecture.vocab)
    return StandaloneDraft(draft.name, draft.checkpoint, vocabulary)


def _planned(config: EngineConfig, needs: Needs, free: int) -> tuple[MemoryPlan | None, str]:
    try:
        return plan_memory(config, needs, free, fill=config.device != "cpu"), ""
    except MemoryPlanError as error:
        return None, str(error)
