"""Modules that few tests need, imported by the first that does: workers collect every file."""

from importlib import import_module


class LazyModule:
    """Stands for a module, and imports it when something of it is asked for."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        return getattr(import_module(self._name), attribute)
