"""The version of the package; it imports nothing, so that every room may."""

__version__ = "0.1.0"
