"""A GpuRunner from a configuration: located, planned, compiled beside loading, recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from triton.errors import TritonError

from deltic.config import EngineConfig
from deltic.engine.gpu_compile import begin_compiling
from deltic.engine.gpu_plan import make_gpu_plan
from deltic.engine.gpu_runner import GpuRunner
from deltic.models.checkpoint import locate, model_name, n_real_ids
from deltic.models.fingerprint import fingerprint
from deltic.models.packed import PACKED
from deltic.models.shapes import CheckpointError
from deltic.models.weights import dummy_weights, load_weights
from deltic.ops.gpu.launch import INTERPRETED, parse_levers
from deltic.ops.table import KernelError

Progress = Callable[[str, float], None]

INTERPRETED_BYTES = 2 << 30
"""What is planned with where there is no GPU."""


def build_gpu_runner(config: EngineConfig, progress: Progress) -> GpuRunner:
    """Locates, plans, loads and records. Raises ValueError subclasses (bad checkpoint, plan that does not fit, no GPU)."""
    clock = time.perf_counter()
    spent: dict[str, float] = {}

    def lap(stage: str) -> None:
        nonlocal clock
        spent[stage] = round(time.perf_counter() - clock, 3)
        clock = time.perf_counter()

    levers = parse_levers(config.lever)
    device = "cpu" if INTERPRETED else "cuda"
    progress("plan", 0.0)
    directory, shape = locate(config)
    if config.dummy is None and (directory / PACKED).exists():
        raise CheckpointError(
            f"{directory}: packed for the CPU; give --device cpu, or the checkpoint it was packed from"
        )
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else INTERPRETED_BYTES
    n_real = n_real_ids(config, directory, shape)
    plan = make_gpu_plan(config, shape, n_real, free, levers)
    lap("plan")
    compiling = begin_compiling(plan, levers)  # beside reading the weights

    def on_bytes(done: int, total: int) -> None:
        progress("weights", done / max(1, total))

    notices: list[str] = []
    if config.dummy is not None:
        weights = dummy_weights(shape, config.seed, on_bytes, quantize="rows", device=device)
    else:
        weights, notices = load_weights(directory, shape, on_bytes, quantize="rows", device=device)
    if (
        weights.n_bytes > plan.weight_bytes
    ):  # a head that the configuration ties to the embedding, and is stored all the same
        plan = make_gpu_plan(config, replace(shape, tie_word_embeddings=False), n_real, free, levers)
    lap("weights")
    compiling.wait(progress)
    lap("compile")
    try:
        runner = GpuRunner(plan, weights, levers, progress)
    except TritonError as error:
        raise KernelError(f"a kernel cannot run on this GPU ({error}); give --device cpu") from error
    lap("record")
    runner.info.model_name = model_name(config)
    runner.info.notices = notices
    runner.info.prefix_cache = config.prefix_cache
    if config.prefix_cache and config.cache_dir is not None:
        kernels = f"{runner.info.device} torch {torch.__version__} triton {triton.__version__} {levers}"
        model = fingerprint(
            config, directory, kernels, lambda done, total: progress("cache", done / max(1, total))
        )
        runner.open_tiers(config.cache_dir, int(config.cache_disk_gb * 1e9), model)
    elif plan.n_host_units:
        runner.open_tiers(None, 0, "")
    if runner.tiers is not None:  # the default is meant for preempted sequences
        runner.tiers.takes_evicted = config.cache_host_gb is not None
    lap("cache")
    runner.info.start_s = spent
    return runner
