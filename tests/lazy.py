"""Modules that few tests need, imported by the first that does: workers collect every file."""

from importlib import import_module


class LazyModule:
    """Stands for a module, and imports it when something public of it is read: pytest reads
    whatever it collects for names of its own.
    """

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
