"""The argument parser: errors as one sentence, and suggestions for unknown names."""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from forerun.errors import ConfigError
from forerun.options.alias import FIELDS
from forerun.options.aliases import OPTIONS, elsewhere
from forerun.options.flags import Option, gather, own_option

MOVED = {
    "speculative-grid": "forerun tune compares settings of speculation",
    "speculative-known-drafts": "--speculative-draft-model-path names a draft",
    "model-shape": "name the shape as the model",
    "out": "--json prints results",
    "author": "the engine that serves writes all answers",
    "simulate": "eval shows what the trainer simulated on its held-out answers",
}
"""Removed options, and their replacements."""


_NAME = re.compile(
    r"--(?P<name>[A-Za-z][\w-]*)(?P<keys>(\.[A-Za-z_][\w-]*)*)(=(?P<value>.*))?", re.DOTALL
)


def usual_names(words: Sequence[str]) -> Iterator[str]:
    """Yield a command line's words with options as they are declared: `--n_ctx` becomes `--n-ctx`
    (llama.cpp, vLLM), and `--name.key VALUE` (vLLM) a JSON object for `--name`, in the place of the
    first. Words behind `--` stay.
    """
    objects: dict[str, dict[str, Any]] = {}
    line: list[str | dict[str, Any]] = []
    rest = iter(words)
    for word in rest:
        match = None if word == "--" else _NAME.fullmatch(word)
        if match is None:
            line += [word, *rest] if word == "--" else [word]
            continue
        name, value = "--" + match["name"].replace("_", "-"), match["value"]
        if not match["keys"]:
            line.append(name if value is None else f"{name}={value}")
            continue
        if name not in objects:
            line += [name, objects.setdefault(name, {})]
        *outer, last = match["keys"][1:].split(".")
        place = objects[name]
        for key in outer:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{word} is within {key}, which has a value of its own.")
        place[last] = _member(next(rest, "true") if value is None else value)
    yield from (word if isinstance(word, str) else json.dumps(word) for word in line)


def _member(text: str) -> Any:
    """Return the JSON value that `text` is; text that is none is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts no abbreviations and does not print the usage with every
    error.
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        how.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **how | {"allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message."""
        if message.startswith("argument COMMAND: invalid choice: "):
            word, *commands = re.findall("'([^']*)'", message)
            for near in difflib.get_close_matches(word, commands, n=1):
                message = f"there is no command {word!r}; did you mean {near}?"
        end = "" if message.endswith((".", "?")) else "."
        raise ConfigError(f"{message}{end} See: {self.prog} --help")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse as argparse does. If there are unknown names or superfluous words, raises one
        ConfigError with a line for each, and for each invalid option.
        """
        line = usual_names(sys.argv[1:] if args is None else args)
        parsed, rest = self.parse_known_args([*line], namespace)
        options = vars(parsed).get("options") or {}
        flags = [word.split("=")[0] for word in rest if word.startswith("-") and word != "-"]
        command = vars(parsed).get("command")
        if not flags:
            rest = self._placed(parsed, rest)
        problems = [unknown(flag, options, command, self._own(command)) for flag in flags]
        if rest and not flags:  # Else they are values of these.
            words = self._command(command)
            takes = words is None or words._get_positional_actions()
            help = "put a text of several words between quotes"
            problems.append(
                f"{rest[0]!r} is one word too many; "
                f"{help if takes else f'forerun {command} takes options only'}."
            )
        if problems:
            try:
                gather(vars(parsed).get("given", ()))
            except ConfigError as error:
                problems += str(error).splitlines()
            raise ConfigError("\n".join(problems))
        return parsed

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the options that a word may mean: `-n4` means -n, but `-f` is not an abbreviation
        of -fa, as argparse would assume, nor is `-cnv` the value nv of -c.
        """
        found = super()._get_option_tuples(option_string)
        return [
            one
            for one in found
            if option_string.startswith(one[1]) and not (one[2] or "").lstrip("-")[:1].isalpha()
        ]

    def _placed(self, parsed: argparse.Namespace, rest: list[str]) -> list[str]:
        """Assign words after flags to the positional arguments that are still empty: argparse
        matches those only once, so that it misses TEXT in `run MODEL --raw TEXT`. Returns the words
        that are left over.
        """
        command = self._command(vars(parsed).get("command"))
        for place in command._get_positional_actions() if command else ():
            if place.nargs == "*":
                setattr(parsed, place.dest, [*(getattr(parsed, place.dest) or []), *rest])
                return []
            if rest and place.nargs == "?" and getattr(parsed, place.dest) is None:
                setattr(parsed, place.dest, rest[0])
                rest = rest[1:]
        return rest

    def _command(self, name: str | None) -> argparse.ArgumentParser | None:
        parsers = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
        return parsers[0].choices[name] if name and parsers else None

    def _own(self, command: str | None) -> list[str]:
        """Return a command's flags that are not options of the engine or the server."""
        parser = self._command(command)
        flags = parser._option_string_actions if parser else ()
        return [flag.lstrip("-") for flag in flags if flag.startswith("--")]


def unknown(
    flag: str, options: dict[str, Option], command: str | None = None, own: Sequence[str] = ()
) -> str:
    """Return the error message for a name that a command does not have.

    options  the command's options of the configuration, by name
    own      names of its other flags
    """
    of = f" of forerun {command}" if command else ""
    name = flag.lstrip("-")
    if name in MOVED:
        return f"There is no option {flag}{of}; {MOVED[name]}."
    if name in {option.name for option in OPTIONS} | {
        own_option(item).name for item in FIELDS.values()
    }:
        if name in ("host", "port") and "url" in own:
            return f"There is no option {flag}{of}; use --url for the server's address."
        return f"There is no option {flag}{of}; another command has it."
    close = difflib.get_close_matches(name, own, n=1, cutoff=0.75)
    close = close or [one for one in own if name.endswith(f"-{one}")]
    if close and close[0] not in options:
        return f"There is no option {flag}{of}; did you mean --{close[0]}?"
    close = difflib.get_close_matches(name, list(options), n=1, cutoff=0.6)
    if not close:
        return f"There is no option {flag}{of}."
    near = options[close[0]]
    others = elsewhere(near.fields[0]) if len(near.fields) == 1 else []
    others = [one for one in others if not one.startswith(f"{near.flag} ")]
    own = own_option(FIELDS[near.fields[0]]).flag if near.fields else near.flag
    same = f", the same as {own}" if near.fields and own != near.flag else ""
    called = f" (elsewhere called {', '.join(others)})" if others else ""
    return f"There is no option {flag}{of}; did you mean {near.flag}{same}{called}?"
