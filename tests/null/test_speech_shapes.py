"""Speech checkpoints' configs: what is read, what is refused, and the ids of rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from deltic.models.fields import UnsupportedModelError
from deltic.models.tts.shape import (
    FRAME,
    N_SIDE,
    NO_SIDE,
    NO_TEXT,
    PUBLISHED_SPEECH,
    SPEAKER,
    SpeechShape,
    codec_side,
    is_speech_config,
    row_id,
    split_row,
)
from deltic.models.vocoder.shape import MAX_REF_FRAMES

DECODER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "attention_bias": False,
    "use_sliding_window": False, "num_code_groups": 16,
}  # fmt: skip
TALKER = DECODER | {
    "vocab_size": 3072, "text_vocab_size": 1000, "text_hidden_size": 96, "max_position_embeddings": 32768,
    "rope_scaling": {"interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default", "type": "default"},
    "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_think_id": 2154, "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
    "codec_language_id": {"Chinese": 2055, "english": 2050, "sichuan_dialect": 2062},
    "spk_id": {"Vivian": 3065, "Eric": 2875}, "spk_is_dialect": {"Vivian": False, "Eric": "sichuan_dialect"},
    "code_predictor_config": DECODER | {"vocab_size": 2048, "rope_scaling": None},
}  # fmt: skip
CONFIG = {
    "architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts", "tts_model_type": "custom_voice",
    "tts_model_size": "1b7", "tokenizer_type": "qwen3_tts_tokenizer_12hz", "im_start_token_id": 900, "im_end_token_id": 901,
    "assistant_token_id": 77, "tts_pad_token_id": 902, "tts_bos_token_id": 903, "tts_eos_token_id": 904, "talker_config": TALKER,
}  # fmt: skip
TOKENIZER = {
    "output_sample_rate": 24000, "decode_upsample_rate": 1920, "encoder_valid_num_quantizers": 16,
    "decoder_config": {
        "latent_dim": 64, "codebook_dim": 64, "codebook_size": 2048, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 12,
        "rope_theta": 10000, "rms_norm_eps": 1e-5, "decoder_dim": 512, "num_quantizers": 16, "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    },
}  # fmt: skip


def changed(path: str, value: Any) -> SpeechShape:
    """The shape of the config with one field changed: `path` goes through config.json, or from `tokenizer` on."""
    config, tokenizer = copy.deepcopy(CONFIG), copy.deepcopy(TOKENIZER)
    at: Any = {"config": config, "tokenizer": tokenizer}
    *parents, last = path.split("/")
    for name in parents:
        at = at[name]
    at[last] = value
    return SpeechShape.from_config(config, tokenizer, {})


def test_a_config_is_read() -> None:
    generation = {"temperature": 0.7, "top_k": 20, "subtalker_dosample": False, "max_new_tokens": 99}
    shape = SpeechShape.from_config(CONFIG, TOKENIZER, generation)
    assert is_speech_config(CONFIG) and not is_speech_config({"model_type": "qwen3_5"})
    assert (shape.variant, shape.n_drawn, shape.end_id) == ("custom_voice", 2049, 2048)
    assert shape.languages == {"chinese": 2055, "english": 2050} and shape.dialects == {"sichuan_dialect": 2062}
    assert shape.speakers == {"vivian": 3065, "eric": 2875} and shape.takes_instructions
    assert not shape.has_projection and shape.ids.codec_eos == 2150 and shape.ids.tts_eos == 904
    sampling = shape.sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.7, 20, 1.05)
    assert (sampling.subtalker_temperature, sampling.max_new_tokens) == (0.0, 99)


def test_languages_and_dialects() -> None:
    shape = SpeechShape.from_config(CONFIG, TOKENIZER, {})
    assert shape.language_id(None) is None is shape.language_id("Auto", "vivian")
    assert shape.language_id("English", "eric") == 2050
    assert shape.language_id("auto", "Eric") == shape.language_id("CHINESE", "eric") == 2062
    assert shape.language_id("chinese", "vivian") == 2055
    for name in ("klingon", "sichuan_dialect"):
        with pytest.raises(KeyError):
            shape.language_id(name)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("config/tts_model_type", "singer", "tts_model_type"),
        ("config/tokenizer_type", "qwen3_tts_tokenizer_25hz", "tokenizer_type"),
        ("config/tts_pad_token_id", 1000, "tts_pad_token_id"),
        ("config/tts_bos_token_id", None, "tts_bos_token_id"),
        ("config/talker_config", None, "talker_config"),
        ("config/talker_config/num_code_groups", 32, "num_code_groups"),
        ("config/talker_config/vocab_size", 3073, "vocab_size"),
        ("config/talker_config/hidden_size", 0, "hidden_size"),
        ("config/talker_config/hidden_act", "gelu", "hidden_act"),
        ("config/talker_config/num_attention_heads", 3, "num_attention_heads"),
        ("config/talker_config/rope_scaling", {"rope_type": "yarn"}, "rope_type"),
        ("config/talker_config/text_vocab_size", 600000, "text_vocab_size"),
        ("config/talker_config/codec_eos_token_id", 7, "codec_eos_token_id"),
        ("config/talker_config/codec_language_id", {"english": 4000, "sichuan_dialect": 2062}, "codec_language_id.english"),
        ("config/talker_config/spk_id", {}, "spk_id"),
        ("config/talker_config/spk_is_dialect", {"Eric": "klingon"}, "spk_is_dialect.Eric"),
        ("config/talker_config/spk_is_dialect", ["Eric"], "spk_is_dialect"),
        ("config/talker_config/code_predictor_config/use_sliding_window", True, "use_sliding_window"),
        ("tokenizer/decode_upsample_rate", 960, "decode_upsample_rate"),
        ("tokenizer/decoder_config/codebook_size", 1024, "codebook_size"),
        ("tokenizer/decoder_config/num_quantizers", 32, "num_quantizers"),
        ("tokenizer/decoder_config/upsample_rates", [8, 5, 4, 2], "upsample_rates"),
        ("tokenizer/decoder_config/latent_dim", "wide", "latent_dim"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(path: str, value: Any, field: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        changed(path, value)
    assert error.value.field == field


def test_row_ids() -> None:
    """Every sum has an id of its own, below 2^31 for the published vocabulary."""
    sides = [NO_SIDE, codec_side(0), codec_side(3071), SPEAKER, FRAME, FRAME + MAX_REF_FRAMES - 1]
    assert sides == sorted(set(sides)) and sides[-1] == N_SIDE - 1
    for text in (NO_TEXT, 0, 1, 151935):
        for side in sides:
            assert split_row(row_id(text, side)) == (text, side)
    shape = PUBLISHED_SPEECH["qwen3-tts-1.7b"]
    assert row_id(shape.text_vocab_size - 1, N_SIDE - 1) == shape.n_prompt_ids - 1 < 2**31 - 1
    assert row_id() == 0


def test_published_shapes() -> None:
    """Parameters as counted in the published files, which have norms and biases, and the speaker's encoder of Base, besides."""
    for name, n_params in (("qwen3-tts-0.6b", 905_788_672), ("qwen3-tts-1.7b", 1_916_676_352)):
        shape = PUBLISHED_SPEECH[name]
        assert 0 < n_params - shape.n_params < 200_000
        assert shape.page_bytes() == 64 * 112 * 1024
    assert PUBLISHED_SPEECH["qwen3-tts-1.7b"].has_projection
    assert not PUBLISHED_SPEECH["qwen3-tts-0.6b"].takes_instructions
