"""Forerun: an LLM inference server built around speculative decoding.

    from forerun import LLM

`LLM` and `AsyncLLM` are loaded on first use; types are in __init__.pyi.
"""

from forerun.version import __version__ as __version__


def __getattr__(name: str) -> object:
    """Load the Python API late: the command line should answer at once."""
    if name == "LLM":
        from forerun.client.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from forerun.client.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
