"""A fake engine that speaks: frames of known samples, a frame a tick; and the application over it.

Sample i of an utterance is `wave()[i]`, whatever its text is, so that a test knows every byte.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from deltic.config import ServerConfig
from deltic.engine.events import VoiceEncoded
from deltic.engine.messages import EncodeVoice, Output, Request
from deltic.host.client import RequestStream
from deltic.models.tts.shape import PUBLISHED_SPEECH, SpeechIds, SpeechShape
from deltic.models.vocoder.shape import FRAME_SAMPLES, SAMPLE_RATE
from deltic.server.app import create_app
from deltic.server.service import Server, Service
from deltic.server.speech.prompt import Prompter
from deltic.server.speech.protocol import voice_aliases
from deltic.server.speech.voices import SpeechParts, VoiceStore
from tests.fake_engine import FakeEngineClient, byte_tokenizer

NAMES = {"custom_voice": "qwen3-tts-1.7b", "voice_design": "qwen3-tts-1.7b-design", "base": "qwen3-tts-0.6b-base"}


def speech_shape(variant: str = "custom_voice") -> SpeechShape:
    """A published shape, with the text ids of the byte tokenizer."""
    ids = SpeechIds(im_start=257, im_end=258, assistant=97, tts_pad=300, tts_bos=301, tts_eos=302)
    return dataclasses.replace(PUBLISHED_SPEECH[NAMES[variant]], ids=ids, text_vocab_size=320)


def wave(n_frames: int) -> bytes:
    """int16: a tone of 200 Hz."""
    t = np.arange(n_frames * FRAME_SAMPLES) / SAMPLE_RATE
    return (np.sin(2 * np.pi * 200 * t) * 12000).astype("<i2").tobytes()


class FakeSpeechClient(FakeEngineClient):
    """Says `n_frames` frames, or as many as max_tokens lets it, `batch` in one output; each when its text is there."""

    def __init__(self, variant: str = "custom_voice", **info: Any) -> None:
        shape = speech_shape(variant)
        given = {
            "vocab_size": shape.n_drawn, "eos_token_ids": [shape.end_id], "n_prompt_ids": shape.n_prompt_ids,
            "is_speech": True, "max_model_len": 4096, "canonical_decode": False,
        }  # fmt: skip
        super().__init__(**given | info)
        self.shape = shape
        self.n_frames = 4
        self.fail_after: int | None = None
        """Frames after which the engine fails."""
        self.voices: dict[str, int] = {}
        """Of the voices that it has, by key, the reference frames."""
        self.encoded: list[EncodeVoice] = []
        self.dropped: list[str] = []
        self.max_tokens: dict[str, int | None] = {}
        """Those that came with more of a request's text, last."""

    async def encode_voice(self, command: EncodeVoice) -> VoiceEncoded:
        await asyncio.sleep(0)
        if command.samples or command.speaker:
            self.encoded.append(command)
            n_samples = len(command.samples) // 4
            self.voices[command.key] = -(-n_samples // FRAME_SAMPLES) if command.needs_codes else 0
        if command.key not in self.voices:
            return VoiceEncoded(key=command.key, error="no such voice")
        return VoiceEncoded(key=command.key, n_frames=self.voices[command.key])

    def add_text(
        self, request_id: str, text_ids: list[int], is_last: bool = False, max_tokens: int | None = None
    ) -> None:
        (request,) = (request for request in self.requests if request.id == request_id)
        assert request.speech is not None and request.speech.is_open and request_id in self.streams
        texts = (*request.speech.trailing_ids, *text_ids)
        request.speech = msgspec.structs.replace(request.speech, trailing_ids=texts, is_open=not is_last)
        self.max_tokens[request_id] = max_tokens

    def drop_voice(self, key: str) -> None:
        self.dropped.append(key)
        self.voices.pop(key, None)

    async def _run(self, request: Request, index: int, stream: RequestStream) -> None:
        assert request.speech is not None
        if request.speech.voice and request.speech.voice not in self.voices:
            stream.push(Output(request.id, finish_reason="error", error="no such voice"))
            stream.flush()
            return
        n_frames = min(self.n_frames, request.params.max_tokens - 1)
        ends = n_frames == self.n_frames
        audio = wave(n_frames)
        frame_bytes = 2 * FRAME_SAMPLES
        await asyncio.sleep(self.token_s)
        for start in range(0, n_frames, self.batch):
            while self.hold or (
                stream.n_open and request.speech.is_open and start + self.batch > len(request.speech.trailing_ids)
            ):
                await asyncio.sleep(0.002)
            if self.fail_after is not None and start >= self.fail_after:
                stream.push(Output(request.id, finish_reason="error", error="the step failed"))
                stream.flush()
                return
            end = min(start + self.batch, n_frames)
            stream.push(
                Output(request.id, token_ids=[7] * (end - start), audio=audio[start * frame_bytes : end * frame_bytes])
            )
            stream.flush()
            await asyncio.sleep(self.token_s)
        stream.push(
            Output(
                request.id,
                token_ids=[self.shape.end_id if ends else 7],
                finish_reason="stop" if ends else "length",
                stop_token_id=self.shape.end_id if ends else None,
            )
        )
        stream.flush()


def make_speech_app(
    client: FakeSpeechClient, voices: Path | None = None, voice_alias: tuple[str, ...] = (), **config: Any
) -> Any:
    """The application over a fake engine that speaks and the byte tokenizer, as model "fake"."""
    server = Server(ServerConfig(**config))
    server.add(speech_service_of(server, client, "fake", voices, voice_alias))
    return create_app(server)


def speech_service_of(
    server: Server, client: FakeSpeechClient, name: str, voices: Path | None = None, voice_alias: tuple[str, ...] = ()
) -> Service:
    """A model that speaks, over a fake engine."""
    tokenizer = byte_tokenizer()
    store = VoiceStore(client, voices, server.config)  # type: ignore[arg-type]
    aliases = voice_aliases(voice_alias, client.shape)
    parts = SpeechParts(Prompter(client.shape, tokenizer, is_dummy=True), store, aliases)
    return Service.of(server, client, tokenizer, None, name, speech=parts)  # type: ignore[arg-type]
