"""The entry of the JAX executor. jax, an extra that takes seconds to import, is imported only when
it is used.
"""

from functools import partial
from importlib.metadata import PackageNotFoundError, version

from forerun.build.executor_entry import AnyDraft, ExecutorEntry, Progress
from forerun.build.memory import ITEM_BYTES, dense_needs
from forerun.cache_dir import cache_dir
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.counted import counted
from forerun.drafts.assistant import Assistant
from forerun.drafts.block_folder import BlockFile
from forerun.drafts.eagle_folder import DraftFile
from forerun.drafts.prediction_layers import PredictionLayers
from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.errors import ConfigError
from forerun.interface.draft_model import DraftModel
from forerun.interface.executor import Executor, ExecutorLimits
from forerun.machine import memory_available
from forerun.options.config import EngineConfig

LEAST = (0, 10)
"""The oldest jax version with all names that are used here."""


def check_jax() -> None:
    """Raise ConfigError, with the command that installs it, if jax is missing or older than
    LEAST. Imports nothing.
    """
    install = "Install it with: pip install 'forerun[jax]'"
    try:
        installed = version("jax")
    except PackageNotFoundError as error:
        raise ConfigError(
            f"The jax executor needs jax, which is not installed. {install}"
        ) from error
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if numbers < LEAST:
        oldest = ".".join(map(str, LEAST))
        raise ConfigError(
            f"The jax executor needs jax {oldest} or newer, not {installed}. {install}"
        )


def _build(
    config: EngineConfig, checkpoint: Checkpoint, limits: ExecutorLimits, progress: Progress
) -> Executor:
    """Build the executor. Raises what JaxExecutor raises, and ConfigError if jax is missing or too
    old or an option is not supported.
    """
    check_jax()
    if config.threads is not None:
        raise ConfigError(
            f"threads is {config.threads}, but on the jax executor XLA chooses its threads itself: "
            "leave --threads out."
        )
    if config.ep_size not in (0, 1, config.tp_size) or config.replicate_shared_expert:
        raise ConfigError(
            "the jax executor always divides experts over all devices of --tp-size and splits "
            "shared experts: leave --ep-size and --replicate-shared-expert out, or use --executor "
            "torch."
        )
    from forerun.executors.jax import JaxOptions, jax_executor

    options = JaxOptions(
        dtype=config.dtype,
        shards=config.tp_size,
        draft_nodes=config.draft_shape.nodes,
        platform=config.device,
        cache_dir=str(cache_dir() / "jax"),
        overlap=bool(config.overlap),
    )
    reported = counted(checkpoint, ITEM_BYTES[config.dtype], partial(progress, "loading weights"))
    return jax_executor(limits)(reported, limits, options)


def _free_memory(config: EngineConfig) -> int:
    """Return the free bytes of the devices that a model is divided over, summed."""
    if config.device == "cpu":
        return memory_available()
    check_jax()
    from forerun.executors.jax import free_bytes

    return free_bytes(config.device, config.tp_size)


def _draft_model(executor: Executor, checkpoint: Checkpoint, draft: AnyDraft) -> DraftModel:
    from forerun.executors import jax

    assert isinstance(executor, jax.JaxExecutor)
    match draft:
        case DraftFile():
            return jax.JaxEagleModel(executor, checkpoint, draft)
        case BlockFile():
            return jax.JaxBlockModel(executor, checkpoint, draft)
        case StandaloneDraft():
            return jax.JaxDecoderModel(executor, draft)
        case PredictionLayers():
            return jax.JaxPredictionModel(executor, draft)
    assert isinstance(draft, Assistant)
    return jax.JaxAssistantModel(executor, draft)


ENTRY = ExecutorEntry(
    name="jax",
    title="jax executor",
    unsuited=lambda config: None if config.device == "tpu" else "the device is not a TPU",
    refusal=lambda arch: None,
    needs=dense_needs,
    draft_item=lambda config: ITEM_BYTES[config.dtype],
    free_memory=_free_memory,
    build=_build,
    draft_model=_draft_model,
    within=frozenset(
        {
            *(DraftFile.kind, BlockFile.kind, StandaloneDraft.kind),
            *(PredictionLayers.kind, Assistant.kind),
        }
    ),
    shards=True,
    together=True,
)
