"""The models that the jax executor cannot draft with yet."""

from forerun.errors import ModelError
from forerun.networks.arch import Architecture


def check_drafts(arch: Architecture) -> None:
    """Raise ModelError, which names the torch executor instead, if the model cannot draft here."""
    if len(arch.cache_shapes) > 1 or any(spec.reads is not None for spec in arch.layer_specs):
        raise ModelError(
            f"the jax executor cannot draft with this {arch.family} model yet: its layers keep "
            "keys and values of different shapes; use the torch executor (--executor torch)"
        )
