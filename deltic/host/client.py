"""The HTTP side of the queue of one model: feeds its engine, and hands out what that says.

Everything runs in one asyncio loop and one thread. A step arrives as one message; its outputs go to the
streams of their requests without a task or a queue object in between, so a token costs a few microseconds
here.

The process in which the engine runs is the EngineHost's (`supervisor.py`). Each gets its own pair of sockets:
nothing meant for one that died can reach the next.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Literal, TypeVar, assert_never

import msgspec
import zmq

from deltic.config import EngineConfig
from deltic.engine import events, messages
from deltic.engine.events import Event, Loading, Stats, metrics_of
from deltic.engine.messages import EngineInfo, FinishReason, Output, Request
from deltic.engine.turns import share_of
from deltic.host.launch import ModelLaunch
from deltic.logs import counted
from deltic.models.checkpoint import model_name

log = logging.getLogger("deltic.host.client")

State = Literal["unloaded", "starting", "ready", "restarting", "failed", "stopped"]

N_RECENT_STEPS = 240


class EngineFailed(RuntimeError):
    """The engine cannot be started; the message says why."""


class EngineUnavailable(RuntimeError):
    """The engine takes no requests at the moment: it loads, restarts, failed or stops."""


class QueueFull(RuntimeError):
    """The queue is full. `retry_after_s`: seconds after which a place is likely."""

    def __init__(self, n_waiting: int, retry_after_s: int) -> None:
        waiting = counted(n_waiting, "sequence")
        super().__init__(f"the queue is full ({waiting} waiting). Try again in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


A = TypeVar("A", bound=events.EngineReply)

Deliver = Callable[[list[Output]], None]
"""Takes outputs of one request, in their order."""


class RequestStream:
    """The outputs of one request on their way to its consumer, of all its n sequences.

    They are kept until `flush`, so that after a stall the outputs of several steps are delivered at once.
    """

    def __init__(self, request: Request, deliver: Deliver) -> None:
        self.request_id, self.tenant = request.id, request.tenant
        self.n_open = request.params.n
        self.submitted_s = time.monotonic()
        self.outputs: list[Output] = []
        """Outputs that were not delivered yet."""
        self._is_open = [True] * self.n_open
        self._deliver = deliver

    def push(self, output: Output) -> bool:
        """Adds an output; True when it ends its sequence. One for a sequence that has ended is dropped."""
        if not self._is_open[output.index]:
            return False
        self.outputs.append(output)
        if output.finish_reason is None:
            return False
        self._is_open[output.index] = False
        self.n_open -= 1
        return True

    def flush(self) -> None:
        """Delivers what was pushed."""
        outputs, self.outputs = self.outputs, []
        try:
            self._deliver(outputs)
        except Exception:  # the other streams are to have theirs
            log.exception("outputs of request %s could not be delivered", self.request_id)

    def end(self, reason: FinishReason, message: str) -> int:
        """Ends every sequence that is open, and delivers that; how many those were."""
        open_indices = [index for index, is_open in enumerate(self._is_open) if is_open]
        for index in open_indices:
            self.push(Output(self.request_id, index, finish_reason=reason, error=message))
        self.flush()
        return len(open_indices)


class EngineClient:
    """Client of one model's engine, in whatever processes its EngineHost starts.

    `max_queue` sequences may be open beyond the engine's `max_num_seqs`; with more, a tenant may still have
    its share of `max_queue`, whatever the others have. `on_event` is called, in the event loop, with
    everything the engine says, after the client has taken note.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_queue: int,
        on_event: Callable[[Event], None] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """name: what messages call the model, if not by its own name."""
        self.config = config
        self.name = name or model_name(config)
        self.max_queue = max_queue
        self.n_tenants = 1
        """Number of tenants among whom the queue is shared out."""
        self.topic: str | None = None
        """Topic of the engine's cache events; None: nobody is told."""
        self.state: State = "starting"
        self.info: EngineInfo | None = None
        self.stats = Stats()
        """Gauges of the process that runs; counters over all there were."""
        self.recent_steps: deque[tuple[float, float, int, int, int]] = deque(maxlen=N_RECENT_STEPS)
        """Facts of the last steps: when each was heard of (time.monotonic()), ms, sequences running, prompt
        tokens, generated tokens.
        """
        self.loading: Loading | None = None
        self.failure: str | None = None
        """Reason why the last process died or could not start."""
        self.refusal: str | None = None
        """Reason why this process cannot serve the model, once it has said so."""
        self.n_restarts = 0
        self.n_signs = 0
        """Events that show that the engine gets on with its work, of all processes."""
        self.is_stuck = False
        """True if the engine makes no progress, as it answered to the last Ping."""
        self.n_open = 0
        """Sequences whose last output has not come."""
        self._n_open_of: Counter[str] = Counter()  # the same, by tenant
        self.on_ready: Callable[[EngineInfo], None] | None = None
        """Called each time that an engine takes requests, before it can be sent any."""
        self.wake: Callable[[], Awaitable[None]] | None = None
        """Loads the model where it is unloaded; None: it is always there."""
        self._on_event = on_event
        self._streams: dict[str, RequestStream] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}  # by the number of the question
        self._numbers = count(1)
        self._drops: set[str] = set()  # voices to be forgotten when there is an engine again
        self._mean_request_s = 1.0
        self._last_n_steps = 0  # as the process says
        self._is_pinged = False  # and has not answered
        self._counted: Stats | None = None  # the counters of the processes that there were before
        self._state_changed = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._commands: zmq.Socket[bytes] | None = None
        self._commands_endpoint = ""
        self._events: zmq.Socket[bytes] | None = None
        self._events_fd = -1

    async def ready(self) -> EngineInfo:
        """Waits until the engine takes requests; a model that is unloaded is loaded. Raises EngineFailed when
        it never will.
        """
        if self.state == "unloaded" and self.wake is not None:
            await self.wake()
        while self.state in ("starting", "restarting"):
            await self._state_changed.wait()
        if self.state != "ready" or self.info is None:
            raise EngineFailed(self.failure or "the engine was stopped")
        return self.info

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Sends a request; its outputs go to `deliver`, in the event loop, until each of its sequences
        has had its last.

        Raises QueueFull or EngineUnavailable at once, or ValueError when the id is in use or n is below 1.
        What else is wrong with a request, the engine says in an Output.
        """
        n = request.params.n
        if n < 1 or request.id in self._streams:
            raise ValueError(f"request {request.id!r}: n = {n} must be 1 or more, and the id not in use")
        self.check_room(n, request.tenant)
        self._send(request)
        self._streams[request.id] = RequestStream(request, deliver)
        self.n_open += n
        self._n_open_of[request.tenant] += n
        self._all_ended.clear()

    def check_room(self, n: int, tenant: str = "", spare: int = 0) -> EngineInfo:
        """The engine's info, if it takes requests and has room for n more sequences of a tenant. spare:
        places of the queue to leave to others, where no share counts.

        Raises EngineUnavailable or QueueFull.
        """
        if self.state != "ready" or self.info is None:
            raise EngineUnavailable(self.why_unavailable())
        n_waiting = max(0, self.n_open - self.info.max_num_seqs)
        n = min(n, self.info.max_num_seqs)  # more are not waited for: the engine refuses them
        has_share = not spare and self._n_open_of[tenant] + n <= share_of(self.max_queue, self.n_tenants)
        if self.n_open + n > self.info.max_num_seqs + self.max_queue - spare and not has_share:
            # A waiting request gets its turn if requests go on taking as long as the last ones did.
            wait_s = math.ceil(self._mean_request_s * n_waiting / self.info.max_num_seqs)
            raise QueueFull(n_waiting, min(60, max(1, wait_s)))
        return self.info

    def add_text(
        self, request_id: str, text_ids: list[int], is_last: bool = False, max_tokens: int | None = None
    ) -> None:
        """Sends more of the text of a request whose `Speech.is_open`. One that has ended is left alone."""
        if request_id in self._streams:
            self._send(messages.AddText(request_id, text_ids, is_last, max_tokens))

    def abort(self, request_id: str, index: int | None = None, if_waiting: bool = False) -> None:
        """Ends a request, or one of its sequences, within a step; its last outputs are delivered. if_waiting:
        unless it ever had a batch slot.
        """
        if request_id in self._streams:
            self._send(messages.Abort(request_id, index, if_waiting))

    def _ask(self, command: messages.Question, kind: type[A]) -> Awaitable[A]:
        """Sends a question, to which the answer is a `kind`.

        Raises EngineUnavailable when there is no engine to ask, or, awaited, when it ends before it answers.
        """
        if self.state != "ready":
            raise EngineUnavailable(self.why_unavailable())
        command.number = next(self._numbers)
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._send(command)
        self._asked[command.number] = answer
        return answer

    async def inspect_cache(self, reset: bool = False) -> events.CacheReport:
        """The contents of the engine's prefix cache. reset: empty it first. It answers between two steps.

        Raises EngineUnavailable when there is no engine to ask, or when it ends before it answers.
        """
        return await self._ask(messages.InspectCache(reset), events.CacheReport)

    async def locate_cache(self, request: Request) -> events.CacheLocated:
        """Has what the prefix cache holds of a prompt written to disk, and says in which files it is.

        Raises EngineUnavailable when there is no engine to ask, or when it ends before it answers.
        """
        return await self._ask(messages.LocateCache(request), events.CacheLocated)

    async def encode_voice(self, command: messages.EncodeVoice) -> events.VoiceEncoded:
        """Has a voice encoded; the answer's error says why there is none. Beside the steps it takes seconds.

        Raises EngineUnavailable when there is no engine to ask, or when it ends before it answers.
        """
        return await self._ask(command, events.VoiceEncoded)

    def drop_voice(self, key: str) -> None:
        """Has the engine forget a voice, on disk as well; one that loads, as soon as it is ready."""
        if self.state == "ready":
            self._send(messages.DropVoice(key))
        else:
            self._drops.add(key)

    async def load_adapter(self, path: str) -> events.AdapterLoaded:
        """Has an adapter loaded; the answer's error says why there is none. It takes seconds, beside steps.

        Raises EngineUnavailable when there is no engine to ask, or when it ends before it answers.
        """
        return await self._ask(messages.LoadAdapter(path), events.AdapterLoaded)

    def drop_adapter(self, key: bytes) -> None:
        """Has the engine forget an adapter, once. One that is gone has forgotten all."""
        if self.state == "ready":
            self._send(messages.DropAdapter(key))

    def why_unavailable(self) -> str:
        """Reason why `submit` refuses requests at the moment, for whoever sent one."""
        if self.state == "unloaded":
            return "the model is not loaded; a request for an answer loads it"
        if self.state == "stopped":
            return "the server is shutting down"
        if self.state == "failed":
            return f"the engine is down: {self.failure}"
        if self.state == "restarting":
            why = f" ({self.failure})" if self.failure else ""
            return f"the engine is being restarted{why}. Try again in a few seconds."
        stage = f" ({self.loading.stage}, {self.loading.done:.0%})" if self.loading else ""
        return f"the engine is loading{stage}. Try again in a few seconds."

    # For the EngineHost.

    def open(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> ModelLaunch:
        """Makes the sockets of the next process, whose names begin with `endpoint`; what to tell it.

        Raises ZMQError.
        """
        self.refusal, self._is_pinged, self.is_stuck = None, False, False
        endpoint = f"{endpoint}-{self.n_restarts}"
        self._events, self._commands = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (self._events, self._commands):
            socket.set_hwm(0)  # `submit` bounds what is open; a socket must not block the event loop
            socket.linger = 0
        self._events.bind(f"{endpoint}-events")
        self._events_fd = self._events.fileno()
        asyncio.get_running_loop().add_reader(self._events_fd, self.receive)
        self._commands_endpoint = f"{endpoint}-commands"
        return ModelLaunch(self.name, self.config, self._commands_endpoint, f"{endpoint}-events", self.topic)

    def hang_up(self) -> None:
        """Closes the sockets of a process that is gone."""
        if self._events is None or self._commands is None:
            return
        if self._events_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._events_fd)
            self._events_fd = -1
        self._events.close()
        self._commands.close()
        self._events = self._commands = None

    def lose(self, failure: str, message: str) -> None:
        """The process is gone, and why: ends what is open with `message`."""
        self.hang_up()
        self.failure = failure
        self.end_all("error", message)
        self._forget_gauges()

    def end_all(self, reason: FinishReason, message: str) -> None:
        """Ends every request and question that is open."""
        for stream in list(self._streams.values()):
            self._note_ended(stream, stream.end(reason, message))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(message))
        self._asked.clear()

    async def drained(self) -> None:
        """Waits until no request is open."""
        await self._all_ended.wait()

    @property
    def is_asked(self) -> bool:
        """True if the engine takes requests, and somebody waits for something that it should say."""
        return self.state == "ready" and bool(self._streams or self._asked)

    def ping(self) -> None:
        """Asks for a sign, unless the last time was not answered yet: that is done between two steps."""
        self.is_stuck = False
        if not self._is_pinged:
            self._is_pinged = True
            self._send(messages.Ping())

    def send_shutdown(self) -> None:
        """Tells the process, with all its engines, to stop."""
        self._send(messages.Shutdown())

    def set_state(self, state: State) -> None:
        """Notes what there is of an engine. unloaded: it was stopped, and only counters are kept of it."""
        if state == "unloaded":
            self.info = self.loading = self.failure = None
            self._forget_gauges()
        self.state = state
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    # Messages.

    def _send(self, command: messages.Command | messages.Question) -> None:
        if self._commands is not None:
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    def receive(self) -> None:
        """Takes every message that has come, then delivers.

        None may be left: the socket signals only new ones.
        """
        fed: list[RequestStream] = []
        while self._events is not None:
            try:
                message = self._events.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                event = self._decoder.decode(message)
                self._take(event, fed)
                if self._on_event:
                    self._on_event(event)
            except Exception:
                log.exception("an event of the engine could not be handled")
        for stream in fed:
            stream.flush()

    def _take(self, event: Event, fed: list[RequestStream]) -> None:
        """fed: gets the streams that have something to deliver now."""
        if not isinstance(event, events.StepOutputs | events.Pong):
            self.n_signs += 1
        match event:
            case events.StepOutputs():
                self.n_signs += bool(event.outputs) or event.stats.n_steps != self._last_n_steps
                self._last_n_steps = event.stats.n_steps
                self._count(event.stats)
                streams = self._streams
                for output in event.outputs:
                    stream = streams.get(output.id)
                    if stream is None:
                        continue
                    if not stream.outputs:
                        fed.append(stream)
                    if stream.push(output):
                        self._note_ended(stream, 1)
            case events.Pong():
                self._is_pinged, self.is_stuck = False, event.is_stuck
                self.n_signs += not event.is_stuck
            case events.EngineReply():
                # No future: `stop` has answered for the engine. It is done: who asked has left.
                answer = self._asked.pop(event.number, None)
                if answer is not None and not answer.done():
                    answer.set_result(event)
            case Loading():
                self.loading = event
            case events.StartFailed():
                self.refusal = event.message
            case events.Ready():
                self._begin(event.info)
            case _:
                assert_never(event)

    def _begin(self, info: EngineInfo) -> None:
        """The process is ready."""
        if self.state == "stopped" or self._commands is None:
            return
        # Only now: the process has bound its end, and a command sent before could not be answered.
        self._commands.connect(self._commands_endpoint)
        self.info, self.loading = info, None
        self.set_state("ready")
        if self.on_ready is not None:
            self.on_ready(info)
        while self._drops:
            self._send(messages.DropVoice(self._drops.pop()))
        if self.n_restarts:
            log.info("%s is ready again", self.name)

    def _note_ended(self, stream: RequestStream, n: int) -> None:
        """`n` sequences of `stream` had their last output."""
        self.n_open -= n
        self._n_open_of[stream.tenant] -= n
        if stream.n_open == 0:
            del self._streams[stream.request_id]
            self._mean_request_s += 0.1 * (time.monotonic() - stream.submitted_s - self._mean_request_s)
            if not self._streams:
                self._all_ended.set()

    def _count(self, stats: Stats) -> None:
        """Takes the gauges as they are, and the counters on top of those of the processes that died."""
        if self._counted is not None:
            _add(stats, self._counted)
        last, self.stats = self.stats, stats
        if stats.n_steps > last.n_steps:
            n_prompt = stats.n_prompt_tokens - last.n_prompt_tokens
            n_generated = stats.n_generated_tokens - last.n_generated_tokens
            self.recent_steps.append((time.monotonic(), stats.last_step_ms, stats.n_running, n_prompt, n_generated))

    def _forget_gauges(self) -> None:
        """Sets the gauges to zero, as nothing runs any more; the counters keep what they have."""
        last, counted, self.stats = self.stats, Stats(), Stats()
        self._counted = counted
        for kept in (counted, self.stats):
            for name in ("speech", "pictures", "replays", "experts"):
                part = getattr(last, name)
                setattr(kept, name, None if part is None else type(part)())
            _add(kept, last)


def _add(stats: msgspec.Struct, earlier: msgspec.Struct) -> None:
    """Adds `earlier`'s counters to those of `stats`, of their parts, too."""
    metrics = metrics_of(type(stats))
    for name in stats.__struct_fields__:
        now, before = getattr(stats, name), getattr(earlier, name)
        if isinstance(now, msgspec.Struct) and isinstance(before, msgspec.Struct):
            _add(now, before)
        elif name in metrics and metrics[name].is_counter:
            is_by_name = isinstance(now, dict)
            total = {key: now.get(key, 0) + before.get(key, 0) for key in before | now} if is_by_name else now + before
            setattr(stats, name, total)
