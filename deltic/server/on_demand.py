"""Models that are loaded when a request names them, and unloaded when another needs their memory or nobody
has asked for them for a while.

Each has an engine process of its own, so that others answer while one loads, and its memory is free once it
has ended. One task, `_keep`, starts and stops them, one at a time, in the order in which they were asked for.
Before it starts one it knows what that needs, as a server with that model alone would plan it, and unloads
others until there is as much: the idle ones first, of these the one that was used least recently. One that
answers is never ended: it takes no new requests until it is idle, and then makes way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client.core import Metric
from starlette.types import Receive

from deltic.config import BUILT_IN, ConfigError, EngineConfig, ServerConfig
from deltic.engine.events import Needs
from deltic.engine.turns import share_of
from deltic.host.client import EngineClient, EngineFailed, QueueFull
from deltic.host.launch import Allowance
from deltic.host.supervisor import PROGRAM, EngineHost, needs_of
from deltic.machine import free_memory_bytes
from deltic.models.checkpoint import speaks
from deltic.models.fields import CheckpointError
from deltic.server.chat.generation import queue_full, timed_out
from deltic.server.errors import ApiError
from deltic.server.limits import Ticket
from deltic.server.metrics import COUNTER, GAUGE, Histogram, labelled, plain
from deltic.server.offered import CACHE, ModelsOnDisk, Offered, duration
from deltic.server.transport import unless_disconnected

log = logging.getLogger("deltic.server")

LOOK_S = 1.0
"""Seconds for which what was found on the disk is not looked for again, whoever asks for what."""

POLL_S = 0.25
"""Seconds between two looks at whether a model that is to make way has become idle, where nothing tells."""

RETRY_AFTER_S = 10
"""Seconds after which a request that has waited for a load too long may come again."""


def lets_change(config: ServerConfig, ticket: Ticket) -> bool:
    """Returns whether who asks may fetch models and delete them, for all."""
    is_open = CACHE in config.models_from and config.allow_pull
    return is_open and (ticket.account is None or ticket.account.is_admin)


class LoadFailed(RuntimeError):
    """A model cannot be loaded; the message says why."""


class OnDemand:
    """The models of one server, each loaded while it is of use. Everything runs in the event loop."""

    open: Callable[[Offered], Awaitable[None]]
    """Makes what routes need of a model. Raises ConfigError. Set before `start`."""
    close: Callable[[str], object]
    """Takes that away, by the name of a model that is gone. Set before `start`."""

    def __init__(self, config: ServerConfig, program: tuple[str, ...] = PROGRAM) -> None:
        """program: as of an EngineHost. Raises ConfigError."""
        self._config, self._program = config, program
        self.common = EngineConfig()
        """Settings of the models that are found, but for those that are a model's own."""
        self._disk = ModelsOnDisk(config.models_from)
        try:
            self._keep_s = duration(config.keep_alive)
        except ValueError as error:
            raise ConfigError(f"--keep-alive {error}") from None
        self.models: dict[str, Offered] = {}
        """Models by name: those of the command line, then what was found, and last the built-in one."""
        self._room: dict[str, int] = {}  # bytes that were free on each device while nothing was loaded
        self._limits: dict[str, int] = {}
        self._looked_s = -math.inf
        self._looking, self._opening = asyncio.Lock(), asyncio.Lock()
        self._queue: list[Offered] = []
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.n_tenants = 1
        """Number of tenants among whom the places to wait are shared out."""
        self._n_waiting: Counter[str] = Counter()  # by tenant
        self.n_loads: Counter[str] = Counter()
        self.n_failures: Counter[str] = Counter()
        self.n_unloads: Counter[tuple[str, str]] = Counter()
        self._load_s = Histogram("deltic_model_load_seconds", "Time from the start of a load to its end.")

    def give(self, names: tuple[str, ...], client: EngineClient) -> None:
        """Offers a model of the command line, under its names; the settings of the first hold for those that
        are found, but for what is a model's own. The built-in one is what there is where no other is named.
        """
        config = client.config
        is_toy = config.model == BUILT_IN and config.dummy is None
        if not self.models:
            self.common = replace(config, model="", revision=None, tokenizer=None, dummy=None, lora=())
        keep_s = self._keep_s if is_toy else math.inf
        self.models[names[0]] = self._offer(Offered(names, client, config, keep_s, is_given=not is_toy))

    async def start(self) -> None:
        """Looks at the disk, and loads the models of the command line, in their order. Raises CheckpointError
        for a directory that is none.
        """
        await self.look()
        for model in self.models.values():
            if model.is_given:
                self.load(model)
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self, drain_s: float = 0.0) -> None:
        """Ends all engines, as `EngineHost.stop` does."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for model in self.models.values():
            _settle(model, LoadFailed("the server is shutting down"))
        hosts = [model.host for model in self.models.values() if model.host is not None]
        await asyncio.gather(*(host.stop(drain_s) for host in hosts))

    def kill(self) -> None:
        """Ends all engine processes at once."""
        for model in self.models.values():
            if model.host is not None:
                model.host.kill()

    # What there is.

    async def look(self, now: bool = False) -> None:
        """Takes note of what is on the disk, unless it just has: those who ask meanwhile share one look. now:
        something has come. Raises CheckpointError.
        """
        async with self._looking:
            if not now and time.monotonic() - self._looked_s < LOOK_S:
                return
            try:
                found = await asyncio.to_thread(self._disk.find, self.common)
            except (ValueError, OSError) as error:
                if self._keeper is None:  # at the start
                    raise
                log.warning("the models on the disk cannot be looked at: %s", error)
                return
            finally:
                self._looked_s = time.monotonic()
        for name, (config, short) in found.items():
            known = self.models.get(name)
            if known is None:
                self.models[name] = self._offer(self._new(name, config, short))
            elif known.is_found and known.config.model != config.model and known.host is None:
                known.config, known.needs, known.is_open = config, None, False  # another revision
        for name, model in list(self.models.items()):
            if name not in found and model.is_found and model.host is None and model.attempt is None:
                self.close(self.models.pop(name).name)
            elif not model.is_found and not model.is_given:  # the built-in one
                self.models[name] = self.models.pop(name)

    async def delete(self, model: Offered) -> None:
        """Deletes the files of a model, which is unloaded first.

        Raises ApiError: 400 for one that is not from the download cache, 409 while it loads or answers, 500
        where its files could not be deleted.
        """
        async with self._looking:  # nothing is found meanwhile
            path = model.config.model
            gone = await asyncio.to_thread(self._disk.removal, path, self.common) if model.is_found else None
            if gone is None:
                message = (
                    f"{model.name!r} does not come from the download cache. Its files are not this server's to delete."
                )
                raise ApiError(400, message, param="model", code="not_in_cache")
            while model.host is not None or model.attempt is not None:
                if model.is_busy or model.attempt is not None:
                    message = f"{model.name!r} loads or answers. Delete it when it is idle: GET /v1/models has the state of each."
                    raise ApiError(409, message, param="model", code="model_in_use")
                self.keep(model, 0.0)
                await asyncio.sleep(POLL_S / 10)
            self.close(self.models.pop(model.name).name)
            self._looked_s = -math.inf
            try:
                await asyncio.to_thread(gone.run)
            except CheckpointError as error:
                log.warning("%s", error)
                raise ApiError(500, f"{model.name!r} could not be deleted. The server's log says why.") from None
            log.info("deleted %s: %.2f GB are free again", model.name, gone.n_bytes / 1e9)

    def _new(self, name: str, config: EngineConfig, short: tuple[str, ...]) -> Offered:
        client = EngineClient(config, self._config.max_queue, name=name)
        return Offered((name,), client, config, self._keep_s, is_found=True, short=short)

    def _offer(self, model: Offered) -> Offered:
        model.client.state, model.kind = "unloaded", "speech" if speaks(model.config) else "text"
        model.client.wake = partial(self._awake, model)
        return model

    def called(self, name: str) -> Offered | None:
        """The model of this name, as far as it was found."""
        for said in (name, name.removesuffix(":latest")):
            for model in self.models.values():
                if said in model.names or said.lower() in model.short:
                    return model
        return None

    async def find(self, name: str) -> Offered:
        """The model of this name, which may have come after the last look at the disk. Raises ApiError
        (404).
        """
        if (model := self.called(name)) is None:
            await self.look()
            model = self.called(name)
        if model is None:
            known = ", ".join(map(repr, self.models)) or "none"
            message = f"no model {name!r} is on this server's disk, which has: {known}. deltic pull fetches one."
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    async def default(self, kind: str) -> Offered:
        """The model of a request that names none: the first of the command line, else the one that was used
        last, else the only one. Raises ApiError (404).
        """
        if not self.models:
            await self.look()
        fitting = [model for model in self.models.values() if model.kind == kind]
        fitting = fitting or list(self.models.values())  # which will refuse
        # The built-in one, which is neither given nor found, is meant where there is no other.
        fitting = [model for model in fitting if model.is_given or model.is_found] or fitting
        given = [model for model in fitting if model.is_given]
        used = sorted((model for model in fitting if model.used_s), key=lambda model: -model.used_s)
        chosen = given[:1] or used[:1] or (fitting if len(fitting) == 1 else [])
        if not chosen:
            names = ", ".join(map(repr, self.models)) or "none"
            message = f"the request names no model, and this server has several or none: {names}. Name one."
            raise ApiError(404, message, param="model", code="model_not_found")
        return chosen[0]

    def told_of(self, name: str | None) -> str:
        """Says what a request for this model waits for."""
        model = None if name is None else self.called(name)
        return "waiting for the model" if model is None else f"{model.name} {model.progress()}"

    # Requests.

    async def use(self, model: Offered, ticket: Ticket, receive: Receive | None, n_bytes: int) -> None:
        """Has a model stay loaded until the ticket ends. Waits where it has to be loaded first; its failure
        is that of the request.

        receive: tells that the client has left; None: nobody does. n_bytes: of the body. Raises ApiError: 429
        where too many wait, 503 where it takes too long or fails, 504; ClientDisconnect.
        """
        if ticket.leave_model is not None:  # it has it
            return
        if model.takes_requests:
            model.n_users += 1
        else:
            await self._wait(model, ticket, receive, n_bytes)
        model.used_s, model.keep_s = time.monotonic(), self._usual_s(model)
        ticket.leave_model = partial(self._leave, model)

    def _leave(self, model: Offered) -> None:
        model.n_users -= 1
        model.used_s = time.monotonic()
        self._changed.set()

    async def _wait(self, model: Offered, ticket: Ticket, receive: Receive | None, n_bytes: int) -> None:
        """Waits until the model is loaded, and this request one of its users. Raises as `use`."""
        most, tenant = max(1, self._config.max_queue), ticket.turns
        n_waiting = self._n_waiting.total()
        if n_waiting >= most and self._n_waiting[tenant] >= share_of(most, self.n_tenants):
            raise queue_full(QueueFull(n_waiting, RETRY_AFTER_S))
        ticket.hold_body(n_bytes)
        left_s = ticket.left_s()
        within_s = min(filter(None, (self._config.load_timeout_s, left_s, ticket.queue_timeout_s)), default=None)
        load = self._ask(model)
        model.n_waiting += 1
        self._n_waiting[tenant] += 1
        is_over = False
        try:
            async with asyncio.timeout(None if ticket.is_batch else within_s):
                waiting = asyncio.shield(load)
                await (waiting if receive is None else unless_disconnected(receive, waiting))
            is_over = True
        except TimeoutError:
            waited_s = time.monotonic() - ticket.started_s
            if left_s is not None and not ticket.left_s():
                raise timed_out(waited_s) from None
            message = (
                f"{model.name!r} {model.progress()}; the request has waited {waited_s:.0f} s for it; try again later"
            )
            raise ApiError(503, message, code="model_loading", headers={"retry-after": str(RETRY_AFTER_S)}) from None
        except LoadFailed as error:
            # Sent again, it would most likely fail again.
            headers = {"x-should-retry": "false"}
            raise ApiError(
                503, f"{model.name!r} cannot be loaded: {error}", code="load_failed", headers=headers
            ) from None
        finally:
            ticket.drop_body()
            self._n_waiting[tenant] -= 1
            if not load.done() or load.exception() is not None:
                model.n_waiting -= 1
            elif not is_over:  # it has become a user, and is gone
                model.n_users -= 1
            self._changed.set()

    async def _awake(self, model: Offered) -> None:
        """Loads a model for who asks its client. Raises EngineFailed."""
        try:
            self.load(model)
            await asyncio.shield(self._ask(model))
        except LoadFailed as error:
            raise EngineFailed(f"{model.name!r} cannot be loaded: {error}") from None

    async def open_parts(self, model: Offered) -> None:
        """Opens what routes need of a model without its engine. Raises ConfigError."""
        async with self._opening:
            if not model.is_open:
                await self.open(model)
                model.is_open = True

    def _usual_s(self, model: Offered) -> float:
        """Seconds that a model stays where no request says."""
        return math.inf if model.is_given else self._keep_s

    def load(self, model: Offered) -> None:
        """Has a model loaded, though no request waits for it."""
        model.stays_asked, model.keep_s = not model.takes_requests, self._usual_s(model)
        self._ask(model)

    def keep(self, model: Offered, seconds: float) -> None:
        """Has a model stay so long after its last request: 0, it is unloaded once it is idle."""
        model.keep_s = seconds
        if not seconds:
            model.stays_asked = False
        self._changed.set()

    def _ask(self, model: Offered) -> asyncio.Future[None]:
        """The load of a model, which is the queue's last where it is not in it."""
        if model.attempt is None:
            model.attempt = asyncio.get_running_loop().create_future()
            # A failure that nobody waits for is none of asyncio's.
            model.attempt.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._queue.append(model)
            self._changed.set()
        return model.attempt

    # Loads.

    async def _keep(self) -> None:
        """Loads and unloads, until it is cancelled."""
        while True:
            self._changed.clear()
            try:
                if self._queue:
                    await self._serve_first()
                    continue
                now_s = time.monotonic()
                loaded = [model for model in self.models.values() if model.is_up]
                idle = [model for model in loaded if not model.is_busy]
                if gone := next((model for model in idle if model.expires_s <= now_s), None):
                    await self._unload(gone, "idle", "nobody has asked for it")
                    continue
                # Nobody tells when the engine has ended the last of what its requests have left.
                ending = [POLL_S for model in loaded if model.is_busy and not model.n_users]
                wait_s = min([*ending, *(model.expires_s - now_s for model in idle)], default=math.inf)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), None if wait_s == math.inf else wait_s)
            except Exception:
                log.exception("the models could not be looked after")
                await asyncio.sleep(POLL_S)

    async def _serve_first(self) -> None:
        """Loads the first of the queue, if anybody still waits for it."""
        model = self._queue[0]
        try:
            if not model.takes_requests and model.is_wanted:
                await self._load(model)
            _settle(model)
        except LoadFailed as error:
            self.n_failures[model.name] += 1
            log.error("%s cannot be loaded: %s", model.name, error)
            _settle(model, error)
        except Exception as error:
            _settle(model, LoadFailed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._queue.remove(model)

    async def _load(self, model: Offered) -> None:
        """Raises LoadFailed."""
        if model.host is not None:
            await self._unload(model, "failed", "its engine failed")
        started_s = time.monotonic()
        try:
            needs = model.needs or await self._plan(model)
            if not await self._make_room(model, needs):
                return
            settings: dict[str, Any] = {n: v for n, v in needs.settings.items() if getattr(model.config, n) is None}
            model.client.config = replace(model.config, **settings)
            log.info("loading %s: %.1f GB of %.1f", model.name, needs.n_bytes / 1e9, needs.limit_bytes / 1e9)
            model.client.set_state("starting")
            model.host = EngineHost([model.client], self._config, program=self._program)
            await model.host.start()
            await self.open_parts(model)
            info = await model.client.ready()
        except (EngineFailed, ValueError, OSError) as error:
            if model.host is not None:
                await self._unload(model, "failed", "it could not be loaded")
            model.needs = None  # what it was planned with may have changed
            raise LoadFailed(str(error)) from None
        took_s = time.monotonic() - started_s
        for notice in info.notices:
            log.info("%s: %s", model.name, notice)
        log.info("%s is ready after %.2f s", model.name, took_s)
        model.is_up, model.used_s, model.stays_asked = True, time.monotonic(), False
        self.n_loads[model.name] += 1
        self._load_s.observe(took_s)

    async def _plan(self, model: Offered) -> Needs:
        """Asks what the model needs. Raises EngineFailed, OSError."""
        most = self._config.models_gb
        needs = await needs_of(
            model.config, Allowance(self._room, None if most is None else int(most * 1e9)), self._program
        )
        self._room.setdefault(needs.device, needs.free_bytes)
        self._limits.setdefault(needs.device, needs.limit_bytes)
        model.needs = needs
        return needs

    async def _make_room(self, model: Offered, needs: Needs) -> bool:
        """Unloads others until there is room; False when nobody waits for the model any more.

        Raises EngineFailed where there would be too little with no other.
        """
        others = [other for other in self.models.values() if other.host is not None and other is not model]
        try:
            while (lacking := self._lacking(needs)) > 0:
                # Of what was planned some may never have been used, so there may be less than this.
                held = sum(other.needs.n_bytes for other in others if other.host and other.needs)
                if lacking > held:
                    raise EngineFailed(
                        f"it needs {needs.n_bytes / 1e9:.2f} GB, of which {(lacking - held) / 1e9:.2f} GB lack with no "
                        "other model loaded; end other programs, or lower --memory-gb or --max-model-len"
                    )
                least = min((other for other in others if other.host), key=lambda other: (other.is_busy, other.used_s))
                if not least.is_busy:
                    await self._unload(least, "memory", f"{model.name} needs its memory")
                    continue
                least.makes_way = True
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), POLL_S)
                if not model.is_wanted:
                    return False
            return True
        finally:
            for other in others:
                other.makes_way = False

    def _lacking(self, needs: Needs) -> int:
        """Bytes that have to become free before a model can be loaded; 0 or less: there is room."""
        held = [other.needs for other in self.models.values() if other.host is not None and other.needs is not None]
        n_held = sum(other.n_bytes for other in held if other.device == needs.device)
        lacking = n_held + needs.n_bytes - self._limits[needs.device]
        return lacking if needs.device != "cpu" else max(lacking, needs.n_bytes - free_memory_bytes())

    async def _unload(self, model: Offered, reason: str, why: str) -> None:
        """Ends the engine of a model that nobody has. reason: a word for the metrics; why: for the log."""
        host, model.is_up, model.makes_way = model.host, False, False
        assert host is not None
        start_s = time.monotonic()
        await host.stop()
        model.host = None
        model.client.set_state("unloaded")
        self.n_unloads[model.name, reason] += 1
        log.info("unloaded %s after %.2f s: %s", model.name, time.monotonic() - start_s, why)

    def families(self) -> Iterable[Metric]:
        """The numbers for /metrics."""
        loaded = [model for model in self.models.values() if model.is_up]
        n_bytes = sum(model.needs.n_bytes for model in loaded if model.needs)
        yield from plain(
            "deltic_",
            (GAUGE, "models_loaded", "Models that are loaded.", len(loaded)),
            (GAUGE, "models_offered", "Models that can be loaded.", len(self.models)),
            (GAUGE, "models_planned_bytes", "Memory that those which are loaded may take.", n_bytes),
            (GAUGE, "models_wanted", "Models that wait to be loaded.", len(self._queue)),
        )
        yield labelled(COUNTER, "deltic_model_loads", "Loads of a model.", "model", self.n_loads)
        yield labelled(COUNTER, "deltic_model_load_failures", "Loads that failed.", "model", self.n_failures)
        yield labelled(COUNTER, "deltic_model_unloads", "Times it was unloaded.", "model reason", self.n_unloads)
        yield self._load_s.family()


def _settle(model: Offered, error: LoadFailed | None = None) -> None:
    """Tells those who wait that the load has ended."""
    attempt, model.attempt, model.stays_asked = model.attempt, None, False
    model.failure = str(error or "")
    if attempt is None or attempt.done():
        return
    if error is None:
        # Now: before any of them gets to run, the model could be unloaded for the next of the queue.
        model.n_users, model.n_waiting = model.n_users + model.n_waiting, 0
        attempt.set_result(None)
    else:
        attempt.set_exception(error)
