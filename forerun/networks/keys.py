"""Typed look-ups in a model's configuration that record which keys were read.

Keys that were not read are then rejected, unless they are known to have no effect: a key that
changes the computation must never be ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from forerun.errors import ModelError

_SHOWN = 60
MOST_LAYERS = 1024
"""Most layers of any model; readers use names and specs of layers before the tensors of a
checkpoint show their number.
"""
_LAYERS = ("_layers", "block_count")
"""Suffixes of keys that count layers."""


class Keys:
    """One mapping of names to values; a value of None counts as absent.

    prefix  what precedes a name in messages: "llama." or "config.json: "
    """

    def __init__(self, values: Mapping[str, Any], prefix: str) -> None:
        self.prefix = prefix
        self._values = {name: value for name, value in values.items() if value is not None}
        self._names = values.keys()
        self._asked: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether the key is present, even as null."""
        return name in self._names

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value unchanged, or the default if the key is missing or null. The key counts
        as read.
        """
        self._asked.add(name)
        return self._values.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number, smaller than 2**62, and not above MOST_LAYERS if it counts layers;
        given as such or as a list of equal ones. The default if the key is missing. Raises
        ModelError for another value, or if it is missing without a default.
        """
        value = self._present(name, default)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 62:
            raise self.unfit(name, value, "one whole number for all layers")
        if value > MOST_LAYERS and name.endswith(_LAYERS):
            raise self.unfit(name, value, f"at most {MOST_LAYERS} layers")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Return a finite number, smaller than 1e30; the default if the key is missing. Raises
        ModelError for another value, or if it is missing without a default.
        """
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise self.unfit(name, value, "a real number")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; the default if the key is missing. Raises ModelError for another value,
        or if it is missing without a default.
        """
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self.unfit(name, value, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false; the default if the key is missing. Raises ModelError for another
        value.
        """
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.unfit(name, value, "true or false")
        return value

    def layers(self, name: str) -> tuple[int, ...]:
        """Return a list of layers, not empty. Raises ModelError for another value, or if it is
        missing.
        """
        value = self._present(name, None)
        if not isinstance(value, list) or not value or any(type(each) is not int for each in value):
            raise self.unfit(name, value, "a list of layers")
        return tuple(value)

    def require(self, name: str, value: int | float | str) -> None:
        """Raise ModelError if the key is present with another value than `value`."""
        actual = self.get(name, value)
        if isinstance(actual, bool) or actual != value:
            raise self.unfit(name, actual, f"{value!r} to run here")

    def unread(self) -> list[str]:
        """Return the names of the keys that were not read, sorted."""
        return sorted(self._values.keys() - self._asked)

    def refuse_the_rest(self, harmless: Callable[[str, Any], bool]) -> None:
        """Raise ModelError naming the unread keys that are not harmless."""
        culprits = [
            f"{self.prefix}{name[:_SHOWN]} = {shown(self._values[name])}"
            for name in self.unread()
            if not harmless(name, self._values[name])
        ]
        if culprits:
            raise ModelError(
                "these settings may change the model and are not supported: "
                + ", ".join(culprits[:8])
            )

    def unfit(self, name: str, value: Any, requirement: str) -> ModelError:
        """Return the error that `name` has this value and must be `requirement`; does not raise
        it.
        """
        return ModelError(f"{self.prefix}{name} is {shown(value)}; it must be {requirement}")

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"{self.prefix}{name} is missing")
        return value


def shown(value: Any) -> str:
    """Return a value as text for a message, cut to a readable length."""
    text = repr(value[:_SHOWN]) if isinstance(value, str | list) else repr(value)
    return text[:_SHOWN] + ("..." if len(text) > _SHOWN else "")
