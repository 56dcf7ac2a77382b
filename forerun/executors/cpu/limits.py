"""What the compiled core can run: Llama's block, in contexts that no sliding window cuts."""

from forerun.errors import ModelError
from forerun.models.arch import Architecture


def refusal(arch: Architecture, context: int | None = None) -> str | None:
    """Why the compiled core cannot run this model up to `context` tokens, in one clause; None
    where it can. Without a context: up to where the first sliding window would hide something.
    """
    beyond, size, exact = arch.beyond_llama(), arch.head_size, arch.windowless_context
    if beyond:
        return f"the CPU core cannot run this {arch.family} model, which needs {', '.join(beyond)}"
    if size % 8:
        return f"the CPU core needs a head size that is a multiple of 8, not {size}"
    if context is not None and exact < min(context, arch.context):
        return (
            f"the CPU core knows no sliding windows: this model's has {exact} tokens and the "
            f"context is {context}"
        )
    return None


def check_runs(arch: Architecture, context: int | None) -> None:
    """Raise ModelError where `refusal` has a reason."""
    reason = refusal(arch, context)
    if reason is not None:
        raise ModelError(f"{reason}; use the torch executor (--executor torch)")
