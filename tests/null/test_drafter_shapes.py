"""Configurations of block drafters: as published, in each place where their fields stand, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deltic.models.dflash.shape import DrafterShape
from deltic.models.fields import UnsupportedModelError
from deltic.models.qwen.published import published_shape

LAYERS: dict[str, Any] = {
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17408,
    "max_position_embeddings": 262144, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 5,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "vocab_size": 248320,
}  # fmt: skip
DFLASH: dict[str, Any] = LAYERS | {
    "architectures": ["DFlashDraftModel"], "block_size": 16, "layer_types": ["full_attention"] * 5, "sliding_window": None,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "rope_theta": 10000000, "rope_scaling": None,
}  # fmt: skip
DFLASH2: dict[str, Any] = LAYERS | {
    "architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048,
    "dflash_config": {
        "block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "final_logit_softcapping": 20.0, "mask_token_id": 201818,
        "output_multiplier": 0.19611613513818404, "selector_rank": 256, "selector_top_k": 16, "target_layer_ids": [1, 13, 25],
    },
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}  # fmt: skip
DSPARK: dict[str, Any] = LAYERS | {
    "architectures": ["DSparkDraftModel"], "block_size": 7, "markov_rank": 256, "rope_theta": 10000000,
    "enable_confidence_head": True, "confidence_head_with_markov": True, "markov_head_type": "vanilla",
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192},
    "dspark_config": {"mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]},
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 8, "draft_vocab_size": 248320,
    "aux_hidden_state_layer_ids": [2, 17, 32], "mask_token_id": 4, "sliding_window_non_causal": True,
    "transformer_layer_config": LAYERS | {
        "layer_types": ["sliding_attention"] + ["full_attention"] * 4, "sliding_window": 4096,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    },
}  # fmt: skip


def test_the_first_version() -> None:
    shape = DrafterShape.from_config(DFLASH)
    assert shape.target_layer_ids == (1, 16, 31, 46, 61) and shape.block_size == 16 and shape.most_guesses == 15
    assert shape.windows == (0,) * 5 and not any(shape.are_causal) and shape.rope_theta == 1e7 and shape.yarn is None
    assert not (shape.conv_taps or shape.selector_rank or shape.markov_rank or shape.has_confidence)
    assert shape.page_bytes == 64 * 5 * 2 * 1024 * 2


def test_the_second_version() -> None:
    shape = DrafterShape.from_config(DFLASH2)
    assert (shape.conv_taps, shape.conv_group, shape.selector_rank, shape.selector_top_k) == (2, 16, 256, 16)
    assert shape.windows == (2048,) * 5 and not any(shape.are_causal) and shape.softcap == 20.0
    assert abs(shape.output_multiplier - 0.196116) < 1e-6 and shape.embedding_scale == 1.0
    assert all(DrafterShape.from_config({**DFLASH2, "is_causal": None}).are_causal)  # as layers with a window are


def test_dspark() -> None:
    shape = DrafterShape.from_config(DSPARK)
    assert shape.guesses_at_anchor and shape.most_guesses == 7 and shape.markov_rank == 256
    assert shape.has_confidence and shape.confidence_sees_token
    assert shape.yarn is not None and shape.yarn.factor == 32.0 and shape.rope_attention_factor > 1.3


def test_speculators_count_what_comes_into_a_layer() -> None:
    shape = DrafterShape.from_config(SPECULATORS)
    assert shape.target_layer_ids == (1, 16, 31) and shape.mask_token_id == 4 and shape.most_guesses == 7
    assert shape.windows == (4096, 0, 0, 0, 0) and not any(shape.are_causal)
    causal = DrafterShape.from_config({**SPECULATORS, "sliding_window_non_causal": False})
    assert causal.are_causal == (True, False, False, False, False)
    of_dspark = {**SPECULATORS, "speculators_model_type": "dspark", "markov_rank": 64, "sample_from_anchor": False}
    assert not DrafterShape.from_config(of_dspark).guesses_at_anchor


@pytest.mark.parametrize(("config", "changes", "said"), [
    (DFLASH, {"architectures": ["Qwen3ForCausalLM"]}, "'architectures'.*a block drafter: DFlashDraftModel"),
    (DFLASH, {"attention_bias": True}, "'attention_bias'"),
    (DFLASH, {"hidden_act": "gelu"}, "'hidden_act'"),
    (DFLASH, {"draft_vocab_size": 32000}, "'draft_vocab_size': found 32000; supported: 248320"),
    (DFLASH, {"dflash_config": {"mask_token_id": 248320, "target_layer_ids": [1]}}, "'mask_token_id'"),
    (DFLASH, {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 1]}}, "'target_layer_ids'.*each layer once"),
    (DFLASH, {"dflash_config": {"mask_token_id": 4}}, "'aux_hidden_state_layer_ids'.*a list of layers from 1 on"),
    (DFLASH, {"layer_types": ["linear_attention"] * 5}, "'layer_types'"),
    (DFLASH, {"layer_types": ["sliding_attention"] * 5}, "'sliding_window'"),
    (DFLASH, {"block_size": 64}, "'block_size': found 64; supported: 2 to 32"),
    (DFLASH, {"num_key_value_heads": 5}, "'num_attention_heads'"),
    (DFLASH, {"num_attention_heads": 64, "num_key_value_heads": 1}, "'num_attention_heads / num_key_value_heads'.*at most 32"),
    (DFLASH, {"head_dim": 48}, "'head_dim': found 48; supported: a multiple of 32, at most 256"),
    (DFLASH, {"head_dim": 288}, "'head_dim'"),
    (DFLASH, {"architectures": [["DFlashDraftModel"]]}, "'architectures'"),
    (DFLASH, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'rope_type'.*default or yarn"),
    (DFLASH, {"rope_scaling": [1]}, "'rope_scaling'.*an object"),
    (DFLASH, {"rope_theta": 0}, "'rope_theta': found 0"),
    (DFLASH, {"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
    (DFLASH, {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "'rope_parameters'.*one rotation for all layers"),
    (DSPARK, {"rope_theta": 1.0}, "'rope_theta': found 1.0; supported: over 1 with YaRN"),
    (DFLASH, {"attention_sink_bias": True}, "'attention_sink_bias'"),
    (DFLASH2, {"dflash_config": DFLASH2["dflash_config"] | {"conv_group_size": 24}}, "'conv_group_size'"),
    (DFLASH2, {"dflash_config": DFLASH2["dflash_config"] | {"selector_top_k": 65}}, "'selector_top_k'"),
    (DSPARK, {"markov_head_type": "gated"}, "'markov_head_type': found 'gated'; supported: 'vanilla'"),
    (DSPARK, {"markov_rank": 0}, "'confidence_head_with_markov'"),
    (SPECULATORS, {"aux_hidden_state_layer_ids": [0, 3]}, "'aux_hidden_state_layer_ids'"),
])  # fmt: skip
def test_what_is_refused(config: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        DrafterShape.from_config(config | changes)


def test_a_model_over_several_streams_has_none() -> None:
    drafter, target = DrafterShape.from_config(DFLASH), published_shape("qwen3.5-27b")
    drafter.check_target(target)
    with pytest.raises(UnsupportedModelError, match="draft model: hc_count"):
        drafter.check_target(replace(target, n_streams=4))
