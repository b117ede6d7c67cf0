"""A GpuSpeechRunner from a configuration: located, planned, compiled beside loading, recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from triton.errors import TritonError

from deltic.config import EngineConfig
from deltic.engine.stopwatch import stopwatch
from deltic.models.checkpoint import locate_speech, model_name
from deltic.models.tts.weights import dummy_speech_weights, empty_speech_weights, load_speech_weights
from deltic.models.vocoder.weights import dummy_vocoder, empty_vocoder, load_vocoder
from deltic.ops.contract import KernelError
from deltic.ops.gpu.launch import INTERPRETED, Levers, parse_levers
from deltic.runtime.cpu.speech_plan import SpeechPlan
from deltic.runtime.gpu.build import free_device_bytes
from deltic.runtime.gpu.compile import Job, Kernels, begin_compiling, collecting
from deltic.runtime.gpu.speech import GpuSpeechRunner
from deltic.runtime.gpu.speech_plan import make_gpu_speech_plan
from deltic.runtime.voices import open_voices

Progress = Callable[[str, float], None]


def build_gpu_speech_runner(config: EngineConfig, progress: Progress) -> GpuSpeechRunner:
    """Locates, plans, loads and records. Raises ValueError subclasses (bad checkpoint, plan that does not fit, no GPU)."""
    lap, spent = stopwatch()

    def on_bytes(done: int, total: int) -> None:
        progress("weights", done / max(1, total))

    levers = parse_levers(config.lever)
    device = "cpu" if INTERPRETED else "cuda"
    progress("plan", 0.0)
    directory, shape = locate_speech(config)
    plan = make_gpu_speech_plan(config, shape, free_device_bytes(), levers)
    lap("plan")
    compiling = begin_compiling(plan, levers, collect)  # beside reading the weights
    notices: list[str] = []
    if config.dummy is not None:
        weights = dummy_speech_weights(shape, config.seed, on_bytes, layout="rows", device=device)
        vocoder = dummy_vocoder(shape.vocoder, config.seed)
    else:
        weights, notices = load_speech_weights(directory, shape, on_bytes, layout="rows", device=device)
        vocoder = load_vocoder(directory, shape.vocoder)
    lap("weights")
    compiling.wait(progress)
    lap("compile")
    try:
        runner = GpuSpeechRunner(plan, weights, vocoder, levers, progress)
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


def begin_warmup(config: EngineConfig) -> Kernels:
    """As `gpu_build.begin_warmup`."""
    levers = parse_levers(config.lever)
    _, shape = locate_speech(config)
    plan = make_gpu_speech_plan(config, shape, free_device_bytes(), levers)
    return begin_compiling(plan, levers, collect, again=True)


def collect(plan: SpeechPlan, levers: Levers) -> list[Job]:
    """Every kernel that the steps and chunks of this plan start, as `collecting` finds them."""
    shape = plan.shape  # two layers: the others start the same kernels
    talker, predictor = replace(shape.talker, n_layers=2), replace(shape.predictor, n_layers=2)
    shape = replace(shape, talker=talker, predictor=predictor)
    weights, vocoder = empty_speech_weights(shape, None, "meta", "rows"), empty_vocoder(shape.vocoder)
    runner = GpuSpeechRunner(replace(plan, shape=shape, host_bytes=0), weights, vocoder, levers)
    with collecting() as jobs:
        for recording in runner.recordings():
            recording.run()
    return list(jobs)
