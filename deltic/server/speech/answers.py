"""Answers of speech, as /openapi.json describes them; see server/api/answers.py."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from deltic.server.api.answers import ErrorDetail


class SpokenDetails(Struct, kw_only=True):
    """Parts of the input."""

    text_tokens: int
    audio_tokens: int
    """Frames of the voice's recording."""
    cached_tokens: int


class SpokenUsage(Struct, kw_only=True):
    """Rows of the prompt, and codes drawn."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: SpokenDetails


class AudioDelta(Struct, kw_only=True, tag_field="type", tag="speech.audio.delta"):
    """A further piece of the audio."""

    audio: str
    """Base64."""
    response_format: str


class AudioDone(Struct, kw_only=True, tag_field="type", tag="speech.audio.done"):
    """The last event."""

    usage: SpokenUsage
    finish_reason: str | None


class AudioFailed(Struct, kw_only=True, tag_field="type", tag="speech.audio.error"):
    """The last event of a stream that an error ended."""

    error: ErrorDetail
    partial_audio: bool
    """True: what came is not all."""
    action: Literal["discard"]


AudioEvent = AudioDelta | AudioDone | AudioFailed
"""The data of an event, by its `type`."""


class SpokenItem(Struct, kw_only=True):
    """The audio of one text of a batch, or its error."""

    index: int
    status: Literal["success", "error"]
    audio_data: str | None = None
    """Base64."""
    media_type: str | None = None
    finish_reason: str | None = None
    usage: SpokenUsage | None = None
    status_code: int | None = None
    """The status that the text alone would have had."""
    error: ErrorDetail | None = None


class SpokenBatch(Struct, kw_only=True):
    """The audio of several texts."""

    id: str
    results: list[SpokenItem]
    total: int
    succeeded: int
    failed: int


class VoiceCard(Struct, kw_only=True):
    """A voice that was uploaded."""

    name: str
    consent: str
    """Says who allowed the voice to be used."""
    created_at: int
    ref_text: str | None
    kind: Literal["audio", "embedding"]


class VoiceList(Struct):
    """The voices of a model."""

    voices: list[str]
    """Names that a request may give."""
    uploaded_voices: list[VoiceCard]


class VoiceAdded(Struct):
    """The voice is there."""

    success: bool
    voice: VoiceCard


class VoiceDeleted(Struct):
    """The voice is gone."""

    success: bool
    name: str
    deleted: bool
