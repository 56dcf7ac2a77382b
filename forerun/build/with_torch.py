"""The entry of the torch executor: every family, on the CPU and on CUDA devices."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

from forerun.build.executor_entry import AnyDraft, ExecutorEntry, Progress
from forerun.build.memory import (
    CHUNK,
    Needs,
    dense_needs,
    item_bytes,
)
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.counted import counted
from forerun.checkpoints.quantised_matrices import PARTS, SCRATCH, quantised_matrices, saved_bytes
from forerun.checkpoints.tensor_parallel import RankCheckpoint, TensorParallel, check_divides
from forerun.drafts.assistant import Assistant
from forerun.drafts.block_folder import BlockFile
from forerun.drafts.eagle_folder import DraftFile
from forerun.drafts.prediction_layers import PredictionLayers
from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.errors import ConfigError, ModelError
from forerun.executors.windowed import WindowedPages
from forerun.interface.draft_model import DraftModel
from forerun.interface.executor import Executor, ExecutorLimits
from forerun.machine import memory_available, physical_cores
from forerun.networks.arch import Architecture
from forerun.options.config import EngineConfig

CHUNKS, MOST_CHUNK = ((35, 2048), (60, 4096)), 8192
"""Prompt tokens in one step: (GiB, tokens) for GPUs with less memory than that; and for all
others.
"""


def _free_memory(config: EngineConfig) -> int:
    """Return the least free memory of the ranks' devices, in bytes; ranks on the CPU share one
    memory.
    """
    if config.device == "cpu":
        return memory_available() // config.tp_size
    kind, _, first = config.device.partition(":")
    begin = int(first or 0)
    if config.tp_size == 1:
        return _cuda_memory(config.device)[0]
    _check_devices(config, begin)
    return min(_cuda_memory(f"{kind}:{begin + rank}")[0] for rank in range(config.tp_size))


def _check_devices(config: EngineConfig, begin: int) -> None:
    """Raise ConfigError if there are fewer devices than ranks, counting from device number
    `begin`.
    """
    import torch

    devices = torch.cuda.device_count()
    if begin < devices < begin + config.tp_size:
        counted = f"{devices} CUDA device{'s' * (devices != 1)}"
        raise ConfigError(
            f"tp-size is {config.tp_size}, but torch sees {counted} here"
            + (f", of which {begin} come before {config.device}" if begin else "")
            + f"; lower it to {devices - begin} or less."
        )


def _prefill_chunk(config: EngineConfig, memory: int | None) -> int:
    """Return SGLang's default for a GPU's memory (its server_args.py), at most 8192 tokens."""
    if config.device == "cpu":
        return CHUNK
    gib = (_cuda_memory(config.device)[1] if memory is None else memory) / (1 << 30)
    return next((chunk for below, chunk in CHUNKS if gib < below), MOST_CHUNK)


def _cuda_memory(device: str) -> tuple[int, int]:
    """Return the (free, total) bytes of a CUDA device. Raises ConfigError if there is no such
    device.
    """
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices <= (torch.device(device).index or 0):
        seen = f"{devices} CUDA devices, numbered from 0," if devices else "no CUDA device"
        do = "name another" if devices else "leave --device out to run on the CPU"
        raise ConfigError(f"device is {device}, but torch sees {seen} here; {do}.")
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def _needs(config: EngineConfig, arch: Architecture, checkpoint: Checkpoint) -> Needs:
    """Return the needs of a model. Logits are float32 rows. Captured rounds store a count and a
    bias, 8 bytes, for every slot and token of the vocabulary (captured/shaped_rows.py).
    """
    if config.tp_size > 1:
        return _rank_needs(config, arch, checkpoint)
    needs = replace(dense_needs(config, arch, checkpoint), per_scored=4 * arch.vocab)
    needs = _kept_needs(config, checkpoint, needs)
    return _captured_needs(config, arch, _state_needs(config, arch, needs))


def _state_needs(config: EngineConfig, arch: Architecture, needs: Needs) -> Needs:
    """Return the needs with the scratch of recurrent states, if layers have any: for a draft token
    the inputs of its states; and three times the state of one layer for each draft token, or with
    kernels, which store no draft token's state, for each sequence.
    """
    if arch.recurrent is None:
        return needs
    inputs, state = 4 * arch.draft_state_numbers, 12 * arch.recurrent.state_numbers
    if config.device == "cpu":
        return replace(needs, per_scored=needs.per_scored + inputs + state)
    fixed = needs.fixed + state * config.max_sequences
    return replace(needs, per_scored=needs.per_scored + inputs, fixed=fixed)


def _kept_needs(config: EngineConfig, checkpoint: Checkpoint, needs: Needs) -> Needs:
    """Return the needs with the bytes of dequantised matrices replaced by those of matrices kept
    quantised, and with scratch for the part of one that is dequantised at a time; once more for
    captured rounds.
    """
    if config.dtype != "file":
        return needs
    matrices = quantised_matrices(checkpoint).values()
    scratch = 2 * (SCRATCH + PARTS) * bool(matrices)
    weights = needs.weights - saved_bytes(matrices, item_bytes(config))
    return replace(needs, weights=weights, fixed=needs.fixed + scratch)


def _captured_needs(config: EngineConfig, arch: Architecture, needs: Needs) -> Needs:
    """Return the needs with those of captured rounds, if there are any: inputs of recurrent states
    are stored in memory of their own (captured/states.py).
    """
    if config.device == "cpu" or config.disable_cuda_graph:
        return needs
    fixed = needs.fixed + 8 * (config.max_sequences + 1) * arch.vocab
    return replace(needs, fixed=fixed, captured=True)


def _rank_needs(config: EngineConfig, arch: Architecture, checkpoint: Checkpoint) -> Needs:
    """Return the needs of each rank on its device. Raises ConfigError if the model cannot be
    divided this way.
    """
    tp = _first_rank(config)
    check_divides(arch, tp)
    part = tp.architecture(arch)
    needs = dense_needs(config, part, checkpoint)
    # There embedding and head are counted as a whole; each rank has the rows of its tokens. If a
    # draft uses them, rank 0 also has the whole of both.
    ends = 1 if arch.tied_head else 2
    copies = ends + (arch.tied_head and config.device == "cpu" and item_bytes(config) == 4)
    matrix = item_bytes(config) * arch.vocab * arch.hidden
    weights = needs.weights - copies * (matrix - matrix // config.tp_size)
    named = config.speculative_draft_model_path not in (None, "none")
    if (
        config.speculates
        and config.algorithm.model
        and (named or config.algorithm.kind == "layers")
    ):
        weights += ends * matrix
    # Rows of logits of its own tokens, and whole ones of rows that are decided on the host.
    needs = replace(
        needs, weights=weights, per_scored=4 * arch.vocab * (config.tp_size + 1) // config.tp_size
    )
    needs = _kept_needs(config, RankCheckpoint(checkpoint, tp), needs)
    return _captured_needs(config, arch, _state_needs(config, part, needs))


def _first_rank(config: EngineConfig) -> TensorParallel:
    experts = config.ep_size or config.tp_size
    return TensorParallel(0, config.tp_size, experts, config.replicate_shared_expert)


def _build(
    config: EngineConfig, checkpoint: Checkpoint, limits: ExecutorLimits, progress: Progress
) -> Executor:
    try:
        from forerun.executors.torch import (
            TorchPages,
            torch_executor,
        )
    except ImportError as error:
        raise ConfigError(
            f"The torch executor needs torch, which cannot be imported ({error}). "
            "Install it with: pip install 'forerun[torch]', or `make tools` in a checkout."
        ) from error
    threads = _threads(config)
    if threads:
        import torch

        torch.set_num_threads(threads)
    if config.tp_size > 1:
        return _shared(config, checkpoint, limits)
    executor = torch_executor(limits)(
        counted(checkpoint, item_bytes(config), partial(progress, "loading weights")),
        limits,
        config.device,
        config.dtype,
        compile=config.enable_torch_compile,
        kv_dtype=config.kv_dtype,
        prompts=config.prefill_attention_backend,
    )
    executor.pages, executor.state_contents = TorchPages(executor), executor.states
    if executor.windows is not None:
        executor.pages = WindowedPages(executor.pages, executor.windows)
        executor.window_contents = executor.pages
    return _captured(config, executor)


def _captured(config: EngineConfig, executor: Any) -> Executor:
    """Configure the executor to replay captured steps unless the options say otherwise, and return
    it. With captured rounds steps overlap by default (decision 0022).
    """
    cuda = config.device.startswith("cuda")
    if not config.disable_cuda_graph:
        executor.capture(cuda if config.overlap is None else config.overlap)
    return cast(Executor, executor)


def _threads(config: EngineConfig) -> int | None:
    """Return the threads of each process; None: torch's own default."""
    if config.threads or config.tp_size == 1 or config.device != "cpu":
        return config.threads
    return max(1, physical_cores() // config.tp_size)


def _shared(config: EngineConfig, checkpoint: Checkpoint, limits: ExecutorLimits) -> Executor:
    """Build the executor of rank 0, which starts the others."""
    from forerun.executors.torch.model_runner import TorchOptions
    from forerun.executors.torch.parallel.executor import parallel_executor

    options = TorchOptions(
        device=config.device,
        dtype=config.dtype,
        compile=config.enable_torch_compile,
        kv_dtype=config.kv_dtype,
        prompts=config.prefill_attention_backend,
    )
    kind, first = parallel_executor(limits), _first_rank(config)
    return _captured(config, kind(checkpoint, limits, options, first, _threads(config)))


def _arithmetic(config: EngineConfig) -> str:
    """Return a text of everything that may change the order of additions: torch does not promise
    equal bits on different processors.
    """
    import torch

    device = config.device.partition(":")[0]
    where = torch.cuda.get_device_name(config.device) if device == "cuda" else ""
    how = config.threads, config.prefill_attention_backend, config.enable_torch_compile
    cpu = torch.backends.cpu.get_cpu_capability()
    return f"{torch.__version__} {where} {cpu} {how} {config.disable_cuda_graph}"


def _draft_model(executor: Executor, checkpoint: Checkpoint, draft: AnyDraft) -> DraftModel:
    """Load a draft model and attach it to the executor, whose steps draft with it if they can."""
    from forerun.executors import torch

    assert isinstance(executor, torch.TorchExecutor)
    if isinstance(draft, Assistant):
        if executor.rounds is not None or executor.group is not None:
            raise ModelError(
                "an assistant drafts outside of captured rounds and of --tp-size; use "
                "--disable-cuda-graph on one device, or --speculative-algorithm NGRAM"
            )
        return torch.TorchAssistantModel(executor, draft)
    model: Any
    match draft:
        case DraftFile():
            model = torch.TorchEagleModel(executor.draft_target, checkpoint, draft)
        case BlockFile():
            model = torch.TorchBlockModel(executor.draft_target, checkpoint, draft)
        case StandaloneDraft():
            model = torch.TorchDecoderModel(executor.draft_target, draft)
        case PredictionLayers():
            model = torch.TorchPredictionModel(executor.draft_target, draft)
    executor.draft_with(model)
    return cast(DraftModel, model)


ENTRY = ExecutorEntry(
    name="torch",
    title="torch executor",
    unsuited=lambda config: None,
    refusal=lambda arch: None,
    needs=_needs,
    draft_item=item_bytes,
    free_memory=_free_memory,
    build=_build,
    draft_model=_draft_model,
    within=frozenset({DraftFile.kind, BlockFile.kind, PredictionLayers.kind, StandaloneDraft.kind}),
    shards=True,
    keeps=True,
    prefill_chunk=_prefill_chunk,
    arithmetic=_arithmetic,
)
