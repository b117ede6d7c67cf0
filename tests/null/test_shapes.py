"""Model geometry: the published numbers, and every rule by which a config is read or refused."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.qwen.published import PUBLISHED, published_shape
from deltic.models.qwen.shape import ModelShape
from deltic.models.vision.shape import VisionShape

# total parameters with MTP and vision, conv channels, recurrent MiB, conv MiB, KV bytes a token
PUBLISHED_NUMBERS = {
    "qwen3.5-0.8b": (873_438_784, 6144, 18, 0.63, 12_288),
    "qwen3.5-2b": (2_274_069_824, 6144, 18, 0.63, 12_288),
    "qwen3.5-4b": (4_659_865_088, 8192, 48, 1.12, 32_768),
    "qwen3.5-9b": (9_653_104_368, 8192, 48, 1.12, 32_768),
    "qwen3.5-27b": (27_781_427_952, 10240, 144, 2.81, 65_536),
    "qwen3.5-35b-a3b": (35_951_822_704, 8192, 60, 1.41, 20_480),
    "qwen3.5-122b-a10b": (125_086_497_008, 12288, 144, 2.53, 24_576),
    "qwen3.5-397b-a17b": (403_397_928_944, 12288, 180, 3.16, 30_720),
    "qwen3-next-80b-a3b": (81_324_862_720, 8192, 72, 1.69, 24_576),
}
ACTIVE_BILLIONS = {
    "qwen3.5-0.8b": 0.75,
    "qwen3.5-2b": 1.88,
    "qwen3.5-4b": 4.21,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.9,
    "qwen3.5-35b-a3b": 3.45,
    "qwen3.5-122b-a10b": 9.77,
    "qwen3.5-397b-a17b": 17.4,
    "qwen3-next-80b-a3b": 3.87,
}
# depth, width, MLP width
VISION_TOWERS = {
    "qwen3.5-0.8b": (12, 768, 3072),
    "qwen3.5-2b": (24, 1024, 4096),
    "qwen3.5-4b": (24, 1024, 4096),
    "qwen3-next-80b-a3b": None,
}


def n_mtp_params(shape: ModelShape) -> int:
    """One attention layer, three norms and the [H, 2H] projection: two layer counts tell one layer's size."""
    longer = dataclasses.replace(shape, layer_types=(*shape.layer_types, "full_attention"))
    return longer.n_params - shape.n_params + 3 * shape.hidden_size + 2 * shape.hidden_size**2


def n_vision_params(tower: tuple[int, int, int] | None, hidden_size: int) -> int:
    if tower is None:
        return 0
    depth, h, f = tower
    block = 4 * h + (3 * h * h + 3 * h) + (h * h + h) + (f * h + f) + (h * f + h)
    merger = 2 * h + (16 * h * h + 4 * h) + (hidden_size * 4 * h + hidden_size)
    return (h * 1536 + h) + 2304 * h + depth * block + merger


@pytest.mark.parametrize("name", PUBLISHED_NUMBERS)
def test_published_shapes_have_the_published_sizes(name: str) -> None:
    shape = PUBLISHED[name]
    total, channels, recurrent_mib, conv_mib, kv_bytes = PUBLISHED_NUMBERS[name]
    vision = n_vision_params(VISION_TOWERS.get(name, (27, 1152, 4304)), shape.hidden_size)
    assert shape.n_params + n_mtp_params(shape) + vision == total
    assert shape.conv_channels == channels
    assert shape.recurrent_state_bytes == recurrent_mib * 2**20
    assert shape.conv_state_bytes / 2**20 == pytest.approx(conv_mib, abs=0.006)
    assert shape.state_bytes == shape.recurrent_state_bytes + shape.conv_state_bytes
    assert dataclasses.replace(shape, state_dtype="bfloat16").recurrent_state_bytes * 2 == shape.recurrent_state_bytes
    assert shape.page_bytes() == 64 * kv_bytes
    assert shape.n_active_params / 1e9 == pytest.approx(ACTIVE_BILLIONS[name], rel=0.007)


def test_published_names_and_aliases() -> None:
    assert PUBLISHED["qwen3.6-27b"] is PUBLISHED["qwen3.5-27b"]
    assert published_shape("Qwen3.6-35B-A3B") is PUBLISHED["qwen3.5-35b-a3b"]
    with pytest.raises(UnsupportedModelError, match=r"qwen3\.5-0\.8b"):
        published_shape("qwen2-7b")


def wrapped_config() -> dict[str, Any]:
    """A config as the multimodal 0.8B release writes it."""
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "attention_bias": False,
        "intermediate_size": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 248044,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5", "depth": 12},
    }


def moe_config() -> dict[str, Any]:
    config = wrapped_config()
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    config["text_config"].update(
        num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512
    )
    return config


def next_config() -> dict[str, Any]:
    text = copy.deepcopy(wrapped_config()["text_config"])
    for absent in ("layer_types", "attn_output_gate", "mamba_ssm_dtype", "mtp_num_hidden_layers"):
        del text[absent]
    text["rope_parameters"] = None
    text.update(
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        rope_theta=10000000,
        partial_rotary_factor=0.25,
        rope_scaling=None,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )
    return text


GENERATION = {"eos_token_id": [248046, 248044]}


def test_operators_know_the_order_of_value_heads() -> None:
    shape = published_shape("qwen3.5-4b")
    assert not shape.gdn_heads.tiled
    tiled = dataclasses.replace(shape, tiled_value_heads=True)
    assert tiled.gdn_heads == dataclasses.replace(shape.gdn_heads, tiled=True)


def test_wrapped_config_is_the_published_shape() -> None:
    assert ModelShape.from_config(wrapped_config(), GENERATION) == PUBLISHED["qwen3.5-0.8b"]


def test_flat_config_and_flat_rope_fields_read_the_same() -> None:
    text = wrapped_config()["text_config"]
    rope = text.pop("rope_parameters")
    flat = {**text, **rope, "architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": True}
    assert ModelShape.from_config(flat, GENERATION) == PUBLISHED["qwen3.5-0.8b"]


def test_nested_model_type_is_not_trusted_and_outer_one_serves_without_architectures() -> None:
    config = wrapped_config()
    del config["architectures"]
    config["text_config"]["model_type"] = "qwen3_5_moe"
    assert ModelShape.from_config(config).family == "qwen3_5"


def test_absent_layer_types_follow_the_interval() -> None:
    shape = ModelShape.from_config(next_config(), None)
    assert [i for i, t in enumerate(shape.layer_types) if t == "full_attention"] == [3, 7, 11, 15, 19, 23]
    assert (shape.family, shape.mrope_section, shape.intermediate_size) == ("qwen3_next", None, 0)
    assert (shape.n_layers, shape.n_gdn_layers, shape.n_attn_layers) == (24, 18, 6)


def test_moe_without_norm_topk_prob_renormalises_and_next_obeys_its_field() -> None:
    assert ModelShape.from_config(moe_config()).norm_topk_prob
    assert not ModelShape.from_config({**next_config(), "norm_topk_prob": False}).norm_topk_prob


@pytest.mark.parametrize("where", ["top", "text", "nowhere"])
def test_tied_if_either_place_says_so(where: str) -> None:
    config = wrapped_config()
    del config["tie_word_embeddings"]
    {"top": config, "text": config["text_config"], "nowhere": {}}[where]["tie_word_embeddings"] = True
    assert ModelShape.from_config(config).tie_word_embeddings is (where != "nowhere")


def test_end_ids_are_the_union_generation_config_first() -> None:
    shape = ModelShape.from_config(wrapped_config(), {"eos_token_id": 248046})
    assert shape.eos_token_ids == (248046, 248044)
    assert ModelShape.from_config(wrapped_config(), None).eos_token_ids == (248044,)


def test_inv_freq_plain() -> None:
    freqs = PUBLISHED["qwen3.5-0.8b"].inv_freq()
    assert len(freqs) == 32
    assert freqs[0] == 1.0
    assert freqs[16] == pytest.approx(1e7**-0.5)
    assert PUBLISHED["qwen3.5-0.8b"].rope_attention_factor == 1.0


def test_inv_freq_yarn_keeps_fast_dims_and_divides_slow_ones() -> None:
    config = wrapped_config()
    config["text_config"]["rope_parameters"].update(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=262144
    )
    shape = ModelShape.from_config(config)
    plain = PUBLISHED["qwen3.5-0.8b"].inv_freq()
    ratios = [p / f for p, f in zip(plain, shape.inv_freq(), strict=True)]
    assert ratios[0] == 1.0
    assert ratios[-1] == pytest.approx(4.0)
    assert ratios == sorted(ratios)
    assert shape.rope_attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert shape.max_position_embeddings == 4 * 262144


def test_scaling_that_is_asked_for_takes_the_place_of_the_checkpoints() -> None:
    plain = PUBLISHED["qwen3.5-0.8b"]
    scaled = plain.scaled({"rope_type": "yarn", "factor": 4})
    assert scaled.max_position_embeddings == 4 * 262144 and scaled.inv_freq() != plain.inv_freq()
    half = scaled.scaled({"rope_type": "yarn", "factor": 2.0})
    assert half.max_position_embeddings == 2 * 262144  # of what it was made for
    assert scaled.scaled({"rope_type": "default"}) == plain
    published = {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    }
    assert plain.scaled({**published, "type": "yarn", "factor": 4.0}) == scaled  # as the model's page has it
    for given, words in (
        ({"rope_type": "yarn"}, "'factor'"),
        ({"rope_type": "linear", "factor": 4}, "default or yarn"),
        ({"rope_type": "yarn", "fator": 4}, "fields of it are rope_type, type, factor"),
        ({"rope_type": "yarn", "factor": 4, "rope_theta": 1e6}, "as the model has it"),
        ({"rope_type": "yarn", "factor": -1}, "'factor'"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            plain.scaled(given)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("output_gate_type", "sigmoid"),
        ("hidden_act", "gelu"),
        ("attn_output_gate", False),
        ("attention_bias", True),
        ("hidden_size", None),
        ("hidden_size", "1024"),
        ("vocab_size", 0),
        ("head_dim", 2.5),
        ("num_attention_heads", 7),
        ("linear_num_value_heads", 24),
        ("linear_conv_kernel_dim", 3),
        ("num_experts", 8),
        ("layer_types", ["linear_attention"] * 23 + ["sliding_attention"]),
        ("layer_types", ["linear_attention"] * 24),
        ("layer_types", ["linear_attention", "full_attention"]),
        ("eos_token_id", "</s>"),
        ("eos_token_id", 248320),
        ("tie_word_embeddings", "yes"),
        ("rope_parameters", "yarn"),
    ],
)
def test_refusals_name_the_field(field: str, value: Any) -> None:
    config = wrapped_config()
    config["text_config"][field] = value
    with pytest.raises(UnsupportedModelError, match=field) as refusal:
        ModelShape.from_config(config)
    assert refusal.value.field == field
    assert "supported" in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope_type", "longrope"), ("mrope_section", [11, 11, 11]), ("mrope_interleaved", False), ("rope_theta", 0)],
)
def test_rope_refusals(field: str, value: Any) -> None:
    config = wrapped_config()
    config["text_config"]["rope_parameters"][field] = value
    with pytest.raises(UnsupportedModelError, match=field):
        ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [("decoder_sparse_step", 2), ("mlp_only_layers", [0]), ("num_experts_per_tok", 513), ("num_experts", None)],
)
def test_moe_refusals(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        ModelShape.from_config({**next_config(), field: value})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "this is a Llama, or made like one (LlamaForCausalLM); Deltic serves",
        ),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "a Gemma (Gemma3"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "a plain Qwen3, without DeltaNet layers (Qwen3ForCausalLM)"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "a plain Qwen3 mixture"),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "a Qwen2.5-VL"),
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, "a Qwen3-VL"),
        ({"architectures": ["GptOssForCausalLM"]}, "a gpt-oss"),
        ({"model_type": "mistral"}, "a Mistral (mistral)"),
        ({"model_type": "qwen3"}, "a plain Qwen3"),
    ],
)
def test_models_of_others_are_named_as_what_they_are(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        ModelShape.from_config(config)
    assert said in str(refusal.value) and "Qwen3-Next, 3.5, 3.6, 3.8" in str(refusal.value)
    assert refusal.value.field in config and refusal.value.found in config.values()


@pytest.mark.parametrize(
    "name", ["Qwen3_5ForSequenceClassification", "Qwen3NextForQuestionAnswering", "NobodyKnowsForCausalLM"]
)
def test_what_is_not_known_is_not_guessed(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config field 'architectures': found \['{name}'\]; supported: "):
        ModelShape.from_config({"architectures": [name]})


def test_an_adapter_alone_is_told_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="a LoRA adapter; give its model, and --lora NAME="):
        ModelShape.from_directory(tmp_path)


def test_unknown_architecture_and_model_type_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        ModelShape.from_config({**wrapped_config(), "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match="model_type"):
        ModelShape.from_config({"model_type": "qwen5_exp"})


def flash_config() -> dict[str, Any]:
    """A config as the multimodal release of Qwen3.8-Flash-Next writes it."""
    config = moe_config()
    config |= {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "tie_word_embeddings": False,
    }
    config["text_config"].update(
        model_type="qwen4_exp_text",
        hidden_size=2560,
        num_hidden_layers=48,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12,
        num_attention_heads=24,
        linear_num_value_heads=48,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=640,
        shared_expert_intermediate_size=640,
        output_gate_type="sigmoid",
        hc_count=4,
        hc_lowrank=320,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=128,
        indexer_budget=2048,
        indexer_compress_ratio=4,
        ple_layer_ids=[2],
        ple_embed_dim=2560,
        ple_conv_kernel_size=4,
        ngram_size=3,
        heads_per_ngram=8,
        ngram_vocab_size_base=20_000_000,
        make_ngram_vocab_size_divisible_by=128,
        split_ngram_parts=128,
    )
    return config


def test_flash_next_is_the_published_shape() -> None:
    """To the parameter: files of 359,999,963,128 bytes hold them in bfloat16, and 35 integers of 64 bits."""
    shape = PUBLISHED["qwen3.8-flash-next"]
    assert ModelShape.from_config(flash_config(), GENERATION) == shape
    assert shape.ngrams is not None and shape.index is not None
    h, streams = shape.hidden_size, shape.stream_size
    longer = dataclasses.replace(shape, layer_types=(*shape.layer_types, "full_attention"))
    head = longer.n_params - shape.n_params + h + streams + 2 * h * h + 2 * shape.stream_rank * streams + streams
    vision = n_vision_params((27, 1152, 4304), h)
    assert 2 * (shape.n_params + head + vision + shape.ngrams.n_params) + 8 * 35 == 359_999_963_128
    assert shape.n_active_params / 1e9 == pytest.approx(7.31, abs=0.01)
    assert (shape.stream_size, shape.ngrams.layer, shape.ngrams.head_width, shape.ngrams.window) == (10240, 1, 160, 9)
    assert (shape.ngrams.n_rows, shape.ngrams.eos_id, shape.index.n_groups) == (320_001_536, 248044, 512)
    assert shape.state_bytes - shape.recurrent_state_bytes - shape.conv_state_bytes == 9 * 10240 * 2
    assert shape.page_bytes() == 12 * (2 * 2 * 64 * 256 * 2 + (64 + 16) * 128 * 2)
    assert shape.gdn_heads.sigmoid_gate and shape.norm_topk_prob


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hc_count", 1),
        ("hc_lowrank", 33),
        ("indexer_n_heads", None),
        ("indexer_kv_heads", 2),
        ("indexer_head_dim", 32),
        ("indexer_compress_ratio", 3),
        ("indexer_budget", 2047),
        ("ple_layer_ids", []),
        ("ple_layer_ids", [4]),
        ("ple_layer_ids", [2, 3]),
        ("ple_layer_ids", [0]),
        ("ple_embed_dim", 2500),
        ("ngram_size", 1),
        ("heads_per_ngram", 10**6),
        ("ngram_vocab_size_base", 0),
        ("seed", -1),
        ("seed", True),
        ("output_gate_type", "relu"),
        ("layer_types", ["sliding_attention"] * 48),
        ("eos_token_id", None),
    ],
)
def test_flash_next_refusals_name_the_field(field: str, value: Any) -> None:
    config = flash_config()
    config["text_config"][field] = value
    with pytest.raises(UnsupportedModelError) as refusal:
        ModelShape.from_config(config, GENERATION)
    assert refusal.value.field == field


def test_a_seed_of_0_is_one() -> None:
    """The multipliers that transformers makes of it."""
    config = flash_config()
    config["text_config"]["seed"] = 0
    found = ModelShape.from_config(config, GENERATION).ngrams
    assert found is not None and found.primes == PUBLISHED["qwen3.8-flash-next"].ngrams.primes  # type: ignore[union-attr]
    assert found.multipliers == (4788054244585, 5075510189727, 24189832309785)  # _build_layer_multipliers


def test_swish_gate_is_the_family_gate() -> None:
    config = wrapped_config()
    config["text_config"]["output_gate_type"] = "swish"
    assert ModelShape.from_config(config, GENERATION) == PUBLISHED["qwen3.5-0.8b"]


def test_operations_of_a_picture() -> None:
    """Of 16 patches, by hand: the embedding, a block's four products of 128 x 128 and two of 96 x 128, the merger, attention."""
    shape = VisionShape(depth=1, hidden_size=128, n_heads=2, intermediate_size=96, out_hidden_size=64)
    a_patch, a_token = 1536 * 128 + 4 * 128 * 128 + 2 * 96 * 128, 512 * 512 + 512 * 64
    assert shape.n_operations(16) == 2 * (16 * a_patch + 4 * a_token) + 4 * 16 * 16 * 128 == 11_665_408
