"""Replicas of one server by Ray Serve: `pip install 'forerun[ray]'`, `forerun serve --replicas 2`,
or `serve run forerun.ray:builder model=... replicas=2`.

Two deployments. The front takes requests and hands each to a replica, whole; a replica is the same
application as `forerun serve`, with an engine of its own. Which replica, PrefixAffinity says.
"""

from typing import Any

__all__ = ["application", "builder"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module forerun.ray has no {name}")
    from forerun.ray import app  # noqa: PLC0415

    return getattr(app, name)
