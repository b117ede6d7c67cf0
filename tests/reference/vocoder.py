"""The vocoder of Qwen3-TTS (12.5 Hz, 16 codes a frame) for one stream: codes in, samples out, in float32.

Everything is causal, so a stream can be cut anywhere: `decode` takes the next frames and a state, {} at
first, that keeps what the next ones need to see of these. A whole pass is one call. Tensors have the names of
speech_tokenizer/model.safetensors.
The encoders, which run once a voice, are in `models/vocoder/encoder.py`: their float32 code is as plain
as it would be here.

Source: the published package `qwen-tts` 0.1.1, which `tests/golden/make_speech.py` runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference.speech import Checkpoint, transformer

State = dict[str, Any]
FLOOR = 1e-5
"""Least use of a codebook's entry, by which its stored sum is divided."""


def causal_conv(model: Checkpoint, name: str, x: Tensor, state: State, dilation: int = 1) -> Tensor:
    """x [C, T] -> [C', T]; the (kernel - 1) * dilation inputs before x are the state's, zeros at first.

    Depthwise where the weights have one input channel and x has more.
    """
    weight, bias = model.weights[f"{name}.weight"], model.weights[f"{name}.bias"]
    n_before = (weight.shape[2] - 1) * dilation
    padded = torch.cat([state.get(name, x.new_zeros(x.shape[0], n_before)), x], 1)
    state[name] = padded[:, padded.shape[1] - n_before :]
    return F.conv1d(padded[None], weight, bias, dilation=dilation, groups=x.shape[0] // weight.shape[1])[0]


def transposed_conv(model: Checkpoint, name: str, x: Tensor, rate: int, state: State) -> Tensor:
    """x [C, T] -> [C', T * rate].

    A kernel of 2 * rate reaches one input back: the state's, zeros at first; one of rate, none.
    """
    weight, bias = model.weights[f"{name}.weight"], model.weights[f"{name}.bias"]
    n_before = weight.shape[2] // rate - 1
    padded = torch.cat([state.get(name, x.new_zeros(x.shape[0], n_before)), x], 1)
    state[name] = padded[:, padded.shape[1] - n_before :]
    y = F.conv_transpose1d(padded[None], weight, bias, stride=rate)[0]
    return y[:, n_before * rate :][:, : x.shape[1] * rate]


def snake(model: Checkpoint, name: str, x: Tensor) -> Tensor:
    """x + sin^2(x e^alpha) / (e^beta + 1e-9), per channel. x [C, T]."""
    alpha, beta = (model.weights[f"{name}.{part}"].exp()[:, None] for part in ("alpha", "beta"))
    return x + torch.sin(x * alpha).square() / (beta + 1e-9)


def dense(model: Checkpoint, name: str, x: Tensor) -> Tensor:
    """x [T, K] -> [T, N]."""
    return F.linear(x, model.weights[f"{name}.weight"], model.weights[f"{name}.bias"])


def latents(model: Checkpoint, codes: Tensor) -> Tensor:
    """codes [T, 16] -> [codebook_dim, T]: code 0's entry plus the sum of the others', each projected."""
    total = torch.zeros(())
    for part, used in (("first", codes[:, :1]), ("rest", codes[:, 1:])):
        quantizer = f"decoder.quantizer.rvq_{part}"
        entries = torch.zeros(())
        for i in range(used.shape[1]):
            book = f"{quantizer}.vq.layers.{i}._codebook"
            usage = model.weights[f"{book}.cluster_usage"].clamp(min=FLOOR)
            entries = entries + (model.weights[f"{book}.embedding_sum"] / usage[:, None])[used[:, i].long()]
        total = total + model.weights[f"{quantizer}.output_proj.weight"][..., 0] @ entries.T
    return total


@torch.no_grad()
def decode(model: Checkpoint, codes: Tensor, state: State | None = None) -> Tensor:
    """The next frames of a stream, codes [T, 16] -> samples [T * 1920] within [-1, 1].

    Updates the state; None: a stream of its own.
    """
    state = {} if state is None else state
    config = model.config["decoder_config"]
    prefix = "decoder.pre_transformer"
    x = causal_conv(model, "decoder.pre_conv.conv", latents(model, codes), state)
    y = dense(model, f"{prefix}.input_proj", x.T)
    cache = state.setdefault(prefix, {})
    y = transformer(model.weights, prefix, config, y, cache, window=config["sliding_window"])
    x = dense(model, f"{prefix}.output_proj", y).T
    for i, rate in enumerate(config["upsampling_ratios"]):
        block = f"decoder.upsample.{i}"
        x = transposed_conv(model, f"{block}.0.conv", x, rate, state)
        y = causal_conv(model, f"{block}.1.dwconv.conv", x, state).T
        norm = (model.weights[f"{block}.1.norm.weight"], model.weights[f"{block}.1.norm.bias"])
        y = dense(model, f"{block}.1.pwconv1", F.layer_norm(y, y.shape[-1:], *norm, 1e-6))
        y = dense(model, f"{block}.1.pwconv2", F.gelu(y)) * model.weights[f"{block}.1.gamma"]
        x = x + y.T
    x = causal_conv(model, "decoder.decoder.0.conv", x, state)
    rates = config["upsample_rates"]
    for i, rate in enumerate(rates):
        block = f"decoder.decoder.{i + 1}.block"
        x = transposed_conv(model, f"{block}.1.conv", snake(model, f"{block}.0", x), rate, state)
        for j, dilation in ((2, 1), (3, 3), (4, 9)):
            unit = f"{block}.{j}"
            y = causal_conv(model, f"{unit}.conv1.conv", snake(model, f"{unit}.act1", x), state, dilation)
            x = x + causal_conv(model, f"{unit}.conv2.conv", snake(model, f"{unit}.act2", y), state)
    n = len(rates)
    x = snake(model, f"decoder.decoder.{n + 1}", x)
    return causal_conv(model, f"decoder.decoder.{n + 2}.conv", x, state)[0].clamp(-1, 1)
