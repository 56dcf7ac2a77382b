"""Decides which models the compiled core can run."""

from forerun.errors import ModelError
from forerun.networks.arch import Architecture


def refusal(arch: Architecture) -> str | None:
    """Return why the compiled core cannot run this model, as a clause for an error message; or
    None.
    """
    for size in (cached.head_size for cached in arch.cache_shapes):
        if size % 8:
            return f"the compiled core needs a head size that is a multiple of 8, not {size}"
    if arch.token_vector % 8:
        return (
            "the compiled core needs per-layer embeddings whose size is a multiple of 8, not "
            f"{arch.token_vector}"
        )
    if arch.latent is not None and arch.latent.rank % 8:
        return (
            f"the compiled core needs a latent that is a multiple of 8 wide, not {arch.latent.rank}"
        )
    return None


def check_runs(arch: Architecture) -> None:
    """Raise ModelError with the reason of `refusal`, if there is one, and the hint to use the torch
    executor.
    """
    reason = refusal(arch)
    if reason is not None:
        raise ModelError(f"{reason}; use the torch executor (--executor torch)")
