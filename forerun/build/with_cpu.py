"""The entry of the executor on the compiled core."""

import hashlib
from dataclasses import replace

from forerun.build.executor_entry import AnyDraft, ExecutorEntry, Progress
from forerun.build.memory import Needs, needs_of, window_needs
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafters.ngram import NgramDrafter
from forerun.drafts.assistant import Assistant
from forerun.drafts.block_folder import BlockFile
from forerun.drafts.eagle_folder import DraftFile
from forerun.drafts.ngram_table import NgramTable
from forerun.drafts.prediction_layers import PredictionLayers
from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.interface.draft_model import DraftModel
from forerun.interface.drafter import TableDrafter
from forerun.interface.executor import Executor, ExecutorLimits
from forerun.machine import memory_available
from forerun.networks.arch import Architecture
from forerun.options.config import NATIVE_DTYPES, EngineConfig


def ngram_drafter(slots: int, table: NgramTable | None = None, capacity: int = 0) -> TableDrafter:
    """Return the n-gram drafter for `slots` sequences: on the compiled core if that can be loaded,
    whatever runs the model, else in NumPy. table, capacity: as in drafters.ngram.NgramDrafter.
    """
    from forerun.drafters.native_ngram import CpuNgramDrafter
    from forerun.executors import cpu

    kind = NgramDrafter if cpu.available() else CpuNgramDrafter
    return kind(slots, table=table, capacity=capacity)


def _unsuited(config: EngineConfig) -> str | None:
    if config.device != "cpu":
        return f"device is {config.device}"
    if config.dtype not in ("auto", *NATIVE_DTYPES):
        return (
            f"dtype is {config.dtype}, and the compiled core computes with the file's own numbers"
        )
    if config.kv_dtype == "float8":
        return "kv-dtype is float8, which the compiled core does not support"
    return "enable-torch-compile is set" if config.enable_torch_compile else None


def _refusal(arch: Architecture) -> str | None:
    from forerun.executors import cpu

    return cpu.available() or cpu.refusal(arch)


def _needs(config: EngineConfig, arch: Architecture, checkpoint: Checkpoint) -> Needs:
    """Return the needs of weights as the compiled core packs them; if the files are not here, of as
    many bits each as the configuration says.
    """
    from forerun.executors import cpu

    cpu.check_runs(arch)
    item = cpu.cache_item(checkpoint, config.dtype, config.kv_dtype)
    per_token = cpu.cache_bytes_per_token(arch.caches, item)
    if checkpoint.path.exists():
        weights = cpu.packed_bytes(checkpoint, config.dtype)
    else:
        weights = arch.parameters * (cpu.bits_made(config.dtype) or 16) // 8
    scratch, stored = cpu.node_numbers(arch)
    windowed = cpu.cache_bytes_per_token(arch.windowed_caches, item)
    needs = window_needs(arch, needs_of(arch, weights, per_token), windowed)
    return replace(
        needs,
        per_node=needs.per_node + 4 * scratch,
        per_scored=needs.per_scored + 4 * stored,
    )


def _build(
    config: EngineConfig, checkpoint: Checkpoint, limits: ExecutorLimits, progress: Progress
) -> Executor:
    from forerun.executors import cpu

    kind = cpu.kind_of(limits, adapted=bool(config.lora_modules))
    return kind(
        checkpoint,
        limits,
        config.threads,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        progress=progress,
    )


def _draft_model(executor: Executor, checkpoint: Checkpoint, draft: AnyDraft) -> DraftModel:
    from forerun.executors import cpu

    assert isinstance(executor, cpu.CpuExecutor)
    match draft:
        case DraftFile():
            return cpu.CpuEagleModel(executor, checkpoint, draft)
        case BlockFile():
            return cpu.CpuBlockModel(executor, checkpoint, draft)
        case StandaloneDraft():
            return cpu.CpuDecoderModel(executor, draft)
        case PredictionLayers():
            return cpu.CpuPredictionModel(executor, draft)
    assert isinstance(draft, Assistant)
    return cpu.CpuAssistantModel(executor, draft)


def _arithmetic(config: EngineConfig) -> str:
    """Return the hash of the compiled core. It does not depend on the kernels that run, which all
    give the same bits.
    """
    from forerun.executors.cpu.native import LIBRARY

    with LIBRARY.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


ENTRY = ExecutorEntry(
    name="cpu",
    title="compiled core",
    unsuited=_unsuited,
    refusal=_refusal,
    needs=_needs,
    draft_item=lambda config: None,
    free_memory=lambda config: memory_available(),
    build=_build,
    draft_model=_draft_model,
    within=frozenset(),
    dtype="file",
    arithmetic=_arithmetic,
)
