"""Encoded voices: what cloning needs of a reference recording, made once (runtime/encoded.py has how they are
kept).

The other thread runs the two encoders. What is left to the engine's own is the vocoder's state behind the
reference codes, since only that thread may use the vocoder: `poll` looks up the frames' embeddings and takes
the vocoder through a few frames a call.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltic.config import ConfigError, EngineConfig
from deltic.engine.events import VoiceEncoded
from deltic.engine.messages import EncodeVoice
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.vocoder.encoder import AudioError, VoiceEncoder
from deltic.ops.arrays import Array
from deltic.private import make_private
from deltic.runtime.encoded import Encoded
from deltic.runtime.fingerprint import fingerprint

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

MEMORY_BYTES = 256 << 20
"""Bytes of the voices in memory, those that sequences hold not counted: some 40 with 20 s of reference."""

ENCODING_BYTES = 600 << 20
"""Bytes in use while a recording of 41 s is encoded, both encoders' weights among them."""

PIECE_FRAMES = 4
"""Frames that one `poll` takes the vocoder through: on a CPU as long as a step or two."""


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


class Voices(Encoded[EncodeVoice, Voice, VoiceEncoded]):
    """The encoded voices of one speech model. All public methods are for the engine's thread."""

    noun, source, refusals = "voice", "recording", (AudioError, CheckpointError)

    def __init__(
        self, encoder: VoiceEncoder, parts: VoiceParts, directory: Path | None, model: Callable[[], str]
    ) -> None:
        """directory: where voices are kept; None: in memory only. model: the fingerprint, asked for once, in
        the other thread.
        """
        super().__init__(directory, model)
        self._encoder, self._parts = encoder, parts

    @property
    def memory_bytes(self) -> int:
        return MEMORY_BYTES

    def wrong_with(self, command: EncodeVoice) -> str | None:
        if len(command.samples) % 4 or len(command.speaker) % 4:
            return "samples and speaker are float32"
        if command.speaker and (command.samples or command.needs_codes):
            return "a speaker vector stands for the recording: give no samples with it, and ask for no codes"
        return None

    def is_enough(self, item: Voice, command: EncodeVoice) -> bool:
        return item.codes is not None or not command.needs_codes

    def make(self, command: EncodeVoice) -> Voice | str | None:
        if command.speaker:
            return self._given(command.speaker)
        if not command.samples:
            return None
        samples = np.frombuffer(command.samples, np.float32)
        codes = self._encoder.codes(samples) if command.needs_codes else None
        return Voice(self._encoder.speaker(samples), codes)

    def _given(self, data: bytes) -> Voice | str:
        speaker = np.frombuffer(data, np.float32)
        width = self._encoder.shape.width
        if len(speaker) != width:
            return f"a speaker vector of this model has {width} values, not {len(speaker)}"
        if not np.isfinite(speaker).all():
            return "the speaker vector has values that are not finite"
        return Voice(speaker)

    def of(self, arrays: dict[str, Array]) -> Voice:
        return Voice(**arrays)

    def is_finished(self, item: Voice) -> bool:
        return item.codes is None or item.state is not None

    def finish(self, item: Voice, i: int) -> tuple[Voice, bool]:
        """Takes the vocoder through PIECE_FRAMES more of the reference codes."""
        codes, first, end = item.codes, i * PIECE_FRAMES, (i + 1) * PIECE_FRAMES
        assert codes is not None
        if item.frames is None:
            item = replace(item, frames=self._parts.frame_embeddings(codes))
        is_last = end >= len(codes)
        state = self._parts.prime(codes[first:end], item.state, max(0, len(codes) - end))
        return replace(item, state=state), is_last

    def reply(self, command: EncodeVoice, item: Voice | None, error: str | None) -> VoiceEncoded:
        return VoiceEncoded(command.key, 0 if item is None else item.n_frames, error, number=command.number)


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
