"""The vocoder on a GPU: codes to samples, several streams with equal numbers of new frames at once, each
behind its own state.

The same mathematics as models/vocoder/cpu.py. What is linear behind something linear is multiplied at load:
the input projection behind `pre_conv`, the first upsampling behind the output projection, norms' weights,
layer scales and gamma. Nothing here waits or allocates, so that a chunk can be recorded as a graph: about a
hundred kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltic.models.fields import at_most, multiple, one_of, refuse_limits, within
from deltic.models.vocoder.shape import LAYER_NORM_EPS, VocoderShape
from deltic.models.vocoder.weights import DILATIONS
from deltic.ops.arrays import Array, front
from deltic.ops.geometry import N_CODES, Allocate, up_to
from deltic.ops.gpu.conv import (
    MAX_PARTS,
    PART_SIZE,
    ConvOut,
    ConvScratch,
    ConvWeight,
    Ring,
    Snake,
    Streams,
    conv,
    pack_conv,
)
from deltic.ops.gpu.vocode import MAX_WIDTH, advance, codes_embed, depthwise_norm, rms_pair, wave, window_attention
from deltic.ops.gpu.weight import to_device

_ALIGNED = 32
"""Words to which each part of a stream's state is aligned."""


@dataclass(frozen=True)
class Kept:
    """Size of what is kept of one operator's input: rows and their rate, channels, and whether they are pairs
    or float32.
    """

    rows: int
    rate: int
    channels: int
    is_pair: bool

    @property
    def words(self) -> int:
        return 2 * self.rows * self.channels


def kept_inputs(shape: VocoderShape) -> list[Kept]:
    """Inputs that are kept of a stream, in the order of the forward."""
    attention, latent = shape.n_heads * shape.head_dim, shape.latent_dim
    kept = [Kept(2, 1, shape.codebook_dim, True)]
    kept += [Kept(shape.sliding_window - 1, 1, 2 * attention, False)] * shape.n_layers
    rate = 1
    for ratio in shape.upsampling_ratios:
        rate *= ratio
        kept.append(Kept(6, rate, latent, False))
    kept.append(Kept(6, rate, latent, True))
    channels = shape.decoder_dim
    for factor in shape.upsample_rates:
        kept.append(Kept(1, rate, channels, True))
        rate, channels = rate * factor, channels // 2
        kept += [Kept(6 * dilation, rate, channels, True) for dilation in DILATIONS]
    return [*kept, Kept(6, rate, channels, True)]


def frame_samples(shape: VocoderShape) -> int:
    """Samples of a frame: 1920 in what is published."""
    return math.prod(shape.upsampling_ratios) * math.prod(shape.upsample_rates)


def state_words(shape: VocoderShape) -> int:
    """32-bit words of a stream's state: its head, and twice the rows it reaches back to."""
    kept = kept_inputs(shape)
    n_words: int = up_to(1 + len(kept), _ALIGNED) + sum(up_to(k.words, _ALIGNED) for k in kept)
    return n_words


def check_vocoder_gpu(shape: VocoderShape) -> None:
    """Raises UnsupportedModelError for a geometry that the kernels cannot run."""
    refuse_limits(
        at_most("latent_dim", shape.latent_dim, MAX_WIDTH),
        at_most("hidden_size", shape.hidden_size, MAX_WIDTH),
        multiple("intermediate_size", shape.intermediate_size, 8),
        one_of("head_dim", shape.head_dim, 16, 32, 64, 128),
        within("sliding_window", shape.sliding_window, 2, 256),
        multiple("decoder_dim", shape.decoder_dim, 1 << len(shape.upsample_rates)),
    )


def _rings(shape: VocoderShape, state: Tensor) -> list[Ring]:
    """Views of the states of all streams, int32 [state_slots, words]."""
    state_slots, words = state.shape
    at, rings = up_to(1 + len(kept_inputs(shape)), _ALIGNED), []
    for i, k in enumerate(kept_inputs(shape)):
        if k.is_pair:
            size, strides = (state_slots, 2, 2 * k.rows, k.channels), (2 * words, k.words, k.channels, 1)
            data = state.view(torch.bfloat16).as_strided(size, strides, 2 * at)
        else:
            raw = state.view(torch.float32)
            data = raw.as_strided((state_slots, 2 * k.rows, k.channels), (words, k.channels, 1), at)
        rings.append(Ring(data, k.rows, 1 + i, k.rate))
        at += up_to(k.words, _ALIGNED)
    return rings


@dataclass(frozen=True)
class _Layer:
    qkv: ConvWeight
    o: ConvWeight
    gate_up: ConvWeight
    down: ConvWeight


@dataclass(frozen=True)
class _Upsample:
    up: ConvWeight
    depthwise: Tensor
    depthwise_bias: Tensor
    wide: ConvWeight
    narrow: ConvWeight


@dataclass(frozen=True)
class _Unit:
    act1: Snake
    conv1: ConvWeight
    act2: Snake
    conv2: ConvWeight


@dataclass(frozen=True)
class _Block:
    act: Snake
    up: ConvWeight
    units: list[_Unit]


@dataclass(frozen=True)
class VocoderWeights:
    """Packed for the kernels."""

    table: Tensor  # float32 [16, V, codebook_dim]
    pre: ConvWeight
    layers: list[_Layer]
    upsamples: list[_Upsample]
    first: ConvWeight
    blocks: list[_Block]
    last_act: Snake
    last: Tensor  # float32 [7, C]
    last_bias: Tensor  # float32 [1]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, where both are weights: in float64, rounded once."""
    return (a.double() @ b.double()).float()


class _Packer:
    """The tensors of models/vocoder/weights.py to packed ones."""

    def __init__(self, shape: VocoderShape, tensors: Mapping[str, Array], device: torch.device | str) -> None:
        self.shape, self.device, self._tensors = shape, device, tensors

    def get(self, name: str) -> Tensor:
        return to_device(self._tensors[name], self.device)

    def snake(self, name: str) -> Snake:
        return Snake(self.get(name + ".alpha").contiguous(), self.get(name + ".beta").contiguous())

    def linear(self, w: Tensor, bias: Tensor | None = None, **how: Any) -> ConvWeight:
        return pack_conv(w[:, :, None], bias, **{"rate": 1, **how})

    def kernel(self, name: str, rate: int, dilation: int = 1) -> ConvWeight:
        return pack_conv(self.get(name + ".weight"), self.get(name + ".bias"), rate=rate, dilation=dilation)

    def table(self) -> Tensor:
        """Codebooks behind their output projections."""
        books = self.get("tables")
        first, rest = (self.get(f"quantizer.rvq_{part}.output_proj.weight")[:, :, 0].t() for part in ("first", "rest"))
        return torch.stack([_product(book, rest if i else first) for i, book in enumerate(books)])

    def pre(self) -> ConvWeight:
        """`input_proj` of `pre_conv`."""
        w, bias = self.get("pre_conv.conv.weight"), self.get("pre_conv.conv.bias")
        into = self.get("pre_transformer.input_proj.weight")
        folded = _product(into, w.reshape(w.shape[0], -1)).view(-1, *w.shape[1:])
        bias = _product(into, bias[:, None])[:, 0] + self.get("pre_transformer.input_proj.bias")
        return pack_conv(folded, bias, rate=1)

    def layer(self, i: int) -> _Layer:
        p = f"pre_transformer.layers.{i}."
        before, behind = (self.get(p + "input_layernorm.weight"), self.get(p + "post_attention_layernorm.weight"))
        qkv = torch.cat([self.get(f"{p}self_attn.{x}_proj.weight") for x in "qkv"])
        gate_up = torch.cat([self.get(f"{p}mlp.{x}_proj.weight") for x in ("gate", "up")])
        o = self.get(p + "self_attn.o_proj.weight")
        return _Layer(
            qkv=self.linear(qkv * before),
            o=self.linear(o * self.get(p + "self_attn_layer_scale.scale")[:, None]),
            gate_up=self.linear(gate_up * behind, swiglu=True),
            down=self.linear(self.get(p + "mlp.down_proj.weight") * self.get(p + "mlp_layer_scale.scale")[:, None]),
        )

    def upsample(self, i: int, rate: int) -> _Upsample:
        """rate: of its output. The first one has the transformer's last norm and `output_proj` in it."""
        p, ratio = f"upsample.{i}.", self.shape.upsampling_ratios[i]
        w = self.get(p + "0.conv.weight").permute(2, 1, 0)  # [phase, out, in]
        w, bias = w.reshape(-1, w.shape[2]), self.get(p + "0.conv.bias")
        if i == 0:
            out = self.get("pre_transformer.output_proj.weight") * self.get("pre_transformer.norm.weight")
            # the bias of a phase is not that of another any more: one for each
            bias = bias.repeat(ratio) + _product(w, self.get("pre_transformer.output_proj.bias")[:, None])[:, 0]
            w = _product(w, out)
        else:
            bias = bias.repeat(ratio)
        q = p + "1."
        wide, gamma = self.get(q + "pwconv1.weight"), self.get(q + "gamma")
        wide_bias = self.get(q + "pwconv1.bias") + _product(wide, self.get(q + "norm.bias")[:, None])[:, 0]
        narrow, narrow_bias = self.get(q + "pwconv2.weight"), self.get(q + "pwconv2.bias")
        return _Upsample(
            up=self.linear(w, bias, rate=rate // ratio, phases=ratio),
            depthwise=self.get(q + "dwconv.conv.weight")[:, 0].t().contiguous(),
            depthwise_bias=self.get(q + "dwconv.conv.bias").contiguous(),
            wide=self.linear(wide * self.get(q + "norm.weight"), wide_bias, rate=rate),
            narrow=self.linear(narrow * gamma[:, None], narrow_bias * gamma, rate=rate),
        )

    def block(self, i: int, rate: int) -> _Block:
        """rate: of its input."""
        p, factor = f"decoder.{i + 1}.block.", self.shape.upsample_rates[i]
        w = self.get(p + "1.conv.weight")  # [in, out, 2 factor]: the row itself, then the row before
        c, out, _ = w.shape
        w = w.view(c, out, 2, factor).flip(2).permute(3, 1, 0, 2).reshape(factor * out, c, 2)
        return _Block(
            act=self.snake(p + "0"),
            up=pack_conv(w, self.get(p + "1.conv.bias").repeat(factor), rate=rate, phases=factor),
            units=[
                _Unit(
                    self.snake(f"{p}{j}.act1"),
                    self.kernel(f"{p}{j}.conv1.conv", rate * factor, dilation),
                    self.snake(f"{p}{j}.act2"),
                    self.kernel(f"{p}{j}.conv2.conv", rate * factor),
                )
                for j, dilation in zip((2, 3, 4), DILATIONS, strict=True)
            ],
        )


def pack_vocoder(shape: VocoderShape, tensors: Mapping[str, Array], device: torch.device | str) -> VocoderWeights:
    """tensors: of load_vocoder, float32."""
    p = _Packer(shape, tensors, device)
    rate, upsamples, blocks = 1, [], []
    for i, ratio in enumerate(shape.upsampling_ratios):
        rate *= ratio
        upsamples.append(p.upsample(i, rate))
    first = p.kernel("decoder.0.conv", rate)
    for i, factor in enumerate(shape.upsample_rates):
        blocks.append(p.block(i, rate))
        rate *= factor
    n = len(shape.upsample_rates)
    return VocoderWeights(
        table=p.table(),
        pre=p.pre(),
        layers=[p.layer(i) for i in range(shape.n_layers)],
        upsamples=upsamples,
        first=first,
        blocks=blocks,
        last_act=p.snake(f"decoder.{n + 1}"),
        last=p.get(f"decoder.{n + 2}.conv.weight")[0].t().contiguous(),
        last_bias=p.get(f"decoder.{n + 2}.conv.bias"),
    )


@dataclass(frozen=True)
class ChunkBuffers:
    """Activations of a chunk, flat. One for fewer frames uses the front of each."""

    raw: Tensor  # float32
    qkv: Tensor  # float32
    pairs: tuple[Tensor, Tensor]  # bfloat16, both planes
    scratch: ConvScratch
    samples: Tensor  # float32


def chunk_buffers(shape: VocoderShape, max_frames: int, allocate: Allocate) -> ChunkBuffers:
    """Allocates buffers for chunks of up to max_frames frames, all streams together."""
    attention, rate, widest = shape.n_heads * shape.head_dim, 1, 0
    raw = shape.hidden_size
    pair = max(shape.codebook_dim, shape.hidden_size, attention, shape.intermediate_size)
    for ratio in shape.upsampling_ratios:
        rate *= ratio
        raw, pair = max(raw, rate * shape.latent_dim), max(pair, rate * 4 * shape.latent_dim)
    channels = shape.decoder_dim
    pair = max(pair, rate * channels)
    for factor in shape.upsample_rates:
        rate, channels = rate * factor, channels // 2
        widest = max(widest, rate * channels)
    raw, pair = max(raw, widest), max(pair, widest)
    f32 = torch.float32
    pairs = [allocate(f"vocoder pairs {i}", (2 * pair * max_frames,), torch.bfloat16) for i in range(2)]
    return ChunkBuffers(
        raw=allocate("vocoder", (raw * max_frames,), f32),
        qkv=allocate("vocoder q k v", (3 * attention * max_frames,), f32),
        pairs=(pairs[0], pairs[1]),
        scratch=ConvScratch(
            allocate("vocoder parts", (MAX_PARTS, PART_SIZE), f32),
            allocate("vocoder arrivals", (MAX_PARTS,), torch.int32),
        ),
        samples=allocate("samples", (frame_samples(shape) * max_frames,), f32),
    )


class VocoderGpu:
    """The weights, the streams' states, and the forward over given buffers."""

    def __init__(self, shape: VocoderShape, weights: VocoderWeights, state: Tensor) -> None:
        """state: int32 [state_slots, state_words(shape)]. A stream begins with its head, the first words, at
        0."""
        self.shape, self.weights, self.state = shape, weights, state
        self.rings = _rings(shape, state)
        self.head = state[:, : 1 + len(self.rings)]
        device = state.device
        self._rows = torch.tensor([r.rows for r in self.rings], dtype=torch.int32).to(device)
        self._rates = torch.tensor([r.rate for r in self.rings], dtype=torch.int32).to(device)
        half = shape.head_dim // 2
        inv_freq = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(shape.sliding_window, dtype=torch.float64)[:, None] * inv_freq
        self._cos, self._sin = angles.cos().float().to(device), angles.sin().float().to(device)

    def forward(self, codes: Tensor, state_slot: Tensor, b: ChunkBuffers) -> Tensor:
        """codes: int32 [B, F, 16]; state_slot: int32 [B], -1 for none.

        Moves the streams on. Returns the samples, float32 [B, frame_samples F].
        """
        streams, w = Streams(state_slot, self.head, codes.shape[1]), self.weights
        rings = iter(self.rings)
        residual = self._transform(codes, streams, rings, b)
        x = front(b.pairs[0], 2, *residual.shape)
        rms_pair(residual, self.shape.rms_norm_eps, x)
        kept = [next(rings) for _ in w.upsamples]
        ring = next(rings)
        for i, up in enumerate(w.upsamples):
            x = self._upsample(up, x, streams, kept[i], ring if i + 1 == len(kept) else None, b)

        history, ring = ring, next(rings)
        pair = front(b.pairs[1], 2, x.shape[1], w.first.m)
        act = w.blocks[0].act
        conv(x, w.first, streams, b.scratch, ConvOut(pair=pair, act=act, ring=ring), history=history)
        for i, block in enumerate(w.blocks):
            act = w.blocks[i + 1].act if i + 1 < len(w.blocks) else w.last_act
            here = b.pairs if i % 2 else (b.pairs[1], b.pairs[0])
            pair, ring = self._block(block, act, pair, streams, ring, rings, here, b)
        samples = front(b.samples, pair.shape[1])
        wave(pair, w.last, w.last_bias, samples, streams, ring)
        advance(streams, self._rows, self._rates)
        return samples.view(streams.n, -1)

    def skim(self, codes: Tensor, state_slot: Tensor, b: ChunkBuffers) -> None:
        """Runs `forward` on frames whose samples nobody wants, for half of its kernels and a tenth of the
        work. Samples are right again, to the bit, as many frames behind them as anything behind the
        transformer reaches back (models/vocoder/cpu.py, SEEN_FRAMES).
        """
        streams = Streams(state_slot, self.head, codes.shape[1])
        self._transform(codes, streams, iter(self.rings), b)
        advance(streams, self._rows, self._rates)

    def _transform(self, codes: Tensor, streams: Streams, rings: Iterator[Ring], b: ChunkBuffers) -> Tensor:
        """Codes to the pre-transformer's residual stream, float32 [B F, H]."""
        w = self.weights
        n = streams.n * streams.n_frames
        x = front(b.pairs[0], 2, n, self.shape.codebook_dim)
        ring = next(rings)
        codes_embed(codes.view(n, N_CODES), w.table, x, streams, ring)
        residual = front(b.raw, n, self.shape.hidden_size)
        conv(x, w.pre, streams, b.scratch, ConvOut(raw=residual), history=ring)
        for layer in w.layers:
            self._layer(layer, residual, streams, next(rings), b)
        return residual

    def _layer(self, layer: _Layer, residual: Tensor, streams: Streams, ring: Ring, b: ChunkBuffers) -> None:
        shape, n = self.shape, residual.shape[0]
        attention = shape.n_heads * shape.head_dim
        normed = front(b.pairs[0], 2, n, shape.hidden_size)
        qkv = front(b.qkv, n, 3 * attention)
        rms_pair(residual, shape.rms_norm_eps, normed)
        conv(normed, layer.qkv, streams, b.scratch, ConvOut(raw=qkv, ring=ring, ring_from=attention))
        mixed = front(b.pairs[1], 2, n, attention)
        window_attention(qkv, self._cos, self._sin, mixed, streams, ring, shape.n_heads)
        conv(mixed, layer.o, streams, b.scratch, ConvOut(residual=residual, raw=residual))
        rms_pair(residual, shape.rms_norm_eps, normed)
        inner = front(b.pairs[1], 2, n, shape.intermediate_size)
        conv(normed, layer.gate_up, streams, b.scratch, ConvOut(pair=inner))
        conv(inner, layer.down, streams, b.scratch, ConvOut(residual=residual, raw=residual))

    def _upsample(
        self, up: _Upsample, x: Tensor, streams: Streams, kept: Ring, ring: Ring | None, b: ChunkBuffers
    ) -> Tensor:
        """x in the first of the pair buffers, as the result."""
        width = self.shape.latent_dim
        raw = front(b.raw, x.shape[1], up.up.m)
        conv(x, up.up, streams, b.scratch, ConvOut(raw=raw, ring=kept))
        raw = raw.view(-1, width)
        n = raw.shape[0]
        normed, inner = front(b.pairs[0], 2, n, width), front(b.pairs[1], 2, n, up.wide.m)
        depthwise_norm(raw, up.depthwise, up.depthwise_bias, LAYER_NORM_EPS, normed, streams, kept)
        conv(normed, up.wide, streams, b.scratch, ConvOut(pair=inner, act="gelu"))
        conv(inner, up.narrow, streams, b.scratch, ConvOut(residual=raw, pair=normed, ring=ring))
        return normed

    def _block(
        self,
        block: _Block,
        act: Snake,
        pair: Tensor,
        streams: Streams,
        ring: Ring,
        rings: Iterator[Ring],
        flat: tuple[Tensor, Tensor],
        b: ChunkBuffers,
    ) -> tuple[Tensor, Ring]:
        """pair: the snake of its input, in flat[0], of which `ring` keeps the last row. Returns the same for
        what follows, with `act`, in flat[1], and its ring.
        """
        n = pair.shape[1]
        width = block.up.m // block.up.phases
        raw, out = front(b.raw, n, block.up.m), front(flat[1], 2, n, block.up.m)
        history, ring = ring, next(rings)
        first = block.units[0].act1
        conv(pair, block.up, streams, b.scratch, ConvOut(raw=raw, pair=out, act=first, ring=ring), history=history)
        raw, pair = raw.view(-1, width), out.view(2, -1, width)
        inner = front(flat[0], *pair.shape)
        for i, unit in enumerate(block.units):
            conv(pair, unit.conv1, streams, b.scratch, ConvOut(pair=inner, act=unit.act2), history=ring)
            is_last, ring = i + 1 == len(block.units), next(rings)
            after = act if is_last else block.units[i + 1].act1
            end = ConvOut(residual=raw, raw=None if is_last else raw, pair=pair, act=after, ring=ring)
            conv(inner, unit.conv2, streams, b.scratch, end)
        return pair, ring
