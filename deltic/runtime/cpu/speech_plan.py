"""The memory plan of a speech model: talker, predictor and vocoder, their buffers, pages and streams.

As for a language model (`plan.py`), everything is allocated before the first request, and a setting that cannot fit is refused
with the largest that would. A sequence's state is one row, so there are no checkpoints: prefixes are found at any page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deltic.config import ConfigError, EngineConfig, pinned_cpus
from deltic.engine.cache.cache import pages_for
from deltic.machine import free_memory_bytes, memory_bound, n_usable_cpus
from deltic.models.tts.cpu import SpeechActivations, allocate_speech, check_speech_kernels
from deltic.models.tts.shape import SpeechShape
from deltic.models.tts.weights import speech_weight_bytes
from deltic.models.vocoder.cpu import allocate_vocoder, check_vocoder
from deltic.models.vocoder.weights import vocoder_weight_bytes
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.cpu.plan import DEFAULT_POOL_BYTES, DEFAULT_STEP_TOKENS, FREE_SHARE, Arena
from deltic.runtime.cpu.sampler import Sampler
from deltic.runtime.cpu.speech_batch import SpeechBatch
from deltic.runtime.voices import ENCODING_BYTES, MEMORY_BYTES

DEFAULT_MODEL_LEN = 4096
"""Five minutes and more of audio."""
DEFAULT_SEQS = 8


@dataclass(frozen=True)
class SpeechPlan:
    """Sizes of everything, in bytes and in counts."""

    shape: SpeechShape
    quantize: str | None
    weight_bytes: int
    vocoder_bytes: int
    """Its weights."""
    max_model_len: int
    max_num_seqs: int
    max_step_tokens: int
    n_pages: int
    host_bytes: int
    """Host memory for preempted sequences: whole pages."""
    n_threads: int
    workspace: dict[str, int]
    """Bytes of each buffer of a step, and of the streams' states."""
    budget_bytes: int
    cpus: tuple[int, ...] = ()

    @property
    def n_rows(self) -> int:
        """Longest step: decodes, and beside them prefill."""
        return self.max_num_seqs + max(self.max_step_tokens, PAGE_SIZE)

    @property
    def n_streams(self) -> int:
        """Of the vocoder: a sequence may have ended before its audio is out."""
        return 2 * self.max_num_seqs

    @property
    def workspace_bytes(self) -> int:
        return sum(self.workspace.values())

    @property
    def page_bytes(self) -> int:
        return self.shape.page_bytes(PAGE_SIZE)

    @property
    def pages_bytes(self) -> int:
        return self.n_pages * self.page_bytes

    @property
    def slots_bytes(self) -> int:
        return self.max_num_seqs * self.shape.state_bytes

    @property
    def n_host_units(self) -> int:
        return self.host_bytes // self.page_bytes

    @property
    def total_bytes(self) -> int:
        fixed = self.weight_bytes + self.vocoder_bytes + self.workspace_bytes + self.slots_bytes
        return fixed + self.pages_bytes + self.host_bytes


@dataclass(frozen=True)
class SpeechWorkspace:
    """Every buffer of a step but pages and slots."""

    batch: SpeechBatch
    sampler: Sampler
    activations: SpeechActivations


def build_speech_workspace(plan: SpeechPlan, arena: Arena) -> SpeechWorkspace:
    """Allocates the step's buffers in `arena`; used to count them as well as to have them."""
    shape, n = plan.shape, plan.max_num_seqs
    return SpeechWorkspace(
        SpeechBatch(shape, plan.n_rows, n, pages_for(plan.max_model_len), plan.n_threads, arena.allocate),
        Sampler(
            n, plan.max_model_len, n, shape.n_drawn, shape.n_drawn, (shape.end_id,), plan.n_threads, arena.allocate,
            penalises_prompt=False,
        ),
        allocate_speech(shape, plan.n_rows, n, plan.max_model_len, arena.allocate),
    )  # fmt: skip


def make_speech_plan(config: EngineConfig, shape: SpeechShape, free_bytes: int | None = None) -> SpeechPlan:
    """Sizes for this model on this machine. free_bytes: memory that may be taken (default: what is free now).

    Raises ConfigError when the model or a setting does not fit, or a setting means nothing here; UnsupportedModelError for a
    geometry that the kernels cannot run.
    """
    check_speech_kernels(shape)
    check_vocoder(shape.vocoder)
    _refuse_foreign(config)
    free = free_memory_bytes() if free_bytes is None else free_bytes
    length = config.max_model_len or min(shape.max_position_embeddings, DEFAULT_MODEL_LEN)
    if length > shape.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {length}: the model was made for {shape.max_position_embeddings} positions; "
            f"give at most {shape.max_position_embeddings}"
        )
    most = int(config.memory_gb * 1e9) if config.memory_gb is not None else int(free * FREE_SHARE)
    if most > free:
        raise ConfigError(
            f"--memory-gb {config.memory_gb}: only {free / 1e9:.1f} GB are free{memory_bound()}; give at most that"
        )
    n_threads = config.threads or n_usable_cpus()
    page_bytes = shape.page_bytes(PAGE_SIZE)
    plan = SpeechPlan(
        shape=shape,
        quantize=config.quantize,
        weight_bytes=speech_weight_bytes(shape, config.quantize),
        vocoder_bytes=vocoder_weight_bytes(shape.vocoder),
        max_model_len=length,
        max_num_seqs=config.max_num_seqs or DEFAULT_SEQS,
        max_step_tokens=config.max_step_tokens or DEFAULT_STEP_TOKENS,
        n_pages=0,
        host_bytes=int((config.cache_host_gb or 0.0) * 1e9) // page_bytes * page_bytes,
        n_threads=n_threads,
        workspace={},
        budget_bytes=most,
        cpus=pinned_cpus(n_threads) if config.pin_threads else (),
    )
    plan = _shrunk(_sized(plan), config)
    n_seq_pages = pages_for(plan.max_model_len)
    n_fit = max(0, most - plan.total_bytes) // page_bytes
    useful = plan.max_num_seqs * n_seq_pages
    if config.memory_gb is None:  # modest unless told otherwise
        useful = min(useful, max(DEFAULT_POOL_BYTES // page_bytes, n_seq_pages * 3 // 2))
    plan = replace(plan, n_pages=config.n_pages or min(useful, n_fit))
    _refuse(plan, config, n_fit)
    if config.cache_host_gb is None and n_fit - plan.n_pages > n_seq_pages:
        plan = replace(plan, host_bytes=(n_seq_pages + 1) * page_bytes)
    return plan


def _refuse_foreign(config: EngineConfig) -> None:
    """Raises ConfigError for settings that mean nothing for a speech model."""
    if config.n_checkpoints:
        raise ConfigError(
            "--n-checkpoints: a speech model starts behind any page and keeps no checkpoints; leave it out"
        )


def _sized(plan: SpeechPlan) -> SpeechPlan:
    """The plan with the workspace it needs. Raises ConfigError."""
    arena = Arena()
    try:
        build_speech_workspace(plan, arena)
        allocate_vocoder(plan.shape.vocoder, plan.n_streams + 1, arena.allocate)
    except MemoryError:
        if plan.weight_bytes > plan.budget_bytes:
            raise ConfigError(
                f"the model does not fit: weights alone take {plan.weight_bytes / 1e9:.1f} GB, and {plan.budget_bytes / 1e9:.1f} GB "
                f"may be used{memory_bound()}; take a smaller model"
            ) from None
        raise ConfigError(
            f"--max-step-tokens {plan.max_step_tokens} with --max-num-seqs {plan.max_num_seqs} needs more workspace "
            "than this machine has memory; give less"
        ) from None
    tables = plan.max_model_len * plan.shape.talker.head_dim * 4
    voices = {"voices": MEMORY_BYTES + ENCODING_BYTES} if plan.shape.variant == "base" else {}
    return replace(plan, workspace={**arena.sizes, **voices, "rotary tables": tables})


def _shrunk(plan: SpeechPlan, config: EngineConfig) -> SpeechPlan:
    """Where the defaults do not fit: fewer sequences, then shorter ones."""

    def fits(plan: SpeechPlan) -> bool:
        return plan.total_bytes + pages_for(plan.max_model_len) * plan.page_bytes <= plan.budget_bytes

    while not fits(plan):
        if config.max_num_seqs is None and plan.max_num_seqs > 1:
            plan = _sized(replace(plan, max_num_seqs=plan.max_num_seqs // 2))
        elif config.max_model_len is None and plan.max_model_len > 4 * PAGE_SIZE:
            plan = _sized(replace(plan, max_model_len=plan.max_model_len // 2))
        else:
            break
    return plan


def _refuse(plan: SpeechPlan, config: EngineConfig, n_fit: int) -> None:
    """Raises ConfigError if the plan does not hold, saying what would."""
    have, n_seq_pages = f"{plan.budget_bytes / 1e9:.1f} GB", pages_for(plan.max_model_len)
    if plan.n_pages > n_fit:
        raise ConfigError(f"--n-pages {plan.n_pages} does not fit into {have}; at most {n_fit} do")
    if plan.n_pages >= n_seq_pages:
        return
    if config.n_pages is not None:
        raise ConfigError(
            f"--n-pages {plan.n_pages} cannot hold one sequence; give at least {n_seq_pages}, or less --max-model-len"
        )
    if n_fit >= 1 and config.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {plan.max_model_len} does not fit into {have} with --max-num-seqs {plan.max_num_seqs}; "
            f"give at most {n_fit * PAGE_SIZE}"
        )
    needed = (plan.total_bytes - plan.pages_bytes + n_seq_pages * plan.page_bytes) / FREE_SHARE
    smaller = {None: "--quantize int8, ", "int8": "--quantize int4, "}.get(plan.quantize, "")
    raise ConfigError(
        f"the model does not fit: weights {plan.weight_bytes / 1e9:.1f} GB, vocoder {plan.vocoder_bytes / 1e9:.1f} GB and "
        f"workspace {plan.workspace_bytes / 1e9:.2f} GB, and {have} may be used{memory_bound()}; take {smaller}fewer --max-num-seqs, "
        f"or a machine with at least {math.ceil(needed / 1e9)} GB free"
    )
