"""Ray Serve with replicas of Deltic, until it is told to stop.

    python -m bench.routed.ray_app PORT N --flag value ...

The flags are those of `deltic serve`. A cluster of this machine alone, which ends with this process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve

from deltic.machine import n_usable_cpus
from deltic.ray.app import build


def main(words: list[str]) -> int:
    port, n_replicas, *flags = words
    settings = {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    n_cpus, key = int(settings.pop("threads")), settings.pop("api-key")
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.set())
    ray.init(
        num_cpus=max(n_usable_cpus(), n_cpus * int(n_replicas)),
        include_dashboard=False,
        object_store_memory=100_000_000,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(build({**settings, "api-key": [key], "replicas": int(n_replicas), "num_cpus": n_cpus}), name="deltic")
    told.wait()
    serve.shutdown()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
