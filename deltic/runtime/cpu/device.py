"""The CPU as a device: how its models are planned, loaded and run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deltic.config import EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.engine.step import Progress
from deltic.machine import free_memory_bytes
from deltic.models.loading import PACKED, Host, Store
from deltic.models.packed import check_rounded, map_packed, map_parts, through_cache
from deltic.models.qwen.cpu import check_kernels
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import weight_bytes
from deltic.models.tts.cpu import check_speech_kernels
from deltic.models.tts.shape import SpeechShape
from deltic.models.tts.weights import empty_speech_weights, speech_weight_bytes
from deltic.models.vision.cpu import check_vision_kernels
from deltic.models.vocoder.cpu import allocate_vocoder, check_vocoder
from deltic.models.vocoder.weights import vocoder_weight_bytes
from deltic.ops.cpu.program import library_file
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.cpu.adapters import adapter_bytes
from deltic.runtime.cpu.buffers import build_speech_workspace, build_workspace, counted
from deltic.runtime.cpu.speech import SpeechRunner
from deltic.runtime.cpu.text import Runner
from deltic.runtime.plan import CACHE_SHARE, Kind, Plan, SpeechPlan, TextPlan
from deltic.runtime.voices import ENCODING_BYTES, MEMORY_BYTES

DEFAULT_SEQS = 32
DEFAULT_POOL_BYTES = 2 << 30
"""Pages and state slots take this much, and the host tier comes on top, when no --memory-gb is given and it
is free.
"""
POOL_SHARE, LEAST_POOL_BYTES = 6, 64 << 20
"""Bounds of the pool: at most this many times the weights, so that a toy stays small, and at least these
bytes.
"""
SHORT_MODEL_LEN = 4096


def _text_bytes(plan: TextPlan) -> dict[str, int]:
    sizes = counted(partial(build_workspace, plan))
    n_angles = plan.max_model_len + plan.n_made_angles
    if plan.max_picture_tokens:
        sizes["vision pixels that wait"] = plan.pixel_bytes
    return {**sizes, "rotary tables": 2 * n_angles * (plan.shape.rotary_dim // 2) * 4}


def _useful_pages(plan: TextPlan, config: EngineConfig) -> int:
    """The most useful pages.

    Memory that is given explicitly goes to the prefix cache. Otherwise there are pages for all sequences that
    can run, and at least for those that could by default.
    """
    if config.prefix_cache and config.memory_gb is not None:
        return plan.left_bytes // plan.page_bytes
    n_sequences = max(plan.max_num_seqs, DEFAULT_SEQS if config.prefix_cache else 1)
    return n_sequences * pages_for(plan.max_model_len)


def _modest(plan: TextPlan, config: EngineConfig) -> TextPlan:
    """Decides the budget, and the host tier where it is not given: what one sequence of full length takes, if
    there is memory for it.
    """
    default = plan.host_sequence_bytes if config.cache_host_gb is None else 0
    if config.memory_gb is not None or config.n_pages is not None:
        if default > plan.spare_bytes // CACHE_SHARE:
            default = 0
        return replace(plan, host_bytes=plan.host_bytes + default)
    # Modest unless told otherwise: what running takes, and something for the cache where that is more than
    # the default.
    running = plan.slots_bytes + plan.sequence_bytes
    default_pools = min(DEFAULT_POOL_BYTES, max(LEAST_POOL_BYTES, POOL_SHARE * plan.weight_bytes))
    pools = max(default_pools, running + running // 2 if config.prefix_cache else running)
    modest = plan.weight_bytes + plan.workspace_bytes + plan.host_bytes + pools
    if modest + default > plan.budget_bytes:
        default = 0
    budget = min(plan.budget_bytes, modest + default)
    return replace(plan, budget_bytes=budget, host_bytes=plan.host_bytes + default)


TEXT = Kind[ModelShape](
    device="cpu",
    name="text",
    check=check_kernels,
    weight_bytes=weight_bytes,
    state_bytes=lambda shape: shape.state_bytes,
    measure=_text_bytes,
    useful_pages=_useful_pages,
    model_len=32768,
    num_seqs=DEFAULT_SEQS,
    step_tokens=lambda length: 512,
    # A tight machine gets several sequences of a useful length rather than one long one.
    shrink=(
        ("max_picture_tokens", 1024),
        ("max_model_len", SHORT_MODEL_LEN),
        ("max_num_seqs", 1),
        ("max_model_len", PAGE_SIZE),
    ),
    settle=_modest,
    max_checkpoints=256,
    drafts=8,
    draft_head=True,
    adapter_bytes=adapter_bytes,
    largest_picture=4096,  # 2,048 x 2,048 pixels take a CPU a minute
    check_tower=check_vision_kernels,
)


def _speech_bytes(plan: SpeechPlan) -> dict[str, int]:
    sizes = counted(partial(build_speech_workspace, plan))
    sizes |= counted(partial(allocate_vocoder, plan.shape.vocoder, plan.n_vocoder_slots))
    voices = {"voices": MEMORY_BYTES + ENCODING_BYTES} if plan.shape.variant == "base" else {}
    return {**sizes, **voices, "rotary tables": plan.max_model_len * plan.shape.talker.head_dim * 4}


def _useful_speech_pages(plan: SpeechPlan, config: EngineConfig) -> int:
    n_sequence = pages_for(plan.max_model_len)
    useful = plan.max_num_seqs * n_sequence
    if config.memory_gb is None:  # modest unless told otherwise
        useful = min(useful, max(DEFAULT_POOL_BYTES // plan.page_bytes, n_sequence * 3 // 2))
    return useful


def _check_speech(shape: SpeechShape) -> None:
    check_speech_kernels(shape)
    check_vocoder(shape.vocoder)


SPEECH = Kind[SpeechShape](
    device="cpu",
    name="speech",
    check=_check_speech,
    weight_bytes=speech_weight_bytes,
    state_bytes=lambda shape: shape.state_bytes,
    measure=_speech_bytes,
    useful_pages=_useful_speech_pages,
    model_len=4096,  # five minutes and more of audio
    num_seqs=8,
    step_tokens=lambda length: 512,
    shrink=(("max_num_seqs", 1), ("max_model_len", 4 * PAGE_SIZE)),
    vocoder_bytes=lambda shape: vocoder_weight_bytes(shape.vocoder),
)


class Cpu:
    """The device of `build.build_runner` for models on the CPU."""

    name = "cpu"
    text, speech = TEXT, SPEECH
    n_gpus = n_cuts = 1
    """GPUs and parts of a model: no model is cut on a CPU."""
    made = "memory"
    """The stage of a start under which making a runner is reported."""

    def prepare(self, config: EngineConfig, directory: Path) -> EngineConfig:
        """The configuration as it is. Raises ConfigError for weights that the CPU does not make."""
        check_rounded(config)
        return config

    def free_bytes(self) -> int:
        return free_memory_bytes()

    def begin_compiling(self, plan: Plan[Any], again: bool = False) -> None:
        """Kernels were compiled when Deltic was installed."""

    def store(self, plan: Plan[Any]) -> Store:
        """Store to which weights are loaded."""
        return Host(plan.n_threads)

    def weights(
        self, config: EngineConfig, directory: Path, plan: Plan[Any], load: Callable[[], Any], progress: Progress
    ) -> Any:
        """Weights and notices: from a packed model, from the cache, or as `load` gives them
        (and then into the cache).
        """
        shape, n_threads = plan.shape, plan.n_threads

        def on_bytes(stage: str) -> Callable[[int, int], None]:
            return lambda done, total: progress(stage, done / max(1, total))

        def map_file(file: Path) -> Any:
            if plan.speaks:
                return map_parts(
                    file, lambda quantize, _: empty_speech_weights(shape, quantize), n_threads, on_bytes("weights")
                )
            return map_packed(file, shape, n_threads, on_bytes("weights"))

        if config.dummy is None and (directory / PACKED).exists():
            return map_file(directory / PACKED)
        return through_cache(config, directory, map_file, load, on_bytes("weights cache"))

    def runner(self, plan: Plan[Any], weights: Any, beside: Any, progress: Progress) -> Runner | SpeechRunner:
        """beside: the vocoder of a speech model; of a language model that takes pictures the tower's weights,
        and its rules.
        """
        if plan.speaks:
            return SpeechRunner(plan, weights, beside, progress)
        return Runner(plan, weights, progress, beside)

    def kernels(self, runner: Any) -> Path:
        """Names what a fingerprint must know of the kernels: the library in use."""
        return library_file(runner.program.instruction_set)
