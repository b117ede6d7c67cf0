"""Quantised checkpoints around the kernels: planned, rounded further, packed, cached, and named for people."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from deltic.__main__ import main
from deltic.commands import plan as fit
from deltic.config import ConfigError, EngineConfig
from deltic.engine.messages import EngineInfo
from deltic.models import files, loading
from deltic.models.checkpoint import locate
from deltic.models.fields import CheckpointError
from deltic.models.files import PACKED, stored_formats
from deltic.models.loading import COUNTED_ROWS, HOST, Declaration, Host, Stored, copy_parts, shares_text
from deltic.models.packed import cache_file, map_packed
from deltic.models.qwen.published import PUBLISHED
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import UNUSED, Weights, active_weights, empty_weights, load_weights, weight_bytes
from deltic.ops.arrays import Array
from deltic.ops.formats import WEIGHT_FORMATS, Quantised
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from deltic.runtime.fingerprint import fingerprint
from tests.cpu.grid import by_turns, grid
from tests.cpu.test_formats import KINDS, mixed
from tests.cpu.test_packed import assert_same, rewrite_header
from tests.cpu.test_purity import prompt, run
from tests.cpu.test_reports import words
from tests.planned import settled
from tests.quantised_rows import random_rows
from tests.tiny import tiny_checkpoint
from tests.tiny_gguf import tiny_gguf
from tests.tiny_quantised import RECIPES, tiny_quantised

FILES: dict[str, Callable[[], Path]] = {
    "qwen-fp8": lambda: tiny_quantised("dense", "qwen-fp8").path,
    "mixed-nvfp4": lambda: tiny_quantised("moe", "mixed-nvfp4", shards=3).path,
    "gptq": lambda: tiny_quantised("next", "gptq").path,
    "gguf": lambda: tiny_gguf("moe", mixed, n_files=3),
    "gguf next": lambda: tiny_gguf("next", "Q6_K"),
}
every_file = pytest.mark.parametrize("name", FILES)
some_files = pytest.mark.parametrize("name", grid(FILES, ("gptq", "gguf"), pytest.mark.long))


def shape_of(path: Path) -> ModelShape:
    return replace(ModelShape.from_directory(path), formats=stored_formats(path, UNUSED))


def config_of(path: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(path), max_num_seqs=2, max_model_len=256, threads=1, **settings)


def start(path: Path, **settings: Any) -> Runner:
    return build_runner(config_of(path, **settings), lambda stage, done: None, Cpu())  # type: ignore[return-value]


def answer(runner: Runner) -> tuple[list[int], Array]:
    return run(runner, prompt(1, 70))


# Planned.


@pytest.mark.parametrize(
    ("kind", "name"), by_turns(KINDS, [*RECIPES, "Q4_K", "Q8_0", "BF16", "mixed"], pytest.mark.long, whole=["mixed"])
)
def test_planned_bytes_are_those_that_are_loaded(kind: str, name: str) -> None:
    pick = mixed if name == "mixed" else name
    path = tiny_quantised(kind, name).path if name in RECIPES else tiny_gguf(kind, pick)
    for quantize in (None, "int8"):
        shape = shape_of(path)
        weights, _ = load_weights(path, shape, quantize=quantize)
        assert weights.n_bytes == weight_bytes(shape, quantize)
        assert weights.formats() == empty_weights(shape, quantize, shape.tie_word_embeddings).formats()


def halves(name: str, shape: tuple[int, ...]) -> str:
    """Of what a product reads one part plain and one quantised."""
    plain = ("gate_proj", "in_proj_qkv", "k_proj")
    if len(shape) == 1 or "conv1d" in name or name.endswith("mlp.gate.weight"):
        return "F32"
    return "BF16" if any(part in name for part in plain) else "Q8_0"


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_parts_of_a_product_that_are_plain_and_quantised(kind: str) -> None:
    """Gate beside up, q k v beside z: two segments, known to the plan without the tensors' names."""
    path = tiny_gguf(kind, halves)
    shape = shape_of(path)
    weights, _ = load_weights(path, shape)
    assert weights.n_bytes == weight_bytes(shape, None)
    mlp = weights.layers[0].mlp
    assert [segment.format.name for segment in mlp.gate_up.segments] == ["bf16", "Q8_0"]
    assert np.isfinite(answer(start(path))[1]).all()


def test_shares_and_what_a_token_is_multiplied_with() -> None:
    shape = shape_of(tiny_gguf("moe", "Q8_0"))
    weights = empty_weights(shape, None, shape.tie_word_embeddings)
    formats, active = weights.formats(), active_weights(weights, shape)
    assert list(formats) == ["Q8_0", "bf16"] and sum(share.n_bytes for share in formats.values()) < weights.n_bytes
    assert formats["Q8_0"].n_bytes * 8 / formats["Q8_0"].n_weights == pytest.approx(8.5, rel=0.01)  # whole panels
    head = shape.vocab_size * shape.hidden_size
    assert sum(active.values()) == sum(part.n * part.k * used for part, used in multiplied(weights, shape))
    assert sum(active.values()) < sum(share.n_weights for share in formats.values()) - head
    assert shares_text(formats).startswith("Q8_0 ") and shares_text(formats).endswith(" bits a weight")


def multiplied(weights: Weights, shape: ModelShape) -> list[tuple[Any, int]]:
    parts = [part for _, part in weights.named_parts() if hasattr(part, "segments") and part is not weights.embed]
    return [(part, shape.n_experts_per_tok if part.n_matrices > 1 else 1) for part in parts]


def huge_gguf(path: Path, shape: ModelShape) -> Path:
    """The header of a Q4_K_M file of this dense shape, and a hole in the place of its 16 GB."""
    writer = gguf.GGUFWriter(path, "qwen35")
    numbers = {
        "block_count": shape.n_layers, "context_length": shape.max_position_embeddings,
        "embedding_length": shape.hidden_size, "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.n_q_heads, "attention.head_count_kv": shape.n_kv_heads,
        "attention.key_length": shape.head_dim, "rope.dimension_count": shape.rotary_dim,
        "ssm.conv_kernel": shape.conv_width, "ssm.state_size": shape.gdn_k_dim, "ssm.group_count": shape.gdn_n_k_heads,
        "ssm.time_step_rank": shape.gdn_n_v_heads, "ssm.inner_size": shape.gdn_value_size,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 1])
    writer.add_token_merges([])
    h, f, vd, hv = shape.hidden_size, shape.intermediate_size, shape.gdn_value_size, shape.gdn_n_v_heads
    tensors = {"token_embd": ("Q4_K", (shape.vocab_size, h)), "output": ("Q6_K", (shape.vocab_size, h))}
    tensors["output_norm"] = ("F32", (h,))
    q, kv = shape.n_q_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    for i, kind in enumerate(shape.layer_types):
        layer = {"attn_norm": ("F32", (h,)), "post_attention_norm": ("F32", (h,)), "ffn_gate": ("Q4_K", (f, h))}
        layer |= {"ffn_up": ("Q4_K", (f, h)), "ffn_down": ("Q6_K" if i % 2 else "Q4_K", (h, f))}
        if kind == "linear_attention":
            layer |= {"attn_qkv": ("Q5_K", (shape.conv_channels, h)), "attn_gate": ("Q4_K", (vd, h))}
            layer |= {"ssm_alpha": ("Q8_0", (hv, h)), "ssm_beta": ("Q8_0", (hv, h)), "ssm_out": ("Q5_K", (h, vd))}
            layer |= {"ssm_conv1d": ("F32", (shape.conv_channels, shape.conv_width)), "ssm_norm": ("F32", (vd // hv,))}
            layer |= {"ssm_a": ("F32", (hv,)), "ssm_dt.bias": ("F32", (hv,))}
        else:
            layer |= {"attn_q": ("Q4_K", (2 * q, h)), "attn_k": ("Q4_K", (kv, h)), "attn_v": ("Q6_K", (kv, h))}
            layer |= {"attn_output": ("Q4_K", (h, q))}
            layer |= {f"attn_{name}_norm": ("F32", (shape.head_dim,)) for name in "qk"}
        tensors |= {f"blk.{i}.{name}": one for name, one in layer.items()}
    n_bytes = 0
    for name, (type, size) in tensors.items():
        number = gguf.GGMLQuantizationType[type]
        block, of_block = gguf.GGML_QUANT_SIZES[number]
        tensor_bytes = int(np.prod(size)) // block * of_block
        bytes_size = (*size[:-1], size[-1] // block * of_block) if type != "F32" else size
        dtype = np.dtype(np.uint8 if type != "F32" else np.float32)
        full = name if name.endswith(("ssm_a", ".bias")) else f"{name}.weight"
        writer.add_tensor_info(full, bytes_size, dtype, tensor_bytes, raw_dtype=number)
        n_bytes += -(-tensor_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + n_bytes + 64)
    return path


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_27b_file_fits_a_card_of_24_gb(device: str, tmp_path: Path) -> None:
    """Planned from its header: a device's memory and this machine's have nothing to do with it."""
    if device == "cuda":
        pytest.importorskip("triton")
    path = huge_gguf(tmp_path / "Qwen3.6-27B-Q4_K_M.gguf", PUBLISHED["qwen3.6-27b"])
    config = EngineConfig(model=str(path), device=device, memory_gb=22.9)
    report = words(fit.report(config))
    assert report.startswith("Qwen3.6-27B-Q4_K_M: 26.") and "for another machine" in report
    said = report.partition("as stored: ")[2]
    assert said.startswith("Q4_K ") and all(name in said for name in ("Q5_K", "Q6_K", "Q8_0 under 1 %"))
    bits = float(said.partition(" bits a weight")[0].split()[-1])
    assert 4.8 < bits < 5.2
    weights = float(report.partition(" weights ")[2].split()[0])
    # a GPU reads the embedding from the host's memory where it is small
    assert -0.2 < 26.9e9 * bits / 8e9 - weights < (1.0 if device == "cuda" else 0.2) and "of 22.90 GB" in report
    assert shape_of(path).formats.keys() >= {"model.embed_tokens.weight", "lm_head.weight"}
    if device == "cuda":
        assert weight_bytes(shape_of(path), None, COUNTED_ROWS) < 18e9
    small = replace(config, memory_gb=16.0)
    with pytest.raises(ConfigError, match=r"does not fit: weights 1[67]\.[14] GB .* a quantisation of fewer bits, "):
        fit.report(small)


def test_what_would_fit_is_another_file(tmp_path: Path) -> None:
    path = huge_gguf(tmp_path / "x.gguf", PUBLISHED["qwen3.6-27b"])
    with pytest.raises(ConfigError, match=r"take a quantisation of fewer bits, a smaller model, or"):
        settled(EngineConfig(model=str(path)), Cpu(), 8 * 10**9)


# Rounded further.


def refused(path: Path, reason: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=reason):
        settled(config_of(path, **settings), Cpu(), 10**9)


def test_rounding_names_the_other_flag_where_it_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, plain = FILES["gguf"](), tiny_checkpoint("dense")
    refused(stored, r"--quantize int8: .*gguf is quantised already \(.*Q4_K.*give --quantize-rest", quantize="int8")
    refused(plain, "--quantize-rest int4: .* is not quantised; .* --quantize, which", quantize_rest="int4")
    refused(stored, "--quantize-rest fp8 is for a GPU; on the CPU give int8 or int4", quantize_rest="fp8")
    with pytest.raises(ConfigError, match=r"qwen3\.5-0\.8b is not quantised"):
        settled(EngineConfig(dummy="qwen3.5-0.8b", quantize_rest="int8"), Cpu(), 10**10)
    # A variable holds for all models of a server.
    monkeypatch.setenv("DELTIC_QUANTIZE", "int8")
    monkeypatch.setenv("DELTIC_QUANTIZE_REST", "int4")
    both = {"quantize": "int8", "quantize_rest": "int4"}
    for path, expected in ((stored, "int4"), (plain, "int8")):
        model, plan = settled(config_of(path, **both), Cpu(), 10**9)
        assert plan.quantize == model.config.rounded == expected


@pytest.mark.parametrize("rest", ["int8", "int4"])
def test_the_rest_is_rounded_by_its_role(rest: str) -> None:
    """Of GPTQ what attention and DeltaNet multiply; routers stay, and head and embedding keep 8 bits."""
    path = FILES["gptq"]()
    runner = start(path, quantize_rest=rest)
    weights = runner.model.weights
    assert weights.embed.whole.format.name == weights.lm_head.whole.format.name == "int8"
    layer = weights.layers[0]
    assert {segment.format.name for segment in layer.in_proj.segments} == {rest}
    assert layer.mlp.router.whole.format.name == "bf16"  # type: ignore[union-attr]
    assert layer.mlp.gate_up.whole.format.name == "int4-g128-float16"
    assert runner.info.precision == "int4-g128-float16"
    assert f"{rest} " in runner.info.notices[0]
    said = words(fit.report(config_of(path, quantize_rest=rest)))
    assert f"as stored (16 bits rounded to {rest}): " in said and f"{rest} " in said


# Loaded, a block at a time.


class OneTensor:
    """A StoredTensor of Q4_K, and how much of it was read at once."""

    where, format, dtype = "a tensor", WEIGHT_FORMATS["Q4_K"], "Q4_K"

    def __init__(self, *shape: int) -> None:
        self.shape, self.sizes, self.some = shape, list[int](), random_rows("Q4_K", 64, shape[1])

    def read(self, begin: int, end: int) -> Quantised:
        self.sizes.append((end - begin) * self.shape[1])
        return self.some.take(np.arange(begin, end) % 64)


def test_a_large_matrix_is_never_there_twice() -> None:
    n, k = 1 << 15, 1024
    tensor, seen = OneTensor(n, k), list[tuple[int, int]]()
    declared = Declaration(None, HOST, {"x": tensor.format})
    matrix = declared.matrix(k, Stored("x", (n,)))
    tracemalloc.start()
    copy_parts(declared.plan, {"x": tensor}, HOST, lambda *at: seen.append(at))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    block = loading._BLOCK["panels"]
    assert max(tensor.sizes) <= block and sum(tensor.sizes) == n * k
    assert peak < 8 * block, "some bytes for each weight of a block, whatever the matrix has"
    assert len(seen) == n * k // block and seen == sorted(seen) and seen[-1] == (matrix.n_bytes,) * 2
    last = matrix.whole.rows(n - 64, n).unpack()[0]
    assert np.array_equal(last, tensor.some.values())


@some_files
def test_blocks_of_any_size_load_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FILES[name]()
    expected = [load_weights(path, shape_of(path), quantize=quantize)[0] for quantize in (None, "int4")]
    monkeypatch.setitem(loading._BLOCK, "panels", 1)
    for weights, quantize in zip(expected, (None, "int4"), strict=True):
        assert_same(load_weights(path, shape_of(path), quantize=quantize)[0], weights)


@pytest.mark.parametrize(
    "stored", [Stored("x", (24, 24), 4, shape=(48, 8)), Stored("x", (6, 12, 6), 3, first=1, shape=(30, 8))]
)
def test_interleaved_rows_are_found_a_range_at_a_time(stored: Stored) -> None:
    n_rows, order, first = stored.shape[0], list[int](), stored.first
    for size in stored.sizes:
        share = size // stored.n_groups
        for group in range(0, n_rows, n_rows // stored.n_groups):
            order += range(group + first, group + first + share)
        first += share
    for begin in range(len(order)):
        for end in range(begin + 1, len(order) + 1):
            found = [row for run in stored.runs(0, 1, begin, end) for row in range(*run)]
            assert found == order[begin:end]


def test_any_number_of_threads_loads_the_same_in_order() -> None:
    path = FILES["mixed-nvfp4"]()
    expected, seen = load_weights(path, shape_of(path))[0], list[tuple[int, int]]()
    found, _ = load_weights(path, shape_of(path), lambda *at: seen.append(at), store=Host(3))
    assert_same(found, expected)
    assert seen == sorted(seen) and seen[-1] == (found.n_bytes,) * 2


def test_a_block_that_cannot_be_read_ends_the_load() -> None:
    tensor = OneTensor(1 << 12, 1024)
    declared = Declaration(None, HOST, {"x": tensor.format})
    declared.matrix(1024, Stored("x", (1 << 12,)))

    def fail(begin: int, end: int) -> Quantised:
        tensor.sizes.append(begin)
        raise CheckpointError("cannot be read")

    tensor.read = fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="cannot be read"):
        copy_parts(declared.plan, {"x": tensor}, HOST, None)
    assert len(tensor.sizes) < 4, "the blocks after it are left"


def test_headers_are_read_once_a_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, read = tmp_path / "model", list[Path]()
    shutil.copytree(tiny_quantised("dense", "qwen-fp8").path, path)
    monkeypatch.setattr(
        files, "checkpoint_files", lambda path, real=files.checkpoint_files: read.append(path) or real(path)
    )
    shape = shape_of(path)
    load_weights(path, shape)
    assert read == [path]
    shard = next(path.glob("*.safetensors"))
    shard.rename(tmp_path / shard.name)
    shard.symlink_to(tmp_path / shard.name)
    load_weights(path, shape)
    os.utime(tmp_path / shard.name)  # behind the link
    load_weights(path, shape)
    assert read == [path] * 3, "of other files they are read anew"
    files.forget_headers()
    load_weights(path, shape)
    assert read == [path] * 4


# Packed, cached, remembered.


@every_file
def test_a_packed_model_is_the_same_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = FILES[name](), tmp_path / "packed"
    assert main(["pack", str(path), "--out", str(target), "--quantize-rest", "int8"]) == 0
    assert " %, " in (said := capsys.readouterr().out) and f"deltic serve {target}" in said
    shape, again = shape_of(path), shape_of(target)
    assert replace(again, mrope_section=shape.mrope_section) == shape and again.formats == shape.formats
    assert_same(map_packed(target / PACKED, again, 1)[0], load_weights(path, shape, quantize="int8")[0])
    expected, found = start(path, quantize_rest="int8"), start(target)
    assert (found.info.precision, found.info.notices[0]) == (expected.info.precision, expected.info.notices[0])
    tokens, logits = answer(expected)
    again_tokens, again_logits = answer(found)
    assert again_tokens == tokens and np.array_equal(again_logits, logits)
    refused(target, "--quantize-rest int4: .* holds weights packed as int8; leave", quantize_rest="int4")
    refused(target, "--quantize int8: .* is quantised already", quantize="int8")
    assert main(["pack", str(path), "--out", str(tmp_path / "more"), "--quantize", "int8"]) == 2
    assert "is quantised already" in capsys.readouterr().err and not (tmp_path / "more").exists()


def test_a_packed_gguf_file_has_the_files_of_a_directory(tmp_path: Path) -> None:
    path, target = FILES["gguf"](), tmp_path / "packed"
    assert main(["pack", str(path), "--out", str(target)]) == 0
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", PACKED}
    assert {file.name for file in target.iterdir()} == names
    assert json.loads((target / "config.json").read_text())["tiled_value_heads"] is True
    assert ModelShape.from_directory(target).tiled_value_heads
    metadata = {"formats": json.dumps({"model.embed_tokens.weight": "Q9_K"})}
    rewrite_header(target / PACKED, **metadata)
    with pytest.raises(CheckpointError, match=rf"{PACKED}: packed in formats that are not known here \('Q9_K'\)"):
        settled(config_of(target), Cpu(), 10**9)


@some_files
def test_the_weights_cache_maps_what_was_loaded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = FILES[name](), tmp_path / "cache"
    path = tmp_path / "model" / source.name
    shutil.copytree(source.parent, path.parent) if source.is_file() else shutil.copytree(source, path)
    tokens, logits = answer(start(path, weights_cache=cache))
    (file,) = cache.iterdir()
    assert file.name.startswith(("tiny-moe-bf16-", "tiny-next-bf16-", f"{path.name}-bf16-"))
    with monkeypatch.context() as patch:
        patch.setattr("deltic.runtime.model.load_weights", None)
        second = start(path, weights_cache=cache)
    again_tokens, again_logits = answer(second)
    assert again_tokens == tokens and np.array_equal(again_logits, logits)
    start(path, weights_cache=cache, quantize_rest="int8")
    assert len(list(cache.iterdir())) == 2
    # A file of the set that changes is another model, of another cache and another fingerprint.
    config = config_of(path, weights_cache=cache)
    files = sorted(path.parent.glob("*.gguf")) if path.is_file() else sorted(path.glob("*.safetensors"))
    names, prints = {cache_file(config, path)}, {fingerprint(config, "", path, "kernels")}
    for changed in files:
        data = changed.read_bytes()
        changed.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        names.add(cache_file(config, path))
        prints.add(fingerprint(config, "", path, "kernels"))
    prints.add(fingerprint(replace(config, quantize_rest="int8"), "", path, "kernels"))
    assert len(names) == 1 + len(files) and len(prints) == 2 + len(files)


def test_prefixes_on_disk_are_of_one_format(tmp_path: Path) -> None:
    """The same checkpoint in two types, under one name: nothing of the other is found."""
    path = tmp_path / "model.gguf"
    n_files = []
    for type in ("Q8_0", "Q6_K", "Q8_0"):
        shutil.copyfile(tiny_gguf("dense", type), path)
        runner = start(path, cache_dir=tmp_path / "prefixes")
        assert runner.tiers is not None
        runner.tiers.close(5.0)
        n_files.append(sum(1 for entry in (tmp_path / "prefixes").iterdir() if entry.is_dir()))
    assert n_files == [1, 2, 2]


# Named.


@pytest.mark.parametrize(
    ("name", "precision"),
    [("qwen-fp8", "fp8"), ("mixed-nvfp4", "NVFP4"), ("gptq", "int4-g128-float16"), ("gguf", "Q4_K")],
)
def test_precision_is_that_of_most_weights(name: str, precision: str) -> None:
    info: EngineInfo = start(FILES[name]()).info
    assert info.precision == precision
    assert info.notices[0].startswith("weights as they are stored: ") and precision in info.notices[0]


def test_the_shape_that_a_command_locates_knows_no_formats_yet() -> None:
    """They take reading all headers, which the process without tensors does not."""
    assert locate(config_of(FILES["gguf"]()))[1].formats == {}
