"""The vocoder's geometry: the decoder of speech_tokenizer/config.json, which turns codes into samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltic.models.fields import json_table, only, positive_float, positive_int
from deltic.ops.geometry import N_CODES

FRAME_SAMPLES = 1920

SAMPLE_RATE = 24000

LAYER_NORM_EPS = 1e-6
"""Epsilon of the ConvNeXt blocks' norms. No config says it."""

MAX_REF_FRAMES = 512
"""Reference frames that a prompt can name: 41 s."""


@dataclass(frozen=True, kw_only=True)
class VocoderShape:
    """`decoder_config` of speech_tokenizer/config.json."""

    latent_dim: int = 1024
    codebook_dim: int = 512
    codebook_size: int = 2048
    hidden_size: int = 512
    intermediate_size: int = 1024
    n_layers: int = 8
    n_heads: int = 16
    head_dim: int = 64
    sliding_window: int = 72
    """Frames that a frame sees, itself among them."""
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-5
    decoder_dim: int = 1536
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[int, ...] = (2, 2)

    def inv_freq(self) -> list[float]:
        """Angles per position, head_dim / 2 of them."""
        return [self.rope_theta ** (-2.0 * i / self.head_dim) for i in range(self.head_dim // 2)]


def vocoder_shape(tokenizer: Mapping[str, object]) -> VocoderShape:
    for name, value in (
        ("output_sample_rate", SAMPLE_RATE),
        ("decode_upsample_rate", FRAME_SAMPLES),
        ("encoder_valid_num_quantizers", N_CODES),
    ):
        only(tokenizer, name, (None, value))
    fields = json_table(tokenizer, "decoder_config")
    only(fields, "num_quantizers", (N_CODES,))
    only(fields, "hidden_act", (None, "silu"))
    only(fields, "attention_bias", (None, False))
    n_heads = positive_int(fields, "num_attention_heads")
    only(fields, "num_key_value_heads", (None, n_heads))
    only(fields, "upsampling_ratios", ([2, 2], (2, 2)))
    only(fields, "upsample_rates", ([8, 5, 4, 3], (8, 5, 4, 3)))
    names = (
        *("latent_dim", "codebook_dim", "codebook_size", "hidden_size", "intermediate_size"),
        *("head_dim", "sliding_window", "decoder_dim"),
    )
    return VocoderShape(
        **dict[str, Any]({name: positive_int(fields, name) for name in names}),
        n_layers=positive_int(fields, "num_hidden_layers"),
        n_heads=n_heads,
        rope_theta=positive_float(fields, "rope_theta"),
        rms_norm_eps=positive_float(fields, "rms_norm_eps"),
    )
