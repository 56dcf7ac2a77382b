"""The sources of options: flags, FORERUN_* in the environment, a file; the first that has a value
wins, then the profile of `forerun tune`, then the defaults.
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
from forerun.options.flags import MANY, Given, Option, gather, own_option, places

PREFIX = "FORERUN_"
LLAMA_PREFIX = "LLAMA_ARG_"
_LLAMA_NAMES = {"n-parallel": "parallel", "batch": "batch-size", "ubatch": "ubatch-size",
                "endpoint-metrics": "metrics", "endpoint-slots": "slots", "endpoint-props": "props",
                "n-predict": "max-tokens"}  # fmt: skip
"""Names of llama.cpp's environment that are not those of its flags."""
_KEYS = {"LLAMA_API_KEY": "api-key", "VLLM_API_KEY": "api-key"}
"""Variables by which other servers are given a key: unread, a server would be open."""

log = logging.getLogger(__name__)

ALL_NAMES = {option.name for option in OPTIONS} | {own_option(i).name for i in FIELDS.values()}
"""The options of every command."""


def settle(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> None:
    """Put `values` of all fields into the parsed arguments. Raises ConfigError naming the place.

    Without options of its own, a command is left as it is.
    """
    options: dict[str, Option] = vars(arguments).get("options") or {}
    if not options:
        return
    file = arguments.config or environment.get(PREFIX + "CONFIG")
    given = list(arguments.given)
    if "words" in vars(arguments):
        model_given = any(one.option.fields == ("model",) for one in given)
        arguments.model_word, arguments.prompt = parted(arguments.words, model_given)
    if vars(arguments).get("model_word") and "model" not in options:
        arguments.model = arguments.model_word
    elif vars(arguments).get("model_word"):
        first = replace(options["model"], flag="MODEL")
        given.insert(0, Given(first, arguments.model_word, "the first argument"))
    names = [one.text for one in given if one.option.takes == MANY and one.option.fields]
    if len(names) > 1 and not any("model" in one.option.fields for one in given):
        raise ConfigError(
            f"the names {', '.join(names)} were given, but no model; put the model first: forerun "
            f"{arguments.command} MODEL {given[0].where} NAME ..."
        )
    layers = (
        from_file(Path(file), options, arguments.command) if file else [],
        from_llama(environment, options),
        from_environment(environment, options),
        given,
    )
    arguments.values = dict(arguments.defaults)
    for layer in layers:
        arguments.values |= gather(layer)
    arguments.written = places(one for layer in layers for one in layer)


def parted(words: Sequence[str], model_given: bool) -> tuple[str | None, str | None]:
    """Split the words of `forerun run` into (model, prompt). One word is a prompt, unless no other
    option names the model and it can only be one. Raises ConfigError for more than two.
    """
    if len(words) > 2:
        raise ConfigError("put the prompt between quotes: forerun run [MODEL] 'PROMPT'")
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return None, None
    from forerun.hub.catalog import is_reference  # `--help` needs no catalog.

    alone = not model_given and is_reference(words[0])
    return (words[0], None) if alone else (None, words[0])


def from_llama(environment: Mapping[str, str], options: Mapping[str, Option]) -> list[Given]:
    """Return the options in LLAMA_ARG_*, which configure llama.cpp's server, and the keys of
    others. A name without a meaning here is ignored, with a line in the log.
    """
    found = []
    for variable, text in sorted(environment.items()):
        if "port" not in options:
            continue
        if variable in _KEYS and text:
            found.append(Given(options[_KEYS[variable]], text, variable))
        if not variable.startswith(LLAMA_PREFIX):
            continue
        name = variable.removeprefix(LLAMA_PREFIX).lower().replace("_", "-")
        option = options.get(_LLAMA_NAMES.get(name, name))
        if option is None:
            log.warning("%s changes nothing here: there is no such option.", variable)
        else:
            found.append(Given(option, text, variable))
    return found


def from_environment(environment: Mapping[str, str], options: Mapping[str, Option]) -> list[Given]:
    """Return these options' values in FORERUN_*; ignores those of other commands.

    Raises ConfigError for a name that no command has.
    """
    found = []
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(PREFIX).lower().replace("_", "-")
        if not variable.startswith(PREFIX) or name == "config":
            continue
        if name in options:
            found.append(Given(options[name], text, variable))
        elif name not in ALL_NAMES:
            close = difflib.get_close_matches(name, sorted(ALL_NAMES), n=1)
            near = close and f"; did you mean {PREFIX}{close[0].upper().replace('-', '_')}?"
            raise ConfigError(f"{variable} in the environment is not an option{near or '.'}")
    return found


def from_file(path: Path, options: Mapping[str, Option], command: str) -> list[Given]:
    """Return the values in a YAML file of names and values. Raises ConfigError naming file and
    name.
    """
    return list(entries(str(path), mapping(path), options, command))


def entries(
    where: str, facts: Mapping[str, Any], options: Mapping[str, Option], command: str
) -> Iterable[Given]:
    """Yield the options for names and values that are written in `where`. Raises ConfigError for a
    name that the command does not have or that appears twice, and for a list or a mapping for an
    option of one value.
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
                yield Given(option, json.dumps(one) if isinstance(one, dict) else one, place)


def _repeated(option: Option) -> bool:
    """Return whether an option may be given several times, so that a file may have a list for it.
    Options that set nothing may.
    """
    held = (FIELDS[name].default for name in option.fields if name in FIELDS)
    return not option.fields or any(isinstance(one, tuple) for one in held)
