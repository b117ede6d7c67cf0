"""The engine process of one or more EngineClients: starts it, watches it, starts it again.

Everything runs in the clients' asyncio loop. All models live in one process, so they die together and come
back together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from deltic.config import EngineConfig, ServerConfig
from deltic.engine.events import Needs, StartFailed
from deltic.host.client import EngineClient, EngineFailed
from deltic.host.launch import Allowance, EventSockets, Launch, ModelLaunch
from deltic.host.socket_directory import SocketDirectory
from deltic.machine import n_oom_kills

log = logging.getLogger("deltic.host.supervisor")

PROGRAM = (sys.executable, "-m", "deltic.host.process")

MAX_EARLY_DEATHS = 3
"""Deaths in a row, before the process was ready, after which the engine is not started again."""

BACK_OFF_S = 0.25
MAX_BACK_OFF_S = 8.0
DEATHS_WINDOW_S = 60.0
"""Restarts wait the longer, the more deaths there were within the window."""

TICK_S = 1.0
"""Seconds between two looks at whether the process gets on with its work."""

LAST_WORDS_S = 0.05
"""Seconds for which the last messages of a process may still be on their way after it died."""

SHUTDOWN_S = 5.0
"""Seconds that a process that was told to stop may take to finish its step before it is killed."""


class EngineHost:
    """Whatever processes it takes to keep the engines of these clients running."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        config: ServerConfig | None = None,
        *,
        program: tuple[str, ...] = PROGRAM,
        kv_events: EventSockets | None = None,
    ) -> None:
        """program: the command that runs `deltic.host.process.main`; a Launch is added to it as its last
        argument. config: has the form of the log, and how long a process may show no sign of life though it
        has work; None: for ever. kv_events: where models that have a topic tell of their caches.
        """
        self.clients = tuple(clients)
        self._program = program
        self._log_format = "text" if config is None else config.log_format
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._timeout_s = 0.0 if config is None else config.engine_timeout_s
        self._tick_s = min(TICK_S, self._timeout_s / 10)
        self._beat = Path()
        self._kv_events = kv_events
        self._directory: SocketDirectory | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._n_oom_kills: int | None = None  # before the process was started
        self._n_early_deaths = 0  # in a row, before they were ready
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """The engine process, if there is one."""
        return self._process.pid if self._process and self._process.returncode is None else None

    def kill(self) -> None:
        """Ends the process at once."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    async def start(self) -> None:
        """Starts the engine process and returns; it loads meanwhile.

        Raises OSError when it cannot be started.
        """
        self._context = zmq.Context()
        self._directory = SocketDirectory()
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
            await self._exit_within(SHUTDOWN_S)  # a device that hangs may keep it
        self._hang_up()
        if self._context:
            self._context.term()
        if self._directory:
            self._directory.close()

    async def _spawn(self) -> None:
        """Starts an engine process with sockets of its own. Raises OSError; no socket is left open then."""
        assert self._context and self._directory
        directory = self._directory.path
        self._n_oom_kills = n_oom_kills()
        try:
            models = [client.open(self._context, f"ipc://{directory}/{i}") for i, client in enumerate(self.clients)]
            self._beat = Path(models[0].commands.removeprefix("ipc://"))
            launch = Launch(
                models=models,
                parent_pid=os.getpid(),
                started_at=time.time(),
                beat_s=self._tick_s / 2,
                log_format=self._log_format,
                kv_events=self._kv_events,
            )
            self._process = await asyncio.create_subprocess_exec(
                *self._program,
                msgspec.json.encode(launch, enc_hook=str).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # stdout is the server's, or holds the answers of a batch run
                start_new_session=True,  # Ctrl-C is for the server, which drains
                # The threads of torch's own pool must not spin on the cores that ours compute on. numpy's
                # products have one thread: voices are encoded beside the steps, always to the same bits.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        except zmq.ZMQError as error:
            self._hang_up()
            raise OSError(error.errno, f"no socket for the engine in {directory}: {error}") from None
        except OSError:
            self._hang_up()
            raise

    async def _supervise(self) -> None:
        """Waits for the process to end and starts the next, until there is no hope or `stop` cancels this."""
        deaths: list[float] = []
        while True:
            assert self._process
            hang = await self._hang()
            if hang is not None:  # at once, since the kernel may be long in ending it
                self._set_restarting()
                self._lose(hang)
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    self._process.kill()
            code = await self._process.wait()
            if self._is_stopping:
                for client in self.clients:
                    client.end_all("error", "the engine process ended while the server was shutting down")
                return
            was_ready = self._set_restarting() or hang is not None
            await asyncio.sleep(LAST_WORDS_S)
            for client in self.clients:
                client.receive()
            was_ready |= self._set_restarting()  # it may have said so just before it died
            refusal = next((client.refusal for client in self.clients if client.refusal is not None), None)
            failure = hang or refusal or f"the engine process ended ({_describe(code, self._had_oom_kill())})"
            refused_at_first = refusal is not None and not any(client.info for client in self.clients)
            if hang is None:
                self._lose(failure, is_said=refused_at_first)
            deaths = [t for t in deaths if time.monotonic() - t < DEATHS_WINDOW_S] + [time.monotonic()]
            self._n_early_deaths = 0 if was_ready else self._n_early_deaths + 1
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

    async def _hang(self) -> str | None:
        """Waits until the process has ended: None; or until it shows no sign of life any more: says so.

        A sign is what it says: of a step, a start, an answer to a Ping, which it takes between two steps. A
        step on a CPU may honestly take minutes: that a kernel or a joint head runs is a sign, too, which a
        thread of its own sees (`process._beat`). What else the engine's thread computes is none, nor how it
        waits for a GPU.
        """
        assert self._process
        ending = asyncio.create_task(self._process.wait())
        silent_s, n_signs, beat = 0.0, 0, 0
        try:
            while not (await asyncio.wait((ending,), timeout=self._tick_s or None))[0]:
                asked = [client for client in self.clients if client.is_asked]
                last_n_signs, n_signs = n_signs, sum(client.n_signs for client in self.clients)
                if not asked or n_signs != last_n_signs:
                    silent_s = 0.0
                    continue
                is_stuck = any(client.is_stuck for client in asked)
                last_beat, beat = beat, _touched(self._beat)
                # Not by the clock: while this process itself stood still, it took no note of signs.
                silent_s = 0.0 if beat != last_beat and not is_stuck else silent_s + self._tick_s
                if silent_s >= self._timeout_s:
                    what = "has got nothing from --cache-dir" if is_stuck else "has not answered"
                    return f"the engine process {what} for {self._timeout_s:g} s (--engine-timeout-s) and was ended"
                for client in asked:
                    client.ping()
            return None
        finally:
            ending.cancel()

    def _had_oom_kill(self) -> bool:
        """Returns whether the kernel has ended a process of this control group for want of memory since the
        engine's was started.
        """
        now = n_oom_kills()
        return None not in (now, self._n_oom_kills) and now != self._n_oom_kills

    def _lose(self, failure: str, is_said: bool = False) -> None:
        """The process is of no more use: ends what is open. is_said: whoever waits for the start says why."""
        if not is_said:
            log.error("%s", failure)
        for client in self.clients:
            client.lose(failure, f"{failure}. Send the request again.")

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
        """A supervisor that raised leaves nobody to say that the engine died: better no engine, and to say
        so.
        """
        error = None if supervisor.cancelled() else supervisor.exception()
        if error is None:
            return
        log.critical("the supervisor of the engine process failed", exc_info=error)
        failure = f"the server lost control of the engine process ({type(error).__name__}: {error})"
        if not self._is_stopping:
            self._fail(failure)
        for client in self.clients:
            client.lose(failure, f"{failure}. Start the server again.")
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


async def needs_of(config: EngineConfig, allowed: Allowance, program: tuple[str, ...] = PROGRAM) -> Needs:
    """Plans a model in a process of its own, as this one has neither its sizes nor its device.

    Raises EngineFailed for one that cannot be loaded, OSError.
    """
    model = ModelLaunch(config.model, config, "", "")
    launch = Launch(models=[model], parent_pid=os.getpid(), started_at=time.time(), allowance=allowed)
    process = await asyncio.create_subprocess_exec(
        *program,
        msgspec.json.encode(launch, enc_hook=str).decode(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        written, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    try:
        told = msgspec.json.decode(written.rpartition(b"\n")[0].rpartition(b"\n")[2], type=Needs | StartFailed)
    except msgspec.DecodeError:
        ended = _describe(process.returncode or 0, was_out_of_memory=False)
        raise EngineFailed(f"the process that plans its memory ended ({ended})") from None
    if isinstance(told, StartFailed):
        raise EngineFailed(told.message)
    return told


def _touched(file: Path) -> int:
    """Returns when a file was touched last, in nanoseconds; 0: it is not there."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _describe(code: int, was_out_of_memory: bool) -> str:
    """An exit status in words. was_out_of_memory: the kernel says that it ended a process of this control
    group.
    """
    if code == -signal.SIGKILL:
        if was_out_of_memory:
            return "killed by SIGKILL: memory ran out, says the kernel; lower --memory-gb, or allow the server more"
        return "killed by SIGKILL, usually by the kernel because memory ran out; if so, lower --memory-gb"
    if code < 0:
        with contextlib.suppress(ValueError):  # a signal without a name, as the real-time ones
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"exit status {code}"
