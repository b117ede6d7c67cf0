"""config.json and ids of the tiny checkpoints of tests/tiny.py, without torch."""

from __future__ import annotations

from typing import Any

_ADDED = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> "
    "<|file_sep|> <tool_response> </tool_response> <think> </think> <|audio_start|> <|audio_end|> <tts_pad> "
    "<tts_text_bos> <tts_text_eod> <tts_text_bos_single> <|audio_pad|>"
)
ADDED_TOKENS = _ADDED.split()
NOT_SPECIAL = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
TOKEN_ID = {token: 256 + i for i, token in enumerate(ADDED_TOKENS)}
N_REAL_VOCAB = 256 + len(ADDED_TOKENS)
VOCAB_SIZE = 512
EOS_TOKEN_IDS = (TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"])

HIDDEN, N_Q_HEADS, N_KV_HEADS, HEAD_DIM = 256, 4, 2, 256
N_K_HEADS, K_DIM, V_DIM, CONV_WIDTH = 2, 128, 128, 4
FFN, N_EXPERTS, EXPERT_WIDTH, SHARED_WIDTH = 512, 16, 128, 128
N_STREAMS, STREAM_RANK, INDEX_HEADS, INDEX_DIM, INDEX_BUDGET, N_TABLE_PARTS = 4, 32, 4, 128, 64, 4

_ARCHITECTURE = {
    ("dense", "wrapped"): "Qwen3_5ForConditionalGeneration",
    ("dense", "flat"): "Qwen3_5ForCausalLM",
    ("moe", "wrapped"): "Qwen3_5MoeForConditionalGeneration",
    ("moe", "flat"): "Qwen3_5MoeForCausalLM",
    ("next", "flat"): "Qwen3NextForCausalLM",
    ("flash", "wrapped"): "Qwen4ExpForConditionalGeneration",
    ("flash", "flat"): "Qwen4ExpForCausalLM",
}


def tiny_config(kind: str, *, tied: bool, layout: str, n_layers: int = 4) -> dict[str, Any]:
    """config.json as the published checkpoints of this kind write it."""
    n_v_heads = n_v_heads_of(kind)
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_hidden_layers": n_layers,
        "num_attention_heads": N_Q_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "linear_conv_kernel_dim": CONV_WIDTH,
        "linear_key_head_dim": K_DIM,
        "linear_value_head_dim": V_DIM,
        "linear_num_key_heads": N_K_HEADS,
        "linear_num_value_heads": n_v_heads,
        "full_attention_interval": 4,
        "tie_word_embeddings": tied,
        "eos_token_id": TOKEN_ID["<|endoftext|>"],
        "dtype": "bfloat16",
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
    if kind == "dense":
        text["intermediate_size"] = FFN
    else:
        text |= {
            "num_experts": N_EXPERTS,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": EXPERT_WIDTH,
            "shared_expert_intermediate_size": SHARED_WIDTH,
        }
    architectures = [_ARCHITECTURE[kind, layout]]
    if kind == "next":
        moe = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        head = {"architectures": architectures, "model_type": "qwen3_next"}
        return head | text | moe | {"rope_parameters": rope, "partial_rotary_factor": 0.25}
    model_type = {"dense": "qwen3_5", "moe": "qwen3_5_moe", "flash": "qwen4_exp"}[kind]
    if kind == "flash":
        text |= {
            "output_gate_type": "sigmoid",
            "hc_count": N_STREAMS,
            "hc_lowrank": STREAM_RANK,
            "indexer_n_heads": INDEX_HEADS,
            "indexer_kv_heads": 1,
            "indexer_head_dim": INDEX_DIM,
            "indexer_budget": INDEX_BUDGET,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [2],
            "ple_embed_dim": HIDDEN,
            "ple_conv_kernel_size": 4,
            "ngram_size": 3,
            "heads_per_ngram": 4,
            "ngram_vocab_size_base": 1000,
            "make_ngram_vocab_size_divisible_by": 128,
            "split_ngram_parts": N_TABLE_PARTS,
        }
    text |= {
        "rope_parameters": rope | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(n_layers)],
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "model_type": f"{model_type}_text",
    }
    if layout == "flat":
        return {"architectures": architectures} | text
    vision = {
        "depth": 1,
        "hidden_size": 144,
        "num_heads": 2,
        "intermediate_size": 192,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
    }
    return {
        "architectures": architectures,
        "model_type": model_type,
        "tie_word_embeddings": tied,
        "image_token_id": TOKEN_ID["<|image_pad|>"],
        "video_token_id": TOKEN_ID["<|video_pad|>"],
        "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
        "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
        "text_config": text,
        "vision_config": vision | {"model_type": model_type},
    }


def n_v_heads_of(kind: str) -> int:
    return 6 if kind in ("dense", "flash") else 4
