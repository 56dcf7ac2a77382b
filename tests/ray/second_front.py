"""Another front before replicas that are there: `python -m tests.ray.second_front PORT`, which says
its address when it listens. It knows nothing of what the first front has sent.
"""

import sys

import ray
from ray import serve

from forerun.options.config import ServeSettings
from forerun.ray.local import answer
from forerun.serve.server import listen


def main(port):
    """Serve until a signal ends it."""
    settings = ServeSettings(port=port)
    ray.init(address="auto", log_to_driver=False)
    (name,) = serve.status().applications
    handle = serve.get_deployment_handle("Replica", name)
    with listen(settings.host, settings.port) as listening:
        answer(handle, settings, listening, lambda url: print(url, flush=True))


if __name__ == "__main__":
    main(int(sys.argv[1]))
