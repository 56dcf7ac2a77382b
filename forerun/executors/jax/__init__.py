"""The JAX executor: one step is one XLA program, for TPUs and any other device that XLA
supports.
"""

from forerun.executors.jax.draft_models.assistant import JaxAssistantModel
from forerun.executors.jax.draft_models.block_model import JaxBlockModel
from forerun.executors.jax.draft_models.draft_decoder import JaxDecoderModel
from forerun.executors.jax.draft_models.eagle import JaxEagleModel
from forerun.executors.jax.draft_models.prediction import JaxPredictionModel
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.memory import free_bytes
from forerun.executors.jax.options import JaxOptions
from forerun.executors.jax.windowed import WindowedJaxExecutor, jax_executor

__all__ = [
    "JaxAssistantModel",
    "JaxBlockModel",
    "JaxDecoderModel",
    "JaxEagleModel",
    "JaxExecutor",
    "JaxOptions",
    "JaxPredictionModel",
    "WindowedJaxExecutor",
    "free_bytes",
    "jax_executor",
]
