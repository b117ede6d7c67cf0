"""The vocoder's operators: embedding of codes, causal convolutions, windowed attention, norms.

Several streams of different lengths are one batch (`Batch`). What a stream's rows follow lives in its state
slot, is read from there and left there, so that any cut of a stream and any batch gives the same bits
(csrc/codec.cpp). A transposed convolution with kernel 2r and stride r is `conv` with two taps, r times the
outputs and `phases` r. A linear is `conv` with one tap. All is float32, but that `conv` may multiply
bfloat16, with float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from deltic.ops.arrays import Array, bfloat16, raw
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import N_CODES

PANEL = 32
MAX_WINDOW = MAX_DIM = 256

ACTIVATIONS = {None: 0, "gelu": 1, "swiglu": 2, "clamp": 3}
"""swiglu: silu(first half of the outputs) * second half, packed by `interleaved`; clamp: to [-1, 1]."""


@dataclass(frozen=True)
class Batch:
    """Streams of a pass: s has frames [start[s], start[s + 1]) and its state in state_slot[s]. start: int32
    [S + 1]; state_slot: int32 [S]; n: int32 scalar, streams in use; states: float32 [n_slots, size], the
    first value of each the stream's position in frames.
    """

    start: Array
    state_slot: Array
    n: Array
    states: Array

    @property
    def arguments(self) -> tuple[Array | int, ...]:
        return self.start, self.state_slot, self.n, self.states, self.states.shape[1]


@dataclass(frozen=True)
class Rows:
    """Rows of several streams, one stream after another, each behind `head` rows of what came before it.

    data: flat, float32 or, what `conv` reads and writes, bfloat16; a row begins every `stride` values, and
    has `width` of them; there are `rate` rows a frame.
    """

    data: Array
    width: int
    rate: int
    head: int = 0

    @property
    def stride(self) -> int:
        """Rows a power of two apart would fall into the same few lines of the first-level cache."""
        return self.width if self.width % 512 else self.width + 16

    @staticmethod
    def size(width: int, rate: int, head: int, n_frames: int, n_streams: int) -> int:
        """Values that the rows of n_frames frames of n_streams streams take."""
        stride = Rows(np.empty(0), width, rate, head).stride
        return (n_frames * rate + n_streams * head) * stride

    @property
    def arguments(self) -> tuple[Array | int, ...]:
        return self.data, self.stride, self.head, int(self.is_half)

    @property
    def is_half(self) -> bool:
        return bool(self.data.dtype == bfloat16)


def multiplies_half(instruction_set: str) -> bool:
    """Returns whether products of bfloat16 are twice as fast there as those of float32. Elsewhere they are
    slower, and the same.
    """
    return instruction_set in ("amx", "avx512_bf16")


_NO_ROWS = (None, 0, 0, 0)


@dataclass(frozen=True)
class ConvWeights:
    """A convolution as its kernel reads it. data: float32 [panel, tap, channel, 32] or bfloat16
    [panel, tap, channel / 2, 32, 2]; bias: [n], at least 16, or None.
    """

    data: Array
    bias: Array | None
    n: int
    taps: int
    channels: int
    dilation: int = 1

    @property
    def head(self) -> int:
        """Rows of the past that a row needs."""
        return (self.taps - 1) * self.dilation

    @classmethod
    def pack(cls, w: Array, bias: Array | None = None, dilation: int = 1, dtype: DTypeLike = np.float32) -> ConvWeights:
        """w: float32 [n, channels, taps], the last tap multiplies the current row; dtype: what x is."""
        n, channels, taps = w.shape
        check("conv", n == 1 or n % 16 == 0, f"1 output or a multiple of 16, found {n}")
        n_panels = -(-n // PANEL)
        if n % PANEL:
            w = np.concatenate([w, np.zeros((n_panels * PANEL - n, channels, taps), np.float32)])
        if dtype == bfloat16:
            pairs = raw(w.astype(bfloat16)).reshape(n_panels, PANEL, channels // 2, 2, taps)
            data = np.ascontiguousarray(pairs.transpose(0, 4, 2, 1, 3)).view(bfloat16)
        else:
            data = np.ascontiguousarray(w.reshape(n_panels, PANEL, channels, taps).transpose(0, 3, 2, 1))
        if bias is not None and n < 16:
            bias = np.concatenate([bias, np.zeros(16 - n, np.float32)])
        return cls(data, bias, n, taps, channels, dilation)


@dataclass(frozen=True)
class ConvEnd:
    """End of a convolution, which has its sums: y = activation(sum) * scale + residual; out =
    y; snaked = y + sin(alpha y)^2 * inverse_beta. The heads of outputs are not written.
    """

    out: Rows | None = None
    activation: str | None = None
    scale: Array | None = None  # float32 [n]
    residual: Rows | None = None  # may be `out`
    snake: tuple[Array, Array] | None = None  # alpha and inverse_beta, float32 [n]
    snaked: Rows | None = None


def conv(program: Program, batch: Batch, x: Rows, w: ConvWeights, end: ConvEnd, *, offset: int = 0) -> None:
    """Ends bias + conv(x) as `end` says.

    offset: of x's past [head, channels] in the state. An output row has n / phases channels, where phases is
    its rate over that of x.
    """
    out, residual, snake, snaked, scale = end.out, end.residual, end.snake, end.snaked, end.scale
    phases = (out or snaked or x).rate // x.rate
    width = (w.n // 2 if end.activation == "swiglu" else w.n) // phases
    check("conv", x.width == w.channels and x.head == w.head, f"x of {w.channels} channels behind {w.head} rows")
    check("conv", w.channels % 16 == 0, "channels a multiple of 16")
    check("conv", x.data.dtype == w.data.dtype, f"x of {w.data.dtype}, as the weights are")
    check("conv", residual is None or not residual.is_half, "a float32 residual")
    check("conv", width % 16 == 0 or w.n == 1, "output channels a multiple of 16")
    for rows in (residual, out, snaked):
        check("conv", rows is None or (rows.width == width and rows.rate == phases * x.rate), f"{width} channels out")
    check("conv", (snake is None) == (snaked is None) and (w.n > 1 or out is not None), "snake with snaked")
    alpha, inverse_beta = snake or (None, None)
    for vector in (scale, alpha, inverse_beta):
        check("conv", vector is None or (vector.shape == (w.n,) and vector.flags.c_contiguous), f"vectors of {w.n}")
    program.call(
        "deltic_codec_conv",
        *(*batch.arguments, *x.arguments, x.rate),
        *(w.channels, w.taps, w.dilation, offset, w.data, w.n, w.bias),
        *(ACTIVATIONS[end.activation], scale),
        *(residual.arguments if residual else _NO_ROWS),
        *(out.arguments if out else _NO_ROWS),
        phases,
        alpha,
        inverse_beta,
        *(snaked.arguments if snaked else _NO_ROWS),
    )


def interleaved(gate: Array, up: Array) -> Array:
    """[2F, K]: 16 rows of gate, 16 of up, and so on: what `conv` wants for swiglu. gate, up: [F, K], F a
    multiple of 16.
    """
    width = gate.shape[1]
    return np.stack([gate.reshape(-1, 16, width), up.reshape(-1, 16, width)], 1).reshape(-1, width)


def embed_codes(program: Program, batch: Batch, codes: Array, tables: Array, out: Rows) -> None:
    """out[t] = tables[0, codes[t, 0]] | sum over i > 0 of tables[i, codes[t, i]].

    codes: int32 [T, 16], within the tables; tables: float32 [16, size, D]; out: rows of 2D without a head.
    """
    size, dim = tables.shape[1:]
    check("embed_codes", codes.dtype == np.int32 and codes.shape[1] == len(tables) == N_CODES, "16 codes")
    check("embed_codes", out.width == 2 * dim and out.head == 0 and dim % 16 == 0, "rows of 2 D")
    program.call("deltic_codec_embed", *batch.arguments, codes, tables, size, dim, *out.arguments)


def vocoder_rms_norm(program: Program, batch: Batch, x: Rows, w: Array, eps: float, out: Rows) -> None:
    """out = x * rsqrt(mean(x^2) + eps) * w; one row a frame. w: float32 [width]."""
    check("vocoder_rms_norm", x.width == out.width == len(w) and x.width % 16 == 0, "one width, a multiple of 16")
    check("vocoder_rms_norm", (x.rate, x.head, out.rate, out.head) == (1, 0, 1, 0), "a row a frame, without heads")
    program.call("deltic_codec_rms_norm", *batch.arguments, *x.arguments, w, *out.arguments, x.width, eps)


def depthwise_norm(
    program: Program,
    batch: Batch,
    x: Rows,
    w: Array,
    bias: Array,
    norm: tuple[Array, Array, float],
    out: Rows,
    *,
    offset: int,
) -> None:
    """out = LayerNorm(bias + sum over taps of w[tap] * x). w: float32 [taps, width], the last tap is the
    current row; bias: float32 [width]; norm: weight and bias, float32 [width], and eps; out: no head; offset:
    of x's past in the state.
    """
    taps, width = w.shape
    check("depthwise_norm", x.width == out.width == width and width % 16 == 0, "one width, a multiple of 16")
    check("depthwise_norm", x.head == taps - 1 and out.head == 0 and x.rate == out.rate, "x behind taps - 1 rows")
    program.call(
        "deltic_codec_depthwise_norm",
        *(*batch.arguments, *x.arguments, x.rate),
        *(width, taps, offset, w, bias, *norm),
        *out.arguments,
    )


def vocoder_attention(
    program: Program,
    batch: Batch,
    qkv: Rows,
    n_heads: int,
    window: int,
    angles: tuple[Array, Array],
    out: Rows,
    *,
    offset: int,
) -> None:
    """Softmax attention of each frame over itself and the window - 1 before it, rotated by position.

    qkv: rows q | k | v of n_heads heads each, of which q and k are rotated in place, pairs (i, i + dim / 2);
    angles: cos and sin, float32 [positions, dim / 2]; offset: of [n_heads, window - 1, 2, dim] past keys and
    values in the state.
    """
    dim, (cos, sin) = out.width // n_heads, angles
    check("vocoder_attention", qkv.width == 3 * out.width and out.width == n_heads * dim, "q | k | v")
    check("vocoder_attention", dim % 32 == 0 and dim <= MAX_DIM, f"heads of a multiple of 32, at most {MAX_DIM}")
    check("vocoder_attention", 2 <= window <= MAX_WINDOW, f"a window of 2 to {MAX_WINDOW} frames")
    check("vocoder_attention", cos.shape == sin.shape and cos.shape[1] == dim // 2, "angles of dim / 2")
    check("vocoder_attention", (qkv.rate, qkv.head, out.rate, out.head) == (1, 0, 1, 0), "a row a frame, without heads")
    heads = n_heads, dim, window, cos, sin, offset
    program.call("deltic_codec_attention", *batch.arguments, *qkv.arguments, *heads, *out.arguments)
