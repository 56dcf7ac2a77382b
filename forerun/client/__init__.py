"""Forerun for Python programs."""
