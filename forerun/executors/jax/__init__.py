"""The JAX executor: one step as one XLA program, for TPUs and whatever else XLA compiles to."""

from forerun.executors.jax.eagle_model import JaxEagleModel
from forerun.executors.jax.executor import JaxExecutor, JaxOptions
from forerun.executors.jax.memory import free_bytes

__all__ = ["JaxEagleModel", "JaxExecutor", "JaxOptions", "free_bytes"]
