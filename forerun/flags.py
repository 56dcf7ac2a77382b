"""Flags of the command line, derived from configuration classes and back."""

import argparse
from collections.abc import Collection
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_args

from forerun.config import AskConfig, EngineConfig, ServeSettings

Config = TypeVar("Config", EngineConfig, ServeSettings, AskConfig)


def configured(kind: type[Config], arguments: argparse.Namespace) -> Config:
    """The configuration that the parsed flags describe; a field without a flag keeps its default.

    Raises ConfigError.
    """
    names = [item.name for item in fields(kind) if item.name in arguments]
    return kind(**{name: getattr(arguments, name) for name in names})


def flags_of(
    kind: type[Any],
    parser: argparse.ArgumentParser,
    title: str,
    without: Collection[str] = (),
    **defaults: Any,
) -> None:
    """One flag per field of a configuration class; `defaults` override the fields' own.

    without  fields that the command decides itself: they get no flag
    """
    group = parser.add_argument_group(title)
    for item in fields(kind):
        if item.name in without:
            continue
        default = defaults.get(item.name, item.default)
        assert default is not MISSING
        names = [f"--{item.metadata['flag'] or item.name.replace('_', '-')}"]
        group.add_argument(*names, dest=item.name, default=default, **_shape(item, default))


def command_line(config: Any) -> list[str]:
    """The flags that describe a configuration: the inverse of `configured`."""
    line: list[str] = []
    for item in fields(config):
        value = getattr(config, item.name)
        name = f"--{item.metadata['flag'] or item.name.replace('_', '-')}"
        if value == item.default:
            continue
        if isinstance(value, bool):
            line.append(name if value else f"--no-{name[2:]}")
        else:
            for each in value if isinstance(value, tuple) else (value,):
                line += [name, str(each)]
    return line


def _shape(item: "Field[Any]", default: Any) -> dict[str, Any]:
    """Argparse's keywords for one field."""
    text = item.metadata["help"]
    kinds = [kind for kind in (get_args(item.type) or (item.type,)) if kind is not type(None)]
    if item.type is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    if default not in (None, (), ""):
        text += f" (default: {default})"
    if isinstance(default, tuple):
        return {"action": _Append, "metavar": "TEXT", "help": text}
    if item.metadata["choices"]:
        return {"choices": item.metadata["choices"], "help": text}
    return {"type": kinds[0], "metavar": _METAVARS[kinds[0]], "help": text}


_METAVARS = {int: "N", float: "X", str: "TEXT"}


class _Append(argparse.Action):
    """Collects a repeated flag into a tuple."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add one more value."""
        setattr(namespace, self.dest, (*(getattr(namespace, self.dest) or ()), values))
