"""`deltic run --ray`: servers as actors of a cluster, among which the requests of a file are spread.

Actors, and no application of Ray Serve: they end with the run, however it ends, and need no port. One that
dies is started again by Ray, and its requests go to the others meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import ray
from ray.exceptions import RayActorError, RayError

from deltic.commands.endpoint import EndpointError, ServerFailed
from deltic.config import EngineConfig, ModelConfig, ServerConfig
from deltic.models.checkpoint import model_name
from deltic.ray.affinity import key_of, ranked
from deltic.ray.replica import Ask, Hosted
from deltic.ray.settings import Settings

log = logging.getLogger("deltic.ray")

MAX_STARTS = 3
"""Starts of an actor in a row, that fail, before it is given up."""

TIMES = 1000
"""Requests that an actor has at once: as many as are sent to it."""


@dataclass
class ActorReply:
    """An answer that is there."""

    status: int
    headers: dict[str, str]
    body: bytes

    async def read(self) -> bytes:
        """The whole body."""
        return self.body


class Actors:
    """The servers of a run. Asked as an `Endpoint` is."""

    url = "the Ray cluster"

    def __init__(self, given: Settings, n: int, options: Mapping[str, float]) -> None:
        """n: of them. options: Ray's, of each."""
        actor = ray.remote(Hosted).options(
            max_concurrency=TIMES, max_restarts=-1, max_task_retries=0, scheduling_strategy="SPREAD", **options
        )
        self._actors = {f"{i}": actor.remote(given) for i in range(n)}
        self._loads: dict[str, int] = {}  # of those that take requests
        self._changed = asyncio.Event()
        self._failure = ""
        self._starts = {name: asyncio.create_task(self._start(name)) for name in self._actors}

    async def first(self) -> None:
        """Returns when one takes requests. Raises ServerFailed when none ever will."""
        while not self._loads:
            if not self._starts:
                raise ServerFailed(self._failure)
            self._changed.clear()
            await self._changed.wait()

    async def _start(self, name: str) -> None:
        for _ in range(MAX_STARTS):
            try:
                await self._actors[name].start.remote()
            except RayError as error:
                self._failure = f"no server could be started on {self.url}: {getattr(error, 'cause', None) or error}"
                if not isinstance(error, RayActorError):
                    break  # the model cannot be served
                await asyncio.sleep(1.0)
            else:
                self._loads[name] = 0
                break
        del self._starts[name]
        self._changed.set()

    def _lose(self, name: str) -> None:
        """An actor has died: it takes no more requests until it has been started again."""
        if self._loads.pop(name, None) is not None:
            log.warning("a server on %s died, and is started again; its requests go to the others", self.url)
            self._starts[name] = asyncio.create_task(self._start(name))

    async def open(self, method: str, path: str, body: object) -> ActorReply:
        """The answer, whatever its status.

        Raises EndpointError when the server died, ServerFailed when none is left.
        """
        await self.first()
        data = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json")]
        name = ranked(key_of(headers, data), self._loads)[0]
        self._loads[name] += 1
        try:
            ask = Ask(method, path, data, headers)
            status, given, answer = await self._actors[name].answer.remote(ask)
        except RayError as error:  # of an actor that died, or that could not be started again
            self._lose(name)
            raise EndpointError(f"{self.url}: a server died over a request: {error}") from None
        finally:
            if name in self._loads:
                self._loads[name] -= 1
        named = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in given}
        return ActorReply(status, named, answer)

    def close(self) -> None:
        """Ends the actors."""
        for start in self._starts.values():
            start.cancel()
        for actor in self._actors.values():
            ray.kill(actor)


def sizes(engine: EngineConfig, nodes: list[dict[str, float]]) -> tuple[Mapping[str, float], int]:
    """Ray's options of an actor, and how many the nodes hold. nodes: the resources of each.

    With a GPU in the cluster an actor has `--tensor-parallel` of them, else `--threads` CPUs, and where that
    is not given all those of the smallest node.
    """
    on_gpu = engine.device == "cuda" or (engine.device is None and any(node.get("GPU") for node in nodes))
    if on_gpu:
        options, name, each = {"num_gpus": engine.tensor_parallel, "num_cpus": 1}, "GPU", engine.tensor_parallel
    else:
        each = engine.threads or int(min((node["CPU"] for node in nodes if node.get("CPU")), default=1))
        options, name = {"num_cpus": each, "num_gpus": 0}, "CPU"
    return options, max(1, sum(int(node.get(name, 0) // each) for node in nodes))


@contextlib.asynccontextmanager
async def cluster(address: str, engine: EngineConfig, n: int | None) -> AsyncIterator[tuple[Actors, str]]:
    """Actors with this engine, one of them at least ready, and the name of their model.

    address: of the cluster, or `local` for one of this machine's. n: actors; by default as many as there is
    room for. Raises ServerFailed, ConfigError.
    """
    try:
        ray.init(address=address, include_dashboard=False if address == "local" else None, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ServerFailed(f"--ray {address}: {error}") from None
    actors = None
    try:
        options, room = sizes(engine, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        given = Settings(((engine, ModelConfig()),), ServerConfig()).placed(options["num_cpus"], options["num_gpus"])
        actors = Actors(given, n or room, options)
        await actors.first()
        adapters = [*engine.adapters]
        yield actors, adapters[0] if len(adapters) == 1 else model_name(engine)
    finally:
        if actors is not None:
            actors.close()
        ray.shutdown()
