"""The vocoder on a GPU: its memory, recorded chunks, and a stream of its own, beside the talker's steps.

A chunk of B streams with F new frames each is recorded for some B and F; what is asked for is cut into such pieces, which changes no
bit. Nothing is waited for until somebody asks for the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.engine.gpu_places import Ring
from deltic.models.codec_gpu import (
    CodecGpu,
    check_codec,
    codec_buffers,
    frame_samples,
    pack_codec,
    state_words,
)
from deltic.models.codec_weights import codec_weight_bytes
from deltic.models.speech_shapes import N_CODES, VocoderShape
from deltic.ops.gpu.launch import Levers, launches

FRAMES = (1, 2, 4, 8, 16, 32)
"""New frames of a recorded chunk."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Streams of a recorded chunk, as long as all have at most `n_frames` frames together."""
MAX_FRAMES = 256
N_INPUTS = 8
"""Pinned buffers for inputs, used in turn."""

Chunk = tuple[int, NDArray[np.int32]]


def vocoder_bytes(shape: VocoderShape, n_frames: int = MAX_FRAMES) -> int:
    """Device memory that a vocoder takes beside the streams' states: weights and activations."""
    total = codec_weight_bytes(shape)

    def count(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal total
        tensor = torch.empty(size, dtype=dtype, device="meta")
        total += tensor.nbytes
        return tensor

    codec_buffers(shape, n_frames, count)
    return total


@dataclass
class VocodedGpu:
    """Chunks that were begun."""

    rows: list[list[Tensor]]  # float32 [frame_samples n], pinned: of each chunk, in order
    event: torch.cuda.Event | None

    def is_done(self) -> bool:
        return self.event is None or self.event.query()

    def samples(self) -> list[NDArray[np.float32]]:
        """Waits for them."""
        if self.event is not None:
            self.event.synchronize()
        return [np.concatenate([row.numpy() for row in rows]) if rows else np.empty(0, np.float32) for rows in self.rows]  # fmt: skip


class GpuVocoder:
    """Weights, the streams' states and the recorded chunks. Not thread-safe: one engine loop owns it.

    Without a GPU it runs in Triton's interpreter, unrecorded: for tests.
    """

    def __init__(
        self, shape: VocoderShape, tensors: dict[str, Tensor], *, n_streams: int, levers: Levers, device: str | torch.device,
        n_frames: int = MAX_FRAMES, progress: Callable[[str, float], None] = lambda stage, done: None,
    ) -> None:  # fmt: skip
        """tensors: of load_codec. Raises UnsupportedModelError."""
        check_codec(shape)
        self.shape, self.n_streams, self.levers = shape, n_streams, levers
        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"
        self.frame_samples = frame_samples(shape)
        self.state_size = state_words(shape)
        state = torch.zeros((n_streams, self.state_size), dtype=torch.int32, device=device)
        self.codec = CodecGpu(shape, pack_codec(shape, tensors, self.device), state, levers)
        self.stream = torch.cuda.Stream(priority=-1) if self.is_gpu else None
        self._buffers = codec_buffers(
            shape, n_frames, lambda name, size, dtype: torch.zeros(size, dtype=dtype, device=device)
        )
        self._batches = [b for b in BATCHES if b <= n_frames and b < 2 * n_streams]
        self._n_frames = n_frames
        n_words = n_frames * N_CODES + self._batches[-1]
        self._words = torch.zeros(n_words, dtype=torch.int32, device=device)
        self._words[: self._batches[-1]] = -1
        self._inputs = Ring(n_words, N_INPUTS, self.device)
        self._chunks: dict[tuple[int, int], Callable[[], object]] = {}
        self.n_launches = 0
        if self.is_gpu:
            torch.cuda.synchronize()  # what was allocated so far was on another stream
        with torch.cuda.stream(self.stream):
            self._record_all(progress)

    def _record_all(self, progress: Callable[[str, float], None]) -> None:
        """The largest first, so that the smaller ones find their memory in the pool."""
        sizes = [(b, f) for b in self._batches[::-1] for f in FRAMES[::-1] if b * f <= self._n_frames]
        pool = torch.cuda.graph_pool_handle() if self.is_gpu else None
        for i, (b, f) in enumerate(sizes):
            self._chunks[b, f] = self._record(self._body(b, f), pool)
            progress("record vocoder", (i + 1) / len(sizes))
        if self.is_gpu:
            torch.cuda.synchronize()

    def _body(self, n_streams: int, n_frames: int) -> Callable[[], object]:
        n = n_streams * n_frames * N_CODES
        slot = self._words[:n_streams]
        codes = self._words[self._batches[-1] :][:n].view(n_streams, n_frames, N_CODES)
        return lambda: self.codec.forward(codes, slot, self._buffers)

    def _record(self, body: Callable[[], object], pool: Any) -> Callable[[], object]:
        if not self.is_gpu:
            return body
        launches.n = 0
        body()  # compiles what is new; no stream is in use, so no state is touched
        self.n_launches = launches.n
        if not self.levers.graphs:
            return body
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self.stream):
            body()
        return graph.replay

    def recordings(self) -> list[Callable[[], object]]:
        return [*self._chunks.values()]

    def open(self, slot: int, state: Tensor | None = None) -> None:
        """Starts a stream in a slot: at its begin, or behind the one that the state is of (float32 [state_size], of `state_of`).
        Raises ValueError for a state of another model or device."""
        if state is not None and (state.dtype != torch.float32 or state.shape != (self.state_size,)):
            found = f"{state.dtype} {list(state.shape)}"
            raise ValueError(
                f"a vocoder state of this model and device is float32 [{self.state_size}], not {found}"
            )
        with torch.cuda.stream(self.stream):
            if state is None:
                self.codec.head[slot].zero_()  # what lies before the begin is never read
            else:
                self.codec.state[slot].copy_(state.view(torch.int32), non_blocking=True)

    def state_of(self, slot: int) -> Tensor:
        """A copy of a stream's state, on the host. Waits."""
        with torch.cuda.stream(self.stream):
            return self.codec.state[slot].cpu().view(torch.float32)

    def vocode(self, chunks: Sequence[Chunk]) -> list[NDArray[np.float32]]:
        """The waveform of each chunk (slot, codes int32 [n, 16]) of a stream: float32 [1920 n] within [-1, 1], at 24 kHz. Waits.

        Raises ValueError, before anything is changed, for codes outside the codebooks, and for a slot given twice.
        """
        return self.begin(chunks).samples()

    def begin(self, chunks: Sequence[Chunk]) -> VocodedGpu:
        """As `vocode`, without waiting."""
        for _, codes in chunks:
            if codes.ndim != 2 or codes.shape[1] != N_CODES:
                raise ValueError(f"codes are [n, {N_CODES}], not {list(codes.shape)}")
            if codes.size and not 0 <= codes.min() <= codes.max() < self.shape.codebook_size:
                raise ValueError(f"a code is outside 0 to {self.shape.codebook_size - 1}")
        if len({slot for slot, _ in chunks}) < len(chunks):
            raise ValueError("two chunks of one stream; join them")
        done = [0] * len(chunks)
        rows: list[list[Tensor]] = [[] for _ in chunks]
        with torch.cuda.stream(self.stream):
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
            event = None
            if self.is_gpu:
                event = torch.cuda.Event()
                event.record()
        return VocodedGpu(rows, event)

    def _run(self, pieces: list[Chunk], f: int) -> Tensor:
        """Starts one recorded chunk and the way of its samples to the host: float32 [pieces, samples], pinned."""
        b = next(b for b in self._batches if b >= len(pieces))
        most = self._batches[-1]
        n = most + b * f * N_CODES
        buffer = self._inputs.take()
        words = buffer.numpy()
        words[:most] = -1
        words[most:n] = 0
        for i, (slot, codes) in enumerate(pieces):
            words[i] = slot
            words[most + i * f * N_CODES :][: f * N_CODES] = codes.ravel()
        self._words[:n].copy_(buffer[:n], non_blocking=True)
        self._inputs.used()
        self._chunks[b, f]()
        size = (len(pieces), f * self.frame_samples)
        out = torch.empty(size, dtype=torch.float32, pin_memory=self.is_gpu)
        out.copy_(self._buffers.samples[: size[0] * size[1]].view(size), non_blocking=True)
        return out
