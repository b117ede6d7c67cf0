"""GGUF: what a file says equals what the checkpoint says that it was made of, and a damaged one is refused, soon.

The oracle of blocks and headers is the published gguf package; tests/tiny_gguf.py makes the files as llama.cpp's
converter does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import httpx
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from deltic.config import EngineConfig, ModelConfig, ServerConfig
from deltic.engine.guides import Guides, Vocabulary
from deltic.models.checkpoint import (
    DEMO,
    locate,
    model_name,
    n_real_ids,
    resolve_model,
    speaks,
    text_directory,
    tokenizer_directory,
    tokenizer_json,
)
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.files import check_plan, open_tensors
from deltic.models.gguf import QUANTISED, TYPES, chosen, gguf_in, open_gguf, tower_beside
from deltic.models.gguf_blocks import BLOCKS, decoded
from deltic.models.gguf_config import document
from deltic.models.gguf_tensors import stored_tensors
from deltic.models.hub import DownloadFailed, is_hub_name
from deltic.models.loading import COUNTED, Declaration
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import declare_weights
from deltic.models.stored import formats_of
from deltic.ops.arrays import Array
from deltic.ops.formats import CODEBOOKS, TABLES, Quantised, book_of, codes_in
from deltic.server.chat.template import ChatTemplate
from deltic.server.downloads import fetched
from deltic.server.serve import Served, _service
from deltic.server.service import Server
from deltic.text import SamplingDefaults, Tokenizer, TokenizerError
from tests.fake_engine import FakeEngineClient
from tests.fake_hub import hub_with
from tests.null.test_serve import server_of
from tests.tiny import tiny_checkpoint
from tests.tiny_config import HIDDEN, VOCAB_SIZE
from tests.tiny_gguf import checkpoint_values, mtp_values, tiled, tiny_gguf, write_gguf

TYPE = gguf.GGMLQuantizationType


def all_of(tensor: Any) -> Array:
    """Every value of a stored tensor, float32, in its shape."""
    rows = tensor.read(0, int(np.prod(tensor.shape[:-1])))
    values = rows.values() if isinstance(rows, Quantised) else rows.astype(np.float32)
    return np.asarray(values).reshape(tensor.shape)


def test_types_are_those_of_the_package() -> None:
    published = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in TYPE}
    found = {number: said for number, said in published.items() if number in TYPES}
    assert found | {42: ("Q2_0", 64, 18)} == TYPES, "Q2_0 is newer than the package: llama.cpp's ggml-common.h"


def random_blocks(type: str, seed: int) -> Array:
    """uint8 [64, 1024 / block, bytes]: every bit pattern that a file may have."""
    generator = np.random.default_rng(seed)
    block, n_bytes = next(sizes for name, *sizes in TYPES.values() if name == type)
    data = generator.integers(0, 256, (64, 1024 // block, n_bytes), np.uint8)
    parts = data.view([(name, kind, (n,)) for name, kind, n in BLOCKS[type]])
    for name in {"d", "m"} & set(parts.dtype.names):
        parts[name] = generator.normal(0, 1, parts[name].shape) * 10.0 ** generator.integers(-6, 3, parts[name].shape)
    if "e" in parts.dtype.names:  # above, weights are infinite, or no numbers
        parts["e"] = generator.integers(0, 127 if type == "NVFP4" else 250, parts["e"].shape)
    if type == "IQ1_M":  # not the bits of an infinite number
        parts["scales"][..., 3] &= 0xBFFF
    if type == "TQ2_0":
        parts["qs"] = parts["qs"] & ~(parts["qs"] >> 1 & 0x55)
    return data.reshape(64, -1)


def published_values(type: str, data: Array) -> Array:
    """float32 [n, K]. The package does not dequantise two types; theirs is what llama.cpp's ggml-quants.c does."""
    if type not in ("Q1_0", "Q2_0"):
        return np.asarray(gguf.quants.dequantize(data, TYPE[type]))
    blocks = data.reshape(len(data), -1, 18)
    d, codes = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32), blocks[..., 2:]
    if type == "Q1_0":
        values = np.where(np.unpackbits(codes, axis=-1, bitorder="little"), d, -d)
    else:
        values = (
            (codes[..., None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(*d.shape[:2], -1) - np.float32(1)
        ) * d
    return values.reshape(len(data), -1)


@pytest.mark.parametrize("type", QUANTISED)
def test_blocks_mean_what_the_package_says(type: str) -> None:
    """To the bit, for every bit pattern of codes and scales."""
    data = random_blocks(type, QUANTISED.index(type))
    rows = decoded(type, data, "a tensor")
    published = published_values(type, data)
    zero = np.float32(0)  # its sign aside
    assert np.array_equal((rows.values() + zero).view(np.int32), (published + zero).view(np.int32))
    for part, dtype, size in zip(
        (rows.scale, rows.least, rows.outer), rows.format.dtypes, rows.format.sizes(1024), strict=True
    ):
        if part is None or size is None:
            assert part is None and size is None
        else:
            assert (part.dtype, part.shape) == (np.dtype(dtype), (64, *size))
    assert rows.codes.dtype == np.uint8 and np.array_equal(rows.codes, codes_in(rows.format.codes, rows.codes))


def test_codebooks_are_the_package_s() -> None:
    """Entry for entry. Theirs are counted in units of their own, of iq1 before its offset."""
    unit = {"iq1": 8.0, "iq3_xxs": 2.0, "iq3_s": 8.0}
    for codes, name in {
        codes: "IQ1_S" if codes == "iq1" else codes.upper() for codes in CODEBOOKS if codes != "sign"
    }.items():
        published = getattr(gguf.quants, name)
        published.init_grid()
        found = np.array(TABLES[codes], np.float32)[book_of(codes)] - (codes == "iq1")
        assert np.array_equal(found, published.grid[0, 0] * unit.get(codes, 1.0)), codes


@pytest.mark.parametrize(("type", "n_experts"), [("NVFP4", None), ("NVFP4", 16)])
def test_a_tensor_s_own_scale_multiplies_its_weights(tmp_path: Path, type: str, n_experts: int | None) -> None:
    """NVFP4 has one beside it, or one of each expert; what rows were scaled with when they were made is not used."""
    name = "blk.2.ffn_down_exps" if n_experts else "blk.0.attn_qkv"
    scales = np.linspace(0.5, 2.0, n_experts or 1, dtype=np.float32)

    def change(writer: Any) -> None:
        writer.add_tensor(f"{name}.scale", scales)
        writer.add_tensor(f"{name}.input_scale", scales)

    source = tiny_checkpoint("moe", layout="flat", experts="fused")
    path = write_gguf(source, tmp_path / "scaled.gguf", type, change=change)
    tensors, plain = stored_tensors(open_gguf(path)), stored_tensors(open_gguf(tiny_gguf("moe", type)))
    assert tensors.keys() == plain.keys()
    wanted = [f"model.layers.2.mlp.experts.{e}.down_proj.weight" for e in range(n_experts or 0)]
    for name, scale in zip(wanted or ["model.layers.0.linear_attn.in_proj_qkv.weight"], scales, strict=True):
        some, whole = tensors[name].read(3, 5), all_of(plain[name])
        assert isinstance(some, Quantised)
        assert np.allclose(some.values(), whole[3:5] * scale, rtol=2e-7, atol=0)


@pytest.mark.parametrize("bad", [np.array([np.nan], np.float32), np.array([0], np.float32), np.ones(3, np.float32)])
def test_a_tensor_s_own_scale_that_is_none(tmp_path: Path, bad: Array) -> None:
    def change(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_qkv.scale", bad)

    path = write_gguf(
        tiny_checkpoint("dense", layout="flat", experts="fused"), tmp_path / "scaled.gguf", "NVFP4", change=change
    )
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_qkv\.scale' (is F32 \[3\]; expected|has scales that)"):
        stored_tensors(open_gguf(path))


def test_codes_that_no_such_type_has_name_the_tensor() -> None:
    data = random_blocks("TQ2_0", 0)
    data[3, 7] |= 3
    with pytest.raises(CheckpointError, match=r"some\.gguf: 'a' has codes that TQ2_0 has not"):
        decoded("TQ2_0", data, "some.gguf: 'a'")


@pytest.mark.parametrize("type", QUANTISED)
def test_scales_that_are_not_finite_name_the_tensor(type: str) -> None:
    data = random_blocks(type, 0)
    parts = data.view([(name, kind, (n,)) for name, kind, n in BLOCKS[type]])
    for name in {"d", "m", "e", "scales" if type == "IQ1_M" else "d"} & set(parts.dtype.names):
        bad = data.copy()
        bad.view(parts.dtype)[name][1, -1] = 0xFF if name == "e" else 0xFFFF if name == "scales" else np.nan
        with pytest.raises(CheckpointError, match=r"some\.gguf: 'a' has scales that are not finite"):
            decoded(type, bad, "some.gguf: 'a'")


def expected(kind: str) -> dict[str, Array]:
    """What a file of this kind gives, by names: the checkpoint's values, and a draft head's."""
    source = tiny_checkpoint(kind, layout="flat", experts="fused")
    config = json.loads((source / "config.json").read_text())
    values = checkpoint_values(source)
    values |= mtp_values(values, config)
    n_k, n_v = config["linear_num_key_heads"], config["linear_num_value_heads"]
    found: dict[str, Array] = {}
    if kind == "flash":
        shards = [values.pop(name) for name in sorted(values) if ".ngram_embedding.shard_" in name]
        found["per_layer_token_embd.weight"] = np.concatenate(shards)
        values = {name: tensor for name, tensor in values.items() if ".ple_embedding." not in name}
        for name in [name for name in values if name.endswith("index_qk_proj.weight")]:
            both = values.pop(name)
            found[name.replace("index_qk", "q")], found[name.replace("index_qk", "k")] = both[:-128], both[-128:]
    for name, tensor in values.items():
        prefix, _, last = name.rpartition(".experts.")
        part = name.rpartition("linear_attn.")[2]
        if last == "gate_up_proj":
            for e, both in enumerate(tensor):
                for half, own in zip(("gate", "up"), np.split(both, 2), strict=True):
                    found[f"{prefix}.experts.{e}.{half}_proj.weight"] = own
        elif last == "down_proj":
            found |= {f"{prefix}.experts.{e}.down_proj.weight": own for e, own in enumerate(tensor)}
        elif part == "in_proj_qkvz.weight":
            by_head = tensor.reshape(n_k, -1, HIDDEN)
            parts = [p.reshape(-1, HIDDEN) for p in np.split(by_head, [128, 256, 256 + 128 * n_v // n_k], axis=1)]
            found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = np.concatenate(parts[:3]), parts[3]
        elif kind == "next" or part == name or part in ("norm.weight", "in_proj_ba.weight"):
            found[name] = tensor
        elif part in ("in_proj_qkv.weight", "conv1d.weight"):
            found[name] = np.concatenate([tensor[: n_k * 256], tiled(tensor[n_k * 256 :], n_k, n_v)])
        else:
            found[name] = tiled(tensor, n_k, n_v, axis=1 if part == "out_proj.weight" else 0)
    return found


@pytest.mark.parametrize(
    ("kind", "n_files", "is_fused"),
    [("dense", 3, False), ("moe", 1, True), ("moe", 2, False), ("next", 1, False), ("flash", 2, False)],
)
def test_tensors_have_the_checkpoint_s_names_and_values(kind: str, n_files: int, is_fused: bool) -> None:
    tensors = stored_tensors(open_gguf(tiny_gguf(kind, "F32", n_files=n_files, has_mtp=True, is_fused=is_fused)))
    values = expected(kind)
    assert tensors.keys() == values.keys()
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.format, tensor.dtype) == (values[name].shape, None, "F32"), name
        if name.endswith("A_log") or ("norm" in name and "linear_attn" not in name):
            assert np.allclose(all_of(tensor), values[name], rtol=0, atol=5e-7), name
        else:
            assert np.array_equal(all_of(tensor), values[name]), name


def test_the_tiled_order_of_value_heads() -> None:
    """Head p of the file belongs to key head p % Hk."""
    heads = np.repeat(np.arange(6), 128)  # grouped: three of key head 0, three of key head 1
    assert tiled(heads, 2, 6)[::128].tolist() == [0, 3, 1, 4, 2, 5]
    assert tiled(heads[None], 2, 6, axis=1)[0, ::128].tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    "type", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "MXFP4", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ1_M"]
)
def test_any_rows_of_any_tensor(type: str) -> None:
    """Views of experts and ranges of rows are those of the whole tensor, as gguf's own reader has it."""
    path = tiny_gguf("moe", type, is_fused=True)
    whole = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    whole = {name: np.asarray(values).reshape(-1, values.shape[-1]) for name, values in whole.items()}
    tensors = stored_tensors(open_gguf(path))
    qkv = tensors["model.layers.0.linear_attn.in_proj_qkv.weight"]
    assert qkv.dtype == type and (qkv.format is None) == (type in ("F16", "BF16"))
    assert str(path) in qkv.where and "'blk.0.attn_qkv.weight'" in qkv.where
    for begin, end in ((0, 1), (5, 77), (1023, 1024), (7, 7)):
        rows = qkv.read(begin, end)
        values = rows.values() if isinstance(rows, Quantised) else rows.astype(np.float32)
        assert np.array_equal(values, whole["blk.0.attn_qkv.weight"][begin:end])
    both = whole["blk.2.ffn_gate_up_exps.weight"].reshape(16, 256, HIDDEN)
    down = whole["blk.2.ffn_down_exps.weight"].reshape(16, HIDDEN, 128)
    for e in (0, 3, 15):
        gate, up, own = (
            tensors[f"model.layers.2.mlp.experts.{e}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        assert np.array_equal(all_of(gate), both[e, :128]) and np.array_equal(all_of(up), both[e, 128:])
        assert np.array_equal(all_of(own), down[e])


def test_a_vector_is_one_row() -> None:
    tensors = stored_tensors(open_gguf(tiny_gguf("moe")))
    for name in ("model.norm.weight", "model.layers.0.mlp.shared_expert_gate.weight"):
        rows = tensors[name].read(0, 1)
        assert not isinstance(rows, Quantised) and rows.shape == (1, HIDDEN)


@pytest.mark.parametrize("kind", ["dense", "moe", "next", "flash"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_shape_is_the_checkpoint_s(kind: str, tied: bool) -> None:
    path = tiny_gguf(kind, tied=tied, has_mtp=not tied)
    shape = ModelShape.from_directory(tiny_checkpoint(kind, tied=tied, layout="flat", experts="fused"))
    assert ModelShape.from_directory(path) == dataclasses.replace(shape, tiled_value_heads=kind != "next")
    assert ("lm_head.weight" in stored_tensors(open_gguf(path))) != tied


def changed(tmp_path: Path, change: Callable[[Any], None], kind: str = "dense") -> Path:
    """A file with more in its metadata."""
    source = tiny_checkpoint(kind, layout="flat", experts="fused")
    return write_gguf(source, tmp_path / "changed.gguf", change=change)


def test_further_metadata(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_array("qwen35.attention.recurrent_layers", [True, False, False, True])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(1024)
        writer.add_rope_scaling_yarn_beta_fast(16.0)
        writer.add_array("qwen35.attention.head_count_kv", [0, 2, 2, 0])
        for name, value in {"temp": 0.6, "top_p": 0.95, "min_p": 0.01, "penalty_repeat": 1.1}.items():
            writer.add_float32(f"general.sampling.{name}", value)
        writer.add_uint32("general.sampling.top_k", 20)
        writer.add_eot_token_id(261)

    path = changed(tmp_path, change)
    shape = ModelShape.from_directory(path)
    assert [kind[:4] for kind in shape.layer_types] == ["line", "full", "full", "line"] and shape.n_kv_heads == 2
    assert shape.yarn is not None and shape.max_position_embeddings == 4096
    assert (shape.yarn.factor, shape.yarn.beta_fast, shape.yarn.beta_slow) == (4.0, 16.0, 1.0)
    assert shape.yarn.original_max_position_embeddings == 1024 and shape.eos_token_ids == (258, 261, 256)
    defaults = SamplingDefaults.load(path)
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.95, 20)
    assert (defaults.min_p, defaults.repetition_penalty) == (0.01, 1.1), "as they were written, not as float32 has them"


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        (
            "general.architecture",
            "llama",
            r"this is a Llama, or made like one \(llama\); Deltic serves Qwen's gated-DeltaNet hybrids",
        ),
        (
            "qwen35.rope.scaling.type",
            "linear",
            "'qwen35.rope.scaling.type': found 'linear'; supported: 'none' or 'yarn'",
        ),
        ("qwen35.expert_gating_func", 2, "'qwen35.expert_gating_func': found 2"),
        ("qwen35.attention.value_length", 128, "'qwen35.attention.value_length': found 128; supported: 256"),
        ("qwen35.block_count", 0, "'qwen35.block_count': found 0"),
        ("qwen35.block_count", None, r"changed\.gguf: the metadata has no qwen35\.block_count; an integer"),
        ("qwen35.attention.head_count_kv", [1, 2], r"says \[1, 2\] for qwen35\.attention\.head_count_kv"),
        ("qwen35.ssm.time_step_rank", 5, r"ssm\.inner_size is 768, no multiple of ssm\.time_step_rank, 5"),
        ("qwen35.attention.recurrent_layers", [True], "recurrent_layers says .*not a value for each of 4 layers"),
        ("qwen35.rope.dimension_count", 512, "'qwen35.rope.dimension_count': found 512; supported: 1 to 256"),
        ("qwen35.rope.dimension_sections", [11, 11, 9, 1], "'qwen35.rope.dimension_sections': found"),
        ("tokenizer.ggml.token_type", [1], r"no vocabulary \(tokenizer\.ggml\.tokens"),
        ("tokenizer.ggml.eos_token_id", 7.5, r"changed\.gguf: config field 'tokenizer\.ggml\.eos_token_id': found"),
        (
            "qwen35.embedding_length",
            2**31 - 1,
            r"changed\.gguf: config field 'qwen35\.embedding_length': found 2147483647",
        ),
        (
            "qwen35.attention.head_count",
            7,
            r"'qwen35\.attention\.head_count': .* a multiple of qwen35\.attention\.head_count_kv = 2",
        ),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, key: str, value: Any, complaint: str) -> None:
    def change(writer: Any) -> None:
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value)) if not isinstance(
                value, list
            ) else writer.add_array(key, value)

    with pytest.raises((CheckpointError, UnsupportedModelError), match=complaint):
        ModelShape.from_directory(changed(tmp_path, change))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("tokenizer.ggml.model", "llama", "'tokenizer.ggml.model': found 'llama'; supported: gpt2"),
        ("tokenizer.ggml.pre", "llama-bpe", "'tokenizer.ggml.pre': found 'llama-bpe'; supported: qwen2 or qwen35"),
        ("tokenizer.ggml.merges", ["a b c"], "merges has 'a b c', which is not two tokens"),
        ("tokenizer.ggml.merges", ["no such"], "cannot be read"),
        ("tokenizer.ggml.tokens", [1, 2], r"no texts for tokenizer\.ggml\.tokens"),
        ("tokenizer.ggml.token_type", [1] * 256 + [3] * 10 + [5] * 5 + [3] * 241, "the added token .* should have id"),
    ],
)
def test_a_tokenizer_that_is_not_the_family_s(tmp_path: Path, key: str, value: Any, complaint: str) -> None:
    def change(writer: Any) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)

    path = changed(tmp_path, change)
    with pytest.raises((CheckpointError, UnsupportedModelError, TokenizerError), match=complaint):
        Tokenizer.load(path)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as GGUF."""
    return write_gguf(DEMO, tmp_path_factory.mktemp("demo") / "Demo-Q8_0.gguf")


HARD = [
    "", " ", "\n\n\n x", "Hello, how are you?", "don't DON'T I'LL", "1234567 ١٢٣", "a\u0301e\u0301 \u212b \ufb1d \u1112\u1161\u11ab",
    "नमस्ते दुनिया", "สวัสดี", "日本語のテキスト。", "😀👩‍👩‍👧 \u200d\ufeff", "\t\r\n \r\n  if x:\n        return 'y'\n", "<think>a</think>",
    "<|im_end|><|im_start|>user", "<tool_call>\n{}\n</tool_call>", "<|endoftext", "\x00\x7f\x1b", "x" * 500, " " * 70 + "\n" * 30,
    "https://a.b/c?d=e&f=%20#g", "Ünïcödé — “quotes” …", "<tts_pad>!?.,;:-–—()[]{}", "\u00a0\u2003\u3000mixed\u2028space",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.sampled_from(HARD), st.text(max_size=40)))
def test_ids_are_those_of_tokenizer_json(demo: Path, text: str) -> None:
    for file, directory in ((demo, DEMO), (tiny_gguf("next"), tiny_checkpoint("next"))):
        own, original = _tokenizers(file, directory)
        for specials in ("text", "parse"):
            assert own.encode(text, specials) == original.encode(text, specials)
        assert own.decode(own.encode(text)) == original.decode(original.encode(text))


_loaded: dict[Path, tuple[Tokenizer, Tokenizer]] = {}


def _tokenizers(file: Path, directory: Path) -> tuple[Tokenizer, Tokenizer]:
    if file not in _loaded:
        _loaded[file] = Tokenizer.load(file), Tokenizer.load(directory)
    return _loaded[file]


def test_text_is_read_as_of_the_directory(demo: Path) -> None:
    own, original = _tokenizers(demo, DEMO)
    assert (own.special_ids, own.markers, own.n_tokens) == (original.special_ids, original.markers, original.n_tokens)
    assert own.has_known_cuts and [own.token_bytes(i) for i in range(1600)] == [
        original.token_bytes(i) for i in range(1600)
    ]
    said = json.loads((DEMO / "tokenizer.json").read_text())
    made = document(demo, "tokenizer.json")
    made["model"]["merges"] = [merge.split(" ") for merge in made["model"]["merges"]]
    assert {key: made[key] for key in ("model", "added_tokens", "pre_tokenizer", "normalizer")} == {
        key: said[key] for key in ("model", "added_tokens", "pre_tokenizer", "normalizer")
    }
    chat = [
        {"role": "user", "content": "<|im_end|> é"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    templates = ChatTemplate.load(demo, own), ChatTemplate.load(DEMO, original)
    assert templates[0] is not None and templates[1] is not None
    assert templates[0].render(chat) == templates[1].render(chat)
    assert templates[0].variables == templates[1].variables
    shape = ModelShape.from_directory(demo)
    config = EngineConfig(model=str(demo))
    assert n_real_ids(config, demo, shape) == n_real_ids(EngineConfig(), DEMO, ModelShape.from_directory(DEMO))
    assert shape == dataclasses.replace(ModelShape.from_directory(DEMO), tiled_value_heads=True)
    assert (
        n_real_ids(EngineConfig(model="x"), tiny_gguf("moe"), ModelShape.from_directory(tiny_gguf("moe"))) < VOCAB_SIZE
    )
    guides = Guides(own.n_tokens, shape.eos_token_ids, Vocabulary(lambda: tokenizer_json(config)))
    assert own.decode(guides._view().tokenizer.tokenize_str("Hello é")) == "Hello é"


def test_several_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]

    def change(writer: Any) -> None:
        del writer.kv_data[0]["tokenizer.chat_template"]
        writer.add_chat_template(named)

    path = changed(tmp_path, change)
    assert document(path, "tokenizer_config.json")["chat_template"] == named
    tokenizer = Tokenizer.load(path)
    template = ChatTemplate.load(path, tokenizer)
    assert template is not None
    chat = [{"role": "user", "content": "c"}]
    assert tokenizer.decode(template.render(chat).ids) == "plain"
    assert tokenizer.decode(template.render(chat, [{"function": {}}]).ids) == "tools"


def test_a_model_is_found_by_any_of_its_files(tmp_path: Path) -> None:
    first = tiny_gguf("dense", "Q4_K", n_files=3, has_mtp=True)
    for file in sorted(first.parent.iterdir()):
        shutil.copy(file, tmp_path / file.name)
        assert model_name(EngineConfig(model=str(file))) == "tiny-dense"
        assert open_gguf(file).files == tuple(sorted(first.parent.iterdir()))
    names = stored_tensors(open_gguf(first)).keys()
    assert names == stored_tensors(open_gguf(tiny_gguf("dense", has_mtp=True))).keys()
    (tmp_path / "mmproj-F16.gguf").touch()
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig(model=str(tmp_path))
    found, shape = locate(config)
    assert found == tmp_path / first.name == text_directory(config) == tokenizer_directory(config)
    assert shape.n_layers == 4 and not speaks(config) and model_name(config) == tmp_path.name
    assert tokenizer_directory(EngineConfig(tokenizer=str(tmp_path))) == found
    (tmp_path / "tiny-dense-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"of its 3 files are missing: tiny-dense-00002-of-00003\.gguf; download"):
        locate(config)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(
        CheckpointError, match=r"2 GGUF models: other\.gguf, tiny-dense-00001-of-00003\.gguf; give the file"
    ):
        locate(config)
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(tmp_path) == tmp_path, "safetensors win"


def test_the_tower_beside_a_model(tmp_path: Path) -> None:
    """BF16, else F16, else F32, else any; the first by name; in the model's folder alone."""
    model = tmp_path / "model-BF16.gguf"
    (tmp_path / "other").mkdir()
    for file in (model, tmp_path / "other" / "mmproj-BF16.gguf", tmp_path / "mmproj-BF16.safetensors"):
        file.touch()
    (tmp_path / "mmproj-folder.gguf").mkdir()
    assert tower_beside(model) is None
    for name, expected in {
        "mmproj-Q8_0.gguf": "mmproj-Q8_0.gguf",
        "mmproj-xbf16x.GGUF": "mmproj-Q8_0.gguf",
        "b-mmproj-f32.gguf": "b-mmproj-f32.gguf",
        "MMPROJ-F16.gguf": "MMPROJ-F16.gguf",
        "model.mmproj-bf16.gguf": "model.mmproj-bf16.gguf",
        "mmproj-F32.gguf": "model.mmproj-bf16.gguf",
        "a-mmproj-BF16.gguf": "a-mmproj-BF16.gguf",
    }.items():
        (tmp_path / name).touch()
        assert tower_beside(model) == tmp_path / expected
    assert tower_beside(tmp_path / "mmproj-Q8_0.gguf") == tmp_path / "mmproj-Q8_0.gguf", "it is one itself"


def test_a_set_that_does_not_belong_together(tmp_path: Path) -> None:
    first = tiny_gguf("dense", "Q4_K", n_files=3, has_mtp=True)
    files = [tmp_path / file.name for file in sorted(first.parent.iterdir())]
    for file in files:
        shutil.copy(first.parent / file.name, file)
    shutil.copy(first, tmp_path / "alone.gguf")
    with pytest.raises(
        CheckpointError, match=r"alone\.gguf: the first of 3 files by its header .split.count., but 1 are named like it"
    ):
        open_gguf(tmp_path / "alone.gguf")
    shutil.copy(first.parent / files[2].name, files[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: number 2 of its set .split.no., not 1"):
        open_gguf(files[0])


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for kind in ("dense", "next"):
        shutil.copy(tiny_gguf(kind), path)
        assert open_gguf(path).get("general.architecture") == {"dense": "qwen35", "next": "qwen3next"}[kind]


def test_a_service_of_a_file(demo: Path) -> None:
    engine = FakeEngineClient()
    engine.config = EngineConfig(model=str(demo))  # type: ignore[attr-defined]
    service = _service(Server(ServerConfig()), Served(("a",), ModelConfig(), engine))  # type: ignore[arg-type]
    assert service.template is not None and service.tokenizer.n_tokens == 1593


REPOSITORY = [
    "README.md", "config.json", "mmproj-F16.gguf", "imatrix_unsloth.gguf", "Qwen3.5-4B-UD-Q4_K_XL.gguf", "Qwen3.5-4B-Q4_K_S.gguf",
    "Qwen3.5-4B-UD-Q4_K_M.gguf", "Qwen3.5-4B-Q4_K_M.gguf", "Qwen3.5-4B-IQ4_XS.gguf", "mtp-Qwen3.5-4B-Q8_0.gguf",
    "Qwen3.5-4B-Q8_0-00002-of-00002.gguf", "Qwen3.5-4B-Q8_0-00001-of-00002.gguf",
    "BF16/Qwen3.5-4B-00001-of-00002.gguf", "BF16/Qwen3.5-4B-00002-of-00002.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("quant", "files"),
    [
        ("", ["Qwen3.5-4B-Q4_K_M.gguf"]),
        ("q4_k_m", ["Qwen3.5-4B-Q4_K_M.gguf"]),
        ("UD-Q4_K_M", ["Qwen3.5-4B-UD-Q4_K_M.gguf"]),
        ("UD-Q4_K_XL", ["Qwen3.5-4B-UD-Q4_K_XL.gguf"]),
        ("Q8_0", ["Qwen3.5-4B-Q8_0-00001-of-00002.gguf", "Qwen3.5-4B-Q8_0-00002-of-00002.gguf"]),
        ("BF16", ["BF16/Qwen3.5-4B-00001-of-00002.gguf", "BF16/Qwen3.5-4B-00002-of-00002.gguf"]),
    ],
)
def test_the_file_of_these_bits(quant: str, files: list[str]) -> None:
    assert chosen("owner/model", REPOSITORY, quant) == files


def test_bits_that_are_not_there() -> None:
    for quant in ("Q4_K", "F16", "Q4"):
        with pytest.raises(CheckpointError, match=rf"^owner/model: has no GGUF file of {quant}; there are BF16/Qwen"):
            chosen("owner/model", REPOSITORY, quant)
    assert chosen("owner/model", ["b-Q2_K.gguf", "a-Q8_0.gguf"], "") == ["a-Q8_0.gguf"]
    with pytest.raises(CheckpointError, match="has no GGUF file of any bits; there is no GGUF file"):
        chosen("owner/model", ["mmproj-F16.gguf", "a.safetensors"], "")
    assert is_hub_name("unsloth/Qwen3.5-4B-GGUF:Q4_K_M") and not is_hub_name("a/b:")


@pytest.fixture
def files_of_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    shards = sorted(tiny_gguf("dense", "Q4_K", n_files=3, has_mtp=True).parent.iterdir())
    files = {f"Q4_K_M/tiny-{i:05}-of-00003.gguf": file.read_bytes() for i, file in enumerate(shards, 1)}
    return files | {"tiny-Q8_0.gguf": b"q" * 400, "mmproj-F16.gguf": b"m" * 300, "config.json": b"{}"}


def go(model: str) -> str:
    found = asyncio.run(fetched(EngineConfig(model=model), asyncio.Event()))
    assert found is not None
    return found.model


def test_only_the_files_of_these_bits_are_downloaded(
    files_of_hub: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_with(files_of_hub) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found = Path(go("owner/model:q4_k_m"))
        assert found.parts[-2:] == ("Q4_K_M", "tiny-00001-of-00003.gguf") and len(open_gguf(found).files) == 3
        assert hub.sent == {name: len(data) for name, data in files_of_hub.items() if name.startswith("Q4_K_M/")}
        assert locate(EngineConfig(model="owner/model:Q4_K_M"))[0] == found, "without a server, too"
        assert go("owner/model") == str(found), "Q4_K_M, if nothing is said"
        hub.sent.clear()
        assert Path(go("owner/model:Q8_0")).name == "tiny-Q8_0.gguf"
        assert hub.sent == {"tiny-Q8_0.gguf": 400, "mmproj-F16.gguf": 300}, "its tower stands beside it"
        with pytest.raises(
            CheckpointError, match=r"^owner/model: has no GGUF file of Q2_K; there are Q4_K_M/tiny, tiny-Q8_0"
        ):
            go("owner/model:Q2_K")
        with pytest.raises(CheckpointError, match="has no revision 'nowhere'"):
            resolve_model("owner/model:Q8_0", revision="nowhere")
    assert go("owner/model:Q4_K_M") == str(found), "the hub has gone"
    with pytest.raises(CheckpointError, match=r"has no GGUF file of Q2_K; .*offline, in the cache"):
        go("owner/model:Q2_K")
    with pytest.raises(DownloadFailed, match=r"owner/other: not a directory, not .*in the download cache"):
        go("owner/other:Q8_0")


def test_safetensors_win_on_the_hub_unless_bits_are_named(
    files_of_hub: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_with(files_of_hub | {"model.safetensors": b"w" * 200}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found = Path(go("owner/model"))
        assert found.is_dir() and {file.name for file in found.iterdir()} == {"config.json", "model.safetensors"}
        assert go("owner/model:Q8_0") == str(found / "tiny-Q8_0.gguf")


def test_a_server_of_bits_on_the_hub(
    demo: Path, files_of_hub: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_with(files_of_hub | {"Demo-Q5_K_M.gguf": demo.read_bytes()}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with server_of(engine={"model": "owner/model:Q5_K_M"}) as server:
            url = server.url()
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "owner/model:Q5_K_M"
    with server_of(engine={"model": str(demo)}) as server:
        assert httpx.get(f"{server.url()}/v1/models").json()["data"][0]["id"] == "Demo-Q8_0"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def file_of(
    keys: bytes = b"",
    tensors: bytes = b"",
    n_keys: int | None = None,
    n_tensors: int | None = None,
    version: int = 3,
    data: bytes = bytes(4096),
) -> bytes:
    """A file by its parts; one key and one tensor, if there are any and nothing else is said."""
    n = [bool(part) if n is None else n for n, part in ((n_tensors, tensors), (n_keys, keys))]
    head = b"GGUF" + struct.pack("<IQQ", version, *n) + keys + tensors
    return head + bytes(-len(head) % 32) + data


def key_of(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor_of(name: str, shape: tuple[int, ...], type: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    n = len(shape) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", n, *shape, type, offset)


HUGE = 2**63
HOSTILE = {
    "empty": (b"", "cannot be read"),
    "short": (b"GGUF\x03", "cut short"),
    "magic": (b"GGML" + bytes(100), r"not a GGUF file: it begins with b'GGML'"),
    "version 1": (file_of(version=1), "GGUF version 1 is not supported, 2 and 3 are"),
    "version 9": (file_of(version=9), "GGUF version 9 is not supported"),
    "big-endian": (file_of(version=3 << 24), "in the other order"),
    "tensors": (file_of(n_tensors=HUGE), f"damaged: {HUGE} tensors"),
    "some tensors": (file_of(n_tensors=200_000), "0 dimensions"),
    "keys": (file_of(n_keys=HUGE), f"damaged: {HUGE} keys"),
    "key": (file_of(struct.pack("<Q", HUGE) + b"a"), "bytes in a name"),
    "key that is no text": (file_of(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(8)), "not UTF-8"),
    "the same key": (file_of(key_of("a", 0, b"\1") * 2, n_keys=2), "the key 'a' is there twice"),
    "kind": (file_of(key_of("a", 77, bytes(8))), "'a' has a value of the unknown kind 77"),
    "string": (file_of(key_of("a", 8, struct.pack("<Q", HUGE))), "cut short"),
    "array": (file_of(key_of("a", 9, struct.pack("<IQ", 4, HUGE))), "values in 'a'"),
    "long array": (file_of(key_of("a", 9, struct.pack("<IQ", 10, 10**7))), "cut short"),
    "strings": (file_of(key_of("a", 9, struct.pack("<IQ", 8, 10**7))), "strings in 'a'"),
    "huge strings": (file_of(key_of("a", 9, struct.pack("<IQQ", 8, 3, HUGE))), "cut short"),
    "array of arrays": (file_of(key_of("a", 9, struct.pack("<IQ", 9, 1))), "unknown kind 9"),
    "alignment 0": (file_of(key_of("general.alignment", 4, struct.pack("<I", 0))), "alignment of 0"),
    "alignment 3": (file_of(key_of("general.alignment", 4, struct.pack("<I", 3))), "alignment of 3"),
    "alignment text": (file_of(key_of("general.alignment", 8, text("8"))), "alignment of '8'"),
    "dimensions": (file_of(tensors=tensor_of("a", (8,), n_dims=5)), "5 dimensions"),
    "no dimensions": (file_of(tensors=tensor_of("a", (8,), n_dims=0)), "0 dimensions"),
    "size 0": (file_of(tensors=tensor_of("a", (8, 0))), r"has the shape \[0, 8\]"),
    "size": (file_of(tensors=tensor_of("a", (HUGE, HUGE))), "tensor 'a' is at .* of .* bytes; the download is not"),
    "past the end": (file_of(tensors=tensor_of("a", (1025,))), "tensor 'a' is at"),
    "offset": (file_of(tensors=tensor_of("a", (8,), offset=HUGE)), "tensor 'a' is at"),
    "crooked offset": (file_of(tensors=tensor_of("a", (8,), offset=4)), "tensor 'a' is at"),
    "type": (file_of(tensors=tensor_of("a", (8,), type=4711)), "'a' has the unknown ggml type 4711; supported: F32, F16"),
    "half a block": (file_of(tensors=tensor_of("a", (48, 2), type=8)), "rows of 48 weights are not whole blocks of 32, as Q8_0"),
    "small rows": (file_of(tensors=tensor_of("a", (128, 2), type=12)), "rows of 128 weights .* of 256, as Q4_K has them"),
    "the same tensor": (file_of(tensors=tensor_of("a", (8,)) * 2, n_tensors=2), "tensor 'a' is there twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header(tmp_path: Path, name: str) -> None:
    data, complaint = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    began_s = time.process_time()
    with pytest.raises(CheckpointError, match=rf"hostile\.gguf: .*{complaint}"):
        open_gguf(path)
    assert time.process_time() - began_s < 2
    path.write_bytes(file_of(tensors=tensor_of("a", (8, 4))))
    assert open_gguf(path).tensors["a"].shape == (4, 8)


SIZES = (1, 31, 32, 33, 256, 2**31, 2**32 + 1, 2**61, 2**63, 2**64 - 1)


@pytest.mark.parametrize("type", TYPES)
def test_sizes_of_any_type_are_inside_the_file_or_refused(tmp_path: Path, type: int) -> None:
    """Products of sizes that are small again in 64 bits, and places behind the end."""
    path = tmp_path / "sized.gguf"
    for i, shape in enumerate([*itertools.product(SIZES, SIZES), (2**21,) * 3, (2**16,) * 4, (256, 2**56, 2**8)]):
        path.write_bytes(file_of(tensors=tensor_of("a", shape, type=type, offset=32 * SIZES[i % len(SIZES)] % 2**64)))
        open_gguf.__globals__["_open"].cache_clear()
        try:
            tensor = open_gguf(path).tensors["a"]
        except CheckpointError:
            continue
        assert 0 < tensor.begin < tensor.end <= path.stat().st_size


OTHER: dict[str, Any] = {
    "general.quantization_version": 1, "general.file_type": 3, "qwen35.vocab_size": 999, "qwen35.block_count": 5,
    "qwen35.embedding_length": 512, "qwen35.feed_forward_length": 1024, "qwen35.attention.head_count": 2,
    "qwen35.attention.head_count_kv": 1, "qwen35.attention.key_length": 128, "qwen35.attention.value_length": 128,
    "qwen35.ssm.conv_kernel": 3, "qwen35.ssm.state_size": 64, "qwen35.ssm.group_count": 1, "qwen35.ssm.inner_size": 1536,
    "qwen35.ssm.time_step_rank": 3, "qwen35.full_attention_interval": 2, "qwen35.nextn_predict_layers": 1,
    "qwen35.rope.dimension_sections": [8, 8, 8, 0], "qwen35.attention.causal": False, "qwen35.expert_gating_func": 2,
    "qwen35.expert_shared_count": 2, "qwen35.leading_dense_block_count": 1, "qwen35.attention.sliding_window": 512,
    "qwen35.final_logit_softcapping": 30.0, "qwen35.logit_scale": 2.0, "qwen35.rope.scale_linear": 2.0,
    "qwen35.rope.scaling.type": "linear", "qwen35.attention.recurrent_layers": [False, True, True, True],
    "split.count": 2, "split.tensors.count": 3, "general.name": "other", "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eos_token_id": 99999,
    "general.type": "adapter", "general.alignment": 4096, "tokenizer.ggml.token_type": [1, 1],
}  # fmt: skip


@pytest.mark.parametrize("key", OTHER)
def test_metadata_that_contradicts_the_file_is_refused_by_its_key(tmp_path: Path, key: str) -> None:
    """One key at a time has another value that it may have: the same model comes out, or a line with the key."""

    def change(writer: Any) -> None:
        writer.kv_data[0].pop(key, None)
        value = OTHER[key]
        writer.add_array(key, value) if isinstance(value, list) else writer.add_key_value(
            key, value, gguf.GGUFValueType.get_type(value)
        )

    expected = ModelShape.from_directory(tiny_gguf("dense"))
    try:
        path = changed(tmp_path, change)
        shape = ModelShape.from_directory(path)
        declared, tensors = Declaration(None, COUNTED), open_tensors(path)
        declared.formats = formats_of(tensors)
        declare_weights(declared, shape, shape.tie_word_embeddings, names=tensors)
        check_plan(declared.plan, tensors, path)
        Tokenizer.load(path)
    except (CheckpointError, UnsupportedModelError, TokenizerError) as error:
        assert "changed" in str(error) and "linear_k" not in str(error) and "_proj" not in str(error)
        alike = {"general.alignment": ["is at"], "qwen35.nextn_predict_layers": ["qwen35.attention.recurrent_layers"]}
        assert any(said in str(error) for said in [key, *alike.get(key, [])]), error
    else:
        assert shape == expected


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_tensor("blk.0.some.weight", np.zeros((2, 292), np.uint8), raw_dtype=TYPE.Q8_K)

    path = changed(tmp_path, change)
    with pytest.raises(
        CheckpointError, match=r"'blk\.0\.some\.weight' is quantised as Q8_K, which is not .*supported: F32, .*MXFP4"
    ):
        stored_tensors(open_gguf(path))


def test_tensors_that_no_checkpoint_has(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_tensor("v.blk.0.ln1.weight", np.ones(8, np.float32))
        writer.add_tensor("blk.1.attn_q.scale", np.ones(1, np.float32))
        writer.add_tensor("blk.9.nextn.other.weight", np.ones(1, np.float32))

    names = stored_tensors(open_gguf(changed(tmp_path, change))).keys()
    assert {"model.visual.v.blk.0.ln1.weight", "blk.1.attn_q.scale", "blk.9.nextn.other.weight"} < names


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        (
            "blk.0.ssm_a",
            np.array([-1, 0, -1, -1, -1, -1], np.float32),
            "'blk.0.ssm_a' has values that no checkpoint gives",
        ),
        ("blk.3.attn_norm.weight", np.full(HIDDEN, np.nan, np.float32), "'blk.3.attn_norm.weight' has values"),
        ("blk.0.attn_norm.weight", None, "'blk.0.attn_norm.weight' is quantised as Q8_0; expected F32, F16, BF16"),
        ("blk.0.ffn_up_exps.weight", np.ones((2, 8), np.float32), r"has the shape \[2, 8\]; expected those of at most"),
    ],
)
def test_values_that_no_checkpoint_has(tmp_path: Path, name: str, values: Array | None, complaint: str) -> None:
    path = tmp_path / "changed.gguf"

    def change(writer: Any) -> None:
        original = writer.add_tensor
        if "exps" in name:
            original(name, values)

        def add(own: str, data: Array, raw_dtype: Any) -> None:
            if own == name and values is not None:
                data, raw_dtype = values, TYPE.F32
            elif own == name:
                data, raw_dtype = gguf.quants.quantize(data, TYPE.Q8_0), TYPE.Q8_0
            original(own, data, raw_dtype=raw_dtype)

        writer.add_tensor = add

    write_gguf(tiny_checkpoint("dense", layout="flat", experts="fused"), path, change=change)
    with pytest.raises(CheckpointError, match=complaint):
        for tensor in stored_tensors(open_gguf(path)).values():
            tensor.read(0, 1)


@settings(deadline=5000, max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_header_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(tiny_gguf("dense").read_bytes())
    end = open_gguf(tiny_gguf("dense")).tensors["token_embd.weight"].begin
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.one_of(st.integers(0, end), st.integers(0, 2000)))
        whole[at : at + 1] = data.draw(st.sampled_from([b"\0", b"\xff", b"\1", b"\x08", b"\t", b"", b"\0\0"]))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole[: data.draw(st.sampled_from([len(whole), end, end // 2, 40]))])
    open_gguf.__globals__["_open"].cache_clear()
    try:
        shape = ModelShape.from_directory(path)
        for tensor in stored_tensors(open_gguf(path)).values():
            tensor.read(0, 1)
        tokenizer = Tokenizer.load(path)
        ChatTemplate.load(path, tokenizer)
        SamplingDefaults.load(path)
        n_real_ids(EngineConfig(model=str(path)), path, shape)
    except (CheckpointError, UnsupportedModelError, TokenizerError):
        return


def test_a_large_vocabulary_is_read_soon(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        for key in ("tokens", "merges", "token_type"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
        writer.add_token_list([f"t{i:07}" for i in range(250_000)])
        writer.add_token_types([1] * 250_000)
        writer.add_token_merges([f"a{i:07} b" for i in range(250_000)])

    path = changed(tmp_path, change)
    began_s = time.process_time()
    model = open_gguf(path)
    assert time.process_time() - began_s < 6
    assert len(model.get("tokenizer.ggml.tokens")) == 250_000 and gguf_in(tmp_path) == path
    assert time.process_time() - began_s < 12
