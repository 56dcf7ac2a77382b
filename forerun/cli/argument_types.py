"""Values of flags, read from text: ArgumentTypeError is shown with the flag. Flags that have no
effect beside others are refused.
"""

import argparse
from collections.abc import Mapping

from forerun.errors import ConfigError


def positive(text: str) -> int:
    """Read a whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def rate(text: str) -> float:
    """Read a number above 0, inf included."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, or inf")
    return value


def share(text: str) -> float:
    """Read a number above 0, 1 at most."""
    if (value := rate(text)) > 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is above 1")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers from 1 on, with commas between them."""
    return tuple(map(positive, text.split(",")))


def temperatures(text: str) -> tuple[float, ...]:
    """Return the temperatures in `text`, comma-separated. Raises ArgumentTypeError outside 0 to
    100.
    """
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 0,0.8") from None
    if not all(0 <= value <= 100 for value in values):  # False for NaN.
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 100")
    return values


def refuse_beside(
    arguments: argparse.Namespace, beside: str, usual: Mapping[str, object], instead: str = ""
) -> None:
    """Raise ConfigError if one of a command's flags is given that has no effect `beside` others.

    usual    by name of the flag, its default
    instead  the rest of the sentence: what it is for
    """
    for name, default in usual.items():
        if getattr(arguments, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has no effect {beside}; leave it out{instead}.")
