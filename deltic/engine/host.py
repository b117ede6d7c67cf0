"""The engine process of one or more EngineClients: starts it, watches it, starts it again.

Everything runs in the clients' asyncio loop. All models live in one process, so they die together and come back together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from deltic.engine.client import EngineClient
from deltic.engine.process import Launch

log = logging.getLogger("deltic.engine.host")

PROGRAM = (sys.executable, "-m", "deltic.engine.process")

MAX_EARLY_DEATHS = 3
"""Deaths in a row, before the process was ready, after which the engine is not started again."""

BACK_OFF_S = 0.25
MAX_BACK_OFF_S = 8.0
DEATHS_WINDOW_S = 60.0
"""Restarts wait the longer, the more deaths there were within the window."""

LAST_WORDS_S = 0.05
"""What a process said just before it died may still be on its way for this long."""

SHUTDOWN_S = 5.0
"""How long a process that was told to stop may finish its step before it is killed."""


class EngineHost:
    """Whatever processes it takes to keep the engines of these clients running."""

    def __init__(
        self, clients: Sequence[EngineClient], *, program: tuple[str, ...] = PROGRAM, log_format: str = "text"
    ) -> None:
        """program: the command that runs `deltic.engine.process.main`; a Launch is added to it as its last argument."""
        self.clients = tuple(clients)
        self._program = program
        self._log_format = log_format
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._n_early_deaths = 0  # in a row, before they were ready
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """The engine process, if there is one."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Starts the engine process and returns; it loads meanwhile. Raises OSError when it cannot be started."""
        self._context = zmq.Context()
        self._directory = Path(tempfile.mkdtemp(prefix="deltic-"))  # only its owner can enter
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise())
        self._supervisor.add_done_callback(self._supervisor_ended)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Takes no more requests, gives those that run `drain_s` seconds, ends the rest and the process."""
        if self._is_stopping:
            return
        self._is_stopping = True
        serving = [client for client in self.clients if client.state == "ready"]
        for client in self.clients:
            client.set_state("stopped")
        if serving:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*(client.drained() for client in serving)), drain_s)
        for client in self.clients:
            client.end_all("abort", "the server is shutting down")
        if serving:
            serving[0].send_shutdown()  # of the process, with all its engines
            await self._exit_within(SHUTDOWN_S)
        if self._supervisor:
            self._supervisor.cancel()  # it may wait for the process, or before a restart
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self.pid is not None and self._process:
            self._process.kill()
            await self._process.wait()
        self._hang_up()
        if self._context:
            self._context.term()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _spawn(self) -> None:
        """Starts an engine process with sockets of its own. Raises OSError; no socket is left open then."""
        assert self._context and self._directory
        try:
            launch = Launch(
                models=[
                    client.open(self._context, f"ipc://{self._directory}/{i}")
                    for i, client in enumerate(self.clients)
                ],
                parent_pid=os.getpid(),
                started_at=time.time(),
                log_format=self._log_format,
            )
            self._process = await asyncio.create_subprocess_exec(
                *self._program,
                msgspec.json.encode(launch, enc_hook=str).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # stdout is the server's, or holds the answers of a batch run
                start_new_session=True,  # Ctrl-C is for the server, which drains
                # The threads of torch's own pool must not spin on the cores that ours compute on.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            )
        except zmq.ZMQError as error:
            self._hang_up()
            raise OSError(error.errno, f"no socket for the engine in {self._directory}: {error}") from None
        except OSError:
            self._hang_up()
            raise

    async def _supervise(self) -> None:
        """Waits for the process to end and starts the next, until there is no hope or `stop` cancels this."""
        deaths: list[float] = []
        while True:
            assert self._process
            code = await self._process.wait()
            if self._is_stopping:
                for client in self.clients:
                    client.end_all("error", "the engine process ended while the server was shutting down")
                return
            was_ready = self._set_restarting()
            await asyncio.sleep(LAST_WORDS_S)
            for client in self.clients:
                client.receive()
            was_ready |= self._set_restarting()  # it may have said so just before it died
            refusal = next((client.refusal for client in self.clients if client.refusal is not None), None)
            failure = refusal or f"the engine process ended ({_describe(code)})"
            log.error("%s", failure)
            for client in self.clients:
                client.lose(failure, f"{failure}; send the request again")
            deaths = [t for t in deaths if time.monotonic() - t < DEATHS_WINDOW_S] + [time.monotonic()]
            self._n_early_deaths = 0 if was_ready else self._n_early_deaths + 1
            refused_at_first = refusal is not None and not any(client.info for client in self.clients)
            if refused_at_first or self._n_early_deaths >= MAX_EARLY_DEATHS:
                self._fail(failure)
                return
            # The first restart is at once; then ever longer, since whatever kills it may go on doing so.
            await asyncio.sleep(min(BACK_OFF_S * (2 ** (len(deaths) - 1) - 1), MAX_BACK_OFF_S))
            for client in self.clients:
                client.n_restarts += 1
            log.info("starting the engine process again")
            try:
                await self._spawn()
            except OSError as error:
                failure = f"the engine process cannot be started again: {error}"
                log.error("%s", failure)
                self._fail(failure)
                return

    def _set_restarting(self) -> bool:
        """Has the clients send nothing more; whether one of them could."""
        was_ready = any(client.state == "ready" for client in self.clients)
        for client in self.clients if not self._is_stopping else ():
            client.set_state("restarting")
        return was_ready

    def _fail(self, failure: str) -> None:
        for client in self.clients:
            client.failure = failure
            client.set_state("failed")

    def _supervisor_ended(self, supervisor: asyncio.Task[None]) -> None:
        """A supervisor that raised leaves nobody to say that the engine died: better no engine, and to say so."""
        error = None if supervisor.cancelled() else supervisor.exception()
        if error is None:
            return
        log.critical("the supervisor of the engine process failed", exc_info=error)
        failure = f"the server lost control of the engine process ({type(error).__name__}: {error})"
        if not self._is_stopping:
            self._fail(failure)
        for client in self.clients:
            client.lose(failure, f"{failure}; start the server again")
        if self.pid is not None and self._process:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _exit_within(self, seconds: float) -> None:
        if self._process:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), seconds)

    def _hang_up(self) -> None:
        for client in self.clients:
            client.hang_up()


def _describe(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        with contextlib.suppress(ValueError):  # a signal without a name, as the real-time ones
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"exit status {code}"
