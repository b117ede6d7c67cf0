"""The wire format of the speech API, and the fields of it that a checkpoint can honour.

OpenAI's fields, and those that vLLM-Omni has beside them, under its names; `temperature`, `top_k`, `top_p`,
`repetition_penalty` and `subtalker_*` are the settings of generation_config.json. Each is honoured or refused
with a 400 that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from deltic.config import ConfigError
from deltic.engine.messages import MAX_FIRST_FRAMES, SamplingParams, Speech
from deltic.models.tts.shape import SpeechShape
from deltic.server.api.protocol import Probability, Seed
from deltic.server.chat.request import GREEDY_BELOW
from deltic.server.errors import ApiError, bad_request
from deltic.server.speech.audio import OPUS_RATES

TASKS = {"custom_voice": "CustomVoice", "voice_design": "VoiceDesign", "base": "Base"}
"""The API's name of each variant of a checkpoint."""

MOST_NEW_TOKENS = 4096
MAX_INSTRUCTIONS = 500
"""Characters."""
MAX_ITEMS = 32
"""Items of a batch at most."""
MIN_TOKENS = 2
"""Codes that come before an utterance may end; without them it could be empty."""
LEAST_FRAMES, FRAMES_PER_TOKEN = 192, 12
"""A clone may take so many frames, or so many for each token of its text.

One that takes more has lost its end.
"""

Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopK = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class VoiceId(Struct, forbid_unknown_fields=True):
    id: str


class SpeechFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that say how to speak: common to one request, the items of a batch and a WebSocket."""

    default_format: ClassVar[str] = "mp3"
    """Default of `response_format`, as OpenAI has it."""
    model: str | None = None
    voice: str | VoiceId | None = None
    speaker: str | VoiceId | None = None
    """Synonym of `voice`."""
    instructions: Annotated[str, Meta(max_length=MAX_INSTRUCTIONS)] | None = None
    response_format: Literal["wav", "pcm", "flac", "mp3", "opus", "aac"] | None = None
    sample_rate: Literal[8000, 16000, 22050, 24000, 44100, 48000] | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] | None = None
    task_type: Literal["CustomVoice", "VoiceDesign", "Base"] | None = None
    language: str | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    x_vector_only_mode: bool | None = None
    speaker_embedding: list[float] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=MOST_NEW_TOKENS)] | None = None
    seed: Seed | None = None
    initial_codec_chunk_frames: Annotated[int, Meta(ge=0, le=MAX_FIRST_FRAMES)] | None = None
    non_streaming_mode: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=100.0)] | None = None
    subtalker_temperature: Temperature | None = None
    subtalker_top_k: TopK | None = None
    subtalker_top_p: Probability | None = None


Fields = TypeVar("Fields", bound=SpeechFields)


class SpeechRequest(SpeechFields):
    """POST /v1/audio/speech."""

    input: str
    stream: bool | None = None
    stream_format: Literal["audio", "sse"] | None = None
    user: str | None = None
    """Asks for nothing."""


class BatchItem(SpeechFields):
    """A field that it has is its own; the others are those of the batch."""

    input: str


class SpeechBatchRequest(SpeechFields):
    """POST /v1/audio/speech/batch."""

    items: Annotated[list[BatchItem], Meta(min_length=1, max_length=MAX_ITEMS)]


class VoiceForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/audio/voices: a form, not JSON."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}(?!\n)$")]
    consent: Annotated[str, Meta(min_length=1, max_length=1000)]
    """Consent of whoever's voice it is: kept, and shown."""
    ref_text: Annotated[str, Meta(max_length=4000)] = ""
    """Transcript of `audio_sample`."""
    audio_sample: Annotated[bytes, Meta(extra_json_schema={"format": "binary"})] | None = None
    speaker_embedding: str | None = None
    """A JSON list of numbers."""
    model: str | None = None


class SessionConfig(SpeechFields, tag="session.config"):
    """Settings of how a WebSocket's text is said, from its next utterance on.

    Where the prompt's form is text beside frames (`non_streaming_mode` false, Base's default), an utterance
    that is not split is spoken while it is written.
    """

    default_format: ClassVar[str] = "wav"
    stream_audio: bool = False
    """Audio comes as it is made, in `pcm`; otherwise one message a part, in `response_format`."""
    split_granularity: Literal["none", "sentence", "clause"] = "none"
    word_timestamps: Literal[False] | None = None


class InputText(Struct, tag="input.text", forbid_unknown_fields=True):
    text: str


class InputDone(Struct, tag="input.done", forbid_unknown_fields=True):
    """The utterance is whole: what is left of it is said, too."""


class SessionClose(Struct, tag="session.close", forbid_unknown_fields=True):
    """Message that no more text comes; the socket is closed when all was said."""


ClientMessage = SessionConfig | InputText | InputDone | SessionClose


@dataclass(frozen=True, slots=True)
class Manner:
    """Manner in which a text is said, by one checkpoint: fields that were checked, and what stands for those
    that were not given.
    """

    form: str
    """Form of the audio: a key of audio.MEDIA_TYPES."""
    rate: int
    speed: float
    speaker: str | None
    """Speaker of spk_id, lower case."""
    language_id: int | None
    instructions: str
    streams_text: bool
    """The prompt's form: one token of text with each frame, instead of the whole text before the first."""


def manner(fields: SpeechFields, shape: SpeechShape, stored: str | None, *, streamed: bool, model: str) -> Manner:
    """stored: the name of the voice in the store that `fields` names, if there is one; streamed: audio leaves
    as it is made.

    Raises ApiError (400) for what this checkpoint, or a stream, cannot do.
    """
    voice = voice_name(fields)
    task = TASKS[shape.variant]
    asked = fields.task_type
    if asked is not None and asked != task:
        raise bad_request("task_type", f"{model!r} is a {task} model")
    _check_references(fields, shape, task, stored)
    speaker = None
    if shape.variant == "custom_voice":
        if voice is None:
            raise bad_request("voice", f"is missing. Give one of {', '.join(sorted(shape.speakers))}.", "missing_field")
        speaker = voice.lower()
        if speaker not in shape.speakers:
            raise bad_request("voice", f"{voice!r} is none of {', '.join(sorted(shape.speakers))}", "voice_not_found")
    elif voice is not None and stored is None:
        if shape.variant == "voice_design":
            raise bad_request("voice", f"{task} has no voices. Describe one in instructions.")
        raise bad_request("voice", f"no stored voice {voice!r}", "voice_not_found")
    instructions = _instructions(fields, shape, task, model)
    form = fields.response_format or fields.default_format
    if form == "aac" and not find_spec("av"):
        message = "aac needs a library: pip install 'deltic[video]'. The other formats do not."
        raise bad_request("response_format", message, "format_not_available")
    speed = 1.0 if fields.speed is None else fields.speed
    if form == "opus" and fields.sample_rate not in (None, *OPUS_RATES):
        raise bad_request("sample_rate", f"opus has {', '.join(map(str, OPUS_RATES))}")
    if fields.initial_codec_chunk_frames and not streamed:
        raise bad_request("initial_codec_chunk_frames", "only for a stream")
    whole = shape.variant != "base" if fields.non_streaming_mode is None else fields.non_streaming_mode
    return Manner(
        form=form,
        rate=fields.sample_rate or 24000,
        speed=speed,
        speaker=speaker,
        language_id=_language(fields, shape, speaker),
        instructions=instructions,
        streams_text=not whole,
    )


def voice_aliases(given: Sequence[str], shape: SpeechShape) -> dict[str, str]:
    """The voice of each NAME=VOICE, by the name in lower case.

    Raises ConfigError for what can name no voice of this checkpoint.
    """
    aliases: dict[str, str] = {}
    for text in given:
        name, _, voice = (part.strip() for part in text.partition("="))
        if not name or not voice:
            raise ConfigError(f"--voice-alias {text!r}: must be NAME=VOICE, e.g. alloy=ryan")
        if shape.variant == "voice_design":
            raise ConfigError(f"--voice-alias {text!r}: a VoiceDesign model has no voices to name")
        if shape.variant == "custom_voice" and voice.lower() not in shape.speakers:
            known = ", ".join(sorted(shape.speakers))
            raise ConfigError(f"--voice-alias {text!r}: no voice {voice!r}. Use one of {known}.")
        if name.lower() in shape.speakers or name.lower() in aliases:
            raise ConfigError(f"--voice-alias {text!r}: {name!r} is the name of another voice already")
        aliases[name.lower()] = voice
    return aliases


def with_alias(fields: Fields, aliases: Mapping[str, str]) -> Fields:
    """The fields with the voice that a name stands for (--voice-alias), if it is one of those.

    Raises as voice_name does.
    """
    name = voice_name(fields)
    if name is None or name.lower() not in aliases:
        return fields
    return msgspec.structs.replace(fields, voice=aliases[name.lower()], speaker=None)


def voice_name(fields: SpeechFields) -> str | None:
    """Raises ApiError (400) where `voice` and `speaker` differ, or are empty."""
    names = [
        (field, given.id if isinstance(given, VoiceId) else given)
        for field in ("voice", "speaker")
        if (given := getattr(fields, field)) is not None
    ]
    for field, name in names:
        if not name.strip():
            raise bad_request(field, "is empty")
        if name != names[0][1]:
            raise bad_request("speaker", "differs from voice. Give one of the two.")
    return names[0][1].strip() if names else None


def _check_references(fields: SpeechFields, shape: SpeechShape, task: str, stored: str | None) -> None:
    given = [
        name
        for name in ("ref_audio", "ref_text", "x_vector_only_mode", "speaker_embedding")
        if getattr(fields, name) not in (None, False)
    ]
    if shape.variant != "base":
        if given:
            raise bad_request(given[0], f"only for a Base model. This one is {task}.")
        return
    sources = [name for name in ("ref_audio", "speaker_embedding") if name in given]
    if stored is not None:
        if named := [name for name in given if name != "x_vector_only_mode"]:
            raise bad_request(named[0], "excludes a stored voice, which has its own")
    elif not sources and voice_name(fields) is None:
        raise bad_request("voice", "is missing. A Base model needs ref_audio, speaker_embedding, or a stored voice.")
    if len(sources) == 2:
        raise bad_request("speaker_embedding", "excludes ref_audio. Give one of the two.")
    if "ref_text" in given and "ref_audio" not in given:
        raise bad_request("ref_text", "needs ref_audio, whose transcript it is")
    if "ref_audio" in given and not fields.x_vector_only_mode and not (fields.ref_text or "").strip():
        raise bad_request("ref_text", "is missing. Give the transcript of ref_audio, or x_vector_only_mode: true.")
    if fields.speaker_embedding is not None:
        check_embedding(fields.speaker_embedding, shape)


def check_embedding(values: list[float], shape: SpeechShape) -> None:
    """Raises ApiError (400)."""
    if len(values) != shape.talker.hidden_size:
        raise bad_request(
            "speaker_embedding", f"has {len(values)} numbers. This model's have {shape.talker.hidden_size}."
        )
    if not all(map(math.isfinite, values)) or max(map(abs, values)) > 3e38:
        raise bad_request("speaker_embedding", "has a number that float32 cannot hold")


def _instructions(fields: SpeechFields, shape: SpeechShape, task: str, model: str) -> str:
    text = (fields.instructions or "").strip()
    if text and not shape.takes_instructions:
        raise bad_request("instructions", f"{model!r} takes none. Leave it out.")
    if not text and shape.variant == "voice_design":
        raise bad_request("instructions", f"is missing. Describe the voice: {task} makes it.", "missing_field")
    return text


def _language(fields: SpeechFields, shape: SpeechShape, speaker: str | None) -> int | None:
    try:
        return shape.language_id(fields.language, speaker)
    except KeyError:
        known = ", ".join(["auto", *sorted(shape.languages)])
        raise bad_request("language", f"{fields.language!r} is none of {known}") from None


def frames_limit(fields: SpeechFields, shape: SpeechShape, n_text: int | None, n_prompt: int, limit: int) -> int:
    """Codes that may be drawn. n_text: tokens to be said, if that is known yet; n_prompt: rows; limit: of
    rows and frames together.

    Raises ApiError (400) when the prompt leaves no room.
    """
    room = limit - n_prompt
    if room < MIN_TOKENS:
        raise bad_request(
            "input",
            f"the prompt has {n_prompt} rows, but prompt and speech together may have {limit}. Shorten it.",
            "context_length_exceeded",
        )
    given = fields.max_new_tokens
    if given is None:
        given = min(MOST_NEW_TOKENS, shape.sampling.max_new_tokens)
        if n_text is not None:
            given = min(given, text_limit(n_text))
    return min(given, room)


def text_limit(n_text: int) -> int:
    """Codes that speech may take for so many tokens of text."""
    return max(LEAST_FRAMES, FRAMES_PER_TOKEN * n_text)


def sampling_params(fields: SpeechFields, shape: SpeechShape, max_tokens: int) -> SamplingParams:
    """Returns the parameters with which code 0 is drawn."""
    defaults = shape.sampling
    temperature, top_k, top_p = _draws(fields, shape, "")
    penalty = fields.repetition_penalty
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=defaults.repetition_penalty if penalty is None else penalty,
        seed=fields.seed,
        min_tokens=min(MIN_TOKENS, max_tokens),
    )


def speech_params(fields: SpeechFields, shape: SpeechShape, streamed: bool, **more: Any) -> Speech:
    """Returns how the other codes are drawn, and when audio leaves. more: fields of Speech."""
    temperature, top_k, top_p = _draws(fields, shape, "subtalker_")
    return Speech(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        is_streamed=streamed,
        first_chunk_frames=fields.initial_codec_chunk_frames or 0,
        **more,
    )


def _draws(fields: SpeechFields, shape: SpeechShape, prefix: str) -> tuple[float, int, float]:
    """Temperature, top_k and top_p, as the samplers take them."""
    temperature, top_k, top_p = (
        getattr(shape.sampling, prefix + name) if (given := getattr(fields, prefix + name)) is None else given
        for name in ("temperature", "top_k", "top_p")
    )
    if top_p == 0.0:  # no probability at all: what is left is the most likely code
        top_k, top_p = 1, 1.0
    return (0.0 if temperature < GREEDY_BELOW else temperature), top_k, top_p


def with_defaults(item: BatchItem, batch: SpeechBatchRequest) -> BatchItem:
    """An item with what the batch says for all.

    Of the fields that say whose voice it is, it has its own or the batch's.
    """
    whose = ("voice", "speaker", "ref_audio", "ref_text", "x_vector_only_mode", "speaker_embedding")
    has_own = any(getattr(item, name) is not None for name in whose)
    missing = {
        name: getattr(batch, name)
        for name in SpeechFields.__struct_fields__
        if getattr(item, name) is None and not (has_own and name in whose)
    }
    return msgspec.structs.replace(item, **missing)


def lost_its_end(n_frames: int) -> ApiError:
    """The 500 of speech that did not end within its bound."""
    return ApiError(
        500,
        f"the speech did not end within {n_frames} frames, far more than its text takes. Send it again with another seed, or "
        "give max_new_tokens to keep what was said until then.",
        code="speech_did_not_end",
    )
