"""What the compiled core can run."""

from forerun.errors import ModelError
from forerun.models.arch import Architecture


def refusal(arch: Architecture) -> str | None:
    """Why the compiled core cannot run this model, as one clause for an error message; None where
    it can.
    """
    beyond, size = _beyond(arch), arch.head_size
    if beyond:
        return f"the CPU core cannot run this {arch.family} model, which needs {', '.join(beyond)}"
    if size % 8:
        return f"the CPU core needs a head size that is a multiple of 8, not {size}"
    if arch.latent is not None and arch.latent.rank % 8:
        return f"the CPU core needs a latent that is a multiple of 8 wide, not {arch.latent.rank}"
    return None


def _beyond(arch: Architecture) -> list[str]:
    """What the core does not know, in words."""
    specs = arch.layer_specs
    ropes = {spec.rope for spec in specs if spec.rope.rotated != 0}
    found = {
        "a GELU gate": any(s.activation == "gelu_tanh" for s in specs),
        "capped attention scores": any(s.attention.softcap for s in specs),
        "capped logits": arch.final_softcap is not None,
        "norm weights stored without their 1": arch.norm_offset != 0.0,
        "a rope per layer": len(ropes) > 1,
    }
    return [what for what, there in found.items() if there]


def check_runs(arch: Architecture) -> None:
    """Raise ModelError, which names the torch executor instead, where `refusal` has a reason."""
    reason = refusal(arch)
    if reason is not None:
        raise ModelError(f"{reason}; use the torch executor (--executor torch)")
