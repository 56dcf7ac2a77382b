"""An option name of another server: its effect here, and the message about it."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any

from forerun.errors import ConfigError
from forerun.options.config import AskConfig, EngineConfig, ServeSettings
from forerun.options.fields import YES, parsed, truth
from forerun.options.flags import NOTHING, VALUE, Option, own_option
from forerun.options.sampling_params import parse_overrides

log = logging.getLogger(__name__)

SGLANG, VLLM, LLAMA = "SGLang", "vLLM", "llama.cpp"

FIELDS: dict[str, "Field[Any]"] = {
    item.name: item for kind in (EngineConfig, ServeSettings, AskConfig) for item in fields(kind)
}


class Verdict(Enum):
    """The treatment of a name.

    SETS     it sets fields of ours
    ONLY     only the value that applies here anyway is accepted; others are rejected
    IGNORED  it has no effect here, and a line in the log reports that
    REFUSED  it is rejected
    """

    SETS = "sets"
    ONLY = "only"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Alias:
    """Names of other servers for one option: a row of the table in aliases.py.

    flags    the names, separated by blanks, dashes included
    sources  the servers that have them
    verdict  their effect
    fields   of our configurations that they set, separated by blanks
    why      for users: the effect here, and what to do instead
    values   SETS: accepted values, and the field's value for each
    others   SETS: the field's own values are accepted too
    allowed  ONLY: accepted values
    takes    what follows a name: VALUE, NOTHING, MAYBE or MANY (flags.py)
    read     SETS: (the name as written, the text) -> values of fields, if neither the field's own
             values nor `values` apply; raises ConfigError
    """

    flags: str
    sources: tuple[str, ...]
    verdict: Verdict
    fields: str = ""
    why: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    others: bool = False
    allowed: tuple[str, ...] = ()
    takes: str = VALUE
    read: Callable[[str, str], dict[str, Any]] | None = None

    @property
    def options(self) -> list[Option]:
        """One Option per name in `flags`."""
        names = tuple(self.fields.split())
        return [Option(flag, names, self.assign, self.takes) for flag in self.flags.split()]

    def assign(self, where: str, text: str) -> dict[str, Any]:
        """Return the values of fields that `text` sets, by field; {} if it has no effect (a line in
        the log reports that).

        where  how the option was named, for messages

        Raises ConfigError, with the reason and `where`, if it is rejected.
        """
        off = self.takes == NOTHING and not truth(where, text)
        if self.verdict is Verdict.SETS:
            return {} if off else self._set(where, text)
        if self.verdict is Verdict.ONLY:
            if text.lower() not in (YES if self.takes == NOTHING else self.allowed):
                raise ConfigError(f"{where} {text} cannot be honoured: {self.why}.")
        elif not off:
            if self.verdict is Verdict.REFUSED:
                raise ConfigError(f"{where} cannot be honoured: {self.why}.")
            log.warning("%s changes nothing here: %s.", where, self.why)
        return {}

    def _set(self, where: str, text: str) -> dict[str, Any]:
        if self.read:
            return self.read(where, text)
        if text.lower() in self.values:
            return {self.fields: self.values[text.lower()]}
        if self.values and not self.others:
            why = f" ({self.why})" if self.why else ""
            raise ConfigError(f"{where} may be {', '.join(self.values)}, not {text!r}{why}.")
        return {self.fields: parsed(FIELDS[self.fields], where, text)}

    @property
    def meaning(self) -> str:
        """The name's effect here, as a sentence or our own flag, for docs/use/migrating.md."""
        if self.verdict is Verdict.IGNORED:
            return f"taken, changes nothing: {self.why}"
        if self.verdict is Verdict.ONLY and self.takes != NOTHING:
            return f"only {' or '.join(self.allowed)}: {self.why}"
        if self.verdict is not Verdict.SETS or self.read:
            return self.why
        own = own_option(FIELDS[self.fields]).flag
        if self.takes == NOTHING:
            value = self.values["true"]
            shown = (
                own if value is True else f"--no-{own[2:]}" if value is False else f"{own} {value}"
            )
            return f"`{shown}`"
        if self.values and not self.others:
            why = f"; {self.why}" if self.why else ""
            return f"`{own}`; takes {', '.join(self.values)}{why}"
        return f"`{own}`" + (f"; {self.why}" if self.why else "")


def chain_length(where: str, text: str) -> dict[str, Any]:
    """Return the fields for a chain of `text` draft tokens, the root not counted. Raises
    ConfigError, naming `where`, for anything but a whole number.
    """
    steps = parsed(FIELDS["speculative_num_steps"], where, text)
    return {"speculative_num_steps": steps, "speculative_num_draft_tokens": steps + 1}


def draft_model(where: str, text: str) -> dict[str, Any]:
    """Return the fields for a whole model that drafts (STANDALONE), named by `text`."""
    return {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": text}


def grammar_backend(where: str, text: str) -> dict[str, Any]:
    """Return no fields: llguidance matches all grammars; logs that for a known other library.
    Raises ConfigError for an unknown one.
    """
    name = text.lower()
    if name in ("xgrammar", "outlines", "lm-format-enforcer"):
        log.warning("%s %s: llguidance matches all grammars here.", where, text)
    elif name not in ("auto", "llguidance", "guidance"):
        raise ConfigError(f"{where} {text} cannot be honoured: llguidance matches all grammars.")
    return {}


def gpu_layers(where: str, text: str) -> dict[str, Any]:
    """Return the device for llama.cpp's number of layers on the GPU: 0 = cpu; all, 99 and more, -1
    or auto = our own choice, a GPU if there is one. Raises ConfigError for a part of the layers.
    """
    if text in ("-1", "auto", "all") or (text.isdecimal() and int(text) >= 99):
        return {}
    if text == "0":
        return {"device": "cpu"}
    raise ConfigError(
        f"{where} {text} cannot be honoured: a model is not split between CPU and GPU; give 0 "
        "(--device cpu) or all (--device cuda)."
    )


def gpu(where: str, text: str) -> dict[str, Any]:
    """Return the fields that choose the CUDA device of this number. Raises ConfigError, naming
    `where`, for anything but a whole number.
    """
    if not text.isdecimal():
        raise ConfigError(f"{where} takes a whole number, not {text!r}.")
    return {"device": f"cuda:{text}"}


def sampling_default(name: str) -> Callable[[str, str], dict[str, Any]]:
    """Return a reader of the default value of the sampling parameter `name`."""

    def read(where: str, text: str) -> dict[str, Any]:
        return _override(where, {name: text})

    return read


def sampling_object(where: str, text: str) -> dict[str, Any]:
    """Return the fields for a JSON object of sampling parameters; null is the default. Raises
    ConfigError, naming `where`, if `text` is no object or a member is wrong.
    """
    values = _json_object(where, text)
    return _override(where, {name: one for name, one in values.items() if one is not None})


def _override(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    pairs = tuple(f"{name}={value}" for name, value in values.items())
    try:
        parse_overrides(pairs)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return {"sampling_override": pairs}


def _json_object(where: str, text: str) -> dict[str, Any]:
    try:
        keys = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} takes a JSON object, but this is none: {error}.") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"{where} takes a JSON object, not {text!r}.")
    return keys


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

_LOOKUP = "lookup weighs runs of 1 to 16 tokens by what they proved to be worth"
_KEYS_REFUSED = {
    "draft_tensor_parallel_size": "one device runs a model",
    "quantization": "a draft is computed in the target's numbers",
    "max_model_len": "speculation has no length of its own",
    "disable_by_batch_size": "the policy measures when draft tokens pay, at every batch size",
    "draft_sample_method": "draft tokens are the likeliest ones; acceptance stays exact",
    "rejection_sample_method": "acceptance is exact by a rule of its own",
    "parallel_drafting": "the method dflash is for drafters of whole blocks",
    "num_speculative_tokens_per_batch_size": "the policy measures how many pay",
    "enable_adaptive_verification": "--policy adaptive is the default",
}
"""Keys of vLLM's speculative_config that are rejected, with the reasons."""


def speculative_config(where: str, text: str) -> dict[str, Any]:
    """Return the fields for vLLM's speculative_config, a JSON object. Raises ConfigError, with the
    reason, if `text` is no object, and for unknown or unsupported keys and methods.
    """
    values: dict[str, Any] = {}
    for key, value in _json_object(where, text).items():
        place = f"{where}: {key}"
        if value is None or (key == "draft_tensor_parallel_size" and value == 1):
            continue
        if key == "method":
            if value not in METHODS:
                known = ", ".join(METHODS)
                raise ConfigError(f"{place} is {value!r}; methods known here are {known}.")
            values["speculative_algorithm"] = METHODS[value]
        elif key == "model":
            values["speculative_draft_model_path"] = str(value)
        elif key == "revision":
            values["speculative_draft_model_revision"] = str(value)
        elif key in ("prompt_lookup_min", "prompt_lookup_max"):
            log.warning("%s changes nothing here: %s.", place, _LOOKUP)
        elif key == "num_speculative_tokens":
            values |= chain_length(place, str(value))
        else:
            why = _KEYS_REFUSED.get(key)
            problem = f"cannot be honoured: {why}" if why else "is no key that is known here"
            raise ConfigError(f"{place} {problem}; leave the key out.")
    return values
