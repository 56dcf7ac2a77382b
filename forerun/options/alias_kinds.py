"""What a name of another server can mean here: the same, another word for it, or a sentence that
says why not.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from forerun.errors import ConfigError
from forerun.options.config import AskConfig, EngineConfig, ServeSettings
from forerun.options.flags import NO, NOTHING, VALUE, YES, Assign, Option, own_option, parsed, truth

log = logging.getLogger(__name__)

SGLANG, VLLM, LLAMA, FORMER = "SGLang", "vLLM", "llama.cpp", "Forerun 0.1"

FIELDS: dict[str, "Field[Any]"] = {
    item.name: item for kind in (EngineConfig, ServeSettings, AskConfig) for item in fields(kind)
}


@dataclass(frozen=True, slots=True)
class Alias:
    """One name that an option of ours has elsewhere.

    sources  who calls it so
    meaning  what it does here, for people
    refused  it always is, whatever its value
    """

    option: Option
    sources: tuple[str, ...]
    meaning: str
    refused: bool = False


def _own(field: str) -> str:
    return own_option(FIELDS[field]).flag


def same(flags: str, field: str, *sources: str, note: str = "", takes: str = VALUE) -> list[Alias]:
    """Names, parted by blanks, that take a field's own values."""

    def assign(where: str, text: str) -> dict[str, Any]:
        return {field: parsed(FIELDS[field], where, text)}

    meaning = f"`{_own(field)}`" + (f"; {note}" if note else "")
    made = [Option(flag, (field,), assign, takes) for flag in flags.split()]
    return [Alias(option, sources, meaning) for option in made]


def length(flags: str, field: str, *sources: str) -> list[Alias]:
    """Numbers of tokens, where 0, -1 and auto leave the choice to us."""

    def assign(where: str, text: str) -> dict[str, Any]:
        free = text in ("0", "-1", "auto")
        return {field: None if free else parsed(FIELDS[field], where, text)}

    meaning = f"`{_own(field)}`; 0, -1 or auto: as if it were left out"
    return [Alias(Option(flag, (field,), assign), sources, meaning) for flag in flags.split()]


def switch(flags: str, values: dict[str, Any], *sources: str) -> list[Alias]:
    """Names without a value that set fields."""

    def assign(where: str, text: str) -> dict[str, Any]:
        return dict(values) if truth(where, text) else {}

    ours = {_own(name): value for name, value in values.items()}
    shown = [
        flag if value is True else f"--no-{flag[2:]}" if value is False else f"{flag} {value}"
        for flag, value in ours.items()
    ]
    meaning = ", ".join(f"`{one}`" for one in shown)
    made = [Option(flag, tuple(values), assign, NOTHING) for flag in flags.split()]
    return [Alias(option, sources, meaning) for option in made]


def choice(
    flags: str, field: str, values: Mapping[str, Any], *sources: str, note: str = ""
) -> list[Alias]:
    """Names whose values are called otherwise here."""

    def assign(where: str, text: str) -> dict[str, Any]:
        if text.lower() not in values:
            why = f" ({note})" if note else ""
            raise ConfigError(f"{where} may be {', '.join(values)}, not {text!r}{why}.")
        return {field: values[text.lower()]}

    meaning = f"`{_own(field)}`; takes {', '.join(values)}"
    return [Alias(Option(flag, (field,), assign), sources, meaning) for flag in flags.split()]


def usual(
    flags: str, allowed: tuple[str, ...], *sources: str, why: str, takes: str = VALUE
) -> list[Alias]:
    """Names that may only ask for what happens anyway. why: what happens, and what else to do."""

    def assign(where: str, text: str) -> dict[str, Any]:
        if text.lower() not in (YES if takes == NOTHING else allowed):
            raise ConfigError(f"{where} {text} cannot be honoured: {why}.")
        return {}

    shown = f"only {' or '.join(allowed)}: " if allowed else ""
    made = [Option(flag, (), assign, takes) for flag in flags.split()]
    return [Alias(option, sources, shown + why) for option in made]


def taken(flags: str, *sources: str, why: str, takes: str = VALUE) -> list[Alias]:
    """Names that change nothing here and are taken with a line in the log. why: what holds."""

    def assign(where: str, text: str) -> dict[str, Any]:
        if takes != NOTHING or text.lower() not in NO:
            log.warning("%s changes nothing here: %s.", where, why)
        return {}

    made = [Option(flag, (), assign, takes) for flag in flags.split()]
    return [Alias(option, sources, f"taken, changes nothing: {why}") for option in made]


def refused(flags: str, *sources: str, why: str, takes: str = VALUE) -> list[Alias]:
    """Names of what cannot be honoured. why: what holds instead, and what to do."""

    def assign(where: str, text: str) -> dict[str, Any]:
        if takes == NOTHING and text.lower() in NO:
            return {}
        raise ConfigError(f"{where} cannot be honoured: {why}.")

    made = [Option(flag, (), assign, takes) for flag in flags.split()]
    return [Alias(option, sources, why, refused=True) for option in made]


def other(
    flag: str, names: tuple[str, ...], assign: Assign, *sources: str, meaning: str
) -> list[Alias]:
    """A name with a way of its own."""
    return [Alias(Option(flag, names, assign), sources, meaning)]


def drafted(where: str, text: str) -> dict[str, Any]:
    """A number of draft tokens without the root, of a chain."""
    steps = parsed(FIELDS["speculative_num_steps"], where, text)
    return {"speculative_num_steps": steps, "speculative_num_draft_tokens": steps + 1}


def former_nodes(where: str, text: str) -> dict[str, Any]:
    """A number of draft tokens without the root, of a tree."""
    nodes = parsed(FIELDS["speculative_num_draft_tokens"], where, text)
    return {"speculative_num_draft_tokens": nodes + 1}


def former_draft(where: str, text: str) -> dict[str, Any]:
    """A draft's folder; llama.cpp has a number under the same name."""
    if text.isdecimal():
        raise ConfigError(
            f"{where} {text}: a number of draft tokens is --draft-max {text} "
            f"(--speculative-num-draft-tokens {int(text) + 1}); {where} names the draft's folder."
        )
    return {"speculative_draft_model_path": text}


def draft_model(where: str, text: str) -> dict[str, Any]:
    """A whole model that drafts."""
    return {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": text}


def grammar_backend(where: str, text: str) -> dict[str, Any]:
    """A library that matches grammars: llguidance does, whichever is named."""
    name = text.lower()
    if name in ("xgrammar", "outlines", "lm-format-enforcer"):
        log.warning("%s %s: llguidance matches all grammars here.", where, text)
    elif name not in ("auto", "llguidance", "guidance"):
        raise ConfigError(f"{where} {text} cannot be honoured: llguidance matches all grammars.")
    return {}


def layers(where: str, text: str) -> dict[str, Any]:
    """llama.cpp's layers on the GPU."""
    if text in ("all", "auto") or (text.isdecimal() and int(text) >= 99):
        return {"device": "cuda"}
    if text == "0":
        return {"device": "cpu"}
    raise ConfigError(
        f"{where} {text} cannot be honoured: a model is not parted between two devices; give 0 "
        "(--device cpu) or all (--device cuda)."
    )


def gpu(where: str, text: str) -> dict[str, Any]:
    """A CUDA device by its number."""
    if not text.isdecimal():
        raise ConfigError(f"{where} takes a whole number, not {text!r}.")
    return {"device": f"cuda:{text}"}


METHODS = {
    "ngram": "NGRAM",
    "ngram_gpu": "NGRAM",
    "suffix": "SUFFIX",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "draft_model": "STANDALONE",
    "dflash": "DFLASH",
}
"""vLLM's methods of speculation."""

_WITHOUT = "leave the key out"
_CONFIG_REFUSED = {
    "draft_tensor_parallel_size": "one device runs a model",
    "quantization": "a draft is computed in the target's numbers",
    "max_model_len": "speculation has no length of its own",
    "disable_by_batch_size": "the policy measures when draft tokens pay, at every batch size",
    "prompt_lookup_min": "lookup weighs runs of 1 to 16 tokens by what they proved to be worth",
    "prompt_lookup_max": "lookup weighs runs of 1 to 16 tokens by what they proved to be worth",
    "draft_sample_method": "draft tokens are the likeliest ones; acceptance stays exact",
    "rejection_sample_method": "acceptance is exact by a rule of its own",
    "parallel_drafting": "block drafters cannot be loaded yet",
    "num_speculative_tokens_per_batch_size": "the policy measures how many pay",
    "enable_adaptive_verification": "--policy adaptive is the default",
}


def speculative_config(where: str, text: str) -> dict[str, Any]:
    """VLLM's JSON object."""
    try:
        asked = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} takes a JSON object, but this is none: {error}.") from error
    if not isinstance(asked, dict):
        raise ConfigError(f"{where} takes a JSON object, not {text!r}.")
    found: dict[str, Any] = {}
    for key, value in asked.items():
        place = f"{where}: {key}"
        if value is None or (key == "draft_tensor_parallel_size" and value == 1):
            continue
        if key == "method":
            if value not in METHODS:
                known = ", ".join(METHODS)
                raise ConfigError(f"{place} is {value!r}; methods known here are {known}.")
            found["speculative_algorithm"] = METHODS[value]
        elif key == "model":
            found["speculative_draft_model_path"] = str(value)
        elif key == "revision":
            found["speculative_draft_model_revision"] = str(value)
        elif key == "num_speculative_tokens":
            found |= drafted(place, str(value))
        elif key in _CONFIG_REFUSED:
            raise ConfigError(f"{place} cannot be honoured: {_CONFIG_REFUSED[key]}; {_WITHOUT}.")
        else:
            raise ConfigError(f"{place} is no key that is known here; {_WITHOUT}.")
    return found
