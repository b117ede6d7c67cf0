"""The CPU as a device: how its models are planned, loaded and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.engine.messages import EngineInfo
from deltic.engine.step import Progress
from deltic.machine import free_memory_bytes
from deltic.models.dflash.weights import DrafterWeights
from deltic.models.files import PACKED
from deltic.models.loading import Host, OnDisk, Store
from deltic.models.packed import check_rounded, map_packed, map_parts, through_cache
from deltic.models.qwen.adapters import Adapter
from deltic.models.qwen.cpu import check_kernels
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.shard import Cuts
from deltic.models.qwen.weights import Weights, empty_weights, weight_bytes
from deltic.models.tts.cpu import check_speech_kernels
from deltic.models.tts.shape import SpeechShape
from deltic.models.tts.weights import SpeechWeights, empty_speech_weights, speech_weight_bytes
from deltic.models.vision.cpu import check_vision_kernels
from deltic.models.vision.shape import VisionShape
from deltic.models.vocoder.cpu import allocate_vocoder, check_vocoder
from deltic.models.vocoder.weights import vocoder_weight_bytes
from deltic.ops.arrays import Array, nothing
from deltic.ops.cpu.program import library_file
from deltic.ops.geometry import PAGE_SIZE
from deltic.roofs import disk_bandwidth
from deltic.runtime.cpu.adapters import adapter_bytes
from deltic.runtime.cpu.buffers import build_speech_workspace, build_workspace
from deltic.runtime.cpu.speech import SpeechRunner
from deltic.runtime.cpu.text import Runner
from deltic.runtime.model import Model, PartWeights, SpeechModel, TextModel, Vision, of_stage
from deltic.runtime.plan import CACHE_SHARE, SpeechKind, SpeechPlan, TextKind, TextPlan, brought, counted, page_cost
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


class TextOnCpu(TextKind):
    """Language models on the CPU."""

    device = "cpu"
    model_len = 32768
    num_seqs = DEFAULT_SEQS
    # A tight machine gets several sequences of a useful length rather than one long one.
    shrink = (
        ("max_picture_tokens", 1024),
        ("max_model_len", SHORT_MODEL_LEN),
        ("max_num_seqs", 1),
        ("max_model_len", PAGE_SIZE),
    )
    max_checkpoints = 256
    largest_picture = 4096  # 2,048 x 2,048 pixels take a CPU a minute

    def check(self, shape: ModelShape) -> None:
        check_kernels(shape)

    def check_tower(self, tower: VisionShape) -> None:
        check_vision_kernels(tower)

    def weight_bytes(self, shape: ModelShape, quantize: str | None) -> int:
        return weight_bytes(shape, quantize)

    def adapter_bytes(self, adapter: Adapter, cuts: Sequence[Cuts] = ()) -> int:
        return adapter_bytes(adapter)

    def all_inside(self, model: Model[ModelShape]) -> str:
        if not model.shape.is_moe:
            return super().all_inside(model)
        is_packed = model.config.dummy is None and (model.directory / PACKED).exists()
        has_file = is_packed or model.config.weights_cache is not None
        return (
            ""
            if has_file
            else "experts are outside of memory in a packed model (`deltic pack`), or with --weights-cache"
        )

    def hold_experts(self, plan: TextPlan, n_bytes: int) -> TextPlan:
        weights = empty_weights(plan.shape, plan.quantize, plan.shape.tie_word_embeddings)
        whole, n_experts = weights.n_bytes, sum(memory.nbytes for memory in weights.experts().values())
        inside = min(n_experts, max(n_experts // plan.shape.n_experts, n_bytes))
        return replace(plan, weight_bytes=whole - n_experts + inside, outside_bytes=n_experts - inside)

    def measure(self, plan: TextPlan) -> dict[str, int]:
        sizes = counted(partial(build_workspace, plan), nothing)
        n_angles = plan.max_model_len + plan.n_made_angles
        if plan.tower is not None:
            sizes["vision pixels that wait"] = plan.pixel_bytes
        if plan.joint_head is not None:
            sizes["joint head"] = plan.joint_head.n_bytes
        if (drafter := plan.drafter) is not None:
            sizes["drafter rotary tables"] = (plan.max_model_len + PAGE_SIZE) * drafter.head_dim * 4
        return {**sizes, "rotary tables": 2 * n_angles * (plan.shape.rotary_dim // 2) * 4}

    def useful_pages(self, plan: TextPlan, config: EngineConfig) -> int:
        """The most useful pages.

        Memory that is given explicitly goes to the prefix cache. Otherwise there are pages for all sequences
        that can run, and at least for those that could by default.
        """
        if config.prefix_cache and config.memory_gb is not None:
            return plan.left_bytes // page_cost(plan)
        n_sequences = max(plan.max_num_seqs, DEFAULT_SEQS if config.prefix_cache else 1)
        return n_sequences * pages_for(plan.max_model_len)

    def budget(self, plan: TextPlan, config: EngineConfig) -> TextPlan:
        """Decides the budget, and the host tier where it is not given: what one sequence of full length
        takes, if there is memory for it.
        """
        default = plan.host_sequence_bytes if config.cache_host_gb is None else 0
        if config.memory_gb is not None or config.n_pages is not None:
            if default > plan.spare_bytes // CACHE_SHARE:
                default = 0
            return replace(plan, host_bytes=plan.host_bytes + default)
        # Modest unless told otherwise: what running takes, and something for the cache where that is more
        # than the default.
        running = plan.slots_bytes + plan.sequence_bytes
        default_pools = min(DEFAULT_POOL_BYTES, max(LEAST_POOL_BYTES, POOL_SHARE * plan.weight_bytes))
        pools = max(default_pools, running + running // 2 if config.prefix_cache else running)
        modest = plan.total_bytes - plan.slots_bytes - plan.pages_bytes + pools
        if modest + default > plan.budget_bytes:
            default = 0
        return replace(
            plan, budget_bytes=min(plan.budget_bytes, modest + default), host_bytes=plan.host_bytes + default
        )

    def host_bytes(self, plan: TextPlan, config: EngineConfig, free_bytes: int) -> int:
        """Returns what `budget` has decided."""
        return plan.host_bytes


class SpeechOnCpu(SpeechKind):
    """Speech models on the CPU."""

    device = "cpu"
    model_len = 4096  # five minutes and more of audio
    num_seqs = 8
    shrink = (("max_num_seqs", 1), ("max_model_len", 4 * PAGE_SIZE))

    def check(self, shape: SpeechShape) -> None:
        check_speech_kernels(shape)
        check_vocoder(shape.vocoder)

    def weight_bytes(self, shape: SpeechShape, quantize: str | None) -> int:
        return speech_weight_bytes(shape, quantize)

    def vocoder_bytes(self, shape: SpeechShape) -> int:
        return vocoder_weight_bytes(shape.vocoder)

    def measure(self, plan: SpeechPlan) -> dict[str, int]:
        sizes = counted(partial(build_speech_workspace, plan), nothing)
        sizes |= counted(partial(allocate_vocoder, plan.shape.vocoder, plan.n_vocoder_slots), nothing)
        voices = {"voices": MEMORY_BYTES + ENCODING_BYTES} if plan.shape.variant == "base" else {}
        return {**sizes, **voices, "rotary tables": plan.max_model_len * plan.shape.talker.head_dim * 4}

    def useful_pages(self, plan: SpeechPlan, config: EngineConfig) -> int:
        n_sequence = pages_for(plan.max_model_len)
        useful = plan.max_num_seqs * n_sequence
        if config.memory_gb is None:  # modest unless told otherwise
            useful = min(useful, max(DEFAULT_POOL_BYTES // plan.page_bytes, n_sequence * 3 // 2))
        return useful


LEAST_TOKENS_S = 0.2
"""Tokens a second of one sequence below which a model with experts on the disk is refused."""


def check_disk(file: Path, plan: TextPlan) -> None:
    """Raises ConfigError where experts that stay in a packed file would come too slowly."""
    bandwidth = disk_bandwidth(file)
    if (found := bandwidth / brought(plan, 1)) < LEAST_TOKENS_S:
        raise ConfigError(
            f"{plan.outside_bytes / 1e9:.1f} GB of experts do not fit into memory, and the disk of {file} gives "
            f"{bandwidth / 1e6:.0f} MB/s: {found:.2f} tokens/s at most, and under {LEAST_TOKENS_S} is refused; take a faster disk, "
            f"--quantize int4, a smaller model, or {plan.outside_bytes / 1e9:.1f} GB more memory"
        )


class Cpu:
    """The device of `build.build_runner` for models on the CPU."""

    name = "cpu"
    text, speech = TextOnCpu(), SpeechOnCpu()
    n_gpus = n_cuts = 1
    """GPUs and parts of a model: no model is cut on a CPU."""
    made = "memory"
    """The stage of a start under which making a runner is reported."""

    def check(self, config: EngineConfig, directory: Path) -> None:
        """Raises ConfigError for weights that the CPU does not make."""
        check_rounded(config)

    def free_bytes(self) -> int:
        return free_memory_bytes()

    def begin_compiling(self, plan: TextPlan | SpeechPlan, again: bool = False) -> None:
        """Kernels were compiled when Deltic was installed."""

    def stores(self, plan: TextPlan | SpeechPlan) -> list[Store]:
        """Stores to which weights are loaded: one."""
        return [Host(plan.n_threads)]

    def text_weights(self, model: TextModel, plan: TextPlan, progress: Progress) -> tuple[PartWeights, list[str]]:
        """Weights of the one part of the one device, and notices: from a packed model, from the cache, or
        from the checkpoint (and then into the cache).
        """

        def map_file(file: Path) -> tuple[Weights, list[str]]:
            if is_outside:
                check_disk(file, plan)
            on_bytes = of_stage(progress, "weights")
            weights, notices = map_packed(file, plan.shape, plan.n_threads, on_bytes, reads_experts=not is_outside)
            weights.ngram_table = model.ngram_table()
            return weights, notices

        config, is_outside, store = model.config, plan.outside_bytes > 0, self.stores(plan)[0]
        if is_outside and config.weights_cache is not None:
            store = OnDisk(plan.n_threads, directory=config.weights_cache)
        load, writing = partial(model.load, store, progress), of_stage(progress, "weights cache")
        weights, notices = through_cache(
            config, model.directory, map_file, load, writing, plan.shape.has_draft_head, stays_on_disk=is_outside
        )
        return [[weights]], notices

    def speech_weights(
        self, model: SpeechModel, plan: SpeechPlan, progress: Progress
    ) -> tuple[SpeechWeights, list[str]]:
        """Weights and notices, as of `text_weights`."""

        def map_file(file: Path) -> tuple[SpeechWeights, list[str]]:
            return map_parts(
                file,
                lambda quantize, _: empty_speech_weights(plan.shape, quantize),
                plan.n_threads,
                of_stage(progress, "weights"),
            )

        load = partial(model.load, self.stores(plan)[0], progress)
        return through_cache(model.config, model.directory, map_file, load, of_stage(progress, "weights cache"))

    def text_runner(
        self,
        plan: TextPlan,
        weights: PartWeights,
        vision: Vision | None,
        progress: Progress,
        drafters: Sequence[DrafterWeights] = (),
    ) -> Runner:
        """Makes a runner. vision: of a model that takes pictures. drafters: one, or none."""
        return Runner(plan, weights[0][0], progress, vision, drafters[0] if drafters else None)

    def speech_runner(
        self, plan: SpeechPlan, weights: SpeechWeights, vocoder: dict[str, Array], progress: Progress
    ) -> SpeechRunner:
        return SpeechRunner(plan, weights, vocoder, progress)

    def kernels(self, info: EngineInfo) -> Path:
        """Names what a fingerprint must know of the kernels: the library in use."""
        return library_file(info.kernels)
