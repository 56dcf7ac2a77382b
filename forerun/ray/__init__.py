"""Replicas of one server by Ray Serve: `pip install 'forerun[ray]'`, `forerun serve --replicas 2`,
or `serve run forerun.ray.app:builder model=... replicas=2`.

Two deployments. The front takes requests and hands each to a replica, whole; a replica is the same
application as `forerun serve`, with an engine of its own. Which replica, PrefixAffinity says.
"""
