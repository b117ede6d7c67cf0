"""The state that routes share: of each model its client, tokenizer and template; of the process its settings
and keys.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

from starlette.types import Receive

from deltic import __version__
from deltic.config import DECIDE_BITS, ServerConfig
from deltic.engine.messages import EngineInfo, Request
from deltic.host.client import EngineClient
from deltic.json_types import JsonObject
from deltic.server.adapters import ServedAdapter, ServedAdapters
from deltic.server.api.responses_items import ResponseStore
from deltic.server.batch.file_store import FileStore
from deltic.server.batch.runner import BatchRunner
from deltic.server.chat.answer import WayOut
from deltic.server.chat.constraint import Constrainer
from deltic.server.chat.generation import Generation, refusals, unavailable
from deltic.server.chat.picture_parts import PictureReader
from deltic.server.chat.template import ChatTemplate
from deltic.server.errors import RETRY_LATER, ApiError, bad_request
from deltic.server.fair_thread import FairThread
from deltic.server.limits import Accounts, Ticket, asking
from deltic.server.metrics import Exposition, Metrics
from deltic.server.on_demand import OnDemand
from deltic.server.room import Room
from deltic.server.speech.voices import SpeechParts, has_libraries
from deltic.server.urls import Hosts
from deltic.text import SamplingDefaults, Tokenizer

log = logging.getLogger("deltic.server")

SHUTTING_DOWN = "the server is shutting down"
LEAVING = "the server is about to shut down. It still answers, but send new requests elsewhere."

CACHE_ANSWER_S = 10.0
"""Seconds that the engine may take to report its prefix cache; it answers between two steps."""

MAX_PREPARING = 2
"""A key's backlog in the thread for large bodies, in units of the largest body allowed."""

N_READING = 2
"""PDFs that are read at once."""

N_DRAWING = 2
"""Requests of the page at once whose texts are drawn."""

UNKNOWN_AGAIN_S = 600.0
"""Seconds before the log names the same unknown field again."""

MAX_UNKNOWN = 100
"""The most unknown fields that are remembered."""

TRIM_S = 0.2
"""Seconds between the end of a large request and the return of free memory to the system.

Requests that end meanwhile share one return.
"""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
"""glibc's, where that is the C library."""

Kind = Literal["text", "speech"]
"""Kind of output that a model makes."""

STATES = ("stopping", "draining", "stopped", "failed", "restarting", "starting", "unloaded", "ready")
"""States of a model, the worst first."""


@dataclass
class Server:
    """The state of the process, and its models. Raises ConfigError for keys that cannot be meant."""

    config: ServerConfig
    models: dict[str, Service] = field(default_factory=dict, init=False)
    """Models by name, in the order of the command line."""
    metrics: Exposition = field(init=False)
    accounts: Accounts = field(init=False)
    responses: ResponseStore = field(init=False)
    batches: BatchRunner | None = field(init=False, default=None)
    """Runner of batches; None without a directory for files."""
    pictures: PictureReader = field(init=False)
    documents: Room = field(init=False)
    drawings: Room = field(init=False)
    """Room for the programs that read PDFs."""
    worker: FairThread = field(init=False)
    """Worker of one thread, so that large prompts cannot take the engine's cores."""
    compiler: FairThread = field(init=False)
    """Worker for requests whose grammars are new."""
    started_s: int = field(default_factory=lambda: int(time.time()))
    is_leaving: bool = False
    """Set when the process is told to stop: routers are to go elsewhere, and no connection is kept."""
    draining: bool = False
    """Set when `drain_notice_s` are over: no new requests."""
    on_demand: OnDemand | None = field(default=None, kw_only=True)
    """Models that requests have loaded; None: all there are stay loaded."""
    n_open: int = 0
    """HTTP requests that have not been answered whole."""
    sockets: Counter[str] = field(default_factory=Counter)
    """WebSockets that are open, by tenant."""
    adapting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while an adapter gets its name, or loses it."""
    importing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while a prefix comes from another server."""
    waiting_bytes: int = 0
    """Bytes of bodies that wait for a model that loads."""
    _is_trimming: bool = False
    _unknown_s: dict[tuple[str, str], float] = field(default_factory=dict, init=False)
    """Time when the log told of an unknown field, by route and name."""

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.config)
        self.responses = ResponseStore(self.config.max_stored_responses)
        if self.config.batch_dir is not None:
            files = FileStore(self.config.batch_dir, self.config.batch_disk_gb, self.accounts.n_tenants)
            self.batches = BatchRunner(self.config, self.accounts, files, self.writer)
        self.pictures = PictureReader(Hosts(self.config.fetch_images_from, "--fetch-images-from"), self.n_shares)
        self.documents = Room(lambda: N_READING, self.n_shares)
        self.drawings = Room(lambda: N_DRAWING, self.n_shares)
        self.worker = FairThread("prepare", lambda: int(MAX_PREPARING * self.max_body_mb * 1_000_000))
        self.compiler = FairThread("compile", lambda: 0)  # the worker counts its bodies
        self.metrics = Exposition(self.accounts.numbers(), self.config.metrics_names)

    @property
    def n_shares(self) -> int:
        """A key may have one in so many of what keys share: where there are several, not all of it."""
        return min(2, self.accounts.n_tenants)

    @property
    def max_body_mb(self) -> float:
        """The largest body of a request."""
        may_see = self.on_demand is not None or any(service.sees for service in self.models.values())
        return self.config.body_mb(pictures=may_see)

    def trim_soon(self) -> None:
        """Has the C library return free memory to the system once this request is forgotten. It would keep it
        otherwise.
        """
        if not self._is_trimming:
            self._is_trimming = True
            asyncio.get_running_loop().call_later(TRIM_S, self._trim_now)

    def _trim_now(self) -> None:
        self._is_trimming = False
        # It takes a while, and holds no lock of Python's.
        asyncio.get_running_loop().run_in_executor(None, _trim, 0)

    def add(self, service: Service) -> None:
        self.models[service.model_name] = service
        service.client.n_tenants = self.accounts.n_tenants
        if service.speech is not None:
            service.speech.voices.n_tenants = self.accounts.n_tenants
        self.metrics.models[service.model_name] = service.metrics

    def of(self, kind: Kind) -> list[Service]:
        """The models that make this."""
        return [service for service in self.models.values() if service.kind == kind]

    @property
    def may_speak(self) -> bool:
        """True if a model that speaks may be asked for."""
        return bool(self.of("speech")) or (self.on_demand is not None and has_libraries())

    def first(self, kind: Kind) -> Service:
        """The model of a request that names none.

        If there is none of this kind, it is one of the other kind, which will refuse.
        """
        return next(iter(self.of(kind)), next(iter(self.models.values())))

    def note_unknown(self, route: str, field: str) -> None:
        """Logs a field that is not known, in a request that is answered all the same.

        The log names each once in UNKNOWN_AGAIN_S.
        """
        self.metrics.unknown_fields[route] += 1
        now_s, place = time.monotonic(), (route, field[:64])
        if self._unknown_s.get(place, -math.inf) + UNKNOWN_AGAIN_S > now_s:
            return
        if len(self._unknown_s) >= MAX_UNKNOWN:  # whoever makes up names finds them counted only
            self._unknown_s = {name: at_s for name, at_s in self._unknown_s.items() if at_s + UNKNOWN_AGAIN_S > now_s}
            if len(self._unknown_s) >= MAX_UNKNOWN:
                return
        self._unknown_s[place] = now_s
        log.warning("%s: the field %r is not known, and was left out (--strict-fields off)", *place)

    def find(self, name: str) -> Service:
        """The model of this name, else the first one with a pattern that fits.

        Raises ApiError: 404; 503 for one that is on the disk and was never loaded. Programs for Ollama write
        `:latest` after a name.
        """
        if (service := self.known(name)) is not None:
            return service
        services = self.models.values()
        known = ", ".join(repr(known) for service in services for known in [*service.all_names(), *service.patterns])
        message = f"no model {name!r}. This server has {known}."
        raise ApiError(404, message, param="model", code="model_not_found")

    async def opened(self, name: str) -> Service:
        """The model of this name, whose engine need not be loaded. Raises ApiError (404)."""
        if self.on_demand is not None and (offered := self.on_demand.called(name)) is not None:
            await self.on_demand.open_parts(offered)
        return self.find(name)

    async def loaded(
        self, name: str | None, kind: Kind, ticket: Ticket, receive: Receive | None = None, n_bytes: int = 0
    ) -> Service:
        """The model of this name, or of a request of this kind that names none; one that comes and goes stays
        loaded until the ticket ends.

        receive, n_bytes: as of `OnDemand.use`. Raises ApiError: 404, and as that.
        """
        on_demand, adapted = self.on_demand, None
        if on_demand is None:
            return self.first(kind) if name is None else self.find(name)
        if self.draining:
            raise unavailable(SHUTTING_DOWN)
        if name is None:
            model = await on_demand.default(kind)
        elif (found := on_demand.called(name)) is None and (adapted := self.known(name)) is not None:
            model = on_demand.models[adapted.adapter.parent if adapted.adapter else adapted.model_name]
        else:
            model = found or await on_demand.find(name)
        await on_demand.use(model, ticket, receive, n_bytes)
        return adapted or self.models[model.name]

    def known(self, name: str) -> Service | None:
        """Returns what `find` does; None: nothing has the name. Raises ApiError (503)."""
        services = self.models.values()
        if self.on_demand is not None and (offered := self.on_demand.called(name)) is not None:
            if not offered.is_open:
                raise unavailable(f"{offered.name!r}: {offered.client.why_unavailable()}")
            return self.models[offered.name]
        for called in (name, name.removesuffix(":latest")):
            for service in services:
                if called in service.names:
                    return service
                if (adapter := service.adapters.find(called)) is not None:
                    return service.under(adapter)
        for service in services:
            if any(fnmatchcase(name, pattern) for pattern in service.patterns):
                return service
        return None

    @property
    def has_choice(self) -> bool:
        """True if a request's name decides who answers."""
        return (
            self.on_demand is not None
            or len(self.models) > 1
            or any(service.adapters.may_come for service in self.models.values())
        )

    def adapted(self) -> list[Service]:
        """The models with each of their adapters."""
        services = self.models.values()
        return [service.under(adapter) for service in services for adapter in service.adapters.all()]

    def holder(self, name: str) -> str | None:
        """Returns what has exactly this name, in words; None: nothing."""
        for service in self.models.values():
            if name in service.names:
                return "a model's name"
            if service.adapters.find(name) is not None:
                return f"the name of an adapter of {service.model_name!r}"
        return None

    def writer(self, name: str | None) -> tuple[str, EngineClient]:
        """Name and engine of the model that a batch's line means; without a name the first.

        Raises ApiError (404) for one that speaks.
        """
        if self.on_demand is not None and name is not None and (offered := self.on_demand.called(name)) is not None:
            if offered.kind != "text":
                raise ApiError(404, f"{offered.name!r} speaks and does not write", code="unsupported_model")
            return offered.name, offered.client
        service = self.first("text") if name is None else self.find(name)
        if service.kind != "text":
            raise ApiError(404, f"{service.model_name!r} speaks and does not write", code="unsupported_model")
        return service.model_name, service.client

    def status(self) -> JsonObject:
        """The status for /health and /ready: that of the model that is worst off, and, if there are several,
        of each.
        """
        each = {name: service.status() for name, service in self.models.items()}
        if self.on_demand is not None and not (self.draining or self.is_leaving):
            models = self.on_demand.models.items()
            states = {name: {"status": model.state, "kind": model.kind} for name, model in models}
            return {"status": "ready", "models": states}
        # Of those that load the last that has begun: the ones before it have loaded, and wait for the others.
        worst = min(reversed(each), key=lambda name: (STATES.index(each[name]["status"]), "loading" not in each[name]))
        if len(each) == 1:
            return each[worst]
        status = dict(each[worst])
        if "message" in status and not (self.draining or self.is_leaving):
            status["message"] = f"{worst}: {status['message']}"
        return status | {"models": {name: fields | {"kind": self.models[name].kind} for name, fields in each.items()}}


@dataclass(frozen=True, eq=False)
class Service:
    """Model as the routes see it. Nothing of it changes, so that `under` may share all of it."""

    server: Server
    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    model_name: str
    metrics: Metrics
    constrainer: Constrainer
    adapters: ServedAdapters
    pixels: Room
    """Bytes of pixels of the requests that are open, here and in the engine."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    speech: SpeechParts | None = None
    """Parts of a speech model; None: the model writes text."""
    adapter: ServedAdapter | None = None
    """Adapter that is applied, of `adapters`; see `under`."""
    aliases: tuple[str, ...] = ()
    """Names that the model has beside the first in /v1/models."""
    patterns: tuple[str, ...] = ()
    """Names that it answers to and that are not listed, as fnmatch patterns."""
    origin: Mapping[str, object] = field(default_factory=dict)
    """Facts of the checkpoint that /model_info tells."""

    @classmethod
    def of(
        cls,
        server: Server,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        model_name: str,
        **more: Any,
    ) -> Service:
        """A model with counters, grammars and adapters of its own. more: the fields that have a default."""
        adapters = ServedAdapters(client, model_name, server.holder, server.adapting)
        metrics = Metrics(
            lambda: client.stats,
            lambda: client.n_restarts,
            lambda: client.state in ("ready", "unloaded"),  # a request loads it
            info=lambda: client.info,
            has_speech=more.get("speech") is not None,
            adapters=lambda: (adapters.most, adapters.n_held, [adapter.numbers for adapter in adapters.all()]),
        )
        constrainer = Constrainer(tokenizer, template.call_form if template else None)
        pixels = Room(partial(_pixel_bytes, client), server.n_shares)
        return cls(server, client, tokenizer, template, model_name, metrics, constrainer, adapters, pixels, **more)

    @property
    def config(self) -> ServerConfig:
        return self.server.config

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model_name, *self.aliases)

    def all_names(self) -> list[str]:
        """Names of the model and of its adapters."""
        return [*self.names, *(adapter.name for adapter in self.adapters.all())]

    def under(self, adapter: ServedAdapter) -> Service:
        """The model with one of its adapters, which answers under that one's name. All else is shared."""
        return replace(self, model_name=adapter.name, adapter=adapter, aliases=(), patterns=())

    @property
    def default_length(self) -> int | None:
        """Tokens of an answer where the request names no number."""
        return self.defaults.max_new_tokens or self.config.default_max_tokens

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the program, the model and how it is run: where it differs, so may the bits of an
        answer.
        """
        info = self.client.info
        run = info and (info.device, info.kernels, info.precision, info.kv_cache_dtype, Path(info.cache_files).name)
        adapter = self.adapter.path if self.adapter else ""
        settings = [getattr(self.client.config, name) for name in DECIDE_BITS]
        identity = repr((__version__, self.model_name, adapter, self.origin, run, settings)).encode()
        return f"fp_{hashlib.blake2b(identity, digest_size=6).hexdigest()}"

    @property
    def kind(self) -> Kind:
        return "text" if self.speech is None else "speech"

    @property
    def sees(self) -> bool:
        """True if chats may have pictures."""
        return self.client.info is not None and self.client.info.pictures is not None

    @property
    def embeds(self) -> bool:
        """True if the model makes vectors of texts, and writes none."""
        return self.client.info is not None and self.client.info.embedder is not None

    def admit(self, *, speech: bool = False, vectors: bool = False) -> EngineInfo:
        """The engine's info, for a request that is about to be read.

        speech: the request is to be spoken, not written. vectors: its texts are to become vectors. Raises
        ApiError: 404 when the model does the other,
        503 while the engine takes no requests, 429 while there is no place for one more. Whether there is
        room for all its sequences shows when it is submitted.
        """
        if speech:
            self.speaking()
        elif vectors:
            self.check_embeds()
        else:
            self.check_writes()
        if self.server.draining:
            raise unavailable(SHUTTING_DOWN)
        with refusals():
            info = self.client.check_room(1, asking().turns)
            if self.adapter is not None:
                self.adapter.current_key()
            return info

    def rendering(self) -> EngineInfo:
        """The engine's info, for a prompt that is made and goes nowhere: no engine has to run. Raises
        ApiError: 404 for a model that speaks, 503 until it was ready once.
        """
        self.check_writes()
        if self.client.info is None:
            raise unavailable(self.client.why_unavailable())
        return self.client.info

    def check_writes(self) -> None:
        """Raises ApiError (404) for a model that speaks, or makes vectors."""
        if self.speech is not None:
            raise self._other_kind("speaks and does not write. Use /v1/audio/speech.")
        if self.embeds:
            raise self._other_kind("makes embeddings and does not write. Use /v1/embeddings.")

    def check_embeds(self) -> None:
        """Raises ApiError (404) for a model that makes no vectors."""
        if self.speech is not None or (self.client.info is not None and not self.embeds):
            does = "speaks" if self.speech is not None else "writes"
            raise self._other_kind(
                f"{does} and makes no embeddings. Serve an embedder: a checkpoint of Qwen3.5 or its like with the "
                "modules.json of sentence-transformers."
            )

    def speaking(self) -> SpeechParts:
        """Raises ApiError (404) for a model that writes text."""
        if self.speech is None:
            raise self._other_kind(
                "writes text and does not speak. Serve one that does, as Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice."
            )
        return self.speech

    def _other_kind(self, what: str) -> ApiError:
        return ApiError(404, f"{self.model_name!r} {what}", param="model", code="unsupported_model")

    def generation(
        self, requests: list[Request], choices: Sequence[WayOut], ticket: Ticket, at_once: int | None = None
    ) -> Generation:
        """The engine's side of an answer, with the adapter that is applied; see `Generation`."""
        return Generation(self.client, self.metrics, requests, choices, ticket, self.adapter, at_once)

    async def inspect_cache(self, reset: bool) -> JsonObject:
        """The engine's report on its prefix cache. reset: empty it first.

        Raises ApiError: 503 while there is no engine to ask, or when it dies; 504 when it does not answer in
        time.
        """
        if self.server.draining:
            raise unavailable(SHUTTING_DOWN)
        try:
            with refusals():
                async with asyncio.timeout(CACHE_ANSWER_S):
                    return (await self.client.inspect_cache(reset)).summary
        except TimeoutError:
            raise ApiError(
                504,
                f"the engine did not answer in {CACHE_ANSWER_S:g} s"
                + (". It will empty the cache when it comes to it" if reset else "")
                + ". Try again in a few seconds.",
                code="engine_timeout",
                headers=RETRY_LATER,
            ) from None

    def status(self) -> JsonObject:
        """Returns one of STATES, and why the model is not ready."""
        client = self.client
        if self.server.draining:
            return {"status": "stopping", "message": SHUTTING_DOWN}
        if self.server.is_leaving:
            return {"status": "draining", "message": LEAVING}
        status: JsonObject = {"status": client.state}
        if client.state != "ready":
            status["message"] = client.why_unavailable()
        if client.state == "starting" and client.loading:
            status["loading"] = {"stage": client.loading.stage, "done": client.loading.done}
        return status

    def check_model(self, name: str | None) -> None:
        """Raises ApiError: 404 for a name that nothing has; 400 for that of another model or adapter, as it
        is too late to choose.
        """
        if name is not None and self.server.find(name).model_name != self.model_name:
            message = f"{name!r} cannot answer a part of what {self.model_name!r} was asked. Send that by itself."
            raise bad_request("model", message)


def _pixel_bytes(client: EngineClient) -> int:
    return client.info.pictures.room_bytes if client.info and client.info.pictures else 0
