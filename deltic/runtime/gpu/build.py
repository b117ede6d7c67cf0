"""A GpuRunner from a configuration: located, planned, compiled beside loading, recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.errors import TritonError

from deltic.config import EngineConfig
from deltic.engine.messages import MAX_LOGPROBS
from deltic.engine.stopwatch import stopwatch
from deltic.models.checkpoint import locate, model_name, n_real_ids
from deltic.models.fields import CheckpointError
from deltic.models.packed import PACKED
from deltic.models.qwen.weights import Weights, dummy_weights, empty_weights, load_weights
from deltic.ops.contract import KernelError
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.launch import INTERPRETED, Levers, parse_levers
from deltic.ops.gpu.sample import prompt_logprobs
from deltic.runtime.cpu.plan import Plan
from deltic.runtime.fingerprint import fingerprint
from deltic.runtime.gpu.compile import Job, Kernels, begin_compiling, collecting
from deltic.runtime.gpu.plan import make_gpu_plan
from deltic.runtime.gpu.text import GpuRunner

Progress = Callable[[str, float], None]

INTERPRETED_BYTES = 2 << 30


def free_device_bytes() -> int:
    """What a plan may count on; where kernels are interpreted, a fixed sum."""
    return INTERPRETED_BYTES if INTERPRETED else torch.cuda.mem_get_info()[0]


def build_gpu_runner(config: EngineConfig, progress: Progress) -> GpuRunner:
    """Locates, plans, loads and records. Raises ValueError subclasses (bad checkpoint, plan that does not fit, no GPU)."""
    lap, spent = stopwatch()
    levers = parse_levers(config.lever)
    device = "cpu" if INTERPRETED else "cuda"
    progress("plan", 0.0)
    directory, shape = locate(config)
    if config.dummy is None and (directory / PACKED).exists():
        raise CheckpointError(
            f"{directory}: packed for the CPU; give --device cpu, or the checkpoint it was packed from"
        )
    free = free_device_bytes()
    n_real = n_real_ids(config, directory, shape)
    plan = make_gpu_plan(config, shape, n_real, free, levers)
    lap("plan")
    compiling = begin_compiling(plan, levers, collect)  # beside reading the weights

    def on_bytes(done: int, total: int) -> None:
        progress("weights", done / max(1, total))

    notices: list[str] = []
    if config.dummy is not None:
        weights = dummy_weights(shape, config.seed, on_bytes, layout="rows", device=device)
    else:
        weights, notices = load_weights(directory, shape, on_bytes, layout="rows", device=device)
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


def begin_warmup(config: EngineConfig) -> Kernels:
    """Starts to compile all kernels of a configuration for the current GPU. Raises as `build_gpu_runner`, of what it looks at."""
    levers = parse_levers(config.lever)
    directory, shape = locate(config)
    n_real = n_real_ids(config, directory, shape)
    plan = make_gpu_plan(config, shape, n_real, free_device_bytes(), levers)
    return begin_compiling(plan, levers, collect, again=True)


def collect(plan: Plan, levers: Levers) -> list[Job]:
    """Every kernel that the steps of this plan start, as `collecting` finds them."""
    weights = empty_weights(plan.shape, None, plan.shape.tie_word_embeddings, "meta", "rows")
    runner = GpuRunner(plan, replace(weights, layers=_different_layers(weights)), levers)
    with collecting() as jobs:
        for recording in runner.recordings():
            recording.run()
        _score_prompts(runner)
    return list(jobs)


def _score_prompts(runner: GpuRunner) -> None:
    """Log-probabilities of prompts, which are not recorded (GpuRunner._prompt_logprobs), for every number of rows."""
    buffers, plan = runner.workspace.prefill, runner.plan
    for n in range(1, len(buffers.final) + 1):
        rows, one = (torch.zeros(size, dtype=torch.int32, device=runner.device) for size in (n, 1))
        logits = runner.model.logits_of(rows, plan.max_step_tokens // PAGE_SIZE, buffers)
        top = torch.zeros((n, MAX_LOGPROBS), device=runner.device)
        prompt_logprobs(logits, plan.n_real, rows, rows, rows, one, top[:, 0].contiguous(), top.int(), top)


def _different_layers(weights: Weights) -> list[Any]:
    """The first layers, until each kind was there and has had a follower: the others start the same kernels."""
    first = {(type(layer), type(layer.mlp)): i for i, layer in reversed([*enumerate(weights.layers)])}
    return weights.layers[: max(first.values()) + 2]
