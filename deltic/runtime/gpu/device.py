"""A GPU as a device: how its models are planned, loaded and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.engine.step import Progress
from deltic.models.fields import CheckpointError, refuse_limits
from deltic.models.loading import COUNTED_ROWS, PACKED, Store
from deltic.models.qwen.gpu_buffers import RING
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.shard import Cuts
from deltic.models.qwen.weights import Weights, empty_weights, weight_bytes
from deltic.models.tts.gpu import check_speech_gpu
from deltic.models.tts.shape import SpeechShape
from deltic.models.tts.weights import speech_weight_bytes
from deltic.models.vision.gpu import check_vision_gpu
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.shape import MERGE
from deltic.models.vision.weights import VisionWeights
from deltic.models.vocoder.gpu import check_vocoder_gpu, state_words
from deltic.ops.contract import KernelError
from deltic.ops.geometry import N_CODES, PAGE_SIZE, Allocate
from deltic.ops.gpu.all_reduce import out_of_reach
from deltic.ops.gpu.launch import INTERPRETED, Levers, allocate_on, parse_levers
from deltic.ops.gpu.weight import DeviceStore
from deltic.runtime.gpu.adapters import adapter_bytes
from deltic.runtime.gpu.buffers import exchanges, gpu_speech_workspace, gpu_workspace, n_patches
from deltic.runtime.gpu.collect import collect
from deltic.runtime.gpu.compile import Kernels, begin_compiling
from deltic.runtime.gpu.parallel import ParallelRunner, part_of_progress
from deltic.runtime.gpu.speech import GpuSpeechRunner
from deltic.runtime.gpu.text import GpuTextRunner
from deltic.runtime.gpu.vocoder import vocoder_bytes
from deltic.runtime.plan import Kind, Plan, SpeechPlan, TextPlan

INTERPRETED_BYTES = 2 << 30
"""Memory that a plan may count on where kernels are interpreted, in bytes."""
RESERVE_BYTES = 1 << 30
"""Bytes for the driver, compiled kernels, the recorded steps themselves, and the library's workspace."""
MAX_SEQS = 256
SPEECH_PAGES_BYTES = 8_000_000_000
"""A speech model's cache is small: 112 KiB a frame."""


def _counted(build: Callable[[Allocate], object]) -> dict[str, int]:
    """Bytes by name of what `build` allocates."""
    sizes: dict[str, int] = {}

    def allocate(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(size, dtype=dtype, device="meta")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
        return tensor

    build(allocate)
    return sizes


def _check_text(shape: ModelShape) -> None:
    """Raises UnsupportedModelError for a geometry that the GPU's kernels cannot run."""
    group = shape.n_q_heads // max(1, shape.n_kv_heads)
    limits = (
        ("hidden_size", shape.hidden_size, shape.hidden_size % 64 == 0, "a multiple of 64"),
        ("head_dim", shape.head_dim, shape.head_dim in (32, 64, 128, 256), "32, 64, 128 or 256"),
        ("num_attention_heads / num_key_value_heads", group, group <= 16, "at most 16"),
        ("linear_key_head_dim", shape.gdn_k_dim, shape.gdn_k_dim in (16, 32, 64, 128), "16, 32, 64 or 128"),
        ("linear_value_head_dim", shape.gdn_v_dim, shape.gdn_v_dim in (16, 32, 64, 128), "16, 32, 64 or 128"),
        ("partial_rotary_factor * head_dim", shape.rotary_dim, shape.rotary_dim % 16 == 0, "a multiple of 16"),
        ("intermediate_size", shape.intermediate_size, shape.intermediate_size % 32 == 0, "a multiple of 32"),
        (
            "moe_intermediate_size",
            shape.moe_intermediate_size,
            shape.moe_intermediate_size % 32 == 0,
            "a multiple of 32",
        ),
        (
            "shared_expert_intermediate_size",
            shape.shared_intermediate_size,
            shape.shared_intermediate_size % 32 == 0,
            "a multiple of 32",
        ),
        ("vocab_size", shape.vocab_size, shape.vocab_size < 1 << 20, "less than 1048576"),
    )
    refuse_limits(limits)


def _embedding_bytes(shape: ModelShape, quantize: str | None) -> int:
    n_bytes: int = empty_weights(shape, quantize, shape.tie_word_embeddings, COUNTED_ROWS).embed.n_bytes
    return n_bytes


def text(levers: Levers) -> Kind[ModelShape]:
    """Language models on a GPU."""

    def measure(plan: TextPlan) -> dict[str, int]:
        sizes = _counted(lambda allocate: gpu_workspace(plan, levers, allocate))
        n_angles = plan.max_model_len * plan.shape.rotary_dim
        if plan.tower is not None:
            n_angles += n_patches(plan) // MERGE * (plan.tower.head_dim // 2)
        return sizes | {"rotary tables": 4 * n_angles}

    return Kind(
        device="cuda",
        name="text",
        check=_check_text,
        weight_bytes=lambda shape, quantize: weight_bytes(shape, quantize, COUNTED_ROWS),
        embedding_bytes=_embedding_bytes,
        state_bytes=lambda shape: shape.recurrent_state_bytes + shape.conv_state_bytes // 3 * RING,
        measure=measure,
        useful_pages=lambda plan, _: plan.left_bytes // plan.page_bytes,
        model_len=32768,
        num_seqs=128,
        step_tokens=lambda length: 8192,
        shrink=(("max_picture_tokens", 4096), ("max_num_seqs", 8), ("max_step_tokens", 1024), ("max_model_len", 4096)),
        max_checkpoints=1024,
        drafts=0,
        draft_head=True,
        adapter_bytes=adapter_bytes,
        largest_picture=16384,  # 4,096 x 4,096 pixels
        check_tower=check_vision_gpu,
        max_num_seqs=MAX_SEQS,
        step_multiple=PAGE_SIZE,
        free_share=0.95,
        reserve_bytes=RESERVE_BYTES,
    )


def _check_speech(shape: SpeechShape) -> None:
    check_speech_gpu(shape)
    check_vocoder_gpu(shape.vocoder)


def _speech_weight_bytes(shape: SpeechShape, quantize: str | None) -> int:
    """Bytes of the weights in device memory: texts are projected, and the table that they come from is
    dropped.
    """
    stored = shape.text_vocab_size * shape.text_hidden_size * 2
    texts = shape.text_vocab_size * shape.talker.hidden_size * 4
    codes = N_CODES * shape.n_codebook * shape.predictor.hidden_size * 4 if shape.has_projection else 0
    return speech_weight_bytes(shape, quantize, COUNTED_ROWS) - stored + texts + codes


def speech(levers: Levers) -> Kind[SpeechShape]:
    """Speech models on a GPU."""

    def measure(plan: SpeechPlan) -> dict[str, int]:
        sizes = _counted(lambda allocate: gpu_speech_workspace(plan, levers, allocate))
        sizes["vocoder states"] = 4 * (plan.n_vocoder_slots) * state_words(plan.shape.vocoder)
        return sizes | {"rotary tables": plan.max_model_len * plan.shape.talker.head_dim * 4}

    return Kind(
        device="cuda",
        name="speech",
        check=_check_speech,
        weight_bytes=_speech_weight_bytes,
        state_bytes=lambda shape: shape.state_bytes,
        measure=measure,
        useful_pages=lambda plan, _: max(
            SPEECH_PAGES_BYTES // plan.page_bytes, plan.max_num_seqs * pages_for(plan.max_model_len)
        ),
        model_len=4096,
        num_seqs=64,
        step_tokens=lambda length: min(2048, pages_for(length) * PAGE_SIZE),
        shrink=(("max_num_seqs", 1),),
        vocoder_bytes=lambda shape: vocoder_bytes(shape.vocoder),
        max_num_seqs=MAX_SEQS,
        step_multiple=PAGE_SIZE,
        free_share=0.95,
        reserve_bytes=RESERVE_BYTES,
    )


def text_runner(
    plan: TextPlan,
    devices: Sequence[torch.device],
    weights: Sequence[list[Weights]],
    levers: Levers,
    progress: Progress = lambda stage, done: None,
    vision: tuple[VisionWeights, PictureRules] | None = None,
) -> GpuTextRunner | ParallelRunner:
    """Makes the runner of one GPU, or of several. weights: by GPU, of each of its parts. The rest is as a
    GpuTextRunner takes it.
    """
    if plan.n_gpus > 1:
        return ParallelRunner(plan, devices, weights, levers, progress, vision)
    joined = None
    if plan.cuts:
        workspace = gpu_workspace(plan, levers, allocate_on(weights[0][0].norm.device))
        joined = workspace, exchanges([workspace], plan.cuts)[0]
    return GpuTextRunner(plan, weights[0], levers, progress, vision, joined)


class Gpu:
    """The device of `build.build_runner` for models on the current GPU, or on the first n_gpus; in Triton's
    interpreter, for tests, where that is set.
    """

    name = "cuda"
    made = "record"
    """Stage of a start that making a runner mostly is."""

    def __init__(self, levers: tuple[str, ...] = (), n_gpus: int = 1, n_cuts: int | None = None) -> None:
        """levers: of the configuration. n_cuts: parts that a language model is cut into, by default one for
        each GPU. Raises ConfigError for a lever that there is not.
        """
        self.levers = parse_levers(levers)
        self.devices = [torch.device("cuda", i) for i in range(n_gpus)]
        self.n_gpus, self.n_cuts = n_gpus, n_cuts or n_gpus
        self.text, self.speech = text(self.levers), speech(self.levers)

    def check_reach(self) -> None:
        """Raises ConfigError where there are fewer GPUs, or some that do not reach each other's memory."""
        n, found = self.n_gpus, torch.cuda.device_count()
        if n > 1 and found < n:
            raise ConfigError(f"--tensor-parallel {n}: GPUs that torch sees here: {found}")
        if (pair := out_of_reach(n)) is not None:
            raise ConfigError(f"--tensor-parallel {n}: GPU {pair[0]} does not reach the memory of GPU {pair[1]}")

    def prepare(self, config: EngineConfig, directory: Path) -> EngineConfig:
        """The configuration as it is. Raises CheckpointError for weights that only the CPU reads."""
        if config.dummy is None and (directory / PACKED).exists():
            raise CheckpointError(
                f"{directory}: packed for the CPU; give --device cpu, or the checkpoint it was packed from"
            )
        return config

    def free_bytes(self) -> int:
        """Free bytes of the GPU that has least."""
        return INTERPRETED_BYTES if INTERPRETED else min(torch.cuda.mem_get_info(d)[0] for d in self.devices)

    def begin_compiling(self, plan: Plan[Any], again: bool = False) -> Kernels:
        """See `compile.begin_compiling`."""
        return begin_compiling(plan, self.levers, collect, again=again)

    def store(self, plan: Plan[Any]) -> Store:
        """Store to which weights are loaded."""
        return self._store_on(0)

    def _store_on(self, i_gpu: int) -> Store:
        return DeviceStore("cpu" if INTERPRETED else self.devices[i_gpu])

    def weights(
        self, config: EngineConfig, directory: Path, plan: Plan[Any], load: Callable[..., Any], progress: Progress
    ) -> Any:
        """Weights and notices, as `load` gives them; of a model that is cut, lists of weights by GPU."""
        if not plan.cuts:
            return load()
        told: list[str] = []

        def of_shard(store: Store, cuts: Cuts, i: int) -> Weights:
            weights, notices = load(
                store=store, cuts=cuts, progress=partial(part_of_progress, progress, i, self.n_cuts)
            )
            if i == 0:
                told.extend(notices)
            found: Weights = weights
            return found

        return self.parts(plan.cuts, of_shard), told

    def parts(self, cuts: Sequence[Cuts], load: Callable[[Store, Cuts, int], Weights]) -> list[list[Weights]]:
        """Loads the weights of each part, by GPU. Parts of a GPU have one embedding. load: loads a part,
        which has this number.
        """
        found: list[list[Weights]] = [[] for _ in self.devices]
        for i, part in enumerate(cuts):
            i_gpu = i * self.n_gpus // self.n_cuts
            found[i_gpu].append(load(self._store_on(i_gpu), part, i))
            found[i_gpu][-1].embed = found[i_gpu][0].embed
        return found

    def runner(
        self, plan: Plan[Any], weights: Any, beside: Any, progress: Progress
    ) -> GpuTextRunner | ParallelRunner | GpuSpeechRunner:
        """beside: the vocoder of a speech model; of a language model that takes pictures the tower's weights,
        and its rules. Raises KernelError.
        """
        try:
            if plan.speaks:
                return GpuSpeechRunner(plan, weights, beside, self.levers, progress)
            of_gpus = weights if plan.cuts else [[weights]]
            return text_runner(plan, self.devices, of_gpus, self.levers, progress, beside)
        except TritonError as error:
            raise KernelError(f"a kernel cannot run on this GPU ({error}); give --device cpu") from error

    def kernels(self, runner: Any) -> str:
        """Describes the kernels for a fingerprint, beside their sources."""
        cuts = f"in {self.n_cuts} parts " if self.n_cuts > self.n_gpus else ""
        return f"{cuts}{runner.info.device} torch {torch.__version__} triton {triton.__version__} {self.levers}"
