"""The memory plan: the allocations before the first request, and the limits that follow from them.

One plan for every model and device. Weights, workspace (buffers of a step), state slots, pages and the
host tier of the prefix cache are all there is; after ready nothing grows with load. fit.py makes it. A
`Kind` holds the differences between language and speech models, CPU and GPU. runtime/cpu/device.py and
runtime/gpu/device.py make it: this file knows no device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from deltic.config import ConfigError, EngineConfig, pinned_cpus
from deltic.engine.cache.cache import pages_for
from deltic.machine import memory_bound, n_usable_cpus
from deltic.models.dflash.shape import DrafterShape
from deltic.models.dflash.weights import drafter_bytes
from deltic.models.joint_head import HeadShape
from deltic.models.loading import COUNTED, Store
from deltic.models.qwen.adapters import Adapter
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.shard import Cuts
from deltic.models.tts.shape import SpeechShape
from deltic.models.vision.shape import VisionShape
from deltic.models.vision.weights import empty_vision
from deltic.ops.geometry import PAGE_SIZE, TOKEN_BYTES, Allocate
from deltic.runtime.adapters import NO_ADAPTERS, AdapterRoom
from deltic.runtime.model import Model, S

CACHE_SHARE = 4
"""Default share for checkpoints, one part in this many: of the pools beside running sequences, and of the
host tier.
"""
DECODERS_BYTES = 2 * (3 << 30)
"""Bytes that the server's decoders of pictures and videos may take: `N_DECODING` processes of
`DECODE_MEMORY` bytes of address space (server/chat/picture_parts.py, pictures.py). The largest pictures take
0.4 to 1.2 GB each.
"""
LARGEST_BUFFER = 1 << 36
"""Bytes. Only a setting that is out of all proportion asks for more, and lists as long as its buffers take
memory.
"""
TOO_MUCH = 1 << 60
"""Size in bytes reported for a workspace that does not even fit the address space."""


def counted(build: Callable[[Allocate], object], nothing: Callable[..., Any]) -> dict[str, int]:
    """Bytes by name of what `build` allocates. nothing: makes an array of a size and a dtype that takes no
    memory. Raises MemoryError beyond LARGEST_BUFFER.
    """
    sizes: dict[str, int] = {}

    def allocate(name: str, size: tuple[int, ...], dtype: Any) -> Any:
        array = nothing(size, dtype=dtype)
        if array.nbytes > LARGEST_BUFFER:
            raise MemoryError(name)
        sizes[name] = sizes.get(name, 0) + array.nbytes
        return array

    build(allocate)
    return sizes


@dataclass(frozen=True)
class Plan(Generic[S]):
    """Sizes of everything, in bytes and in counts."""

    shape: S
    """Shape of the model, or of the largest part of one that is cut."""
    quantize: str | None
    """Format that matrices stored in 16 bits become."""
    weight_bytes: int
    vocoder_bytes: int
    """Weights of a speech model's vocoder, on a GPU its activations, too; 0 for other models."""
    tower: VisionShape | None
    """Vision tower of a language model that takes pictures."""
    tower_bytes: int
    """Bytes of the tower's weights."""
    drafter: DrafterShape | None
    """Block drafter of a language model, whose keys and values are in its pages."""
    drafter_bytes: int
    """Bytes of the drafter's weights."""
    max_picture_tokens: int
    """Tokens of one picture, at most. 0: prompts have no pictures."""
    n_real: int
    """Ids that can be drawn."""
    max_model_len: int
    max_num_seqs: int
    n_checkpoints: int
    """State slots beside those of the sequences that run; a speech model has none."""
    max_step_tokens: int
    n_pages: int
    host_bytes: int
    """Host memory for pages and states that leave the pools: whole pages."""
    page_bytes: int
    state_bytes: int
    """Bytes of one state slot."""
    n_threads: int
    budget_bytes: int
    """The most bytes that everything together may take; on a GPU without the host tier."""
    workspace: dict[str, int]
    """Bytes of each buffer of a step, and of a vocoder's streams."""
    max_drafts: int = 0
    """Tokens of a draft, at most."""
    adapters: AdapterRoom = NO_ADAPTERS
    """Room for adapters. Its memory is part of the workspace."""
    table_bytes: int = 0
    """Bytes of the embedding, where a GPU reads its rows from the host's memory."""
    ngram_bytes: int = 0
    """Bytes of the table of n-grams in the host's memory, where all GPUs read it."""
    cpus: tuple[int, ...] = ()
    """The CPU of each thread; none: wherever the system puts them."""
    cuts: tuple[Cuts, ...] = ()
    """The parts of a model that is cut: each of several GPUs has one, or a run of them."""
    joint_head: HeadShape | None = None
    """The joint head of a decision model on a CPU. On a GPU it is in the host's memory, as what it reads."""
    n_gpus: int = 1
    """Sizes are those of one of them, but for the host's. 1 on a CPU, too."""
    n_expert_slots: int = 0
    """Slots that each layer has on a GPU for routed experts, all of which are in the host's memory. 0: they
    are with the other weights, or on a CPU.
    """
    outside_bytes: int = 0
    """Bytes of routed experts that are not counted among the weights: of all GPUs all of them, in the host's
    memory; on a CPU those for which the disk is read.
    """

    @property
    def n_shards(self) -> int:
        """Shards of the model on a GPU."""
        return max(1, len(self.cuts) // self.n_gpus)

    def cuts_of(self, i: int) -> tuple[Cuts, ...]:
        """The parts that a GPU has, of a model that is cut."""
        return self.cuts[i * self.n_shards : (i + 1) * self.n_shards]

    def of_gpu(self: TextPlan, i: int) -> TextPlan:
        """The same for one of several GPUs, with the shape of what it runs: several parts differ in rows of
        the head alone.
        """
        shapes = [cuts.shape for cuts in self.cuts_of(i)]
        return replace(self, shape=replace(shapes[0], head_rows=max(shape.head_rows for shape in shapes)))

    @property
    def speaks(self) -> bool:
        return isinstance(self.shape, SpeechShape)

    @property
    def workspace_bytes(self) -> int:
        return sum(self.workspace.values())

    @property
    def n_batch_tokens(self) -> int:
        """Longest batch of a language model on a CPU: decodes may fill the budget and a prefill still gets
        one page's worth.
        """
        return max(self.max_step_tokens, self.max_num_seqs + PAGE_SIZE)

    @property
    def n_sequence_rows(self) -> int:
        """Rows of one sequence in a decode, at most: its last token, and a draft."""
        return 1 + self.max_drafts

    @property
    def n_draft_rows(self) -> int:
        """Rows of drafts in a decode, at most. 0: there are no drafts."""
        return min(PAGE_SIZE, self.max_num_seqs * self.max_drafts)

    @property
    def n_decode_rows(self) -> int:
        """Rows of a decode on a GPU, at most: one of each sequence, and those of drafts."""
        return self.max_num_seqs + self.n_draft_rows

    @property
    def step_sizes(self) -> tuple[object, ...]:
        """Everything that decides which kernels the steps start."""
        sizes = self.shape, self.quantize, self.n_real, self.max_model_len, self.max_num_seqs, self.max_step_tokens
        drafts, pictures = (self.max_drafts, self.drafter), (self.tower, self.max_picture_tokens)
        parts = self.n_gpus, self.n_shards, self.adapters, self.n_expert_slots
        return *sizes, *drafts, *pictures, *parts

    @property
    def n_rows(self) -> int:
        """Longest step of a speech model on a CPU: decodes, and beside them prefill."""
        return self.max_num_seqs + max(self.max_step_tokens, PAGE_SIZE)

    @property
    def n_streams(self) -> int:
        """Streams of a vocoder: a sequence may have ended before its audio is out."""
        return 2 * self.max_num_seqs

    @property
    def n_vocoder_slots(self) -> int:
        """Slots of the streams, and the one behind them in which voices are primed."""
        return self.n_streams + 1

    @property
    def n_made_angles(self) -> int:
        """Rows of angles that a step on a CPU makes for tokens of pictures, and for those before a chunk that
        are in one group of an index with its first: its own, and those of the draft head's rows behind it.
        """
        index = getattr(self.shape, "index", None)  # a speech model has no such field
        before = 0 if index is None else self.max_num_seqs * (index.ratio - 1)
        return 2 * (self.n_batch_tokens + before) if self.max_picture_tokens else 0

    @property
    def n_picture_pages(self) -> int:
        """Pages of the tokens of the largest picture."""
        return pages_for(self.max_picture_tokens)

    @property
    def n_picture_blocks(self) -> int:
        """Blocks of PAGE_SIZE rows that hold what the tower made of pictures: of four of the largest, or of
        as many small ones as begin in a page and two of the largest.
        """
        return 4 * self.n_picture_pages + PAGE_SIZE if self.tower else 0

    @property
    def pixel_bytes(self) -> int:
        """Host memory for the pixels of all requests that are open, which their pictures need again where a
        sequence starts over: as many as four prompts, or one in eight of the sequences, could have.
        """
        longest = max(self.max_model_len, self.max_picture_tokens)
        return max(4, self.max_num_seqs // 8) * longest * TOKEN_BYTES if self.tower else 0

    @property
    def decoders_bytes(self) -> int:
        """Host memory beside the plan for what decodes pictures."""
        return DECODERS_BYTES if self.tower else 0

    @property
    def max_logit_rows(self) -> int:
        return self.max_num_seqs + PAGE_SIZE

    @property
    def pages_bytes(self) -> int:
        return self.n_pages * page_cost(self)

    @property
    def n_slots(self) -> int:
        return self.max_num_seqs + self.n_checkpoints

    @property
    def slots_bytes(self) -> int:
        return self.n_slots * self.state_bytes

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a page on the host: of all GPUs together."""
        return self.n_gpus * self.page_bytes

    @property
    def n_host_units(self) -> int:
        return self.host_bytes // self.host_page_bytes

    @property
    def total_bytes(self) -> int:
        fixed = self.weight_bytes + self.vocoder_bytes + self.tower_bytes + self.workspace_bytes
        return fixed + self.drafter_bytes + self.slots_bytes + self.pages_bytes + self.host_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes left for pages, once everything else is placed."""
        return self.budget_bytes - (self.total_bytes - self.pages_bytes)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the pages of one sequence of full length: the least that is of use."""
        return pages_for(self.max_model_len) * page_cost(self)

    @property
    def spare_bytes(self) -> int:
        """Bytes left beside the required pages: those that were asked for, else one sequence's.

        Negative when even these do not fit.
        """
        return self.left_bytes - (self.pages_bytes or self.sequence_bytes)

    @property
    def host_sequence_bytes(self) -> int:
        """Host memory that one sequence of full length and its state take: the tier's default."""
        state_bytes = self.n_gpus * self.state_bytes
        return self.n_gpus * self.sequence_bytes + self.whole_pages(state_bytes + self.host_page_bytes - 1)

    def whole_pages(self, n_bytes: float) -> int:
        """Bytes of as many pages as n_bytes of the host hold."""
        return int(n_bytes) // self.host_page_bytes * self.host_page_bytes


def page_cost(plan: Plan[S]) -> int:
    """Bytes of a page, and of the hidden states of its tokens, if a joint head may read them."""
    return plan.page_bytes + (2 * PAGE_SIZE * plan.joint_head.hidden_size if plan.joint_head else 0)


def shared_sizes(plan: Plan[S]) -> dict[str, int]:
    """Sizes that machines of one model have in common, by the names of their settings."""
    names = ("max_model_len", "max_num_seqs", "max_step_tokens", "n_pages", "n_checkpoints")
    return {name: getattr(plan, name) for name in names}


TextPlan = Plan[ModelShape]
SpeechPlan = Plan[SpeechShape]


CACHED_BYTES = 64 << 20
"""Weights of up to this many stay in a processor's caches. There a row costs nearly as much as a step, and
drafts, which save reading weights, save nothing.
"""


class Kind(ABC, Generic[S]):
    """A kind of model on a kind of device, as the planner needs to know it."""

    device: str
    """Device, as --device says it: cpu or cuda."""
    counted: Store = COUNTED
    """Store that counts the bytes of weights as the device stores them."""
    model_len: int
    """The default of --max-model-len, where the model has so many positions."""
    num_seqs: int
    """The default of --max-num-seqs."""
    shrink: tuple[tuple[str, int], ...]
    """Settings that are halved where the defaults do not fit, and the least that each may become.

    The first that can be, first.
    """
    max_checkpoints: int = 0
    """Checkpoints by default, at most. 0: this kind keeps none."""
    max_num_seqs: float = math.inf
    step_multiple: int = 1
    """Divisor that --max-step-tokens must have."""
    free_share: float = 0.8
    """The part of the free memory that is used where --memory-gb does not say, less reserve_bytes."""
    reserve_bytes: int = 0
    """Bytes of memory that are used outside the plan."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @abstractmethod
    def check(self, shape: S) -> None:
        """Raises UnsupportedModelError for a geometry that the device's kernels cannot run."""

    @abstractmethod
    def weight_bytes(self, shape: S, quantize: str | None) -> int:
        """Bytes of the weights. quantize: what matrices that are stored in 16 bits become."""

    def state_bytes(self, shape: S) -> int:
        """Bytes of a state slot."""
        return shape.state_bytes

    @abstractmethod
    def measure(self, plan: Plan[S]) -> dict[str, int]:
        """Bytes of every buffer of a step by its name.

        Raises MemoryError where there are not even addresses for them.
        """

    @abstractmethod
    def useful_pages(self, plan: Plan[S], config: EngineConfig) -> int:
        """The most pages to take where --n-pages is not given."""

    def step_tokens(self, model_len: int) -> int:
        """The default of --max-step-tokens."""
        return 512

    def all_inside(self, model: Model[S]) -> str:
        """Reason why all weights must be in the device's memory. "": routed experts may be outside."""
        return "the model has no routed experts"

    def hold_experts(self, plan: Plan[S], n_bytes: int) -> Plan[S]:
        """The plan with so many bytes of routed experts in the device's memory, one of each layer at the
        least, and the others outside. Its workspace is not counted yet.
        """
        return plan

    def vocoder_bytes(self, shape: S) -> int:
        """Bytes of a vocoder's weights, on a GPU its activations, too."""
        return 0

    def embedding_bytes(self, shape: S, quantize: str | None) -> int:
        """Bytes that several parts of a model on one device have once."""
        return 0

    def table_bytes(self, plan: Plan[S]) -> int:
        """Bytes of a table of the weights that may lie in the host's memory: a step reads rows of it."""
        return 0

    def ngram_bytes(self, model: Model[S]) -> int:
        """Bytes of the host's memory for a table of n-grams that the device reads there."""
        return 0

    def picture_tokens(self, config: EngineConfig) -> int:
        """Tokens of a picture, at most. 0: prompts have none."""
        return 0

    def budget(self, plan: Plan[S], config: EngineConfig) -> Plan[S]:
        """The plan with its budget and host tier decided, before the pools are divided: all that may be
        used, and of the host what is asked for.
        """
        return plan

    def host_bytes(self, plan: Plan[S], config: EngineConfig, free_bytes: int) -> int:
        """Bytes of the host tier, once the pools are divided: what one sequence of full length takes, where
        that is left and nothing else was asked for. free_bytes: of the host's memory.
        """
        is_left = config.cache_host_gb is None and plan.spare_bytes >= plan.host_sequence_bytes
        return plan.host_sequence_bytes if is_left else plan.host_bytes


class TextKind(Kind[ModelShape]):
    """Language models on a kind of device."""

    drafts: int = 8
    """The default of --max-drafts, but for models up to CACHED_BYTES."""
    largest_picture: int
    """The default of --max-picture-tokens."""

    @abstractmethod
    def check_tower(self, tower: VisionShape) -> None:
        """Raises UnsupportedModelError for a vision tower that the device's kernels cannot run."""

    def check_drafter(self, shape: DrafterShape) -> None:
        """Raises UnsupportedModelError for a block drafter that the device's kernels cannot run."""

    @abstractmethod
    def adapter_bytes(self, adapter: Adapter, cuts: Sequence[Cuts] = ()) -> int:
        """Bytes of a LoRA adapter; cuts: the most that any part of a model takes."""

    def max_drafts(self, config: EngineConfig, shape: ModelShape) -> int:
        """Tokens of a draft, at most. 0: none are made."""
        if config.max_drafts is not None:
            return config.max_drafts
        return self.drafts if self.weight_bytes(shape, config.rounded) > CACHED_BYTES else 0

    def picture_tokens(self, config: EngineConfig) -> int:
        return self.largest_picture if config.max_picture_tokens is None else config.max_picture_tokens

    def meeting_bytes(self, plan: TextPlan) -> int:
        """Bytes of the host's memory in which several GPUs meet."""
        return 0


class SpeechKind(Kind[SpeechShape]):
    """Speech models on a kind of device."""


def brought(plan: TextPlan, n_seqs: int) -> float:
    """Bytes of experts that a decode of n_seqs sequences brings from outside, by even routing: to each GPU of
    those in no slot, on a CPU as many of those that it uses as of all.
    """
    used = 1 - (1 - plan.shape.n_experts_per_tok / plan.shape.n_experts) ** n_seqs
    return plan.outside_bytes / plan.n_gpus * used * (1 - plan.n_expert_slots / plan.shape.n_experts)


def asked_plan(model: Model[S], kind: Kind[S], free_bytes: int) -> Plan[S]:
    """The plan of the settings and defaults, with its workspace.

    Raises ConfigError for a fault that no memory would mend.
    """
    config, shape = model.config, model.shape
    longest = shape.max_position_embeddings
    length = config.max_model_len or min(longest, kind.model_len)
    if config.n_pages is not None and config.max_model_len is None:
        length = min(length, config.n_pages * PAGE_SIZE)
    if length > longest:
        raise ConfigError(
            f"--max-model-len {length}: the model was made for {longest} positions; give at most {longest}"
        )
    if config.n_pages is not None and config.n_pages < pages_for(length):
        raise ConfigError(
            f"--n-pages {config.n_pages} cannot hold one sequence; give at least {pages_for(length)}, or less --max-model-len"
        )
    step_tokens = config.max_step_tokens or kind.step_tokens(length)
    if step_tokens % kind.step_multiple:
        raise ConfigError(f"--max-step-tokens {step_tokens}: on a GPU it must be a multiple of {kind.step_multiple}")
    if (config.max_num_seqs or 1) > kind.max_num_seqs:
        most = kind.max_num_seqs
        raise ConfigError(
            f"--max-num-seqs {config.max_num_seqs}: a GPU runs {most} at once at most; give {most} or less"
        )
    n_threads = 1 if kind.on_gpu else config.threads or n_usable_cpus()
    tower = model.tower if kind.picture_tokens(config) else None
    drafter = None if model.drafter is None else model.drafter.shape
    n_shards, weight_bytes = max(1, len(model.cuts) // model.n_gpus), kind.weight_bytes(shape, config.rounded)
    if n_shards > 1:
        weight_bytes += (n_shards - 1) * (weight_bytes - kind.embedding_bytes(shape, config.rounded))
    plan = Plan(
        shape=shape,
        quantize=config.rounded,
        weight_bytes=weight_bytes,
        vocoder_bytes=kind.vocoder_bytes(shape),
        tower=tower,
        tower_bytes=0 if tower is None else empty_vision(tower, kind.counted).n_bytes,
        drafter=drafter,
        drafter_bytes=0 if drafter is None else drafter_bytes(drafter, config.rounded, kind.counted),
        max_picture_tokens=kind.picture_tokens(config) if tower is not None or model.is_behind_tower else 0,
        n_real=model.n_real,
        max_model_len=length,
        max_num_seqs=config.max_num_seqs or kind.num_seqs,
        n_checkpoints=(config.n_checkpoints or 0) if config.prefix_cache else 0,
        max_step_tokens=step_tokens,
        n_pages=config.n_pages or 0,
        host_bytes=0,
        page_bytes=n_shards * shape.page_bytes(PAGE_SIZE) + (0 if drafter is None else drafter.page_bytes),
        state_bytes=n_shards * kind.state_bytes(shape),
        n_threads=n_threads,
        budget_bytes=_budget(config, kind, free_bytes),
        workspace={},
        max_drafts=config.max_drafts or 0,
        cpus=pinned_cpus(n_threads) if config.pin_threads else (),
        cuts=model.cuts,
        n_gpus=model.n_gpus,
        adapters=model.adapters,
        ngram_bytes=kind.ngram_bytes(model),
    )
    if not kind.on_gpu:
        host_bytes = plan.whole_pages((config.cache_host_gb or 0.0) * 1e9)
        plan = replace(plan, host_bytes=host_bytes, joint_head=model.joint_head)
    return sized(plan, kind)


def _budget(config: EngineConfig, kind: Kind[S], free_bytes: int) -> int:
    """Bytes that may be used. Raises ConfigError for more than are free."""
    if config.memory_gb is None:
        return int(free_bytes * kind.free_share) - kind.reserve_bytes
    wanted, most = int(config.memory_gb * 1e9), free_bytes - kind.reserve_bytes // 2
    if wanted > most:
        where = " of the device" if kind.on_gpu else ""
        beside = f", and it needs {kind.reserve_bytes / 2e9:.1f} GB beside" if kind.reserve_bytes else ""
        raise ConfigError(
            f"--memory-gb {config.memory_gb}: only {free_bytes / 1e9:.1f} GB{where} are free"
            f"{'' if kind.on_gpu else memory_bound()}{beside}; give at most {max(0, most) // 10**8 / 10}"
        )
    return wanted


def sized(plan: Plan[S], kind: Kind[S], **changes: int) -> Plan[S]:
    """The plan with changes and the workspace they need."""
    plan = replace(plan, **changes)  # type: ignore[arg-type]
    try:
        return replace(plan, workspace=kind.measure(plan))
    except MemoryError:
        return replace(plan, workspace={"more than this machine has addresses for": TOO_MUCH})


def as_flag(field: str, value: int, config: EngineConfig) -> str:
    """A field of a plan and its value, as the command line has it."""
    return (
        f"--cache-host-gb {config.cache_host_gb}" if field == "host_bytes" else f"--{field.replace('_', '-')} {value}"
    )
