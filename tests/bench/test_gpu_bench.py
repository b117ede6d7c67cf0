"""`deltic bench gpu` and `bench/gpu`: rounds in turns, and files that the documents' tables are made of."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from math import prod
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from bench import gpu_tables
from bench.gpu import ablate, contexts, drafts, experts, fill, host, loops, lora, outside, same_bits
from bench.gpu.tower import tower
from bench.kept import Runs
from deltic.bench import gpu
from deltic.commands.plan import decode_bytes
from deltic.config import ConfigError, EngineConfig
from deltic.engine.drafts import Drafting
from deltic.engine.engine import Engine
from deltic.models.loading import COUNTED_ROWS
from deltic.models.qwen.published import published_shape
from deltic.models.qwen.shape import ModelShape
from deltic.models.vision.shape import VisionShape
from deltic.models.vision.weights import dummy_vision
from deltic.ops.gpu.launch import INTERPRETED, Levers, launches
from deltic.ops.gpu.weight import DeviceStore
from deltic.runtime.adapters import AdapterRoom
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.text import GpuTextRunner
from tests.gpu.test_gpu_block_drafter import small
from tests.gpu.test_gpu_drafts import build, small_checkpoint
from tests.gpu.test_gpu_lora import runner as adapted_runner
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.long


@pytest.mark.skipif(not INTERPRETED, reason="needs no GPU")
def test_a_prompt_that_comes_again_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DeviceStore", lambda device, **given: DeviceStore("cpu", **given))
    monkeypatch.setattr(gpu, "begin_compiling", lambda *given: SimpleNamespace(wait=lambda progress: None))
    config = EngineConfig(model=str(tiny_checkpoint("dense")), max_model_len=128, max_step_tokens=128, n_pages=8)
    engine = gpu.GpuModel.load(config).engine(Levers(), 1)
    for _ in range(2):
        gpu.decode(engine, 1, 70, 1)
    stats = engine.stats()
    assert stats.n_prompt_tokens == 2 * 70 and stats.cache.n_lookups == 0


@pytest.mark.skipif(not INTERPRETED, reason="needs no GPU")
def test_what_a_plan_promises_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "need_gpu", lambda *_: None)
    monkeypatch.setattr(fill, "gpu_device", lambda config: Gpu())
    monkeypatch.setattr(fill, "free_bytes", lambda device: 10**9)
    monkeypatch.setattr(fill, "N_GENERATED", 3)
    sizes = {"max_model_len": 128, "max_step_tokens": 128, "max_num_seqs": 3, "n_pages": 5, "n_checkpoints": 0}
    config = EngineConfig(model=str(tiny_checkpoint("dense")), cache_host_gb=0.0, **sizes)
    arguments = argparse.Namespace(as_chip=None, format=None, out=str(tmp_path / "2026-01-01-h200"))
    assert fill.bench(arguments, config) == 0
    result = json.loads(next((tmp_path / "2026-01-01-h200").glob("gpu-fill-*")).read_text())
    assert result["sequences"] == 2 and result["ended"] == {"length at 128": 2}, "as many as pages hold"


@pytest.mark.skipif(not INTERPRETED, reason="without a GPU: nothing is started")
def test_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "N_STEPS", 5)
    runner = host.make_runner(3)
    n_replayed = runner.replays.n_replayed
    assert all(0 < cpu < 1e6 and wall > 0 for cpu, wall in host.steps_us(runner, 2))
    assert runner.replays.n_replayed > n_replayed
    ranks = [runner, host.make_runner(3)]
    before = [own.replays.n_replayed for own in ranks]
    assert len(host.steps_us(host.as_ranks(ranks), 2)) == 5
    assert len({own.replays.n_replayed - n for own, n in zip(ranks, before, strict=True)} - {0}) == 1, "of each as many"


def test_rounds_take_turns_and_their_range_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = GpuTextRunner.__new__(GpuTextRunner)
    monkeypatch.setattr(runner, "plan", SimpleNamespace(quantize=None, n_shards=1), raising=False)
    monkeypatch.setattr(runner, "levers", Levers(pdl=False), raising=False)
    monkeypatch.setattr(gpu, "n_launches", lambda runner, n: 454)
    monkeypatch.setattr(gpu, "replay_ms", lambda runner, n, n_keys: 1.0)
    engine = SimpleNamespace(runner=runner, info=SimpleNamespace(device="NVIDIA H200"))
    device = SimpleNamespace(n_gpus=1, n_cuts=1)
    run = SimpleNamespace(shape=published_shape("qwen3.5-27b"))
    model = SimpleNamespace(run=run, engine=lambda levers, n: engine, device=device)
    order, asked = list[tuple[str, int]](), list[tuple[object, ...]]()

    def decode(engine: object, n: int, n_prompt: int, n_output: int, seed: int) -> tuple[list[float], list[list[int]]]:
        order.append(("decode", n))
        return [0.01 * (1 + 0.1 * len(order))] * n_output, []

    def prefill(engine: object, n_tokens: int) -> list[float]:
        order.append(("prefill", n_tokens))
        return [600.0 + len(order)] * 5

    monkeypatch.setattr(gpu, "need_gpu", lambda *_: None)
    monkeypatch.setattr(gpu.GpuRoofs, "measured", classmethod(lambda cls: cls(4.4e12, 7.9e14)))
    load = gpu.GpuModel.load
    monkeypatch.setattr(gpu.GpuModel, "load", classmethod(lambda cls, *given: asked.append(given) or model))
    monkeypatch.setattr(gpu, "decode", decode)
    monkeypatch.setattr(gpu, "prefill_ms", prefill)
    out = tmp_path / "2026-01-01-h200"
    arguments = argparse.Namespace(
        as_chip=None,
        n="1,128",
        prompt=128,
        output=256,
        prefill="8192",
        rounds=3,
        format=None,
        layers=None,
        out=str(out),
    )
    assert gpu.bench_gpu(arguments, EngineConfig(dummy="qwen3.5-27b")) == 0
    one_round = [("decode", 1), ("decode", 128), ("prefill", 8192)]
    assert order == [("decode", 1), ("decode", 128), *one_round * 3], "each number once before, then rounds"
    (file,) = out.glob("gpu-qwen3.5-27b-*.json")
    found = json.loads(file.read_text())
    assert (found["prompt"], found["output"], found["rounds"]) == (128, 256, 3)
    assert not found["levers"]["pdl"], "those of the runner"
    assert len(found["rows"][0]["round_ms"]) == len(found["prefill"]["8192"]["round_ms"]) == 3
    found["code"]["modified"] = False  # where this test runs the tree may have changes
    file.write_text(json.dumps(found))
    for config, name in (
        (EngineConfig(dummy="qwen3.5-27b"), "Q9"),
        (EngineConfig(model=""), "fp8"),
        (EngineConfig(dummy="qwen3.5-27b", quantize="fp8", device="cuda"), "fp8"),
    ):
        with pytest.raises(
            ConfigError, match=f"--format {name}: with --dummy, without --quantize, and one of bf16, int8"
        ):
            load(config, name)
    for layers in (3, 65):
        with pytest.raises(ConfigError, match=f"--layers {layers}: with --dummy, and from 4 to 64"):
            load(EngineConfig(dummy="qwen3.5-27b", device="cuda"), None, layers)
    arguments.layers = 8
    assert gpu.bench_gpu(arguments, EngineConfig(dummy="qwen3.5-27b")) == 0 and asked[-1][1:] == (None, 8)
    assert len([*out.glob("gpu-qwen3.5-27b-layers-8-*.json")]) == 1
    assert gpu_tables.decodes(Runs(tmp_path)).startswith("No run"), "a lever is off"
    found["levers"]["pdl"] = True
    file.write_text(json.dumps(found))
    made = gpu_tables.decodes(Runs(tmp_path))
    assert "| qwen3.5-27b | 16.0 (13.0 .. 19.0) |" in made and "608 (605 .. 611) |" in made
    assert "128 prompt and 256 generated tokens each" in made
    monkeypatch.setattr(gpu, "prefill_ms", lambda engine, n: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gpu.bench_gpu(arguments, EngineConfig(dummy="qwen3.5-0.8b"))
    (file,) = out.glob("gpu-qwen3.5-0.8b-*.json")
    found = json.loads(file.read_text())
    assert found["incomplete"] and [row["n"] for row in found["rows"]] == [1, 128], "what was measured is kept"


@pytest.mark.long
def test_drafts_that_are_right_as_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head and without one, more tokens a step the likelier they are right; the runner is as it was then."""
    draw = Random(0)
    prompts, answers = ({"0": draw.choices(range(200), k=k)} for k in (4, 6))  # nothing repeats itself
    monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)  # every row is worth it
    monkeypatch.setattr(Drafting, "_is_probe", lambda self, n: False)
    for runner in (build("dense"), small()):  # with a draft head, and with a block drafter
        own = runner.draft_head or runner.block_drafter
        sure, never = drafts.accept_rows(runner, 1, [1.0, 0.0], prompts, answers, 1)
        for name in ("head", "free"):
            assert 1.0 == never[f"{name}_tokens_a_step"] < sure[f"{name}_tokens_a_step"]
            assert len(sure[f"{name}_ms"]) == 1
        assert (runner.draft_head or runner.block_drafter) is own is not None and runner.info.has_draft_head
    asked: list[int] = []

    def engine(levers: object, n: int, max_drafts: int = 0, draft_model: str | None = None) -> SimpleNamespace:
        asked.append(max_drafts)
        return SimpleNamespace(runner=runner)

    monkeypatch.setattr(drafts, "need_gpu", lambda *_: None)
    monkeypatch.setattr(gpu.GpuModel, "load", classmethod(lambda cls, *_: SimpleNamespace(engine=engine)))
    monkeypatch.setattr(drafts, "decode", lambda *_, seed: ([0.01, 0.02, 0.03], []))
    rows = [{"n": 1, "accept": 0.8, "free_ms": [10.0], "free_tokens_a_step": 2.0}]  # of a model without a head
    monkeypatch.setattr(drafts, "accept_rows", lambda *_: rows)
    out = tmp_path / "2026-01-01-h200"
    arguments = argparse.Namespace(
        as_chip=None, n="1", prompt=128, output=256, rounds=2, format=None, out=str(out), accept="0.8", dummy_head=None
    )
    assert drafts.bench(arguments, EngineConfig(dummy="qwen3.5-27b", max_drafts=3)) == 0
    (file,) = out.glob("gpu-accept-qwen3.5-27b-*.json")
    found = json.loads(file.read_text())
    assert asked == [0, 3] and found["rows"] == [rows[0] | {"plain_ms": [20.0, 20.0]}]
    rows[0] |= {"head_ms": [8.0], "head_tokens_a_step": 2.5}
    config = EngineConfig(dummy="qwen3.5-27b", max_drafts=3, draft_model="heads/dflash-27b")
    assert drafts.bench(arguments, config) == 0
    (file,) = out.glob("gpu-accept-block-qwen3.5-27b-*.json")
    found = json.loads(file.read_text())
    assert found["draft_model"] == "dflash-27b"
    found["code"]["modified"] = False  # where this test runs the tree may have changes
    file.write_text(json.dumps(found))
    made = gpu_tables.drafts(Runs(tmp_path), of_blocks=True)
    assert (
        "with the block drafter" in made
        and "| qwen3.5-27b, dflash | 1 | 0.8 | 20.0 (20.0 .. 20.0) | 8.00, 2.50 | 2.50 |" in made
    )


def test_steps_behind_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The roof has the bytes of keys and values in their format; no step is behind more tokens than a sequence may have."""
    runner = GpuTextRunner.__new__(GpuTextRunner)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(runner, "plan", SimpleNamespace(quantize=None, n_shards=1, n_pages=9), raising=False)
    monkeypatch.setattr(runner, "levers", Levers(), raising=False)
    monkeypatch.setattr(
        contexts, "replay_ms", lambda runner, n, n_keys, *n_more: asked.append((n, n_keys + prod(n_more) + 10)) or 20.0
    )
    shape = replace(published_shape("qwen3.5-27b"), kv_cache_dtype="fp8")
    engine = SimpleNamespace(runner=runner, info=SimpleNamespace(device="NVIDIA H200"))
    device = SimpleNamespace(n_gpus=1, n_cuts=1)
    model = SimpleNamespace(run=SimpleNamespace(shape=shape), engine=lambda levers, n: engine, device=device)
    monkeypatch.setattr(contexts, "need_gpu", lambda *_: None)
    monkeypatch.setattr(gpu.GpuRoofs, "measured", classmethod(lambda cls: cls(4.4e12, 7.9e14)))
    monkeypatch.setattr(gpu.GpuModel, "load", classmethod(lambda cls, config, format, layers: model))
    given = dict(n="1,8", format=None, layers=None, out=str(tmp_path / "2026-01-01-h200"))
    assert (
        contexts.bench(
            argparse.Namespace(as_chip=None, context="1024,32768", **given), EngineConfig(dummy="qwen3.5-27b")
        )
        == 0
    )
    assert asked == [(1, 1024), (8, 1024), (1, 32768), (8, 32768)]
    found = json.loads(next((tmp_path / "2026-01-01-h200").glob("gpu-context-*.json")).read_text())
    one, *_, most = found["rows"]
    assert found["kv_cache_dtype"] == "fp8" and most["kv_gb"] == pytest.approx(8 * 32768 * 16 * 4 * 516 / 1e9, rel=2e-3)
    assert most["roof"] - one["roof"] == pytest.approx((most["gb"] - one["gb"]) / 4.4e3 / 0.02, abs=1e-3)
    for context, words in (("60", "at least 61"), ("2048", "more than --max-model-len 1024")):
        config = EngineConfig(dummy="qwen3.5-27b", max_model_len=1024)
        with pytest.raises(ConfigError, match=words):
            contexts.bench(argparse.Namespace(as_chip=None, context=context, **given), config)


@pytest.mark.long
def test_adapters_beside_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes and prompts with random adapters and without, on one runner."""
    runner = adapted_runner("dense")
    plain = Engine(runner)

    def engine(levers: object, n: int, adapters: AdapterRoom) -> Engine:
        assert (adapters.n, adapters.rank) == (2, 4) and adapters.n_bytes > 0
        return plain

    model = SimpleNamespace(run=SimpleNamespace(shape=runner.plan.shape, cuts=()), engine=engine)
    monkeypatch.setattr(lora, "need_gpu", lambda *_: None)
    monkeypatch.setattr(gpu.GpuModel, "load", classmethod(lambda cls, *_: model))
    monkeypatch.setattr(gpu.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(lora, "replay_ms", lambda runner, n, n_keys, adapters=(): 1.0 + len(adapters))
    monkeypatch.setattr(lora, "prefill_ms", lambda engine, n, adapter: [2.0 if adapter else 1.0])
    out = tmp_path / "2026-01-01-h200"
    arguments = argparse.Namespace(
        as_chip=None,
        n="2", prompt=3, output=8, prefill="64", rounds=1, format=None, out=str(out), n_loras=2, lora_rank=4
    )  # fmt: skip
    assert lora.bench(arguments, EngineConfig(dummy="qwen3.5-27b")) == 0
    (file,) = out.glob("gpu-lora-qwen3.5-27b-*.json")
    decode, prefill = json.loads(file.read_text())["rows"]
    assert (decode["alone_ms"], decode["lora_alone_ms"]) == (1.0, 3.0) and len(decode["lora_ms"]) == 1
    assert (prefill["plain_ms"], prefill["lora_ms"]) == ([1.0], [2.0])


def test_a_run_as_served_has_no_lever_switched() -> None:
    served = asdict(Levers())
    assert gpu_tables.is_plain({"levers": served})
    assert not any(gpu_tables.is_plain({"levers": served | {name: not on}}) for name, on in served.items())


def test_drafts_are_ablated_where_there_are_any() -> None:
    names = [name for name, _, _ in ablate.variants(0)]
    assert names[0] == "as served" and {"pdl=off", "hopper=off"} <= set(names) and len(set(names)) == len(names)
    assert [(name, n) for name, _, n in ablate.variants(8)] == [*((name, 0) for name in names), ("max_drafts=8", 8)]
    assert ablate.variants(8)[-1][1] == ablate.variants(8)[0][1]
    assert [name for name, _, _ in ablate.variants(0, "hopper,pdl")] == ["as served", "pdl=off", "hopper=off"]
    with pytest.raises(ConfigError, match="--levers few: no lever few; there are graphs, "):
        ablate.variants(0, "few")


def test_every_lever_is_ablated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its time, its launches, and whether tokens stayed the same."""
    runner = GpuTextRunner.__new__(GpuTextRunner)
    monkeypatch.setattr(ablate, "n_launches", lambda runner, n: 454)
    made: list[Levers] = []

    def engine(levers: Levers, n: int, max_drafts: int) -> SimpleNamespace:
        made.append(levers)
        return SimpleNamespace(runner=runner)

    monkeypatch.setattr(ablate, "need_gpu", lambda *_: None)
    monkeypatch.setattr(gpu.GpuModel, "load", classmethod(lambda cls, *given: SimpleNamespace(engine=engine)))
    monkeypatch.setattr(ablate, "decode", lambda engine, n, *_, seed: ([0.01] * n, [[n, made[-1].split_k]]))
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    given = dict(as_chip=None, n="1,8", format=None, output=8, out=str(tmp_path / "2026-01-01-h200"))
    arguments = argparse.Namespace(**given, levers="", rounds=1)
    assert ablate.bench(arguments, EngineConfig(dummy="qwen3.5-0.8b")) == 0
    rows = json.loads(next((tmp_path / "2026-01-01-h200").glob("ablate-qwen3.5-0.8b-*.json")).read_text())["rows"]
    assert [row["lever"] for row in rows] == [name for name, _, _ in ablate.variants(0)]
    assert [row["lever"] for row in rows if not row["same_tokens"]] == ["split_k=off"]
    assert {(row["ms_1"], row["ms_8"], row["launches"]) for row in rows} == {(10.0, 10.0, 454)}
    made.clear()
    arguments = argparse.Namespace(**given, levers="pdl", rounds=2)
    assert ablate.bench(arguments, EngineConfig(dummy="qwen3.5-0.8b")) == 0
    assert [levers.pdl for levers in made] == [True, False, True, False], "in turns"


@pytest.mark.skipif(not INTERPRETED, reason="needs no GPU")
@pytest.mark.parametrize("format", ["fp8", "bf16"])
def test_experts_by_cuts(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(step: Callable[[], None], n: int = 1) -> float:
        step()
        return 2.0

    mixture = experts.Mixture(format, 256, 6, 3, 64)
    monkeypatch.setattr(experts, "N_LAYERS", 1)
    monkeypatch.setattr(experts, "graph_us", started)
    monkeypatch.setattr(experts, "Mixture", lambda name: mixture)
    monkeypatch.setattr(experts, "Layers", partial(experts.Layers, device="cpu"))
    monkeypatch.setattr(experts.GpuRoofs, "measured", classmethod(lambda cls: cls(4.4e12, 7.9e14)))
    flags = ["--format", format, "--n", "5", "--cut", "block_n=32", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["experts", *flags, "--prefill", ""])
    experts.main()
    flags += ["--prefill", "64"]
    monkeypatch.setattr("sys.argv", ["experts", *flags])
    experts.main()
    made = json.loads((tmp_path / "experts.json").read_text())
    plain, cut, prefill = made["rows"]
    n_bytes = 3 * 256 * 64 * 2 if format == "bf16" else 3 * 256 * 64 + 2 * 128 * 4 + 256 * 4
    assert not made["failed"] and prefill["t"] == 64 and 1 <= plain["experts"] <= 6
    assert plain["TB_s"] == pytest.approx((plain["experts"] + 1) * n_bytes / 2e-6 / 1e12, rel=0.01)
    assert cut["cut"] == {"block_n": 32} and cut["same"] is True


@pytest.mark.skipif(not INTERPRETED, reason="needs no GPU")
def test_experts_outside_beside_all_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are the same with half of the slots, what was brought is counted and part of the roof, and the table has it."""

    def slow(engine: Engine, n: int, *given: int, **more: Any) -> tuple[list[float], list[list[int]]]:
        return [0.01], gpu.decode(engine, n, *given, **more)[1]

    monkeypatch.setattr(outside, "decode", slow)
    monkeypatch.setattr(outside, "need_gpu", lambda *_: None)
    monkeypatch.setattr(outside, "host_link", lambda: 1e8)
    monkeypatch.setattr(outside.GpuRoofs, "measured", classmethod(lambda cls: cls(1e9, 7.9e14)))

    def two_prompts(engine: Engine, n: int, rounds: int) -> list[float]:
        """Of 64 tokens, which use all four experts of four layers, of which two are in slots."""
        gpu.prefill_ms(engine, n, rounds)
        return [2.0] * rounds

    monkeypatch.setattr(outside, "prefill_ms", two_prompts)
    monkeypatch.setattr(gpu, "DeviceStore", lambda device, **given: DeviceStore("cpu", **given))
    monkeypatch.setattr(gpu, "begin_compiling", lambda *given: SimpleNamespace(wait=lambda progress: None))
    monkeypatch.setattr(gpu.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    sizes = {"max_model_len": 128, "max_step_tokens": 128, "n_pages": 16}
    config = EngineConfig(model=str(small_checkpoint("moe")), **sizes)
    out = tmp_path / "2026-01-01-h200"
    given = dict(format=None, out=str(out), n="2", prefill="64", output=5, rounds=1, answers=3, minutes=9.0)
    assert outside.bench(argparse.Namespace(gb="0.0001", skew="1,3", **given), config) == 0
    (file,) = out.glob("gpu-outside-*.json")
    found = json.loads(file.read_text())
    assert [row["differ"] for row in found["rows"][5:]] == [0] * 5
    assert [row["compared"] for row in found["rows"][5:]] == [2, 0, 2, 0, 3]
    one = found["rows"][5]
    brought = 4 * 2 * 3 * 64 * 32 * 2
    assert one["slots"] == 2 and one["hits"] == 0.5 and one["mb"] == 0.1, "all four experts of a layer are used"
    shape = ModelShape.from_directory(small_checkpoint("moe"))
    inside = decode_bytes(shape, None, 2, outside.PROMPT + 2, COUNTED_ROWS)
    assert one["experts"] == 4 and one["roof"] == pytest.approx((inside / 1e9 + brought / 1e8) / 0.01, abs=2e-4)
    prompt = found["rows"][6]
    assert prompt["mb"] == round(brought / 1e6, 1) and prompt["roof"] == pytest.approx(brought / 1e8 / 0.002, abs=1e-4)
    assert "roof" not in found["rows"][0] and found["rows"][0]["tok_s"] == 200
    found["code"]["modified"], found["shape"] = False, "tiny"
    file.write_text(json.dumps(found))
    made = gpu_tables.outside(Runs(tmp_path))
    assert "| tiny | all | 1 |" in made and "| tiny | 0.0001 GB, 2 | 3 |" in made and "0 of 7 (tiny)" in made
    assert "| N = 2 | prefill of 64 |" in made
    late = given | {"minutes": 0.0, "answers": 0, "out": str(tmp_path / "late")}
    outside.bench(argparse.Namespace(gb="0.0001", skew="1", **late), config)
    assert len(json.loads(next((tmp_path / "late").glob("*.json")).read_text())["rows"]) == 2, "no memory was begun"


def test_a_picture_is_encoded(device: str) -> None:
    shape = VisionShape(depth=1, hidden_size=128, n_heads=2, intermediate_size=96, out_hidden_size=64)
    start, n_before = tower(shape, dummy_vision(shape, store=DeviceStore(device)), 64), launches.n
    start()
    assert launches.n > n_before


@pytest.mark.parametrize("flag", ["--n", "--prefill"])
def test_what_is_no_number_is_told_by_its_flag(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "need_gpu", lambda *_: None)
    given = {"n": "1", "prefill": "8192"} | {flag.removeprefix("--"): "1,x"}
    with pytest.raises(ConfigError, match=f"{flag} '1,x'"):
        gpu.bench_gpu(argparse.Namespace(as_chip=None, **given), EngineConfig(dummy="qwen3.5-0.8b"))


def test_the_loop_that_multiplies_is_counted() -> None:
    """Of two loops that do, one around the other, the inner one; predicates and what is no instruction are left out."""
    text = """.L_x_1:
        /*0000*/                   LDG.E R0, desc[UR4][R2.64] ;
.L_x_2:
        /*0010*/                   LOP3.LUT R4, R0, 0xf, RZ, 0xc0, !PT ;
                                                                           /* 0x000fc800078e00ff */
        /*0020*/                   HGMMA.64x16x16.F32.BF16 R8, R4, gdesc[UR8], R8 ;
        /*0030*/               @P0 BRA `(.L_x_2) ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*0060*/                   EXIT ;
"""
    assert loops.loop_of(text) == {"LOP3.LUT": 1, "HGMMA.64x16x16.F32.BF16": 1, "BRA": 1}
    assert not loops.loop_of(text.replace("HGMMA", "FADD"))


def test_a_turn_is_counted_without_what_is_behind_the_last() -> None:
    """Loops that wait inside it, and stores that another turn jumps over, are not those of a turn."""
    text = """.L_x_1:
        /*0000*/                   LDS R0, [R2] ;
        /*0010*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
.L_x_4:
        /*0020*/              @!P2 BRA `(.L_x_5) ;
        /*0030*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/                   STG.E [R2], R8 ;
.L_x_2:
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_5:
        /*0080*/                   BRA `(.L_x_4) ;
"""
    assert loops.turn_of(text) == {"LDS": 1, "HMMA.16816.F32.BF16": 2, "BRA": 3}


@pytest.mark.skipif(not INTERPRETED, reason="needs no GPU")
def test_answers_on_several_numbers_of_gpus_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once and one alone; what differs is counted, and a number of GPUs that is not there is left out."""
    monkeypatch.setattr(same_bits, "need_gpu", lambda *_: None)
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu, "begin_compiling", lambda *given: SimpleNamespace(wait=lambda progress: None))
    monkeypatch.setattr(same_bits, "LONGEST", 40)
    sizes = {"max_model_len": 128, "max_step_tokens": 128, "n_pages": 16}
    config = EngineConfig(model=str(tiny_checkpoint("dense")), tp_invariant=2, **sizes)
    given = dict(as_chip=None, format=None, layers=None, prompts=3, output=4, out=str(tmp_path / "2026-01-01-h200"))
    assert same_bits.bench(argparse.Namespace(on="1,1,8", **given), config) == 0
    (file,) = (tmp_path / "2026-01-01-h200").iterdir()
    found = json.loads(file.read_text())
    assert [(row["gpus"], row["compared"], row["tokens"], row["differ"]) for row in found["rows"]] == [
        (1, 4, 16, 0)
    ] * 2
    own = same_bits.answers
    made = list[int]()

    def changed(engine: Engine, prompts: list[list[int]], n_output: int) -> list[same_bits.Answer]:
        made.append(len(prompts))
        answers = own(engine, prompts, n_output)
        if len(made) > 2:
            answers[0][0] = (*answers[0][0][:2], [9.0])
        return answers

    monkeypatch.setattr(same_bits, "answers", changed)
    late = given | {"out": str(tmp_path / "late")}
    assert same_bits.bench(argparse.Namespace(on="1,1", **late), config) == 1
    assert json.loads(next((tmp_path / "late").iterdir()).read_text())["rows"][1]["differ"] == 2
    with pytest.raises(ConfigError, match="--tp-invariant: say how many parts"):
        same_bits.bench(argparse.Namespace(on="1", **given), replace(config, tp_invariant=None))
