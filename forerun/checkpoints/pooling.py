"""Reads from a model's files how embeddings are computed: sentence-transformers' modules, GGUF's
`pooling_type`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.checkpoints.folder import MODULES
from forerun.errors import ModelError
from forerun.networks.config_json import read_json

_PROMPTS = "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"
_GGUF_POOLINGS = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
_MODES = {"lasttoken": "last", "mean": "mean"}
"""Modes of sentence-transformers' Pooling that are supported here."""
_HARMLESS = ("word_embedding_dimension", "embedding_dimension", "include_prompt")


@dataclass(frozen=True, slots=True)
class EmbeddingRule:
    """The rule that computes an embedding, of length 1, from hidden states.

    pooling  "last" or "mean"
    source   the file or key that it comes from, for users
    prompt   text before each input
    fault    why the model's rule is not supported, in a sentence; "" if it is
    """

    pooling: str = "last"
    source: str = "the default for causal models"
    prompt: str = ""
    fault: str = ""


def embedding_rule(path: Path, metadata: Mapping[str, Any]) -> EmbeddingRule:
    """Return the rule of a model folder, or of a GGUF file with these metadata. An unsupported rule
    is reported in `fault`: the model can still generate text.
    """
    try:
        return _of_folder(path) if path.is_dir() else _of_gguf(metadata)
    except ModelError as error:
        return EmbeddingRule(fault=str(error))


def _of_gguf(metadata: Mapping[str, Any]) -> EmbeddingRule:
    key = f"{metadata.get('general.architecture')}.pooling_type"
    kind = metadata.get(key)
    if kind is None or kind == 0:  # Files of models that write text have 0.
        return EmbeddingRule()
    name = _GGUF_POOLINGS.get(kind, kind)
    if name not in _MODES.values():
        raise ModelError(f"{key} is {name}; last and mean are computed here")
    return EmbeddingRule(str(name), key)


def _of_folder(folder: Path) -> EmbeddingRule:
    if not (folder / MODULES).is_file():
        return EmbeddingRule()
    modules = _modules(folder)
    names = [name for name, _ in modules]
    for name in names:
        if name not in ("Transformer", "Pooling", "Normalize"):
            raise ModelError(f"{folder / MODULES} names the module {name}, which is not run here")
    if names.count("Pooling") != 1 or names[:1] != ["Transformer"]:
        raise ModelError(f"{folder / MODULES} must have one Transformer, then one Pooling")
    transformer = folder / modules[0][1] / _TRANSFORMER
    if transformer.is_file() and read_json(transformer).get("do_lower_case"):
        raise ModelError(f"{transformer}: do_lower_case is not supported")
    place = folder / modules[names.index("Pooling")][1] / "config.json"
    pooling = read_json(place)
    rule = EmbeddingRule(_mode(pooling, place), str(place.relative_to(folder)))
    prompt = _prompt(folder)
    if prompt and not pooling.get("include_prompt", True):
        raise ModelError(f"{place}: include_prompt is false, which is not supported with a prompt")
    return replace(rule, prompt=prompt)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return (class, folder) of each module of modules.json. Raises ModelError if it cannot be
    read, or names a folder elsewhere.
    """
    path = folder / MODULES
    try:
        listed = json.loads(path.read_text(encoding="utf-8-sig")[: 1 << 20])
        found = [(one["type"].rpartition(".")[2], one.get("path") or "") for one in listed]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}") from error
    for _, place in found:
        if not isinstance(place, str) or Path(place).is_absolute() or ".." in Path(place).parts:
            raise ModelError(f"{path} names a folder outside of the model's: {place!r}")
    return found


def _mode(pooling: Mapping[str, Any], place: Path) -> str:
    """Return the one mode that is on. Raises ModelError for none, several, an unsupported one, or
    an unknown key.
    """
    on = [str(pooling["pooling_mode"])] if "pooling_mode" in pooling else []
    for key, value in pooling.items():
        mode = key.removeprefix("pooling_mode_").removesuffix("_tokens")
        if key.startswith("pooling_mode_"):
            on += [mode] if value else []
        elif key not in (*_HARMLESS, "pooling_mode"):
            raise ModelError(f"{place}: {key} is unknown and may change embeddings")
    if len(on) != 1 or on[0] not in _MODES:
        named = ", ".join(on) or "none"
        raise ModelError(f"{place}: the pooling mode is {named}; lasttoken and mean run here")
    return _MODES[on[0]]


def _prompt(folder: Path) -> str:
    """Return the text that sentence-transformers puts before each input by default."""
    path = folder / _PROMPTS
    if not path.is_file():
        return ""
    config = read_json(path)
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise ModelError(f"{path}: default_prompt_name is {name!r}, but prompts has no such text")
    return prompt
