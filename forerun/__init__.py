"""Forerun: an LLM inference server built around speculative decoding.

    from forerun import LLM

`LLM` and `AsyncLLM` are loaded on first use; types are in __init__.pyi.
"""

from forerun.version import __version__ as __version__


def __getattr__(name: str) -> object:
    """Import the Python API on first use, so that the command line starts fast."""
    if name == "LLM":
        from forerun.client.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from forerun.client.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
