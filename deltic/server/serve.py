"""The server process: the engine is started first, everything else is imported and built while it loads.

SIGTERM or Ctrl-C: new requests get 503, those that run may finish within `drain_s`, then the rest is ended. A second
signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import uvloop

from deltic import logs
from deltic.config import ConfigError, EngineConfig, ServerConfig
from deltic.engine.client import PROGRAM, EngineClient, EngineFailed

if TYPE_CHECKING:
    import uvicorn

    from deltic.server.service import Service

log = logging.getLogger("deltic.server")

LAST_WORDS_S = 2.0
"""After the drain, how long connections have to take the errors of what was ended."""

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: one that is closed as it is used again looks like a failure to them."""


def serve(
    engine_config: EngineConfig, server_config: ServerConfig, *, program: tuple[str, ...] = PROGRAM
) -> int:
    """Serves until a signal; returns the exit status, 1 when the model cannot be served.

    program: the command of the engine process. Raises ConfigError when the address cannot be listened on.
    """
    logs.set_up(server_config.log_level, server_config.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    listener = listen(server_config)
    client = EngineClient(
        engine_config, server_config.max_queue, program=program, log_format=server_config.log_format
    )
    return uvloop.run(_serve(client, server_config, listener))


def listen(config: ServerConfig) -> socket.socket:
    """The socket of `host` and `port`, bound. Raises ConfigError."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another --host or --port"
        ) from error
    return listener


class StopSignals:
    """SIGTERM and SIGINT: the first asks for the drain, the second to leave at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        if self.first.is_set():
            self.second.set()
        self.first.set()


async def _serve(client: EngineClient, server_config: ServerConfig, listener: socket.socket) -> int:
    started_s = time.monotonic()
    await client.start()  # before anything slow: it loads while the rest is imported
    signals = StopSignals()
    try:
        server, service = _build(client, server_config)
        # What there is now stays: the collector need not walk it again, which holds up everybody's tokens.
        gc.collect()
        gc.freeze()
        http = asyncio.create_task(server.serve([listener]))
        try:
            return await _until_stopped(client, service, server_config, signals, listener, started_s)
        finally:
            if signals.second.is_set():
                server.force_exit = True
            server.should_exit = True
            await http
    except (ValueError, OSError) as error:  # the tokenizer, the template, the port
        log.error("%s", error)
        return 1
    finally:
        if signals.second.is_set() and client.pid is not None:
            os.kill(client.pid, signal.SIGKILL)
        await client.stop()
        if signals.first.is_set():
            log.info("stopped")


def _build(client: EngineClient, server_config: ServerConfig) -> tuple[uvicorn.Server, Service]:
    """The application and its HTTP server. Raises TokenizerError."""
    # Not at the top of the file: the engine process is to be started before these are imported.
    import uvicorn

    from deltic.models.checkpoint import model_name, speaks, text_directory
    from deltic.models.speech_shapes import PUBLISHED_SPEECH, SpeechShape
    from deltic.server.chat import ChatTemplate
    from deltic.server.http import create_app
    from deltic.server.protocol import SamplingDefaults
    from deltic.server.voices import voices_directory
    from deltic.text import Tokenizer

    engine_config = client.config
    directory = text_directory(engine_config)
    tokenizer = Tokenizer.load(directory)
    dummy, speech = engine_config.dummy, None
    if speaks(engine_config):
        speech = PUBLISHED_SPEECH[dummy.lower()] if dummy else SpeechShape.from_directory(directory)
    # A model that speaks has no chats, whatever lies in its directory.
    template = None if speech else ChatTemplate.load(directory, tokenizer, server_config.chat_template)
    app = create_app(
        client,
        tokenizer,
        template,
        server_config.served_model_name or model_name(engine_config),
        server_config,
        SamplingDefaults.load(directory),
        speech=speech,
        voices=voices_directory(engine_config) if speech and speech.variant == "base" else None,
        is_dummy=dummy is not None,
    )
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="websockets-sansio" if speech else "none",
        ws_max_size=int(server_config.max_body_mb * 1_000_000),
        ws_per_message_deflate=False,  # audio does not get smaller
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(LAST_WORDS_S),
    )
    server = uvicorn.Server(config)
    # Signals are StopSignals': the server's own would cut off what the drain lets finish.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment,method-assign]
    return server, app.state.service


async def _until_stopped(
    client: EngineClient,
    service: Service,
    config: ServerConfig,
    signals: StopSignals,
    listener: socket.socket,
    started_s: float,
) -> int:
    """Serves until the first signal and through the drain; the exit status."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("listening on %s (%.2f s); the model is loading", url, time.monotonic() - started_s)
    first = asyncio.create_task(signals.first.wait())
    ready = asyncio.create_task(client.ready())
    showing = asyncio.create_task(_show_loading(client))
    await asyncio.wait((first, ready), return_when=asyncio.FIRST_COMPLETED)
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    if ready.done():
        try:
            info = ready.result()
        except EngineFailed as error:
            first.cancel()
            log.error("the model cannot be served: %s", error)
            return 1
        for notice in info.notices:
            log.info("%s", notice)
        log.info("%s is ready on %s after %.2f s", service.model_name, url, time.monotonic() - started_s)
        await first
    ready.cancel()
    await _drain(client, service, config.drain_s, signals)
    return 0


async def _show_loading(client: EngineClient) -> None:
    """Progress of the start until cancelled: a bar in a terminal, else a line for each quarter of a long stage."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("loading", total=1.0)
            while True:
                if client.loading:
                    progress.update(bar, description=client.loading.stage, completed=client.loading.done)
                await asyncio.sleep(0.1)
    last_s, last = time.monotonic(), ("", 0)
    while True:
        await asyncio.sleep(0.25)
        if client.loading:
            now = client.loading.stage, int(client.loading.done * 4)
            if now != last and time.monotonic() - last_s > 1.0:
                log.info("loading %s: %.0f %%", client.loading.stage, 100 * client.loading.done)
                last_s, last = time.monotonic(), now


async def _drain(client: EngineClient, service: Service, drain_s: float, signals: StopSignals) -> None:
    """Lets open requests finish for `drain_s`, then ends them; a second signal cuts this short."""
    service.draining = True
    log.info("stopping; %s open, with %g s to finish", logs.counted(service.n_open, "request"), drain_s)
    await _while_open(service, drain_s, signals)
    if signals.second.is_set():
        return
    if service.n_open:
        log.warning("%s ended unfinished", logs.counted(service.n_open, "request"))
    await client.stop()
    await _while_open(service, LAST_WORDS_S, signals)


async def _while_open(service: Service, seconds: float, signals: StopSignals) -> None:
    deadline_s = time.monotonic() + seconds
    while service.n_open and not signals.second.is_set() and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
