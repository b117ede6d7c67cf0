"""The encoders of a reference recording, for cloning: to a speaker vector and to codes.

Base checkpoints have both encoders.

    encoder = VoiceEncoder.open(directory)
    vector = encoder.speaker(samples)      # float32 [h]
    codes = encoder.codes(samples)         # int32 [R, 16]

samples: float32 [n], mono, 24 kHz, within [-1, 1]. It runs once a voice, beside the steps, and so in plain
numpy, in float32. Being plain already, it has no second version in `reference/`: `tests/golden/speech` is
what it is held to. The convolutions over samples go over the recording in blocks, so that 30 s take some 300
MB. Weights are read when the first voice comes, and stay mapped files.

The speaker encoder is an ECAPA-TDNN over mels (Desplanques et al. 2020, arXiv:2005.07143), the codes are
Mimi's (Défossez et al. 2024, arXiv:2410.00037) with attention over the whole recording: the window in its
configuration is not applied by the published code on a CPU, and beyond 10 s the codes would be others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from deltic.models.fields import CheckpointError, UnsupportedModelError, positive_float, positive_int, read_json
from deltic.models.files import read_headers
from deltic.models.mapped import MappedFiles
from deltic.models.vocoder.shape import FRAME_SAMPLES, MAX_REF_FRAMES, SAMPLE_RATE
from deltic.ops.geometry import N_CODES

MIN_SAMPLES, MAX_SAMPLES = SAMPLE_RATE // 5, MAX_REF_FRAMES * FRAME_SAMPLES

N_MELS, N_FFT, HOP, MAX_HZ = 128, 1024, 256, 12000.0
RES2NET_GROUPS, RES2NET_DILATIONS = 8, (2, 3, 4)
KERNEL, LAST_KERNEL, RESIDUAL_KERNEL = 7, 3, 3
USED_LEAST = 1e-5
"""Floor of the use of a codebook's entry, by which its stored sum is divided."""

BLOCK, CONTEXT = 128, 8
"""Positions, 25 a second, of a run of the convolutions, and how many earlier ones it sees: more than 4."""

WINDOWS = 2048
"""Windows of a convolution that are multiplied at once: copies that caches hold."""

ERFC = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1, 2.98635138197400131e2,
     8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
     3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
)  # fmt: skip
"""Numerator and denominator of erfc(x) exp(x²), the highest power first: W. J. Cody, Rational Chebyshev
approximations for the error function, 1969; for x from 0.47 to 4. From 0 on its error is below 1e-11.
"""

SPEAKER, CODES = "speaker_encoder", "encoder"
"""Beginnings of the tensors' names, in model.safetensors and in the speech tokenizer's."""

Floats = NDArray[np.float32]
Tensors = dict[str, Floats]


class AudioError(ValueError):
    """A recording that no voice can be made of. The message says why."""


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """`speaker_encoder_config` of config.json, and `encoder_config` of speech_tokenizer/config.json."""

    width: int
    """Width of a speaker vector: the talker's."""
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
        config, tokenizer = (read_json(directory / part / "config.json") for part in ("", "speech_tokenizer"))
        speaker, codes = config.get("speaker_encoder_config"), tokenizer.get("encoder_config")
        for name, part in (("speaker_encoder_config", speaker), ("encoder_config", codes)):
            if not isinstance(part, Mapping):
                raise UnsupportedModelError(name, part, "an object")
        assert isinstance(speaker, Mapping) and isinstance(codes, Mapping)
        _expect(speaker, mel_dim=N_MELS, enc_res2net_scale=RES2NET_GROUPS, sample_rate=SAMPLE_RATE)
        _expect(speaker, enc_kernel_sizes=[5, 3, 3, 3, 1], enc_dilations=[1, *RES2NET_DILATIONS, 1])
        _expect(codes, audio_channels=1, kernel_size=KERNEL, last_kernel_size=LAST_KERNEL, num_residual_layers=1)
        _expect(codes, residual_kernel_size=RESIDUAL_KERNEL, compress=2, use_causal_conv=True, pad_mode="constant")
        _expect(codes, use_conv_shortcut=False, hidden_act="gelu", attention_bias=False, num_semantic_quantizers=1)
        _expect(codes, num_key_value_heads=codes.get("num_attention_heads"))
        _expect(tokenizer, encoder_valid_num_quantizers=N_CODES, input_sample_rate=SAMPLE_RATE)
        _expect(tokenizer, encode_downsample_rate=FRAME_SAMPLES)
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


def _sizes(fields: Mapping[str, object], name: str, default: tuple[int, ...], n: int) -> tuple[int, ...]:
    values = fields.get(name, default)
    if not isinstance(values, list | tuple) or len(values) != n:
        raise UnsupportedModelError(name, values, f"{n} sizes")
    return tuple(positive_int({name: value}, name) for value in values)


def _expect(fields: Mapping[str, object], **expected: object) -> None:
    """Refuses other values, which would change the mathematics. An absent field has the class default."""
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
    """Encoders of one checkpoint, both of them. For one thread at a time."""

    def __init__(self, shape: EncoderShape, load: Callable[[str], Tensors]) -> None:
        """load: the float32 tensors of SPEAKER or of CODES, by name; called when they are first needed."""
        self.shape, self._tensors = shape, functools.cache(load)

    @classmethod
    def open(cls, directory: Path) -> VoiceEncoder:
        """Opens the encoders of a Base checkpoint. Raises CheckpointError when a tensor is missing, or has
        another size than the config says.
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
            files, names = MappedFiles(), [name for name in sizes if name.startswith(f"{part}.")]
            return {name: np.asarray(files.read(headers[name]), np.float32) for name in names}

        return cls(shape, load)

    @classmethod
    def dummy(cls, width: int, seed: int = 0) -> VoiceEncoder:
        """Published sizes, random weights. width: the talker's."""
        shape = EncoderShape(width=width)

        def load(part: str) -> Tensors:
            generator = np.random.default_rng(seed)
            return {
                name: generator.standard_normal(size, np.float32) / math.sqrt(math.prod(size[1:]))
                if len(size) > 1
                else np.ones(size, np.float32)
                for name, size in encoder_tensors(shape).items()
                if name.startswith(f"{part}.")
            }

        return cls(shape, load)

    def speaker(self, samples: Floats) -> Floats:
        """float32 [width]. Raises AudioError."""
        _check(samples)
        vector = speaker_vector(self._tensors(SPEAKER), mels(samples))
        if not np.isfinite(vector).all():
            raise AudioError("the recording gives no finite speaker vector")
        return vector

    def codes(self, samples: Floats) -> NDArray[np.int32]:
        """int32 [R, 16], R = ceil(n / 1920). Raises AudioError."""
        _check(samples)
        w, shape = self._tensors(CODES), self.shape
        x = _transformer(w, shape, _convolutions(w, shape, samples))
        x = np.pad(x, ((0, 0), (2, x.shape[1] % 2)), mode="edge")
        return _quantised(w, _conv(x, w[f"{CODES}.downsample.conv.weight"], 0.0, stride=2))


def _check(samples: Floats) -> None:
    n = len(samples)
    if not MIN_SAMPLES <= n <= MAX_SAMPLES:
        least, most = MIN_SAMPLES / SAMPLE_RATE, MAX_SAMPLES / SAMPLE_RATE
        raise AudioError(f"a recording of {n / SAMPLE_RATE:.2f} s; it must be from {least:g} to {most:g} s long")
    if not np.isfinite(samples).all():
        raise AudioError("the recording has samples that are not finite")


def _conv(x: Floats, weight: Floats, bias: Floats | float, stride: int = 1, dilation: int = 1) -> Floats:
    """x [C, T] -> [C', T'], without padding: weight [C', C, kernel] times the windows of x; bias [C', 1]."""
    out, inner, kernel = weight.shape
    windows = sliding_window_view(x, (kernel - 1) * dilation + 1, 1)[:, ::stride, ::dilation].swapaxes(1, 2)
    y = np.empty((out, windows.shape[2]), np.float32)
    for i in range(0, y.shape[1], WINDOWS):
        some = windows[..., i : i + WINDOWS].reshape(inner * kernel, -1)
        part = np.matmul(weight.reshape(out, -1), some, out=y[:, i : i + WINDOWS])
        part += bias
    return y


def _softmax(x: Floats) -> Floats:
    """Computes a softmax over the last axis."""
    x = np.exp(x - x.max(-1, keepdims=True))
    x /= x.sum(-1, keepdims=True)
    return x


# The speaker vector.


def mels(samples: Floats) -> Floats:
    """log-mel magnitudes [N_MELS, frames], 93.75 frames a second."""
    side = (N_FFT - HOP) // 2
    frames = sliding_window_view(np.pad(samples, side, mode="reflect"), N_FFT)[::HOP]
    spectrum = np.fft.rfft(frames * np.hanning(N_FFT + 1)[:-1])  # float64
    magnitude = np.sqrt(spectrum.real**2 + spectrum.imag**2 + 1e-9)
    return np.asarray(np.log(np.maximum(mel_filters() @ magnitude.T, 1e-5)), np.float32)


def mel_filters() -> Floats:
    """float32 [N_MELS, N_FFT / 2 + 1]: triangles of area 1 on Slaney's scale, linear to 1 kHz and logarithmic
    above.
    """
    break_hz, per_mel, step = 1000.0, 200.0 / 3, math.log(6.4) / 27
    break_mel = break_hz / per_mel
    most = break_mel + math.log(MAX_HZ / break_hz) / step
    mel = np.linspace(0, most, N_MELS + 2)
    hz = np.where(mel < break_mel, mel * per_mel, break_hz * np.exp((mel - break_mel) * step))
    bins = np.linspace(0, SAMPLE_RATE / 2, N_FFT // 2 + 1)
    rising = (bins - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    falling = (hz[2:, None] - bins) / (hz[2:] - hz[1:-1])[:, None]
    area = 2 / (hz[2:] - hz[:-2])[:, None]
    return np.asarray(np.maximum(np.minimum(rising, falling), 0) * area, np.float32)


def speaker_vector(w: Tensors, mel: Floats) -> Floats:
    """The ECAPA-TDNN: mel [N_MELS, T] -> [width]."""

    def conv(name: str, x: Floats, dilation: int = 1) -> Floats:
        """The same length, reflected at both ends."""
        weight, bias = w[f"{SPEAKER}.{name}.weight"], w[f"{SPEAKER}.{name}.bias"][:, None]
        side = dilation * (weight.shape[2] - 1) // 2
        padded = np.pad(x, ((0, 0), (side, side)), mode="reflect")
        return _conv(padded, weight, bias, dilation=dilation)

    def relu(x: Floats) -> Floats:
        return np.clip(x, 0, None)

    x = relu(conv("blocks.0.conv", mel))
    outputs = []
    for i, dilation in enumerate(RES2NET_DILATIONS, 1):
        block = f"blocks.{i}"
        groups = np.split(relu(conv(f"{block}.tdnn1.conv", x)), RES2NET_GROUPS)
        for j in range(1, RES2NET_GROUPS):
            given = groups[j] if j == 1 else groups[j] + groups[j - 1]
            groups[j] = relu(conv(f"{block}.res2net_block.blocks.{j - 1}.conv", given, dilation))
        y = relu(conv(f"{block}.tdnn2.conv", np.concatenate(groups)))
        gate = relu(conv(f"{block}.se_block.conv1", y.mean(1, keepdims=True)))
        x = x + y / (1 + np.exp(-conv(f"{block}.se_block.conv2", gate)))
        outputs.append(x)
    x = relu(conv("mfa.conv", np.concatenate(outputs)))

    def statistics(weights: Floats) -> tuple[Floats, Floats]:
        mean = (weights * x).sum(1, keepdims=True)
        variance = (weights * (x - mean) ** 2).sum(1, keepdims=True)
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    even = statistics(np.full((1, x.shape[1]), 1 / x.shape[1], np.float32))
    seen = np.concatenate([x, *(np.broadcast_to(part, x.shape) for part in even)])
    attention = _softmax(conv("asp.conv", np.tanh(relu(conv("asp.tdnn.conv", seen)))))
    return conv("fc", np.concatenate(statistics(attention)))[:, 0]


# The codes.


def _elu(x: Floats) -> Floats:
    y: Floats = np.minimum(x, 0)
    np.exp(y, out=y)  # not expm1, which numpy has in vectors with AVX-512 only
    y -= 1
    np.maximum(x, y, out=y)
    return y


def _causal(w: Tensors, name: str, x: Floats, stride: int = 1) -> Floats:
    """x [C, T] -> [C', ceil(T / stride)]: zeros before it, and behind it up to a whole stride."""
    weight, bias = w[f"{CODES}.{name}.weight"], w[f"{CODES}.{name}.bias"][:, None]
    padded = np.pad(x, ((0, 0), (weight.shape[2] - stride, -x.shape[1] % stride)))
    return _conv(padded, weight, bias, stride)


def _convolutions(w: Tensors, shape: EncoderShape, samples: Floats) -> Floats:
    """samples [n] -> [hidden_size, ceil(n / 960)], 25 a second, block by block."""

    def block(x: Floats) -> Floats:
        x = _causal(w, "encoder.layers.0.conv", x[None])
        for i, rate in enumerate(shape.rates):
            unit = f"encoder.layers.{3 * i + 1}.block"
            y = _causal(w, f"{unit}.1.conv", _elu(x))
            x += _causal(w, f"{unit}.3.conv", _elu(y))
            x = _causal(w, f"encoder.layers.{3 * i + 3}.conv", _elu(x), rate)
        return _causal(w, f"encoder.layers.{3 * len(shape.rates) + 2}.conv", _elu(x))

    stride = math.prod(shape.rates)
    parts = []
    for start in range(0, len(samples), BLOCK * stride):
        begin = max(0, start - CONTEXT * stride)
        parts.append(block(samples[begin : start + BLOCK * stride])[:, (start - begin) // stride :])
    return np.concatenate(parts, 1)


def _transformer(w: Tensors, shape: EncoderShape, x: Floats) -> Floats:
    """x [hidden_size, T] -> the same, T up to 1024: norms with biases before each branch, a scale behind it,
    no norm at the end.
    """
    x, n, d = np.ascontiguousarray(x.T), x.shape[1], shape.head_dim
    inv_freq = shape.rope_theta ** (-np.arange(0, d, 2) / d)
    angle = (np.arange(n)[:, None] * inv_freq).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    future = np.triu(np.full((n, n), -np.inf, np.float32), 1)

    def rotated(heads: Floats) -> Floats:
        one, two = np.split(heads, 2, -1)
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    for i in range(shape.n_layers):
        layer = f"{CODES}.encoder_transformer.layers.{i}"

        def normed(x: Floats, name: str, layer: str = layer) -> Floats:
            x = x - x.mean(-1, keepdims=True)
            x /= np.sqrt((x**2).mean(-1, keepdims=True) + shape.norm_eps)
            return x * w[f"{layer}.{name}.weight"] + w[f"{layer}.{name}.bias"]

        y = normed(x, "input_layernorm")
        q, k, v = (
            (y @ w[f"{layer}.self_attn.{part}_proj.weight"].T).reshape(n, -1, d).swapaxes(0, 1) for part in "qkv"
        )  # [heads, T, d]
        scores = rotated(q) @ rotated(k).swapaxes(1, 2)
        o = _softmax(scores / math.sqrt(d) + future) @ v
        o = o.swapaxes(0, 1).reshape(n, -1) @ w[f"{layer}.self_attn.o_proj.weight"].T
        x += o * w[f"{layer}.self_attn_layer_scale.scale"]
        y = _gelu(normed(x, "post_attention_layernorm") @ w[f"{layer}.mlp.fc1.weight"].T)
        x += (y @ w[f"{layer}.mlp.fc2.weight"].T) * w[f"{layer}.mlp_layer_scale.scale"]
    return x.T


def _gelu(x: Floats) -> Floats:
    """x (1 + erf(x / √2)) / 2, in float64, as max(x, 0) - |x| erfc(|x| / √2) / 2."""
    a = np.abs(x.astype(np.float64)) * math.sqrt(0.5)
    erfc = np.exp(-a * a) * np.polyval(ERFC[0], a) / np.polyval(ERFC[1], a)
    return np.asarray(np.maximum(x, 0) - math.sqrt(0.5) * a * erfc, np.float32)


def _quantised(w: Tensors, x: Floats) -> NDArray[np.int32]:
    """x [hidden_size, R] -> int32 [R, 16]: of each codebook the entry nearest to what the ones before left.

    The first has its own projection of x, and takes nothing away from the others'.
    """
    codes, projected = np.empty((x.shape[1], N_CODES), np.int32), ""
    for i, (quantizer, book) in enumerate(_books()):
        if quantizer != projected:
            left, projected = x.T @ w[f"{quantizer}.input_proj.weight"][..., 0].T, quantizer
        entries = w[f"{book}.embed_sum"] / np.maximum(w[f"{book}.cluster_usage"], USED_LEAST)[:, None]
        # The square of a distance, less that of what is left, which is the same for every entry.
        codes[:, i] = ((entries**2).sum(1) - 2 * left @ entries.T).argmin(1)
        left = left - entries[codes[:, i]]
    return codes
