"""The version of the package; imports nothing, so that every package may import it."""

__version__ = "0.1.0"
