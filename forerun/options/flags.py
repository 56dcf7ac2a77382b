"""Options by name: those of the configuration classes, other servers' names for them, and their
form on the command line, in the environment and in a file.

An option converts a written text to values of fields, wherever it was written: `--max-model-len
4096`, FORERUN_MAX_MODEL_LEN=4096 and `max-model-len: 4096` are the same option.
"""

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, TypeVar

from forerun.errors import ConfigError
from forerun.options.config import EngineConfig, SamplingConfig, ServeSettings
from forerun.options.fields import kind_of, parsed

Config = TypeVar("Config", EngineConfig, ServeSettings, SamplingConfig)
Other = TypeVar("Other", ServeSettings, EngineConfig)
Assign = Callable[[str, str], dict[str, Any]]
"""(name of the option as written, the text) -> values of fields. Raises ConfigError."""

VALUE, NOTHING, MAYBE, MANY = "value", "nothing", "maybe", "many"
"""What follows an option on the command line; many: one value or more. An option without a value
has the text "true".
"""


@dataclass(frozen=True, slots=True)
class Option:
    """The name of an option.

    flag    as on the command line, dashes included
    fields  the fields that it may set; empty = it sets none, or is rejected
    takes   VALUE, NOTHING, MAYBE or MANY
    """

    flag: str
    fields: tuple[str, ...]
    assign: Assign
    takes: str = VALUE

    @property
    def name(self) -> str:
        """The option's name in a file: the flag without its leading dashes."""
        return self.flag.lstrip("-")


@dataclass(frozen=True, slots=True)
class WrittenOption:
    """An option as it was written. where: its name in messages."""

    option: Option
    text: str
    where: str


def configured(kind: type[Config], arguments: argparse.Namespace) -> Config:
    """Return the configuration of class `kind` from parsed options; a field that was not set keeps
    its default. Raises ConfigError if an option is rejected or options contradict each other; the
    message names where a value was written, if that is another name or place.
    """
    values = vars(arguments).get("values")
    if values is None:
        values = vars(arguments).get("defaults", {}) | gather(arguments.given)
    known = {item.name: values[item.name] for item in fields(kind) if item.name in values}
    try:
        return kind(**known)
    except ConfigError as error:
        written = vars(arguments).get("written") or places(arguments.given)
        raise ConfigError(
            "\n".join(_placed(line, written) for line in str(error).splitlines())
        ) from error


def places(given: Iterable[WrittenOption]) -> dict[str, str]:
    """Return field -> where the option that set it last was written."""
    return {name: one.where for one in given for name in one.option.fields}


def _placed(problem: str, written: Mapping[str, str]) -> str:
    """Put the place where a value was written before a sentence that begins with the field's
    name.
    """
    name = problem.split(" is ", maxsplit=1)[0]
    where = written.get(name.replace("-", "_"), f"--{name}")
    return problem if where == f"--{name}" else f"{where}: {problem}"


def configured_both(
    first: type[Config], second: type[Other], arguments: argparse.Namespace
) -> tuple[Config, Other]:
    """Return the configurations of two classes, as `configured`. Raises ConfigError with the
    problems of both, one per line.
    """
    problems: list[str] = []
    one: Config | None = None
    other: Other | None = None
    try:
        one = configured(first, arguments)
    except ConfigError as error:
        problems += str(error).splitlines()
    try:
        other = configured(second, arguments)
    except ConfigError as error:
        problems += str(error).splitlines()
    if one is None or other is None:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return one, other


def gather(given: Iterable[WrittenOption]) -> dict[str, Any]:
    """Merge options that were all given in one place into values of fields, by name. The last value
    of a name wins; tuples are concatenated. Raises ConfigError that lists, one per line, all
    rejected options, and different names of one field that disagree.
    """
    values: dict[str, Any] = {}
    sources: dict[str, WrittenOption] = {}
    problems: list[str] = []
    for one in given:
        try:
            assigned = one.option.assign(one.where, one.text)
        except ConfigError as error:
            problems.append(str(error))
            continue
        for name, value in assigned.items():
            before = sources.get(name)
            if isinstance(value, tuple):
                value = values.get(name, ()) + value  # noqa: PLW2901
            elif before and before.option != one.option and values[name] != value:
                problems.append(
                    f"{before.where} and {one.where} both set {name.replace('_', '-')}, to "
                    f"{values[name]} and {value}; leave one out."
                )
            values[name], sources[name] = value, one
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def flags_of(
    kind: type[Any],
    parser: argparse.ArgumentParser,
    title: str,
    without: Collection[str] = (),
    first: Collection[str] = (),
    **defaults: Any,
) -> None:
    """Add one flag per field of a configuration class to `parser`.

    title     of their group in the help
    without   fields that the command sets itself: they get no flag
    first     fields whose flags are in a group of their own, before all others
    defaults  override the fields' own

    The parsed namespace then has `given`, the values set, `defaults`, the others' values, and
    `options`, all names; `configured` reads them.
    """
    groups = {True: _group(parser, "what matters first"), False: parser.add_argument_group(title)}
    known: dict[str, Any] = parser.get_default("defaults") or {}
    options: dict[str, Option] = parser.get_default("options") or {}
    for item in fields(kind):
        if item.name in without:
            continue
        default = defaults.get(item.name, item.default)
        assert default is not MISSING
        known[item.name] = default
        option = own_option(item)
        options[option.name] = option
        _add(groups[item.name in first], item, option, default)
    parser.set_defaults(defaults=known, options=options, given=())


def _group(parser: argparse.ArgumentParser, title: str) -> Any:
    groups = [group for group in parser._action_groups if group.title == title]
    if groups:
        return groups[0]
    made = parser.add_argument_group(title)
    # In front of argparse's own.
    parser._action_groups.insert(1, parser._action_groups.pop())
    return made


def add_aliases(parser: argparse.ArgumentParser, aliases: Iterable[Option]) -> None:
    """Add other servers' names to `parser`, hidden in its help. A name that the command uses itself
    keeps that meaning; one that sets fields the command lacks is left out.
    """
    known, options = parser.get_default("defaults") or {}, parser.get_default("options") or {}
    for option in aliases:
        if option.flag in parser._option_string_actions or not set(option.fields) <= set(known):
            continue
        options[option.name] = option
        how: dict[str, Any] = {
            "nargs": {VALUE: None, NOTHING: 0, MAYBE: "?", MANY: "+"}[option.takes]
        }
        parser.add_argument(option.flag, action=Note, option=option, help=argparse.SUPPRESS, **how)


def command_line(config: Any) -> list[str]:
    """Return the flags that describe a configuration, without fields at their defaults: the inverse
    of `configured`.
    """
    line: list[str] = []
    for item in fields(config):
        value = getattr(config, item.name)
        name = own_option(item).flag
        if value == item.default:
            continue
        if isinstance(value, bool):
            line.append(name if value else f"--no-{name[2:]}")
        else:
            for each in value if isinstance(value, tuple) else (value,):
                line += [name, str(each)]
    return line


def own_option(item: "Field[Any]") -> Option:
    """Return the option with a field's own name and flag, which assigns the result of `parsed`."""

    def assign(where: str, text: str) -> dict[str, Any]:
        return {item.name: parsed(item, where, text)}

    flag = f"--{item.metadata['flag'] or item.name.replace('_', '-')}"
    takes = MANY if item.name == "lora_modules" else VALUE  # As vLLM's.
    return Option(flag, (item.name,), assign, NOTHING if kind_of(item) is bool else takes)


def _add(group: Any, item: "Field[Any]", option: Option, default: Any) -> None:
    text, kind = item.metadata["help"], kind_of(item)
    names = [option.flag]
    how: dict[str, Any] = {"action": Note, "option": option}
    how["values"] = tuple(item.metadata["choices"] or ())
    if kind is bool:
        names.append(f"--no-{option.name}")
        how["nargs"] = 0
    elif default not in (None, (), ""):
        text += f" (default: {default})"
    listed = "{" + ",".join(item.metadata["choices"] or ()) + "}"
    if item.metadata["choices"] and len(option.flag + listed) <= _LINE:
        how["metavar"] = listed
    elif item.metadata["choices"]:
        how["metavar"] = "NAME"
        text = f"one of {', '.join(item.metadata['choices'])}: {text}"
    elif kind is not bool:
        how["metavar"] = _METAVARS[kind]
    if option.takes == MANY:
        how["nargs"] = "+"
    group.add_argument(*names, help=text.replace("%", "%%"), **how)


_LINE = 70
"""Most characters of an option and its choices in a line of help."""
_METAVARS = {int: "N", float: "X", str: "TEXT"}


class Note(argparse.Action):
    """Records an option for `gather`: its meaning may depend on other options.

    values  what a shell suggests; () = nothing
    """

    def __init__(
        self,
        option_strings: list[str],
        dest: str,
        option: Option,
        values: tuple[str, ...] = (),
        **how: Any,
    ) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **how)
        self.option, self.values = option, values

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Record one more option."""
        flag = option_string or self.option.flag
        texts = [values] if isinstance(values, str) else values or ["true"]
        if flag.startswith("--no-") and flag != self.option.flag:
            texts = ["false"]
        namespace.given = (
            *namespace.given,
            *(WrittenOption(self.option, text, flag) for text in texts),
        )
