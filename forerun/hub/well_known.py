"""Well-known models, and the short names that other servers' users know them by."""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WellKnown:
    """A model on the hub.

    names      short names, in lower case
    reference  the hub id, with the quantisation
    gigabytes  size of the file, as the hub's page gives it; with its cache a model takes about a
               quarter more memory
    """

    names: tuple[str, ...]
    reference: str
    gigabytes: float


WELL_KNOWN = (
    WellKnown(
        ("lfm2.5", "lfm2.5:1.2b", "lfm2.5-1.2b", "lfm2", "lfm2:1.2b", "lfm2-1.2b"),
        "LiquidAI/LFM2.5-1.2B-Instruct-GGUF:Q4_K_M",
        0.7,
    ),
    WellKnown(("qwen3-0.6b", "qwen3:0.6b"), "Qwen/Qwen3-0.6B-GGUF:Q8_0", 0.6),
    WellKnown(
        ("llama3.2:1b", "llama-3.2-1b", "llama3.2-1b"),
        "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
        0.8,
    ),
    WellKnown(
        ("qwen3:1.7b", "qwen3-1.7b"),
        "Qwen/Qwen3-1.7B-GGUF:Q8_0",
        1.8,
    ),
    WellKnown(
        ("llama3.2", "llama3.2:3b", "llama-3.2", "llama-3.2-3b"),
        "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
        2.0,
    ),
    WellKnown(
        ("qwen3", "qwen3:4b", "qwen3-4b", "qwen"),
        "Qwen/Qwen3-4B-GGUF:Q4_K_M",
        2.5,
    ),
    WellKnown(
        ("mistral", "mistral:7b", "mistral-7b"),
        "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
        4.4,
    ),
    WellKnown(
        ("llama3", "llama3.1", "llama", "llama3:8b", "llama3.1:8b", "llama-3.1-8b", "llama-3"),
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
        4.9,
    ),
    WellKnown(
        ("qwen3:8b", "qwen3-8b"),
        "Qwen/Qwen3-8B-GGUF:Q4_K_M",
        5.0,
    ),
)


def well_known(word: str) -> WellKnown | None:
    """Return the well-known model whose name is most similar to `word`; None if none is similar."""
    names = {name: model for model in WELL_KNOWN for name in model.names}
    close = difflib.get_close_matches(word.lower().removesuffix(":latest"), names, n=1, cutoff=0.75)
    return names[close[0]] if close else None
