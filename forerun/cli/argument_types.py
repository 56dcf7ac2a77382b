"""Converters from the text of a flag to its value: an ArgumentTypeError is shown with the flag.
Also refuses flags that have no effect together with others.
"""

import argparse
from collections.abc import Mapping

from forerun.errors import ConfigError


def positive(text: str) -> int:
    """Return the whole number in `text`. Raises ArgumentTypeError if it is below 1 or not a
    number.
    """
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def rate(text: str) -> float:
    """Return the number in `text`, which may be inf. Raises ArgumentTypeError if it is not
    above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, or inf")
    return value


def share(text: str) -> float:
    """Return the number in `text`. Raises ArgumentTypeError if it is not above 0 and at most 1."""
    if (value := rate(text)) > 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is above 1")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Return the comma-separated whole numbers in `text`. Raises ArgumentTypeError for one
    below 1.
    """
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
    """Raise ConfigError if one of a command's flags is given that has no effect together with
    `beside`.

    usual    the default of each such flag, by name
    instead  the end of the message: what the flag is for
    """
    for name, default in usual.items():
        if getattr(arguments, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has no effect {beside}; leave it out{instead}.")
