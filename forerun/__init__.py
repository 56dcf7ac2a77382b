"""Forerun: an LLM inference server whose heart is speculative decoding."""

__version__ = "0.1.0"
