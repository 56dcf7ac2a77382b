"""Answers about models in Ollama's format."""

import hashlib
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar

from forerun.serve.answers.service import LATEST, Served
from forerun.serve.bodies.fields import Unused, accept, boolean, text
from forerun.serve.bodies.infill import infill_marks
from forerun.serve.bodies.schema import RequestBody
from forerun.serve.dialects.names import llama_defaults
from forerun.text.reasoning import Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowBody(RequestBody):
    """POST /api/show. Older clients send `name` instead of `model`."""

    name: str | None = accept(text(256, 1))
    unused: ClassVar[dict[str, Unused]] = {"verbose": Unused(boolean, False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PullBody(RequestBody):
    """POST /api/pull. Older clients send `name` instead of `model`."""

    name: str | None = accept(text(256, 1))
    stream: bool = accept(boolean, True)
    unused: ClassVar[dict[str, Unused]] = {"insecure": Unused(boolean, False)}


def listed(served: Served) -> dict[str, Any]:
    """Return the answer to GET /api/tags: the one model that is loaded, and its adapters."""
    names = (served.name, *served.adapters)
    return {"models": [card(replace(served, name=name)) for name in names]}


def running(served: Served) -> dict[str, Any]:
    """Return the answer to GET /api/ps: the one model, which stays loaded as long as the server
    runs.
    """
    never = datetime(9999, 12, 31, tzinfo=UTC)
    more = {"expires_at": time_of(never), "size_vram": 0, "context_length": served.loaded.context}
    return {"models": [{**card(served), **more}]}


def shown(served: Served) -> dict[str, Any]:
    """Return the answer to POST /api/show: template, parameters, capabilities and sizes of the
    model.
    """
    loaded = served.loaded
    template = loaded.chat.source if loaded.chat is not None else ""
    capabilities = ["completion"]
    if template:
        capabilities.append("tools")
    if infill_marks(loaded.tokenizer) is not None:
        capabilities.append("insert")
    if Marks.found_in(template) is not None:
        capabilities.append("thinking")
    family = _details(served)["family"]
    return {
        "modelfile": f"FROM {served.name}\n",
        "parameters": "\n".join(f"{name} {one}" for name, one in llama_defaults(loaded).items()),
        "template": template,
        "details": _details(served),
        "model_info": {
            "general.architecture": family,
            "general.basename": served.name,
            "general.parameter_count": loaded.info.get("parameters") or 0,
            f"{family}.context_length": loaded.context,
            f"{family}.vocab_size": loaded.tokenizer.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": time_of(datetime.fromtimestamp(served.created, UTC)),
    }


def tagged(name: str) -> str:
    """Return a model's name as in Ollama's lists: with the tag `latest` if it has none."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def card(served: Served) -> dict[str, Any]:
    """Return the entry of a loaded model in Ollama's lists: names, bytes, a digest and its
    family.
    """
    return {
        "name": tagged(served.name),
        "model": tagged(served.name),
        "modified_at": time_of(datetime.fromtimestamp(served.created, UTC)),
        "size": served.loaded.info["memory"]["weights"],
        "digest": hashlib.sha256(served.fingerprint.encode()).hexdigest(),
        "details": _details(served),
    }


def _details(served: Served) -> dict[str, Any]:
    loaded, model = served.loaded, str(served.loaded.config.model)
    family = str(loaded.info.get("family") or loaded.name)
    level = _LEVEL.search(model)
    words = str(loaded.info["executor"].get("dtype") or "")
    number = _STORED.sub(r"\1", words)
    gguf = level or model.endswith(".gguf") or _OF_GGUF.match(number)
    return {
        "parent_model": "",
        "format": "gguf" if gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _size(loaded.info.get("parameters") or 0),
        "quantization_level": level[1].upper() if level else _NUMBERS.get(number, number.upper()),
    }


_LEVEL = re.compile(r"[:._-](I?Q\d_\w+|BF16|F16|F32)(?:\.gguf)?$", flags=re.IGNORECASE)
"""The quantisation level in the name of a GGUF file."""
_STORED = re.compile(r"weights (?:\w+(?:, \w+)* made )?(\w+).*")
"""The quantisation level in an executor's description: weights Q4_1 as in the file, ..."""
_OF_GGUF = re.compile(r"I?Q\d")
"""Levels of GGUF files; those that weights are converted to at start-up are written in lower
case.
"""
_NUMBERS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _size(weights: int) -> str:
    """Return a number of weights in Ollama's format: 134.5M, 8.0B; "" for none."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if weights >= unit:
            return f"{weights / unit:.1f}{name}"
    return str(weights or "")


def time_of(moment: datetime) -> str:
    """Return a time in Ollama's format: ISO 8601, with Z for UTC."""
    return moment.isoformat().replace("+00:00", "Z")
