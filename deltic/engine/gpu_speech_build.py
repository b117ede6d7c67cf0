"""A GpuSpeechRunner from a configuration: located, planned, compiled beside loading, recorded."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from deltic.config import EngineConfig, n_usable_cpus
from deltic.engine.gpu_build import INTERPRETED_BYTES
from deltic.engine.gpu_compile import MAX_WORKERS, Compilation, Job, Kernels, collecting
from deltic.engine.gpu_speech_plan import make_gpu_speech_plan
from deltic.engine.gpu_speech_runner import GpuSpeechRunner
from deltic.engine.speech_plan import SpeechPlan
from deltic.engine.voices import open_voices
from deltic.models.checkpoint import locate_speech, model_name
from deltic.models.codec_weights import dummy_codec, empty_codec, load_codec
from deltic.models.tts_weights import dummy_speech_weights, empty_speech_weights, load_speech_weights
from deltic.ops.gpu.launch import INTERPRETED, Levers, parse_levers
from deltic.ops.table import KernelError

Progress = Callable[[str, float], None]

log = logging.getLogger("deltic.engine")


def build_gpu_speech_runner(config: EngineConfig, progress: Progress) -> GpuSpeechRunner:
    """Locates, plans, loads and records. Raises ValueError subclasses (bad checkpoint, plan that does not fit, no GPU)."""
    clock = time.perf_counter()
    spent: dict[str, float] = {}

    def lap(stage: str) -> None:
        nonlocal clock
        spent[stage] = round(time.perf_counter() - clock, 3)
        clock = time.perf_counter()

    def on_bytes(done: int, total: int) -> None:
        progress("weights", done / max(1, total))

    levers = parse_levers(config.lever)
    device = "cpu" if INTERPRETED else "cuda"
    progress("plan", 0.0)
    directory, shape = locate_speech(config)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else INTERPRETED_BYTES
    plan = make_gpu_speech_plan(config, shape, free, levers)
    lap("plan")
    compiling = _begin_compiling(plan, levers)  # beside reading the weights
    notices: list[str] = []
    if config.dummy is not None:
        weights = dummy_speech_weights(shape, config.seed, on_bytes, quantize="rows", device=device)
        codec = dummy_codec(shape.vocoder, config.seed)
    else:
        weights, notices = load_speech_weights(directory, shape, on_bytes, quantize="rows", device=device)
        codec = load_codec(directory, shape.vocoder)
    lap("weights")
    compiling.wait(progress)
    lap("compile")
    try:
        runner = GpuSpeechRunner(plan, weights, codec, levers, progress)
    except TritonError as error:
        raise KernelError(f"a kernel cannot run on this GPU ({error}); give --device cpu") from error
    lap("record")
    if shape.variant == "base":
        kernels = f"{runner.info.device} torch {torch.__version__} triton {triton.__version__} {levers}"
        runner.voices = open_voices(config, directory, shape.talker.hidden_size, runner, kernels)
    runner.info.model_name = model_name(config)
    runner.info.notices = notices
    runner.info.prefix_cache = config.prefix_cache
    runner.info.start_s = spent
    return runner


def speech_kernels(plan: SpeechPlan, levers: Levers) -> list[Job]:
    """Every kernel that the steps and chunks of this plan start. As `gpu_compile.collect`."""
    shape = plan.shape  # two layers: the others start the same kernels
    talker, predictor = replace(shape.talker, n_layers=2), replace(shape.predictor, n_layers=2)
    shape = replace(shape, talker=talker, predictor=predictor)
    weights, codec = empty_speech_weights(shape, "rows", "meta"), empty_codec(shape.vocoder)
    runner = GpuSpeechRunner(replace(plan, shape=shape, host_bytes=0), weights, codec, levers)
    with collecting() as jobs:
        for run in runner.recordings():
            run()
    return list(jobs)


def _begin_compiling(plan: SpeechPlan, levers: Levers) -> Kernels:
    """As `gpu_compile.begin_compiling`."""
    n_workers = min(MAX_WORKERS, n_usable_cpus())
    if INTERPRETED or n_workers < 2:
        return Kernels(None, None)
    compilation = None
    try:
        marker = _marker(plan, levers)
        if marker.exists():
            return Kernels(None, None)
        compilation = Compilation(n_workers)
        compilation.give(speech_kernels(plan, levers))
        return Kernels(compilation, marker)
    except Exception:
        log.warning("kernels are not compiled beforehand", exc_info=True)
        if compilation is not None:
            compilation.end()
        return Kernels(None, None)


def _marker(plan: SpeechPlan, levers: Levers) -> Path:
    """The file that says that all kernels of a plan are in the cache it lies in."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for part in ("ops/gpu", "models", "engine"):
        for file in sorted((package / part).glob("*.py")):
            digest.update(file.read_bytes())
    sizes = (repr(plan.shape), plan.max_model_len, plan.max_num_seqs, plan.max_step_tokens)
    machine = (repr(triton.runtime.driver.active.get_current_target()), torch.cuda.get_device_name())
    versions = (triton.__version__, torch.__version__, sys.version)
    digest.update(json.dumps([sizes, repr(levers), machine, versions]).encode())
    return Path(triton.knobs.cache.dir) / f"deltic-speech-{digest.hexdigest()[:24]}.json"
