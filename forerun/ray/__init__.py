"""Replicas of one server with Ray Serve: `pip install 'forerun[ray]'`, `forerun serve --replicas
2`, or `serve run forerun.ray.app:builder model=... replicas=2`.

There are two deployments. The front (front.py) receives requests and forwards each whole request to
a replica; a replica (replica.py) is the same application as `forerun serve`, with an engine of its
own. PrefixAffinity (affinity.py) chooses the replica.
"""
