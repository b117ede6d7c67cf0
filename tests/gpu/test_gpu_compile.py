"""Compiling ahead: what is collected is what the steps launch, the workers' kernels are found, and nothing that fails breaks a start.

Kernels are compiled here, for Hopper where there is no GPU, so all of it runs in processes that do not interpret.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget

from deltic.models.qwen.published import published_shape
from deltic.models.qwen.weights import dummy_formats, empty_weights
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu.chip import CHIPS, described, free_bytes, override_arch
from deltic.ops.gpu.weight import DeviceStore
from deltic.runtime.gpu import compile as gpu_compile
from deltic.runtime.gpu.collect import _different_layers
from deltic.runtime.gpu.compile import Compilation

FEW = ("_silu_mul_kernel", "scan", "finish")
"""Kernels that are compiled in little time; the last two share functions that use global constants."""


def run(what: str, cache: Path, timeout: float = 300) -> dict[str, Any]:
    """The result of one of the functions below, in a process of its own with this cache."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_gpu_compile", what], env=environment, capture_output=True, text=True, timeout=timeout,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("collected", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("kind", ["dense", "moe", "dense int4", "moe fp8"])
def test_collects_what_real_tensors_would_launch(collected: dict[str, Any], kind: str) -> None:
    """Tensors without memory give the same specialisations as tensors with; a few layers give those of all, also where the last one is
    in other formats.
    """
    assert collected[kind]["kernels"] > 20
    assert collected[kind]["with_memory"] == collected[kind]["of_all_layers"] == []


def test_a_file_that_mixes_types_has_its_layers_once() -> None:
    """A layer that was taken in front is not taken again in its own place, where it would have no name."""
    shape = published_shape("qwen3.5-27b")
    shape = replace(shape, formats=dummy_formats(shape, "ud-q4_k_xl"))
    weights = empty_weights(shape, None, tied=False, store=DeviceStore("meta"))
    layers = _different_layers(weights)
    named = dict(replace(weights, layers=layers).named_parts())
    assert all(f"layers.{i}.input_norm" in named for i in range(len(layers))) and len(layers) < 24
    downs = [{s.format.name for s in layer.mlp.down.segments} for layer in layers]
    assert {"Q4_K"} in downs and {"Q5_K"} in downs and {"Q6_K"} in downs


def test_rows_are_rounded_by_who_makes_them(collected: dict[str, Any]) -> None:
    """A decode in FP8 has a kernel more where nobody does: behind the SwiGLU of a layer without experts. A prefill has them behind
    mixers and the SwiGLU of experts, and where a product has two formats.
    """
    n = collected["launches"]
    more = {
        kind: [fp8 - bf16 for fp8, bf16 in zip(n[f"{kind} fp8"], n[f"{kind} bf16"], strict=True)]
        for kind in ("dense", "moe")
    }
    assert more == {"dense": [4, 7], "moe": [0, 16]}  # of four layers


def test_collects_what_a_speech_model_would_launch(collected: dict[str, Any]) -> None:
    """The vocoder's kernels, too."""
    assert collected["speech"]["kernels"] > 40
    assert collected["speech"]["with_memory"] == []


@pytest.mark.parametrize("kind", ["dense", "speech"])
def test_warmup_compiles_what_was_collected(collected: dict[str, Any], kind: str) -> None:
    """Also what the cache is known to hold; `deltic warmup` says how many."""
    n = collected[kind]["kernels"]
    status, line = collected["warmups"][kind]
    assert status == 0 and f": {n} kernels, {n} compiled, 0 failed, 1.5 s; in " in line


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("compiled", tmp_path_factory.mktemp("triton"))


@pytest.mark.long
def test_launches_find_what_workers_compiled(compiled: dict[str, Any]) -> None:
    n = compiled["n_kernels"]
    assert n >= 2 and compiled["report"][:3] == [n, n, 0]
    assert compiled["hits"] == [True] * n


def test_a_finished_configuration_is_known(compiled: dict[str, Any]) -> None:
    assert compiled["first_marked"] and not compiled["second_had_work"]


@pytest.mark.parametrize("part", ["shape", "drafter", "tower"])
def test_a_configuration_is_known_with_the_formats_of_its_files(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide which kernels it starts, and no shape tells of them."""
    monkeypatch.setattr(gpu_compile, "device_name", lambda: "a GPU")
    plain: Any = SimpleNamespace(step_sizes=(), shape=published_shape("qwen3.5-27b"), drafter=None, tower=None)
    formats = {"layers.0.mlp.down_proj": WEIGHT_FORMATS["fp8"]}
    other: Any = SimpleNamespace(**vars(plain) | {part: replace(plain.shape, formats=formats)})
    assert gpu_compile._marker(other) != gpu_compile._marker(plain)


def test_failures_are_logged_and_passed_over(compiled: dict[str, Any]) -> None:
    assert compiled["failed"] == [2, 1] and not compiled["failed_marked"]
    assert "1 of 2 kernels" in compiled["warnings"][0] and "KeyError" in compiled["warnings"][0]
    assert compiled["dead"] == 1 and compiled["broken"] is None


def test_keys_do_not_depend_on_what_was_walked_before(collected: dict[str, Any], compiled: dict[str, Any]) -> None:
    """A second model of a process finds what workers compiled; Triton 3.6 alone gives other keys to functions of the sampler."""
    assert collected["keys"] == compiled["keys"] and len(compiled["keys"]) > 100


def test_an_emulated_card_of_tests_is_each_processs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests side by side had what the others left of 24 GB, and a third of them failed."""
    monkeypatch.setattr(described, "chip", CHIPS["sm_89"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (120 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 30)
    for alone, used in ((True, 20 << 30), (False, 3 << 30)):
        monkeypatch.setattr(described, "alone", alone)
        assert free_bytes(torch.device("cuda", 0)) == CHIPS["sm_89"].memory_bytes - used


def test_workers_for_an_emulated_chip_compile_under_the_keys_of_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the environment is part of a key: all kernels were compiled twice."""
    target, begun = GPUTarget("cuda", 90, 32), list[tuple[list[str], dict[str, str]]]()
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: begun.append((command, env)))
    monkeypatch.setattr(triton.knobs.runtime, "override_arch", None)
    monkeypatch.setattr(described, "emulated", "sm_89")
    key = get_cache_invalidating_env_vars()
    override_arch("sm_89")
    Compilation(1)
    assert triton.knobs.runtime.override_arch == "sm89" and get_cache_invalidating_env_vars() == key
    ((command, environment),) = begun
    assert command[-1] == "sm_89" and "TRITON_OVERRIDE_ARCH" not in environment


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records steps: needs a GPU")
def test_recording_compiles_nothing_after_it(tmp_path: Path) -> None:
    assert run("recorded", tmp_path, timeout=300)["misses"] == []


# What runs in the other processes.


def _pretend() -> None:
    """A Hopper GPU, as far as compiling looks at it."""
    from deltic.ops.gpu.chip import HOPPER
    from deltic.runtime.gpu.compile import compile_for

    if not torch.cuda.is_available():
        compile_for(HOPPER)
        torch.cuda.get_device_name = lambda *_: "pretended"


FREE_BYTES = 2 << 30
SIZES: dict[str, Any] = {
    "max_num_seqs": 9,
    "max_model_len": 1024,
    "max_step_tokens": 256,
    "n_pages": 20,
    "cache_host_gb": 0.0,
}


def _plan(kind: str) -> Any:
    from deltic.config import EngineConfig
    from deltic.runtime.gpu.device import Gpu
    from tests.planned import settled
    from tests.tiny import tiny_checkpoint
    from tests.tiny_speech import tiny_speech

    if kind == "speech":
        config = EngineConfig(model=str(tiny_speech("custom_voice", wide=True)), **SIZES)
    else:
        drafts = 4 if kind == "moe" else 0
        path = tiny_checkpoint(kind, has_mtp=drafts > 0)
        config = EngineConfig(model=str(path), n_checkpoints=2, max_drafts=drafts, **SIZES)
    return settled(config, Gpu(), FREE_BYTES)[1]


def _collected() -> dict[str, Any]:
    from deltic.models.qwen.weights import dummy_weights, empty_weights
    from deltic.models.tts.weights import dummy_speech_weights
    from deltic.models.vocoder.weights import dummy_vocoder
    from deltic.ops.gpu.weight import DeviceStore
    from deltic.runtime.gpu import collect as collecting
    from deltic.runtime.gpu.compile import Job, fix_keys

    def difference(a: Iterable[Job], b: Iterable[Job]) -> list[str]:
        return sorted(job.name for job in set(a) ^ set(b))

    found: dict[str, Any] = {}
    fix_keys()
    for kind in ("dense", "moe", "dense int4", "moe fp8"):
        plan = replace(_plan(kind.split()[0]), quantize=kind.partition(" ")[2] or None)
        jobs = collecting.collect(plan)
        few, collecting._different_layers = collecting._different_layers, lambda weights: weights.layers
        of_all = collecting.collect(plan)
        collecting.empty_weights = lambda shape, quantize, *_: dummy_weights(
            shape, 0, quantize=quantize, store=DeviceStore("cpu")
        )
        with_memory = collecting.collect(plan)  # tensors in host memory; never started
        collecting.empty_weights, collecting._different_layers = empty_weights, few
        found[kind] = {
            "kernels": len(jobs), "with_memory": difference(jobs, with_memory), "of_all_layers": difference(jobs, of_all)
        }  # fmt: skip
    speech_plan = _plan("speech")
    jobs = collecting.collect(speech_plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            collecting,
            "empty_speech_weights",
            lambda shape, *_: dummy_speech_weights(shape, 0, store=DeviceStore("cpu")),
        )
        patch.setattr(collecting, "empty_vocoder", dummy_vocoder)
        with_memory = collecting.collect(speech_plan)
    found["speech"] = {"kernels": len(jobs), "with_memory": difference(jobs, with_memory)}
    return found | {"launches": _launches(), "warmups": _warmups(), "keys": _keys()}


def _launches() -> dict[str, list[int]]:
    """Kernels of a decode of one row and of a prefill of one block, by the kind of model and the format of its weights."""
    from deltic.ops.gpu.launch import launches
    from deltic.runtime.gpu.compile import collecting
    from deltic.runtime.gpu.text import GpuTextRunner

    found: dict[str, list[int]] = {}
    for kind in ("dense", "moe"):
        plan = replace(_plan(kind), host_bytes=0)
        for format in ("bf16", "fp8"):
            of_format = replace(plan, shape=replace(plan.shape, formats=dummy_formats(plan.shape, format)))
            weights = empty_weights(of_format.shape, None, plan.shape.tie_word_embeddings, DeviceStore("meta"))
            runner = GpuTextRunner(of_format, [weights])
            counts = found[f"{kind} {format}"] = []
            with collecting():
                for recording in (runner.recordings.decode(1, 1), runner.recordings.of("prefill", 1)):
                    launches.n = 0
                    recording.run()
                    counts.append(launches.n)
    return found


def _warmups() -> dict[str, tuple[int, str]]:
    """Exit status and output of `deltic warmup`, for a text model and a speech model; without the workers."""
    from deltic.__main__ import main
    from deltic.runtime import build
    from deltic.runtime.gpu import compile as gpu_compile
    from tests.tiny import tiny_checkpoint
    from tests.tiny_speech import tiny_speech

    class Done:
        n_jobs = 0

        def __init__(self, n_workers: int) -> None:
            pass

        def give(self, jobs: list[gpu_compile.Job]) -> None:
            self.n_jobs = len(jobs)

        def wait(self, progress: gpu_compile.Progress) -> gpu_compile.Report:
            return gpu_compile.Report(self.n_jobs, self.n_jobs, 0, 1.5)

    found = {}
    flags = [x for name, value in SIZES.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    models = {"dense": (tiny_checkpoint("dense"), ["--n-checkpoints", "2"]), "speech": (tiny_speech("custom_voice", wide=True), [])}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_compile, "Compilation", Done)
        patch.setattr(gpu_compile, "n_usable_cpus", lambda: 2)
        patch.setattr(build, "sees_gpu", lambda: True)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE_BYTES, FREE_BYTES))
        for kind, (path, more) in models.items():
            for _ in range(2):  # the second time the cache is known to hold them
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    status = main(["warmup", str(path), *flags, *more])
            found[kind] = status, said.getvalue()
    return found


def _compiled() -> dict[str, Any]:
    import triton

    from deltic.ops.gpu.launch import launches
    from deltic.runtime.gpu import compile as gpu_compile
    from deltic.runtime.gpu.collect import collect

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deltic.engine").addHandler(handler)
    gpu_compile.n_usable_cpus = lambda: 2
    plan = _plan("dense")
    few = [job for job in collect(plan) if job.name in FEW]

    kernels = gpu_compile.begin_compiling(plan, lambda *_: few)
    report = kernels.wait(lambda stage, done: None)
    assert report is not None
    found: dict[str, Any] = {"n_kernels": len(few), "report": [report.n_kernels, report.n_compiled, report.n_failed]}
    marker = gpu_compile._marker(plan)
    found["first_marked"] = marker.exists()
    found["second_had_work"] = (
        gpu_compile.begin_compiling(plan, lambda *_: few).wait(lambda stage, done: None) is not None
    )

    # the steps themselves, in which all others are passed over
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    with gpu_compile.collecting():
        note = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = lambda **given: given["fn"].name not in FEW and note(**given)
        runner = _walk(plan)
    assert not launches.compile_only and runner
    found["hits"] = hits
    triton.knobs.compilation.listener = None

    other = replace(plan, max_num_seqs=7)
    bad = [few[0], replace(few[0], specialisation="{}")]
    with pytest.MonkeyPatch.context() as patch:
        whole = gpu_compile.Compilation
        patch.setattr(
            gpu_compile, "Compilation", lambda n_workers: whole(1)
        )  # each takes seconds to import what compiles
        failed = gpu_compile.begin_compiling(other, lambda *_: bad).wait(lambda stage, done: None)
    assert failed is not None
    found["failed"] = [failed.n_kernels, failed.n_failed]
    found["failed_marked"] = gpu_compile._marker(other).exists()
    compilation = gpu_compile.Compilation(1)
    compilation._workers[0].kill()
    compilation.give(few[:1])
    found["dead"] = compilation.wait(lambda stage, done: None).n_failed

    def broken(*_: Any) -> list[Any]:
        raise RuntimeError("broken")

    found["broken"] = gpu_compile.begin_compiling(other, broken).wait(lambda stage, done: None)
    return found | {"warnings": warnings, "keys": _keys()}


def _keys() -> dict[str, str]:
    """Of all functions, those that nothing has asked for yet, too."""
    from deltic.ops import gpu

    return {
        f"{module.name}.{name}": function.cache_key
        for module in pkgutil.iter_modules(gpu.__path__)
        for name, function in vars(importlib.import_module(f"{gpu.__name__}.{module.name}")).items()
        if hasattr(function, "cache_key")
    }


def _walk(plan: Any) -> Any:
    from deltic.ops.gpu.weight import DeviceStore
    from deltic.runtime.gpu.text import GpuTextRunner

    weights = empty_weights(plan.shape, None, plan.shape.tie_word_embeddings, DeviceStore("meta"))
    runner = GpuTextRunner(plan, [weights])
    for recording in runner.recordings.made.values():
        recording.run()
    return runner


def _recorded() -> dict[str, Any]:
    import triton

    from deltic.models.qwen.weights import dummy_weights
    from deltic.models.tts.weights import dummy_speech_weights
    from deltic.models.vocoder.weights import dummy_vocoder
    from deltic.ops.gpu.weight import DeviceStore
    from deltic.runtime.gpu.collect import collect
    from deltic.runtime.gpu.compile import begin_compiling
    from deltic.runtime.gpu.speech import GpuSpeechRunner
    from deltic.runtime.gpu.text import GpuTextRunner

    misses: list[str] = []
    for kind in ("dense", "moe", "next", "speech"):
        plan = _plan(kind)
        triton.knobs.compilation.listener = None
        report = begin_compiling(plan, collect).wait(lambda stage, done: None)
        assert report is not None and report.n_failed == 0
        triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or misses.append(src.name)
        if kind == "speech":
            weights = dummy_speech_weights(plan.shape, 0, store=DeviceStore("cuda"))
            GpuSpeechRunner(plan, weights, dummy_vocoder(plan.shape.vocoder))
        else:
            GpuTextRunner(plan, [dummy_weights(plan.shape, 0, store=DeviceStore("cuda"))])
    return {"misses": misses}


if __name__ == "__main__":
    _pretend()
    from deltic.ops.gpu.launch import Levers

    with Levers().bound():
        print(json.dumps({"collected": _collected, "compiled": _compiled, "recorded": _recorded}[sys.argv[1]]()))
