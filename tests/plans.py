"""Memory plans of published models, for every kind of model and device: `python -m tests.plans` writes tests/golden/plans.json.

tests/cpu/test_plans.py compares. A plan that is to change is written again, and the difference read.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from deltic.config import ConfigError, EngineConfig
from deltic.models.fields import CheckpointError
from deltic.models.qwen.shape import PUBLISHED
from deltic.models.tts.shape import PUBLISHED_SPEECH
from deltic.ops.gpu.launch import Levers
from deltic.runtime.cpu import plan, speech_plan
from deltic.runtime.cpu.plan import make_plan
from deltic.runtime.cpu.speech_plan import make_speech_plan
from deltic.runtime.gpu import plan as gpu_plan
from deltic.runtime.gpu import speech_plan as gpu_speech_plan
from deltic.runtime.gpu.plan import make_gpu_plan
from deltic.runtime.gpu.speech_plan import make_gpu_speech_plan

GOLDEN = Path(__file__).parent / "golden" / "plans.json"
GB = 10**9

HOST_FREE_BYTES = 64 * GB
"""What the machine is said to have free."""

BUDGETS_GB = (3, 8, 14, 24, 80, 141)

SETTINGS: tuple[dict[str, Any], ...] = (
    {"memory_gb": 6.0}, {"memory_gb": 20.0}, {"memory_gb": 1000.0}, {"max_model_len": 8192}, {"max_model_len": 10**7},
    {"max_num_seqs": 64}, {"max_num_seqs": 1000}, {"max_step_tokens": 2048}, {"max_step_tokens": 100}, {"n_pages": 600},
    {"n_pages": 10}, {"n_pages": 10**6}, {"prefix_cache": False}, {"n_checkpoints": 20}, {"n_checkpoints": 10**6},
    {"cache_host_gb": 4.0}, {"cache_host_gb": 500.0}, {"memory_gb": 12.0, "max_model_len": 32768, "max_num_seqs": 16},
)  # fmt: skip
"""Each of FEW with the budgets 14 and 80."""

FEW = ("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-35b-a3b", "qwen3-tts-0.6b", "qwen3-tts-1.7b-base")

Planner = Callable[[EngineConfig, str, int], Any]

PLANNERS: dict[str, tuple[Planner, tuple[str, ...], tuple[str | None, ...]]] = {
    "cpu text": (
        lambda config, name, free: make_plan(config, PUBLISHED[name], PUBLISHED[name].vocab_size, free),
        tuple(PUBLISHED), (None, "int8", "int4"),
    ),
    "gpu text": (
        lambda config, name, free: make_gpu_plan(
            config, PUBLISHED[name], PUBLISHED[name].vocab_size, free, Levers(), HOST_FREE_BYTES
        ),
        tuple(PUBLISHED), (None, "int8"),
    ),
    "cpu speech": (
        lambda config, name, free: make_speech_plan(config, PUBLISHED_SPEECH[name], free),
        tuple(PUBLISHED_SPEECH), (None, "int8", "int4"),
    ),
    "gpu speech": (
        lambda config, name, free: make_gpu_speech_plan(config, PUBLISHED_SPEECH[name], free, Levers()),
        tuple(PUBLISHED_SPEECH), (None, "int8"),
    ),
}  # fmt: skip
"""By kind of model and device: the planner of a model in so many bytes, the models, the formats."""

FIELDS = ("n_pages", "n_checkpoints", "max_num_seqs", "max_model_len", "max_step_tokens", "host_bytes", "weight_bytes",
          "vocoder_bytes", "workspace_bytes", "total_bytes", "budget_bytes", "n_threads")  # fmt: skip


def cases() -> Iterator[tuple[str, Planner, EngineConfig, str, int]]:
    """Names of plans, and what makes them."""
    for kind, (planner, names, formats) in PLANNERS.items():
        for name in names:
            if name.startswith("qwen3.6"):
                continue  # another name of a 3.5
            base = EngineConfig(dummy=name, threads=2)
            for quantize in formats:
                for budget in BUDGETS_GB:
                    config = replace(base, quantize=quantize)
                    yield f"{kind} {name} {quantize or '16'} {budget} GB", planner, config, name, budget * GB
            for settings in SETTINGS if name in FEW else ():
                for budget in (14, 80):
                    said = " ".join(f"{key}={value}" for key, value in settings.items())
                    yield (
                        f"{kind} {name} {budget} GB {said}",
                        planner,
                        replace(base, **settings),
                        name,
                        budget * GB,
                    )


def plan_of(planner: Planner, config: EngineConfig, name: str, free_bytes: int) -> str:
    """A plan in one line, or why there is none. The buffers of a step are in it by a hash of their names and sizes."""
    try:
        made = planner(config, name, free_bytes)
    except (ConfigError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    buffers = json.dumps(made.workspace, sort_keys=True).encode()
    told = {field: getattr(made, field) for field in FIELDS if hasattr(made, field)}
    return (
        " ".join(f"{key}={value}" for key, value in told.items())
        + f" buffers={hashlib.sha256(buffers).hexdigest()[:12]}"
    )


def all_plans() -> dict[str, str]:
    with ExitStack() as patches:
        for module in (plan, gpu_plan, speech_plan, gpu_speech_plan):
            said = {"free_memory_bytes": lambda: HOST_FREE_BYTES, "memory_bound": lambda: ""}
            here = {name: value for name, value in said.items() if hasattr(module, name)}
            patches.enter_context(mock.patch.multiple(module, **here))
        return {case: plan_of(planner, config, name, free) for case, planner, config, name, free in cases()}


if __name__ == "__main__":
    plans = all_plans()
    GOLDEN.write_text(json.dumps(plans, indent=0) + "\n")
    print(f"{len(plans)} plans in {GOLDEN}", file=sys.stderr)
