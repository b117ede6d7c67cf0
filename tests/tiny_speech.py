"""Tiny random Qwen3-TTS checkpoints on disk, in the published layout: every variant, text tokenizer and speech tokenizer included.

    path = tiny_speech("custom_voice", wide=True)

All parts of the real model are there (16 codes a frame, 1920 samples, split residual quantiser, three-part rope, biased text
projection, sliding window in the vocoder, an unused codebook entry), and no size is the one of a published model: what is
read from a constant instead of config.json shows. Widths are multiples of 32, but for the two encoders. Weights are scaled by fan-in, so that
every block moves the output. All values come from integers, and are the same on every machine: `golden/speech` was made from them.
Needs torch and safetensors only, since the reference package reads these files in an environment of its own.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VARIANTS = ("custom_voice", "voice_design", "base")
N_CODEBOOKS, N_CODES, FRAME_SAMPLES, SAMPLE_RATE = 16, 64, 1920, 24000
CODEC_VOCAB = N_CODES + 1024  # codes of the first book, then the control ids
TALKER = {"layers": 3, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 32}
PREDICTOR = {"layers": 2, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 32}
PREDICTOR_WIDTH, TEXT_WIDTH = 64, 96
VOCODER = {
    "latent_dim": 64,
    "codebook_dim": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "sliding_window": 12,
    "decoder_dim": 512,
}
ENCODER = {
    "hidden_size": 32,
    "num_filters": 4,
    "codebook_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "sliding_window": 25,
    "num_quantizers": 20,  # more than the 16 that are used, as published
    "vector_quantization_hidden_dimension": 16,
    "upsample_groups": 32,
}
SPEAKER_CHANNELS, SPEAKER_ATTENTION = [16, 16, 16, 16, 48], 8

LANGUAGES = {
    "chinese": 2055, "english": 2050, "german": 2053, "italian": 2070, "portuguese": 2071, "spanish": 2054,
    "japanese": 2058, "korean": 2064, "french": 2061, "russian": 2069, "beijing_dialect": 2074, "sichuan_dialect": 2062,
}  # fmt: skip
SPEAKERS = {
    "serena": 3066, "vivian": 3065, "uncle_fu": 3010, "ryan": 3061, "aiden": 2861, "ono_anna": 2873,
    "sohee": 2864, "eric": 2875, "dylan": 2878,
}  # fmt: skip
DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
CONTROL = {
    "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_think_id": 2154,
    "codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
}  # fmt: skip
"""The published ids; a tiny vocabulary has them as far behind its codes."""

ADDED_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"]
MERGED_WORDS = ["assistant", "user", "the", " the", " a", "hello", " world", " speech", "ing", "\n\n"]


def tiny_speech(variant: str, *, wide: bool = False, seed: int = 0) -> Path:
    """A checkpoint directory, made once in a process. wide: the talker is wider than the predictor, which has a projection then."""
    path = Path(_scratch()) / f"{variant}-{'wide' if wide else 'even'}-{seed}"
    if not path.exists():
        write_speech(path, variant, wide=wide, seed=seed)
    return path


def write_speech(path: Path, variant: str, *, wide: bool = False, seed: int = 0) -> None:
    """Writes a checkpoint of a variant (VARIANTS) into a directory that is not there yet."""
    assert variant in VARIANTS
    width = 2 * PREDICTOR_WIDTH if wide else PREDICTOR_WIDTH
    (path / "speech_tokenizer").mkdir(parents=True)
    ids, n_text = _write_tokenizer(path)
    _write_json(path / "config.json", _config(variant, width, ids, n_text))
    _write_json(path / "generation_config.json", _generation_config())
    feature = {"processor_class": "Qwen3TTSProcessor", "padding_side": "left", "padding_value": 0.0}
    _write_json(path / "preprocessor_config.json", feature | {"return_attention_mask": True})
    shapes = _talker_shapes(width, n_text) | (_speaker_shapes(width) if variant == "base" else {})
    tensors = {name: value.to(torch.bfloat16) for name, value in _values(shapes, seed).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _write_speech_tokenizer(path / "speech_tokenizer", seed + 1)


def tiny_audio(n_samples: int, seed: int = 0) -> Tensor:
    """float32 [n_samples] within [-1, 1]: a saw whose pitch and loudness move, and some noise. From integers only."""
    generator = torch.Generator().manual_seed(seed)
    n_parts = n_samples // 2400 + 1
    pitch = torch.randint(200, 1200, (n_parts,), generator=generator).repeat_interleave(2400)[:n_samples]
    loudness = torch.randint(64, 4096, (n_parts,), generator=generator).repeat_interleave(2400)[:n_samples]
    saw = pitch.cumsum(0) % 65536 - 32768
    noise = torch.randint(-2048, 2048, (n_samples,), generator=generator)
    return (saw * loudness // 8192 + noise).float() / 32768


# The main model.


def _config(variant: str, width: int, ids: dict[str, int], n_text: int) -> dict[str, Any]:
    offset = N_CODES - 2048
    is_custom = variant == "custom_voice"
    rope = {"interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default", "type": "default"}
    speaker = {"enc_channels": SPEAKER_CHANNELS, "enc_attention_channels": SPEAKER_ATTENTION}
    talker = _decoder_config(width, TALKER) | {
        "model_type": "qwen3_tts_talker",
        "vocab_size": CODEC_VOCAB,
        "rope_scaling": rope,
        "max_position_embeddings": 4096,
        "position_id_per_seconds": 13,
        "text_hidden_size": TEXT_WIDTH,
        "text_vocab_size": n_text,
        "codec_language_id": {name: i + offset for name, i in LANGUAGES.items()},
        "spk_id": {name: i + offset for name, i in SPEAKERS.items()} if is_custom else {},
        "spk_is_dialect": {name: DIALECTS.get(name, False) for name in SPEAKERS} if is_custom else {},
        **{name: i + offset for name, i in CONTROL.items()},
        "code_predictor_config": _decoder_config(PREDICTOR_WIDTH, PREDICTOR)
        | {
            "model_type": "qwen3_tts_talker_code_predictor",
            "vocab_size": N_CODES,
            "rope_scaling": None,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "layer_types": ["full_attention"] * PREDICTOR["layers"],
        },
    }
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_type": variant,
        "tts_model_size": "0b6" if width == PREDICTOR_WIDTH else "1b7",
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "assistant_token_id": ids["assistant"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "speaker_encoder_config": {"enc_dim": width, "sample_rate": SAMPLE_RATE, "enc_se_channels": 8} | speaker,
        "talker_config": talker,
    }


def _decoder_config(width: int, part: dict[str, int]) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": part["ffn"],
        "num_hidden_layers": part["layers"],
        "num_attention_heads": part["heads"],
        "num_key_value_heads": part["kv_heads"],
        "head_dim": part["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "attention_bias": False,
        "attention_dropout": 0,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "num_code_groups": N_CODEBOOKS,
    }


def _generation_config() -> dict[str, Any]:
    sampling = {"temperature": 0.9, "top_p": 1.0, "top_k": 50}
    predictor = {"subtalker_dosample": True} | {f"subtalker_{name}": v for name, v in sampling.items()}
    return {"do_sample": True, "repetition_penalty": 1.05, "max_new_tokens": 8192} | sampling | predictor


def _talker_shapes(width: int, n_text: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "talker.model.codec_embedding.weight": (CODEC_VOCAB, width),
        "talker.model.text_embedding.weight": (n_text, TEXT_WIDTH),
        "talker.codec_head.weight": (CODEC_VOCAB, width),
    }
    for name, n_out in (("linear_fc1", TEXT_WIDTH), ("linear_fc2", width)):
        shapes |= _with_bias(f"talker.text_projection.{name}", n_out, TEXT_WIDTH)
    shapes |= _decoder_shapes("talker.model", width, TALKER)
    predictor = "talker.code_predictor"
    for i in range(N_CODEBOOKS - 1):
        shapes[f"{predictor}.model.codec_embedding.{i}.weight"] = (N_CODES, width)
        shapes[f"{predictor}.lm_head.{i}.weight"] = (N_CODES, PREDICTOR_WIDTH)
    shapes |= _decoder_shapes(f"{predictor}.model", PREDICTOR_WIDTH, PREDICTOR)
    if width != PREDICTOR_WIDTH:
        shapes |= _with_bias(f"{predictor}.small_to_mtp_projection", PREDICTOR_WIDTH, width)
    return shapes


def _decoder_shapes(prefix: str, width: int, part: dict[str, int]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.norm.weight": (width,)}
    head_dim = part["head_dim"]
    for i in range(part["layers"]):
        layer = f"{prefix}.layers.{i}"
        for name, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (part[heads] * head_dim, width)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, part["heads"] * head_dim)
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        shapes |= _swiglu(f"{layer}.mlp", width, part["ffn"])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (width,)
    return shapes


def _speaker_shapes(width: int) -> dict[str, tuple[int, ...]]:
    first, *_, last = SPEAKER_CHANNELS
    shapes = _with_bias("speaker_encoder.blocks.0.conv", first, 128, 5)
    for i in (1, 2, 3):
        block = f"speaker_encoder.blocks.{i}"
        for name in ("tdnn1.conv", "tdnn2.conv"):
            shapes |= _with_bias(f"{block}.{name}", first, first, 1)
        for j in range(7):
            shapes |= _with_bias(f"{block}.res2net_block.blocks.{j}.conv", first // 8, first // 8, 3)
        shapes |= _with_bias(f"{block}.se_block.conv1", 8, first, 1)
        shapes |= _with_bias(f"{block}.se_block.conv2", first, 8, 1)
    shapes |= _with_bias("speaker_encoder.mfa.conv", last, last, 1)
    shapes |= _with_bias("speaker_encoder.asp.tdnn.conv", SPEAKER_ATTENTION, 3 * last, 1)
    shapes |= _with_bias("speaker_encoder.asp.conv", last, SPEAKER_ATTENTION, 1)
    return shapes | _with_bias("speaker_encoder.fc", width, 2 * last, 1)


# The speech tokenizer.


def _write_speech_tokenizer(path: Path, seed: int) -> None:
    """All checkpoints of one seed have the same file, linked after it was written once."""
    kept = Path(_scratch()) / f"speech_tokenizer-{seed}.safetensors"
    if not kept.exists():
        save_file(_values(_vocoder_shapes() | _encoder_shapes(), seed), kept, metadata={"format": "pt"})
    try:
        os.link(kept, path / "model.safetensors")
    except OSError:  # another file system
        shutil.copy(kept, path / "model.safetensors")
    vocoder = VOCODER | {
        "codebook_size": N_CODES,
        "num_quantizers": N_CODEBOOKS,
        "num_semantic_quantizers": 1,
        "semantic_codebook_size": 2 * N_CODES,  # this and the next are published as well, and read by nothing
        "vector_quantization_hidden_dimension": VOCODER["codebook_dim"],
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "rope_theta": 10000,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
    }
    encoder = ENCODER | {
        "codebook_size": N_CODES,
        "num_semantic_quantizers": 1,
        "audio_channels": 1,
        "upsampling_ratios": [8, 6, 5, 4],
        "_frame_rate": 12.5,
        "sampling_rate": SAMPLE_RATE,
        "kernel_size": 7,
        "last_kernel_size": 3,
        "residual_kernel_size": 3,
        "dilation_growth_rate": 2,
        "num_residual_layers": 1,
        "compress": 2,
        "use_causal_conv": True,
        "pad_mode": "constant",
        "use_conv_shortcut": False,
        "trim_right_ratio": 1.0,
        "hidden_act": "gelu",
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8000,
        "layer_scale_initial_scale": 0.01,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": False,
        "use_streaming": False,
        "normalize": False,
    }
    config = {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": N_CODEBOOKS,
        "input_sample_rate": SAMPLE_RATE,
        "output_sample_rate": SAMPLE_RATE,
        "decode_upsample_rate": FRAME_SAMPLES,
        "encode_downsample_rate": FRAME_SAMPLES,
        "dtype": "float32",
        "decoder_config": vocoder,
        "encoder_config": encoder,
    }
    _write_json(path / "config.json", config)
    _write_json(path / "configuration.json", {"framework": "pytorch", "task": "feature-extraction"})
    feature = {"feature_extractor_type": "EncodecFeatureExtractor", "feature_size": 1, "padding_value": 0.0}
    feature |= {"chunk_length_s": None, "overlap": None, "padding_side": "right", "return_attention_mask": True}
    _write_json(path / "preprocessor_config.json", feature | {"sampling_rate": SAMPLE_RATE})


def _vocoder_shapes() -> dict[str, tuple[int, ...]]:
    latent, book, hidden = VOCODER["latent_dim"], VOCODER["codebook_dim"], VOCODER["hidden_size"]
    attention = VOCODER["num_attention_heads"] * VOCODER["head_dim"]
    shapes = _with_bias("decoder.pre_conv.conv", latent, book, 3)
    for part, n in (("first", 1), ("rest", N_CODEBOOKS - 1)):
        quantizer = f"decoder.quantizer.rvq_{part}"
        shapes[f"{quantizer}.input_proj.weight"] = (book // 2, book, 1)  # stored, and not used to decode
        shapes[f"{quantizer}.output_proj.weight"] = (book, book // 2, 1)
        for i in range(n):
            shapes |= _codebook(f"{quantizer}.vq.layers.{i}._codebook", "embedding_sum", book // 2)
    transformer = "decoder.pre_transformer"
    shapes[f"{transformer}.norm.weight"] = (hidden,)
    shapes |= _with_bias(f"{transformer}.input_proj", hidden, latent)
    shapes |= _with_bias(f"{transformer}.output_proj", latent, hidden)
    for i in range(VOCODER["num_hidden_layers"]):
        layer = f"{transformer}.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (attention, hidden) for name in "qkv"}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, attention)
        shapes |= _swiglu(f"{layer}.mlp", hidden, VOCODER["intermediate_size"])
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (hidden,)
        shapes |= {f"{layer}.{name}_layer_scale.scale": (hidden,) for name in ("self_attn", "mlp")}
    for i in (0, 1):
        up = f"decoder.upsample.{i}"
        shapes |= {f"{up}.0.conv.weight": (latent, latent, 2), f"{up}.0.conv.bias": (latent,)}
        shapes |= _with_bias(f"{up}.1.dwconv.conv", latent, 1, 7)
        shapes |= {f"{up}.1.norm.weight": (latent,), f"{up}.1.norm.bias": (latent,), f"{up}.1.gamma": (latent,)}
        shapes |= _with_bias(f"{up}.1.pwconv1", 4 * latent, latent)
        shapes |= _with_bias(f"{up}.1.pwconv2", latent, 4 * latent)
    width = VOCODER["decoder_dim"]
    shapes |= _with_bias("decoder.decoder.0.conv", width, latent, 7)
    for i, rate in enumerate((8, 5, 4, 3)):
        block, half = f"decoder.decoder.{i + 1}.block", width // 2
        shapes |= {f"{block}.0.{name}": (width,) for name in ("alpha", "beta")}
        shapes |= {f"{block}.1.conv.weight": (width, half, 2 * rate), f"{block}.1.conv.bias": (half,)}
        for j in (2, 3, 4):
            shapes |= {f"{block}.{j}.act{k}.{name}": (half,) for k in (1, 2) for name in ("alpha", "beta")}
            shapes |= _with_bias(f"{block}.{j}.conv1.conv", half, half, 7)
            shapes |= _with_bias(f"{block}.{j}.conv2.conv", half, half, 1)
        width = half
    shapes |= {f"decoder.decoder.5.{name}": (width,) for name in ("alpha", "beta")}
    return shapes | _with_bias("decoder.decoder.6.conv", 1, width, 7)


def _encoder_shapes() -> dict[str, tuple[int, ...]]:
    width, hidden, book = ENCODER["num_filters"], ENCODER["hidden_size"], ENCODER["codebook_dim"]
    attention = ENCODER["num_attention_heads"] * ENCODER["head_dim"]
    layers = "encoder.encoder.layers"
    shapes = _with_bias(f"{layers}.0.conv", width, 1, 7)
    for i, rate in enumerate((4, 5, 6, 8)):
        shapes |= _with_bias(f"{layers}.{3 * i + 1}.block.1.conv", width // 2, width, 3)
        shapes |= _with_bias(f"{layers}.{3 * i + 1}.block.3.conv", width, width // 2, 1)
        shapes |= _with_bias(f"{layers}.{3 * i + 3}.conv", 2 * width, width, 2 * rate)
        width *= 2
    shapes |= _with_bias(f"{layers}.14.conv", hidden, width, 3)
    for i in range(ENCODER["num_hidden_layers"]):
        layer = f"encoder.encoder_transformer.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (attention, hidden) for name in "qkv"}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, attention)
        shapes[f"{layer}.mlp.fc1.weight"] = (ENCODER["intermediate_size"], hidden)
        shapes[f"{layer}.mlp.fc2.weight"] = (hidden, ENCODER["intermediate_size"])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{layer}.{norm}.weight": (hidden,), f"{layer}.{norm}.bias": (hidden,)}
        shapes |= {f"{layer}.{name}_layer_scale.scale": (hidden,) for name in ("self_attn", "mlp")}
    shapes["encoder.downsample.conv.weight"] = (hidden, hidden, 4)
    for part, n in (("semantic", 1), ("acoustic", ENCODER["num_quantizers"] - 1)):
        quantizer = f"encoder.quantizer.{part}_residual_vector_quantizer"
        shapes[f"{quantizer}.input_proj.weight"] = (book, hidden, 1)
        shapes[f"{quantizer}.output_proj.weight"] = (hidden, book, 1)
        for i in range(n):
            shapes |= _codebook(f"{quantizer}.layers.{i}.codebook", "embed_sum", book)
            shapes[f"{quantizer}.layers.{i}.codebook.initialized"] = (1,)
    return shapes


# Values.


def _with_bias(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _swiglu(name: str, width: int, ffn: int) -> dict[str, tuple[int, ...]]:
    both = {f"{name}.{part}_proj.weight": (ffn, width) for part in ("gate", "up")}
    return both | {f"{name}.down_proj.weight": (width, ffn)}


def _codebook(name: str, table: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.cluster_usage": (N_CODES,), f"{name}.{table}": (N_CODES, width)}  # usage first: it scales


def _values(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Nothing at its trivial value. Uniform values of the deviation that is wanted, each rounded once from an integer."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        value = (torch.randint(0, 65536, shape, generator=generator).float() - 32767.5) * (math.sqrt(3) / 32768)
        if name.endswith("initialized"):
            value = torch.ones(shape)
        elif name.endswith("cluster_usage"):
            value = 10.25 + 5.5 * value  # 0.7 to 19.8
            value[3] = 0  # never used in training: the divisor is floored
        elif name.endswith(("embedding_sum", "embed_sum")):
            usage = values[f"{name.rpartition('.')[0]}.cluster_usage"]
            value = 0.5 * value * usage.clamp(min=1e-5)[:, None]
        elif name.endswith(("embedding.weight", "_embedding.weight")) or ".codec_embedding." in name:
            value = 0.25 * value
        elif "norm" in name and name.endswith("weight"):
            value = 1 + 0.1 * value
        elif name.endswith((".scale", ".gamma")):
            value = 0.5 + 0.1 * value
        elif name.endswith((".alpha", ".beta")):
            value = 0.3 * value
        elif len(shape) == 1:
            value = 0.05 * value
        else:
            value = value / math.sqrt(_fan_in(name, shape))
        values[name] = value
    return values


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    if name.startswith("decoder.upsample") and ".0.conv" in name:
        return shape[0]  # transposed, (in, out, kernel): each output sees one tap
    if name.startswith("decoder.decoder") and ".block.1." in name:
        return 2 * shape[0]  # transposed, with two taps
    fan = math.prod(shape[1:])
    if name == "decoder.decoder.6.conv.weight":
        return 1000 * fan  # few samples beyond 1, where they are cut off
    return 2 * fan if ".conv1." in name or ".conv2." in name else fan


# The text tokenizer.


def _write_tokenizer(path: Path) -> tuple[dict[str, int], int]:
    """Byte-level BPE files as Qwen2's, without a tokenizer.json. Ids by token, and the rows of the text table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    vocab = {letter: i for i, letter in enumerate(sorted(letters.values()))}
    merges: list[str] = []
    for word in MERGED_WORDS:
        token = ""
        for letter in (letters[byte] for byte in word.encode()):
            if token and f"{token} {letter}" not in merges:
                merges.append(f"{token} {letter}")
            token += letter
            vocab.setdefault(token, len(vocab))
    _write_json(path / "vocab.json", vocab)
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    ids = vocab | {token: len(vocab) + i for i, token in enumerate(ADDED_TOKENS)}
    flags = {name: False for name in ("lstrip", "rstrip", "normalized", "single_word")} | {"special": True}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 131072,
        "bos_token": None,
        "unk_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "errors": "replace",
        "split_special_tokens": False,
        "add_prefix_space": False,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": ADDED_TOKENS[1:],
        "added_tokens_decoder": {str(ids[token]): {"content": token} | flags for token in ADDED_TOKENS},
    }
    _write_json(path / "tokenizer_config.json", config)
    return ids, math.ceil(len(ids) / 32) * 32


@functools.cache
def _scratch() -> str:
    path = tempfile.mkdtemp(prefix="deltic-speech-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
