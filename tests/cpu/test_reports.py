"""What `deltic plan` and `deltic doctor` print, with and without a GPU."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from deltic.commands import doctor
from deltic.commands import plan as fit
from deltic.config import ConfigError, EngineConfig
from deltic.models.checkpoint import DEMO
from deltic.models.fields import CheckpointError
from deltic.models.files import PACKED
from deltic.models.loading import COUNTED, Declaration
from deltic.models.qwen.published import PUBLISHED
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import declare_weights
from deltic.models.tts.shape import PUBLISHED_SPEECH
from deltic.roofs import beyond_caches
from deltic.runtime import build
from deltic.runtime.build import build_runner, is_for_gpu
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.model import TextModel
from tests.fake_hub import Long, hub_with
from tests.planned import settled
from tests.tiny import tiny_checkpoint
from tests.tiny_drafter import tiny_drafter
from tests.tiny_gguf import tiny_gguf
from tests.tiny_quantised import tiny_quantised
from tests.tiny_speech import tiny_speech


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
    assert "Decoders of pictures" not in report
    sees = EngineConfig(dummy="qwen3.5-0.8b", device="cuda", memory_gb=20.0, max_picture_tokens=1024)
    assert "Decoders of pictures may take up to 6.4 GB of the host's memory more." in words(fit.report(sees))
    assert "must be free for what GPUs read there" not in report
    large = words(fit.report(EngineConfig(dummy="qwen3.8-flash-next", device="cuda", memory_gb=40.0)))
    assert "experts 241.592" in large and "The table of n-grams, 102.4 GB, is copied" in large
    assert "345.3 GB of the host's memory must be free for what GPUs read there, beside the host tier." in large


def test_a_plan_says_what_stays_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much, and that the disk bounds the speed once there is a file to measure."""
    config = EngineConfig(
        model=str(tiny_checkpoint("moe")), quantize="int4", device="cpu", threads=1, max_num_seqs=1, max_model_len=64,
        weights_cache=tmp_path, expert_memory=0.0,
    )  # fmt: skip
    report = words(fit.report(config))
    assert "not in memory: on the disk, and read when they are used" in report and "experts from outside" not in report
    build_runner(config, lambda stage, done: None, Cpu())
    for speed, slower in ((1e15, "arithmetic"), (1e3, "the disk")):
        monkeypatch.setattr(fit, "disk_bandwidth", lambda file, speed=speed: speed)
        report = words(fit.report(config))
        assert "experts from outside" in report and re.search(rf"prefill\W+\d+\W+{slower}", report), report
    assert "not in memory" not in words(fit.report(replace(config, expert_memory=None)))


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
        ({"memory_gb": 20.0, "threads": 3}, "--threads 3 is for the CPU"),
        ({"memory_gb": 20.0, "lever": ("pdl=maybe",)}, "must be one of pdl=on, pdl=off"),
        ({"memory_gb": 20.0, "tensor_parallel": 16}, "--tensor-parallel 16: give 1, 2, 4 or 8"),
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
        build.gpu_device(config, is_here=False).check(EngineConfig(model=str(tmp_path)), tmp_path)


def test_a_plan_for_several_gpus(without_gpu: None) -> None:
    """Of each: its part of the weights, and pages and states of its heads. The host has those of all."""
    pytest.importorskip("triton")
    plans = {}
    for n in (1, 2, 8):
        config = EngineConfig(dummy="qwen3.5-27b", device="cuda", tensor_parallel=n, cache_host_gb=1.0, n_pages=600)
        device = build.gpu_device(config, is_here=False)
        _, plans[n] = settled(config, device, 130 * 10**9)
        assert plans[n].n_gpus == n and len(plans[n].cuts) == (n if n > 1 else 0)
    one, two, eight = plans.values()
    assert 0.5 < two.weight_bytes / one.weight_bytes < 0.53  # the embedding is whole on each
    assert two.page_bytes * 2 == one.page_bytes == eight.page_bytes * 4  # of 4 heads of keys, two GPUs have one each
    assert two.state_bytes * 2 == one.state_bytes == eight.state_bytes * 8
    assert two.n_host_units == one.n_host_units == 2 * eight.n_host_units
    device = build.gpu_device(replace(config, tensor_parallel=2, tp_invariant=4), is_here=False)
    _, both = settled(replace(config, tensor_parallel=2, tp_invariant=4), device, 130 * 10**9)
    assert (both.n_gpus, both.n_shards, len(both.cuts)) == (2, 2, 4) and both.cuts_of(1) == both.cuts[2:]
    assert (
        both.page_bytes == two.page_bytes
        and both.state_bytes == two.state_bytes
        and both.n_host_units == two.n_host_units
    )
    assert two.weight_bytes < both.weight_bytes < 1.1 * two.weight_bytes
    report = words(fit.report(EngineConfig(dummy="qwen3.5-27b", device="cuda", memory_gb=130.0, tensor_parallel=2)))
    assert "26.90 B parameters" in report and "on each of 2 GPUs" in report and "Sums on their way" not in report
    config = EngineConfig(dummy="qwen3.5-27b", device="cuda", memory_gb=130.0, tensor_parallel=2, lever=("peer=off",))
    assert "Sums on their way between GPUs take 0.11 GB of the host's memory more." in words(fit.report(config))
    report = words(fit.report(EngineConfig(dummy="qwen3.5-27b", device="cuda", memory_gb=130.0, tp_invariant=2)))
    assert "Allocated before ready, 2 of 2 parts" in report
    wide = EngineConfig(dummy="qwen3.5-35b-a3b", device="cuda", memory_gb=130.0, tensor_parallel=8)
    told = "xperts are dealt out whole, 32 of 256 to each of 8 parts"
    assert told in words(fit.report(wide, format="fp8")) and told not in words(fit.report(wide))
    assert told in words(fit.report(replace(wide, expert_parallel=True)))
    adapted = replace(wide, allow_lora_loading=True)
    idle = "4 of 8 parts have no columns of their own in some matrices: groups of scales are wide"
    assert idle in words(fit.report(adapted, format="fp8"))


def test_a_model_on_several_gpus_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [EngineConfig(tensor_parallel=2), EngineConfig()]
    build.check_alone(several)  # there is no GPU: a variable of the environment means nothing
    monkeypatch.setattr(build, "sees_gpu", lambda: True)
    build.check_alone([several[0], EngineConfig(device="cpu")])
    build.check_alone([EngineConfig(tp_invariant=2), several[1]])  # parts of one GPU wait for nobody
    with pytest.raises(ConfigError, match="--tensor-parallel 2: a model on several GPUs is served alone"):
        build.check_alone(several)


def test_gpus_that_are_not_there_or_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(build, "sees_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    config = EngineConfig(device="cuda", tensor_parallel=2, dummy="qwen3.5-27b")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--tensor-parallel 2: GPUs that torch sees here: 1"):
        build.gpu_device(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    reaching, meeting = build.gpu_device(config, is_here=False), build.gpu_device(config)
    assert reaching.levers.peer and not meeting.levers.peer
    needed = [settled(config, device, 130 * 10**9)[1].workspace_bytes for device in (reaching, meeting)]
    assert needed[1] < needed[0]  # what they send each other is in the host's memory
    build.gpu_device(EngineConfig(dummy="qwen3-tts-0.6b", device="cuda", tensor_parallel=2))  # which runs on one


def test_without_a_gpu_it_is_the_cpu(without_gpu: None) -> None:
    assert not is_for_gpu(EngineConfig()) and not is_for_gpu(EngineConfig(device="cpu"))
    assert is_for_gpu(EngineConfig(device="cuda"))
    with pytest.raises(ConfigError, match="no GPU here"):
        build_runner(EngineConfig(device="cuda"), lambda stage, done: None)
    with pytest.raises(ConfigError, match="--lever pdl=off is for a GPU"):
        build_runner(EngineConfig(lever=("pdl=off",)), lambda stage, done: None)
    with pytest.raises(ConfigError, match="--tensor-parallel 2 is for a GPU"):
        build_runner(EngineConfig(tensor_parallel=2), lambda stage, done: None)


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


def test_doctor_fits_a_screen(without_gpu: None) -> None:
    lines = doctor.report().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 110
    assert "no NVIDIA driver: models run on the CPU" in words("\n".join(lines))
    assert [line.split()[0] for line in lines if line.startswith("Qwen/")] == list(doctor.MODELS.values())
    (header,) = (line for line in lines if line.startswith("weights in GB"))
    assert re.findall(r"CPU, \w+", header) == ["CPU, bfloat16", "CPU, int8", "CPU, int4"]


def test_doctor_says_what_a_server_would_find(
    without_gpu: None, known_roofs: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "HF_HUB_CACHE", str(tmp_path / "not" / "there"))
    real = resource.getrlimit
    few = {resource.RLIMIT_NOFILE: (1024, 2048)}
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda what: few.get(what) or real(what))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "av" else object())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor.ServerConfig, "port", port)
        said = words(doctor.report())
    assert f"port {port} is taken: give --port" in said and "only 2048 connections and files" in said
    assert "GB of disk are free for downloads" in said
    assert "takes pictures, speech, pdf · for more: pip install 'deltic[video]'" in said
    assert f"port {port} is free" in words(doctor.report())


@pytest.mark.parametrize(
    ("sizes", "shared", "n_mib"),
    [
        (("32768K", "32768K"), ("0-1", "0-1"), 128),
        (("32768K", "32768K"), ("0", "1"), 256),
        (("36864K", "36864K"), ("0-1", "0-1"), 144),
        (("98304K", "98304K"), ("0", "1"), 512),
        ((), (), 512),
    ],
)
def test_memory_is_read_that_the_caches_do_not_hold(
    sizes: tuple[str, ...], shared: tuple[str, ...], n_mib: int, tmp_path: Path
) -> None:
    """And no more of it, since what is touched first takes long."""
    for i, (size, cpus) in enumerate(zip(sizes, shared, strict=True)):
        at = tmp_path / f"cpu{i}" / "cache" / "index3"
        at.mkdir(parents=True)
        (at / "size").write_text(f"{size}\n")
        (at / "shared_cpu_list").write_text(f"{cpus}\n")
    assert beyond_caches(tmp_path) == n_mib << 20


@pytest.fixture
def known_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the CPU, which else are measured for seconds."""
    monkeypatch.setattr(doctor, "read_bandwidth", lambda n_threads: 30e9)
    monkeypatch.setattr(doctor, "multiply_peak", lambda n_threads, format="bf16": 500e9)


@pytest.mark.parametrize(
    ("free_gb", "bandwidth", "command"),
    [
        (24.0, 30e9, "deltic serve qwen3.5:4b (the largest that is fluent on the CPU, a download of 2.7 GB)"),
        (8.0, 30e9, "deltic serve qwen3.5:4b (the largest"),
        (3.0, 30e9, "deltic serve qwen3.5:2b (the largest that is fluent on the CPU, a download of 1.3 GB)"),
        (40.0, 60e9, "deltic serve qwen3.6:35b (the largest that is fluent on the CPU, a download of 22.4 GB)"),
        (900.0, 400e9, "deltic serve Qwen/Qwen3.5-122B-A10B"),
        (1.0, 1e9, "deltic serve (a small"),
    ],
)
def test_doctor_proposes_what_fits_and_is_fluent(
    free_gb: float,
    bandwidth: float,
    command: str,
    without_gpu: None,
    known_roofs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "read_bandwidth", lambda n_threads: bandwidth)
    monkeypatch.setattr(doctor.Cpu, "free_bytes", lambda self: int(free_gb * 1e9))
    assert f"Next: {command}" in words(doctor.report())


def test_doctor_expects_what_kept_runs_reached() -> None:
    """The least share of the roof, of one sequence, in two tables of docs/performance.md: of bfloat16, and of
    what --quantize makes of it on a CPU, which are what it proposes.
    """
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    tables = {name: text.split(f"<!-- table {name} -->")[1].split("<!-- end -->")[0] for name in ("peers", "gpu")}
    cpu = re.findall(r"^\| decode, N = 1, .*?\), (\d+) %", tables["peers"], re.MULTILINE)
    gpu = re.findall(r"^\| of the roof \| (\d+) %", tables["gpu"], re.MULTILINE)
    assert {"cpu": min(map(int, cpu)) / 100, "cuda": min(map(int, gpu)) / 100} == doctor.REACHED


def test_doctor_names_published_sizes() -> None:
    assert doctor.MODELS.keys() <= PUBLISHED.keys() | PUBLISHED_SPEECH.keys()


@pytest.mark.parametrize(
    ("int8", "int4", "said"),
    [
        (441, 359, "more slowly in int8 and int4 than in bfloat16"),
        (2400, 359, "more slowly in int4 than in"),
        (1190, 1150, None),
    ],
)
def test_doctor_says_where_quantised_prompts_are_slower(
    int8: float, int4: float, said: str | None, without_gpu: None, known_roofs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix unit may multiply bfloat16 faster than other instructions integers."""
    peaks = {"bf16": 1197e9, "int8": int8 * 1e9, "int4": int4 * 1e9}
    monkeypatch.setattr(doctor, "multiply_peak", lambda n_threads, format="bf16": peaks[format])
    report = words(doctor.report())
    assert ("more slowly" in report) is (said is not None) and (said or "") in report


@pytest.mark.parametrize("major", [9, 8])
def test_doctor_with_a_gpu(major: int, known_roofs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from deltic.ops.gpu import launch, roofs
    from deltic.ops.gpu.roofs import GpuRoofs
    from deltic.runtime.gpu.device import Gpu

    chip = SimpleNamespace(name="NVIDIA X100", major=major, minor=0)
    monkeypatch.setattr(doctor, "cuda_driver", object)
    monkeypatch.setattr(build, "cuda_driver", object)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (130 * 10**9, 141 * 10**9))
    monkeypatch.setattr(launch, "pdl_works", lambda: major >= 9)
    monkeypatch.setattr(GpuRoofs, "measured", lambda: GpuRoofs(4e12, 8e14))
    monkeypatch.setattr(Gpu, "free_bytes", lambda self: 130 * 10**9)
    report = words(doctor.report())
    assert f"NVIDIA X100 · 130.0 of 141.0 GB free · compute capability {major}.0" in report
    assert f"PDL: {'yes' if major >= 9 else 'no'}" in report
    assert "GPU, bfloat16" in report and "CPU, int4" in report
    assert "Next: deltic serve Qwen/Qwen3.6-35B-A3B (the largest that is fluent on the GPU)" in report
    assert ("tested on compute capability 9.0 only" in report) == (major != 9)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(roofs, "link_speed", lambda source, target: 373e9)
    report = words(doctor.report())
    assert "3 GPUs: reach each other, GPU 0 copies 373 GB/s to GPU 1: --tensor-parallel up to 2" in report
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other != 2)
    assert "3 GPUs: reach each other" in words(doctor.report())  # of which two run a model
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    report = words(doctor.report())
    assert "4 GPUs: GPU 0 does not reach the memory of GPU 2, GPU 0 copies 373 GB/s to GPU 1" in report
    assert "--tensor-parallel up to 4; sums go through the host's memory" in report

    def too_little() -> GpuRoofs:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(GpuRoofs, "measured", too_little)
    report = words(doctor.report())
    assert "NVIDIA X100: the roofs were not measured" in report and "CPU, int4" in report


# Models on the hub, and what is refused.


def published_files(shape: ModelShape, prefix: str = "model.", n_files: int = 3) -> dict[str, Any]:
    """The files of a checkpoint of this shape, with holes for weights."""
    config = json.loads((DEMO / "config.json").read_text()) | {
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "num_hidden_layers": shape.n_layers,
        "layer_types": list(shape.layer_types), "num_attention_heads": shape.n_q_heads,
        "num_key_value_heads": shape.n_kv_heads, "linear_num_key_heads": shape.gdn_n_k_heads,
        "linear_num_value_heads": shape.gdn_n_v_heads, "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings, "tie_word_embeddings": shape.tie_word_embeddings,
    }  # fmt: skip
    declared = Declaration(None, COUNTED)
    declare_weights(declared, shape, shape.tie_word_embeddings, prefix)
    stored = [one for part in declared.plan for one in part.stored]
    files: dict[str, Any] = {"config.json": json.dumps(config).encode(), "tokenizer.json": bytes(12_000_000)}
    for i in range(n_files):
        fields, at = {}, 0
        for one in stored[i::n_files]:
            end = at + 2 * math.prod(one.shape)
            fields[one.name], at = {"dtype": "BF16", "shape": list(one.shape), "data_offsets": [at, end]}, end
        said = json.dumps(fields).encode()
        files[f"model-{i}.safetensors"] = Long(len(said).to_bytes(8, "little") + said, 8 + len(said) + at)
    where = {one.name: f"model-{i % n_files}.safetensors" for i, one in enumerate(stored)}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": where}).encode()
    return files


@pytest.fixture
def own_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without models."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    return tmp_path


def test_a_model_on_the_hub_is_planned_without_it(
    own_hub: Path, monkeypatch: pytest.MonkeyPatch, without_gpu: None
) -> None:
    shape = PUBLISHED["qwen3.5-4b"]
    files = published_files(shape)
    assert sum(map(len, files.values())) > 8e9
    config = EngineConfig(model="hf.co/owner/model", memory_gb=12.0, threads=2)
    monkeypatch.setattr(fit, "_roofs", lambda *_: (1e10, 1e12))  # they take a second, of any model
    with hub_with(files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        begun_s = time.process_time()
        report = words(fit.report(config))
        assert time.process_time() - begun_s < 3
        assert sum(hub.sent.values()) <= 2_000_000
        assert "owner/model: 4.21 B parameters" in report and "of 12.00 GB" in report
        assert not list(own_hub.rglob("*.safetensors")), "nothing stays"
        hub.files |= {"chat_template.jinja": b"{% if %}"}
        with pytest.raises(ValueError, match="not valid Jinja"):
            fit.report(config)
        del hub.files["chat_template.jinja"]
        hub.files |= published_files(shape, prefix="model.language_model.model.")
        with pytest.raises(
            CheckpointError, match=r"^owner/model(/model-\d\.safetensors)?: .*tensor '[\w.]+' is missing|^owner/model/"
        ):
            fit.report(config)
        hub.files |= {"config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()}
        with pytest.raises(ValueError, match="this is a Llama"):
            fit.report(config)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_checkpoint("dense"),
        lambda: tiny_checkpoint("moe", shards=3),
        lambda: tiny_quantised("dense", "w4a16").path,
        lambda: tiny_speech("base"),
        lambda: tiny_gguf("dense", "Q8_0"),
    ],
    ids=["dense", "shards", "packed words", "speech", "gguf"],
)
def test_a_plan_from_the_hub_is_that_of_the_directory(
    make: Any, own_hub: Path, monkeypatch: pytest.MonkeyPatch, without_gpu: None
) -> None:
    path = make()
    folder = path.parent if path.is_file() else path
    files = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    monkeypatch.setattr(fit, "_roofs", lambda *_: (1e10, 1e12))
    settings = {"memory_gb": 2.0, "threads": 2}
    with hub_with(files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found = fit.report(EngineConfig(model="owner/model", **settings))
    assert found.split("\n", 1)[1] == fit.report(EngineConfig(model=str(path), **settings)).split("\n", 1)[1]


def test_a_block_drafter_on_the_hub_is_planned_without_it(
    own_hub: Path, monkeypatch: pytest.MonkeyPatch, without_gpu: None
) -> None:
    monkeypatch.setattr(fit, "_roofs", lambda *_: (1e10, 1e12))
    path = tiny_drafter("dflash")
    settings = {"model": str(tiny_checkpoint("dense")), "max_drafts": 4, "memory_gb": 2.0, "threads": 2}
    with hub_with({file.name: file.read_bytes() for file in path.iterdir()}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found = fit.report(EngineConfig(draft_model="owner/model", **settings))
        assert not list(own_hub.rglob("*.safetensors")), "nothing stays"
        hub.files |= {"config.json": b"{}"}
        with pytest.raises(ValueError, match=r"^owner/model.* a block drafter: DFlashDraftModel"):
            fit.report(EngineConfig(draft_model="owner/model", **settings))
    assert found == fit.report(EngineConfig(draft_model=str(path), **settings))


@pytest.mark.parametrize("spoil", ["names", "missing", "template", "tokenizer", "defaults"])
def test_a_plan_refuses_what_a_server_would(spoil: str, tmp_path: Path, without_gpu: None) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("dense"), path)
    fit.report(EngineConfig(model=str(path), memory_gb=2.0, threads=2))
    if spoil in ("names", "missing"):
        (file,) = path.glob("*.safetensors")
        tensors = load_file(file)
        name = next(name for name in tensors if "down_proj" in name)
        renamed = {f"model.{name}": tensors.pop(name)} if spoil == "names" else {}
        if spoil == "missing":
            del tensors[name]
        save_file(tensors | renamed, file)
    elif spoil == "template":
        (path / "chat_template.jinja").write_text("{% if %}")
    elif spoil == "tokenizer":
        (path / "tokenizer.json").unlink()
    else:
        (path / "generation_config.json").write_text('{"temperature": "hot", "eos_token_id": 1}')
    said = {
        "names": "is missing",
        "missing": "is missing",
        "template": "not valid Jinja",
        "tokenizer": "no tokenizer.json",
    }
    with pytest.raises(ValueError, match=said.get(spoil, "temperature")):
        fit.report(EngineConfig(model=str(path), memory_gb=2.0, threads=2))


def test_a_gguf_model_beside_another_tower_is_planned_without_pictures(tmp_path: Path, without_gpu: None) -> None:
    """As folders of downloads are, with towers of other models."""
    model = Path(shutil.copy(tiny_gguf("dense", "Q8_0"), tmp_path / "Qwen3.5-9B-Q4_K_M.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "gemma-4-26B-A4B-it.mmproj-q8_0.gguf", "clip")
    writer.add_string("clip.projector_type", "gemma3")
    writer.add_tensor("v.patch_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, plan = settled(EngineConfig(model=str(model), memory_gb=2.0, threads=2), Cpu(), 1 << 31)
    assert isinstance(found, TextModel) and found.tower is None and plan.n_pages > 0
    assert found.no_pictures and "projector_type is 'gemma3'" in found.no_pictures


@pytest.mark.parametrize("part", ["talker", "vocoder", "encoder"])
def test_a_plan_refuses_speech_that_a_server_would(part: str, tmp_path: Path, without_gpu: None) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_speech("base"), path)
    file = path / ("model.safetensors" if part == "talker" else "speech_tokenizer/model.safetensors")
    tensors = load_file(file)
    begin = {"talker": "talker.model.norm", "vocoder": "decoder.", "encoder": "encoder."}[part]
    del tensors[name := next(name for name in tensors if name.startswith(begin))]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        fit.report(EngineConfig(model=str(path), memory_gb=2.0, threads=2))
