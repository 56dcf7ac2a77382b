"""Names of sampling parameters in other servers' words."""

from typing import Any

from forerun.build.engine import Frontend


def llama_defaults(loaded: Frontend) -> dict[str, Any]:
    """Return the model's defaults of sampling under llama.cpp's names, which Ollama has too."""
    found = dict(loaded.info.get("sampling_defaults") or {})
    if "repetition_penalty" in found:
        found["repeat_penalty"] = found.pop("repetition_penalty")
    return found
