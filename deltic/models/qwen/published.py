"""Shapes of the published models by name: for `--dummy`, for plans, and to know a checkpoint again."""

from __future__ import annotations

import dataclasses

from deltic.models.fields import UnsupportedModelError
from deltic.models.qwen.shape import FULL_ATTENTION, LINEAR_ATTENTION, ModelShape, flash_next


def _published(
    n_layers: int,
    hidden_size: int,
    q_and_kv_heads: tuple[int, int],
    gdn_n_v_heads: int,
    *,
    ffn: int = 0,
    moe: tuple[int, int, int, int] = (0, 0, 0, 0),
    tied: bool = False,
    next_vocab: bool = False,
) -> ModelShape:
    """Makes one row of the published table. `moe` is (experts, experts per token, expert width, shared
    width).
    """
    moe_family = "qwen3_next" if next_vocab else "qwen3_5_moe"
    return ModelShape(
        family=moe_family if moe[0] else "qwen3_5",
        vocab_size=151936 if next_vocab else 248320,
        hidden_size=hidden_size,
        layer_types=(LINEAR_ATTENTION, LINEAR_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION) * (n_layers // 4),
        rms_norm_eps=1e-6,
        n_q_heads=q_and_kv_heads[0],
        n_kv_heads=q_and_kv_heads[1],
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        mrope_section=None if next_vocab else (11, 11, 10),
        gdn_n_k_heads=16,
        gdn_n_v_heads=gdn_n_v_heads,
        gdn_k_dim=128,
        gdn_v_dim=128,
        conv_width=4,
        intermediate_size=ffn,
        n_experts=moe[0],
        n_experts_per_tok=moe[1],
        moe_intermediate_size=moe[2],
        shared_intermediate_size=moe[3],
        tie_word_embeddings=tied,
        max_position_embeddings=262144,
        eos_token_ids=(151645, 151643) if next_vocab else (248046, 248044),
    )


_FLASH_NEXT: dict[str, object] = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_compress_ratio": 4,
    "indexer_budget": 2048,
    "ple_layer_ids": [2],
    "output_gate_type": "sigmoid",
    "eos_token_id": 248044,
}
"""The fields of its config.json of which its shape is more than the sizes that all models have."""

PUBLISHED: dict[str, ModelShape] = {
    "qwen3.5-0.8b": _published(24, 1024, (8, 2), 16, ffn=3584, tied=True),
    "qwen3.5-2b": _published(24, 2048, (8, 2), 16, ffn=6144, tied=True),
    "qwen3.5-4b": _published(32, 2560, (16, 4), 32, ffn=9216, tied=True),
    "qwen3.5-9b": _published(32, 4096, (16, 4), 32, ffn=12288),
    "qwen3.5-27b": _published(64, 5120, (24, 4), 48, ffn=17408),
    "qwen3.5-35b-a3b": _published(40, 2048, (16, 2), 32, moe=(256, 8, 512, 512)),
    "qwen3.5-122b-a10b": _published(48, 3072, (32, 2), 64, moe=(256, 8, 1024, 1024)),
    "qwen3.5-397b-a17b": _published(60, 4096, (32, 2), 64, moe=(512, 10, 1024, 1024)),
    "qwen3-next-80b-a3b": _published(48, 2048, (16, 2), 32, moe=(512, 10, 512, 512), next_vocab=True),
}
PUBLISHED["qwen3.8-flash-next"] = dataclasses.replace(
    _published(48, 2560, (24, 2), 48, moe=(512, 10, 640, 640)), family="qwen4_exp", **flash_next(_FLASH_NEXT)
)
PUBLISHED["qwen3.6-27b"] = PUBLISHED["qwen3.5-27b"]
PUBLISHED["qwen3.6-35b-a3b"] = PUBLISHED["qwen3.5-35b-a3b"]


def published_shape(name: str) -> ModelShape:
    """The shape of a published model by name, any case. Raises UnsupportedModelError with the known names."""
    try:
        return PUBLISHED[name.lower()]
    except KeyError:
        raise UnsupportedModelError("--dummy", name, ", ".join(PUBLISHED)) from None
