"""Models to begin with, and the short names under which other servers' users know them."""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WellKnown:
    """A model on the hub.

    names      what people type, in small letters
    reference  the hub id, with the file's kind
    gigabytes  of the file, as the hub's page gives it; with its cache a model takes about a
               quarter more memory
    draft      hub id of an EAGLE-3 head trained for it; None = n-grams draft
    """

    names: tuple[str, ...]
    reference: str
    gigabytes: float
    draft: str | None = None


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
        "AngelSlim/Qwen3-4B_eagle3",
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
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    ),
    WellKnown(
        ("qwen3:8b", "qwen3-8b"),
        "Qwen/Qwen3-8B-GGUF:Q4_K_M",
        5.0,
        "AngelSlim/Qwen3-8B_eagle3",
    ),
)


def well_known(word: str) -> WellKnown | None:
    """Return the well-known model whose name is nearest to `word`; None if none is near."""
    names = {name: model for model in WELL_KNOWN for name in model.names}
    close = difflib.get_close_matches(word.lower().removesuffix(":latest"), names, n=1, cutoff=0.75)
    return names[close[0]] if close else None


def known_head(reference: str) -> str | None:
    """Return the hub id of an EAGLE-3 head for the model of a reference, in any form and from any
    owner; None if none is known.
    """
    heads = {_plain(model.reference): model.draft for model in WELL_KNOWN}
    return heads.get(_plain(reference))


def _plain(reference: str) -> str:
    """Return a model's name without its owner and format."""
    name = reference.rsplit("/", 1)[-1].partition(":")[0].lower()
    return name.removesuffix("-gguf").removesuffix("-instruct").removeprefix("meta-")


_BLOCKS = {
    "lfm2.5-1.2b": "LiquidAI/LFM2.5-1.2B-Instruct-DSpark",
    "lfm2.5-2.6b": "LiquidAI/LFM2.5-2.6B-DSpark",
    "lfm2.5-8b-a1b": "LiquidAI/LFM2.5-8B-A1B-DSpark",
}
"""Hub ids of the block drafters that models' owners publish for them."""


def known_block(reference: str) -> str | None:
    """Return the hub id of the block drafter that the owner of a model publishes, for the model of
    a reference, in any form and from any owner; None if none is known.
    """
    return _BLOCKS.get(_plain(reference))


_ASSISTANTS = ("E2B", "E4B", "26B-A4B", "31B")
"""Sizes of Gemma 4 for which Google publishes an assistant that drafts."""


def known_assistant(reference: str) -> str | None:
    """Return the hub id of the assistant for the model of a reference, in any form and from any
    owner; None if none is known.
    """
    names = {f"gemma-4-{size}-it".lower(): size for size in _ASSISTANTS}
    size = names.get(_plain(reference))
    return None if size is None else f"google/gemma-4-{size}-it-assistant"
