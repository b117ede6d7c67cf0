"""Which runner an engine gets: the device's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from deltic.config import ConfigError, EngineConfig
from deltic.engine.engine import StepRunner
from deltic.models.checkpoint import model_name, speaks
from deltic.models.packed import PACKED


def is_for_gpu(config: EngineConfig) -> bool:
    """Whether the model runs on a GPU: where that is asked for, or else where there is one, and nothing that only the CPU has."""
    if config.device is not None or not config.may_use_gpu:
        return config.may_use_gpu
    has_gpu = torch.cuda.is_available() and find_spec("triton") is not None
    return has_gpu and not (Path(config.model) / PACKED).exists()


def build_for_device(config: EngineConfig, progress: Callable[[str, float], None]) -> StepRunner:
    """A runner for the device that was asked for, or else for a GPU if there is one.

    Raises ValueError subclasses: a bad checkpoint, a plan that does not fit, no such device.
    """
    if is_for_gpu(config):
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda: torch sees no GPU here; install a build of torch with CUDA, or leave it out"
            )
        if find_spec("triton") is None:
            raise ConfigError(
                "--device cuda needs Triton, which torch with CUDA brings; install it, or leave it out"
            )
        if speaks(config):
            from deltic.runtime.gpu.speech_build import build_gpu_speech_runner  # imports Triton

            return build_gpu_speech_runner(config, progress)
        from deltic.runtime.gpu.build import build_gpu_runner

        return build_gpu_runner(config, progress)
    if config.lever:
        raise ConfigError(
            f"--lever {config.lever[0]}: levers are the GPU's, and this model runs on the CPU; leave it out"
        )
    if speaks(config):
        from deltic.runtime.cpu.speech import build_speech_runner

        return build_speech_runner(config, progress)
    from deltic.runtime.cpu.text import build_runner

    return build_runner(config, progress)


def warmup(config: EngineConfig) -> int:
    """`deltic warmup`: fills Triton's cache for a model or a shape, and prints what that took.

    Exit status 1: not all kernels could be compiled. Raises ConfigError without a GPU or Triton, and what planning raises.
    """
    if find_spec("triton") is None:
        raise ConfigError("warmup compiles kernels for a GPU with Triton, which is not installed here")
    if not torch.cuda.is_available():
        raise ConfigError("warmup compiles kernels for the GPU it runs on, and torch sees none here")
    if speaks(config):
        from deltic.runtime.gpu.speech_build import begin_warmup
    else:
        from deltic.runtime.gpu.build import begin_warmup
    import triton

    report = begin_warmup(config).wait(lambda stage, done: None)
    if report is None:
        print("nothing was compiled", file=sys.stderr)
        return 1
    print(
        f"{model_name(config)} on {torch.cuda.get_device_name()}: {report.n_kernels} kernels, {report.n_compiled} compiled, "
        f"{report.n_failed} failed, {report.seconds:.1f} s; in {triton.knobs.cache.dir}"
    )
    return 1 if report.n_failed else 0
