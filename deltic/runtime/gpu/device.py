"""A GPU as a device: how its models are planned, loaded and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.engine.messages import EngineInfo
from deltic.engine.step import Progress, silent
from deltic.models.dflash.gpu import check_drafter_gpu
from deltic.models.dflash.shape import DrafterShape
from deltic.models.dflash.weights import DrafterWeights
from deltic.models.fields import CheckpointError, at_most, multiple, one_of, refuse_limits
from deltic.models.files import PACKED
from deltic.models.loading import COUNTED_ROWS, Store
from deltic.models.qwen.adapters import Adapter
from deltic.models.qwen.gpu_buffers import RING
from deltic.models.qwen.gpu_experts import outside_experts, slot_bytes
from deltic.models.qwen.gpu_shards import place_of
from deltic.models.qwen.gpu_streams import NGRAM_RING, reachable_table
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.shard import Cuts
from deltic.models.qwen.weights import Weights, empty_weights, weight_bytes
from deltic.models.tts.gpu import check_speech_gpu
from deltic.models.tts.shape import SpeechShape
from deltic.models.tts.weights import SpeechWeights, speech_weight_bytes
from deltic.models.vision.gpu import check_vision_gpu
from deltic.models.vision.shape import MERGE, VisionShape
from deltic.models.vocoder.gpu import check_vocoder_gpu, state_words
from deltic.ops.arrays import Array
from deltic.ops.contract import KernelError
from deltic.ops.geometry import N_CODES, PAGE_SIZE
from deltic.ops.gpu.all_reduce import out_of_reach
from deltic.ops.gpu.chip import free_bytes
from deltic.ops.gpu.launch import INTERPRETED, Levers, allocate_on, parse_levers
from deltic.ops.gpu.weight import DeviceStore, in_host
from deltic.runtime.gpu.adapters import adapter_bytes
from deltic.runtime.gpu.buffers import exchanges, gpu_speech_workspace, gpu_workspace, meeting, n_patches
from deltic.runtime.gpu.collect import collect
from deltic.runtime.gpu.compile import Kernels, begin_compiling
from deltic.runtime.gpu.parallel import ParallelRunner, part_of_progress
from deltic.runtime.gpu.speech import GpuSpeechRunner
from deltic.runtime.gpu.text import GpuTextRunner
from deltic.runtime.gpu.vocoder import vocoder_bytes
from deltic.runtime.model import Model, PartWeights, S, SpeechModel, TextModel, Vision, of_stage
from deltic.runtime.plan import Plan, SpeechKind, SpeechPlan, TextKind, TextPlan, counted

INTERPRETED_BYTES = 2 << 30
"""Memory that a plan may count on where kernels are interpreted, in bytes."""
RESERVE_BYTES = 1 << 30
"""Bytes for the driver, compiled kernels, the recorded steps themselves, and the library's workspace."""
MAX_SEQS, MAX_UTTERANCES = 1024, 256
"""Sequences at once, of text and of speech: --max-num-seqs at most."""
MAX_NGRAM_WIDTH = 1024
"""Columns of a row of the table of n-grams, of which a program reads one."""
SPEECH_PAGES_BYTES = 8_000_000_000
"""A speech model's cache is small: 112 KiB a frame."""


_nothing = partial(torch.empty, device="meta")


class OnGpu:
    """The kind of a language or a speech model on a GPU, as far as both are alike. levers: of its kernels."""

    device = "cuda"
    counted: Store = COUNTED_ROWS
    step_multiple = PAGE_SIZE
    free_share = 0.95
    reserve_bytes = RESERVE_BYTES

    def __init__(self, levers: Levers) -> None:
        self.levers = levers

    def host_bytes(self, plan: Plan[S], config: EngineConfig, free_bytes: int) -> int:
        """Bytes of the host's memory for what leaves a GPU: what is asked for, else one sequence of full
        length where that is free beside decoders of pictures.
        """
        given = config.cache_host_gb
        wanted = plan.host_sequence_bytes if given is None else int(given * 1e9)
        most = max(0, min(free_bytes // 2, free_bytes - plan.decoders_bytes))
        if wanted <= most:
            return plan.whole_pages(wanted)
        if given is None:
            return 0
        left = f", and what decoders of pictures leave: {most // 10**8 / 10} GB" if most < free_bytes // 2 else ""
        raise ConfigError(f"--cache-host-gb {given}: at most half of the {free_bytes / 1e9:.1f} GB that are free{left}")


def _counted_weights(shape: ModelShape, quantize: str | None) -> Weights:
    """The weights without memory, made once: a plan that is searched for asks again and again."""
    return _weights_of(shape, quantize, tuple(shape.formats.items()))


@lru_cache(maxsize=2)
def _weights_of(shape: ModelShape, quantize: str | None, formats: object) -> Weights:
    """formats: those of the shape, which are no part of what makes two shapes equal."""
    return empty_weights(shape, quantize, shape.tie_word_embeddings, COUNTED_ROWS)


class TextOnGpu(OnGpu, TextKind):
    """Language models on a GPU."""

    model_len = 32768
    num_seqs, max_num_seqs = 128, MAX_SEQS
    shrink = (
        *(("max_picture_tokens", 4096), ("max_num_seqs", 8), ("max_step_tokens", 1024)),
        *(("max_num_seqs", 1), ("max_model_len", 4096)),
    )
    max_checkpoints = 1024
    drafts = 0  # what the rule in force brings here is not measured
    largest_picture = 16384  # 4,096 x 4,096 pixels

    def check(self, shape: ModelShape) -> None:
        group = shape.n_q_heads // max(1, shape.n_kv_heads)
        limits = [
            one_of("hc_count", shape.n_streams, 1, 2, 4, 8),
            multiple("hidden_size", shape.hidden_size, 64),
            one_of("head_dim", shape.head_dim, 32, 64, 128, 256),
            at_most("num_attention_heads / num_key_value_heads", group, 16),
            one_of("linear_key_head_dim", shape.gdn_k_dim, 16, 32, 64, 128),
            one_of("linear_value_head_dim", shape.gdn_v_dim, 16, 32, 64, 128),
            multiple("partial_rotary_factor * head_dim", shape.rotary_dim, 16),
            multiple("intermediate_size", shape.intermediate_size, 32),
            multiple("moe_intermediate_size", shape.moe_intermediate_size, 32),
            multiple("shared_expert_intermediate_size", shape.shared_intermediate_size, 32),
            ("vocab_size", shape.vocab_size, shape.vocab_size < 1 << 20, "less than 1048576"),
        ]
        if (ngrams := shape.ngrams) is not None:
            most, fits = PAGE_SIZE // ngrams.size + 1, ngrams.conv_width > 1 and ngrams.window <= PAGE_SIZE
            wide = ngrams.head_width <= MAX_NGRAM_WIDTH
            limits += [
                ("ple_conv_kernel_size", ngrams.conv_width, fits, f"2 to {most}"),
                ("ple_embed_dim", ngrams.width, wide, f"at most {MAX_NGRAM_WIDTH} for each head"),
            ]
        refuse_limits(*limits)
        if shape.index is not None:
            refuse_limits(one_of("indexer_head_dim", shape.index.dim, 32, 64, 128))
            refuse_limits(one_of("indexer_n_heads", shape.index.n_q, 1, 2, 4, 8, 16))

    def check_tower(self, tower: VisionShape) -> None:
        check_vision_gpu(tower)

    def check_drafter(self, shape: DrafterShape) -> None:
        check_drafter_gpu(shape)

    def weight_bytes(self, shape: ModelShape, quantize: str | None) -> int:
        return weight_bytes(shape, quantize, COUNTED_ROWS)

    def embedding_bytes(self, shape: ModelShape, quantize: str | None) -> int:
        n_bytes: int = _counted_weights(shape, quantize).embed.n_bytes
        return n_bytes

    def table_bytes(self, plan: TextPlan) -> int:
        is_apart = not plan.cuts and not plan.shape.tie_word_embeddings
        return self.embedding_bytes(plan.shape, plan.quantize) if is_apart else 0

    def ngram_bytes(self, model: Model[ModelShape]) -> int:
        return model.ngram_copy_bytes() if isinstance(model, TextModel) else 0

    def state_bytes(self, shape: ModelShape) -> int:
        own = 0 if shape.ngrams is None else (shape.ngrams.window + NGRAM_RING) * shape.stream_size * 2
        return shape.recurrent_state_bytes + shape.conv_state_bytes // 3 * RING + own

    def adapter_bytes(self, adapter: Adapter, cuts: Sequence[Cuts] = ()) -> int:
        return adapter_bytes(adapter, cuts)

    def measure(self, plan: TextPlan) -> dict[str, int]:
        with self.levers.bound():
            sizes = counted(partial(gpu_workspace, plan), _nothing)
        if plan.n_expert_slots:
            weights = [_counted_weights(plan.shape, plan.quantize)] * plan.n_shards
            sizes |= counted(partial(outside_experts, weights, plan.n_expert_slots), _nothing)
        n_angles = plan.max_model_len * plan.shape.rotary_dim
        if plan.tower is not None:
            n_angles += n_patches(plan) // MERGE * (plan.tower.head_dim // 2)
        if plan.drafter is not None:
            # and the norms of its keys, side by side
            n_angles += (plan.max_model_len + PAGE_SIZE + plan.drafter.n_layers) * plan.drafter.head_dim
        return sizes | {"rotary tables": 4 * n_angles}

    def meeting_bytes(self, plan: TextPlan) -> int:
        if plan.n_gpus == 1 or self.levers.peer:
            return 0
        return sum(counted(partial(meeting, plan, is_in_host=True), _nothing).values())

    def all_inside(self, model: Model[ModelShape]) -> str:
        if model.shape.own_experts is not None:
            return "experts are dealt out whole to parts of the model"
        return "" if model.shape.is_moe else super().all_inside(model)

    def hold_experts(self, plan: TextPlan, n_bytes: int) -> TextPlan:
        n_experts, of_layers = plan.shape.n_experts, slot_bytes(_counted_weights(plan.shape, plan.quantize))
        a_slot = plan.n_shards * of_layers
        n_slots, outside = max(1, n_bytes // a_slot), n_experts * a_slot
        if n_slots >= n_experts:
            n_slots = outside = 0
        left = plan.weight_bytes + plan.outside_bytes // plan.n_gpus - outside
        return replace(plan, n_expert_slots=n_slots, outside_bytes=plan.n_gpus * outside, weight_bytes=left)

    def step_tokens(self, model_len: int) -> int:
        return 8192

    def useful_pages(self, plan: TextPlan, config: EngineConfig) -> int:
        return plan.left_bytes // plan.page_bytes


class SpeechOnGpu(OnGpu, SpeechKind):
    """Speech models on a GPU."""

    model_len = 4096
    num_seqs, max_num_seqs = 64, MAX_UTTERANCES
    shrink = (("max_num_seqs", 1),)

    def check(self, shape: SpeechShape) -> None:
        check_speech_gpu(shape)
        check_vocoder_gpu(shape.vocoder)

    def weight_bytes(self, shape: SpeechShape, quantize: str | None) -> int:
        """Bytes in device memory: texts are projected, and the table that they come from is dropped."""
        stored = shape.text_vocab_size * shape.text_hidden_size * 2
        texts = shape.text_vocab_size * shape.talker.hidden_size * 4
        codes = N_CODES * shape.n_codebook * shape.predictor.hidden_size * 4 if shape.has_projection else 0
        return speech_weight_bytes(shape, quantize, COUNTED_ROWS) - stored + texts + codes

    def vocoder_bytes(self, shape: SpeechShape) -> int:
        return vocoder_bytes(shape.vocoder)

    def measure(self, plan: SpeechPlan) -> dict[str, int]:
        with self.levers.bound():
            sizes = counted(partial(gpu_speech_workspace, plan), _nothing)
        sizes["vocoder states"] = 4 * (plan.n_vocoder_slots) * state_words(plan.shape.vocoder)
        return sizes | {"rotary tables": plan.max_model_len * plan.shape.talker.head_dim * 4}

    def step_tokens(self, model_len: int) -> int:
        return min(2048, pages_for(model_len) * PAGE_SIZE)

    def useful_pages(self, plan: SpeechPlan, config: EngineConfig) -> int:
        return max(SPEECH_PAGES_BYTES // plan.page_bytes, plan.max_num_seqs * pages_for(plan.max_model_len))


def text_runner(
    plan: TextPlan,
    devices: Sequence[torch.device],
    weights: Sequence[list[Weights]],
    progress: Progress = silent,
    vision: Vision | None = None,
    drafters: Sequence[DrafterWeights] = (),
) -> GpuTextRunner | ParallelRunner:
    """Makes the runner of one GPU, or of several. weights: by GPU, of each of its parts; an embedding that is
    planned in the host's memory moves there, and a table of n-grams, once for all. drafters: by GPU, where
    there is a block drafter. The rest is as a GpuTextRunner takes it.
    """
    if (table := weights[0][0].ngram_table) is not None:
        table = reachable_table(table, of_stage(progress, "table of n-grams"))
        for part in chain.from_iterable(weights):
            part.ngram_table = table
    if plan.table_bytes:
        weights[0][0].embed = in_host(weights[0][0].embed)
        torch.cuda.empty_cache()
    if plan.n_gpus > 1:
        return ParallelRunner(plan, devices, weights, progress, vision, drafters)
    joined = None
    if plan.cuts:
        workspace = gpu_workspace(plan, allocate_on(place_of(weights[0][0])))
        joined = workspace, exchanges([workspace], plan.cuts)[0]
    return GpuTextRunner(plan, weights[0], progress, vision, joined, drafters[0] if drafters else None)


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
        self.text, self.speech = TextOnGpu(self.levers), SpeechOnGpu(self.levers)
        self._notices: list[str] = []

    def find_reach(self) -> None:
        """Finds out whether GPUs reach each other's memory: if some do not, all meet in the host's. Raises
        ConfigError where there are fewer GPUs.
        """
        n, found = self.n_gpus, torch.cuda.device_count()
        if n > 1 and found < n:
            raise ConfigError(f"--tensor-parallel {n}: GPUs that torch sees here: {found}")
        if self.levers.peer and (pair := out_of_reach(n)) is not None:
            self.levers = replace(self.levers, peer=False)
            self.text = TextOnGpu(self.levers)
            self._notices.append(
                f"GPU {pair[0]} does not reach the memory of GPU {pair[1]}: sums go through the host's, which takes longer"
            )

    def check(self, config: EngineConfig, directory: Path) -> None:
        """Raises CheckpointError for weights that only the CPU reads."""
        if config.dummy is None and (directory / PACKED).exists():
            raise CheckpointError(
                f"{directory}: packed for the CPU; give --device cpu, or the checkpoint it was packed from"
            )

    def free_bytes(self) -> int:
        """Free bytes of the GPU that has least."""
        return INTERPRETED_BYTES if INTERPRETED else min(free_bytes(device) for device in self.devices)

    def begin_compiling(self, plan: TextPlan | SpeechPlan, again: bool = False) -> Kernels:
        """See `compile.begin_compiling`."""
        with self.levers.bound():
            return begin_compiling(plan, collect, again=again)

    def stores(self, plan: TextPlan | SpeechPlan) -> list[Store]:
        """Stores to which each GPU's weights are loaded."""
        return [self._store_on(i, has_experts=not plan.n_expert_slots) for i in range(self.n_gpus)]

    def _store_on(self, i_gpu: int, has_experts: bool = True) -> Store:
        return DeviceStore("cpu" if INTERPRETED else self.devices[i_gpu], has_experts)

    def text_weights(self, model: TextModel, plan: TextPlan, progress: Progress) -> tuple[PartWeights, list[str]]:
        """Weights of each part by GPU, and notices."""
        if not plan.cuts:
            weights, notices = model.load(self.stores(plan)[0], progress)
            return [[weights]], notices
        notices = [*self._notices]

        def of_shard(store: Store, cuts: Cuts, i: int) -> Weights:
            weights, told = model.load(store, partial(part_of_progress, progress, i, self.n_cuts), cuts)
            if i == 0:
                notices.extend(told)
            return weights

        return self.parts(plan.cuts, of_shard, has_experts=not plan.n_expert_slots), notices

    def speech_weights(
        self, model: SpeechModel, plan: SpeechPlan, progress: Progress
    ) -> tuple[SpeechWeights, list[str]]:
        return model.load(self.stores(plan)[0], progress)

    def parts(
        self, cuts: Sequence[Cuts], load: Callable[[Store, Cuts, int], Weights], has_experts: bool = True
    ) -> list[list[Weights]]:
        """Loads the weights of each part, by GPU. Parts of a GPU have one embedding. load: loads a part,
        which has this number. has_experts: False where routed experts are in the host's memory.
        """
        found: list[list[Weights]] = [[] for _ in self.devices]
        for i, part in enumerate(cuts):
            i_gpu = i * self.n_gpus // self.n_cuts
            found[i_gpu].append(load(self._store_on(i_gpu, has_experts), part, i))
            found[i_gpu][-1].embed = found[i_gpu][0].embed
        return found

    def text_runner(
        self,
        plan: TextPlan,
        weights: PartWeights,
        vision: Vision | None,
        progress: Progress,
        drafters: Sequence[DrafterWeights] = (),
    ) -> GpuTextRunner | ParallelRunner:
        """Makes a runner. vision, drafters: of a model that has them. Raises KernelError."""
        with _named_kernels(), self.levers.bound():
            return text_runner(plan, self.devices, weights, progress, vision, drafters)

    def speech_runner(
        self, plan: SpeechPlan, weights: SpeechWeights, vocoder: dict[str, Array], progress: Progress
    ) -> GpuSpeechRunner:
        """Makes a runner. Raises KernelError."""
        with _named_kernels(), self.levers.bound():
            return GpuSpeechRunner(plan, weights, vocoder, progress)

    def kernels(self, info: EngineInfo) -> str:
        """Describes the kernels for a fingerprint, beside their sources."""
        cuts = f"in {self.n_cuts} parts " if self.n_cuts > self.n_gpus else ""
        return f"{cuts}{info.device} torch {torch.__version__} triton {triton.__version__} {self.levers}"


@contextmanager
def _named_kernels() -> Iterator[None]:
    """Raises KernelError in the place of Triton's own error."""
    try:
        yield
    except TritonError as error:
        raise KernelError(f"a kernel cannot run on this GPU ({error}); give --device cpu") from error
