"""What a start does around its runner, on every device: the notices, the tiers, and what the engine says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltic.config import ConfigError, EngineConfig
from deltic.models.qwen.published import PUBLISHED
from deltic.models.tts.shape import PUBLISHED_SPEECH
from deltic.ops.cpu.program import instruction_set
from deltic.runtime.build import build_runner
from deltic.runtime.cpu import device as cpu
from deltic.runtime.info import engine_info
from deltic.runtime.plan import Kind, Plan
from tests.planned import planned, settled
from tests.tiny import tiny_checkpoint
from tests.tiny_speech import tiny_speech

DEVICES = ("cpu", "cuda")


class Tiers:
    disk = None
    takes_evicted: bool | None = None

    def __init__(self) -> None:
        self.notices = ["a file was damaged"]


def device_of(name: str) -> Any:
    """The device, whose runners only remember what was done with them."""

    class Made(SimpleNamespace):
        def open_tiers(self, *given: Any) -> None:
            self.opened, self.tiers = given, Tiers()

    def runner(plan: Plan[Any], weights: Any, beside: Any, progress: Any, drafter: Any = None) -> Any:
        info = engine_info(plan, "here", kernels=instruction_set())
        return Made(plan=plan, info=info, tiers=None, adapters=None)

    if name == "cpu":
        device: Any = cpu.Cpu()
    else:
        pytest.importorskip("triton")
        from deltic.runtime.gpu.device import Gpu

        device = Gpu()
        device.begin_compiling = lambda plan: None
    device.text_runner = device.speech_runner = runner
    return device


def built(name: str, model: Path, **settings: Any) -> Any:
    config = EngineConfig(model=str(model), max_num_seqs=2, max_model_len=256, max_step_tokens=128, **settings)
    return build_runner(config, lambda stage, done: None, device_of(name))


@pytest.mark.parametrize("name", DEVICES)
def test_a_speech_model_says_that_its_prefixes_stay_in_memory(name: str, tmp_path: Path) -> None:
    info = built(name, tiny_speech("custom_voice"), cache_dir=tmp_path).info
    assert info.notices[-1].startswith("--cache-dir keeps voices only")
    for settings in ({}, {"cache_dir": tmp_path, "prefix_cache": False}):
        info = built(name, tiny_speech("custom_voice"), **settings).info
        assert not any("--cache-dir" in notice for notice in info.notices)


@pytest.mark.parametrize("name", DEVICES)
def test_a_start_says_all_of_the_engine(name: str, tmp_path: Path) -> None:
    path = tiny_checkpoint("dense", extras=True)
    runner = built(name, path, prefix_cache=False, cache_host_gb=0.001)
    assert runner.info.model_name == path.name and not runner.info.prefix_cache
    assert "skipped 3 vision tensors" in runner.info.notices[0]
    assert runner.info.notices[-1] == "a file was damaged" and runner.tiers.takes_evicted
    assert {"plan", "weights", "cache"} < runner.info.start_s.keys()
    assert runner.opened == (None, 0, "")
    runner = built(name, path, cache_dir=tmp_path, cache_disk_gb=2.0)
    assert runner.opened[:2] == (tmp_path, 2 * 10**9) and len(runner.opened[2]) == 32
    assert not runner.tiers.takes_evicted  # host memory is for preempted sequences unless it was asked for


def kind_of(device: str, name: str) -> Kind[Any]:
    if device == "cpu":
        return cpu.Cpu.text if name == "text" else cpu.Cpu.speech
    pytest.importorskip("triton")
    from deltic.ops.gpu.launch import Levers
    from deltic.runtime.gpu import device as gpu

    return gpu.TextOnGpu(Levers()) if name == "text" else gpu.SpeechOnGpu(Levers())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["text", "speech"])
def test_a_variable_that_means_nothing_here_changes_no_plan(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"n_checkpoints": 3} if name == "speech" else {"voices_dir": Path("/here")}
    settings |= {"pin_threads": True, "threads": 3} if device == "cuda" else {"lever": ("pdl=off",)}
    for setting in settings:
        monkeypatch.setenv(f"DELTIC_{setting.upper()}", "given")
    plain = EngineConfig(dummy="qwen3.5-0.8b" if name == "text" else "qwen3-tts-0.6b")
    of = device_of(device)
    given = settled(replace(plain, **settings), of, 24 * 10**9)
    assert given == settled(plain, of, 24 * 10**9) and given[1].n_pages > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["text", "speech"])
def test_what_every_planner_does(device: str, name: str) -> None:
    """Once four planners did some of it each."""
    kind = kind_of(device, name)
    shape: Any = PUBLISHED["qwen3.5-0.8b"] if name == "text" else PUBLISHED_SPEECH["qwen3-tts-0.6b"]

    def plan(gb: float = 24.0, **settings: Any) -> Plan[Any]:
        config = replace(EngineConfig(), **settings)
        return planned(config, shape, kind, 1000, int(gb * 1e9), 64 * 10**9)

    with pytest.raises(ConfigError, match=r"--memory-gb 25: only 24.0 GB.* are free.*; give at most 2[34]\.\d"):
        plan(memory_gb=25)
    longest = shape.max_position_embeddings
    with pytest.raises(ConfigError, match=f"made for {longest} positions; give at most {longest}"):
        plan(max_model_len=longest + 1)
    few = plan(n_pages=10)
    assert (few.n_pages, few.max_model_len) == (10, 640)
    with pytest.raises(ConfigError, match="--n-pages 10 cannot hold one sequence; give at least 16"):
        plan(n_pages=10, max_model_len=1024)
    for setting, value, gb, more in (
        ("n_pages", 10**6, 24.0, {}), ("max_num_seqs", 256, 6.0, {"max_model_len": 64}), ("max_step_tokens", 64 * 10**5, 24.0, {}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"does not fit into .* of weights; give at most") as refusal:
            plan(gb, **{setting: value}, **more)
        assert plan(gb, **{setting: int(str(refusal.value).split()[-1])}, **more).n_pages > 0
    with pytest.raises(ConfigError, match=r"the model does not fit: weights .* workspace .* free"):
        plan(1.5)


def test_a_gpu_with_room_for_one_checkpoint_has_it() -> None:
    """Without any there are no hits."""
    kind, shape = kind_of("cuda", "text"), PUBLISHED["qwen3.5-2b"]
    plans = [planned(EngineConfig(), shape, kind, 1000, gb * 10**8, 64 * 10**9) for gb in range(60, 120, 3)]
    for plan in plans:
        without_host = replace(plan, host_bytes=0)
        assert plan.n_checkpoints or without_host.left_bytes < plan.sequence_bytes + plan.state_bytes
    assert any(plan.n_checkpoints == 1 for plan in plans)
