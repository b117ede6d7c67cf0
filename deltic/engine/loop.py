"""The engine: scheduler, cache and runner put together, and the process that serves it over two sockets.

`Engine` is synchronous and knows no sockets; the offline API uses it as it is. `main` is the engine process:
commands in, step, outputs out. It takes everything that waits in its queue before each step, never waits for
the queue while there is work, and sends the outputs of a step as one message.

The process ends when its parent does, when told to, and when it can no longer be trusted: a scheduler that
raises, pages that do not add up, steps that fail one after another. The client starts a new one.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import zmq

from deltic import logs
from deltic.config import EngineConfig
from deltic.engine.cache import Cache
from deltic.engine.constraint import Guides
from deltic.engine.request import (
    MAX_BIASES,
    MAX_LOGPROBS,
    Abort,
    CacheReport,
    Command,
    Constraint,
    DropVoice,
    EncodeVoice,
    EngineInfo,
    Event,
    InspectCache,
    Loading,
    Output,
    Ready,
    Request,
    Shutdown,
    StartFailed,
    Stats,
    Step,
    StepOutputs,
    StepResult,
    VoiceEncoded,
)
from deltic.engine.scheduler import RequestError, Scheduler
from deltic.engine.speech import SpeechStage
from deltic.engine.tiers import Tiers
from deltic.engine.trace import Trace
from deltic.engine.tree import Geometry
from deltic.models.checkpoint import text_directory

log = logging.getLogger("deltic.engine")

MAX_FAILURES = 3
"""Steps that may fail in a row before the process gives up on itself."""

OUT_OF_MEMORY = "out of memory while loading; free some, or lower --memory-gb"

MOVE_WAIT_S = 0.005
"""How long a step waits for the tiers when there is nothing else to do; then commands are looked at again."""

CLOSE_S = 4.0
"""How long a process that was told to stop goes on writing to --cache-dir: less than the client waits (SHUTDOWN_S)."""

CHECK_S = 60.0
"""An idle process looks whether everything adds up, but not oftener than this."""

IDLE_POLL_S = 1.0
"""How long an idle process waits before it looks whether its parent still lives."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h

Progress = Callable[[str, float], None]
"""Called with the name of a stage of the start and the part of it that is done, 0 to 1."""


class StepRunner(Protocol):
    """What the engine needs of a runner: `deltic.engine.runner.Runner`, or a fake in tests.

    A chunk that starts at 0 starts from the zero state, whatever its slot held before.

    Where `info.canonical_decode` is False, decodes and prefill chunks are two batches. A prefill chunk starts at a multiple of
    PAGE_SIZE and ends with the prompt at the latest; a decode is one generated token, known by value, of a sequence without a
    `start_slot`. One without a draw brings back what was lost.

    Such a runner may run ahead: start the next decode of a sequence that drew a token before that token was read, as far as the
    sequence's pages go and after the step's copies. It keeps what that draws until a later step asks for just that chunk, whatever
    else that step holds, and then does not run the chunk. A chunk of that sequence with another start, and its end, drop what
    was kept; nothing else does: a preempted sequence may come back, elsewhere, with pages and state as the run ahead left them.
    All that the engine takes from a sequence it hands to later work of the same stream, or to copies through `tiers`, which wait
    for it. So a run ahead whose sequence has ended does no harm. While `is_busy()`, what it runs ahead is not over: so long a step
    that waits for masks costs nothing.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def max_logit_rows(self) -> int: ...

    @property
    def tiers(self) -> Tiers | None:
        """Host memory and disk below the pools, if there are any."""

    def step(self, step: Step) -> StepResult: ...


@runtime_checkable
class SpeechStepRunner(StepRunner, Protocol):
    """A runner of a speech model: its steps bring codes, and a vocoder makes audio of them."""

    vocoder: Any
    """A `speech.StreamVocoder`."""
    voices: Any
    """A `voices.Voices`; None where the model has its own voices."""

    @property
    def n_streams(self) -> int:
        """Slots of the vocoder, from 0 on, that are the stage's."""

    def check_speech(self, request: Request) -> Any:
        """The encoded voice that the request names, None without one. Raises RequestError for what the model cannot speak."""


Build = Callable[[EngineConfig, Progress], StepRunner]


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What the client tells the process it starts, as JSON in its last argument."""

    config: EngineConfig
    commands: str
    """Endpoint that the process binds; the client connects to it once the process is ready."""
    events: str
    """Endpoint that the client has bound."""
    parent_pid: int
    started_at: float
    """Wall clock at the start of the process, in seconds: how long Python took to get to work."""
    log_format: str = "text"


def check_request(request: Request, info: EngineInfo) -> None:
    """Refuses what the sampler could not handle; a request that passes can do no harm to those beside it.

    Raises RequestError.
    """
    p, vocab_size = request.params, info.vocab_size
    most_logprobs = min(vocab_size, MAX_LOGPROBS)
    ranges: list[tuple[str, float, float, float]] = [
        ("max_tokens", p.max_tokens, 0, math.inf),
        ("min_tokens", p.min_tokens, 0, math.inf),
        ("temperature", p.temperature, 0.0, 1e6),
        ("top_k", p.top_k, 0, 2**31 - 1),
        ("top_p", p.top_p, 0.0, 1.0),
        ("min_p", p.min_p, 0.0, 1.0),
        ("repetition_penalty", p.repetition_penalty, 1e-6, 1e6),
        ("presence_penalty", p.presence_penalty, -1e6, 1e6),
        ("frequency_penalty", p.frequency_penalty, -1e6, 1e6),
        ("seed", p.seed or 0, -(2**63), 2**63 - 1),
        ("logprobs", p.logprobs or 0, 0, most_logprobs),
        ("prompt_logprobs", p.prompt_logprobs or 0, 0, most_logprobs),
        ("the number of stop_token_ids", len(p.stop_token_ids), 0, MAX_BIASES - len(info.eos_token_ids) - 1),
        ("the number of entries of logit_bias", len(p.logit_bias), 0, MAX_BIASES),
    ]
    for name, value, least, most in ranges:
        if not least <= value <= most:  # false for NaN too
            raise RequestError(f"{name} = {value}: must be from {least} to {most}")
    c = p.constraint or Constraint()
    n_prompt_ids = info.n_prompt_ids or vocab_size
    if request.prompt_ids and not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < n_prompt_ids:
        raise RequestError(f"prompt has a token id outside the vocabulary (0 to {n_prompt_ids - 1})")
    for name, ids in (
        ("stop_token_ids", p.stop_token_ids),
        ("logit_bias", p.logit_bias),
        ("constraint", (*c.close_ids, *c.begin_ids, *(() if c.think_end_id is None else (c.think_end_id,)))),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise RequestError(f"{name} has a token id outside the vocabulary (0 to {vocab_size - 1})")
    if not all(math.isfinite(bias) for bias in p.logit_bias.values()):
        raise RequestError("logit_bias has a value that is not finite")
    if c.think_budget is not None and (c.think_budget < 0 or c.think_end_id not in c.close_ids):
        raise RequestError("think_budget must be 0 or more, and close_ids must have think_end_id")


class Engine:
    """Requests in, outputs out, one step at a time, in the caller's thread."""

    def __init__(
        self,
        runner: StepRunner,
        max_itl_ms: float | None = None,
        tokenizer_file: Callable[[], Path] | None = None,
    ) -> None:
        """tokenizer_file: says where the tokenizer.json is, for grammars; asked when the first one comes."""
        self.runner = runner
        self.info = info = runner.info
        is_busy: Callable[[], bool] | None = getattr(runner, "is_busy", None)
        self.guides = Guides(info.vocab_size, info.eos_token_ids, tokenizer_file, is_busy)
        self.cache = Cache(
            info.n_pages,
            info.n_slots,
            n_places=info.max_num_seqs,
            geometry=Geometry(info.page_bytes, info.state_bytes, info.even_context),
            tiers=runner.tiers,
            enabled=info.prefix_cache,
            canonical_decode=info.canonical_decode,
            n_lookahead=info.n_lookahead,
            has_state=info.has_state,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=info.max_num_seqs,
            max_step_tokens=info.max_step_tokens,
            max_model_len=info.max_model_len,
            max_logit_rows=runner.max_logit_rows,
            eos_token_ids=info.eos_token_ids,
            max_itl_ms=max_itl_ms,
            n_lookahead=info.n_lookahead,
            block_size=info.block_size,
            max_prefill_seqs=info.max_prefill_seqs,
            guides=self.guides,
        )
        self._speaker = speaker = runner if isinstance(runner, SpeechStepRunner) else None
        self.voices = speaker.voices if speaker else None
        self.stage = SpeechStage(speaker.vocoder, speaker.n_streams) if speaker else None
        self.n_steps = 0
        self.n_failures = 0
        """Steps that failed since the last one that did not."""
        self.last_step_s = 0.0
        self.trace: Trace | None = None

    def fit_cost(self) -> None:
        """Times some steps, for the target of a step's time if there is one. Only before the first request."""
        if self.scheduler.cost is not None:
            self.scheduler.cost.fit(self.runner.step, self.info)

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError, a ValueError, when it cannot be run; nothing is queued then."""
        check_request(request, self.info)
        constraint = request.params.constraint
        if constraint is not None and constraint.grammar and not self.guides.has_tokenizer:
            raise RequestError("this engine has no tokenizer, and a grammar needs one")
        if request.speech is not None and not self.info.is_speech:
            raise RequestError("this model does not speak")
        if self.stage is not None and self.stage.has_request(request.id):
            raise RequestError(f"request id {request.id!r} is in use; give each request its own")
        voice = self._speaker.check_speech(request) if self._speaker else None
        self.scheduler.add(request, voice)
        if self.trace is not None:
            self.trace.arrived(request)

    def abort(self, request_id: str, index: int | None = None, if_waiting: bool = False) -> list[Output]:
        """Ends a request or one of its sequences at once: their last Outputs. Unknown ids are ignored. if_waiting: unless they
        ever had a place."""
        ended = self.scheduler.abort(request_id, index, if_waiting)
        if self.stage is not None:
            ended = self.stage.hold(ended) + ([] if if_waiting else self.stage.abort(request_id, index))
        return self._traced(ended)

    def encode_voice(self, command: EncodeVoice) -> VoiceEncoded | None:
        """Has a voice encoded; None: `voices.poll` answers. An answer at once is a refusal."""
        if self.voices is not None:
            self.voices.encode(command)
            return None
        why = "has voices of its own; a Base model clones others" if self.info.is_speech else "does not speak"
        return VoiceEncoded(command.key, error=f"this model {why}")

    def has_work(self) -> bool:
        return self.scheduler.n_open > 0 or (self.stage is not None and self.stage.has_work())

    def step(self) -> list[Output]:
        """Runs one step, and of a speech model the vocoder beside it or instead. A step that fails ends its sequences with an
        error; the others go on."""
        stage = self.stage
        if stage is None:
            return self._step()
        if stage.comes_first() or not self.scheduler.n_open:
            return self._vocode(stage)
        stage.step_begins()
        return self._step() + self._vocode(stage)

    def _vocode(self, stage: SpeechStage) -> list[Output]:
        """Audio that is done, and the next that the vocoder makes. Where it fails, the sequence ends, too."""
        outputs = stage.vocode(self.scheduler.n_open)
        for output in outputs:
            if output.finish_reason == "error":
                log.error("%s", output.error)
                self.scheduler.abort(output.id, output.index)
        return self._traced(outputs)

    def _step(self) -> list[Output]:
        ended = self.scheduler.take_masks(self.last_step_s)
        start = time.perf_counter()
        step = self.scheduler.plan()
        if step is None:
            if self.scheduler.n_open and not ended:  # all that is open waits for a mask, or for the tiers
                (self.guides if self.guides.n_busy else self.cache.store).wait(MOVE_WAIT_S)
            return self._traced(ended)
        planned = time.perf_counter()
        try:
            result = self.runner.step(step)
        except Exception as error:
            log.exception("a step of %s failed", logs.counted(len(step.chunks), "sequence"))
            self.n_failures += 1
            failed = self.scheduler.fail(
                step,
                f"the engine could not run this step ({type(error).__name__}: {error}); send the request again",
            )
            ended += failed
            return self._traced(ended if self.stage is None else self.stage.hold(ended))
        ran = time.perf_counter()
        outputs = ended + self.scheduler.commit(step, result)
        if self.stage is not None:
            outputs = self.stage.take(step, result, outputs)
        self.guides.give()
        self.n_failures = 0
        self.n_steps += 1
        end = time.perf_counter()
        self.last_step_s = end - start
        self.scheduler.observe(step, self.last_step_s)
        if self.trace is not None:
            waiting = [s for s in self.scheduler.sequences() if s.slot is None]
            self.trace.stepped(step, self.stats(), waiting, (start, planned, ran, end))
        return self._traced(outputs)

    def _traced(self, outputs: list[Output]) -> list[Output]:
        if self.trace is not None:
            self.trace.said(outputs)
            if not self.has_work():
                self.trace.flush()
        return outputs

    def stats(self) -> Stats:
        scheduler, cache = self.scheduler, self.cache
        return Stats(
            n_running=scheduler.n_running,
            n_waiting=scheduler.n_open - scheduler.n_running,
            n_pages_used=cache.n_pages_used,
            n_pages=self.info.n_pages,
            n_slots_used=cache.n_slots_used,
            n_slots=self.info.n_slots,
            n_steps=self.n_steps,
            n_prompt_tokens=scheduler.n_prompt_tokens,
            n_generated_tokens=scheduler.n_generated_tokens,
            n_preemptions=scheduler.n_preemptions,
            last_step_ms=self.last_step_s * 1000,
            cache=cache.store.count(),
            speech=None if self.stage is None else self.stage.stats(),
        )

    def cache_summary(self) -> dict[str, Any]:
        """What the prefix cache holds, as plain data."""
        return {"enabled": self.info.prefix_cache, **self.cache.store.summary()}

    def reset_cache(self) -> None:
        """Forgets every prefix, in every tier."""
        self.scheduler.reset_cache()

    def close(self, timeout_s: float) -> None:
        """Lets what is to be kept on disk get there, for at most so long. No step may follow."""
        begin = time.monotonic()
        self.guides.close()
        self.cache.store.close(max(0.0, timeout_s - (time.monotonic() - begin)))
        if self.voices is not None:
            self.voices.close(max(0.0, timeout_s - (time.monotonic() - begin)))
        if self.trace is not None:
            self.trace.close()

    def check(self) -> None:
        """Raises IntegrityError unless pages and slots add up."""
        self.scheduler.check()
        if self.stage is not None:
            self.stage.check()


def _wake_gpu() -> None:
    """Has the driver make the context that torch will use, while torch is imported. Does nothing without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


class EngineProcess:
    """An engine between its two sockets."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._events = self._context.socket(zmq.PUSH)
        for socket in (self._commands, self._events):
            socket.set_hwm(0)  # the client bounds what is open; a limit here would only block the step
        self._commands.bind(launch.commands)
        self._events.connect(launch.events)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def send(self, event: Event) -> None:
        self._events.send(self._encoder.encode(event))

    def close(self) -> None:
        """Closes the sockets; what was sent gets a second to arrive."""
        self._commands.close(linger=0)
        self._events.close(linger=1000)
        self._context.term()

    def progress(self, stage: str, done: float) -> None:
        self.send(Loading(stage, done))

    def load(self, build: Build | None) -> Engine | None:
        """Builds the engine and says so; None when it cannot be built, which is said too."""
        start_s = {"python": time.time() - self.launch.started_at}
        is_fake = build is not None
        try:
            if build is None:
                self.progress("import", 0.0)
                start = time.perf_counter()
                if self.launch.config.device != "cpu" and self.launch.config.quantize is None:
                    threading.Thread(target=_wake_gpu, daemon=True).start()
                from deltic.engine.build import build_for_device  # imports torch

                start_s["import"] = time.perf_counter() - start
                build = build_for_device
            config = self.launch.config
            trace = Trace(config.trace) if config.trace is not None else None
            engine = Engine(
                build(config, self.progress),
                config.max_itl_ms or None,
                lambda: text_directory(config) / "tokenizer.json",
            )
        except (ValueError, MemoryError, RuntimeError) as error:  # torch's out-of-memory is a RuntimeError
            text = str(error)
            out_of_memory = (
                isinstance(error, MemoryError) or "t allocate memory" in text or "out of memory" in text
            )
            if isinstance(error, RuntimeError) and not out_of_memory:
                raise
            self.send(StartFailed(OUT_OF_MEMORY if out_of_memory else str(error)))
            return None
        if "torch" in sys.modules:  # its threads have nothing left to do that is worth a core
            sys.modules["torch"].set_num_threads(1)
        start = time.perf_counter()
        if not is_fake:
            engine.fit_cost()
        engine.trace = trace
        engine.info.start_s = start_s | engine.info.start_s | {"fit": round(time.perf_counter() - start, 3)}
        # What was loaded stays: the collector need not walk it again, nor pause a step for it.
        gc.collect()
        gc.freeze()
        self.send(Ready(engine.info))
        self.send(StepOutputs([], engine.stats()))
        return engine

    def serve(self, engine: Engine) -> int:
        """Runs until told to stop; the exit status."""
        was_idle, checked_s = True, 0.0
        while self._parent_lives():
            outputs: list[Output] = []
            if not self._obey(engine, outputs):
                engine.close(CLOSE_S)
                return 0
            if engine.voices is not None:
                for encoded in engine.voices.poll():
                    self.send(encoded)
            busy = engine.has_work()
            if busy:
                outputs += engine.step()
            if busy or outputs:
                self.send(StepOutputs(outputs, engine.stats()))
                was_idle = False
            if engine.n_failures >= MAX_FAILURES:
                log.critical("%d steps failed in a row; the engine process gives up", engine.n_failures)
                return 1
            if not engine.has_work():
                if not was_idle and time.monotonic() - checked_s > CHECK_S:
                    engine.check()  # walks the whole tree
                    checked_s = time.monotonic()
                was_idle = True
                engine.cache.store.poll()
                wait_s = MOVE_WAIT_S if engine.cache.store.n_moving else IDLE_POLL_S
                if engine.voices is not None and engine.voices.is_waiting:
                    wait_s = 0.0 if engine.voices.has_work else MOVE_WAIT_S
                came = self._commands.poll(int(wait_s * 1000))
                if not came and wait_s == IDLE_POLL_S:
                    engine.guides.prepare()
        return 0

    def _obey(self, engine: Engine, outputs: list[Output]) -> bool:
        """Takes every command that waits; False when told to stop."""
        while int(self._commands.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = self._commands.recv()
            try:
                command = self._decoder.decode(message)
            except msgspec.ValidationError as error:
                outputs += _refusals(message, str(error))
                continue
            if isinstance(command, Abort):
                outputs += engine.abort(command.id, command.index, command.if_waiting)
            elif isinstance(command, Shutdown):
                return False
            elif isinstance(command, InspectCache):
                if command.reset:
                    engine.reset_cache()
                self.send(StepOutputs([], engine.stats()))
                self.send(CacheReport(engine.cache_summary()))
            elif isinstance(command, EncodeVoice):
                refusal = engine.encode_voice(command)
                if refusal is not None:
                    self.send(refusal)
            elif isinstance(command, DropVoice):
                if engine.voices is not None:
                    engine.voices.drop(command.key)
            else:
                try:
                    engine.add(command)
                except RequestError as error:
                    outputs += _refusals(message, str(error))
        return True

    def _parent_lives(self) -> bool:
        return os.getppid() == self.launch.parent_pid


def _refusals(message: bytes, error: str) -> list[Output]:
    """An error for each sequence of a request that cannot be run, or whose fields have not even the right types."""
    command = msgspec.msgpack.decode(message)
    n = command.get("params", {}).get("n", 1)
    return [Output(command["id"], index, finish_reason="error", error=error) for index in range(n)]


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel, where it can be asked, to signal this process when the one that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def main(build: Build | None = None, argument: str | None = None) -> int:
    """The engine process; the exit status. `argument` is a Launch as JSON, by default the last of the command line."""
    die_with_parent()
    # The terminal's Ctrl-C and a service manager's SIGTERM go to every process; the server drains, then says
    # Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    launch = msgspec.json.decode(
        argument or sys.argv[-1],
        type=Launch,
        dec_hook=lambda kind, value: kind(value),  # paths, as texts
    )
    logs.set_up("info", launch.log_format, "%(levelname)s %(name)s: %(message)s")
    if os.getppid() != launch.parent_pid:  # it ended before the kernel was asked to tell
        return 1
    process = EngineProcess(launch)
    try:
        engine = process.load(build)
        return process.serve(engine) if engine else 1
    finally:
        process.close()


if __name__ == "__main__":
    sys.exit(main())
