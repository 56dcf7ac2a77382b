"""Names of sampling parameters in other servers."""

from typing import Any

from forerun.build.engine import Frontend


def llama_defaults(loaded: Frontend) -> dict[str, Any]:
    """Return the model's default sampling parameters under llama.cpp's names, which Ollama also
    uses.
    """
    found = dict(loaded.info.get("sampling_defaults") or {})
    if "repetition_penalty" in found:
        found["repeat_penalty"] = found.pop("repetition_penalty")
    return found
