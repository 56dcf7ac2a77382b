"""An option name of another server: its effect here, and the message about it."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any

from forerun.errors import ConfigError
from forerun.options.config import EngineConfig, SamplingConfig, ServeSettings
from forerun.options.fields import YES, parsed, truth
from forerun.options.flags import NOTHING, VALUE, Option, own_option
from forerun.options.sampling_params import parse_overrides

log = logging.getLogger(__name__)

SGLANG, VLLM, LLAMA = "SGLang", "vLLM", "llama.cpp"

FIELDS: dict[str, "Field[Any]"] = {
    item.name: item
    for kind in (EngineConfig, ServeSettings, SamplingConfig)
    for item in fields(kind)
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


_TYPES = {
    "none": "OFF",
    "draft-simple": "STANDALONE",
    "draft-eagle3": "EAGLE3",
    "draft-mtp": "NEXTN",
    "draft-dflash": "DFLASH",
    "draft-dspark": "DFLASH",
}
"""llama.cpp's types of speculation that have a draft, or none."""


def speculative_types(where: str, text: str) -> dict[str, Any]:
    """Return the algorithm for llama.cpp's types of speculation, separated by commas. Raises
    ConfigError, naming `where`, for an unknown type and for several drafts.
    """
    names = [name.strip().lower() for name in text.split(",")]
    drafts = [name for name in names if not name.startswith("ngram-")]
    if len(drafts) > 1 or not set(drafts) <= set(_TYPES):
        known = ", ".join(_TYPES)
        raise ConfigError(
            f"{where} is {text!r}, but takes one of {known}, and ngram-... beside it."
        )
    algorithm = _TYPES[drafts[0]] if drafts else "NGRAM"
    both = drafts and len(names) > 1 and algorithm != "OFF"
    return {"speculative_algorithm": f"{algorithm}+NGRAM" if both else algorithm}


def named_format(field: str, known: Mapping[str, str]) -> Callable[[str, str], dict[str, Any]]:
    """Return a reader of other servers' names of formats, which sets `field`: of a name that is not
    among `known` it logs that the model's template decides.
    """

    def read(where: str, text: str) -> dict[str, Any]:
        if text.lower() not in known:
            log.warning("%s %s is no format here: the model's template decides.", where, text)
        return {field: known.get(text.lower(), "auto")}

    return read


_QUANTISED = re.compile(
    r"(awq|gptq|marlin|compressed-tensors|modelopt|mxfp|nvfp|petit|auto-round|auto_round|quark|"
    r"w[48]a\d|moe_wna|fbgemm|ascend).*"
)
"""Matches other servers' names of quantised files."""


def file_quantization(known: Mapping[str, str]) -> Callable[[str, str], dict[str, Any]]:
    """Return a reader of a quantisation: sets `dtype` to the value in `known`, or nothing for names
    of quantised files, which is logged. The reader raises ConfigError for other names.
    """

    def read(where: str, text: str) -> dict[str, Any]:
        name = text.lower()
        if name in known:
            return {"dtype": known[name]}
        if not _QUANTISED.fullmatch(name):
            raise ConfigError(
                f"{where} may be {', '.join(known)}, not {text!r} (leave it out for files that are "
                "quantised: they say so themselves)."
            )
        log.warning("%s %s changes nothing here: a quantised file says so itself.", where, text)
        return {}

    return read


def effort(where: str, text: str) -> dict[str, Any]:
    """Return the chat template's variables for an effort of reasoning; "default" sets none."""
    usual = text.lower() == "default"
    return {"chat_template_kwargs": json.dumps({} if usual else {"reasoning_effort": text})}


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


def structured_outputs(where: str, text: str) -> dict[str, Any]:
    """Return the fields for vLLM's structured_outputs_config, a JSON object. Raises ConfigError,
    naming `where`, for a key that would change what is matched.
    """
    values: dict[str, Any] = {}
    for key, value in _json_object(where, text).items():
        place = f"{where}: {key}"
        if key == "backend":
            grammar_backend(place, str(value))
        elif key == "disable_additional_properties" and value is True:
            values["additional_properties"] = "deny"
        elif value not in (None, False):
            raise ConfigError(f"{place} cannot be honoured: requests say so; leave the key out.")
    return values


def gpu_layers(where: str, text: str) -> dict[str, Any]:
    """Return the device for llama.cpp's number of layers on the GPU: 0 = cpu; all, -1, auto or any
    other number = our own choice, a GPU if there is one; below 99, which may be a part of the
    layers, that is logged. Raises ConfigError, naming `where`, for other text.
    """
    if text == "0":
        return {"device": "cpu"}
    if text not in ("-1", "auto", "all") and not text.isdecimal():
        raise ConfigError(f"{where} takes a whole number, auto or all, not {text!r}.")
    if text.isdecimal() and int(text) < 99:
        log.warning(
            "%s %s: a model is whole on the GPU, if there is one, or on the CPU.", where, text
        )
    return {}


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


def default_seed(where: str, text: str) -> dict[str, Any]:
    """Return the fields for the seed of requests that have none, which is logged; -1 sets none.
    Raises ConfigError, naming `where`, for anything but a whole number.
    """
    if text == "-1":
        return {}
    log.warning("%s %s: requests without a seed have this one; alike, they end alike.", where, text)
    return _override(where, {"seed": text})


def default_length(where: str, text: str) -> dict[str, Any]:
    """Return the fields for the longest answer of requests that have no limit; a negative number
    sets none. Raises ConfigError, naming `where`, for anything but a whole number.
    """
    return {} if text in ("-1", "-2") else _override(where, {"max_tokens": text})


def sampling_object(where: str, text: str) -> dict[str, Any]:
    """Return the fields for a JSON object of sampling parameters; null is the default. Raises
    ConfigError, naming `where`, if `text` is no object or a member is wrong.
    """
    values = _json_object(where, text)
    if "max_new_tokens" in values:
        values["max_tokens"] = values.pop("max_new_tokens")
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
    "dspark": "DFLASH",
}
"""vLLM's methods of speculation; those of single families end in _mtp, and mean mtp."""

_LOOKUP = "lookup weighs runs of 1 to 16 tokens by what they proved to be worth"
_DRAFT = "a draft is computed where and how the target is"
_MEASURED = "the policy measures when draft tokens pay, and how many"
_WITHOUT_EFFECT = {
    **dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), _LOOKUP),
    **dict.fromkeys(
        ("draft_tensor_parallel_size", "quantization", "max_model_len", "attention_backend",
         "moe_backend", "kv_cache_dtype", "enforce_eager", "draft_sample_method",
         "disable_padded_drafter_batch", "use_local_argmax_reduction"), _DRAFT),
    **dict.fromkeys(
        ("disable_by_batch_size", "num_speculative_tokens_per_batch_size",
         "enable_adaptive_verification"), _MEASURED),
}  # fmt: skip
"""Keys of vLLM's speculative_config that change no text, with the reasons."""
_KEYS_REFUSED = {
    "rejection_sample_method": "acceptance is exact by a rule of its own",
    "parallel_drafting": "the method dflash is for drafters of whole blocks",
}
"""Keys of vLLM's speculative_config that are rejected, with the reasons."""


def speculative_method(where: str, text: str) -> dict[str, Any]:
    """Return the algorithm for vLLM's method of speculation. Raises ConfigError, naming `where`,
    for an unknown one.
    """
    name = "mtp" if str(text).endswith("_mtp") else text
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise ConfigError(f"{where} is {text!r}; methods known here are {known}.")
    return {"speculative_algorithm": METHODS[name]}


def speculative_config(where: str, text: str) -> dict[str, Any]:
    """Return the fields for vLLM's speculative_config, a JSON object. Raises ConfigError, with the
    reason, if `text` is no object, and for unknown or unsupported keys and methods.
    """
    values: dict[str, Any] = {}
    for key, value in _json_object(where, text).items():
        place = f"{where}: {key}"
        if value is None:
            continue
        if key == "method":
            values |= speculative_method(place, value)
        elif key == "model" and value in ("ngram", "[ngram]"):
            values["speculative_algorithm"] = "NGRAM"
        elif key == "model":
            values["speculative_draft_model_path"] = str(value)
        elif key == "revision":
            values["speculative_draft_model_revision"] = str(value)
        elif key in _WITHOUT_EFFECT or key.startswith("suffix_decoding_"):
            log.warning("%s changes nothing here: %s.", place, _WITHOUT_EFFECT.get(key, _LOOKUP))
        elif key == "num_speculative_tokens":
            values |= chain_length(place, str(value))
        else:
            why = _KEYS_REFUSED.get(key)
            problem = f"cannot be honoured: {why}" if why else "is no key that is known here"
            raise ConfigError(f"{place} {problem}; leave the key out.")
    return values
