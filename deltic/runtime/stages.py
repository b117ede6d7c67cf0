"""A model on several machines: each runs a stage of its layers, and hands its rows to the next.

    engine: first layers  --step-->  stage: further layers  --step-->  stage: last layers, head, draws
                          --rows-->                         --rows-->
                          <-result-                         <-result-

A page and a state slot have the same number on every machine. A step is told to all before any computes, then
its rows follow. Whatever goes wrong with one machine ends what all of them have computed: the engine's
process ends, and the next one builds all stages again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.tiers import Move
from deltic.engine.cache.tree import Kind
from deltic.engine.engine import StepRunner
from deltic.engine.mirror import (
    Answer,
    AskedMoves,
    AskedTiers,
    DroppedAdapter,
    Errand,
    Mirror,
    SentResult,
    SentStep,
    StepTeller,
    Task,
)
from deltic.engine.step import Progress, RunnerLostError, Step, StepResult
from deltic.models.files import PACKED
from deltic.models.qwen.shape import LINEAR_ATTENTION, ModelShape, all_stages, stage_of
from deltic.models.qwen.weights import check_weights, empty_weights
from deltic.ops.arrays import Array, raw
from deltic.ops.formats import Quantised
from deltic.runtime.adapters import Adapters
from deltic.runtime.model import WHERE, TextModel
from deltic.runtime.wire import (
    GREETING_S,
    Beat,
    Join,
    Limits,
    Loaded,
    LostError,
    PeerConnection,
    ReadyStage,
    Rows,
    StageLoading,
    StageRefusal,
    check_private,
    greet,
    parse_address,
    read_secret,
)

log = logging.getLogger("deltic.stages")

WAIT_S = 600.0
"""Seconds for which a start waits until a stage listens and is free: machines start in any order, and what
runs there may be left over from this server's last engine.
"""
RETRY_S = 0.5
ASIDE_S, IDLE_S = 0.005, 1.0
"""Seconds after which a stage looks at what it does beside the steps, and at the stage behind."""

LOCAL = (
    *("model", "revision", "download_dir", "tokenizer", "device", "dummy", "threads", "pin_threads", "memory_gb"),
    *("stages_secret", "trace", "cache_dir"),
)
"""Settings that each machine has of its own. All others are the engine's."""

ABSENT: dict[str, object] = {
    "weights-cache": None,
    "expert-memory": None,
    "draft-model": None,
    "allow-cache-transfer": False,
}
"""Flags that a model on several machines does not honour yet, and what their settings are there."""
ABSENT_ON_GPUS: dict[str, object] = {
    "tensor-parallel": 1,
    "tp-invariant": None,
    "expert-parallel": False,
    "draft-model": None,
    "max-picture-tokens": 0,
    "cache-host-gb": 0.0,
    "cache-dir": None,
}
"""The same of machines that run their layers on a GPU, of which each has one."""


class StageTasks:
    """Tasks of a stage beside its steps: what moves between its tiers, and adapters."""

    def __init__(self, runner: StepRunner, open_tiers: Callable[[str], object], name: str) -> None:
        """open_tiers: does so for what its files are named after; raises ConfigError. name: of this stage."""
        self._runner, self._open_tiers, self._name = runner, open_tiers, name
        self._adapters = runner.adapters if isinstance(runner.adapters, Adapters) else None
        self._tickets: dict[int, int] = {}  # the number of a task, by that of a ticket
        self._answers: list[Answer] = []
        self._n_moved = 0

    @property
    def is_waiting(self) -> bool:
        """True if something is under way."""
        adapters = self._adapters
        return bool(self._tickets or self._answers) or (adapters is not None and adapters.is_waiting)

    def take(self, task: Task | DroppedAdapter) -> None:
        """Does a task or begins to. Raises LostError for one that nobody has who keeps to the rules."""
        adapters = self._adapters
        if isinstance(task, AskedTiers):
            self._answers.append(Answer(task.number, self._opened(task)))
        elif isinstance(task, AskedMoves):
            self._move(task)
        elif adapters is None:
            raise LostError("an adapter was sent, and there is no room for any")
        elif isinstance(task, DroppedAdapter):
            adapters.drop_slot(task.adapter_slot)
        else:
            adapters.load(task)

    def answers(self) -> Iterator[Answer | Beat]:
        """Answers to tasks that are done by now."""
        yield from self._answers
        self._answers = []
        for done in [] if self._adapters is None else self._adapters.poll():
            yield Answer(done.number, None if done.error is None else f"stage {self._name}: {done.error}")
        tiers = self._runner.tiers
        if tiers is None or not self._tickets:
            return
        for ticket, moves in tiers.finished():
            failed = [i for i, move in enumerate(moves) if not move.ok]
            is_full = bool(failed) and tiers.disk is not None and tiers.disk.is_full
            yield Answer(self._tickets.pop(ticket), failed=failed, is_full=is_full)
        if tiers.n_moved != self._n_moved:
            self._n_moved = tiers.n_moved
            yield Beat(has_moved=True)

    def _opened(self, task: AskedTiers) -> str | None:
        """Opens the tiers; why that cannot be."""
        try:
            self._open_tiers(task.content)
        except ConfigError as error:
            return f"stage {self._name}: {error}"
        if (tiers := self._runner.tiers) is not None and tiers.disk is not None:
            tiers.disk.keep({task.keys[i : i + 16] for i in range(0, len(task.keys), 16)})
        return None

    def _move(self, task: AskedMoves) -> None:
        tiers = self._runner.tiers
        moves = [
            Move(Kind(kind), key, parent, depth, device, units)
            for kind, key, parent, depth, device, units in task.moves
        ]
        if tiers is None:
            raise LostError("something was to be moved, and there are no tiers")
        if task.action in ("load", "save"):
            self._tickets[(tiers.load if task.action == "load" else tiers.save)(moves)] = task.number
        elif task.action == "clear":
            tiers.clear()
        elif task.action == "resume" and tiers.disk is not None:
            tiers.disk.resume()
        for move in moves if task.action in ("in", "out", "delete") else ():
            if task.action == "delete":
                tiers.delete(move.kind, move.key)
            else:
                (tiers.copy_in if task.action == "in" else tiers.copy_out)(move)


def check_settings(config: EngineConfig, device: str) -> EngineConfig:
    """The settings, of a model on several machines without what those do not share. device: cpu or cuda.
    Raises ConfigError for one that was given and is not honoured there.
    """
    if not config.stages:
        return config
    flags = ABSENT | (ABSENT_ON_GPUS if device == "cuda" else {})
    absent = {flag.replace("-", "_"): value for flag, value in flags.items()}
    for name, value in absent.items():
        if getattr(config, name) not in (value, config.__dataclass_fields__[name].default):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}: a model on several machines (--stages) has none yet; leave it out")
    for given in config.stages:
        parse_address(given, "--stages")
        if config.stages.count(given) > 1:
            raise ConfigError(f"--stages: {given} is named twice; it runs layers of one model, once")
    return replace(config, **absent)  # type: ignore[arg-type]


def divide(shape: ModelShape, quantize: str | None, n: int) -> list[tuple[int, int]]:
    """The layers [begin, end) of each of n stages, such that the largest has as few bytes of weights as can
    be; each has layers of both types. Raises ConfigError where there are too few.
    """
    weights = empty_weights(shape, quantize, shape.tie_word_embeddings)
    names = dict.fromkeys(range(shape.n_layers), 0) | {-1: weights.embed.n_bytes, -2: weights.lm_head.n_bytes}
    if shape.has_draft_head and weights.embed is not weights.lm_head:
        names[-2] += weights.embed.n_bytes  # which the draft head reads
    for name, memory in weights.named_memory():
        if name.startswith("layers."):
            names[int(name.split(".")[1])] += memory.nbytes
        elif name.startswith("draft_head."):
            names[-2] += memory.nbytes
    n_layers, is_gdn = shape.n_layers, [kind == LINEAR_ATTENTION for kind in shape.layer_types]

    def cost(begin: int, end: int) -> float:
        if len(set(is_gdn[begin:end])) < 2:
            return float("inf")
        ends = (names[-1] if begin == 0 else 0) + (names[-2] if end == n_layers else 0)
        return ends + sum(names[i] for i in range(begin, end))

    best: list[tuple[float, list[int]]] = [(cost(0, end), [0, end]) for end in range(n_layers + 1)]
    for _ in range(n - 1):
        best = [
            min(((max(best[i][0], cost(i, end)), [*best[i][1], end]) for i in range(end)), default=(float("inf"), []))
            for end in range(n_layers + 1)
        ]
    largest, bounds = best[n_layers]
    if largest == float("inf"):
        raise ConfigError(
            f"--stages: {n_layers} layers, of which {sum(is_gdn)} are DeltaNet's, make no {n} stages with layers of both types; give "
            "fewer machines"
        )
    return list(pairwise(bounds))


def nth_stage(shape: ModelShape, directory: Path, config: EngineConfig, number: int) -> ModelShape:
    """The shape of a stage, counted from 0; without --stages the model's. directory: of the checkpoint.

    Raises ConfigError for a kind of model that is not run in stages, or too many of these.
    """
    if not config.stages:
        return shape
    what = "Qwen3.8-Flash-Next" if shape.n_streams > 1 else "an embedder or a model with a joint head"
    if shape.n_streams > 1 or shape.keeps_hidden:
        raise ConfigError(f"--stages: {what} is not run on several machines yet; leave the flag out")
    if config.dummy is None and (directory / PACKED).exists():
        raise ConfigError(f"--stages: {directory} is packed, for one machine; give the original checkpoint")
    return stage_of(shape, *divide(shape, config.rounded, 1 + len(config.stages))[number])


def settings_of(join: Join, given: EngineConfig) -> EngineConfig:
    """The engine's settings, with what is this machine's own as given. Raises ConfigError for what are none,
    and for another kind of device.
    """
    try:
        config = msgspec.json.decode(join.config, type=EngineConfig, dec_hook=lambda kind, value: kind(value))
    except msgspec.DecodeError as error:
        raise ConfigError(f"the engine's settings cannot be read: {error}") from None
    device = given.device or join.device
    if device != join.device:
        raise ConfigError(
            f"--device {device}: it runs on {WHERE[device]}, and the layers in front on {WHERE[join.device]}, whose bits are others; "
            "give all machines the same --device"
        )
    return replace(config, **{name: getattr(given, name) for name in LOCAL} | {"device": device})


def content_of(model: TextModel) -> str:
    """Names what is run, for machines that must run the same: the shape, and of each stored tensor the name,
    the size and the first row. Raises what checking a checkpoint does.
    """
    shape, config = all_stages(model.shape), model.config
    fields = {name: value for name, value in asdict(shape).items() if name not in {"formats"}}
    digest = hashlib.blake2b(json.dumps([fields, config.rounded], sort_keys=True, default=str).encode(), digest_size=16)
    if config.dummy is not None:
        digest.update(f"{config.dummy} {config.seed}".encode())
        return digest.hexdigest()
    tensors, *_ = check_weights(model.directory, shape, config.rounded)
    for name, tensor in sorted(tensors.items()):
        rows = tensor.read(0, 1)
        values = rows.codes if isinstance(rows, Quantised) else rows
        digest.update(f"{name} {tensor.shape} ".encode() + raw(np.ascontiguousarray(values)).tobytes())
    return digest.hexdigest()


class Neighbours(Protocol):
    """The stages of other machines in front of a runner and behind it. Where one is lost all methods raise
    RunnerLostError.
    """

    def begin(self, step: Step) -> None:
        """Tells those behind of a step. Those in front have told of it here."""

    def receive(self, rows: Array) -> None:
        """Fills rows of a step's residual, float32 [T, S H], with the next ones of the stage in front."""

    def pass_on(self, rows: Array) -> None:
        """Hands rows to the stage behind, as they are now."""

    def result(self) -> StepResult:
        """Waits for what came of all rows of a step."""

    def end(self) -> None:
        """The step is over here."""

    def hear(self) -> None:
        """Takes what those behind have said, and looks whether they are there."""


class Stages:
    """The stages behind a runner, through the next one, and the one in front of it, if there is one: the
    runner's Neighbours.
    """

    def __init__(self, model: TextModel, device: str, front: PeerConnection | None = None) -> None:
        """device: cpu or cuda, the same on all machines. front: of a stage; None: of the engine's own."""
        self._front, self._config, self._device = front, model.config, device
        self._model = model
        self.said: list[ReadyStage] = []
        """Machines from this one on, once all are ready."""
        self.timeout_s = model.config.stages_timeout_s
        """Seconds of a step for which a stage may be silent."""
        self.limit_s = max(self.timeout_s, GREETING_S)
        """The same of a start and beside the steps."""
        self.behind: PeerConnection | None = None
        self._told = StepTeller(0)
        self._is_stepping = False
        self._asked: dict[int, Errand] = {}
        self._n_asked = self.n_heard = 0
        self._silent_s, self._looked_s = 0.0, time.monotonic()

    # At the start, in this order.

    def join(self, number: int, own: Limits, progress: Progress) -> Limits:
        """Has the stages behind stage `number` settle what they run. Returns sizes for which all have room.

        Raises ConfigError for what one of them refuses, or where one is not there in time.
        """
        if number == len(self._config.stages):
            return own
        address, content = self._config.stages[number], content_of(self._model)
        defaults = {name: EngineConfig.__dataclass_fields__[name].default for name in LOCAL}
        if self._front is None and self._model.tower is None:
            defaults["max_picture_tokens"] = 0  # of a stage its front has said so
        shared = replace(self._config, **defaults)  # type: ignore[arg-type]
        config = msgspec.json.encode(shared, enc_hook=str)
        begun, told = time.monotonic(), time.monotonic() + 2
        while True:
            progress("stages", 0.0)
            waited = time.monotonic() - begun
            found = self._ask(address, Join(config, number + 1, content, self._device), progress)
            if isinstance(found, Limits):
                return own.least(found)
            if not found.may_pass:
                raise ConfigError(f"stage {address}: {found.why}")
            if waited > WAIT_S:
                raise ConfigError(f"stage {address}: {found.why}; is `deltic stage --listen {address}` running there?")
            if time.monotonic() >= told:
                log.warning("waiting for stage %s (%s)", address, found.why)
                told = time.monotonic() + 30
            time.sleep(RETRY_S)

    def _ask(self, address: str, join: Join, progress: Progress) -> Limits | StageRefusal:
        """Asks a stage to join once, and keeps the connection where it does. Raises ConfigError."""
        connection = None
        try:
            connection = dial(address, read_secret(self._config.stages_secret))
            connection.send(join)
            answer = self._answer(connection, progress)
        except (OSError, LostError) as error:
            answer = StageRefusal(str(error), may_pass=True)
        if isinstance(answer, Limits):
            self.behind = connection
            return answer
        if connection is not None:
            connection.close()
        return answer if isinstance(answer, StageRefusal) else StageRefusal(f"it sent {answer}, where sizes were due")

    def load(self, limits: Limits) -> TextModel:
        """Has the stages behind load their weights, for these sizes. Returns the model with them in its
        settings. Raises RunnerLostError.
        """
        self._told = StepTeller(limits.sizes["max_num_seqs"])
        if self.behind is not None:
            with self._losing():
                self.behind.send(limits)
        config = replace(self._config, **limits.sizes)  # type: ignore[arg-type]
        return replace(self._model, config=config, n_host_units=limits.n_host_units)

    def wait(self, own: ReadyStage, progress: Progress) -> list[ReadyStage]:
        """Waits until all stages behind are ready. Returns them, this one first.

        Raises ConfigError for what one of them refuses, RunnerLostError.
        """
        if self.behind is None:
            return [own]
        with self._losing():
            answer = self._answer(self.behind, progress)
            if isinstance(answer, Loaded):
                return [own, *answer.said]
            raise _unexpected(self.behind, answer, "a stage that is ready")

    def _answer(self, connection: PeerConnection, progress: Progress) -> object:
        """Reads on behind signs of life, and reports of progress, which are passed on. Raises LostError."""
        while isinstance(answer := connection.receive(self.limit_s), StageLoading | Beat):
            if isinstance(answer, StageLoading):
                progress(answer.what, answer.done)
        return answer

    # In a step, as Neighbours.

    def begin(self, step: Step) -> None:
        """Tells the stages behind of a step."""
        if self._is_stepping:
            raise RunnerLostError("a step has failed here that other machines have begun")
        self._is_stepping, self._silent_s = True, 0.0  # a step has a limit of its own
        if self.behind is not None:
            with self._losing():
                self.behind.send(self._told.of(step), timeout_s=self.timeout_s)

    def receive(self, rows: Array) -> None:
        assert self._front is not None
        with self._losing():
            self._front.receive_rows(raw(rows).data.cast("B"))

    def pass_on(self, rows: Array) -> None:
        assert self.behind is not None
        with self._losing():
            self.behind.send(Rows(rows.nbytes), raw(rows).data.cast("B"), self.timeout_s)

    def result(self) -> StepResult:
        assert self.behind is not None
        with self._losing():
            return wait_for_result(self.behind, self.timeout_s, self._take)

    def end(self) -> None:
        """The step is over here."""
        self._is_stepping = False

    # Beside the steps, as Machines.

    def ask(self, task: Task) -> Errand:
        """Asks all machines behind."""
        self._n_asked += 1
        task.number = self._n_asked
        asked = self._asked[self._n_asked] = Errand(len(self._config.stages))
        self.tell(task)
        return asked

    def tell(self, news: Task | DroppedAdapter) -> None:
        """Tells all machines behind."""
        if self.behind is not None:
            with self._losing():
                self.behind.send(news, timeout_s=self.timeout_s)

    def hear(self, timeout_s: float = 0.0) -> None:
        """Takes what has come, or waits for it so long. Raises RunnerLostError where nothing comes any
        more.
        """
        if self.behind is None:
            return
        # Not by the clock: while this process itself stood still, it took no note of signs.
        now = time.monotonic()
        self._silent_s, self._looked_s = self._silent_s + min(now - self._looked_s, IDLE_S), now
        with self._losing():
            while _waiting([self.behind], timeout_s):
                timeout_s = 0.0
                message = self.behind.receive(self.limit_s)
                if not isinstance(message, Answer | Beat):
                    raise _unexpected(self.behind, message, "an answer")
                self._take(message)
            if self._silent_s > self.limit_s:
                raise self.behind.lost(TimeoutError())

    def _take(self, message: Answer | Beat) -> None:
        """Takes what a stage behind says of a task, which is for the engine, and any sign of life."""
        self._silent_s = 0.0
        self.n_heard += message != Beat()
        if self._front is not None:
            self._front.send(message)
        elif isinstance(message, Answer):
            asked = self._asked[message.number]
            asked.answers.append(message)
            if asked.is_done:
                del self._asked[message.number]

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except LostError as error:
            raise RunnerLostError(f"a machine is lost: {error}; if `deltic stage` hangs there, restart it") from None


def _unexpected(connection: PeerConnection, message: object, due: str) -> Exception:
    """The error for a message that is not what was due: of a refusal, what the stage says."""
    if isinstance(message, StageRefusal):
        return (RunnerLostError if message.may_pass else ConfigError)(f"stage {connection.name}: {message.why}")
    return LostError(f"{connection.name} sent {message}, where {due} was due")


def wait_for_result(connection: PeerConnection, timeout_s: float, take: Callable[[Answer | Beat], None]) -> StepResult:
    """The result of a step, behind signs of life and answers, which are given to `take`. Raises LostError
    where nothing comes in time, RunnerLostError for what a stage refuses.

    The engine's thread may be here for long: that it is, is a sign of life of its own (host/process.py).
    """
    while isinstance(message := connection.receive(timeout_s), Beat | Answer):
        take(message)
    if not isinstance(message, SentResult):
        raise _unexpected(connection, message, "a result")
    return message.result


def dial(address: str, secret: bytes) -> PeerConnection:
    """A connection to a stage that has the secret. Raises OSError, LostError, ConfigError."""
    host, port = parse_address(address, "--stages")
    place = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    check_private(place, secret, f"--stages {address}")
    connection = PeerConnection(socket.create_connection((place, port), GREETING_S), address)
    try:
        greet(connection, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def _waiting(connections: list[PeerConnection], timeout_s: float) -> list[PeerConnection]:
    """The connections on which something has come or that were closed, once there is one, or in time."""
    poll = select.poll()
    for one in connections:
        poll.register(one.socket, select.POLLIN)
    found = {number for number, _ in poll.poll(timeout_s * 1000)}
    return [one for one in connections if one.socket.fileno() in found]


def serve_steps(front: PeerConnection, runner: StepRunner, stages: Stages, beside: StageTasks) -> None:
    """Runs the steps that come from the front, and does beside them what it asks for, until it closes:
    LostError. Raises RunnerLostError.
    """
    mirror = Mirror(runner.info.max_num_seqs)
    ends = [front] if stages.behind is None else [front, stages.behind]
    while True:
        for answer in beside.answers():
            front.send(answer)
        found = _waiting(ends, ASIDE_S if beside.is_waiting else IDLE_S)
        stages.hear()
        if front not in found:
            continue
        message = front.receive()
        if isinstance(message, Task | DroppedAdapter):
            stages.tell(message)
            beside.take(message)
        elif isinstance(message, SentStep):
            if runner.tiers is not None:
                runner.tiers.follow()
            front.send(SentResult.of(runner.step(mirror.step(message))))
        else:
            raise LostError(f"{front.name} sent {message}, where a step was due")


def beat(front: PeerConnection, every_s: float) -> None:
    """Tells the front that this process lives, whatever its main thread does, until the connection is
    closed.
    """
    with suppress(LostError):
        while True:
            time.sleep(every_s)
            front.send(Beat())
