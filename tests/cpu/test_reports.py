"""What `deltic plan` and `deltic doctor` print, with and without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deltic.commands import doctor
from deltic.commands import plan as fit
from deltic.config import ConfigError, EngineConfig
from deltic.models.fields import CheckpointError
from deltic.models.packed import PACKED
from deltic.runtime import build
from deltic.runtime.build import build_runner, is_for_gpu


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cuda_driver", lambda: None)
    monkeypatch.setattr(doctor, "cuda_driver", lambda: None)


def words(text: str) -> str:
    """The text as one line."""
    return " ".join(text.replace("│", " ").split())


def test_plan_for_a_gpu_elsewhere(without_gpu: None) -> None:
    pytest.importorskip("triton")
    report = words(fit.report(EngineConfig(dummy="qwen3.5-0.8b", device="cuda", memory_gb=20.0)))
    assert "for another machine: torch sees no GPU here" in report
    assert "of 20.00 GB" in report and "a decode of 128 rows and a prefill of 8192 tokens" in report
    assert "decode, 128 at 1024 tokens" in report, "the bytes of a step stand where no roof can be measured"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plan_of_a_speech_model(device: str, without_gpu: None) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    report = words(fit.report(EngineConfig(dummy="qwen3-tts-0.6b", device=device, memory_gb=12.0)))
    streams = 16 if device == "cpu" else 128
    assert f"states of {streams} streams of audio" in report and "of 12.00 GB" in report
    assert "state slots" not in report and "seconds of audio" in report and "longest: 4096 rows" in report
    assert ("a decode of 64 rows and a prefill of 2048 rows" in report) is (device == "cuda")
    assert ("bound by" in report) is (device == "cpu"), "no roof can be measured without the device"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "say with --memory-gb how much"),
        ({"memory_gb": 1.0}, "the model does not fit: weights 1.5 GB"),
        ({"memory_gb": 20.0, "quantize": "int8"}, "--quantize int8 is for the CPU"),
        ({"memory_gb": 20.0, "lever": ("pdl=maybe",)}, "must be one of pdl=on, pdl=off"),
    ],
)
def test_a_gpu_plan_is_refused_with_what_would_do(settings: dict[str, object], message: str, without_gpu: None) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=message):
        fit.report(EngineConfig(dummy="qwen3.5-0.8b", device="cuda", **settings))


def test_a_gpu_plan_needs_triton_and_rows(monkeypatch: pytest.MonkeyPatch, without_gpu: None, tmp_path: Path) -> None:
    config = EngineConfig(dummy="qwen3.5-0.8b", device="cuda", memory_gb=20.0)
    with monkeypatch.context() as context:
        context.setattr(build, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="needs torch and Triton"):
            fit.report(config)
    pytest.importorskip("triton")
    (tmp_path / PACKED).touch()
    with pytest.raises(CheckpointError, match="packed for the CPU"):
        build.gpu_device(config, is_here=False).prepare(EngineConfig(model=str(tmp_path)), tmp_path)


def test_without_a_gpu_it_is_the_cpu(without_gpu: None) -> None:
    assert not is_for_gpu(EngineConfig()) and not is_for_gpu(EngineConfig(device="cpu"))
    assert is_for_gpu(EngineConfig(device="cuda"))
    with pytest.raises(ConfigError, match="no GPU here"):
        build_runner(EngineConfig(device="cuda"), lambda stage, done: None)
    with pytest.raises(ConfigError, match="--lever pdl=off is for a GPU"):
        build_runner(EngineConfig(lever=("pdl=off",)), lambda stage, done: None)


def test_with_a_gpu_it_is_the_gpu_but_for_what_only_a_cpu_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(build, "sees_gpu", lambda: True)
    (tmp_path / PACKED).touch()
    assert is_for_gpu(EngineConfig())
    for settings in ({"device": "cpu"}, {"quantize": "int8"}, {"model": str(tmp_path)}):
        assert not is_for_gpu(EngineConfig(**settings))


def test_a_gpu_that_is_not_used_for_want_of_packages_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cuda_driver", object)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    runner = build_runner(EngineConfig(), lambda stage, done: None)
    assert runner.info.device == "cpu" and any("deltic[gpu]" in notice for notice in runner.info.notices)


def test_doctor_without_a_gpu(without_gpu: None) -> None:
    report = words(doctor.report())
    assert "there is no NVIDIA driver here; models run on the CPU" in report and "Promises on the GPU" not in report
    for clause, state, _ in doctor.PROMISES:
        assert f"{clause} {state}" in report


@pytest.mark.parametrize(
    ("int8", "int4", "said"),
    [
        (441, 359, "more slowly with --quantize int8 or int4 than in bfloat16"),
        (2400, 359, "more slowly with --quantize int4 than in"),
        (1190, 1150, None),
    ],
)
def test_doctor_says_where_quantised_prompts_are_slower(
    int8: float, int4: float, said: str | None, without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix unit may multiply bfloat16 faster than other instructions integers."""
    peaks = {"bf16": 1197e9, "int8": int8 * 1e9, "int4": int4 * 1e9}
    monkeypatch.setattr(doctor, "multiply_peak", lambda n_threads, format="bf16": peaks[format])
    report = words(doctor.report())
    assert ("more slowly" in report) is (said is not None) and (said or "") in report


@pytest.mark.parametrize("major", [9, 8])
def test_doctor_with_a_gpu(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from deltic.ops.gpu import launch

    chip = SimpleNamespace(name="NVIDIA X100", major=major, minor=0, multi_processor_count=132)
    monkeypatch.setattr(doctor, "cuda_driver", object)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (130 * 10**9, 141 * 10**9))
    monkeypatch.setattr(launch, "pdl_works", lambda: major >= 9)
    report = words(doctor.report())
    assert "NVIDIA X100 · 130.0 of 141.0 GB free · 132 multiprocessors" in report
    assert f"programmatic dependent launch: {'yes' if major >= 9 else 'no'}" in report
    assert "Operators on the GPU" in report and "Promises on the GPU" in report
    assert ("was measured and tested on compute capability 9.0 only" in report) == (major != 9)


def test_every_promise_has_a_state_on_both() -> None:
    assert [row[0] for row in doctor.PROMISES] == [row[0] for row in doctor.GPU_PROMISES]
    for _, state, _ in (*doctor.PROMISES, *doctor.GPU_PROMISES):
        assert state in ("holds", "not yet")
