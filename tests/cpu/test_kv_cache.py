"""Formats of keys and values: which one a model is run with, what it takes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from deltic.commands.plan import report
from deltic.config import ConfigError, EngineConfig, without_foreign
from deltic.models.qwen.published import published_shape
from deltic.models.qwen.shape import ModelShape
from deltic.ops.kv_formats import KV_ALIASES, KV_FORMATS, on_device
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.fingerprint import fingerprint
from deltic.runtime.model import check_keys, largest_keys, resolve_kv_cache
from tests.planned import planned, settled
from tests.tiny import tiny_checkpoint

DENSE = ModelShape.from_directory(tiny_checkpoint("dense"))


def test_names_are_those_of_the_setting() -> None:
    (field,) = [f for f in dataclasses.fields(EngineConfig) if f.name == "kv_cache_dtype"]
    assert set(field.metadata["choices"]) == {"auto", *KV_FORMATS, *KV_ALIASES}
    assert set(KV_ALIASES.values()) <= set(KV_FORMATS) and "bf16" in on_device("cpu") and "bf16" in on_device("cuda")


def test_bytes_of_a_page() -> None:
    assert {name: f.head_bytes(256) for name, f in KV_FORMATS.items()} == {
        "bf16": 1024,
        "fp8": 516,
        "turboquant_k8v4": 388,
        "int8": 520,
        "k8v4": 396,
    }
    for format in KV_FORMATS.values():
        sections = format.sections(2, 96)
        ends = [0, *(at + size for at, size in sections.values())]
        assert [at for at, _ in sections.values()] == ends[:-1] and ends[-1] == format.layer_bytes(2, 96)
        assert all(at % 64 == 0 for at in ends)
        shape = dataclasses.replace(DENSE, kv_cache_dtype=format.name)
        expected = shape.n_attn_layers * format.layer_bytes(shape.n_kv_heads, shape.head_dim)
        assert shape.page_bytes() == expected
    plain = published_shape("qwen3.5-27b")
    assert plain.kv_bytes_per_token == plain.n_attn_layers * 2 * plain.n_kv_heads * plain.head_dim * 2


def with_scheme(tmp_path: Path, scheme: object, kind: str = "dense") -> Path:
    path = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint(kind), path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_what_a_checkpoint_was_made_for(tmp_path: Path) -> None:
    path = with_scheme(tmp_path, {"num_bits": 8, "type": "float", "symmetric": True})
    name, said = resolve_kv_cache(EngineConfig(), path, "cuda")
    assert name == "fp8" and "as the checkpoint says" in said[0]
    name, said = resolve_kv_cache(EngineConfig(), path, "cpu")
    assert name == "bf16" and "--kv-cache-dtype int8" in said[0]
    for given, name in (("int8", "int8"), ("bfloat16", "bf16")):
        assert resolve_kv_cache(EngineConfig(kv_cache_dtype=given), path, "cpu")[0] == name
    for scheme in (None, {"num_bits": 8, "type": "int"}, "fp8"):
        name, said = resolve_kv_cache(EngineConfig(), with_scheme(tmp_path, scheme), "cuda")
        assert name == "bf16" and not said
    runner = build_runner(
        EngineConfig(model=str(with_scheme(tmp_path, {"num_bits": 8, "type": "float"})), threads=1, max_num_seqs=1,
                     max_model_len=128),
        lambda stage, done: None, Cpu(),
    )  # fmt: skip
    assert any("made for keys and values in fp8" in notice for notice in runner.info.notices)


def test_a_format_of_the_other_device_is_refused() -> None:
    assert resolve_kv_cache(EngineConfig(kv_cache_dtype="fp8_e4m3"), Path(), "cuda")[0] == "fp8"
    for device, given, known in (("cpu", "fp8", "bf16, int8, k8v4"), ("cuda", "int8", "bf16, fp8, turboquant_k8v4")):
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype {given} is not for a .PU, which has {known}"):
            resolve_kv_cache(EngineConfig(kv_cache_dtype=given), Path(), device)
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 is for a text model"):
        without_foreign(EngineConfig(kv_cache_dtype="int8"), "cpu", "speech")


def test_the_plan_and_the_engine_say_it() -> None:
    config = EngineConfig(model=str(tiny_checkpoint("dense")), kv_cache_dtype="k8v4", memory_gb=1.0, max_model_len=512)
    text = " ".join(report(config).replace("│", " ").split())
    assert "keys and values in k8v4" in text
    model, plan = settled(config, Cpu(), Cpu().free_bytes())
    assert model.config.kv_cache_dtype == plan.shape.kv_cache_dtype == "k8v4"
    assert plan.page_bytes == plan.shape.n_kv_layers * KV_FORMATS["k8v4"].layer_bytes(DENSE.n_kv_heads, DENSE.head_dim)
    prints = [
        fingerprint(model.config, dataclasses.replace(model.shape, kv_cache_dtype=name), model.directory, "kernels")
        for name in ("bf16", "int8", "k8v4")
    ]
    assert len(set(prints)) == 3
    runner = build_runner(dataclasses.replace(config, threads=1, n_pages=16), lambda stage, done: None, Cpu())
    assert runner.info.kv_cache_dtype == "k8v4" and runner.memory.pages[0].nbytes == runner.info.page_bytes  # type: ignore[attr-defined]


def test_more_tokens_fit() -> None:
    shape, n = published_shape("qwen3.5-27b"), {}
    for name in ("bf16", "k8v4"):
        config = EngineConfig(quantize="int4", memory_gb=24, max_num_seqs=4, max_model_len=16384)
        made = dataclasses.replace(shape, kv_cache_dtype=name)
        n[name] = planned(config, made, Cpu.text, shape.vocab_size, 30 * 10**9).n_pages
    assert n["k8v4"] > 2.3 * n["bf16"]


def test_keys_that_may_not_fit_are_refused() -> None:
    runner = build_runner(
        EngineConfig(model=str(tiny_checkpoint("dense")), threads=1, max_num_seqs=1, max_model_len=128),
        lambda stage, done: None,
        Cpu(),
    )
    weights, shape = runner.model.weights, dataclasses.replace(DENSE, kv_cache_dtype="turboquant_k8v4")  # type: ignore[attr-defined]
    bounds = largest_keys(weights, shape)
    assert len(bounds) == shape.n_attn_layers and 0 < max(bounds.values()) < 448
    check_keys(weights, shape)
    last = list(bounds)[-1]
    weights.layers[int(last.split(".")[1])].k_norm = np.full(shape.head_dim, 460 / shape.head_dim**0.5, np.float32)
    with pytest.raises(ConfigError, match=rf"keys of {last} may be as large as 4\d\d, .*448.*--kv-cache-dtype fp8"):
        check_keys(weights, shape)
    check_keys(weights, dataclasses.replace(shape, kv_cache_dtype="fp8"))
    weights.layers[int(last.split(".")[1])].k_norm[0] = np.nan
    with pytest.raises(ConfigError):
        check_keys(weights, shape)
