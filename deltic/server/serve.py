"""The server process: the engines are started first, everything else is imported and built while they load.

SIGTERM or Ctrl-C: for `drain_notice_s` /health says so, and requests are still taken. Then new requests get
503, those that run may finish within `drain_s`, then the rest is ended. A second signal ends at once. So does
a first one that the event loop does not take. SIGHUP has keys and certificates read again where they are in
files; else, or where the terminal has gone, it is as SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from deltic import logs
from deltic.aliases import short_names
from deltic.config import BUILT_IN, ConfigError, EngineConfig, ModelConfig, ServerConfig, exit_status
from deltic.engine.messages import EngineInfo
from deltic.host.client import EngineClient, EngineFailed
from deltic.host.supervisor import PROGRAM, EngineHost
from deltic.json_types import JsonObject
from deltic.models.checkpoint import locate, model_name, speaks, text_directory, tokenizer_directory
from deltic.models.fields import CheckpointError
from deltic.models.gguf_config import read_settings
from deltic.models.hub import is_hub_name
from deltic.server.address import check_transfer, event_sockets, listening, load_certificates, tls, topics, url_of
from deltic.server.downloads import fetch_all
from deltic.server.isolated import FORKS
from deltic.server.local_models import local_models, why_not

if TYPE_CHECKING:
    import ssl

    import uvicorn

    from deltic.host.launch import EventSockets
    from deltic.server.limits import Accounts
    from deltic.server.offered import Offered
    from deltic.server.on_demand import OnDemand
    from deltic.server.service import Server, Service

log = logging.getLogger("deltic.server")

LAST_WORDS_S = 2.0
"""Seconds after the drain that connections have to take the errors of what was ended."""

BLOCKED_S = 10.0
"""Seconds that the event loop may take to note the first signal, before the process is ended without it."""

BLOCKED_AGAIN_S = 1.0
"""The same of the second, which asks for the end at once."""

MOST_DESCRIPTORS = 1 << 20
"""Asked of the system, where it would give more: programs that are started may look at each there could be.
"""

M_ARENA_MAX = -8
"""Number of the option in <malloc.h>."""


class Served(NamedTuple):
    """A model of the command line."""

    names: tuple[str, ...]
    """Names in /v1/models; the first is in the model's answers."""
    about: ModelConfig
    client: EngineClient


def serve(
    models: Sequence[tuple[EngineConfig, ModelConfig]], config: ServerConfig, *, program: tuple[str, ...] = PROGRAM
) -> int:
    """Serves until a signal; returns the exit status, `exit_status`'s or 1 when a model cannot be served.

    program: the command of the engine process. Raises ConfigError when the address cannot be listened on, or
    two models have one name; UnsupportedModelError for a dummy of no known shape.
    """
    if not config.models_from and len(models) == 1 and is_toy(models[0][0]) and has_models(models[0][0].download_dir):
        config = replace(config, models_from=("cache",))
    if config.models_from:
        check_on_demand(config, models)
    served = prepared(models, config.max_queue)
    logs.set_up(config.log_level, config.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if any(is_toy(engine) for engine, _ in models) and not config.models_from:
        log.info("no MODEL was given: serving the small one that comes with Deltic; deltic doctor proposes others")
    check_transfer(config, [engine for engine, _ in models])
    told_at = event_sockets(config, [engine for engine, _ in models])
    secured = tls(config)
    raise_descriptors()
    use_one_heap()
    with listening(config) as listener:
        return uvloop.run(_serve(served, config, listener, secured, program, told_at))


def is_toy(engine: EngineConfig) -> bool:
    """Returns whether it is the built-in model, which is served where none is named."""
    return engine.model == BUILT_IN and engine.dummy is None


def has_models(download_dir: Path | None) -> bool:
    """Returns whether the download cache has a model that can be served."""
    return any(not model.missing and not why_not(model.path) for model in local_models(download_dir))


def check_on_demand(config: ServerConfig, models: Sequence[tuple[EngineConfig, ModelConfig]]) -> None:
    """Raises ConfigError for what models that come and go cannot have."""
    if config.kv_events is not None:
        raise ConfigError("--kv-events: each model of --models-from has an engine process of its own. Leave one out.")
    if any(engine.trace is not None for engine, _ in models):
        raise ConfigError("--trace: each model of --models-from would need a file of its own. Leave one out.")
    if any(engine.tensor_parallel > 1 for engine, _ in models):
        raise ConfigError("--tensor-parallel: a model on several GPUs is served alone. Leave --models-from out.")


def prepared(models: Sequence[tuple[EngineConfig, ModelConfig]], max_queue: int) -> list[Served]:
    """The models under their names, their engines not yet started.

    Raises ConfigError where two have one name; UnsupportedModelError for a dummy of no known shape.
    """
    for engine, _ in models:
        if engine.dummy is not None and not speaks(engine):
            locate(engine)
    names = [about.names(*short_names(engine), model_name(engine)) for engine, about in models]
    all_names = [name for own, (_, about) in zip(names, models, strict=True) for name in own + about.patterns]
    for name in all_names:
        if all_names.count(name) > 1:
            raise ConfigError(f"two models are called {name!r}. Give --served-model-name to one of them.")
    for name in (adapters := [name for engine, _ in models for name in engine.adapters]):
        if name in all_names or adapters.count(name) > 1:
            other = "a model" if name in all_names else "another adapter"
            raise ConfigError(f"--lora {name}=...: {other} is called {name!r}, too. Give the adapter another name.")
    return [
        Served(own, about, EngineClient(engine, max_queue, name=own[0]))
        for own, (engine, about) in zip(names, models, strict=True)
    ]


def use_one_heap() -> None:
    """Has all threads of this process use glibc's main heap: of any other `malloc_trim` leaves the end alone,
    tens of megabytes behind a large request.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


def raise_descriptors() -> None:
    """Raises the limit of open files, for this process and those it starts, to the most that is allowed.

    Each connection takes one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class StopSignals:
    """SIGTERM and SIGINT: the first asks for the drain, the second to leave at once. SIGHUP calls `reload`.

    A thread hands them to the event loop, and ends the process where that is blocked and does not take them.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.reload: Callable[[], None] | None = None
        """Reads files again; None: there are none, and SIGHUP is as SIGTERM."""
        self._had_terminal = os.isatty(0)
        # Its `put` may be called in a signal handler.
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, lambda number, _: self._came.put(number))
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._hand_over, args=(loop,), name="signals", daemon=True).start()

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        patience_s = BLOCKED_S
        while True:
            number = self._came.get()
            is_noted = threading.Event()
            if number == signal.SIGHUP:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._hang_up)
                continue
            try:
                loop.call_soon_threadsafe(self._note, is_noted)
            except RuntimeError:  # the loop has ended, and the process is about to
                return
            until_s = time.monotonic() + patience_s
            while not is_noted.wait(0.05):
                if not self._came.empty():
                    self._came.get()
                    until_s = min(until_s, time.monotonic() + BLOCKED_AGAIN_S)
                if time.monotonic() > until_s:
                    log.critical("told to stop, but the event loop is blocked; the process ends as it is")
                    os._exit(1)
            patience_s = BLOCKED_AGAIN_S

    def _hang_up(self) -> None:
        is_alone = self._had_terminal and not os.isatty(0)
        if self.reload is not None and not is_alone:
            self.reload()
            return
        why = "the terminal has gone" if is_alone else "there are no keys and no certificates in files to read again"
        log.warning("SIGHUP: %s; stopping", why)
        self._note(threading.Event())

    def _note(self, is_noted: threading.Event) -> None:
        is_noted.set()
        if self.first.is_set():
            self.second.set()
        self.first.set()


async def _serve(
    models: list[Served],
    config: ServerConfig,
    listener: socket.socket,
    secured: ssl.SSLContext | None,
    program: tuple[str, ...],
    told_at: EventSockets | None,
) -> int:
    started_s = time.monotonic()
    on_demand = _on_demand(config, program) if config.models_from else None
    host = on_demand or EngineHost([model.client for model in models], config, program=program, kv_events=told_at)
    signals = StopSignals()
    signals.reload = _reloading(config, secured)
    try:
        asked = [model.client.config for model in models]
        configs = await fetch_all(asked, signals.first, config, listener, secured)
        if configs is None:
            return 0
        for model, with_directories in zip(models, configs, strict=True):
            model.client.config = with_directories
        if told_at is not None:
            names = [None if speaks(model.client.config) else model.names[0] for model in models]
            for model, topic in zip(models, topics(names, config, listener), strict=True):
                model.client.topic = topic
        if on_demand is not None:
            for model in models:
                on_demand.give(model.names, model.client)
            http, server = _build(models, config, on_demand)
            await on_demand.start()
        else:
            await host.start()  # before anything slow: it loads while the rest is imported
            http, server = _build(models, config)
        signals.reload = _reloading(config, secured, server.accounts)
        http.config.load()
        http.config.ssl = secured
        # What there is now stays: the collector need not walk it again, which holds up everybody's tokens.
        gc.collect()
        gc.freeze()
        running = asyncio.create_task(http.serve([listener]))
        try:
            return await _until_stopped(host, server, running, signals, listener, started_s)
        finally:
            http.should_exit = True
            if await _is_hurried(running, signals):
                http.force_exit = True
            await asyncio.gather(running, return_exceptions=True)
            FORKS.stop()
    except (ConfigError, CheckpointError, OSError) as error:  # files, port, no process
        log.error("%s", error)
        return exit_status(error)
    finally:
        if signals.second.is_set():
            host.kill()
        await host.stop()
        if signals.first.is_set():
            log.info("stopped")


def _on_demand(config: ServerConfig, program: tuple[str, ...]) -> OnDemand:
    from deltic.server.on_demand import OnDemand  # slow: a fixed model's engine is started first

    return OnDemand(config, program)


def _reloading(
    config: ServerConfig, secured: ssl.SSLContext | None, accounts: Accounts | None = None
) -> Callable[[], None] | None:
    """Returns what SIGHUP does; None where nothing is in files. accounts: once there are any."""
    files = [str(file) for file in (config.api_key_file, config.ssl_certfile) if file is not None]

    def reload() -> None:
        try:
            tls(config)  # in a context of its own first: one that fails is of no use
            if accounts is not None:
                accounts.read()
            if secured is not None:
                load_certificates(secured, config)
        except ConfigError as error:
            log.error("SIGHUP: what was read before holds. %s", error)
        else:
            log.info("SIGHUP: read %s again", " and ".join(files))

    return reload if files else None


def _build(
    models: list[Served], config: ServerConfig, on_demand: OnDemand | None = None
) -> tuple[uvicorn.Server, Server]:
    """The HTTP server and what it serves. Raises ConfigError, which names the model."""
    # Not at the top of the file: the engine process is to be started before these are imported.
    from deltic.server.app import create_app
    from deltic.server.connections import Connections, HttpServer

    server = build(models, config, on_demand)
    http = HttpServer(
        create_app(server),
        Connections(config.client_timeout_s, server.metrics.closed),
        ws="websockets-sansio" if server.may_speak else "none",
        ws_max_size=int(config.body_mb(pictures=False) * 1_000_000),
        ws_per_message_deflate=False,  # audio does not get smaller
        timeout_graceful_shutdown=int(LAST_WORDS_S),
    )
    return http, server


def build(models: Sequence[Served], config: ServerConfig, on_demand: OnDemand | None = None) -> Server:
    """Builds the server of these models. on_demand: loads them, and others. Raises ConfigError, which names
    the model.
    """
    from deltic.server.service import Server

    server = Server(config, on_demand=on_demand)
    if on_demand is not None:
        server.metrics.on_demand, on_demand.n_tenants = on_demand.families, server.accounts.n_tenants

        async def open_model(model: Offered) -> None:
            server.add(await asyncio.to_thread(_service, server, Served(model.names, ModelConfig(), model.client)))

        on_demand.open, on_demand.close = open_model, lambda name: server.models.pop(name, None)
    for model in models:
        try:
            server.add(_service(server, model))
            if on_demand is not None:
                on_demand.models[model.names[0]].is_open = True
        except (ValueError, OSError) as error:  # the tokenizer, the template
            raise ConfigError(f"{model.names[0]} cannot be served: {error}") from error
    return server


def _service(server: Server, model: Served) -> Service:
    """Raises TokenizerError, CheckpointError, ConfigError."""
    from deltic.server.chat.template import ChatTemplate
    from deltic.server.service import Service
    from deltic.server.speech.voices import SpeechParts
    from deltic.text import SamplingDefaults, Tokenizer

    engine, client = model.client.config, model.client
    directory = text_directory(engine)
    spoken = tokenizer_directory(engine)
    tokenizer = Tokenizer.load(spoken)
    template = speech = None
    if speaks(engine):
        # It has no chats, whatever lies in its directory.
        if engine.tokenizer is not None:
            raise ConfigError("--tokenizer is for models that write. Leave it out.")
        taken = {other.speech.voices.directory for other in server.models.values() if other.speech} - {None}
        speech = SpeechParts.open(client, directory, tokenizer, model.about.voice_alias, server.config)
        if (kept := speech.voices.directory) in taken:
            raise ConfigError(f"two models would keep voices in {kept}. Give one of them its own --voices-dir.")
    elif model.about.voice_alias:
        raise ConfigError(f"--voice-alias names voices of a speech model, and {model.names[0]!r} writes text")
    else:
        template = ChatTemplate.load(spoken, tokenizer, model.about.chat_template)
        if kwargs := model.about.default_chat_template_kwargs:
            if template is None:
                raise ConfigError("--default-chat-template-kwargs: this model has no chat template")
            template.set_defaults(kwargs)
    if speech and model.about.shapes_text:
        raise ConfigError(f"{model.about.shapes_text} is for models that write, and {model.names[0]!r} speaks")
    defaults = SamplingDefaults.load(directory, model.about)
    return Service.of(
        server,
        client,
        tokenizer,
        template,
        model.names[0],
        defaults=defaults,
        speech=speech,
        aliases=model.names[1:],
        patterns=model.about.patterns,
        origin=_origin(engine, directory),
    )


def _origin(engine: EngineConfig, directory: Path) -> JsonObject:
    """Names on the hub of a model and its tokenizer, None where they have none: places on this machine are
    nobody's business, and a router looks on the hub. The architecture as config.json says it, of a model that
    has one.
    """
    config = {} if engine.dummy is not None else read_settings(directory / "config.json")
    tokenizer = engine if engine.tokenizer is None else replace(engine, model=engine.tokenizer, dummy=None)
    names = [model_name(source) for source in (engine, tokenizer)]
    model, spoken = (name if engine.dummy is None and is_hub_name(name) else None for name in names)
    return {
        "model_path": model,
        "tokenizer_path": spoken,
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
    }


async def _until_stopped(
    host: EngineHost | OnDemand,
    server: Server,
    running: asyncio.Task[None],
    signals: StopSignals,
    listener: socket.socket,
    started_s: float,
) -> int:
    """Serves until the first signal and through the drain, or until the HTTP server, `running`, ends.

    The exit status.
    """
    url = url_of(listener, server.config)
    services = list(server.models.values()) if server.on_demand is None else []
    loading = f"; loading {' and '.join(server.models)}" if services else ""
    log.info("listening on %s (%.2f s)%s", url, time.monotonic() - started_s, loading)
    first = asyncio.create_task(signals.first.wait())
    ready = asyncio.gather(*(service.client.ready() for service in services))
    showing = asyncio.create_task(_show_loading(services))
    try:
        await asyncio.wait((first, ready, running), return_when=asyncio.FIRST_COMPLETED)
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
        if ready.done():
            if server.on_demand is not None:
                n_models = logs.counted(len(server.on_demand.models), "model")
                log.info("%s that requests may name: ready on %s", n_models, url)
            elif not _tell_ready(services, ready, url, started_s):
                return 1
            if server.batches is not None:
                server.batches.start()
            await asyncio.wait((first, running), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            log.error("the HTTP server ended: %r", running.exception())
            return 1
        if ready.done():
            await _give_notice(server, signals)
        await _drain(host, server, signals)
        return 0
    finally:
        for waiting in (first, ready, showing):
            waiting.cancel()
        await asyncio.gather(first, ready, showing, return_exceptions=True)


def _tell_ready(services: list[Service], ready: asyncio.Future[list[EngineInfo]], url: str, started_s: float) -> bool:
    """Logs what became of the start; False when a model cannot be served."""
    several = len(services) > 1
    try:
        infos = ready.result()
    except EngineFailed as error:
        log.error("%s cannot be served: %s", "a model" if several else "the model", error)
        return False
    for service, info in zip(services, infos, strict=True):
        for notice in info.notices:
            log.info("%s%s", f"{service.model_name}: " if several else "", notice)
        for adapter in service.adapters.all():
            log.info("adapter %s of %s: %s", adapter.name, adapter.parent, adapter.path)
    names, are = " and ".join(service.model_name for service in services), "are" if several else "is"
    log.info("%s %s ready on %s after %.2f s", names, are, url, time.monotonic() - started_s)
    return True


async def _show_loading(services: list[Service]) -> None:
    """Progress of the start until cancelled: a bar in a terminal, else a line for each quarter of a long
    stage.
    """

    def stage() -> tuple[str, float] | None:
        """Models load one after the other."""
        for service in reversed(services):
            if loading := service.client.loading:
                whose = f"{service.model_name}, " if len(services) > 1 else ""
                return whose + loading.stage, loading.done
        return None

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("loading", total=1.0)
            while True:
                if shown := stage():
                    progress.update(bar, description=shown[0], completed=shown[1])
                await asyncio.sleep(0.1)
    last_s, last = time.monotonic(), ("", 0)
    while True:
        await asyncio.sleep(0.25)
        if shown := stage():
            now = shown[0], int(shown[1] * 4)
            if now != last and time.monotonic() - last_s > 1.0:
                log.info("loading %s: %.0f %%", shown[0], 100 * shown[1])
                last_s, last = time.monotonic(), now


async def _give_notice(server: Server, signals: StopSignals) -> None:
    """Has routers go elsewhere for `drain_notice_s`; a second signal cuts this short."""
    server.is_leaving = True
    if notice_s := server.config.drain_notice_s:
        log.info("told to stop; /health says so, and requests are taken for %g s more", notice_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.second.wait(), notice_s)


async def _drain(host: EngineHost | OnDemand, server: Server, signals: StopSignals) -> None:
    """Lets open requests finish for `drain_s`, then ends them; a second signal cuts this short."""
    server.is_leaving = server.draining = True
    if server.batches is not None:
        await server.batches.stop()  # they go on with the next start
    drain_s = server.config.drain_s
    left = f", with {drain_s:g} s to finish" if server.n_open else ""
    log.info("stopping; %s open%s", logs.counted(server.n_open, "request"), left)
    await _while_open(server, drain_s, signals)
    if signals.second.is_set():
        return
    if server.n_open:
        log.warning("%s ended unfinished", logs.counted(server.n_open, "request"))
    stopping = asyncio.create_task(host.stop())
    if await _is_hurried(stopping, signals):
        host.kill()  # its step may be long
    await stopping
    await _while_open(server, LAST_WORDS_S, signals)


async def _is_hurried(ending: asyncio.Task[None], signals: StopSignals) -> bool:
    """Waits until it has ended, or for the second signal, which the result tells."""
    second = asyncio.create_task(signals.second.wait())
    await asyncio.wait((ending, second), return_when=asyncio.FIRST_COMPLETED)
    second.cancel()
    return signals.second.is_set()


async def _while_open(server: Server, seconds: float, signals: StopSignals) -> None:
    deadline_s = time.monotonic() + seconds
    while server.n_open and not signals.second.is_set() and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
