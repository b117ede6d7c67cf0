"""The part of a speech model's runner that is the same on every device: checks of requests, and priming of
voices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltic.engine.checks import RequestError
from deltic.engine.engine import LoadedAdapters
from deltic.engine.messages import MAX_FIRST_FRAMES, Request, Speech
from deltic.engine.pictures import PictureEncoder
from deltic.engine.stage import StreamVocoder
from deltic.models.tts.shape import FRAME, N_SIDE, SPEAKER, SpeechShape, codec_side
from deltic.models.vocoder.cpu import SEEN_FRAMES
from deltic.ops.geometry import N_CODES
from deltic.runtime.voices import Voice, Voices

PREDICTOR_KEY = 0x9E3779B97F4A7C15
"""The predictor's draws are keyed by the sequence's seed xor this: they share no number with those of code 0.
"""

DEFAULT_SPEECH = Speech()


class PrimableVocoder(StreamVocoder, Protocol):
    """A vocoder that can be taken through frames nobody wants to hear."""

    def skim(self, state_slot: int, codes: NDArray[np.int32]) -> None: ...

    def vocode(self, chunks: list[tuple[int, NDArray[np.int32]]]) -> list[NDArray[np.float32]]: ...

    def state_of(self, state_slot: int) -> NDArray[np.float32]: ...


def check_chunks(chunks: Sequence[tuple[int, NDArray[np.int32]]], codebook_size: int) -> None:
    """Raises ValueError for chunks (state slot, codes int32 [n, 16]) with a code outside the codebooks, and
    for a state slot that is given twice.
    """
    for _, codes in chunks:
        if codes.ndim != 2 or codes.shape[1] != N_CODES:
            raise ValueError(f"codes are [n, {N_CODES}], not {list(codes.shape)}")
        if codes.size and not 0 <= codes.min() <= codes.max() < codebook_size:
            raise ValueError(f"a code is outside 0 to {codebook_size - 1}")
    if len({state_slot for state_slot, _ in chunks}) < len(chunks):
        raise ValueError("two chunks of one stream; join them")


class Speaker:
    """The part of a speech model's runner that no device changes. The runner sets the fields."""

    shape: SpeechShape
    vocoder: PrimableVocoder
    n_streams: int
    """Streams that the vocoder has state slots for; the one behind them is `prime`'s."""
    voices: Voices | None = None
    """Voices of a Base model, once they are opened."""
    gives_logprobs = True
    pictures: PictureEncoder | None = None
    adapters: LoadedAdapters | None = None

    def check_speech(self, request: Request) -> Voice | None:
        """The encoded voice that the request names, None without one.

        Raises RequestError for what this model cannot speak.
        """
        params, speech = request.params, request.speech or DEFAULT_SPEECH
        if params.logprobs is not None and not self.gives_logprobs:
            raise RequestError("logprobs are not there for a speech model on a GPU; leave them out")
        for name, given in (
            ("a constraint", params.constraint),
            ("prompt_logprobs", params.prompt_logprobs is not None),
            ("ignore_eos", params.ignore_eos),
        ):
            if given:
                raise RequestError(f"{name} means nothing to a speech model; leave it out")
        for field, value, least, most in (
            ("temperature", speech.temperature, 0.0, 1e6),
            ("top_k", speech.top_k, 0, 2**31 - 1),
            ("top_p", speech.top_p, 0.0, 1.0),
            ("first_chunk_frames", speech.first_chunk_frames, 0, MAX_FIRST_FRAMES),
        ):
            if not least <= value <= most:  # false for NaN too
                raise RequestError(f"speech.{field} = {value}: must be from {least} to {most}")
        self.check_texts(speech.trailing_ids)
        voice = None
        if speech.voice:
            voice = self.voices.get(speech.voice) if self.voices is not None else None
            if voice is None:
                raise RequestError(f"voice {speech.voice!r} is not encoded here (any more); encode it again")
        self._check_rows(request.prompt_ids, voice)
        if speech.is_primed and (voice is None or voice.codes is None):
            raise RequestError("speech.is_primed needs a voice with reference codes")
        return voice

    def _check_rows(self, prompt_ids: list[int], voice: Voice | None) -> None:
        """Raises RequestError for a row whose codec side does not exist or belongs to a voice that was not
        named.
        """
        n_frames = 0 if voice is None or voice.frames is None else len(voice.frames)
        for side in {row % N_SIDE for row in prompt_ids}:
            if side < codec_side(self.shape.talker.vocab_size):
                continue
            if side < SPEAKER:
                raise RequestError(f"prompt has a row with a codec side {side} that does not exist")
            if voice is None or side - FRAME >= n_frames:
                raise RequestError(
                    "prompt has a row of a voice, or of a reference frame, that the request does not name"
                )

    def check_texts(self, text_ids: Iterable[int]) -> None:
        """Raises RequestError for an id that is none of a text."""
        n = self.shape.text_vocab_size
        if not all(0 <= i < n for i in text_ids):
            raise RequestError(f"speech.trailing_ids has an id outside the text vocabulary (0 to {n - 1})")

    def prime(
        self, codes: NDArray[np.int32], state: NDArray[np.float32] | None, n_after: int = 0
    ) -> NDArray[np.float32]:
        """The vocoder's state behind codes, int32 [n, 16], from a state or from the begin. n_after: frames
        that it will be primed with behind these; where there are enough, most of the work is left out.
        """
        state_slot = self.n_streams
        self.vocoder.open(state_slot, state)
        if n_after >= SEEN_FRAMES:
            self.vocoder.skim(state_slot, codes)
        else:
            self.vocoder.vocode([(state_slot, codes)])
        return self.vocoder.state_of(state_slot)
