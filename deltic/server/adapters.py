"""The LoRA adapters of one model: which names there are, and which key of the engine each means.

Names are here; the engine knows contents, by key. Those of --lora it has when it is ready. Others come and go
by requests (api/models.py), and are loaded again into an engine that was started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deltic.engine.events import AdapterLoaded
from deltic.engine.messages import EngineInfo
from deltic.host.client import EngineClient, EngineUnavailable
from deltic.server.errors import ApiError
from deltic.server.metrics import AdapterNumbers

log = logging.getLogger("deltic.server")


@dataclass(eq=False, slots=True)
class ServedAdapter:
    """Meaning of one adapter's name at the moment."""

    name: str
    path: str
    """Path that the engine is told."""
    parent: str
    """The model's name."""
    key: bytes | None = None
    """Hash of the adapter's content; None: the engine has none yet."""
    is_unloaded: bool = False
    numbers: AdapterNumbers = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = AdapterNumbers(self.name)

    def current_key(self) -> bytes:
        """The key of a request that goes to the engine now.

        Raises EngineUnavailable while it is loaded again, ApiError (404) once it is unloaded.
        """
        if self.is_unloaded:
            raise ApiError(404, f"the adapter {self.name!r} was unloaded", param="model", code="model_not_found")
        if self.key is None:
            raise EngineUnavailable(f"the adapter {self.name!r} is being loaded. Try again in a few seconds.")
        return self.key


class AdapterRefused(ValueError):
    """An adapter cannot be loaded; the message says why."""


class ServedAdapters:
    """The adapters of one model, by name. One is loaded at a time, of all models."""

    def __init__(
        self, client: EngineClient, parent: str, taken: Callable[[str], str | None], lock: asyncio.Lock
    ) -> None:
        """parent: the model's name. taken: what has a name already, in words. lock: of all models that share
        names.
        """
        self._client = client
        self._parent = parent
        self._taken = taken
        self._lock = lock
        self._given = {name: full_path(str(path)) for name, path in client.config.adapters.items()}
        self._by_name = {name: ServedAdapter(name, path, parent) for name, path in self._given.items()}
        self._reloading: asyncio.Task[None] | None = None
        client.on_ready = self._take_up
        if client.info is not None:
            self._take_up(client.info)

    @property
    def may_come(self) -> bool:
        """True if the model ever has an adapter: else a request's name need not be looked at before its model
        is.
        """
        return bool(self._given) or self._client.config.allow_lora_loading

    @property
    def most(self) -> int:
        """Number of adapters that the engine holds at once; names of one content share a place."""
        return self._client.info.max_loras if self._client.info else 0

    @property
    def n_held(self) -> int:
        """Number of the engine's places that a name has."""
        return len({adapter.key for adapter in self._by_name.values()} - {None})

    def all(self) -> list[ServedAdapter]:
        """Adapters, in the order in which their names came."""
        return list(self._by_name.values())

    def find(self, name: str) -> ServedAdapter | None:
        return self._by_name.get(name)

    async def load(self, name: str, path: str, *, replaces: bool) -> None:
        """Gives a name to the adapter at `path`. replaces: requests with this name have the adapter that it
        means now until the new one is there.

        Raises AdapterRefused, EngineUnavailable.
        """
        async with self._lock:
            if self._client.state != "ready":
                raise EngineUnavailable(self._client.why_unavailable())
            old = self._by_name.get(name)
            if old is not None and not replaces:
                message = f"the adapter {name!r} has already been loaded. Set load_inplace to true to replace it, or unload it first."
                raise AdapterRefused(message)
            if old is None and (other := self._taken(name)) is not None:
                raise AdapterRefused(f"{name!r} is {other}. Give the adapter another name.")
            loaded = await self._client.load_adapter(path)
            if loaded.error is not None:
                raise AdapterRefused(loaded.error)
            if old is None:
                self._by_name[name] = ServedAdapter(name, path, self._parent, loaded.key)
            else:
                before, old.key, old.path = old.key, loaded.key, path
                if before is not None:
                    self._client.drop_adapter(before)
        size = f"rank {loaded.rank}, {loaded.n_bytes / 1e6:.1f} MB"
        log.info("adapter %s of %s %s: %s (%s)", name, self._parent, "replaced" if old else "loaded", path, size)

    async def unload(self, name: str) -> bool:
        """Forgets a name; whether there was one. Requests that have its adapter run to their end."""
        async with self._lock:
            adapter = self._by_name.pop(name, None)
            if adapter is None:
                return False
            self._forget(adapter)
        log.info("adapter %s of %s unloaded", name, self._parent)
        return True

    def _forget(self, adapter: ServedAdapter) -> None:
        adapter.is_unloaded = True
        if adapter.key is not None:
            self._client.drop_adapter(adapter.key)

    def _take_up(self, info: EngineInfo) -> None:
        """An engine is ready, which has those of --lora and no others."""
        earlier = {name: adapter.key for name, adapter in self._by_name.items() if adapter.key is not None}
        for adapter in self._by_name.values():
            adapter.key = info.adapters.get(adapter.name) if adapter.path == self._given.get(adapter.name) else None
            self._tell_changed(adapter, earlier.get(adapter.name))
        for name, key in info.adapters.items():
            now = self._by_name.get(name)
            if now is None or now.path != self._given.get(name):  # unloaded, or replaced, since the start
                self._client.drop_adapter(key)
        if any(adapter.key is None for adapter in self._by_name.values()):
            self._reloading = asyncio.get_running_loop().create_task(self._reload(earlier))

    async def _reload(self, earlier: dict[str, bytes]) -> None:
        """Loads again what the last engine had. earlier: its keys."""
        async with self._lock:
            for adapter in self.all():
                if adapter.key is not None:
                    continue
                try:
                    loaded: AdapterLoaded = await self._client.load_adapter(adapter.path)
                except EngineUnavailable:  # the next one begins anew
                    return
                if loaded.error is not None:
                    log.error("adapter %s of %s is not there any more: %s", adapter.name, self._parent, loaded.error)
                    self._by_name.pop(adapter.name)
                    self._forget(adapter)
                    continue
                adapter.key = loaded.key
                self._tell_changed(adapter, earlier.get(adapter.name))

    def _tell_changed(self, adapter: ServedAdapter, before: bytes | None) -> None:
        if before is not None and adapter.key not in (None, before):
            log.warning("adapter %s of %s has changed on disk: %s", adapter.name, self._parent, adapter.path)


def full_path(path: str) -> str:
    """A path of a request as the engine is told it. Raises AdapterRefused."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:  # the home of nobody
        raise AdapterRefused(f"{path}: {error}") from None
