"""The models that the jax executor cannot run yet."""

from forerun.errors import ModelError
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import Experts


def refusal(arch: Architecture) -> str | None:
    """Return why this executor cannot run the model, as one clause for an error message; None if it
    can.
    """
    specs = arch.layer_specs
    mixtures = [s.feed_forward for s in specs if isinstance(s.feed_forward, Experts)]
    beyond = {
        "attention sinks": any(spec.attention.sinks for spec in specs),
        "norms over all heads at once": any(spec.wide_qk_norm for spec in specs),
        "scaled residuals": any(spec.residual != 1.0 for spec in specs),
        "scaled logits": arch.logit_scale != 1.0,
        "a clamped gate": any(spec.activation == "clamped_silu" for spec in specs),
        "a router with biases": any(mixture.router.bias for mixture in mixtures),
        "experts with biases": any(mixture.bias for mixture in mixtures),
    }
    needed = [what for what, there in beyond.items() if there]
    if not needed:
        return None
    return f"the jax executor cannot run this {arch.family} model yet: it needs {', '.join(needed)}"


def check_drafts(arch: Architecture) -> None:
    """Raise ModelError if `check_runs` does, or if the model cannot draft here."""
    check_runs(arch)
    if len(arch.cache_shapes) > 1 or any(spec.reads is not None for spec in arch.layer_specs):
        raise ModelError(
            f"the jax executor cannot draft with this {arch.family} model yet: its layers keep "
            "keys and values of different shapes; use the torch executor (--executor torch)"
        )


def check_runs(arch: Architecture) -> None:
    """Raise ModelError, which names the torch executor instead, if `refusal` has a reason."""
    reason = refusal(arch)
    if reason is not None:
        raise ModelError(f"{reason}; use the torch executor (--executor torch)")
