"""The memory plan of a speech model on a GPU: weights, tables of texts, the buffers of decode and prefill, pages, the vocoder's streams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.machine import free_memory_bytes
from deltic.models.qwen.gpu import PlaceState
from deltic.models.tts.gpu import (
    FrameBuffers,
    PromptBuffers,
    check_speech_gpu,
    frame_buffers,
    prompt_buffers,
)
from deltic.models.tts.shape import SpeechShape
from deltic.models.tts.weights import speech_weight_bytes
from deltic.models.vocoder.gpu import check_vocoder_gpu, state_words
from deltic.ops.geometry import N_CODES, PAGE_SIZE, Allocate
from deltic.ops.gpu.frames import FrameParameters
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.sample import PlaceParameters, SampleScratch, sample_scratch
from deltic.runtime.cpu.speech_plan import DEFAULT_MODEL_LEN, SpeechPlan, _refuse_foreign
from deltic.runtime.gpu.plan import FREE_SHARE, MAX_SEGMENTS, MAX_SEQS, RESERVE_BYTES, place_table
from deltic.runtime.gpu.vocoder import vocoder_bytes

DEFAULT_SEQS = 64
DEFAULT_STEP_TOKENS = 2048
DEFAULT_PAGES_BYTES = 8_000_000_000
"""A speech model's cache is small: 112 KiB a frame."""


@dataclass(frozen=True)
class GpuSpeechWorkspace:
    """Every buffer of a step but pages and slots. table to parameters: as in GpuWorkspace."""

    table: Tensor
    offsets: dict[str, tuple[int, int]]
    places: PlaceState
    parameters: PlaceParameters
    frames: FrameParameters
    rows_place: Tensor
    decode: FrameBuffers
    prefill: PromptBuffers
    sample: SampleScratch
    out: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]
    """Of a decode and of a prefill: tokens int32 [P]; the rest is written where log-probabilities are asked for: never."""


def gpu_speech_workspace(plan: SpeechPlan, levers: Levers, allocate: Allocate) -> GpuSpeechWorkspace:
    """Allocates the buffers of a step; used to count them as well as to have them."""
    n, shape, n_blocks = plan.max_num_seqs, plan.shape, plan.max_step_tokens // PAGE_SIZE
    i32, f32 = torch.int32, torch.float32
    more = {"code_seed": 2, "code_temperature": 1, "code_top_p": 1, "code_top_k": 1, "n_trailing": 1}
    table, offsets, views = place_table(
        n, plan.max_model_len, allocate, {**more, "trailing": plan.max_model_len}
    )
    frames = FrameParameters(
        temperature=views["code_temperature"].view(f32), top_p=views["code_top_p"].view(f32), top_k=views["code_top_k"],
        seed=views["code_seed"].view(torch.int64), n_prompt=views["n_prompt"], n_trailing=views["n_trailing"],
        trailing=views["trailing"],
    )  # fmt: skip
    parameters = {name: views[name] for name in PlaceParameters.__dataclass_fields__ if name in views}
    return GpuSpeechWorkspace(
        table=table, offsets=offsets,
        places=PlaceState(**{name: views[name] for name in PlaceState.__dataclass_fields__}),
        parameters=PlaceParameters(**parameters, masks=allocate("masks", (n, -(-shape.n_drawn // 32)), i32)),
        frames=frames, rows_place=views["rows_place"],
        decode=frame_buffers(shape, levers, n, plan.max_model_len, allocate),
        prefill=prompt_buffers(shape, n_blocks, min(n_blocks, MAX_SEGMENTS), allocate),
        sample=sample_scratch(n, shape.n_drawn, allocate),
        out={
            kind: (
                allocate(f"{kind} tokens", (n,), i32), allocate(f"{kind} log-probabilities", (n,), f32),
                allocate(f"{kind} top ids", (n, 1), i32), allocate(f"{kind} top", (n, 1), f32),
            )
            for kind in ("decode", "prefill")
        },
    )  # fmt: skip


def make_gpu_speech_plan(
    config: EngineConfig, shape: SpeechShape, free_bytes: int, levers: Levers
) -> SpeechPlan:
    """Sizes for this model in free_bytes of device memory. Raises ConfigError for what does not fit, or means nothing here;
    UnsupportedModelError for a geometry that the kernels cannot run."""
    check_speech_gpu(shape)
    check_vocoder_gpu(shape.vocoder)
    _refuse_foreign(config)
    if config.quantize:
        raise ConfigError(f"--quantize {config.quantize} is for the CPU; leave it out, or give --device cpu")
    length = config.max_model_len or min(shape.max_position_embeddings, DEFAULT_MODEL_LEN)
    step_tokens = config.max_step_tokens or min(DEFAULT_STEP_TOKENS, pages_for(length) * PAGE_SIZE)
    for wrong, text in (
        (length > shape.max_position_embeddings, f"--max-model-len {length}: at most {shape.max_position_embeddings}"),
        (step_tokens % PAGE_SIZE, f"--max-step-tokens {step_tokens}: on a GPU it must be a multiple of {PAGE_SIZE}"),
        ((config.max_num_seqs or 1) > MAX_SEQS, f"--max-num-seqs {config.max_num_seqs}: a GPU step has at most {MAX_SEQS} rows"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(text)
    most = (
        int(config.memory_gb * 1e9)
        if config.memory_gb is not None
        else int(free_bytes * FREE_SHARE) - RESERVE_BYTES
    )
    page = shape.page_bytes(PAGE_SIZE)
    plan = SpeechPlan(
        shape=shape, quantize=None, weight_bytes=_weight_bytes(shape), vocoder_bytes=0, max_model_len=length,
        max_num_seqs=config.max_num_seqs or DEFAULT_SEQS, max_step_tokens=step_tokens, n_pages=0, host_bytes=0, n_threads=1,
        workspace={}, budget_bytes=most,
    )  # fmt: skip
    while True:
        plan = replace(
            plan,
            workspace=_count(plan, levers),
            vocoder_bytes=vocoder_bytes(shape.vocoder),
        )
        n_fit = (most - plan.total_bytes) // page
        if n_fit >= pages_for(length) or config.max_num_seqs is not None or plan.max_num_seqs == 1:
            break
        plan = replace(plan, max_num_seqs=plan.max_num_seqs // 2)
    n_least = pages_for(length)
    n_pages = config.n_pages or min(n_fit, max(DEFAULT_PAGES_BYTES // page, plan.max_num_seqs * n_least))
    if config.n_pages is not None and n_pages < n_least:
        raise ConfigError(f"--n-pages {n_pages} cannot hold one sequence; give at least {n_least}")
    if n_fit < max(n_pages, n_least):
        raise ConfigError(
            f"{max(0, n_fit)} pages fit into {most / 1e9:.1f} GB of device memory beside weights of "
            f"{(plan.weight_bytes + plan.vocoder_bytes) / 1e9:.1f} GB and {plan.workspace_bytes / 1e9:.1f} GB for a step and the streams, "
            f"and {max(n_pages, n_least)} are needed; give less of --n-pages, --max-num-seqs ({plan.max_num_seqs}) or --max-model-len "
            f"({length}), or --device cpu"
        )
    return replace(plan, n_pages=n_pages, host_bytes=_host_bytes(config, page, pages_for(length)))


def _weight_bytes(shape: SpeechShape) -> int:
    """In device memory: texts are projected, and the table that they come from is dropped."""
    stored = shape.text_vocab_size * shape.text_hidden_size * 2
    texts = shape.text_vocab_size * shape.talker.hidden_size * 4
    codes = N_CODES * shape.n_codebook * shape.predictor.hidden_size * 4 if shape.has_projection else 0
    return speech_weight_bytes(shape, None, "rows") - stored + texts + codes


def _count(plan: SpeechPlan, levers: Levers) -> dict[str, int]:
    """Bytes of each buffer of a step."""
    sizes: dict[str, int] = {}

    def allocate(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(size, dtype=dtype, device="meta")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
        return tensor

    gpu_speech_workspace(plan, levers, allocate)
    sizes["vocoder states"] = 4 * (plan.n_streams + 1) * state_words(plan.shape.vocoder)
    sizes["rotary tables"] = plan.max_model_len * plan.shape.talker.head_dim * 4
    return sizes


def _host_bytes(config: EngineConfig, page: int, n_seq_pages: int) -> int:
    """Host memory for preempted sequences: what is asked for, else one of full length, where that is free."""
    wanted: Any = (
        (n_seq_pages + 1) * page if config.cache_host_gb is None else int(config.cache_host_gb * 1e9)
    )
    if wanted > free_memory_bytes() // 2:
        if config.cache_host_gb is not None:
            raise ConfigError(f"--cache-host-gb {config.cache_host_gb}: at most half of what is free")
        wanted = 0
    return int(wanted) // page * page
