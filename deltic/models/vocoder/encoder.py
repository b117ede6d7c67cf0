"""The encoders of a reference recording, for cloning: to a speaker vector and to codes.

Base checkpoints have both encoders.

    encoder = VoiceEncoder.open(directory)
    vector = encoder.speaker(samples)      # float32 [h]
    codes = encoder.codes(samples)         # int32 [R, 16]

samples: float32 [n], mono, 24 kHz, within [-1, 1]. It runs once a voice, beside the steps, and so in plain
torch, in float32; being plain already, it has no second version in `reference/`: `tests/golden/speech` is
what it is held to. The convolutions over samples go over the recording in blocks, so that 30 s take some 300
MB. Weights are read when the first voice comes, and stay mapped files.

The speaker encoder is an ECAPA-TDNN over mels (Desplanques et al. 2020, arXiv:2005.07143), the codes are
Mimi's (Défossez et al. 2024, arXiv:2410.00037) with attention over the whole recording: the window in its
configuration is not applied by the published code on a CPU, and beyond 10 s the codes would be others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.models.fields import CheckpointError, UnsupportedModelError, positive_float, positive_int, read_json
from deltic.models.loading import read_headers
from deltic.models.mapped import MappedFiles
from deltic.models.vocoder.shape import FRAME_SAMPLES, MAX_REF_FRAMES, SAMPLE_RATE
from deltic.ops.geometry import N_CODES

MIN_SAMPLES = SAMPLE_RATE // 5
MAX_SAMPLES = MAX_REF_FRAMES * FRAME_SAMPLES

N_MELS, N_FFT, HOP, MAX_HZ = 128, 1024, 256, 12000.0
RES2NET_GROUPS, RES2NET_DILATIONS = 8, (2, 3, 4)
KERNEL, LAST_KERNEL, RESIDUAL_KERNEL = 7, 3, 3
USED_LEAST = 1e-5
"""Least use of a codebook's entry, by which its stored sum is divided."""

BLOCK, CONTEXT = 128, 8
"""Positions, 25 a second, for which the convolutions over samples run at once, and how many earlier ones they
see.

They must see more than 4.
"""

SPEAKER, CODES = "speaker_encoder", "encoder"
"""What the tensors' names begin with, in model.safetensors and in the speech tokenizer's."""

Tensors = dict[str, Tensor]


class AudioError(ValueError):
    """A recording that no voice can be made of; the message says why."""


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """`speaker_encoder_config` of config.json, and `encoder_config` of speech_tokenizer/config.json."""

    width: int
    """Of a speaker vector: the talker's."""
    channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    attention_channels: int = 128
    se_channels: int = 128
    n_filters: int = 64
    hidden_size: int = 512
    rates: tuple[int, ...] = (4, 5, 6, 8)
    """Strides, in the order of the layers."""
    n_layers: int = 8
    n_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 1e4
    codebook_size: int = 2048
    codebook_dim: int = 256

    @classmethod
    def from_directory(cls, directory: Path) -> EncoderShape:
        """Raises CheckpointError, and UnsupportedModelError for a field that cannot be run."""
        config, tokenizer = (
            read_json(directory / "config.json"),
            read_json(directory / "speech_tokenizer/config.json"),
        )
        speaker, codes = config.get("speaker_encoder_config"), tokenizer.get("encoder_config")
        for name, part in (("speaker_encoder_config", speaker), ("encoder_config", codes)):
            if not isinstance(part, Mapping):
                raise UnsupportedModelError(name, part, "an object")
        assert isinstance(speaker, Mapping) and isinstance(codes, Mapping)
        _refuse_variants(speaker, codes, tokenizer)
        rates = _sizes(codes, "upsampling_ratios", cls.rates[::-1], 4)[::-1]
        if 2 * math.prod(rates) != FRAME_SAMPLES:
            raise UnsupportedModelError("upsampling_ratios", rates[::-1], f"a product of {FRAME_SAMPLES // 2}")
        return cls(
            width=positive_int(speaker, "enc_dim"),
            channels=_sizes(speaker, "enc_channels", cls.channels, 5),
            attention_channels=positive_int(speaker, "enc_attention_channels", cls.attention_channels),
            se_channels=positive_int(speaker, "enc_se_channels", cls.se_channels),
            n_filters=positive_int(codes, "num_filters", cls.n_filters),
            hidden_size=positive_int(codes, "hidden_size", cls.hidden_size),
            rates=rates,
            n_layers=positive_int(codes, "num_hidden_layers", cls.n_layers),
            n_heads=positive_int(codes, "num_attention_heads", cls.n_heads),
            head_dim=positive_int(codes, "head_dim", cls.head_dim),
            intermediate_size=positive_int(codes, "intermediate_size", cls.intermediate_size),
            norm_eps=positive_float(codes, "norm_eps", cls.norm_eps),
            rope_theta=positive_float(codes, "rope_theta", cls.rope_theta),
            codebook_size=positive_int(codes, "codebook_size", cls.codebook_size),
            codebook_dim=positive_int(codes, "codebook_dim", cls.codebook_dim),
        )


def _sizes(fields: Mapping[str, Any], name: str, default: tuple[int, ...], n: int) -> tuple[int, ...]:
    values = fields.get(name, default)
    if not isinstance(values, list | tuple) or len(values) != n:
        raise UnsupportedModelError(name, values, f"{n} sizes")
    return tuple(positive_int({name: value}, name) for value in values)


def _refuse_variants(speaker: Mapping[str, Any], codes: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> None:
    """Refuses fields that would change the mathematics. An absent field has the class default."""
    only: list[tuple[Mapping[str, Any], dict[str, Any]]] = [
        (
            speaker,
            {
                "mel_dim": N_MELS,
                "enc_res2net_scale": RES2NET_GROUPS,
                "enc_kernel_sizes": [5, 3, 3, 3, 1],
                "enc_dilations": [1, *RES2NET_DILATIONS, 1],
                "sample_rate": SAMPLE_RATE,
            },
        ),
        (
            codes,
            {
                "audio_channels": 1,
                "kernel_size": KERNEL,
                "last_kernel_size": LAST_KERNEL,
                "num_residual_layers": 1,
                "residual_kernel_size": RESIDUAL_KERNEL,
                "compress": 2,
                "use_causal_conv": True,
                "pad_mode": "constant",
                "use_conv_shortcut": False,
                "hidden_act": "gelu",
                "attention_bias": False,
                "num_semantic_quantizers": 1,
                "num_key_value_heads": codes.get("num_attention_heads"),
            },
        ),
        (
            tokenizer,
            {
                "encoder_valid_num_quantizers": N_CODES,
                "input_sample_rate": SAMPLE_RATE,
                "encode_downsample_rate": FRAME_SAMPLES,
            },
        ),
    ]
    for fields, expected in only:
        for name, value in expected.items():
            if fields.get(name) is not None and fields[name] != value:
                raise UnsupportedModelError(name, fields[name], repr(value))


def encoder_tensors(shape: EncoderShape) -> dict[str, tuple[int, ...]]:
    """Sizes of all tensors that are read, by their names in the two files; convolutions [out, in, kernel]."""
    sizes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, out: int, inner: int, kernel: int = 1, has_bias: bool = True) -> None:
        sizes[f"{name}.weight"] = (out, inner, kernel)
        if has_bias:
            sizes[f"{name}.bias"] = (out,)

    first, *inner, last = shape.channels
    conv(f"{SPEAKER}.blocks.0.conv", first, N_MELS, 5)
    for i, c in enumerate(inner, 1):
        block, group = f"{SPEAKER}.blocks.{i}", c // RES2NET_GROUPS
        conv(f"{block}.tdnn1.conv", c, shape.channels[i - 1])
        for j in range(RES2NET_GROUPS - 1):
            conv(f"{block}.res2net_block.blocks.{j}.conv", group, group, 3)
        conv(f"{block}.tdnn2.conv", c, c)
        conv(f"{block}.se_block.conv1", shape.se_channels, c)
        conv(f"{block}.se_block.conv2", c, shape.se_channels)
    conv(f"{SPEAKER}.mfa.conv", last, sum(inner))
    conv(f"{SPEAKER}.asp.tdnn.conv", shape.attention_channels, 3 * last)
    conv(f"{SPEAKER}.asp.conv", last, shape.attention_channels)
    conv(f"{SPEAKER}.fc", shape.width, 2 * last)

    width, h = shape.n_filters, shape.hidden_size
    conv(f"{CODES}.encoder.layers.0.conv", width, 1, KERNEL)
    for i, rate in enumerate(shape.rates):
        layer = f"{CODES}.encoder.layers"
        conv(f"{layer}.{3 * i + 1}.block.1.conv", width // 2, width, RESIDUAL_KERNEL)
        conv(f"{layer}.{3 * i + 1}.block.3.conv", width, width // 2)
        conv(f"{layer}.{3 * i + 3}.conv", 2 * width, width, 2 * rate)
        width *= 2
    conv(f"{CODES}.encoder.layers.{3 * len(shape.rates) + 2}.conv", h, width, LAST_KERNEL)
    heads, f = shape.n_heads * shape.head_dim, shape.intermediate_size
    for i in range(shape.n_layers):
        layer = f"{CODES}.encoder_transformer.layers.{i}"
        sizes |= {f"{layer}.self_attn.{part}_proj.weight": (heads, h) for part in "qkv"}
        sizes |= {f"{layer}.self_attn.o_proj.weight": (h, heads)}
        sizes |= {f"{layer}.mlp.fc1.weight": (f, h), f"{layer}.mlp.fc2.weight": (h, f)}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            sizes |= {f"{layer}.{norm}.{part}": (h,) for part in ("weight", "bias")}
        sizes |= {f"{layer}.{part}_layer_scale.scale": (h,) for part in ("self_attn", "mlp")}
    conv(f"{CODES}.downsample.conv", h, h, 4, has_bias=False)
    for name, book in _books():
        sizes[f"{name}.input_proj.weight"] = (shape.codebook_dim, h, 1)
        sizes[f"{book}.embed_sum"] = (shape.codebook_size, shape.codebook_dim)
        sizes[f"{book}.cluster_usage"] = (shape.codebook_size,)
    return sizes


def _books() -> Iterable[tuple[str, str]]:
    """(quantizer, codebook) of each code of a frame."""
    for i in range(N_CODES):
        part, index = ("semantic", 0) if i == 0 else ("acoustic", i - 1)
        name = f"{CODES}.quantizer.{part}_residual_vector_quantizer"
        yield name, f"{name}.layers.{index}.codebook"


class VoiceEncoder:
    """Both encoders of one checkpoint. For one thread at a time."""

    def __init__(self, shape: EncoderShape, load: Callable[[str], Tensors]) -> None:
        """load: the float32 tensors of SPEAKER or of CODES, by name; called when they are first needed."""
        self.shape = shape
        self._load = load
        self._loaded: dict[str, Tensors] = {}

    @classmethod
    def open(cls, directory: Path) -> VoiceEncoder:
        """Of a Base checkpoint.

        Raises CheckpointError when a tensor is missing or has another size than the config says.
        """
        shape = EncoderShape.from_directory(directory)
        headers = read_headers(directory) | read_headers(directory / "speech_tokenizer")
        sizes = encoder_tensors(shape)
        for name, size in sizes.items():
            if name not in headers:
                raise CheckpointError(f"{directory}: {name} is missing; only Base checkpoints can clone a voice")
            if headers[name].shape != size:
                found = f"{headers[name].file}: {name} is {list(headers[name].shape)}"
                raise CheckpointError(f"{found}; its config says {list(size)}")

        def load(part: str) -> Tensors:
            files = MappedFiles()
            return {
                name: torch.from_numpy(files.read(headers[name]).astype("float32"))
                for name in sizes
                if name.startswith(f"{part}.")
            }

        return cls(shape, load)

    @classmethod
    def dummy(cls, width: int, seed: int = 0) -> VoiceEncoder:
        """Published sizes, random weights. width: the talker's."""
        shape = EncoderShape(width=width)

        def load(part: str) -> Tensors:
            generator = torch.Generator().manual_seed(seed)
            return {
                name: torch.randn(size, generator=generator) / math.sqrt(math.prod(size[1:]))
                if len(size) > 1
                else torch.ones(size)
                for name, size in encoder_tensors(shape).items()
                if name.startswith(f"{part}.")
            }

        return cls(shape, load)

    @torch.inference_mode()
    def speaker(self, samples: Tensor) -> Tensor:
        """float32 [width]. Raises AudioError."""
        _check(samples)
        vector = speaker_vector(self._tensors(SPEAKER), mels(samples))
        if not vector.isfinite().all():
            raise AudioError("the recording gives no finite speaker vector")
        return vector.clone()

    @torch.inference_mode()
    def codes(self, samples: Tensor) -> Tensor:
        """int32 [R, 16], R = ceil(n / 1920). Raises AudioError."""
        _check(samples)
        w, shape = self._tensors(CODES), self.shape
        x = _transformer(w, shape, _convolutions(w, shape, samples))
        x = F.conv1d(
            F.pad(x[None], (2, x.shape[1] % 2), mode="replicate"), w[f"{CODES}.downsample.conv.weight"], stride=2
        )
        return _quantised(w, x[0])

    def _tensors(self, part: str) -> Tensors:
        if part not in self._loaded:
            self._loaded[part] = self._load(part)
        return self._loaded[part]


def _check(samples: Tensor) -> None:
    n = len(samples)
    if not MIN_SAMPLES <= n <= MAX_SAMPLES:
        least, most = MIN_SAMPLES / SAMPLE_RATE, MAX_SAMPLES / SAMPLE_RATE
        raise AudioError(f"a recording of {n / SAMPLE_RATE:.2f} s; it must be from {least:g} to {most:g} s long")
    if not samples.isfinite().all():
        raise AudioError("the recording has samples that are not finite")


# The speaker vector.


def mels(samples: Tensor) -> Tensor:
    """log-mel magnitudes [N_MELS, frames], 93.75 frames a second."""
    side = (N_FFT - HOP) // 2
    padded = F.pad(samples[None], (side, side), mode="reflect")[0]
    spectrum = torch.stft(padded, N_FFT, HOP, window=torch.hann_window(N_FFT), center=False, return_complex=True)
    magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
    return (mel_filters() @ magnitude).clamp(min=1e-5).log()


def mel_filters() -> Tensor:
    """float32 [N_MELS, N_FFT / 2 + 1]: triangles of area 1 on Slaney's scale, linear to 1 kHz and logarithmic
    above.
    """
    break_hz, per_mel, step = 1000.0, 200.0 / 3, math.log(6.4) / 27
    break_mel = break_hz / per_mel
    most = break_mel + math.log(MAX_HZ / break_hz) / step
    mel = torch.linspace(0, most, N_MELS + 2, dtype=torch.float64)
    hz = torch.where(mel < break_mel, mel * per_mel, break_hz * ((mel - break_mel) * step).exp())
    bins = torch.linspace(0, SAMPLE_RATE / 2, N_FFT // 2 + 1, dtype=torch.float64)
    rising = (bins - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    falling = (hz[2:, None] - bins) / (hz[2:] - hz[1:-1])[:, None]
    area = 2 / (hz[2:] - hz[:-2])[:, None]
    return (torch.minimum(rising, falling).clamp(min=0) * area).float()


def speaker_vector(w: Tensors, mel: Tensor) -> Tensor:
    """The ECAPA-TDNN: mel [N_MELS, T] -> [width]."""

    def conv(name: str, x: Tensor, dilation: int = 1) -> Tensor:
        """The same length, reflected at both ends."""
        weight, bias = w[f"{SPEAKER}.{name}.weight"], w[f"{SPEAKER}.{name}.bias"]
        side = dilation * (weight.shape[2] - 1) // 2
        x = F.pad(x[None], (side, side), mode="reflect") if side else x[None]
        return F.conv1d(x, weight, bias, dilation=dilation)[0]

    x = conv("blocks.0.conv", mel).relu()
    outputs = []
    for i, dilation in enumerate(RES2NET_DILATIONS, 1):
        block = f"blocks.{i}"
        groups = list(conv(f"{block}.tdnn1.conv", x).relu().chunk(RES2NET_GROUPS))
        for j in range(1, RES2NET_GROUPS):
            given = groups[j] if j == 1 else groups[j] + groups[j - 1]
            groups[j] = conv(f"{block}.res2net_block.blocks.{j - 1}.conv", given, dilation).relu()
        y = conv(f"{block}.tdnn2.conv", torch.cat(groups)).relu()
        gate = conv(f"{block}.se_block.conv1", y.mean(1, keepdim=True)).relu()
        x = x + y * conv(f"{block}.se_block.conv2", gate).sigmoid()
        outputs.append(x)
    x = conv("mfa.conv", torch.cat(outputs)).relu()

    def statistics(weights: Tensor) -> tuple[Tensor, Tensor]:
        mean = (weights * x).sum(1, keepdim=True)
        variance = (weights * (x - mean).square()).sum(1, keepdim=True)
        return mean, variance.clamp(min=1e-12).sqrt()

    even = statistics(torch.full((1, x.shape[1]), 1 / x.shape[1]))
    seen = torch.cat([x, *(part.expand_as(x) for part in even)])
    attention = conv("asp.conv", conv("asp.tdnn.conv", seen).relu().tanh()).softmax(1)
    return conv("fc", torch.cat(statistics(attention)))[:, 0]


# The codes.


def _causal(w: Tensors, name: str, x: Tensor, stride: int = 1) -> Tensor:
    """x [C, T] -> [C', ceil(T / stride)]: zeros before it, and behind it up to a whole stride."""
    weight, bias = w[f"{CODES}.{name}.weight"], w[f"{CODES}.{name}.bias"]
    padded = F.pad(x[None], (weight.shape[2] - stride, -x.shape[1] % stride))
    return F.conv1d(padded, weight, bias, stride=stride)[0]


def _convolutions(w: Tensors, shape: EncoderShape, samples: Tensor) -> Tensor:
    """samples [n] -> [hidden_size, ceil(n / 960)], 25 a second, block by block."""

    def block(x: Tensor) -> Tensor:
        x = _causal(w, "encoder.layers.0.conv", x[None])
        for i, rate in enumerate(shape.rates):
            unit = f"encoder.layers.{3 * i + 1}.block"
            y = _causal(w, f"{unit}.1.conv", F.elu(x))
            x = x + _causal(w, f"{unit}.3.conv", F.elu(y))
            x = _causal(w, f"encoder.layers.{3 * i + 3}.conv", F.elu(x), rate)
        return _causal(w, f"encoder.layers.{3 * len(shape.rates) + 2}.conv", F.elu(x))

    stride = math.prod(shape.rates)
    parts = []
    for start in range(0, len(samples), BLOCK * stride):
        begin = max(0, start - CONTEXT * stride)
        parts.append(block(samples[begin : start + BLOCK * stride])[:, (start - begin) // stride :])
    return torch.cat(parts, 1)


def _transformer(w: Tensors, shape: EncoderShape, x: Tensor) -> Tensor:
    """x [hidden_size, T] -> the same, T up to 1024.

    Norms with biases before each branch, a scale behind it, no norm at the end.
    """
    x, d, h = x.T, shape.head_dim, shape.hidden_size
    inv_freq = shape.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = (torch.arange(len(x), dtype=torch.float64)[:, None] * inv_freq).float()
    cos, sin = angle.cos(), angle.sin()

    def rotated(heads: Tensor) -> Tensor:
        one, two = heads.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    for i in range(shape.n_layers):
        layer = f"{CODES}.encoder_transformer.layers.{i}"

        def normed(x: Tensor, name: str, layer: str = layer) -> Tensor:
            return F.layer_norm(x, (h,), w[f"{layer}.{name}.weight"], w[f"{layer}.{name}.bias"], shape.norm_eps)

        y = normed(x, "input_layernorm")
        q, k, v = (
            F.linear(y, w[f"{layer}.self_attn.{part}_proj.weight"]).unflatten(-1, (-1, d)).transpose(0, 1)
            for part in "qkv"
        )  # [heads, T, d]
        o = F.scaled_dot_product_attention(rotated(q)[None], rotated(k)[None], v[None], is_causal=True)[0]
        o = F.linear(o.transpose(0, 1).flatten(1), w[f"{layer}.self_attn.o_proj.weight"])
        x = x + o * w[f"{layer}.self_attn_layer_scale.scale"]
        y = F.gelu(F.linear(normed(x, "post_attention_layernorm"), w[f"{layer}.mlp.fc1.weight"]))
        x = x + F.linear(y, w[f"{layer}.mlp.fc2.weight"]) * w[f"{layer}.mlp_layer_scale.scale"]
    return x.T


def _quantised(w: Tensors, x: Tensor) -> Tensor:
    """x [hidden_size, R] -> int32 [R, 16]: of each codebook the entry nearest to what the ones before left.

    The first has its own projection of x, and takes nothing away from the others'.
    """
    codes, left, projected = [], x.new_zeros(()), ""
    for quantizer, book in _books():
        if quantizer != projected:
            left, projected = x.T @ w[f"{quantizer}.input_proj.weight"][..., 0].T, quantizer
        entries = w[f"{book}.embed_sum"] / w[f"{book}.cluster_usage"].clamp(min=USED_LEAST)[:, None]
        code = torch.cdist(left[None], entries[None])[0].argmin(1)
        left = left - entries[code]
        codes.append(code)
    return torch.stack(codes, 1).int()
