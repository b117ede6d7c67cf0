"""The voices of a Base model: those that were uploaded, by name, and reference audio that comes with a
request.

The engine keeps what it makes of a voice under a key that is a digest of the audio. What is kept here is the
audio itself, with its name, consent and transcript: one file a voice, beside the engine's. So what the engine
has is a cache; where it lost a voice, or another model is served, the voice is encoded again.
`SpeechParts` holds them beside all else that the server has of a speech model.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import time
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from deltic.config import ConfigError, ServerConfig
from deltic.engine.events import VoiceEncoded
from deltic.engine.messages import EncodeVoice
from deltic.engine.turns import share_of
from deltic.host.client import EngineClient
from deltic.json_types import JsonObject
from deltic.models.tts.shape import PUBLISHED_SPEECH, SpeechShape
from deltic.private import make_private
from deltic.server.api import decode
from deltic.server.chat.generation import refusals
from deltic.server.errors import RETRY_LATER, ApiError, bad_request
from deltic.server.fair_thread import FairThread
from deltic.server.isolated import Refused
from deltic.server.limits import Account, asking
from deltic.server.speech.audio import MAX_REFERENCE_BYTES, RATE, decode_reference
from deltic.server.speech.prompt import Prompter
from deltic.server.speech.protocol import TASKS, VoiceForm, voice_aliases
from deltic.server.transport import read_body
from deltic.server.urls import Hosts, UrlError, fetch, of_base64, of_data_url
from deltic.text import Tokenizer

log = logging.getLogger("deltic.server")

FORM_BYTES = 65_536
"""Bytes of an upload that are parsed at a time."""
MAX_STORED = 1000
MAX_IN_MEMORY = 64
"""Voices, where there is no directory to keep them in: of the longest audio, 190 MB."""
MAX_WAITING = 32
"""Requests that wait to have a voice made; each holds its audio."""

T = TypeVar("T")


class Uploaded(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a voice that was uploaded."""

    name: str
    key: str
    consent: str
    ref_text: str
    """Transcript of its audio; "": its speaker's vector is all that is used."""
    created: int
    """Seconds of the epoch."""
    kind: Literal["audio", "embedding"]
    """Kind of the voice's data: samples, float32 mono at 24 kHz, or a speaker's vector, float32."""
    owner: str = ""
    """Name of the key that it came with."""


class StoredVoice(Uploaded, frozen=True, kw_only=True):
    """A voice that was uploaded. It is never changed."""

    data: bytes | None
    """Data of the voice; None: in its file."""

    def card(self) -> JsonObject:
        fields = {"name": self.name, "consent": self.consent, "created_at": self.created}
        return fields | {"ref_text": self.ref_text or None, "kind": self.kind}


class _Head(Uploaded, frozen=True, kw_only=True):
    """The first line of a stored voice's file, in JSON; the data follow."""

    n_bytes: int
    digest: str
    """SHA-256 of the data."""


MAX_HEAD = 65_536


def key_of(data: bytes, kind: str, needs_codes: bool) -> str:
    """The same for the same audio, or vector, and use."""
    digest = hashlib.sha256(f"{kind} {needs_codes} ".encode())
    digest.update(data)
    return digest.hexdigest()[:40]


class VoiceStore:
    """Uploaded voices by name, any case, and the way of any voice into the engine."""

    def __init__(self, client: EngineClient, directory: Path | None, config: ServerConfig) -> None:
        """Reads what there is in `directory`; without one, voices are kept in memory. Files that cannot be
        read are passed over, and said in the log.

        Raises ConfigError where they may be anybody's, and for hosts that cannot be meant.
        """
        self._client = client
        self._config = config
        self._hosts = Hosts(config.allow_audio_host, "--allow-audio-host")
        self.directory = directory
        self._files = directory / "names" if directory else None
        self._stored: dict[str, StoredVoice] = {}
        self._encoding = asyncio.Semaphore(2)
        """The engine makes one at a time; one more may be decoded meanwhile."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Lock of each key: only the first of its requests waits beside those of others."""
        self._n_waiting: Counter[str] = Counter()
        self.n_tenants = 1
        """Number of tenants among whom what may wait, and be stored, is shared out."""
        self._known: dict[str, tuple[int, VoiceEncoded]] = {}
        if self._files is not None:
            make_private("--voices-dir", self._files.parent)
            make_private("--voices-dir", self._files)
            for path in self._files.glob("*.part"):
                path.unlink()
            for path in sorted(self._files.glob("*.voice")):
                try:
                    voice = _read(path, with_data=False)
                except (OSError, ValueError) as error:
                    log.warning("the voice in %s cannot be used: %s", path, error)
                    continue
                self._stored[voice.name.lower()] = voice

    def find(self, name: str) -> StoredVoice | None:
        return self._stored.get(name.lower())

    def all(self) -> list[StoredVoice]:
        return sorted(self._stored.values(), key=lambda voice: voice.name)

    async def add(
        self, name: str, consent: str, ref_text: str, audio: bytes | None, vector: list[float] | None, owner: str = ""
    ) -> StoredVoice:
        """Encodes and keeps a voice, of audio as it was uploaded or of a speaker's vector. name: as VoiceForm
        has it, so that it can be a file's; owner: the name of the key that asks. Raises ApiError.
        """
        self._check_name(name)
        if (audio is None) == (vector is None):
            raise bad_request("audio_sample", "give either audio_sample or speaker_embedding")
        if vector is not None and ref_text:
            raise bad_request("ref_text", "needs audio_sample, whose transcript it is")
        kind: Literal["audio", "embedding"] = "audio" if vector is None else "embedding"

        async def make() -> StoredVoice:
            if audio is None:
                data = np.asarray(vector, "<f4").tobytes()
            else:
                data = await self._decode(audio, "audio_sample")
            key = key_of(data, kind, bool(ref_text))
            voice = StoredVoice(
                name=name,
                key=key,
                consent=consent,
                ref_text=ref_text,
                created=int(time.time()),
                kind=kind,
                data=data,
                owner=owner,
            )
            await self._encode(voice, data)
            try:
                self._check_name(name)  # another upload may have been quicker
                return await self._store(voice)
            finally:
                self._drop_unused(key)

        return await self._in_turn(make)

    async def _store(self, voice: StoredVoice) -> StoredVoice:
        place = voice.name.lower()
        self._stored[place] = voice
        if self._files is not None:
            try:
                await asyncio.to_thread(_write, self._path(voice), voice)
            except OSError as error:
                self._stored.pop(place, None)
                message = f"the voice could not be stored ({error.strerror}). It is not kept."
                raise ApiError(500, message, code="voice_not_stored") from None
            if self._stored.get(place) is not voice:  # it was deleted meanwhile
                self._path(voice).unlink(missing_ok=True)
            else:
                self._stored[place] = msgspec.structs.replace(voice, data=None)
        return voice

    async def _in_turn(self, make: Callable[[], Coroutine[object, None, T]]) -> T:
        """The result of `make`.

        Once begun it is finished, even if who asked has left: the engine goes on with what it has, too, and
        would be given ever more otherwise. Raises ApiError: what `make` does, and 429 when too many wait.
        """
        tenant, most = asking().tenant, share_of(MAX_WAITING, self.n_tenants)
        if self._n_waiting[tenant] >= most:
            message = f"{most} requests wait for a voice to be encoded. Try again in a few seconds."
            raise ApiError(429, message, code="too_many_encodings", headers=RETRY_LATER)
        self._n_waiting[tenant] += 1
        try:
            async with self._turns[tenant]:
                await self._encoding.acquire()
        finally:
            self._n_waiting[tenant] -= 1
        making = asyncio.create_task(make())
        making.add_done_callback(lambda _: self._encoding.release())
        return await asyncio.shield(making)

    def _check_name(self, name: str) -> None:
        if self.find(name):
            raise ApiError(409, f"name: there is a voice {name!r}. Delete it first.", param="name", code="voice_exists")
        most = share_of(MAX_STORED if self._files else MAX_IN_MEMORY, self.n_tenants)
        if sum(voice.owner == asking().tenant for voice in self._stored.values()) >= most:
            message = f"{most} voices are stored, as many as may be" + (
                "" if self._files else " in memory. Start the server with --voices-dir."
            )
            raise ApiError(409, message, code="too_many_voices")

    def remove(self, name: str, account: Account | None) -> None:
        """account: of the key that asks; None where there are no keys. Raises ApiError (403, 404)."""
        voice = self.find(name)
        if voice is None:
            raise ApiError(404, f"no stored voice {name!r}", param="name", code="voice_not_found")
        if account is not None and not account.is_admin and account.name != voice.owner:
            message = f"voice {name!r} came with another key. Only that key's name or an administrator may delete it."
            raise ApiError(403, message, param="name", code="not_your_voice")
        del self._stored[name.lower()]
        if self._files is not None:
            self._path(voice).unlink(missing_ok=True)
        self._drop_unused(voice.key)

    def _drop_unused(self, key: str) -> bool:
        """Has the engine forget a voice that has no name here (any more)."""
        if any(voice.key == key for voice in self._stored.values()):
            return False
        self._known.pop(key, None)
        self._client.drop_voice(key)
        return True

    async def ready(self, voice: StoredVoice) -> VoiceEncoded:
        """Has the engine know a stored voice. Raises ApiError."""
        n_restarts, known = self._known.get(voice.key, (-1, None))
        if known is not None and n_restarts == self._client.n_restarts:
            return known
        if (known := await self._ask_if_known(voice.key)) is None:
            data = await asyncio.to_thread(self._data, voice) if voice.data is None else voice.data

            async def make() -> VoiceEncoded:
                known = await self._ask_if_known(voice.key) or await self._encode(voice, data)
                if self._drop_unused(voice.key):
                    # It was deleted meanwhile.
                    raise bad_request("voice", f"no stored voice {voice.name!r}", "voice_not_found")
                return known

            known = await self._in_turn(make)
        if self._files is not None:  # on disk it stays, so there is no need to ask again
            self._known[voice.key] = self._client.n_restarts, known
        return known

    def doubt(self, key: str) -> None:
        """A request with this voice failed: perhaps the engine lost it."""
        self._known.pop(key, None)

    def _data(self, voice: StoredVoice) -> bytes:
        try:
            data = _read(self._path(voice)).data
        except (OSError, ValueError) as error:
            message = f"the voice {voice.name!r} cannot be read ({error}). Delete it and upload it again."
            raise ApiError(500, message, code="voice_not_readable") from None
        assert data is not None
        return data

    async def _encode(self, voice: StoredVoice, data: bytes) -> VoiceEncoded:
        command = EncodeVoice(
            key=voice.key,
            needs_codes=bool(voice.ref_text),
            is_kept=self._files is not None,
            samples=data if voice.kind == "audio" else b"",
            speaker=b"" if voice.kind == "audio" else data,
        )
        return await self._ask(command, "audio_sample" if voice.kind == "audio" else "speaker_embedding")

    async def ready_inline(self, ref_audio: str, needs_codes: bool) -> VoiceEncoded:
        """Has the engine know the voice of a request's `ref_audio`. Raises ApiError."""
        data = await self._reference_bytes(ref_audio)
        # Of each namespace its own: that a voice is known already tells that somebody has sent it.
        key = await asyncio.to_thread(key_of, data, f"file {asking().namespace}", needs_codes)
        if (known := await self._ask_if_known(key)) is not None:
            return known

        async def make() -> VoiceEncoded:
            if (known := await self._ask_if_known(key)) is not None:
                return known
            samples = await self._decode(data, "ref_audio")
            return await self._ask(EncodeVoice(key=key, samples=samples, needs_codes=needs_codes), "ref_audio")

        return await self._in_turn(make)

    async def ready_vector(self, vector: list[float]) -> VoiceEncoded:
        """Has the engine know a request's `speaker_embedding`. Raises ApiError."""
        data = np.asarray(vector, "<f4").tobytes()
        command = EncodeVoice(key=key_of(data, "embedding", False), speaker=data)
        return await self._ask(command, "speaker_embedding")

    async def _ask_if_known(self, key: str) -> VoiceEncoded | None:
        answer = await self._send(EncodeVoice(key=key))
        return None if answer.error else answer

    async def _ask(self, command: EncodeVoice, param: str) -> VoiceEncoded:
        answer = await self._send(command)
        if answer.error is not None:
            raise bad_request(param, answer.error, "voice_not_encoded")
        return answer

    async def _send(self, command: EncodeVoice) -> VoiceEncoded:
        with refusals():
            return await self._client.encode_voice(command)

    async def _decode(self, data: bytes, param: str) -> bytes:
        try:
            return await decode_reference(data)
        except Refused as error:
            raise bad_request(param, str(error), "invalid_audio") from None

    async def _reference_bytes(self, reference: str) -> bytes:
        """Returns the bytes that `ref_audio` names.

        Nothing but `data:` is looked at unless the settings name its host or its directory.
        """
        scheme = reference[:8].partition(":")[0].lower()
        config = self._config
        if scheme in ("data", "http", "https") and (scheme == "data" or self._hosts):
            try:
                if scheme == "data":
                    encoded = of_data_url(reference, "audio")
                    data = await asyncio.to_thread(of_base64, encoded, MAX_REFERENCE_BYTES)
                else:
                    data = await fetch(reference, self._hosts, MAX_REFERENCE_BYTES)
            except UrlError as error:
                raise bad_request("ref_audio", str(error)) from None
        elif scheme == "file" and config.allow_audio_dir is not None:
            data = await asyncio.to_thread(_local, reference, config.allow_audio_dir)
        else:
            allowed = ["data: URLs"]
            allowed += [f"URLs of {self._hosts}"] if self._hosts else []
            allowed += ["file: URLs of one directory"] if config.allow_audio_dir else []
            raise bad_request("ref_audio", f"this server takes {' and '.join(allowed)} only")
        if len(data) > MAX_REFERENCE_BYTES:
            raise bad_request("ref_audio", f"is larger than {MAX_REFERENCE_BYTES // 1_000_000} MB")
        return data

    def _path(self, voice: StoredVoice) -> Path:
        assert self._files is not None
        return self._files / f"{voice.name.lower()}.voice"


def _local(url: str, directory: Path) -> bytes:
    try:
        path = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))
        # Links are followed first, so that none leads out.
        real = path.resolve(strict=True)
        if not real.is_relative_to(directory.resolve()) or not real.is_file():
            raise OSError
        with real.open("rb") as file:
            return file.read(MAX_REFERENCE_BYTES + 1)
    except (OSError, ValueError):
        raise bad_request("ref_audio", "no such file in the directory that this server reads") from None


def _write(path: Path, voice: StoredVoice) -> None:
    """Whole or not at all."""
    data = voice.data
    assert data is not None
    head = _Head(**_known(voice), n_bytes=len(data), digest=hashlib.sha256(data).hexdigest())
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(msgspec.json.encode(head) + b"\n")
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _known(voice: Uploaded) -> JsonObject:
    """The fields of Uploaded."""
    return {field: getattr(voice, field) for field in Uploaded.__struct_fields__}


def _read(path: Path, with_data: bool = True) -> StoredVoice:
    """Raises OSError, or ValueError for a file that is damaged; of the data's bits that shows only when they
    are read.
    """
    with path.open("rb") as file:
        line = file.readline(MAX_HEAD)
        head = msgspec.json.decode(line, type=_Head)
        if path.stat().st_size != len(line) + head.n_bytes:
            raise ValueError("the file is cut off")
        data = file.read() if with_data else None
    if data is not None and hashlib.sha256(data).hexdigest() != head.digest:
        raise ValueError("the file is damaged")
    return StoredVoice(**_known(head), data=data)


@dataclass
class SpeechParts:
    """Parts that only a speech model has."""

    prompts: Prompter
    voices: VoiceStore
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Aliases of voices, in lower case, and the voice each means."""
    worker: FairThread = field(default_factory=lambda: FairThread("audio", lambda: sys.maxsize))
    """Worker of one thread for files of audio: what is there to encode, the engine has made in turns."""

    @classmethod
    def open(
        cls, client: EngineClient, directory: Path, tokenizer: Tokenizer, aliases: Sequence[str], config: ServerConfig
    ) -> SpeechParts:
        """Parts of the model in `directory`. aliases: as --voice-alias has them. Raises ConfigError,
        CheckpointError, TokenizerError.
        """
        if not has_libraries():
            raise ConfigError("a model that speaks needs libraries for audio: pip install 'deltic[speech]'")
        engine, dummy = client.config, client.config.dummy
        shape = PUBLISHED_SPEECH[dummy.lower()] if dummy else SpeechShape.from_directory(directory)
        prompts = Prompter(shape, tokenizer, is_dummy=dummy is not None)
        voices = voice_aliases(aliases, shape)
        kept = engine.voices_dir or (engine.cache_dir and engine.cache_dir / "voices")
        return cls(prompts, VoiceStore(client, kept if shape.variant == "base" else None, config), voices)

    def voice_names(self) -> list[str]:
        """Speakers of the checkpoint, aliases, and voices that were uploaded."""
        return [*sorted(self.prompts.shape.speakers), *self.aliases, *(voice.name for voice in self.voices.all())]

    def card(self) -> JsonObject:
        """The model's entry `speech` in /v1/models."""
        shape = self.prompts.shape
        return {
            "task_type": TASKS[shape.variant],
            "sample_rate": RATE,
            "voices": self.voice_names(),
            "languages": ["auto", *sorted(shape.languages)],
            "takes_instructions": shape.takes_instructions,
        }


def has_libraries() -> bool:
    """Returns whether what an install without `deltic[speech]` lacks is there."""
    return find_spec("soundfile") is not None and find_spec("websockets") is not None


async def voice_form(request: Request, max_mb: float) -> VoiceForm:
    """Reads an upload. Raises ApiError (400, 413, 415)."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data":
        raise ApiError(415, "send a form as multipart/form-data", code="unsupported_media_type")
    # The parser would decode by any codec of Python's: some take for ever, and some make what is no Unicode.
    if options.get(b"charset", b"utf-8").lower() != b"utf-8":
        raise bad_request(None, "a form is in utf-8", "invalid_form")
    body = await read_body(request, max_mb, is_json=False)

    async def stream() -> AsyncIterator[bytes]:
        for start in range(0, len(body), FORM_BYTES):
            yield body[start : start + FORM_BYTES]
            await asyncio.sleep(0)  # other answers have their turn

    given: dict[str, str | bytes] = {}
    try:
        form = await MultiPartParser(request.headers, stream(), max_files=1, max_fields=16).parse()  # type: ignore[arg-type]
    except (MultiPartException, KeyError) as error:
        reason = error.message if isinstance(error, MultiPartException) else "it names no boundary"
        raise bad_request(None, f"the body is not a valid form: {reason}", "invalid_form") from None
    for name, value in form.multi_items():
        if name in given:
            raise bad_request(name, "is given twice")
        given[name] = await value.read() if isinstance(value, UploadFile) else value.strip()
    audio = given.get("audio_sample", b"")
    if isinstance(audio, str):
        raise bad_request("audio_sample", "must be a file")
    if len(audio) > MAX_REFERENCE_BYTES:
        raise bad_request("audio_sample", f"is larger than {MAX_REFERENCE_BYTES // 1_000_000} MB")
    return decode.convert(given, VoiceForm, "")
