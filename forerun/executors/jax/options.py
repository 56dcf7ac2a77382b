"""Options of a JaxExecutor."""

from dataclasses import dataclass

import jax.numpy as jnp

from forerun.errors import ConfigError

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True, slots=True)
class JaxOptions:
    """Options of a JaxExecutor.

    dtype        of matrices, activations, keys and values
    shards       devices that share every layer (tensor parallel)
    draft_nodes  most draft tokens of a row
    stacked      run layers that repeat in a scan; None = unless the device is a CPU (weights.py)
    platform     cpu or tpu: which of JAX's devices; None = its own choice
    cache_dir    folder for compiled programs, reused at the next start; None = none
    overlap      whether rounds may begin before the previous one has finished
    """

    dtype: str = "float32"
    shards: int = 1
    draft_nodes: int = 63
    stacked: bool | None = None
    platform: str | None = None
    cache_dir: str | None = None
    overlap: bool = False

    def as_dtype(self) -> jnp.dtype:
        """Return `dtype`. Raises ConfigError for an unknown one."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        made: jnp.dtype = jnp.dtype(DTYPES[self.dtype])
        return made
