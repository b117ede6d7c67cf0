"""The vocoder's tensors: `decoder.*` of speech_tokenizer/model.safetensors, checked, or random ones of a
shape.

What is a function of the weights alone is computed here: codebooks are divided by their usage, snake's alpha
and beta are exponentials. Layouts are the operators' (models/vocoder/cpu.py, models/vocoder/gpu.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deltic.models.fields import CheckpointError
from deltic.models.mapped import Header, MappedFiles, read_header
from deltic.models.vocoder.shape import VocoderShape
from deltic.ops.arrays import Array, nothing
from deltic.ops.geometry import N_CODES

FILE = "speech_tokenizer/model.safetensors"
USED_LEAST = 1e-5
BETA_LEAST = 1e-9
DILATIONS = (1, 3, 9)
"""Dilations of a block's three residual units."""


def vocoder_tensors(shape: VocoderShape) -> dict[str, tuple[int, ...]]:
    """Name, without `decoder.`, -> size, of every tensor that the vocoder reads, as stored."""
    latent, hidden, book = shape.latent_dim, shape.hidden_size, shape.codebook_dim // 2
    inner, heads = shape.intermediate_size, shape.n_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {}

    def add(prefix: str, **suffixes: tuple[int, ...]) -> None:
        for suffix, size in suffixes.items():
            sizes[f"{prefix}.{suffix}" if suffix else prefix] = size

    for name in _books():
        add(name, embedding_sum=(shape.codebook_size, book), cluster_usage=(shape.codebook_size,))
    for part in ("first", "rest"):
        add(f"quantizer.rvq_{part}.output_proj", weight=(shape.codebook_dim, book, 1))
    add("pre_conv.conv", weight=(latent, shape.codebook_dim, 3), bias=(latent,))
    add("pre_transformer.input_proj", weight=(hidden, latent), bias=(hidden,))
    add("pre_transformer.output_proj", weight=(latent, hidden), bias=(latent,))
    add("pre_transformer.norm", weight=(hidden,))
    for i in range(shape.n_layers):
        layer = f"pre_transformer.layers.{i}"
        for name in ("q", "k", "v"):
            add(f"{layer}.self_attn.{name}_proj", weight=(heads, hidden))
        add(f"{layer}.self_attn.o_proj", weight=(hidden, heads))
        add(f"{layer}.mlp.gate_proj", weight=(inner, hidden))
        add(f"{layer}.mlp.up_proj", weight=(inner, hidden))
        add(f"{layer}.mlp.down_proj", weight=(hidden, inner))
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{layer}.{name}", weight=(hidden,))
        for name in ("self_attn", "mlp"):
            add(f"{layer}.{name}_layer_scale", scale=(hidden,))
    for i, ratio in enumerate(shape.upsampling_ratios):
        add(f"upsample.{i}.0.conv", weight=(latent, latent, ratio), bias=(latent,))
        block = f"upsample.{i}.1"
        add(f"{block}.dwconv.conv", weight=(latent, 1, 7), bias=(latent,))
        add(f"{block}.norm", weight=(latent,), bias=(latent,))
        add(f"{block}.pwconv1", weight=(4 * latent, latent), bias=(4 * latent,))
        add(f"{block}.pwconv2", weight=(latent, 4 * latent), bias=(latent,))
        add(block, gamma=(latent,))
    width = shape.decoder_dim
    add("decoder.0.conv", weight=(width, latent, 7), bias=(width,))
    for i, rate in enumerate(shape.upsample_rates, 1):
        block = f"decoder.{i}.block"
        add(f"{block}.0", alpha=(width,), beta=(width,))
        add(f"{block}.1.conv", weight=(width, width // 2, 2 * rate), bias=(width // 2,))
        width //= 2
        for unit in range(2, 2 + len(DILATIONS)):
            for name, taps in (("1", 7), ("2", 1)):
                add(f"{block}.{unit}.act{name}", alpha=(width,), beta=(width,))
                add(f"{block}.{unit}.conv{name}.conv", weight=(width, width, taps), bias=(width,))
    last = len(shape.upsample_rates) + 1
    add(f"decoder.{last}", alpha=(width,), beta=(width,))
    add(f"decoder.{last + 1}.conv", weight=(1, width, 7), bias=(1,))
    return sizes


def vocoder_weight_bytes(shape: VocoderShape) -> int:
    """Bytes of the vocoder's weights in float32."""
    return 4 * sum(math.prod(size) for size in vocoder_tensors(shape).values())


def _books() -> Iterator[str]:
    """Names of the codebooks, in the order of a frame's codes."""
    for i in range(N_CODES):
        part, index = ("first", 0) if i == 0 else ("rest", i - 1)
        yield f"quantizer.rvq_{part}.vq.layers.{index}._codebook"


def _resolved(tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors with codebooks as one, `tables` float32 [16, size, D], and alpha and beta as exp(alpha),
    1 / exp(beta).
    """
    books = []
    for name in _books():
        used = np.maximum(tensors.pop(f"{name}.cluster_usage"), np.float32(USED_LEAST))
        books.append(tensors.pop(f"{name}.embedding_sum") / used[:, None])
    tensors["tables"] = np.stack(books)
    for name in tensors:
        if name.endswith(".alpha"):
            tensors[name] = _exp(tensors[name])
        elif name.endswith(".beta"):
            tensors[name] = np.float32(1.0) / (_exp(tensors[name]) + np.float32(BETA_LEAST))
    return tensors


def _exp(values: Array) -> Array:
    """float32: computed in float64 and rounded once, so that every machine has the same."""
    return np.exp(values.astype(np.float64)).astype(np.float32)


def check_vocoder_files(directory: Path, shape: VocoderShape) -> dict[str, Header]:
    """Checks the vocoder's tensors, and returns where they are, by their names without the prefix.

    Raises CheckpointError, naming the tensor, for a file that is absent or damaged, and for what is missing
    or has another size.
    """
    file, found = directory / FILE, dict[str, Header]()
    headers, _ = read_header(file)
    for name, size in vocoder_tensors(shape).items():
        header = headers.get(f"decoder.{name}")
        if header is None:
            raise CheckpointError(f"{file}: decoder.{name} is missing")
        if header.shape != size:
            raise CheckpointError(f"{file}: decoder.{name} is {list(header.shape)}; its config says {list(size)}")
        found[name] = header
    return found


def load_vocoder(directory: Path, shape: VocoderShape) -> dict[str, Array]:
    """Reads the vocoder's tensors, float32, without the prefix. Raises what `check_vocoder_files` does."""
    files, headers = MappedFiles(), check_vocoder_files(directory, shape)
    return _resolved({name: np.asarray(files.read(header), np.float32) for name, header in headers.items()})


def empty_vocoder(shape: VocoderShape) -> dict[str, Array]:
    """Tensors of the right sizes, almost all without memory: to see what is made of them."""
    return _resolved({name: nothing(size, np.float32) for name, size in vocoder_tensors(shape).items()})


def dummy_vocoder(shape: VocoderShape, seed: int = 0) -> dict[str, Array]:
    """Random tensors of the shape, scaled so that the waveform neither vanishes nor clips."""
    # repeated: nobody looks at the values
    noise = np.random.default_rng(seed).standard_normal(1 << 22, np.float32)
    last = f"decoder.{len(shape.upsample_rates) + 2}.conv.weight"
    tensors = {}
    for name, size in vocoder_tensors(shape).items():
        is_transposed = ".block.1." in name or (name.startswith("upsample") and ".0.conv" in name)
        fan = 2 * size[0] if is_transposed else math.prod(size[1:])
        factor, mean = fan**-0.5 * (0.3 if ".conv2." in name else 0.05 if name == last else 1.0), 0.0
        if len(size) == 1:
            factor, mean = 0.1, float(name.endswith(("norm.weight", "usage", "scale", "gamma")))
        elif name.endswith("embedding_sum"):
            factor = 1.0
        tensors[name] = np.resize(noise, size) * np.float32(factor) + np.float32(mean)
    return _resolved(tensors)
