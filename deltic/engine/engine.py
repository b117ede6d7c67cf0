"""The engine of one model: scheduler, cache and runner put together, requests in, steps, outputs out.

It is synchronous and knows no sockets: the engine process (`host/process.py`) and the offline API run it.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol, cast

from deltic import logs
from deltic.config import EngineConfig
from deltic.engine.cache.cache import Cache
from deltic.engine.cache.saves import Exports, Saves
from deltic.engine.cache.tiers import Tiers
from deltic.engine.checks import RequestError, check_request
from deltic.engine.events import AdapterLoaded, CacheLocated, Event, ExpertStats, ReplayStats, Stats, VoiceEncoded
from deltic.engine.guides import Guides, Vocabulary
from deltic.engine.messages import AddText, EncodeVoice, EngineInfo, LoadAdapter, LocateCache, Output, Request
from deltic.engine.pictures import PictureEncoder, Pictures
from deltic.engine.scheduler import Scheduler
from deltic.engine.stage import FRAME_S, SpeechStage, StreamVocoder
from deltic.engine.step import HeldAdapter, Progress, RunnerLostError, Step, StepResult, Voice
from deltic.engine.trace import Trace

log = logging.getLogger("deltic.engine")

MAX_FAILURES = 3
"""Steps that may fail in a row before the process gives up on itself."""

MOVE_WAIT_S = 0.005
"""Seconds that a step waits for the tiers when there is nothing else to do; then commands are looked at."""

SHARED_WAIT_S = 0.0005
"""Seconds that a step waits for them where another engine has work."""


class StepRunner(Protocol):
    """The engine's interface to a runner: one of `deltic.runtime`, or a fake in tests.

    A chunk that starts at 0 starts from the zero state, whatever its state slot held before.

    Where `info.canonical_decode` is False, decodes and prefill chunks are two batches. A prefill chunk starts
    at a multiple of PAGE_SIZE and ends with the prompt at the latest; a decode is one generated token, known
    by value, of a sequence without a `start_slot`. A decode without a draw computes KV and state that were
    lost.

    Such a runner may run ahead: it may start the next decode of a sequence before the host has read the token
    that the sequence drew. It does so after the step's copies, and only as far as the sequence's pages go. It
    keeps the token drawn ahead until a later step asks for exactly that chunk, whatever else that step holds;
    then it does not run the chunk again. The kept token is dropped when the sequence ends, or when a chunk of
    it has another start. Nothing else drops it: a preempted sequence may come back, elsewhere, with pages and
    state as the run ahead left them.

    The engine hands everything it takes from a sequence to later work of the same stream, or to copies
    through `tiers`, which wait for the stream. So a run ahead whose sequence has ended does no harm. While
    `is_busy()`, the run ahead is not finished, and a step that waits for masks costs nothing.

    A step that fails leaves the runner as it was; where it cannot, `step` raises RunnerLostError.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def max_logit_rows(self) -> int: ...

    @property
    def tiers(self) -> Tiers | None:
        """Host memory and disk below the pools, if there are any."""

    @property
    def pictures(self) -> PictureEncoder | None:
        """The vision tower; None: prompts have no pictures."""

    @property
    def adapters(self) -> LoadedAdapters | None:
        """LoRA adapters; None: there is no room for any."""

    @property
    def replays(self) -> ReplayStats | None:
        """Counts recordings of steps and their replays; None: this device records none."""

    @property
    def experts(self) -> ExpertStats | None:
        """Counts experts that are outside the GPU; None: none are."""

    def step(self, step: Step) -> StepResult: ...

    def is_busy(self) -> bool: ...


class EncodedItems(Protocol):
    """The engine's interface to one kind of items that are encoded beside the steps."""

    @property
    def is_waiting(self) -> bool: ...

    @property
    def has_work(self) -> bool: ...

    def poll(self) -> Iterable[Event]: ...

    def close(self, timeout_s: float) -> None: ...


class ClonedVoices(EncodedItems, Protocol):
    """Encoded voices; see `runtime.voices.Voices`."""

    def encode(self, command: EncodeVoice) -> None: ...

    def drop(self, key: str) -> None: ...


class LoadedAdapters(EncodedItems, Protocol):
    """Adapters in the runner's memory; see `runtime.adapters.Adapters`."""

    def load(self, command: LoadAdapter) -> None: ...

    def find(self, key: bytes) -> HeldAdapter | None: ...

    def drop(self, key: bytes) -> None: ...


class SpeechStepRunner(StepRunner, Protocol):
    """A runner whose `info.is_speech`: its steps bring codes, and a vocoder makes audio of them."""

    @property
    def vocoder(self) -> StreamVocoder: ...

    @property
    def voices(self) -> ClonedVoices | None:
        """The voices that were cloned; None where the model has its own."""

    @property
    def n_streams(self) -> int:
        """Number of vocoder state slots, from 0 on, that the stage may use."""

    def check_speech(self, request: Request) -> Voice | None:
        """The encoded voice that the request names, None without one.

        Raises RequestError for what the model cannot speak.
        """

    def check_texts(self, text_ids: Iterable[int]) -> None:
        """Raises RequestError for an id that cannot occur in a text."""


Build = Callable[[EngineConfig, Progress], StepRunner]


class Engine:
    """Requests in, outputs out, one step at a time, in the caller's thread."""

    def __init__(
        self, runner: StepRunner, max_itl_ms: float | None = None, vocabulary: Vocabulary | None = None
    ) -> None:
        """vocabulary: for grammars."""
        self.runner = runner
        self.info = info = runner.info
        self.guides = Guides(info.vocab_size, info.eos_token_ids, vocabulary, runner.is_busy)
        self.cache = Cache(info, runner.tiers)
        encoder = runner.pictures
        self.pictures = None if encoder is None else Pictures(encoder)
        self.scheduler = Scheduler(self.cache, info, runner.max_logit_rows, max_itl_ms, self.guides, self.pictures)
        self._speaker = speaker = cast(SpeechStepRunner, runner) if info.is_speech else None
        self.voices = speaker.voices if speaker else None
        self.adapters = runner.adapters
        saves = self.cache.store.saves
        self.exports = Exports(self.cache.store.tree, saves) if isinstance(saves, Saves) else None
        self.encoded: list[EncodedItems] = [i for i in (self.voices, self.adapters, self.exports) if i is not None]
        """The items of every kind that this engine has."""
        self.stage = SpeechStage(speaker.vocoder, speaker.n_streams) if speaker else None
        self.n_steps = 0
        self.n_failures = 0
        """Number of steps that failed since the last success."""
        self.last_step_s = 0.0
        self.turn_s = 0.0
        """Seconds that the last `step` took, its audio included."""
        self.target_s = (max_itl_ms or math.inf) / 1000
        self._is_alone = True
        self.trace: Trace | None = None
        self.tell: Callable[[list[Output]], None] | None = None
        """Takes Outputs that need not wait for the step: a prompt begins to be computed."""

    def fit_cost(self) -> None:
        """Times some steps: for the target of a step's time if there is one, and with drafts.

        Only before the first request.
        """
        if self.scheduler.cost is not None:
            self.scheduler.cost.fit(self.runner.step, self.info)
        if self.scheduler.drafting is not None:
            self.scheduler.drafting.fit(self.runner.step, self.info)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises RequestError, a ValueError, when it cannot be run; nothing is queued then.
        """
        check_request(request, self.info)
        constraint = request.params.constraint
        if constraint is not None and constraint.grammar and not self.guides.has_tokenizer:
            raise RequestError("this engine has no tokenizer, and a grammar needs one")
        if request.speech is not None and not self.info.is_speech:
            raise RequestError("this model does not speak")
        if self.stage is not None and self.stage.has_request(request.id):
            raise RequestError(f"request id {request.id!r} is in use; give each request its own")
        voice = self._speaker.check_speech(request) if self._speaker else None
        adapter = self.adapters.find(request.adapter) if self.adapters and request.adapter else None
        if request.adapter and adapter is None:
            raise RequestError("the request's adapter is not loaded any more; load it again")
        self.scheduler.add(request, voice, adapter)
        if self.trace is not None:
            self.trace.arrived(request)

    def add_text(self, command: AddText) -> list[Output]:
        """Adds text to a request that is spoken while it is written.

        A text that cannot be spoken ends the request: then its last Outputs are returned.
        """
        try:
            if self._speaker is not None:
                self._speaker.check_texts(command.text_ids)
                self.scheduler.add_text(command)
            return []
        except RequestError as error:
            ended = self.abort(command.id)
            for output in ended:
                output.finish_reason, output.error = "error", str(error)
            return ended

    def abort(self, request_id: str, index: int | None = None, if_waiting: bool = False) -> list[Output]:
        """Ends a request or one of its sequences at once, and returns their last Outputs.

        Unknown ids are ignored. if_waiting: only if it never had a batch slot.
        """
        ended = self.scheduler.abort(request_id, index, if_waiting)
        if self.stage is not None:
            ended = self.stage.hold(ended) + ([] if if_waiting else self.stage.abort(request_id, index))
        return self._traced(ended)

    def encode_voice(self, command: EncodeVoice) -> VoiceEncoded | None:
        """Starts to encode a voice. Returns None, and `voices.poll` answers later; or returns a refusal at
        once.
        """
        if self.voices is not None:
            self.voices.encode(command)
            return None
        why = "has voices of its own; a Base model clones others" if self.info.is_speech else "does not speak"
        return VoiceEncoded(command.key, error=f"this model {why}", number=command.number)

    def load_adapter(self, command: LoadAdapter) -> AdapterLoaded | None:
        """Starts to load an adapter. None: `adapters.poll` answers later; else a refusal, at once."""
        if self.adapters is not None:
            self.adapters.load(command)
            return None
        why = "this server has no room for adapters; start it with --allow-lora-loading or --lora"
        return AdapterLoaded(command.path, error=why, number=command.number)

    def has_work(self) -> bool:
        return self._n_active > 0 or (self.stage is not None and self.stage.has_work())

    @property
    def _n_active(self) -> int:
        """Number of open sequences that a step can advance: not those that wait for text, or behind one that
        does.
        """
        scheduler = self.scheduler
        if self.stage is None or not scheduler.n_open:
            return scheduler.n_open
        return 0 if scheduler.is_blocked else scheduler.n_open - scheduler.n_stalled

    def share(self, others: list[Engine]) -> None:
        """Tells the engine which others have work and take turns with it in one thread.

        A sequence gets its next token only after every engine had its turn. So the engines share the shortest
        target (a frame's time, where one of them speaks). A prefill is cut to its share even if nothing
        decodes here, and audio that would be late after the others' turns goes first.
        """
        n, cost, stage = 1 + len(others), self.scheduler.cost, self.stage
        self._is_alone = n == 1
        if cost is not None:
            engines = (self, *others)
            targets = [engine.target_s for engine in engines]
            if n > 1 and any(engine.stage is not None for engine in engines):
                targets.append(FRAME_S)
            cost.target_s, cost.is_shared = min(targets) / n, n > 1
        if stage is not None:
            stage.others_s = sum(engine.turn_s for engine in others)

    def step(self) -> list[Output]:
        """Runs the vision tower behind the last step, then one step, and of a speech model the vocoder beside
        it or instead.

        A step that fails ends its sequences with an error; the others go on.
        """
        begin, outputs = time.perf_counter(), list[Output]()
        if self.pictures is not None and self.pictures.has_work:  # behind the last step: what it gave is sent
            outputs += self._traced(self.scheduler.encode_pictures(self.last_step_s))
        outputs += self._step() if self.stage is None else self._speak(self.stage)
        self.turn_s = time.perf_counter() - begin
        return outputs

    def _speak(self, stage: SpeechStage) -> list[Output]:
        if stage.comes_first() or not self._n_active:
            return self._vocode(stage)
        stage.step_begins()
        return self._step() + self._vocode(stage)

    def _vocode(self, stage: SpeechStage) -> list[Output]:
        """Collects finished audio and starts the vocoder's next chunks. Where it fails, the sequence ends,
        too.
        """
        outputs = stage.vocode(self._n_active)
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
            if self.pictures is not None and self.pictures.has_work:
                return self._traced(ended)
            if self.scheduler.n_open and not ended:  # all that is open waits for a mask, the tiers, or a text
                wait_s = MOVE_WAIT_S if self._is_alone else SHARED_WAIT_S
                (self.guides if self.guides.n_busy else self.cache.store).wait(wait_s)
            return self._traced(ended)
        if self.scheduler.reading.begun:
            begun = self.scheduler.reading.begin()
            if self.tell is not None:
                self.tell(begun)
        planned = time.perf_counter()
        try:
            result = self.runner.step(step)
        except RunnerLostError:
            raise
        except Exception as error:
            log.exception("a step of %s failed", logs.counted(len(step.chunks), "sequence"))
            self.n_failures += 1
            ended += self.scheduler.fail(
                step,
                f"the engine could not run this step ({type(error).__name__}; its log says more). Send the request again.",
            )
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
        self.scheduler.observe(step, self.last_step_s, result.guess_s)
        if self.trace is not None:
            waiting = [s for s in self.scheduler.sequences() if s.state_slot is None]
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
            n_recomputed=scheduler.n_recomputed,
            drafted=dict(scheduler.drafting.drafted) if scheduler.drafting is not None else {},
            accepted=dict(scheduler.drafting.accepted) if scheduler.drafting is not None else {},
            last_step_ms=self.last_step_s * 1000,
            cache=cache.store.count(),
            speech=None if self.stage is None else self.stage.stats(),
            pictures=None if self.pictures is None else self.pictures.stats(),
            replays=copy.copy(self.runner.replays),
            experts=self.runner.experts,
        )

    def cache_summary(self) -> dict[str, object]:
        """Lists what the prefix cache holds, as plain data."""
        return {"enabled": self.info.prefix_cache, **self.cache.store.summary()}

    def locate_cache(self, command: LocateCache) -> CacheLocated | None:
        """Starts to write what the cache has of a prompt. None: `exports.poll` answers later."""
        request, number = command.request, command.number
        try:
            check_request(request, self.info)
        except RequestError as error:
            return CacheLocated(request.id, error=str(error), is_refused=True, number=number)
        if self.exports is not None:
            self.exports.ask(command)
            return None
        why = "this server keeps no files of its cache; start it with --cache-dir"
        return CacheLocated(request.id, error=why, number=number)

    def reset_cache(self) -> None:
        """Forgets every prefix, in every tier; what runs goes on."""
        self.cache.reset(self.scheduler.sequences())

    def close(self, timeout_s: float) -> None:
        """Waits, for a bounded time, until the prefixes to be kept are on disk. No step may follow."""
        begin = time.monotonic()
        self.guides.close()
        self.cache.store.close(max(0.0, timeout_s - (time.monotonic() - begin)))
        for items in self.encoded:
            items.close(max(0.0, timeout_s - (time.monotonic() - begin)))
        if self.trace is not None:
            self.trace.close()

    def check(self) -> None:
        """Raises IntegrityError unless pages and state slots add up."""
        self.scheduler.check()
        if self.stage is not None:
            self.stage.check()
