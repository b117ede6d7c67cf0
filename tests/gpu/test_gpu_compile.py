"""Compiling ahead: what is collected is what the steps launch, the workers' kernels are found, and nothing that fails breaks a start.

Kernels are compiled here, for Hopper where there is no GPU, so all of it runs in processes that do not interpret.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FEW = ("_silu_mul_kernel", "scan", "finish")
"""Kernels that are compiled in little time; the last two share functions, on whose global constants their keys depend."""


def run(what: str, cache: Path, timeout: float = 300) -> dict[str, Any]:
    """The result of one of the functions below, in a process of its own with this cache."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(cache)
    }
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


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_collects_what_real_tensors_would_launch(collected: dict[str, Any], kind: str) -> None:
    """Tensors without memory give the same specialisations as tensors with; the first layers give those of all."""
    assert collected[kind]["kernels"] > 20
    assert collected[kind]["with_memory"] == collected[kind]["of_all_layers"] == []


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("compiled", tmp_path_factory.mktemp("triton"))


def test_launches_find_what_workers_compiled(compiled: dict[str, Any]) -> None:
    n = compiled["n_kernels"]
    assert n >= 2 and compiled["report"][:3] == [n, n, 0]
    assert compiled["hits"] == [True] * n


def test_a_finished_configuration_is_known(compiled: dict[str, Any]) -> None:
    assert compiled["first_marked"] and not compiled["second_had_work"]


def test_failures_are_logged_and_passed_over(compiled: dict[str, Any]) -> None:
    assert compiled["failed"] == [2, 1] and not compiled["failed_marked"]
    assert "1 of 2 kernels" in compiled["warnings"][0] and "KeyError" in compiled["warnings"][0]
    assert compiled["dead"] == 1 and compiled["broken"] is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records steps: needs a GPU")
def test_recording_compiles_nothing_after_it(tmp_path: Path) -> None:
    assert run("recorded", tmp_path, timeout=300)["misses"] == []


# What runs in the other processes.


def _pretend() -> None:
    """A Hopper GPU, as far as compiling looks at it."""
    import triton
    from triton.backends.compiler import GPUTarget

    if torch.cuda.is_available():
        return
    target = GPUTarget("cuda", 90, 32)
    chip = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 * 1024)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )  # type: ignore[arg-type]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: chip
    torch.cuda.get_device_name = lambda *_: "pretended"
    torch.cuda.current_device = lambda: 0


def _plan(kind: str) -> Any:
    from deltic.config import EngineConfig
    from deltic.engine.gpu_plan import make_gpu_plan
    from deltic.models.checkpoint import locate
    from deltic.ops.gpu.launch import Levers
    from tests.tiny import tiny_checkpoint

    config = EngineConfig(
        model=str(tiny_checkpoint(kind)), max_num_seqs=9, max_model_len=1024, max_step_tokens=256, n_pages=20, n_checkpoints=2,
        cache_host_gb=0.0,
    )  # fmt: skip
    _, shape = locate(config)
    return make_gpu_plan(config, shape, shape.vocab_size, 2 << 30, Levers())


def _collected() -> dict[str, Any]:
    from deltic.engine import gpu_compile
    from deltic.models.weights import dummy_weights, empty_weights
    from deltic.ops.gpu.launch import Levers

    def difference(a: Iterable[gpu_compile.Job], b: Iterable[gpu_compile.Job]) -> list[str]:
        return sorted(job.name for job in set(a) ^ set(b))

    found = {}
    for kind in ("dense", "moe"):
        plan, levers = _plan(kind), Levers()
        jobs = gpu_compile.collect(plan, levers)
        few, gpu_compile._different_layers = gpu_compile._different_layers, lambda weights: weights.layers
        of_all = gpu_compile.collect(plan, levers)
        gpu_compile.empty_weights = lambda shape, *_: dummy_weights(shape, quantize="rows")
        with_memory = gpu_compile.collect(plan, levers)  # tensors in host memory; never started
        gpu_compile.empty_weights, gpu_compile._different_layers = empty_weights, few
        found[kind] = {
            "kernels": len(jobs), "with_memory": difference(jobs, with_memory), "of_all_layers": difference(jobs, of_all)
        }  # fmt: skip
    return found


def _compiled() -> dict[str, Any]:
    import triton

    from deltic.engine import gpu_compile
    from deltic.ops.gpu.launch import Levers, launches

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deltic.engine").addHandler(handler)
    gpu_compile.n_usable_cpus = lambda: 2
    plan, levers, collect = _plan("dense"), Levers(), gpu_compile.collect
    few = [job for job in collect(plan, levers) if job.name in FEW]

    gpu_compile.collect = lambda *_: few
    kernels = gpu_compile.begin_compiling(plan, levers)
    report = kernels.wait(lambda stage, done: None)
    assert report is not None
    found: dict[str, Any] = {
        "n_kernels": len(few),
        "report": [report.n_kernels, report.n_compiled, report.n_failed],
    }
    marker = gpu_compile._marker(plan, levers)
    found["first_marked"] = marker.exists()
    found["second_had_work"] = (
        gpu_compile.begin_compiling(plan, levers).wait(lambda stage, done: None) is not None
    )

    # the steps themselves, in which all others are passed over
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    with gpu_compile.collecting():
        note = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = lambda **given: given["fn"].name not in FEW and note(**given)
        runner = _walk(plan, levers)
    assert not launches.compile_only and runner
    found["hits"] = hits
    triton.knobs.compilation.listener = None

    other = replace(plan, max_num_seqs=7)
    gpu_compile.collect = lambda *_: [few[0], replace(few[0], specialisation="{}")]
    failed = gpu_compile.begin_compiling(other, levers).wait(lambda stage, done: None)
    assert failed is not None
    found["failed"] = [failed.n_kernels, failed.n_failed]
    found["failed_marked"] = gpu_compile._marker(other, levers).exists()
    compilation = gpu_compile.Compilation(1)
    compilation._workers[0].kill()
    compilation.give(few[:1])
    found["dead"] = compilation.wait(lambda stage, done: None).n_failed

    def broken(*_: Any) -> list[Any]:
        raise RuntimeError("broken")

    gpu_compile.collect = broken
    found["broken"] = gpu_compile.begin_compiling(other, levers).wait(lambda stage, done: None)
    return found | {"warnings": warnings}


def _walk(plan: Any, levers: Any) -> Any:
    from deltic.engine.gpu_runner import GpuRunner
    from deltic.models.weights import empty_weights

    runner = GpuRunner(
        plan, empty_weights(plan.shape, "rows", plan.shape.tie_word_embeddings, "meta"), levers
    )
    for recording in runner.recordings():
        recording.run()
    return runner


def _recorded() -> dict[str, Any]:
    import triton

    from deltic.engine import gpu_compile
    from deltic.engine.gpu_runner import GpuRunner
    from deltic.models.weights import dummy_weights
    from deltic.ops.gpu.launch import Levers

    misses: list[str] = []
    for kind in ("dense", "moe", "next"):
        plan = _plan(kind)
        triton.knobs.compilation.listener = None
        report = gpu_compile.begin_compiling(plan, Levers()).wait(lambda stage, done: None)
        assert report is not None and report.n_failed == 0
        triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: (
            cache_hit or misses.append(src.name)
        )
        GpuRunner(plan, dummy_weights(plan.shape, quantize="rows", device="cuda"), Levers())
    return {"misses": misses}


if __name__ == "__main__":
    _pretend()
    print(json.dumps({"collected": _collected, "compiled": _compiled, "recorded": _recorded}[sys.argv[1]]()))
