"""Which runner an engine gets: the device's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deltic.config import ConfigError, EngineConfig
from deltic.engine.loop import StepRunner


def build_for_device(config: EngineConfig, progress: Callable[[str, float], None]) -> StepRunner:
    """A runner for the device that was asked for, or else for a GPU if there is one.

    Raises ValueError subclasses: a bad checkpoint, a plan that does not fit, no such device.
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            "--device cuda: torch sees no GPU here; install a build of torch with CUDA, or leave it out"
        )
    if config.device == "cuda" or (has_gpu and config.device is None and config.quantize is None):
        from deltic.engine.gpu_runner import build_gpu_runner  # imports Triton

        return build_gpu_runner(config, progress)
    from deltic.engine.runner import build_runner

    return build_runner(config, progress)
