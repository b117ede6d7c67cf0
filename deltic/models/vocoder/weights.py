"""The vocoder's tensors: `decoder.*` of speech_tokenizer/model.safetensors, checked, or random ones of a
shape.

What is a function of the weights alone is computed here: codebooks are divided by their usage, snake's alpha
and beta are exponentials. Layouts are the operators' (models/vocoder/cpu.py, models/vocoder/gpu.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltic.models.fields import CheckpointError
from deltic.models.vocoder.shape import VocoderShape
from deltic.ops.geometry import N_CODES

FILE = "speech_tokenizer/model.safetensors"
USED_LEAST = 1e-5
BETA_LEAST = 1e-9
DILATIONS = (1, 3, 9)
"""Of a block's three residual units."""


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


def _resolved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with codebooks as one, `tables` float32 [16, size, D], and alpha and beta as exp(alpha),
    1 / exp(beta).
    """
    books = []
    for name in _books():
        used = tensors.pop(f"{name}.cluster_usage").clamp(min=USED_LEAST)
        books.append(tensors.pop(f"{name}.embedding_sum") / used[:, None])
    tensors["tables"] = torch.stack(books)
    for name in tensors:
        if name.endswith(".alpha"):
            tensors[name] = tensors[name].exp()
        elif name.endswith(".beta"):
            tensors[name] = 1.0 / (tensors[name].exp() + BETA_LEAST)
    return tensors


def load_vocoder(directory: Path, shape: VocoderShape) -> dict[str, Tensor]:
    """Reads the vocoder's tensors, float32, without the prefix.

    Raises CheckpointError, naming the tensor, for a file that is absent or damaged, and for what is missing
    or has another size.
    """
    file = directory / FILE
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            names = set(handle.keys())
            for name, size in vocoder_tensors(shape).items():
                if f"decoder.{name}" not in names:
                    raise CheckpointError(f"{file}: decoder.{name} is missing")
                tensor = handle.get_tensor(f"decoder.{name}")
                if tensor.shape != size:
                    raise CheckpointError(
                        f"{file}: decoder.{name} is {list(tensor.shape)}; its config says {list(size)}"
                    )
                tensors[name] = tensor.float()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    return _resolved(tensors)


def empty_vocoder(shape: VocoderShape) -> dict[str, Tensor]:
    """Tensors of the right sizes without memory, on torch's "meta" device."""
    return _resolved({name: torch.empty(size, device="meta") for name, size in vocoder_tensors(shape).items()})


def dummy_vocoder(shape: VocoderShape, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of the shape, scaled so that the waveform neither vanishes nor clips."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1 << 22, generator=generator)  # repeated: nobody looks at the values
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
        values = tensors[name] = torch.empty(size)
        for part in values.view(-1).split(len(noise)):
            torch.mul(noise[: len(part)], factor, out=part).add_(mean)
    return _resolved(tensors)
