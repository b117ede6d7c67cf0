"""Speech over HTTP: one text, a batch of them, and the voices there are.

A body becomes a checked plan, the plan an Utterance, which is a Generation whose updates are audio. It leaves
as a file, as raw bytes as they come, or as events.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deltic.engine import messages as engine
from deltic.engine.events import VoiceEncoded
from deltic.json_types import JsonObject
from deltic.server.chat.answer import Update, WayOut
from deltic.server.chat.calls import AnswerDelta
from deltic.server.chat.generation import refusals, timed_out
from deltic.server.chat.request import context_limit
from deltic.server.errors import ApiError, bad_request
from deltic.server.limits import TICKET, Ticket, Usage
from deltic.server.openapi import Route
from deltic.server.preparation import Preparation
from deltic.server.service import Server, Service
from deltic.server.speech import protocol as speech_protocol
from deltic.server.speech.audio import (
    MEDIA_TYPES,
    RATE,
    STREAMED_FILES,
    WHOLE_FILES,
    Resampler,
    StreamedFile,
    encode,
    wav_header,
)
from deltic.server.speech.prompt import OpenText, Words
from deltic.server.speech.protocol import BatchItem, Manner, SpeechBatchRequest, SpeechFields, SpeechRequest, VoiceForm
from deltic.server.speech.voices import SpeechParts, StoredVoice, voice_form
from deltic.server.transport import EventStream, json_response, let_go, named_event, unless_disconnected

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SpeechPlan:
    """An utterance that was checked and tokenised; whose voice it has may still have to be encoded."""

    fields: SpeechFields
    manner: Manner
    words: Words
    stored: StoredVoice | None
    streamed: bool
    open_text: OpenText | None = None
    """Text that `words.body` is of, where it may still be growing."""


def admit(server: Server) -> None:
    """Raises ApiError, as `Service.admit`, if no model that speaks would take a request.

    For use before the request's model is known.
    """
    failed = []
    for service in server.of("speech") or [server.first("speech")]:
        try:
            service.admit(speech=True)
            return
        except ApiError as error:
            failed.append(error)
    raise failed[0]


def plan(
    service: Service, fields: SpeechFields, text: str | OpenText, info: engine.EngineInfo, *, streamed: bool
) -> SpeechPlan:
    """text: an open one has its first id, and a prompt that streams it.

    Slow for long texts: runs in the worker thread. Raises ApiError (400, 404).
    """
    speech = service.speaking()
    service.check_model(fields.model)
    fields = speech_protocol.with_alias(fields, speech.aliases)
    name = speech_protocol.voice_name(fields)
    stored = speech.voices.find(name) if name is not None else None
    shape = speech.prompts.shape
    manner = speech_protocol.manner(
        fields, shape, stored.name if stored else None, streamed=streamed, model=service.model_name
    )
    reference = stored.ref_text if stored else (fields.ref_text or "").strip()
    if fields.x_vector_only_mode:
        reference = ""  # its speaker's vector is all that is used
    words = speech.prompts.words(text, manner.instructions, reference, context_limit(info))
    return SpeechPlan(fields, manner, words, stored, streamed, text if isinstance(text, OpenText) else None)


class _AudioUpdate(Update):
    audio: bytes = b""


class _Spoken(WayOut):
    """Output of one utterance: its audio, how late it came, and how long it is."""

    def __init__(self) -> None:
        super().__init__(0)
        self.n_bytes = 0
        self.first_s: float | None = None
        """time.monotonic() of the first audio."""
        self.late_s = 0.0
        """The most by which a piece came later than playback, begun with the first, needed it."""

    def push(self, output: engine.Output) -> Update:
        self.n_tokens += len(output.token_ids)
        self.finish_reason = output.finish_reason
        if output.audio:
            now_s = time.monotonic()
            if self.first_s is None:
                self.first_s = now_s
            self.late_s = max(self.late_s, now_s - self.first_s - self.seconds)
            self.n_bytes += len(output.audio)
        return _AudioUpdate(0, AnswerDelta(), finish_reason=self.finish_reason, audio=output.audio)

    @property
    def seconds(self) -> float:
        return self.n_bytes / 2 / RATE


class Utterance:
    """Utterance of one text: a request of the engine, made once its voice is there."""

    def __init__(
        self, service: Service, plan: SpeechPlan, sent: engine.Request, n_frames: int, ticket: Ticket, limit: int
    ) -> None:
        """n_frames: of the voice, in the prompt; ticket: of the HTTP request, or WebSocket's part, that it
        answers; limit: of rows and frames together. What `sent` has not of an open text is sent as it comes.
        """
        self._service = service
        self.plan = plan
        self.sent = sent
        self._spoken = _Spoken()
        self._generation = service.generation([sent], [self._spoken], ticket)
        self._started_s = ticket.started_s
        self._n_frames = n_frames
        self._limit = limit
        self._n_given = len(plan.words.body)

    @property
    def finish_reason(self) -> str | None:
        return self._spoken.finish_reason

    async def run(self, take: Callable[[bytes], None]) -> None:
        """Hands samples to `take` as they come, 16 bits at the engine's rate, until the last.

        Raises ApiError, as Generation.run does, and when the speech did not end.
        """
        numbers = self._service.metrics.speech
        spoken = self._spoken

        def take_updates(updates: list[Update]) -> None:
            for update in updates:
                assert isinstance(update, _AudioUpdate)
                if update.audio:
                    take(update.audio)

        end = "aborted"
        try:
            await self._generate(take_updates)
            end = str(spoken.finish_reason)
            n_codes = self.sent.params.max_tokens
            is_bound = n_codes == speech_protocol.text_limit(len(self.plan.words.body))
            if end == "length" and is_bound and self.plan.fields.max_new_tokens is None:
                raise speech_protocol.lost_its_end(n_codes)
        except ApiError as error:
            end = error.code or "error"
            if self.sent.speech and self.sent.speech.voice:
                self._service.speaking().voices.doubt(self.sent.speech.voice)
            raise
        finally:
            first_s = spoken.first_s and spoken.first_s - self._started_s
            took_s = time.monotonic() - self._started_s
            # Of a text that is spoken while it is written, nobody can tell whether the audio was late or the
            # text.
            is_timed = self.plan.streamed and self.plan.open_text is None
            numbers.note(end, first_s, took_s, spoken.seconds, spoken.late_s if is_timed else None)

    async def _generate(self, take: Callable[[list[Update]], None]) -> None:
        """Runs the generation (see `Generation.run`); the rest of an open text is sent beside it.

        Raises ApiError (400) also when that becomes too long.
        """
        assert self.sent.speech is not None
        if not self.sent.speech.is_open:
            await self._generation.run(take)
            return
        try:
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(self._feed())
                # What is below sends the request before it waits, so before the task above begins.
                await self._generation.run(take)
                feeding.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _feed(self) -> None:
        """Sends the rest of the text as it is written. Raises ApiError (400) when it becomes too long."""
        text, sent, shape = self.plan.open_text, self.sent, self._service.speaking().prompts.shape
        assert text is not None and sent.speech is not None
        n_given, is_last, max_tokens = self._n_given, False, None
        n_rows = len(sent.prompt_ids) + len(sent.speech.trailing_ids) + 1 - n_given  # without the body
        while not is_last:
            await text.wait(n_given + 1)
            ids, is_last = text.ids[n_given:], text.is_whole
            n_given += len(ids)
            if n_rows + n_given > self._limit:
                raise _too_long(self._limit)
            if is_last:
                ids.append(shape.ids.tts_eos)
                max_tokens = speech_protocol.frames_limit(
                    self.plan.fields, shape, n_given, len(sent.prompt_ids), self._limit
                )
                sent.params = msgspec.structs.replace(sent.params, max_tokens=max_tokens)
            self._service.client.add_text(sent.id, ids, is_last, max_tokens)

    async def stream(self, take: Callable[[bytes], None]) -> None:
        """Streams the utterance in the form and at the rate that were asked for: a file whose size nobody
        knows yet.

        Another tempo is one of the whole, and so are WHOLE_FILES: these come in one piece.
        """
        manner = self.plan.manner
        if manner.speed != 1.0 or manner.form in WHOLE_FILES:
            take(await self.file())
            return
        if manner.form in STREAMED_FILES:
            await self._compress(take)
            return
        resampler = Resampler(manner.rate) if manner.rate != RATE else None
        header = [wav_header(manner.rate)] if manner.form == "wav" else []

        def convert(pcm: bytes, last: bool = False) -> None:
            if resampler is not None:
                pcm = resampler.push(pcm, last)
            if pcm or (last and header):
                take(b"".join((*header, pcm)))
                header.clear()

        await self.run(convert)
        convert(b"", True)

    async def _compress(self, take: Callable[[bytes], None]) -> None:
        """Streams through an encoder (see `stream`).

        It runs in the thread of files: in the event loop it would hold up all other answers.
        """
        file = StreamedFile(self.plan.manner.form, self.plan.manner.rate)
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def encode_all() -> None:
            last = False
            while not last:
                waiting = [await pieces.get()]
                while not pieces.empty():
                    waiting.append(pieces.get_nowait())
                last = waiting[-1] is None
                pcm = b"".join(piece for piece in waiting if piece is not None)
                if data := await self._encoded(len(pcm), partial(file.push, pcm, last)):
                    take(data)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(encode_all())
                await self.run(pieces.put_nowait)
                pieces.put_nowait(None)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def file(self) -> bytes:
        """Returns the whole utterance as a file, as asked for."""
        pcm = bytearray()
        await self.run(pcm.extend)
        manner = self.plan.manner
        return await self._encoded(len(pcm), partial(encode, bytes(pcm), manner.form, manner.rate, manner.speed))

    async def _encoded(self, size: int, work: Callable[[], bytes]) -> bytes:
        """Returns what `work` makes, in the thread of files, in the turns of the key that asks."""
        return await asyncio.wrap_future(self._service.speaking().worker.submit(self.sent.tenant, size, work))

    def usage(self) -> JsonObject:
        """Rows of the prompt and codes drawn; then tokens of the texts, and frames of the voice."""
        usage, words = self._generation.usage(), self.plan.words
        n_text = len(words.body) + len(words.instructions) + len(words.reference)
        details = {"text_tokens": n_text, "audio_tokens": self._n_frames, "cached_tokens": usage.cached_tokens}
        return {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "input_token_details": details,
        }


async def utterance(service: Service, plan: SpeechPlan, info: engine.EngineInfo, ticket: Ticket) -> Utterance:
    """Has its voice encoded, if it is not yet, and makes the request. Raises ApiError."""
    speech, manner, fields = service.speaking(), plan.manner, plan.fields
    voice = await _in_time(ticket, _voice(speech, plan))
    n_frames = voice.n_frames if voice and plan.words.reference else 0
    shape, text = speech.prompts.shape, plan.open_text
    least = speech.prompts.least_body(plan.words, n_frames)
    if text is not None and len(text.ids) < least and not text.is_whole:
        await _in_time(ticket, text.wait(least))
        voice = await _in_time(ticket, _voice(speech, plan))  # the engine may have lost it meanwhile
    is_open = text is not None and not text.is_whole
    rows = speech.prompts.rows(
        plan.words,
        language_id=manner.language_id,
        speaker=manner.speaker,
        has_voice=voice is not None,
        n_frames=n_frames,
        streams_text=manner.streams_text,
        is_open=is_open,
    )
    limit = context_limit(info)
    if len(rows.prompt) + len(rows.trailing) + is_open > limit:
        raise _too_long(limit)
    n_text = None if is_open else len(plan.words.body)
    max_tokens = speech_protocol.frames_limit(fields, shape, n_text, len(rows.prompt), limit)
    key = voice.key if voice else ""
    sent = engine.Request(
        id=f"speech-{secrets.token_hex(16)}",
        prompt_ids=rows.prompt,
        params=speech_protocol.sampling_params(fields, shape, max_tokens),
        speech=speech_protocol.speech_params(
            fields, shape, plan.streamed, trailing_ids=rows.trailing, is_open=is_open, voice=key, is_primed=n_frames > 0
        ),
    )
    return Utterance(service, plan, sent, n_frames, ticket, limit)


def _too_long(limit: int) -> ApiError:
    message = f"has more text than {limit} rows of prompt and speech can hold"
    return bad_request("input", message, "context_length_exceeded")


async def _voice(speech: SpeechParts, plan: SpeechPlan) -> VoiceEncoded | None:
    fields = plan.fields
    if plan.stored is not None:
        return await speech.voices.ready(plan.stored)
    if fields.ref_audio is not None:
        return await speech.voices.ready_inline(fields.ref_audio, bool(plan.words.reference))
    if fields.speaker_embedding is not None:
        return await speech.voices.ready_vector(fields.speaker_embedding)
    return None


async def _in_time(ticket: Ticket, work: Coroutine[object, None, T]) -> T:
    """Raises ApiError: 503 when the engine dies meanwhile, 504 when the ticket's time is over."""
    try:
        with refusals():
            async with asyncio.timeout(ticket.left_s()):
                return await work
    except TimeoutError:
        raise timed_out(time.monotonic() - ticket.started_s) from None


async def speak(service: Service, request: Request) -> ASGIApp:
    """POST /v1/audio/speech: a text, spoken."""
    info = service.admit(speech=True)
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(SpeechRequest)
        form = _stream_form(asked)
        streamed = form is not None and asked.speed in (None, 1.0) and asked.response_format not in WHOLE_FILES
        planned = await preparation.run(plan, service, asked, asked.input, info, streamed=streamed)
    ticket: Ticket = request.scope[TICKET]
    spoken = await unless_disconnected(request.receive, utterance(service, planned, info, ticket))
    request.scope["deltic.answer_id"] = spoken.sent.id
    if form == "sse":
        return EventAudio(spoken)
    if form == "audio":
        return RawAudio(spoken)
    data = await unless_disconnected(request.receive, spoken.file())
    headers = {"x-finish-reason": str(spoken.finish_reason)}
    return Response(data, headers=headers, media_type=MEDIA_TYPES[planned.manner.form])


def _stream_form(asked: SpeechRequest) -> str | None:
    """Returns the form in which audio leaves as it is made; None: at the end. Raises ApiError (400)."""
    if asked.stream is False and asked.stream_format is not None:
        raise bad_request("stream_format", "contradicts stream: false")
    if asked.stream_format is None:
        return "sse" if asked.stream else None
    return asked.stream_format


MAX_UNSENT_AUDIO_BYTES = 64_000_000
"""Bytes of audio that a client may leave unread. A client may well read no faster than it plays: twenty
minutes of it.
"""


class Cut(Exception):
    """A raw stream cannot say that it failed, so it must not look whole."""


class AudioStream(EventStream):
    """Audio as it is made."""

    max_unsent_bytes = MAX_UNSENT_AUDIO_BYTES

    def __init__(self, spoken: Utterance) -> None:
        super().__init__()
        self._spoken = spoken

    async def run(self) -> None:
        await self._spoken.stream(self.write_audio)
        if self.is_unwritten:
            self.write(b"")  # the response begins all the same

    def write_audio(self, audio: bytes) -> None:
        """A piece of it."""
        self.write(audio)


class RawAudio(AudioStream):
    """Audio as it is made, and nothing else."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        kind = MEDIA_TYPES[self._spoken.plan.manner.form].encode()
        return [(b"content-type", kind), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

    def last(self, error: ApiError | None) -> bytes:
        if error is not None:
            raise Cut
        return b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except Cut:
            # Without a last chunk: the HTTP server closes the connection, and the client's library reports
            # that.
            return


class EventAudio(AudioStream):
    """Audio as it is made, in events that are named as OpenAI does."""

    def write_audio(self, audio: bytes) -> None:
        form = self._spoken.plan.manner.form
        self.write(named_event("speech.audio.delta", audio=base64.b64encode(audio).decode(), response_format=form))

    def last(self, error: ApiError | None) -> bytes:
        if error is None:
            reason = self._spoken.finish_reason
            return named_event("speech.audio.done", usage=self._spoken.usage(), finish_reason=reason)
        fields = msgspec.json.decode(error.body())
        return named_event("speech.audio.error", **fields, partial_audio=True, action="discard")


async def speak_batch(service: Service, request: Request) -> ASGIApp:
    """POST /v1/audio/speech/batch: several texts, each answered by its audio or its error."""
    info = service.admit(speech=True)

    def plan_all(asked: SpeechBatchRequest) -> list[SpeechPlan | ApiError]:
        service.check_model(asked.model)
        return [attempt(speech_protocol.with_defaults(item, asked)) for item in asked.items]

    def attempt(item: BatchItem) -> SpeechPlan | ApiError:
        try:
            return plan(service, item, item.input, info, streamed=False)
        except ApiError as error:
            return error

    async with Preparation(service, request) as preparation:
        planned = await preparation.run(plan_all, await preparation.parse(SpeechBatchRequest))
    ticket: Ticket = request.scope[TICKET]
    total = Usage(0, 0, 0, 0, {})

    async def answer(index: int, planned: SpeechPlan | ApiError) -> JsonObject:
        try:
            if isinstance(planned, ApiError):
                raise planned
            spoken = await utterance(service, planned, info, ticket)
            data = await spoken.file()
        except ApiError as error:
            let_go(error, request.scope)
            failed: JsonObject = msgspec.json.decode(error.body())
            return {"index": index, "status": "error", "status_code": error.status} | failed
        usage = spoken.usage()
        total.prompt_tokens += usage["input_tokens"]
        total.completion_tokens += usage["output_tokens"]
        total.cached_tokens += usage["input_token_details"]["cached_tokens"]
        return {
            "index": index,
            "status": "success",
            "audio_data": msgspec.Raw(b'"%b"' % base64.b64encode(data)),
            "media_type": MEDIA_TYPES[planned.manner.form],
            "finish_reason": spoken.finish_reason,
            "usage": usage,
        }

    answers = (answer(index, item) for index, item in enumerate(planned))
    results = await unless_disconnected(request.receive, _together(answers))
    ticket.usage = total
    n_failed = sum(result["status"] == "error" for result in results)
    counts = {"total": len(results), "succeeded": len(results) - n_failed, "failed": n_failed}
    return json_response({"id": f"speech-batch-{secrets.token_hex(16)}", "results": results} | counts)


async def _together(work: Iterable[Coroutine[object, None, T]]) -> list[T]:
    """Runs all of them and returns their results; one that raises ends the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in work]
    return [task.result() for task in tasks]


async def list_voices(service: Service, request: Request) -> ASGIApp:
    """GET /v1/audio/voices: the speakers of the checkpoint, and voices that were uploaded."""
    speech = service.speaking()
    stored = speech.voices.all()
    return json_response({"voices": speech.voice_names(), "uploaded_voices": [voice.card() for voice in stored]})


async def add_voice(service: Service, request: Request) -> ASGIApp:
    """POST /v1/audio/voices: a voice to clone, from a form with audio_sample or speaker_embedding."""
    admit(service.server)
    asked = await voice_form(request, service.server.max_body_mb)
    if asked.model is not None:
        service = service.server.find(asked.model)
    service.admit(speech=True)
    speech = service.speaking()
    if speech.prompts.shape.variant != "base":
        message = f"voices can be added to a Base model. {service.model_name!r} has its own."
        raise bad_request(None, message, "unsupported_model")
    vector = None
    if asked.speaker_embedding is not None:
        try:
            vector = msgspec.json.decode(asked.speaker_embedding, type=list[float])
        except msgspec.DecodeError:
            raise bad_request("speaker_embedding", "expected a JSON list of numbers") from None
        speech_protocol.check_embedding(vector, speech.prompts.shape)
    ticket: Ticket = request.scope[TICKET]
    adding = speech.voices.add(asked.name, asked.consent, asked.ref_text, asked.audio_sample, vector, ticket.tenant)
    voice = await unless_disconnected(request.receive, _in_time(ticket, adding))
    return json_response({"success": True, "voice": voice.card()})


async def delete_voice(service: Service, request: Request) -> ASGIApp:
    """DELETE /v1/audio/voices/{name}: forgets a voice that was uploaded."""
    speech = service.speaking()
    name = request.path_params["name"]
    ticket: Ticket = request.scope[TICKET]
    speech.voices.remove(name, ticket.account)
    return json_response({"success": True, "name": name, "deleted": True})


SPEECH = partial(Route, kind="speech")

# fmt: off
ROUTES = (
    SPEECH("POST", "/v1/audio/speech", speak, SpeechRequest, generates=True, gives=tuple(MEDIA_TYPES.values()),
           event="AudioEvent"),
    SPEECH("POST", "/v1/audio/speech/batch", speak_batch, SpeechBatchRequest, generates=True,
           answer="SpokenBatch"),
    SPEECH("GET", "/v1/audio/voices", list_voices, takes_model=True, answer="VoiceList"),
    SPEECH("POST", "/v1/audio/voices", add_voice, VoiceForm, form=True, generates=True, answer="VoiceAdded"),
    SPEECH("DELETE", "/v1/audio/voices/{name}", delete_voice, takes_model=True, answer="VoiceDeleted"),
)
# fmt: on
"""The routes that models which speak have."""
