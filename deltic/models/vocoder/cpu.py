"""The vocoder on the CPU: codes to waveform, several streams as one batch, each continuing from its own
state.

    codes -> codebooks -> pre_conv -> pre-transformer -> 2 x (transposed conv, ConvNeXt) -> conv
          -> 4 x (snake, transposed conv, 3 x (x + conv(snake(conv(snake(x)))))) -> snake, conv, clamp

Everything is causal. A stream's state slot holds everything that the next frame needs of those before it: the
last inputs of each convolution, the last keys and values of each layer, and the position. So a frame costs
the same in any chunk, and its samples are the same bits in any chunk and beside any other streams.

All of it is float32, as the checkpoint is. With `half`, the convolutions of the decoder, nine tenths of the
work, multiply inputs and weights that are rounded to bfloat16. Their sums, the residual stream, snake and
everything before them stay float32.

A pass, recorded once, is over at most `n_frames` frames. What is longer takes several. Its buffers then stay
near the cores' caches, and the weights, which a pass reads once, are shared by enough frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from deltic.models.fields import multiple, refuse_limits, within
from deltic.models.rotary import rotary_tables
from deltic.models.vocoder.shape import FRAME_SAMPLES, LAYER_NORM_EPS, MAX_REF_FRAMES, VocoderShape
from deltic.models.vocoder.weights import DILATIONS
from deltic.ops.arrays import Array, bfloat16
from deltic.ops.cpu.program import Program
from deltic.ops.cpu.vocoder import (
    MAX_DIM,
    MAX_WINDOW,
    Batch,
    ConvEnd,
    ConvWeights,
    Rows,
    conv,
    depthwise_norm,
    embed_codes,
    interleaved,
    vocoder_attention,
    vocoder_rms_norm,
)
from deltic.ops.geometry import N_CODES, Allocate, up_to

PASS_FRAMES = 16
"""Frames of a pass, of all its streams together."""
SEEN_FRAMES = 16
"""Bound on the earlier frames that a sample depends on, behind the pre-transformer: it depends on fewer, in
the published shape on less than ten.
"""
MAX_POSITIONS = 32768 + MAX_REF_FRAMES
"""Frames of a stream: as many as a published talker has positions, behind those of a reference."""
HEADER = 16
"""Values at the begin of a state. The first is the position."""


def check_vocoder(shape: VocoderShape) -> None:
    """Raises UnsupportedModelError for a geometry that the kernels cannot run."""
    refuse_limits(
        multiple("latent_dim", shape.latent_dim, 16, 1 << 16),
        multiple("codebook_dim", shape.codebook_dim, 32, 1 << 16),
        multiple("hidden_size", shape.hidden_size, 16, 1 << 16),
        multiple("intermediate_size", shape.intermediate_size, 16, 1 << 16),
        multiple("head_dim", shape.head_dim, 32, MAX_DIM),
        multiple("decoder_dim", shape.decoder_dim, 16 << len(shape.upsample_rates), 1 << 16),
        within("sliding_window", shape.sliding_window, 2, MAX_WINDOW),
    )


def _blocks(shape: VocoderShape) -> Iterator[tuple[int, int, int, int]]:
    """(number, rate of its input in rows a frame, upsampling, channels of its input) of each block of the
    decoder.
    """
    rate, width = 4, shape.decoder_dim
    for i, r in enumerate(shape.upsample_rates, 1):
        yield i, rate, r, width
        rate, width = rate * r, width // 2


def state_layout(shape: VocoderShape) -> tuple[dict[str, int], int]:
    """The offset of each part of a state, and the size of a state, both in values."""
    heads = shape.n_heads * shape.head_dim
    parts = {"header": HEADER, "pre_conv": 2 * shape.codebook_dim}
    parts |= {f"layers.{i}": (shape.sliding_window - 1) * 2 * heads for i in range(shape.n_layers)}
    parts |= {f"upsample.{i}": 6 * shape.latent_dim for i in range(len(shape.upsampling_ratios))}
    parts["decoder.0"] = 6 * shape.latent_dim
    for i, _, _, width in _blocks(shape):
        parts[f"decoder.{i}.1"] = width
        parts |= {f"decoder.{i}.{unit}": 6 * d * width // 2 for unit, d in enumerate(DILATIONS, 2)}
    parts["last"] = 6 * shape.decoder_dim >> len(shape.upsample_rates)
    begins, at = {}, 0
    for name, size in parts.items():
        begins[name], at = at, at + size
    return begins, up_to(at, 16)


@dataclass(frozen=True)
class VocoderBuffers:
    """Memory of a vocoder but its weights. S = F: a stream in a pass has a frame or more."""

    states: Array  # float32 [n_streams, state size]
    codes: Array  # int32 [F, 16]
    start: Array  # int32 [S + 1]
    state_slot: Array  # int32 [S]
    n: Array  # int32 scalar
    rows: tuple[Array, ...]  # three, float32, flat: what goes from one operator to the next
    audio: Array  # float32 [F * 1920]


def allocate_vocoder(
    shape: VocoderShape, n_streams: int, allocate: Allocate, n_frames: int = PASS_FRAMES
) -> VocoderBuffers:
    """Buffers for n_streams open streams and passes of n_frames frames."""
    f32, i32 = np.float32, np.int32
    latent, heads = shape.latent_dim, shape.n_heads * shape.head_dim
    widest = [(max(3 * heads, shape.codebook_dim, latent, shape.hidden_size, shape.intermediate_size), 1, 2)]
    widest += [(latent, 4, 6), (4 * latent, 4, 0)]
    widest += [(shape.decoder_dim, 4, 1)]
    widest += [(width // 2, rate * r, 6 * DILATIONS[-1]) for _, rate, r, width in _blocks(shape)]
    size = max(Rows.size(width, rate, head, n_frames, n_frames) for width, rate, head in widest)
    return VocoderBuffers(
        states=allocate("vocoder states", (n_streams, state_layout(shape)[1]), f32),
        codes=allocate("vocoder codes", (n_frames, N_CODES), i32),
        start=allocate("vocoder starts", (n_frames + 1,), i32),
        state_slot=allocate("vocoder state slots", (n_frames,), i32),
        n=allocate("vocoder streams", (), i32),
        rows=tuple(allocate(f"vocoder rows {name}", (size,), f32) for name in "abc"),
        audio=allocate("vocoder audio", (n_frames * FRAME_SAMPLES,), f32),
    )


def _transposed(w: Array, stride: int) -> Array:
    """A transposed convolution [in, out, m * stride] as one of m taps: [stride * out, in, m].

    Its last m - 1 strides are cut.
    """
    n_in, n_out, taps = w.shape
    parts = w.reshape(n_in, n_out, taps // stride, stride)[:, :, ::-1]  # the newest input comes last
    return parts.transpose(3, 1, 0, 2).reshape(stride * n_out, n_in, taps // stride)


class Vocoder:
    """The forward, recorded over buffers.

    Two programs: codes to the pre-transformer's output, and from there to samples.
    """

    def __init__(
        self, shape: VocoderShape, tensors: dict[str, Array], buffers: VocoderBuffers, half: bool = False
    ) -> None:
        """tensors: of load_vocoder; recording takes them out of it. half: of use where
        ops.cpu.vocoder.multiplies_half says so.
        Raises UnsupportedModelError.
        """
        check_vocoder(shape)
        self.shape, self.buffers = shape, buffers
        self.begins, _ = state_layout(shape)
        self._tensors = tensors
        self._dtype = bfloat16 if half else np.float32
        self._batch = Batch(buffers.start, buffers.state_slot, buffers.n, buffers.states)
        self._cos, self._sin = rotary_tables(shape.inv_freq(), MAX_POSITIONS)

    def record(self, front: Program, rest: Program) -> None:
        """A pass is front, then rest. Front alone moves the streams on without samples."""
        a, b, x = self.buffers.rows
        self._record_front(front, a, b, x)
        a, b = self._record_upsampling(rest, a, b, x)
        self._record_decoder(rest, a, b, x)

    def _record_front(self, program: Program, a: Array, b: Array, x: Array) -> None:
        """Codes to the pre-transformer's output, in `a`: one row a frame."""
        batch, shape = self._batch, self.shape
        latent, hidden, heads = shape.latent_dim, shape.hidden_size, shape.n_heads * shape.head_dim
        tables = self._take("tables")
        entries = Rows(a, shape.codebook_dim, 1)
        embed_codes(program, batch, self.buffers.codes, tables, entries)
        parts = [self._take(f"quantizer.rvq_{part}.output_proj.weight") for part in ("first", "rest")]
        latents = Rows(b, shape.codebook_dim, 1, head=2)
        conv(program, batch, entries, ConvWeights.pack(np.concatenate(parts, 1)), ConvEnd(latents))
        wide, stream, normed = Rows(a, latent, 1), Rows(x, hidden, 1), Rows(a, hidden, 1)
        pre_conv = self._conv_weights("pre_conv.conv")
        conv(program, batch, latents, pre_conv, ConvEnd(wide), offset=self.begins["pre_conv"])
        conv(program, batch, wide, self._conv_weights("pre_transformer.input_proj"), ConvEnd(stream))
        qkv, mixed, inner = Rows(b, 3 * heads, 1), Rows(a, heads, 1), Rows(b, shape.intermediate_size, 1)
        size, angles = (shape.n_heads, shape.sliding_window), (self._cos, self._sin)
        for i in range(shape.n_layers):
            p = f"pre_transformer.layers.{i}"
            norm = self._take(f"{p}.input_layernorm.weight")
            vocoder_rms_norm(program, batch, stream, norm, shape.rms_norm_eps, normed)
            conv(program, batch, normed, self._linear(*(f"{p}.self_attn.{n}_proj" for n in "qkv")), ConvEnd(qkv))
            begin = self.begins[f"layers.{i}"]
            vocoder_attention(program, batch, qkv, *size, angles, mixed, offset=begin)
            scale = self._take(f"{p}.self_attn_layer_scale.scale")
            o_proj = self._linear(f"{p}.self_attn.o_proj")
            conv(program, batch, mixed, o_proj, ConvEnd(stream, scale=scale, residual=stream))
            norm = self._take(f"{p}.post_attention_layernorm.weight")
            vocoder_rms_norm(program, batch, stream, norm, shape.rms_norm_eps, normed)
            gate, up = (self._take(f"{p}.mlp.{name}_proj.weight") for name in ("gate", "up"))
            gate_up = ConvWeights.pack(interleaved(gate, up)[..., None])
            conv(program, batch, normed, gate_up, ConvEnd(inner, activation="swiglu"))
            scale, down = self._take(f"{p}.mlp_layer_scale.scale"), self._linear(f"{p}.mlp.down_proj")
            conv(program, batch, inner, down, ConvEnd(stream, scale=scale, residual=stream))
        norm, result = self._take("pre_transformer.norm.weight"), Rows(b, hidden, 1)
        vocoder_rms_norm(program, batch, stream, norm, shape.rms_norm_eps, result)
        conv(program, batch, result, self._conv_weights("pre_transformer.output_proj"), ConvEnd(wide))

    def _record_upsampling(self, program: Program, a: Array, b: Array, x: Array) -> tuple[Array, Array]:
        """Records the way from `a` to the input of the decoder, four rows a frame, behind its head.

        Gives its buffer and a free one.
        """
        batch, latent = self._batch, self.shape.latent_dim
        rate = 1
        for i, ratio in enumerate(self.shape.upsampling_ratios):
            p = f"upsample.{i}"
            is_last = i + 1 == len(self.shape.upsampling_ratios)
            stretched = Rows(x, latent, rate * ratio, head=6)
            conv(program, batch, Rows(a, latent, rate), self._upsampling(f"{p}.0.conv", ratio), ConvEnd(stretched))
            rate *= ratio
            normed, inner = Rows(a, latent, rate), Rows(b, 4 * latent, rate)
            taps = np.ascontiguousarray(self._take(f"{p}.1.dwconv.conv.weight")[:, 0].T)
            norm = self._take(f"{p}.1.norm.weight"), self._take(f"{p}.1.norm.bias"), LAYER_NORM_EPS
            bias = self._take(f"{p}.1.dwconv.conv.bias")
            depthwise_norm(program, batch, stretched, taps, bias, norm, normed, offset=self.begins[p])
            conv(program, batch, normed, self._conv_weights(f"{p}.1.pwconv1"), ConvEnd(inner, activation="gelu"))
            gamma = self._take(f"{p}.1.gamma")
            out = Rows(a.view(self._dtype), latent, rate, head=6) if is_last else Rows(a, latent, rate)
            pwconv2 = self._conv_weights(f"{p}.1.pwconv2")
            conv(program, batch, inner, pwconv2, ConvEnd(out, scale=gamma, residual=stretched))
        return a, b

    def _record_decoder(self, program: Program, here: Array, there: Array, x: Array) -> None:
        """Records the way from the input of the decoder, in `here`, to samples.

        Inputs of convolutions are written by those before them, as snake leaves them; x has the residual
        stream.
        """
        batch, shape, dtype = self._batch, self.shape, self._dtype
        here, there = here.view(dtype), there.view(dtype)
        source, first = (Rows(here, shape.latent_dim, 4, head=6), self._conv_weights("decoder.0.conv", 1, dtype))
        target = Rows(there, shape.decoder_dim, 4, head=1)
        snake = self._snake("decoder.1.block.0")
        conv(program, batch, source, first, ConvEnd(snake=snake, snaked=target), offset=self.begins["decoder.0"])
        for i, rate, r, width in _blocks(shape):
            here, there = there, here
            p, rate_out, half = f"decoder.{i}.block", rate * r, width // 2
            stream = Rows(x, half, rate_out)
            heads = [6 * d for d in DILATIONS]
            is_last = i == len(shape.upsample_rates)
            source, target = Rows(here, width, rate, head=1), Rows(there, half, rate_out, head=heads[0])
            up, snake = self._upsampling(f"{p}.1.conv", r, dtype), self._snake(f"{p}.2.act1", r)
            end, begin = ConvEnd(stream, snake=snake, snaked=target), self.begins[f"decoder.{i}.1"]
            conv(program, batch, source, up, end, offset=begin)
            followers = [f"{p}.{unit}.act1" for unit in range(3, 2 + len(DILATIONS))]
            followers += [f"decoder.{i + 1}" if is_last else f"decoder.{i + 1}.block.0"]
            heads += [6 if is_last else 1]
            for unit, (dilation, follower) in enumerate(zip(DILATIONS, followers, strict=True), 2):
                source, inner = target, Rows(here, half, rate_out)
                conv1 = self._conv_weights(f"{p}.{unit}.conv1.conv", dilation, dtype)
                snake, begin = self._snake(f"{p}.{unit}.act2"), self.begins[f"decoder.{i}.{unit}"]
                conv(program, batch, source, conv1, ConvEnd(snake=snake, snaked=inner), offset=begin)
                target = Rows(there, half, rate_out, head=heads[unit - 1])
                is_end = unit == 1 + len(DILATIONS)
                snake, conv2 = self._snake(follower), self._conv_weights(f"{p}.{unit}.conv2.conv", 1, dtype)
                end = ConvEnd(None if is_end else stream, residual=stream, snake=snake, snaked=target)
                conv(program, batch, inner, conv2, end)
        last = self._conv_weights(f"decoder.{len(shape.upsample_rates) + 2}.conv", 1, dtype)
        audio = Rows(self.buffers.audio, 1, FRAME_SAMPLES)
        conv(program, batch, target, last, ConvEnd(audio, activation="clamp"), offset=self.begins["last"])

    def _take(self, name: str) -> Array:
        return self._tensors.pop(name)

    def _conv_weights(self, name: str, dilation: int = 1, dtype: DTypeLike = np.float32) -> ConvWeights:
        w = self._take(f"{name}.weight")
        w = w if w.ndim == 3 else w[..., None]
        return ConvWeights.pack(w, self._take(f"{name}.bias"), dilation, dtype)

    def _upsampling(self, name: str, stride: int, dtype: DTypeLike = np.float32) -> ConvWeights:
        w, bias = self._take(f"{name}.weight"), self._take(f"{name}.bias")
        return ConvWeights.pack(_transposed(w, stride), np.tile(bias, stride), dtype=dtype)

    def _linear(self, *names: str) -> ConvWeights:
        """Packs several linears, one below the other."""
        return ConvWeights.pack(np.concatenate([self._take(f"{name}.weight") for name in names])[..., None])

    def _snake(self, name: str, phases: int = 1) -> tuple[Array, Array]:
        return np.tile(self._take(f"{name}.alpha"), phases), np.tile(self._take(f"{name}.beta"), phases)
