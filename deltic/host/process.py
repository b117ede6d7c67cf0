"""The engine process: one or more engines, each between two sockets of its own, which take turns in one
thread.

A turn takes all commands that have come, runs one step if there is work, and sends its outputs as one
message. So a step of one model delays the others by no more than itself, and a model without work costs
nothing. The process never waits for commands while an engine has work.

It ends when its parent does, when told to, and when it can no longer be trusted: a scheduler that raises,
pages that do not add up, steps that fail one after another. The parent (`supervisor.py`) starts a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, assert_never

import msgspec
import zmq

from deltic import logs
from deltic.config import ConfigError, EngineConfig
from deltic.engine import messages
from deltic.engine.cache.events import CacheEvents
from deltic.engine.checks import RequestError
from deltic.engine.engine import MAX_FAILURES, MOVE_WAIT_S, Build, Engine
from deltic.engine.events import CacheReport, Event, Loading, Needs, Pong, Ready, StartFailed, StepOutputs
from deltic.engine.guides import Vocabulary
from deltic.engine.messages import Output, Request
from deltic.engine.step import RunnerLostError
from deltic.engine.trace import Trace
from deltic.host.kv_events import EventPublisher
from deltic.host.launch import Allowance, Launch, ModelLaunch
from deltic.machine import cuda_driver, memory_bound
from deltic.models.checkpoint import drawable_ids, speaks, tokenizer_json
from deltic.ops.cpu.program import Program
from deltic.runtime.pools import Judge
from deltic.runtime.stages import wait_for_result

log = logging.getLogger("deltic.engine")

OUT_OF_MEMORY = "out of memory while loading{}; free some, or lower --memory-gb"

NO_MEMORY = ("t allocate memory", "out of memory")
"""Said by RuntimeErrors of torch's CPU allocator, and by those of CUDA and Triton."""

CLOSE_S = 4.0
"""Seconds for which a process that was told to stop goes on writing to --cache-dir: less than the host waits
(SHUTDOWN_S).
"""

CHECK_S = 60.0
"""An idle process looks whether everything adds up, but not oftener than this."""

IDLE_POLL_S = 1.0
"""Seconds that an idle process waits before it looks if its parent still lives."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ServedModel:
    """An engine between its two sockets."""

    engine: Engine
    """Engine of the model, once it is built."""

    def __init__(self, launch: ModelLaunch, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.name, self.config = launch.name, launch.config
        self._topic = None if launch.topic is None else launch.topic.encode()
        self._publisher: EventPublisher | None = None
        self.commands = context.socket(zmq.PULL)
        self._events = context.socket(zmq.PUSH)
        for socket in (self.commands, self._events):
            socket.set_hwm(0)  # the client bounds what is open; a limit here would only block the step
        self.commands.bind(launch.commands)
        self._events.connect(launch.events)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[messages.Command] = msgspec.msgpack.Decoder(messages.Command)
        self._outputs: list[Output] = []  # that commands gave, until the step
        self._is_checked, self._checked_s = True, 0.0
        self._n_moved = 0  # at the last Ping

    def send(self, event: Event) -> None:
        self._events.send(self._encoder.encode(event))

    def close(self) -> None:
        """Closes the sockets; what was sent gets a second to arrive."""
        self.commands.close(linger=0)
        self._events.close(linger=1000)

    def progress(self, stage: str, done: float) -> None:
        self.send(Loading(stage, done))

    def build(self, build: Build, is_fake: bool = False) -> None:
        """Builds the engine. What grammars need of the vocabulary is made beside it, for a real one.

        Raises ValueErrors, MemoryError, or torch's RuntimeError when there is no memory.
        """
        config = self.config
        trace = Trace(config.trace) if config.trace is not None else None
        vocabulary = Vocabulary(lambda: tokenizer_json(config))
        if not is_fake and not speaks(config):
            vocabulary.begin(lambda: drawable_ids(config))
        self.engine = Engine(build(config, self.progress), config.max_itl_ms or None, vocabulary)
        self.engine.trace = trace
        self.engine.tell = lambda outputs: self.send(StepOutputs(outputs, self.engine.stats()))

    def prepare(self, is_fake: bool) -> dict[str, float]:
        """Measures steps, and waits until grammars can begin; the seconds that each took."""
        start = time.perf_counter()
        if not is_fake:
            self.engine.fit_cost()
        fitted = time.perf_counter()
        if not is_fake and not self.engine.info.is_speech:
            self.engine.guides.prepare()  # most often it is long there
        return {"fit": round(fitted - start, 3), "grammars": round(time.perf_counter() - fitted, 3)}

    def publish(self, publisher: EventPublisher, is_alone: bool) -> None:
        """Tells of the cache from now on, if there is a topic. is_alone: the process has no other model."""
        if self._topic is not None:
            self._publisher = publisher
            self.engine.cache.store.listen(CacheEvents(self.engine.info, self.name, is_alone))
            self._tell()

    def _tell(self) -> None:
        """Tells what has changed in the cache."""
        events, publisher, topic = self.engine.cache.store.events, self._publisher, self._topic
        if events is not None and publisher is not None and topic is not None and (changes := events.collect()):
            publisher.publish(topic, changes)

    def obey(self) -> bool:
        """Takes every command that waits; False when told to stop."""
        engine, outputs = self.engine, self._outputs
        while int(self.commands.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = self.commands.recv()
            try:
                command = self._decoder.decode(message)
            except msgspec.DecodeError as error:
                outputs += _refusals(message, str(error))
                continue
            match command:
                case Request():
                    try:
                        engine.add(command)
                    except RequestError as error:
                        outputs += _refusals(message, str(error))
                case messages.Abort():
                    outputs += engine.abort(command.id, command.index, command.if_waiting)
                case messages.AddText():
                    outputs += engine.add_text(command)
                case messages.InspectCache():
                    if command.reset:
                        engine.reset_cache()
                    self.send(StepOutputs([], engine.stats()))
                    self.send(CacheReport(engine.cache_summary(), number=command.number))
                case messages.LocateCache():
                    self._answer(engine.locate_cache(command))
                case messages.EncodeVoice():
                    self._answer(engine.encode_voice(command))
                case messages.LoadAdapter():
                    self._answer(engine.load_adapter(command))
                case messages.DropAdapter():
                    if engine.adapters is not None:
                        engine.adapters.drop(command.key)
                case messages.DropVoice():
                    if engine.voices is not None:
                        engine.voices.drop(command.key)
                case messages.Ping():
                    self._pong()
                case messages.Shutdown():
                    return False
                case _:
                    assert_never(command)
        return True

    def _answer(self, event: Event | None) -> None:
        """Sends what can be said now; None: it comes later."""
        if event is not None:
            self.send(event)

    def _pong(self) -> None:
        """Answers a Ping."""
        store, n_moved = self.engine.cache.store, self._n_moved
        self._n_moved = store.tiers.n_moved
        self.send(Pong(is_stuck=store.is_loading and n_moved == self._n_moved))

    def step(self) -> bool:
        """Runs a step if there is work, and sends the outputs of it and of the commands. Returns whether
        there was work.
        """
        engine = self.engine
        outputs, self._outputs = self._outputs, []
        for items in engine.encoded:
            for answer in items.poll():
                self.send(answer)
        is_busy = engine.has_work()
        if is_busy:
            outputs += engine.step()
        else:
            engine.cache.store.poll()
        if is_busy or outputs:
            self.send(StepOutputs(outputs, engine.stats()))
            self._is_checked = False
        if self._publisher is not None:
            self._tell()
        return is_busy

    def rest(self) -> float:
        """Runs idle work; returns the seconds the process may sleep."""
        engine = self.engine
        engine.runner.is_busy()  # looks whether other machines of the model are there
        if not self._is_checked and time.monotonic() - self._checked_s > CHECK_S:
            engine.check()  # walks the whole tree
            self._checked_s = time.monotonic()
        self._is_checked = True
        if any(items.is_waiting for items in engine.encoded):
            return 0.0 if any(items.has_work for items in engine.encoded) else MOVE_WAIT_S
        return MOVE_WAIT_S if engine.cache.store.n_moving else IDLE_POLL_S


class EngineProcess:
    """The models of a Launch, served in turns."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._context = zmq.Context()
        self.models = [ServedModel(model, self._context) for model in launch.models]
        self._publisher: EventPublisher | None = None

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        for model in self.models:
            model.close()
        self._context.term()

    def load(self, build: Build | None) -> bool:
        """Builds the engines one after the other, so that each plan sees what memory the last one left, and
        says so when all are there. False when one cannot be built, which is said, too.
        """
        start_s = {"python": time.time() - self.launch.started_at}
        is_fake = build is not None
        model = self.models[0]
        try:
            self._check_traces()
            if self.launch.kv_events is not None:
                self._publisher = EventPublisher(self.launch.kv_events)
            build = build or self._import_build(start_s)
            for model in self.models:
                model.build(build, is_fake)
        except (ValueError, MemoryError, RuntimeError) as error:
            is_refusal = isinstance(error, ValueError)
            if not is_refusal and not is_out_of_memory(error):
                raise
            name = f"{model.name}: " if len(self.models) > 1 else ""
            model.send(StartFailed(name + (str(error) if is_refusal else OUT_OF_MEMORY.format(memory_bound()))))
            return False
        if "torch" in sys.modules:  # its threads have nothing left to do that is worth a core
            sys.modules["torch"].set_num_threads(1)
        spent = [start_s | model.engine.info.start_s | model.prepare(is_fake) for model in self.models]
        # What was loaded stays: the collector need not walk it again, nor pause a step for it.
        gc.collect()
        gc.freeze()
        for model, seconds in zip(self.models, spent, strict=True):
            if self._publisher is not None:
                model.publish(self._publisher, is_alone=len(self.models) == 1)
            model.send(Ready(msgspec.structs.replace(model.engine.info, start_s=seconds)))
            model.send(StepOutputs([], model.engine.stats()))
        return True

    def _check_traces(self) -> None:
        """Raises ConfigError when two models are to write to one file."""
        files = [model.config.trace.resolve() for model in self.models if model.config.trace is not None]
        for file in files:
            if files.count(file) > 1:
                raise ConfigError(f"--trace {file}: each model needs a file of its own")

    def _import_build(self, start_s: dict[str, float]) -> Build:
        self.models[0].progress("import", 0.0)  # of the others, nothing until their turn
        start = time.perf_counter()
        if any(model.config.may_use_gpu for model in self.models):
            threading.Thread(target=_wake_gpu, daemon=True).start()
        build = _runtime()
        build.check_alone([model.config for model in self.models])
        start_s["import"] = time.perf_counter() - start
        made: Build = build.build_runner
        return made

    def serve(self) -> int:
        """Runs until told to stop; the exit status."""
        models = self.models
        if self.launch.beat_s:
            place = Path(self.launch.models[0].commands.removeprefix("ipc://"))
            watch = threading.Thread(target=_beat, args=(place, self.launch.beat_s, threading.get_ident()), daemon=True)
            watch.start()
        poller = zmq.Poller()
        for model in models:
            poller.register(model.commands, zmq.POLLIN)
        while os.getppid() == self.launch.parent_pid:
            if len(models) > 1:
                self._share()
            is_busy = False
            for model in models:
                if not model.obey():
                    self._close_engines()
                    return 0
                is_busy |= model.step()
                if model.engine.n_failures >= MAX_FAILURES:
                    log.critical("%d steps failed in a row; the engine process gives up", MAX_FAILURES)
                    return 1
            if is_busy:
                continue
            wait_s = min(model.rest() for model in models)
            poller.poll(int(wait_s * 1000))
        return 0

    def _share(self) -> None:
        """Tells each engine who takes turns with it in this round."""
        busy = [model.engine for model in self.models if model.engine.has_work()]
        for model in self.models:
            model.engine.share([engine for engine in busy if engine is not model.engine])

    def _close_engines(self) -> None:
        """Lets each write what it keeps, all of them within CLOSE_S."""
        until_s = time.monotonic() + CLOSE_S
        for n_done, model in enumerate(self.models):
            model.engine.close(max(0.0, until_s - time.monotonic()) / (len(self.models) - n_done))


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether memory ran out, on the host or on a device.

    Torch's CPU allocator, the driver and Triton raise a bare RuntimeError, of which only the text says it.
    """
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


class _Several(msgspec.Struct, frozen=True):
    n: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 1


class _Asked(msgspec.Struct):
    """Names who waits for a request that cannot be run."""

    id: str
    params: _Several = _Several()


def _refusals(message: bytes, error: str) -> list[Output]:
    """An error for each sequence of a request that cannot be run, or whose fields have not even the right
    types. Of a message that does not even say whose it is, the log says it.
    """
    try:
        asked = msgspec.msgpack.decode(message, type=_Asked)
    except msgspec.DecodeError:
        log.error("a message to the engine cannot be read, and was passed over: %s", error)
        return []
    return [Output(asked.id, index, finish_reason="error", error=error) for index in range(asked.params.n)]


def _beat(socket: Path, every_s: float, thread: int) -> None:
    """Touches a socket's file while the engine's thread is in a kernel of the CPU, which may take minutes, or
    in a joint head, whose work the server bounds, or waits for a stage, which it does as long as that lives.

    It takes Python's lock for that: whoever keeps it, in one long call, keeps this from being a sign of life.
    """
    while True:
        time.sleep(every_s)
        frame = sys._current_frames().get(thread)
        is_alive = frame is not None and frame.f_code is Program.run.__code__
        while frame is not None and not is_alive:
            is_alive, frame = frame.f_code in (Judge.logits.__code__, wait_for_result.__code__), frame.f_back
        if is_alive:
            with contextlib.suppress(OSError):
                os.utime(socket)


def _wake_gpu() -> None:
    """Has the driver make the context that torch will use, while torch is imported.

    Does nothing without a driver.
    """
    driver, device, context = cuda_driver(), ctypes.c_int(), ctypes.c_void_p()
    if driver is not None and not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _runtime() -> Any:
    """Imports what plans and builds, and torch with it, where the model is for a GPU."""
    from deltic.runtime import build

    return build


def tell_needs(config: EngineConfig, allowed: Allowance, is_fake: bool = False) -> int:
    """Writes the Needs of a model as JSON, or a StartFailed that says why it cannot be loaded; the exit
    status. A fake one needs --memory-gb, or 1 GB.
    """
    told: Needs | StartFailed
    try:
        if is_fake:
            n_bytes, free = int((config.memory_gb or 1.0) * 1e9), allowed.free_bytes.get("cpu", 8_000_000_000)
            told = Needs("cpu", n_bytes, allowed.limit_bytes or free, free, {})
        else:
            told = _runtime().needs_of(config, allowed.free_bytes, allowed.limit_bytes)
    except ValueError as error:
        told = StartFailed(str(error))
    sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    return 0


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel, where it can be asked, to signal this process when the one that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def main(build: Build | None = None, argument: str | None = None) -> int:
    """The engine process; the exit status.

    `argument` is a Launch as JSON, by default the last of the command line.
    """
    die_with_parent()
    # The terminal's Ctrl-C and a service manager's SIGTERM go to every process; the server drains, then says
    # Shutdown.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    launch = msgspec.json.decode(
        argument or sys.argv[-1],
        type=Launch,
        dec_hook=lambda kind, value: kind(value),  # paths, as texts
    )
    logs.set_up("info", launch.log_format, "%(levelname)s %(name)s: %(message)s")
    if os.getppid() != launch.parent_pid:  # it ended before the kernel was asked to tell
        return 1
    if launch.allowance is not None:
        return tell_needs(launch.models[0].config, launch.allowance, is_fake=build is not None)
    process = EngineProcess(launch)
    try:
        return process.serve() if process.load(build) else 1
    except RunnerLostError as error:
        log.critical("%s; the engine process ends", error)
        os._exit(1)  # GPUs may be busy for good, and a clean end would wait for them
    finally:
        process.close()


if __name__ == "__main__":
    sys.exit(main())
