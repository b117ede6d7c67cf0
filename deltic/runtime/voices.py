"""Encoded voices: what cloning needs of a reference recording, made once, and kept in memory and on disk.

A voice goes through two threads. One of its own runs the two encoders (seconds, numpy without Python's lock,
at low priority) and reads and writes files. What is left to the engine's own is the vocoder's state behind
the reference codes, since only that thread may use the vocoder: `poll`, between two steps, looks up the
frames' embeddings and takes the vocoder through a few frames a call, so that no step waits long. A finished
voice never changes; a sequence that runs keeps its own, whatever happens to it here.

Memory holds the voices used last, within a number of bytes. A file is `DIRECTORY/MODEL/KEY.safetensors`,
where MODEL names everything that decides the bits (runtime/fingerprint.py); it is written under another name
and moved when complete, and its digest is compared whenever it is read. A damaged file is removed. Whoever
sent the recording keeps it: files here are a cache.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from deltic.config import ConfigError, EngineConfig
from deltic.engine.events import VoiceEncoded
from deltic.engine.messages import EncodeVoice
from deltic.machine import be_nice
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.vocoder.encoder import AudioError, VoiceEncoder
from deltic.ops.arrays import Array
from deltic.private import make_private
from deltic.runtime.fingerprint import fingerprint

log = logging.getLogger("deltic.engine")

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

MEMORY_BYTES = 256 << 20
"""Bytes of the voices in memory, those that sequences hold not counted: some 40 with 20 s of reference."""

ENCODING_BYTES = 600 << 20
"""Bytes in use while a recording of 41 s is encoded, both encoders' weights among them."""

PIECE_FRAMES = 4
"""Frames that one `poll` takes the vocoder through: on a CPU as long as a step or two."""

_KEY = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Voice:
    """Voice of a speaker. Without codes it is a speaker vector only."""

    speaker: Floats
    """float32 [h]."""
    codes: Ints | None = None
    """int32 [R, 16]: of the reference frames."""
    frames: Floats | None = None
    """float32 [R, h]: the sum of each one's 16 embeddings."""
    state: Floats | None = None
    """The vocoder's, behind the codes."""

    @property
    def n_frames(self) -> int:
        return 0 if self.codes is None else len(self.codes)

    def arrays(self) -> dict[str, Array]:
        """Returns the arrays that there are, by name."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in every.items() if array is not None}

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())


class VoiceParts(Protocol):
    """Operations that the runner of a speech model lends, in the engine's thread."""

    def frame_embeddings(self, codes: Ints) -> Floats:
        """codes int32 [R, 16] -> float32 [R, h]."""

    def prime(self, codes: Ints, state: Floats | None, n_after: int = 0) -> Floats:
        """The vocoder's state behind codes, int32 [n, 16], from a state or from the begin of a stream;
        n_after: frames of the same voice that come behind these.
        """


@dataclass(slots=True)
class _Unfinished:
    """A voice behind whose first n_codes reference codes the vocoder's state is made."""

    command: EncodeVoice
    voice: Voice
    n_codes: int = 0


class Voices:
    """The encoded voices of one speech model. All public methods are for the engine's thread."""

    def __init__(
        self, encoder: VoiceEncoder, parts: VoiceParts, directory: Path | None, model: Callable[[], str]
    ) -> None:
        """directory: where voices are kept; None: in memory only. model: the fingerprint, asked for once, in
        the other thread.
        """
        self._encoder, self._parts = encoder, parts
        self._directory, self._ask_model, self._model = directory, model, ""
        self._voices: OrderedDict[str, Voice] = OrderedDict()  # least recently used first
        # By key; the first is worked on; None: a drop.
        self._asked: dict[str, deque[EncodeVoice | None]] = {}
        self._leaving: dict[str, threading.Event] = {}  # dropped keys, until their files are gone for good
        self._unfinished: deque[_Unfinished] = deque()
        self._answers: list[VoiceEncoded] = []
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: deque[tuple[EncodeVoice, Voice | str | None]] = deque()
        self._thread: threading.Thread | None = None  # started with its first job

    # In the engine's thread.

    @property
    def is_waiting(self) -> bool:
        """True if the other thread has something that `poll` will bring."""
        return bool(self._asked)

    @property
    def has_work(self) -> bool:
        """True if `poll` would do something now."""
        return bool(self._answers or self._done or self._unfinished)

    def get(self, key: str) -> Voice | None:
        """A voice by its key, from memory or, if this process knows that its files fit, from disk.

        None: encode it (again).
        """
        voice = self._voices.get(key)
        if voice is not None:
            self._voices.move_to_end(key)
        elif self._directory is not None and self._model and _KEY.fullmatch(key) and not self._is_leaving(key):
            found = self._read(key)
            if isinstance(found, Voice):
                self._keep(key, voice := found)
        return voice

    def encode(self, command: EncodeVoice) -> None:
        """Has a voice made, or looked for when the command has nothing to make it of.

        The answer comes from `poll`; those of one key come in the order in which they were asked.
        """
        asked = self._asked.setdefault(command.key, deque())
        asked.append(command)
        if len(asked) == 1:
            self._begin(command)

    def drop(self, key: str) -> None:
        """Forgets a voice and removes its file.

        A voice that is being made is forgotten once it is made; one that is asked for later stays. Nothing
        happens when there is none.
        """
        if key in self._asked:
            self._asked[key].append(None)
        self._forget(key)

    def poll(self) -> list[VoiceEncoded]:
        """Takes the other thread's results and does one piece of the remaining work. Returns the answers that
        are ready.
        """
        while self._done:
            command, result = self._done.popleft()
            if isinstance(result, Voice) and result.codes is not None and result.state is None:
                self._unfinished.append(_Unfinished(command, result))
            else:
                self._answer(command, result)
        if self._unfinished:
            self._go_on(self._unfinished[0])
        answers, self._answers = self._answers, []
        return answers

    def close(self, timeout_s: float) -> None:
        """Ends the thread behind what it has begun, or leaves it after so long. No other call may follow."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="voice-encoder", daemon=True)
            self._thread.start()

    def _begin(self, command: EncodeVoice) -> None:
        known = self._voices.get(command.key)
        if known is not None and _is_enough(known, command):
            self._done.append((command, known))
        else:
            self._put(lambda: self._done.append((command, self._find_or_make(command))))

    def _go_on(self, unfinished: _Unfinished) -> None:
        """Takes the vocoder through PIECE_FRAMES more of the reference codes."""
        voice, first, end = unfinished.voice, unfinished.n_codes, unfinished.n_codes + PIECE_FRAMES
        assert voice.codes is not None
        n_after = max(0, len(voice.codes) - end)
        try:
            frames = self._parts.frame_embeddings(voice.codes) if voice.frames is None else voice.frames
            state = self._parts.prime(voice.codes[first:end], voice.state, n_after)
        except Exception as error:
            log.exception("a voice could not be finished")
            self._unfinished.popleft()
            return self._answer(unfinished.command, f"{type(error).__name__}; the engine's log says more")
        unfinished.voice, unfinished.n_codes = replace(voice, frames=frames, state=state), end
        if not n_after:
            self._unfinished.popleft()
            self._answer(unfinished.command, unfinished.voice)

    def _answer(self, command: EncodeVoice, result: Voice | str | None) -> None:
        """Answers a command, keeps its voice, and goes on to the next command of the same key."""
        key = command.key
        answer = VoiceEncoded(key, number=command.number)
        if isinstance(result, Voice):
            answer.n_frames = result.n_frames
            self._keep(key, result)
            if command.is_kept:
                self._put(lambda: self._write(key, result))
        else:
            answer.error = result or "no such voice here (any more); send its recording"
        self._answers.append(answer)
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

    def _forget(self, key: str) -> None:
        self._voices.pop(key, None)
        if self._directory is not None and _KEY.fullmatch(key):
            self._remove(key)
            self._leaving = {name: gone for name, gone in self._leaving.items() if not gone.is_set()}
            self._leaving[key] = gone = threading.Event()

            def remove() -> None:
                self._remove(key)
                gone.set()

            self._put(remove)  # behind what may be writing it

    def _is_leaving(self, key: str) -> bool:
        """Returns whether a file that there is, or will be for a moment, was dropped."""
        gone = self._leaving.get(key)
        return gone is not None and not gone.is_set()

    # In the other thread, and from `get`, `drop` and `poll` where these touch files.

    def _run(self) -> None:
        be_nice()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a voice could not be kept")

    def _find_or_make(self, command: EncodeVoice) -> Voice | str | None:
        if not _KEY.fullmatch(command.key):
            return "a voice's key has letters, digits, _ and -, at most 64 of them"
        if len(command.samples) % 4 or len(command.speaker) % 4:
            return "samples and speaker are float32"
        if command.speaker and (command.samples or command.needs_codes):
            return "a speaker vector stands for the recording: give no samples with it, and ask for no codes"
        try:
            found: Voice | str | None = None
            if self._directory is not None:
                self._model = self._model or self._ask_model()
                found = self._read(command.key)
            if isinstance(found, Voice) and _is_enough(found, command):
                return found
            made = self._make(command)
            return found if made is None and isinstance(found, str) else made
        except (AudioError, CheckpointError) as error:
            return str(error)
        except Exception as error:
            log.exception("a voice could not be encoded")
            return f"{type(error).__name__}; the engine's log says more"

    def _make(self, command: EncodeVoice) -> Voice | str | None:
        """Runs the encoders. Returns a voice, the reason why there is none, or None if the command brings
        nothing to make it of.
        """
        if command.speaker:
            speaker, width = np.frombuffer(command.speaker, np.float32), self._encoder.shape.width
            if len(speaker) != width:
                return f"a speaker vector of this model has {width} values, not {len(speaker)}"
            if not np.isfinite(speaker).all():
                return "the speaker vector has values that are not finite"
            return Voice(speaker)
        if not command.samples:
            return None
        samples = np.frombuffer(command.samples, np.float32)
        codes = self._encoder.codes(samples) if command.needs_codes else None
        return Voice(self._encoder.speaker(samples), codes)

    def _file(self, key: str) -> Path:
        assert self._directory is not None
        return self._directory / self._model / f"{key}.safetensors"

    def _read(self, key: str) -> Voice | str | None:
        """The voice in a file; None: there is none; a text: it was damaged, and is removed."""
        path = self._file(key)
        try:
            with safe_open(str(path), framework="np") as handle:
                found = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
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
                arrays = {name: np.ascontiguousarray(array) for name, array in voice.arrays().items()}
                save_file(arrays, part, metadata={"digest": _digest(key, arrays)})
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        except (OSError, SafetensorError, CheckpointError) as error:
            log.warning("a voice could not be kept in %s: %s", self._directory, error)

    def _remove(self, key: str) -> None:
        """Removes the files of every model: a dropped voice is gone for all of them."""
        assert self._directory is not None
        for path in self._directory.glob(f"*/{key}.safetensors*"):  # one that was cut off, too
            with contextlib.suppress(OSError):
                path.unlink()


def _is_enough(voice: Voice, command: EncodeVoice) -> bool:
    """Returns whether a voice that is known is all that the command asks for."""
    return voice.codes is not None or not command.needs_codes


def _digest(key: str, arrays: dict[str, Array]) -> str:
    digest = blake2b(key.encode(), digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {list(array.shape)}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def open_voices(config: EngineConfig, checkpoint: Path, width: int, parts: VoiceParts, kernels: Path | str) -> Voices:
    """Opens the voices of a Base model. width: of the talker. kernels: as `fingerprint` takes them.

    Raises CheckpointError and UnsupportedModelError when the encoders cannot be used, ConfigError when the
    directory cannot.
    """
    is_dummy = config.dummy is not None
    encoder = VoiceEncoder.dummy(width, config.seed) if is_dummy else VoiceEncoder.open(checkpoint)
    if encoder.shape.width != width:
        raise UnsupportedModelError("speaker_encoder_config.enc_dim", encoder.shape.width, f"{width}, as hidden_size")
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
        names = "".join(fingerprint(remembering, width, part, kernels) for part in both)
        return blake2b(names.encode(), digest_size=16).hexdigest()

    return Voices(encoder, parts, directory, model)
