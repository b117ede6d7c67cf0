"""Encoded voices: what cloning needs of a reference recording, made once, kept in memory and on disk.

A voice goes through three hands. A thread of its own runs the encoders (seconds, torch without Python's lock, at low priority) and
reads and writes files. `poll`, in the engine's thread between two steps, looks up the frames' embeddings and takes the vocoder
through the reference codes, a few frames a call, so that no step waits long. What is done is a Voice, which never changes; a
sequence that runs keeps its own, whatever happens to it here.

Memory holds the voices used last, within `MEMORY_BYTES`. A file is `DIRECTORY/MODEL/KEY.safetensors`, where MODEL names everything that
decides the bits (runtime/fingerprint.py); it is written under another name and moved when complete, and its digest is compared
whenever it is read. One that is damaged is removed. Whoever sent the recording keeps it: files here are a cache.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltic.config import ConfigError, EngineConfig
from deltic.engine.messages import EncodeVoice, VoiceEncoded
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.vocoder.encoder import AudioError, VoiceEncoder
from deltic.private import make_private
from deltic.runtime.fingerprint import fingerprint

log = logging.getLogger("deltic.engine")

MEMORY_BYTES = 256 << 20
"""Of the voices in memory, those that sequences hold not counted: some 40 with 20 s of reference."""

ENCODING_BYTES = 600 << 20
"""While a recording of 41 s is encoded, both encoders' weights among them."""

PIECE_FRAMES = 4
"""Frames that one `poll` takes the vocoder through: on a CPU as long as a step or two."""

NICENESS = 10
"""Of the encoding thread: steps go first."""

_KEY = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Voice:
    """Everything on the CPU. Without codes: a speaker vector only."""

    speaker: Tensor
    """float32 [h]."""
    codes: Tensor | None = None
    """int32 [R, 16]: of the reference frames."""
    frames: Tensor | None = None
    """float32 [R, h]: the sum of each one's 16 embeddings."""
    state: Tensor | None = None
    """The vocoder's, behind the codes."""

    @property
    def n_frames(self) -> int:
        return 0 if self.codes is None else len(self.codes)

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


class VoiceParts(Protocol):
    """What the runner of a speech model gives, in the engine's thread."""

    def frame_embeddings(self, codes: Tensor) -> Tensor:
        """codes int32 [R, 16] -> float32 [R, h]."""

    def prime(self, codes: Tensor, state: Tensor | None, n_after: int = 0) -> Tensor:
        """The vocoder's state behind codes, int32 [n, 16], from a state or from the begin of a stream; n_after: frames of the same
        voice that come behind these."""


@dataclass(slots=True)
class _Primed:
    """A voice on its way through the vocoder."""

    command: EncodeVoice
    voice: Voice
    n_done: int = 0


_Result = Voice | str | None
"""A voice, why there is none, or None: nothing is known of it."""


class Voices:
    """The encoded voices of one speech model. All methods are for the engine's thread."""

    def __init__(
        self, encoder: VoiceEncoder, parts: VoiceParts, directory: Path | None, model: Callable[[], str]
    ) -> None:
        """directory: where voices are kept; None: in memory only. model: the fingerprint, asked for once, in the other thread."""
        self._encoder, self._parts = encoder, parts
        self._directory, self._ask_model, self._model = directory, model, ""
        self._voices: OrderedDict[str, Voice] = OrderedDict()  # least recently used first
        self._asked: dict[str, deque[EncodeVoice | None]] = {}  # by key; the first is worked on; None: a drop
        self._priming: deque[_Primed] = deque()
        self._answers: list[VoiceEncoded] = []
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: deque[tuple[EncodeVoice, _Result]] = deque()
        self._thread: threading.Thread | None = None  # started with its first job

    @property
    def is_waiting(self) -> bool:
        """Whether the other thread has something that `poll` will bring."""
        return bool(self._asked)

    @property
    def has_work(self) -> bool:
        """Whether `poll` would do something now."""
        return bool(self._answers or self._done or self._priming)

    def get(self, key: str) -> Voice | None:
        """A voice by its key, from memory or, if this process knows that its files fit, from disk. None: encode it (again)."""
        voice = self._voices.get(key)
        if voice is not None:
            self._voices.move_to_end(key)
        elif self._directory is not None and self._model and _KEY.fullmatch(key):
            found = self._read(key)
            if isinstance(found, Voice):
                self._keep(key, voice := found)
        return voice

    def encode(self, command: EncodeVoice) -> None:
        """Has a voice made, or looked for when the command has nothing to make it of. The answer comes from `poll`; those of one
        key come in the order in which they were asked."""
        asked = self._asked.setdefault(command.key, deque())
        asked.append(command)
        if len(asked) == 1:
            self._begin(command)

    def drop(self, key: str) -> None:
        """Forgets a voice, and removes its file; one that is being made, when it was; not what is asked for after this. Nothing
        happens when there is none."""
        if key in self._asked:
            self._asked[key].append(None)
        self._forget(key)

    def _forget(self, key: str) -> None:
        self._voices.pop(key, None)
        if self._directory is not None and _KEY.fullmatch(key):
            self._remove(key)
            self._put(lambda: self._remove(key))  # behind what may be writing it

    def poll(self) -> list[VoiceEncoded]:
        """Takes what the other thread has done, and one piece through the vocoder; the answers that are ready."""
        while self._done:
            command, result = self._done.popleft()
            if isinstance(result, Voice) and result.codes is not None and result.state is None:
                self._priming.append(_Primed(command, result))
            else:
                self._answer(command, result)
        if self._priming:
            self._prime(self._priming[0])
        answers, self._answers = self._answers, []
        return answers

    def close(self, timeout_s: float) -> None:
        """Ends the thread behind what it has begun, or leaves it after so long. No other call may follow."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    # In the engine's thread.

    def _put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="voice-encoder", daemon=True)
            self._thread.start()

    def _begin(self, command: EncodeVoice) -> None:
        known = self._voices.get(command.key)
        if known is not None and (known.codes is not None or not command.needs_codes):
            self._done.append((command, known))
        else:
            self._put(lambda: self._done.append((command, self._find_or_make(command))))

    def _prime(self, primed: _Primed) -> None:
        voice, codes, n = primed.voice, primed.voice.codes, primed.n_done
        assert codes is not None
        try:
            if voice.frames is None:
                voice = replace(voice, frames=self._parts.frame_embeddings(codes).cpu())
            n_after = max(0, len(codes) - n - PIECE_FRAMES)
            state = self._parts.prime(codes[n : n + PIECE_FRAMES], voice.state, n_after)
            primed.voice, primed.n_done = replace(voice, state=state), n + PIECE_FRAMES
        except Exception as error:
            log.exception("a voice could not be finished")
            self._priming.popleft()
            return self._answer(primed.command, f"{type(error).__name__}: {error}")
        if primed.n_done >= len(codes):
            self._priming.popleft()
            self._answer(primed.command, replace(primed.voice, state=state.cpu()))

    def _answer(self, command: EncodeVoice, result: _Result) -> None:
        """Says what became of a command, keeps a voice, and goes on to the next command of the same key."""
        key = command.key
        if isinstance(result, Voice):
            self._keep(key, result)
            if command.is_kept:
                self._put(lambda: self._write(key, result))
            self._answers.append(VoiceEncoded(key, result.n_frames))
        else:
            error = result or "no such voice here (any more); send its recording"
            self._answers.append(VoiceEncoded(key, error=error))
        asked = self._asked[key]
        asked.popleft()
        while asked and asked[0] is None:
            asked.popleft()
            self._forget(key)
        if asked and (following := asked[0]) is not None:
            self._begin(following)
        else:
            del self._asked[key]

    def _keep(self, key: str, voice: Voice) -> None:
        self._voices[key] = voice
        self._voices.move_to_end(key)
        n_bytes = sum(kept.n_bytes for kept in self._voices.values())
        while n_bytes > MEMORY_BYTES and len(self._voices) > 1:
            _, dropped = self._voices.popitem(last=False)
            n_bytes -= dropped.n_bytes

    # In the other thread, and from `get`, `drop` and `poll` where these touch files.

    def _run(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a voice could not be kept")

    def _find_or_make(self, command: EncodeVoice) -> _Result:
        if not _KEY.fullmatch(command.key):
            return "a voice's key has letters, digits, _ and -, at most 64 of them"
        if len(command.samples) % 4 or len(command.speaker) % 4:
            return "samples and speaker are float32"
        if command.speaker and (command.samples or command.needs_codes):
            return "a speaker vector stands for the recording: give no samples with it, and ask for no codes"
        try:
            found: _Result = None
            if self._directory is not None:
                self._model = self._model or self._ask_model()
                found = self._read(command.key)
            if isinstance(found, Voice) and (found.codes is not None or not command.needs_codes):
                return found
            if command.speaker:
                return self._given(command.speaker)
            if not command.samples:
                return found if isinstance(found, str) else None
            samples = torch.frombuffer(bytearray(command.samples), dtype=torch.float32)
            codes = self._encoder.codes(samples) if command.needs_codes else None
            return Voice(self._encoder.speaker(samples), codes)
        except (AudioError, CheckpointError) as error:
            return str(error)
        except Exception as error:
            log.exception("a voice could not be encoded")
            return f"{type(error).__name__}: {error}"

    def _given(self, data: bytes) -> _Result:
        speaker = torch.frombuffer(bytearray(data), dtype=torch.float32)
        width = self._encoder.shape.width
        if len(speaker) != width:
            return f"a speaker vector of this model has {width} values, not {len(speaker)}"
        if not speaker.isfinite().all():
            return "the speaker vector has values that are not finite"
        return Voice(speaker)

    def _file(self, key: str) -> Path:
        assert self._directory is not None
        return self._directory / self._model / f"{key}.safetensors"

    def _read(self, key: str) -> _Result:
        """The voice in a file; None: there is none; a text: it was damaged, and is removed."""
        path = self._file(key)
        try:
            with safe_open(str(path), framework="pt") as handle:
                found = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
                digest = (handle.metadata() or {}).get("digest")
            if digest != _digest(key, found):
                raise ValueError("its digest is another")
            return Voice(**found)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, TypeError, RuntimeError) as error:
            log.warning("the voice in %s is damaged (%s): removed", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return f"the file of this voice was damaged ({error}) and is removed; send its recording again"

    def _write(self, key: str, voice: Voice) -> None:
        """Whole or not at all. A disk that refuses costs the file, not the voice."""
        if self._directory is None:
            return
        try:
            self._model = self._model or self._ask_model()
            path = self._file(key)
            if path.exists():
                return
            part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            try:
                tensors = {name: tensor.contiguous() for name, tensor in voice.tensors().items()}
                save_file(tensors, part, metadata={"digest": _digest(key, tensors)})
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        except (OSError, SafetensorError, CheckpointError) as error:
            log.warning("a voice could not be kept in %s: %s", self._directory, error)

    def _remove(self, key: str) -> None:
        """Of every model: a voice that is dropped is nobody's."""
        assert self._directory is not None
        for path in self._directory.glob(f"*/{key}.safetensors*"):  # one that was cut off, too
            with contextlib.suppress(OSError):
                path.unlink()


def open_voices(
    config: EngineConfig, checkpoint: Path, width: int, parts: VoiceParts, kernels: Path | str
) -> Voices:
    """Of a Base model. width: of the talker. kernels: as `fingerprint` takes them. Raises CheckpointError and UnsupportedModelError
    when the encoders cannot be used, ConfigError when the directory cannot."""
    is_dummy = config.dummy is not None
    encoder = VoiceEncoder.dummy(width, config.seed) if is_dummy else VoiceEncoder.open(checkpoint)
    if encoder.shape.width != width:
        raise UnsupportedModelError(
            "speaker_encoder_config.enc_dim", encoder.shape.width, f"{width}, as hidden_size"
        )
    directory = config.voices_dir or (config.cache_dir / "voices" if config.cache_dir else None)
    try:
        if directory is not None:
            if config.voices_dir is None and config.cache_dir is not None:
                make_private("--cache-dir", config.cache_dir)
            make_private("--voices-dir", directory)
            if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"--voices-dir {directory}: cannot be used ({error.strerror}); give a directory that this user may write"
        ) from error

    def model() -> str:
        remembering = replace(config, cache_dir=config.cache_dir or directory)
        both = (checkpoint, checkpoint / "speech_tokenizer")
        names = "".join(fingerprint(remembering, part, kernels) for part in both)
        return blake2b(names.encode(), digest_size=16).hexdigest()

    return Voices(encoder, parts, directory, model)


def _digest(key: str, tensors: dict[str, Tensor]) -> str:
    digest = blake2b(key.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
