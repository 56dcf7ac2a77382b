"""The sources of options: flags, FORERUN_* in the environment, a file, the profile of `forerun
tune`, the defaults. The first that has a value wins.
"""

import argparse
import difflib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.cli.parser import unknown
from forerun.cli.yaml_file import mapping
from forerun.errors import ConfigError
from forerun.options.alias import FIELDS
from forerun.options.aliases import OPTIONS
from forerun.options.flags import MANY, Option, WrittenOption, gather, own_option, places

PREFIX = "FORERUN_"
LLAMA_PREFIX = "LLAMA_ARG_"
MODELS_DIR = "LLAMA_ARG_MODELS_DIR"
_LLAMA_NAMES = {"n-parallel": "parallel", "batch": "batch-size", "ubatch": "ubatch-size",
                "endpoint-metrics": "metrics", "endpoint-slots": "slots", "endpoint-props": "props",
                "think": "reasoning-format", "think-budget": "reasoning-budget",
                "n-gpu-layers-draft": "gpu-layers-draft"}  # fmt: skip
"""Variables of llama.cpp whose names differ from its flags."""
_KEYS = {"LLAMA_API_KEY": "api-key", "VLLM_API_KEY": "api-key"}
"""Variables that hold the API key of other servers. They are read because a server would be open
without them.
"""

log = logging.getLogger(__name__)

ALL_NAMES = {option.name for option in OPTIONS} | {own_option(i).name for i in FIELDS.values()}
"""Names of the options of all commands."""


def settle(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> None:
    """Set the parsed arguments' `values`: those of all fields, from all sources. Raises ConfigError
    naming the source. Does nothing for a command without options.
    """
    options: dict[str, Option] = vars(arguments).get("options") or {}
    if not options:
        return
    file = arguments.config or environment.get(PREFIX + "CONFIG")
    given = list(arguments.given)
    if "words" in vars(arguments):
        model_given = any(one.option.fields == ("model",) for one in given)
        _read_words(arguments, model_given)
    if vars(arguments).get("model_word") and "model" not in options:
        arguments.model = arguments.model_word
    elif vars(arguments).get("model_word"):
        first = replace(options["model"], flag="MODEL")
        given.insert(0, WrittenOption(first, arguments.model_word, "the first argument"))
    names = [one.text for one in given if one.option.takes == MANY and one.option.fields]
    if len(names) > 1 and not any("model" in one.option.fields for one in given):
        raise ConfigError(
            f"the names {', '.join(names)} were given, but no model; put the model first: forerun "
            f"{arguments.command} MODEL {given[0].where} NAME ..."
        )
    if environment.get(MODELS_DIR) and not vars(arguments).get("models_dir", True):
        arguments.models_dir = environment[MODELS_DIR]
    layers = (
        from_file(Path(file), options, arguments.command) if file else [],
        from_llama(environment, options),
        from_environment(environment, options),
        given,
    )
    arguments.values = dict(arguments.defaults)
    for layer in layers:
        arguments.values |= gather(with_file(layer))
    arguments.written = places(one for layer in layers for one in layer)


def parted(words: Sequence[str], model_given: bool) -> tuple[str | None, str | None]:
    """Split the arguments of `forerun run` into (model, prompt). A single word is a prompt, unless
    no other option names the model and the word can only be a model. Raises ConfigError for more
    than two.
    """
    if len(words) > 2:
        raise ConfigError("put the prompt between quotes: forerun run [MODEL] 'PROMPT'")
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return None, None
    from forerun.hub.catalog import is_reference  # Keeps `--help` fast.

    alone = not model_given and is_reference(words[0])
    return (words[0], None) if alone else (None, words[0])


def _read_words(arguments: argparse.Namespace, model_given: bool) -> None:
    """Set `model_word` and `prompt` of `forerun run`. With --prompt, a word is the model. Raises
    ConfigError for too many words.
    """
    words, prompt = arguments.words, arguments.prompt
    if prompt is None:
        arguments.model_word, arguments.prompt = parted(words, model_given)
    elif len(words) > 1:
        raise ConfigError(f"{words[1]!r} is one word too many: --prompt is the prompt.")
    else:
        arguments.model_word = words[0] if words else None


def with_file(given: Sequence[WrittenOption]) -> list[WrittenOption]:
    """Return the options with llama.cpp's --hf-file put behind the hub id that it belongs to, as
    `org/name:file`; without a hub id it stays.
    """
    files = [one for one in given if one.option.name in ("hf-file", "hff")]
    if not files or not any(one.option.name in ("hf-repo", "hf", "hfr") for one in given):
        return [*given]
    name = files[-1].text.rpartition("/")[2]
    return [
        replace(one, text=f"{one.text.partition(':')[0]}:{name}")
        if one.option.name in ("hf-repo", "hf", "hfr")
        else one
        for one in given
        if one not in files
    ]


def from_llama(
    environment: Mapping[str, str], options: Mapping[str, Option]
) -> list[WrittenOption]:
    """Return the options in LLAMA_ARG_*, which configure llama.cpp's server, and the API keys of
    other servers. A name without an equivalent is logged and ignored.
    """
    found = []
    for variable, text in sorted(environment.items()):
        if "port" not in options:
            continue
        if variable in _KEYS and text:
            found.append(WrittenOption(options[_KEYS[variable]], text, variable))
        if not variable.startswith(LLAMA_PREFIX) or variable == MODELS_DIR:
            continue
        name = variable.removeprefix(LLAMA_PREFIX).lower().replace("_", "-")
        option = options.get(_LLAMA_NAMES.get(name, name))
        if option is None:
            log.warning("%s changes nothing here: there is no such option.", variable)
        else:
            found.append(WrittenOption(option, text, variable))
    return found


def from_environment(
    environment: Mapping[str, str], options: Mapping[str, Option]
) -> list[WrittenOption]:
    """Return the values of these options in FORERUN_*; ignores those of other commands. Raises
    ConfigError for a name that no command has.
    """
    found = []
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(PREFIX).lower().replace("_", "-")
        if not variable.startswith(PREFIX) or name == "config":
            continue
        if name in options:
            found.append(WrittenOption(options[name], text, variable))
        elif name not in ALL_NAMES:
            close = difflib.get_close_matches(name, sorted(ALL_NAMES), n=1)
            near = close and f"; did you mean {PREFIX}{close[0].upper().replace('-', '_')}?"
            raise ConfigError(f"{variable} in the environment is not an option{near or '.'}")
    return found


def from_file(path: Path, options: Mapping[str, Option], command: str) -> list[WrittenOption]:
    """Return the values in a YAML file of names and values. Raises ConfigError naming file and
    option.
    """
    return list(entries(str(path), mapping(path), options, command))


def entries(
    where: str, facts: Mapping[str, Any], options: Mapping[str, Option], command: str
) -> Iterable[WrittenOption]:
    """Yield the options in `facts`, names and values that come from `where`. Raises ConfigError for
    a name that the command does not have or that appears twice, and for a list or a mapping given
    to an option of one value.
    """
    names: set[str] = set()
    for key, value in facts.items():
        name = key.lstrip("-").replace("_", "-")
        if name in names:
            raise ConfigError(f"{where}: {name} appears twice, with - and with _; leave one out.")
        names.add(name)
        if name not in options:
            raise ConfigError(f"{where}: {unknown('--' + name, {**options}, command)}")
        option, place = options[name], f"{name} in {where}"
        values = value if isinstance(value, list) and _repeated(option) else [value]
        for one in values:
            if isinstance(one, list) or (isinstance(one, dict) and len(option.fields) == 1):
                kind = "list" if isinstance(one, list) else "mapping"
                raise ConfigError(f"{place} takes one value, not a {kind}.")
            if one is not None:
                yield WrittenOption(
                    option, json.dumps(one) if isinstance(one, dict) else one, place
                )


def _repeated(option: Option) -> bool:
    """Return whether an option may be given several times, so that a file may have a list for it.
    True for options without a field, which are ignored.
    """
    held = (FIELDS[name].default for name in option.fields if name in FIELDS)
    return not option.fields or any(isinstance(one, tuple) for one in held)
