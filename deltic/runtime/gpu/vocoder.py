"""The vocoder on a GPU: its memory, recorded chunks, and a stream of its own, beside the talker's steps.

A chunk of B streams with F new frames each is recorded for some B and F. What is asked for is cut into such
pieces, which changes no bit. Nothing is waited for until somebody asks for the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.engine.events import ReplayStats
from deltic.engine.step import Progress, silent
from deltic.models.vocoder.gpu import (
    ChunkBuffers,
    VocoderGpu,
    check_vocoder_gpu,
    chunk_buffers,
    frame_samples,
    pack_vocoder,
    state_words,
)
from deltic.models.vocoder.shape import VocoderShape
from deltic.models.vocoder.weights import vocoder_weight_bytes
from deltic.ops.arrays import Array
from deltic.ops.geometry import N_CODES
from deltic.runtime.gpu.batch_slots import Ring
from deltic.runtime.gpu.record import Body, Recording, record_all
from deltic.runtime.speaking import check_chunks

FRAMES = (1, 2, 4, 8, 16, 32)
"""New frames of a recorded chunk."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Streams of a recorded chunk, as long as all have at most `n_frames` frames together."""
MAX_FRAMES = 256
N_INPUTS = 8
"""Pinned buffers for inputs, used in turn."""
N_HELD = 4
"""Pinned buffers of each size for samples, that there are from the beginning: more are made when they are
needed.
"""

Chunk = tuple[int, NDArray[np.int32]]


def vocoder_bytes(shape: VocoderShape, n_frames: int = MAX_FRAMES) -> int:
    """Device memory that a vocoder takes beside the streams' states: weights and activations."""
    total = vocoder_weight_bytes(shape)

    def count(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal total
        tensor = torch.empty(size, dtype=dtype, device="meta")
        total += tensor.nbytes
        return tensor

    chunk_buffers(shape, n_frames, count)
    return total


@dataclass
class VocodedGpu:
    """Chunks that were begun."""

    rows: list[list[Tensor]]  # float32 [frame_samples n], pinned: of each chunk, in order
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # before and behind them

    def is_done(self) -> bool:
        return self.events is None or self.events[1].query()

    def seconds(self) -> float | None:
        """Seconds by the device's clock, once the chunks are done. None without a clock."""
        return None if self.events is None else self.events[0].elapsed_time(self.events[1]) / 1000

    def samples(self) -> list[NDArray[np.float32]]:
        """Waits for them."""
        if self.events is not None:
            self.events[1].synchronize()
        return [
            np.concatenate([row.numpy() for row in rows]) if rows else np.empty(0, np.float32) for rows in self.rows
        ]


class GpuVocoderStreams:
    """Weights, the streams' states and the recorded chunks. Not thread-safe: one engine loop owns it.

    Without a GPU it runs in Triton's interpreter, unrecorded: for tests.
    """

    def __init__(
        self,
        shape: VocoderShape,
        tensors: dict[str, Array],
        *,
        n_streams: int,
        device: str | torch.device,
        n_frames: int = MAX_FRAMES,
        progress: Progress = silent,
    ) -> None:
        """tensors: of load_vocoder. Raises UnsupportedModelError."""
        check_vocoder_gpu(shape)
        self.shape, self.n_streams = shape, n_streams
        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"
        self.frame_samples = frame_samples(shape)
        self.state_size = state_words(shape)
        state = torch.zeros((n_streams, self.state_size), dtype=torch.int32, device=device)
        self.model = VocoderGpu(shape, pack_vocoder(shape, tensors, self.device), state)
        self.stream = torch.cuda.Stream(priority=-1) if self.is_gpu else None
        self._buffers = chunk_buffers(
            shape, n_frames, lambda name, size, dtype: torch.zeros(size, dtype=dtype, device=device)
        )
        self.replays = ReplayStats()
        self._batches = [b for b in BATCHES if b <= n_frames and b < 2 * n_streams]
        self._n_frames = n_frames
        n_words = n_frames * N_CODES + self._batches[-1]
        self._words = torch.zeros(n_words, dtype=torch.int32, device=device)
        self._words[: self._batches[-1]] = -1
        self._inputs = Ring(n_words, N_INPUTS, self.device)
        if self.is_gpu:  # what chunks will ask for: torch keeps it, while asking the driver stops the device
            held = [self._pinned(1 << i) for i in range(n_frames.bit_length()) for _ in range(N_HELD)]
            del held
        sizes = [(b, f) for b in self._batches[::-1] for f in FRAMES[::-1] if b * f <= n_frames]
        bodies = [self._body(b, f, self.model.forward) for b, f in sizes]
        bodies += [self._body(b, f, self.model.skim) for b, f in sizes if b == 1]
        recorded = record_all(bodies, self.stream, lambda done: progress("record vocoder", done), self.replays)
        self._chunks = dict(zip(sizes, recorded, strict=False))
        self._skims = dict(zip([f for b, f in sizes if b == 1], recorded[len(sizes) :], strict=True))

    def _body(self, n_streams: int, n_frames: int, run: Callable[[Tensor, Tensor, ChunkBuffers], object]) -> Body:
        n = n_streams * n_frames * N_CODES
        state_slot = self._words[:n_streams]
        codes = self._words[self._batches[-1] :][:n].view(n_streams, n_frames, N_CODES)
        return lambda: run(codes, state_slot, self._buffers)

    def recordings(self) -> list[Recording]:
        return [*self._chunks.values(), *self._skims.values()]

    def open(self, state_slot: int, state: NDArray[np.float32] | None = None) -> None:
        """Starts a stream in a state slot: at its begin, or behind the one that the state is of (float32
        [state_size], of `state_of`).
        Raises ValueError for a state of another model or device.
        """
        if state is not None and (state.dtype != np.float32 or state.shape != (self.state_size,)):
            found = f"{state.dtype} {list(state.shape)}"
            raise ValueError(f"a vocoder state of this model and device is float32 [{self.state_size}], not {found}")
        with torch.cuda.stream(self.stream):
            if state is None:
                self.model.head[state_slot].zero_()  # what lies before the begin is never read
            else:
                self.model.state[state_slot].copy_(torch.from_numpy(state.view(np.int32)))

    def state_of(self, state_slot: int) -> NDArray[np.float32]:
        """A copy of a stream's state, float32 [state_size]. Waits."""
        with torch.cuda.stream(self.stream):
            return np.array(self.model.state[state_slot].cpu().numpy()).view(np.float32)

    def vocode(self, chunks: Sequence[Chunk]) -> list[NDArray[np.float32]]:
        """The waveform of each chunk (state slot, codes int32 [n, 16]) of a stream: float32 [1920 n] within
        [-1, 1], at 24 kHz. Waits.

        Raises ValueError, before anything is changed, for codes outside the codebooks, and for a state slot
        given twice.
        """
        return self.begin(chunks).samples()

    def begin(self, chunks: Sequence[Chunk]) -> VocodedGpu:
        """Does what `vocode` does, without waiting."""
        check_chunks(chunks, self.shape.codebook_size)
        done = [0] * len(chunks)
        rows: list[list[Tensor]] = [[] for _ in chunks]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if self.is_gpu else (None, None)
        with torch.cuda.stream(self.stream):
            if begin is not None:
                begin.record()
            for f in FRAMES[::-1]:
                most = max(b for b in self._batches if b * f <= self._n_frames) if f <= self._n_frames else 0
                while most:
                    part = [i for i, (_, codes) in enumerate(chunks) if len(codes) - done[i] >= f][:most]
                    if not part:
                        break
                    pieces = [(chunks[i][0], chunks[i][1][done[i] : done[i] + f]) for i in part]
                    for i, row in zip(part, self._run(pieces, f), strict=False):
                        rows[i].append(row)
                        done[i] += f
            if end is not None:
                end.record()
        return VocodedGpu(rows, None if begin is None or end is None else (begin, end))

    def skim(self, state_slot: int, codes: NDArray[np.int32]) -> None:
        """A stream goes on behind codes whose samples nobody wants: they are right again SEEN_FRAMES after
        them (models/vocoder/cpu.py).
        Raises as `vocode`. Does not wait.
        """
        check_chunks([(state_slot, codes)], self.shape.codebook_size)
        done = 0
        with torch.cuda.stream(self.stream):
            for f, recording in self._skims.items():  # the longest first
                while len(codes) - done >= f:
                    self._send([(state_slot, codes[done : done + f])], 1, f)
                    recording.run()
                    done += f

    def _run(self, pieces: list[Chunk], f: int) -> Tensor:
        """Starts one recorded chunk and the way of its samples to the host: float32 [pieces, samples],
        pinned.
        """
        b = next(b for b in self._batches if b >= len(pieces))
        self._send(pieces, b, f)
        self._chunks[b, f].run()
        out = self._pinned(len(pieces) * f)
        out.copy_(self._buffers.samples[: len(out)], non_blocking=True)
        return out.view(len(pieces), -1)

    def _pinned(self, n_frames: int) -> Tensor:
        """Memory of the host for the samples of so many frames."""
        return torch.empty(n_frames * self.frame_samples, dtype=torch.float32, pin_memory=self.is_gpu)

    def _send(self, pieces: list[Chunk], b: int, f: int) -> None:
        """Starts the way of state slots and codes to where the recording of b streams with f frames each
        reads them.
        """
        most = self._batches[-1]
        n = most + b * f * N_CODES
        buffer = self._inputs.take()
        words = buffer.numpy()
        words[:most] = -1
        words[most:n] = 0
        for i, (state_slot, codes) in enumerate(pieces):
            words[i] = state_slot
            words[most + i * f * N_CODES :][: f * N_CODES] = codes.ravel()
        self._words[:n].copy_(buffer[:n], non_blocking=True)
        self._inputs.used()
