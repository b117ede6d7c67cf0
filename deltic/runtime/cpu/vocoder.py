"""The vocoder's streams on the CPU: their state slots, and passes over them, each stream continued where it
was left.

A pass is recorded once and covers at most `n_frames` frames of all its streams. Longer work takes several
passes, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltic.models.vocoder.cpu import MAX_POSITIONS, PASS_FRAMES, Vocoder, allocate_vocoder
from deltic.models.vocoder.shape import FRAME_SAMPLES, VocoderShape
from deltic.ops.arrays import Array, zeros
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import Allocate
from deltic.runtime.speaking import check_chunks


@dataclass(frozen=True)
class Vocoded:
    """Chunks that were begun: here they are done."""

    waveforms: list[NDArray[np.float32]]

    def is_done(self) -> bool:
        return True

    def samples(self) -> list[NDArray[np.float32]]:
        """Waits for them, elsewhere."""
        return self.waveforms

    def seconds(self) -> float | None:
        """Whoever called `begin` knows."""
        return None


class VocoderStreams:
    """The streams' states and the recorded pass over them. Not thread-safe: one engine loop owns it."""

    def __init__(
        self,
        shape: VocoderShape,
        tensors: dict[str, Array],
        *,
        n_streams: int,
        program: Callable[[], Program],
        n_frames: int = PASS_FRAMES,
        allocate: Allocate = lambda name, size, dtype: zeros(size, dtype),
        half: bool = False,
    ) -> None:
        """tensors, half: as of `Vocoder`. program: makes one, with its threads. Raises
        UnsupportedModelError.
        """
        self.shape = shape
        self.n_streams, self.n_frames = n_streams, n_frames
        self.buffers = b = allocate_vocoder(shape, n_streams, allocate, n_frames)
        self.state_size = b.states.shape[1]
        self._front, self._rest = program(), program()
        Vocoder(shape, tensors, b, half).record(self._front, self._rest)

    def open(self, state_slot: int, state: Array | None = None) -> None:
        """Starts a stream in a state slot: at its beginning, or after the stream that a state was taken from.

        state: float32 [state_size], from `state_of`, in this process or another. Raises ValueError for a
        state of another model's size.
        """
        if state is None:
            self.buffers.states[state_slot] = 0.0
            return
        if state.dtype != np.float32 or state.shape != (self.state_size,):
            found = f"{state.dtype} {list(state.shape)}"
            raise ValueError(f"a vocoder state of this model is float32 [{self.state_size}], not {found}")
        self.buffers.states[state_slot] = state

    def state_of(self, state_slot: int) -> Array:
        """A copy of a stream's state."""
        return np.array(self.buffers.states[state_slot])

    def position(self, state_slot: int) -> int:
        """Frames of the stream in a state slot so far."""
        return int(self.buffers.states[state_slot, 0])

    def begin(self, chunks: Sequence[tuple[int, NDArray[np.int32]]]) -> Vocoded:
        """Starts a `vocode`. A vocoder that computes on another device need not be done when this returns."""
        return Vocoded(self.vocode(chunks))

    def skim(self, state_slot: int, codes: NDArray[np.int32]) -> None:
        """Moves a stream past codes whose samples are not needed, for a tenth of the work.

        Samples are right again, to the bit, SEEN_FRAMES after them. Raises ValueError as `vocode` does.
        """
        self._check([(state_slot, codes)])
        for begin in range(0, len(codes), self.n_frames):
            self._pass([(state_slot, codes)], [(0, begin, min(begin + self.n_frames, len(codes)))], None)

    def vocode(self, chunks: Sequence[tuple[int, NDArray[np.int32]]]) -> list[NDArray[np.float32]]:
        """The waveform of each chunk (state slot, codes int32 [n, 16]) of a stream: float32 [1920 n] within
        [-1, 1], at 24 kHz.

        Raises ValueError, before anything is changed, for codes outside the codebooks, a state slot given
        twice, and a stream longer than MAX_POSITIONS.
        """
        self._check(chunks)
        out = [np.empty(len(codes) * FRAME_SAMPLES, np.float32) for _, codes in chunks]
        part: list[tuple[int, int, int]] = []
        room = self.n_frames
        for i, (_, codes) in enumerate(chunks):
            done = 0
            while done < len(codes):
                n = min(room, len(codes) - done)
                part.append((i, done, done + n))
                done, room = done + n, room - n
                if not room:
                    self._pass(chunks, part, out)
                    part, room = [], self.n_frames
        self._pass(chunks, part, out)
        return out

    def _check(self, chunks: Sequence[tuple[int, NDArray[np.int32]]]) -> None:
        check_chunks(chunks, self.shape.codebook_size)
        if any(self.position(state_slot) + len(codes) > MAX_POSITIONS for state_slot, codes in chunks):
            raise ValueError(f"a stream has at most {MAX_POSITIONS} frames")

    def _pass(
        self,
        chunks: Sequence[tuple[int, NDArray[np.int32]]],
        part: list[tuple[int, int, int]],
        out: list[NDArray[np.float32]] | None,
    ) -> None:
        """part: (chunk, from, to) of each stream. out: where the samples go. None runs the pre-transformer
        only.
        """
        b, at = self.buffers, 0
        for s, (i, begin, end) in enumerate(part):
            state_slot, codes = chunks[i]
            b.state_slot[s], b.start[s] = state_slot, at
            b.codes[at : at + end - begin] = codes[begin:end]
            at += end - begin
            b.start[s + 1] = at
        if not at:
            return
        b.n.fill(len(part))
        self._front.run()
        if out is not None:
            self._rest.run()
        for s, (i, begin, end) in enumerate(part):
            b.states[b.state_slot[s], 0] += end - begin
            if out is None:
                continue
            first = b.start[s] * FRAME_SAMPLES
            samples = b.audio[first : first + (end - begin) * FRAME_SAMPLES]
            out[i][begin * FRAME_SAMPLES : end * FRAME_SAMPLES] = samples
