"""The way from codes to audio: which streams are vocoded now, and how many of their frames.

Each step brings a frame of codes for each sequence that decodes. The stage keeps the frames. Between two
steps it may have the vocoder turn some of them into one chunk of audio. It runs in the engine's own loop,
without threads.

Every frame has a deadline: the time at which a client that plays the stream from its first audio on would run
dry. Frames of all streams are taken in the order of their deadlines. All frames taken at once are one batch,
which shares the vocoder's weights. This decides the sizes of chunks: a stream that is ahead of playback waits
until a batch is worth it; any other gets the frames that are there.

| who goes first | |
| --- | --- |
| frames that would be late after one more step | before the step |
| a step | |
| first chunks of streams, and frames that are due soon | after the step |
| a batch of frames of streams that are ahead | after the step, unless a stream has heard nothing yet |
| the same, where the vocoder runs beside the steps and is quicker | after the step, without first chunks |
| the same, where somebody lacks a state slot | after the step |
| whole answers, whose deadlines are far away | when there is a full pass of them, or no step to run |

So a late stream never waits for streams that are ahead. But streams may run ahead of playback: holding them
back would only make their clients, and others that want their state slots, wait. When all streams together
are more than the machine can do, steps wait for audio, not audio for steps, and chunks are large enough to
share the weights.

A stream keeps its vocoder state slot from its first chunk to its last; its sequence may have ended long
before, or be preempted. A sequence's terminal Output is held back until its audio is out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltic.engine.cache.tree import IntegrityError
from deltic.engine.events import SpeechStats
from deltic.engine.messages import Output
from deltic.engine.step import Sequence, Step, StepResult

log = logging.getLogger("deltic.engine")

FRAME_S = 0.08
FIRST_S = 0.15
"""Deadline of a first chunk, in seconds after the stream's first frame."""
WHOLE_S = 10.0
"""Deadline of an answer that is not streamed, so that it is not put off for ever."""
GUARD_S = 0.03
"""Seconds before its deadline at which a frame must be out, as the time to the client varies."""
LATE_S = 0.1
"""Audio later than this, in seconds, counts as an audible underrun."""
WORTH_FRAMES = 4
"""Size of a batch, in frames, beyond which sharing the weights gains little."""
PASS_FRAMES = 16
"""The most frames of a batch, or two for each stream if that is more. It bounds how long commands and steps
wait.
"""
MOST_FIRST_FRAMES = 8
SMOOTHING = 0.2
"""Weight of the newest measurement in an estimate."""

Samples = NDArray[np.float32]


class PendingAudio(Protocol):
    """Chunks that a vocoder has begun."""

    def is_done(self) -> bool: ...

    def samples(self) -> list[Samples]:
        """The samples of each chunk, float32 [1920 n]; waits."""

    def seconds(self) -> float | None:
        """The seconds they took, once they are done; None: count the time until they were taken."""


class StreamVocoder(Protocol):
    """The stage's interface to a vocoder.

    `runtime.cpu.vocoder.VocoderStreams`, its counterpart on a GPU, or a fake in tests.
    """

    def open(self, state_slot: int, state: NDArray[np.float32] | None = None) -> None: ...

    def begin(self, chunks: list[tuple[int, NDArray[np.int32]]]) -> PendingAudio: ...


@dataclass(slots=True, eq=False)
class SpeechStream:
    """The codes of a sequence, and how far they have become audio."""

    id: str
    index: int
    is_streamed: bool
    first_frames: int
    """Frames of the first chunk; 0: by load."""
    state: NDArray[np.float32] | None
    """State of the vocoder behind a voice's reference codes; None: the begin."""
    since: float
    """Time at which its first frame came."""
    codes: list[NDArray[np.int32]] = field(default_factory=list)
    n_taken: int = 0
    """Frames that the vocoder was given."""
    state_slot: int | None = None
    dry_at: float | None = None
    """Time at which playback runs dry; None: nothing was heard yet."""
    end: Output | None = None
    """The terminal Output, once the sequence has ended."""
    is_stalled: bool = False
    """The sequence had no text for its next frame, when its last one came."""
    is_dropped: bool = False

    @property
    def n_left(self) -> int:
        return len(self.codes) - self.n_taken

    @property
    def goes_on(self) -> bool:
        """True if the next steps bring more frames."""
        return self.end is None and not self.is_stalled

    @property
    def is_awaited(self) -> bool:
        """True if a listener has heard nothing yet."""
        return self.is_streamed and self.dry_at is None

    def deadline(self, n: int, after: float) -> float:
        """The deadline of the frame behind the next n; `after`: of a stream of which nothing was heard."""
        begin = self.dry_at if self.dry_at is not None else self.since + after + self.n_taken * FRAME_S
        return begin + n * FRAME_S


@dataclass(slots=True)
class _Flight:
    pending: PendingAudio
    parts: list[tuple[SpeechStream, int]]
    """Streams with the frames taken of each."""
    begun_at: float
    is_first: bool
    """True if the chunks include the first of a stream."""

    @property
    def n_frames(self) -> int:
        return sum(n for _, n in self.parts)


def to_pcm(samples: Samples) -> bytes:
    """float32 within [-1, 1] as 16-bit signed little-endian."""
    return bytes(np.rint(samples * 32767.0).astype("<i2"))


class SpeechStage:
    """The open streams of one engine."""

    def __init__(self, vocoder: StreamVocoder, n_slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        """n_slots: streams that the vocoder may have at once; others wait for a state slot."""
        self.n_slots = n_slots
        self.step_s = self.frame_s = 0.0
        """Estimates: of a step and the others' turns, of a frame in a batch."""
        self.others_s = 0.0
        """Seconds that other engines' turns take between two of this one's steps."""
        self._vocoder, self._clock = vocoder, clock
        self._step_at = 0.0
        self._is_beside = False
        self._flight_s = self._first_s = 0.0
        """Estimates: of a batch, and of one that somebody waits for."""
        self._streams: dict[tuple[str, int], SpeechStream] = {}
        self._free = list(range(n_slots))[::-1]
        self._flight: _Flight | None = None
        self._counted = SpeechStats()

    # What the engine asks.

    def has_work(self) -> bool:
        """Returns whether there are frames that can become audio, or do."""
        return self._flight is not None or any(s.n_left and self._has_state_slot(s) for s in self._streams.values())

    def has_request(self, request_id: str) -> bool:
        """Returns whether audio of a request is still to come, though its sequences may have ended."""
        return any(key[0] == request_id for key in self._streams)

    def stats(self) -> SpeechStats:
        counted, n_used = self._counted, self.n_slots - len(self._free)
        counted.n_streams_used, counted.n_streams = n_used, self.n_slots
        return counted

    def check(self) -> None:
        """Raises IntegrityError unless all state slots are free or used by one stream each."""
        flight = self._flight.parts if self._flight else []
        used = {s.state_slot for s in (*self._streams.values(), *(s for s, _ in flight)) if s.state_slot is not None}
        if sorted([*used, *self._free]) != list(range(self.n_slots)):
            raise IntegrityError(f"stream state slots: {sorted(used)} used, {sorted(self._free)} free")

    def comes_first(self) -> bool:
        """Returns whether there is audio that would be late if a step ran now."""
        if self._flight is not None:
            return False
        ready = [s for s in self._streams.values() if s.dry_at is not None and s.n_left and self._has_state_slot(s)]
        if self._gathers(ready):
            return False
        by = self._clock() + self.step_s + self.frame_s * len(ready) + GUARD_S
        return any(stream.deadline(0, 0.0) < by for stream in ready)

    # What comes from the steps.

    def step_begins(self) -> None:
        self._step_at = self._clock() - self.others_s

    def take(self, step: Step, result: StepResult, outputs: list[Output]) -> list[Output]:
        """Keeps the codes of a step.

        Returns the step's Outputs, without those that must wait for their audio.
        """
        now = self._clock()
        for i, chunk in enumerate(step.chunks):
            if not chunk.is_decode:
                break
            sequence = chunk.sequence
            t = chunk.start - sequence.n_prompt
            stream = self._streams.get((sequence.request.id, sequence.index))
            if sequence.n_computed <= chunk.start:
                continue  # it starts over: what its codes were drawn from was not finite either, perhaps
            if stream is None and t == 0:
                stream = self._open(sequence, now)
            if stream is not None and t == len(stream.codes):  # not one that was computed again
                assert result.codes is not None
                stream.codes.append(np.array(result.codes[i], np.int32))
                if stream.is_stalled and stream.dry_at is not None:
                    stream.dry_at = max(stream.dry_at, now)  # it was late for want of text
                stream.is_stalled = sequence.lacks_text
        self.step_s = _smoothed(self.step_s, now - self._step_at)
        return self.hold(outputs)

    def _open(self, sequence: Sequence, now: float) -> SpeechStream:
        speech, key = sequence.request.speech, (sequence.request.id, sequence.index)
        is_primed = speech is not None and speech.is_primed
        state = sequence.voice.state if is_primed and sequence.voice is not None else None
        self._streams[key] = stream = SpeechStream(
            *key,
            is_streamed=speech is None or speech.is_streamed,
            first_frames=0 if speech is None else speech.first_chunk_frames,
            state=state,
            since=now,
        )
        return stream

    def hold(self, outputs: list[Output]) -> list[Output]:
        """The Outputs that may leave now. A normal end waits for its audio; an abort or an error does not."""
        leaving = []
        for output in outputs:
            stream = self._streams.get((output.id, output.index))
            if stream is not None and output.finish_reason is not None:
                is_normal = output.finish_reason not in ("abort", "error")
                if is_normal and (stream.n_left or self._is_flying(stream)):
                    stream.end = output
                    continue
                self._close(stream)
            leaving.append(output)
        return leaving

    def abort(self, request_id: str, index: int | None = None) -> list[Output]:
        """Ends sequences that only had audio to come, which the scheduler has forgotten. Returns their last
        Outputs.
        """
        ended = []
        for (name, i), stream in list(self._streams.items()):
            if name == request_id and index in (None, i) and stream.end is not None:
                self._close(stream)
                ended.append(Output(name, i, finish_reason="abort"))
        return ended

    def _close(self, stream: SpeechStream) -> None:
        del self._streams[stream.id, stream.index]
        stream.is_dropped = True
        if not self._is_flying(stream):
            self._release(stream)

    def _release(self, stream: SpeechStream) -> None:
        if stream.state_slot is not None:
            self._free.append(stream.state_slot)
            stream.state_slot = None

    def _is_flying(self, stream: SpeechStream) -> bool:
        return self._flight is not None and any(s is stream for s, _ in self._flight.parts)

    # What goes to the vocoder.

    def vocode(self, n_open: int) -> list[Output]:
        """Takes what the vocoder has finished and gives it the next chunks. n_open: the scheduler's open
        sequences that do not stall; without any, it waits for the chunks. A vocoder that fails ends its
        streams with an error.
        """
        is_busy = n_open > 0
        outputs: list[Output] = []
        if self._flight is not None and (self._flight.pending.is_done() or not is_busy):
            outputs += self._land()
        if self._flight is not None:
            return outputs
        parts = self._pick(self._clock(), is_busy, n_open)
        if not parts:
            return outputs
        chunks = []
        try:
            for stream, n in parts:
                if stream.state_slot is None:
                    stream.state_slot = self._free.pop()
                    self._vocoder.open(stream.state_slot, stream.state)
                    stream.state = None
                chunks.append((stream.state_slot, np.stack(stream.codes[stream.n_taken : stream.n_taken + n])))
                stream.n_taken += n
            begun_at = self._clock()
            is_first = any(stream.is_awaited for stream, _ in parts)
            self._flight = _Flight(self._vocoder.begin(chunks), parts, begun_at, is_first)
        except Exception as error:
            return outputs + self._fail(parts, error)
        self._is_beside = not self._flight.pending.is_done()
        # What is done does not wait here for what is not, unless somebody has heard nothing yet, and the
        # device is busy for longer, with the step that follows. Where steps are long, an early first chunk
        # would only run dry before the second is there.
        is_short = is_first and 0.0 < self._first_s < self.step_s < FRAME_S / 4
        if not self._is_beside or not (is_busy or outputs) or is_short:
            outputs += self._land()
        return outputs

    def _has_state_slot(self, stream: SpeechStream) -> bool:
        return stream.state_slot is not None or bool(self._free)

    def _pick(self, now: float, is_busy: bool, n_open: int) -> list[tuple[SpeechStream, int]]:
        """The streams to vocode now, and how many frames of each, earliest deadline first."""
        first_frames, n_unheard = self._first_frames(), n_open
        ready: list[SpeechStream] = []
        for stream in self._streams.values():
            goes_on = is_busy and stream.goes_on
            n_unheard -= goes_on and (stream.dry_at is not None or not stream.is_streamed)
            first = (stream.first_frames or first_frames) if stream.is_streamed else 1
            if stream.n_left and (stream.dry_at is not None or not goes_on or stream.n_left >= first):
                ready.append(stream)
        if is_busy and self._gathers(ready):
            return []
        due_by = now + self.step_s + self.frame_s * (len(ready) + 1) + GUARD_S
        n_most = max(PASS_FRAMES, 2 * len(ready))
        n_whole = sum(s.n_left for s in ready if not s.is_streamed)
        lacks_state_slot = not self._free and any(s.state_slot is None for s in ready)
        takes_all = not is_busy or lacks_state_slot or n_whole >= n_most
        if not takes_all:  # whole answers stand back
            ready = [s for s in ready if s.is_streamed or s.deadline(0, WHOLE_S) <= due_by]
            is_worth_it = sum(s.n_left for s in ready if s.dry_at is not None) >= WORTH_FRAMES
            is_quick = self._is_beside and self._flight_s < self.step_s
            is_awaited = any(stream.is_awaited for stream in ready)
            takes_all = is_worth_it and (n_unheard <= 0 or (is_quick and not is_awaited))
        limit = np.inf if takes_all else due_by
        return self._earliest(ready, first_frames, limit, now, n_most)

    def _earliest(
        self, ready: Iterable[SpeechStream], first_frames: int, limit: float, now: float, n_most: int
    ) -> list[tuple[SpeechStream, int]]:
        """Frames due before `limit`, and first chunks.

        They are no more than can be done by the earliest deadline. But the batch may always hold one frame
        for each stream that is about to be late, up to a batch that is worth it; and, where steps leave no
        time, as many as that batch.
        """
        heap: list[tuple[float, int, SpeechStream, int]] = []  # deadline, order, stream, frames taken
        for i, stream in enumerate(ready):
            deadline = stream.deadline(0, FIRST_S if stream.is_streamed else WHOLE_S)
            if stream.is_awaited:
                deadline = min(deadline, limit)  # somebody waits for it
            heap.append((deadline, i, stream, 0))
        worth_s = self.frame_s * WORTH_FRAMES
        n_due = sum(deadline < now + worth_s for deadline, *_ in heap)
        has_time = self._turn_s() <= FRAME_S
        least_s = self.frame_s * (min(n_due, WORTH_FRAMES) if has_time else WORTH_FRAMES)
        heapify(heap)
        taken_s = self.step_s if self._is_beside else 0.0  # what is done beside a step is taken behind it
        taken: dict[int, tuple[SpeechStream, int]] = {}
        n_free, total, latest = len(self._free), 0, np.inf
        while heap and total < n_most:
            deadline, i, stream, n = heappop(heap)
            if deadline > limit:
                break
            if stream.state_slot is None and not n:
                if not n_free:
                    continue
                n_free -= 1
            is_first = stream.is_awaited and not n
            more = min(stream.n_left, stream.first_frames or first_frames) if is_first else 1
            if not total:
                latest = max(deadline - taken_s, now + least_s)
            elif now + self.frame_s * (total + more) > latest:
                break
            n, total = n + more, total + more
            taken[i] = stream, n
            if n < stream.n_left:
                heappush(heap, (stream.deadline(n, FIRST_S if stream.is_streamed else WHOLE_S), i, stream, n))
        return list(taken.values())

    def _first_frames(self) -> int:
        """Frames of a first chunk: enough to play until the next turn brings more, and half as much again."""
        return max(1, min(MOST_FIRST_FRAMES, int(np.ceil(1.5 * self._turn_s() / FRAME_S))))

    def _turn_s(self) -> float:
        """Seconds of a step and of a frame for each live stream.

        Where the vocoder runs beside the steps, the longer of the two.
        """
        n_live = sum(stream.is_streamed and stream.goes_on for stream in self._streams.values())
        both = self.step_s, self.frame_s * n_live
        return max(both) if self._is_beside else sum(both)

    def _gathers(self, ready: list[SpeechStream]) -> bool:
        """Returns whether streams should wait for a batch that is worth it.

        They do when they will be late anyway: a larger batch wins them time.
        """
        n_left = sum(stream.n_left for stream in ready)
        is_alive = all(stream.goes_on and stream.dry_at is not None for stream in ready)
        return bool(ready) and is_alive and n_left < WORTH_FRAMES and self._turn_s() > FRAME_S

    def _land(self) -> list[Output]:
        """Takes the samples of the chunks in flight, waiting for them if they are not there."""
        flight = self._flight
        assert flight is not None
        try:
            samples = flight.pending.samples()
        except Exception as error:
            return self._fail(flight.parts, error)
        finally:
            self._flight = None
        now, counted = self._clock(), self._counted
        seconds = flight.pending.seconds()
        if seconds is None:
            seconds = now - flight.begun_at
        self.frame_s = _smoothed(self.frame_s, seconds / flight.n_frames)
        self._flight_s = _smoothed(self._flight_s, seconds)
        if flight.is_first:
            self._first_s = _smoothed(self._first_s, seconds)
        counted.n_frames += flight.n_frames
        counted.vocoder_s += seconds
        outputs = []
        for (stream, n), wave in zip(flight.parts, samples, strict=True):
            if stream.is_dropped:
                self._release(stream)
                continue
            if stream.is_streamed:
                late_s = 0.0 if stream.dry_at is None else max(0.0, now - stream.dry_at)
                counted.n_underruns += late_s > LATE_S
                stream.dry_at = (now if stream.dry_at is None else stream.dry_at + late_s) + n * FRAME_S
            output = Output(stream.id, stream.index)
            if stream.end is not None and not stream.n_left:
                output = stream.end
                self._close(stream)
            output.audio = to_pcm(wave)
            outputs.append(output)
        return outputs

    def _fail(self, parts: list[tuple[SpeechStream, int]], error: Exception) -> list[Output]:
        """The vocoder failed: its streams end with an error, where they have not ended meanwhile."""
        self._flight = None
        log.error("the vocoder failed", exc_info=error)
        message = f"the vocoder could not run ({type(error).__name__}; its log says more). Send the request again."
        outputs = []
        for stream, _ in parts:
            if stream.is_dropped:
                self._release(stream)
            else:
                self._close(stream)
                outputs.append(Output(stream.id, stream.index, finish_reason="error", error=message))
        return outputs


def _smoothed(old: float, new: float) -> float:
    return new if old == 0.0 else old + SMOOTHING * (new - old)
