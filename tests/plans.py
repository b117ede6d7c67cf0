"""Memory plans of published models, for every kind of model and device: `python -m tests.plans` writes tests/golden/plans.json.

tests/cpu/test_plans.py compares. A plan that is to change is written again, and the difference read.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from deltic.config import ConfigError, EngineConfig
from deltic.models.dflash.shape import DrafterShape
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.qwen.published import PUBLISHED
from deltic.models.qwen.shard import cut
from deltic.models.qwen.weights import dummy_formats
from deltic.models.tts.shape import PUBLISHED_SPEECH
from deltic.ops.gpu.launch import Levers
from deltic.runtime import fit
from deltic.runtime import plan as planner
from deltic.runtime.cpu import device as cpu
from deltic.runtime.gpu import device as gpu
from deltic.runtime.model import FoundDrafter
from deltic.runtime.plan import Kind, SpeechKind
from tests.planned import planned

GOLDEN = Path(__file__).parent / "golden" / "plans.json"
GB = 10**9

HOST_FREE_BYTES = 64 * GB
"""What the machine is said to have free."""

BUDGETS_GB = (3, 8, 14, 24, 80, 141)

SETTINGS: tuple[dict[str, Any], ...] = (
    {"memory_gb": 6.0}, {"memory_gb": 20.0}, {"memory_gb": 1000.0}, {"max_model_len": 8192}, {"max_model_len": 10**7},
    {"max_num_seqs": 64}, {"max_num_seqs": 512}, {"max_num_seqs": 1000}, {"max_num_seqs": 1025}, {"max_step_tokens": 2048}, {"max_step_tokens": 100}, {"n_pages": 600},
    {"n_pages": 10}, {"n_pages": 10**6}, {"prefix_cache": False}, {"n_checkpoints": 20}, {"n_checkpoints": 10**6},
    {"cache_host_gb": 4.0}, {"cache_host_gb": 500.0}, {"memory_gb": 12.0, "max_model_len": 32768, "max_num_seqs": 16},
)  # fmt: skip
"""Each of FEW with the budgets 14 and 80."""

FEW = ("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-35b-a3b", "qwen3-tts-0.6b", "qwen3-tts-1.7b-base")

KINDS: dict[str, tuple[Kind[Any], dict[str, Any], tuple[str | None, ...]]] = {
    "cpu text": (cpu.Cpu.text, PUBLISHED, (None, "int8", "int4")),
    "gpu text": (gpu.TextOnGpu(Levers()), PUBLISHED, (None, "int8")),
    "cpu speech": (cpu.Cpu.speech, PUBLISHED_SPEECH, (None, "int8", "int4")),
    "gpu speech": (gpu.SpeechOnGpu(Levers()), PUBLISHED_SPEECH, (None, "int8")),
}
"""The models and the formats of each kind."""

FIELDS = ("n_pages", "n_checkpoints", "max_num_seqs", "max_model_len", "max_step_tokens", "host_bytes", "weight_bytes",
          "vocoder_bytes", "workspace_bytes", "total_bytes", "budget_bytes", "n_threads")  # fmt: skip


def drafter_of(shape: Any) -> FoundDrafter:
    """A block drafter as wide as a model of this shape, of as much as a third of its weights."""
    own = {"mask_token_id": 100, "target_layer_ids": [1, 5, 9, 13, 17]}
    sizes = {"hidden_size": shape.hidden_size, "intermediate_size": 3 * shape.hidden_size, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": shape.vocab_size}
    config = {"architectures": ["DFlashDraftModel"], "dflash_config": own, **sizes, **heads}
    return FoundDrafter(Path(), DrafterShape.from_config(config))


def cases() -> Iterator[tuple[str, Kind[Any], Any, EngineConfig, int]]:
    """Names of plans, and what makes them: kind, shape, settings, bytes that are free."""
    for named, (kind, shapes, formats) in KINDS.items():
        for name, shape in shapes.items():
            if name.startswith("qwen3.6"):
                continue  # another name of a 3.5
            base = EngineConfig(dummy=name, threads=None if kind.on_gpu else 2)
            for quantize in formats:
                for budget in BUDGETS_GB:
                    config = replace(base, quantize=quantize)
                    yield f"{named} {name} {quantize or '16'} {budget} GB", kind, shape, config, budget * GB
            for settings in SETTINGS if name in FEW else ():
                for budget in (14, 80):
                    said = " ".join(f"{key}={value}" for key, value in settings.items())
                    config = replace(base, **settings)
                    yield f"{named} {name} {budget} GB {said}", kind, shape, config, budget * GB


def cases_with_drafters() -> Iterator[tuple[str, Kind[Any], Any, EngineConfig, int]]:
    """The same of models on a CPU with a block drafter."""
    for name in ("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-27b"):
        for budget in BUDGETS_GB:
            config = EngineConfig(dummy=name, threads=2)
            yield f"cpu text {name} with a drafter {budget} GB", cpu.Cpu.text, PUBLISHED[name], config, budget * GB


def cases_in_parts() -> Iterator[tuple[str, Kind[Any], Any, EngineConfig, int, dict[str, Any]]]:
    """The same of mixtures on several GPUs of 141 GB, and the parts of each."""
    for name in ("qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b"):
        for format in ("bf16", "fp8", "int4-g128-bfloat16"):
            shape = replace(PUBLISHED[name], formats=dummy_formats(PUBLISHED[name], format))
            for n in (2, 4, 8):
                largest, cuts = cut(shape, n)
                config = EngineConfig(dummy=name, tensor_parallel=n)
                parts = {"cuts": cuts, "n_gpus": n}
                yield f"gpu text {name} {format} on {n} GPUs", KINDS["gpu text"][0], largest, config, 141 * GB, parts


def plan_of(kind: Kind[Any], shape: Any, config: EngineConfig, free_bytes: int, **parts: Any) -> str:
    """A plan in one line, or why there is none. The buffers of a step are in it by a hash of their names and sizes."""
    n_real = shape.n_drawn if isinstance(kind, SpeechKind) else shape.vocab_size
    try:
        made = planned(config, shape, kind, n_real, free_bytes, HOST_FREE_BYTES, **parts)
    except (ConfigError, CheckpointError, UnsupportedModelError) as error:
        return f"{type(error).__name__}: {error}"
    buffers = json.dumps(made.workspace, sort_keys=True).encode()
    told = " ".join(f"{field}={getattr(made, field)}" for field in FIELDS)
    return f"{told} buffers={hashlib.sha256(buffers).hexdigest()[:12]}"


def all_plans() -> dict[str, str]:
    with mock.patch.object(fit, "memory_bound", lambda: ""), mock.patch.object(planner, "memory_bound", lambda: ""):
        plans = {case: plan_of(*made) for case, *made in cases()}
        with_drafters = cases_with_drafters()
        plans |= {case: plan_of(*made, drafter=drafter_of(made[1])) for case, *made in with_drafters}
        return plans | {case: plan_of(*made, **parts) for case, *made, parts in cases_in_parts()}


if __name__ == "__main__":
    plans = all_plans()
    GOLDEN.write_text(json.dumps(plans, indent=0) + "\n")
    print(f"{len(plans)} plans in {GOLDEN}", file=sys.stderr)
