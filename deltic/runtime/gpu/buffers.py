"""Every buffer of a step on a GPU: the same calls count it for the plan and allocate it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from deltic.engine.messages import MAX_LOGPROBS
from deltic.models.qwen.gpu import DecodeBuffers, PlaceState, PrefillBuffers, decode_buffers, prefill_buffers
from deltic.models.tts.gpu import FrameBuffers, PromptBuffers, frame_buffers, prompt_buffers
from deltic.ops.geometry import PAGE_SIZE, Allocate
from deltic.ops.gpu.frames import FrameParameters
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.sample import PlaceParameters, SampleScratch, sample_scratch
from deltic.runtime.gpu.places import place_table
from deltic.runtime.plan import SpeechPlan, TextPlan

MAX_SEGMENTS = 32
"""Prompts of one prefill."""

ByPlace = TypeVar("ByPlace", PlaceState, PlaceParameters)


@dataclass(frozen=True)
class GpuWorkspace:
    """Every buffer of a step but the two memories."""

    table: Tensor
    """int32, flat: everything by place, so that the host changes it with one list of (offset, value)."""
    offsets: dict[str, tuple[int, int]]
    """Where the rows of each part of the table begin, and the words of one row."""
    places: PlaceState
    parameters: PlaceParameters
    decode: DecodeBuffers
    prefill: PrefillBuffers
    sample: SampleScratch
    out: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]
    """Of a decode and of a prefill: tokens int32 [P], log-probabilities float32 [P], ids and
    log-probabilities of the likeliest [P, MAX_LOGPROBS].
    """


def _of(kind: type[ByPlace], views: dict[str, Tensor], **others: Tensor) -> ByPlace:
    """Tensors by place: parts of the table, each by the name it has there, and others."""
    return kind(**{name: views[name] for name in kind.__dataclass_fields__ if name in views}, **others)


def gpu_workspace(plan: TextPlan, levers: Levers, allocate: Allocate) -> GpuWorkspace:
    """Allocates the buffers of a step; used to count them as well as to have them."""
    n, i32, f32 = plan.max_num_seqs, torch.int32, torch.float32
    shape, n_blocks = plan.shape, plan.max_step_tokens // PAGE_SIZE
    table, offsets, views = place_table(n, plan.max_model_len, allocate)
    decode = decode_buffers(shape, levers, n, plan.max_model_len, allocate)
    return GpuWorkspace(
        table=table,
        offsets=offsets,
        places=_of(PlaceState, views),
        parameters=_of(PlaceParameters, views, masks=allocate("masks", (n, -(-plan.n_real // 32)), i32)),
        decode=replace(decode, rows_place=views["rows_place"]),
        prefill=prefill_buffers(shape, n_blocks, min(n_blocks, MAX_SEGMENTS), allocate),
        sample=sample_scratch(n, shape.vocab_size, allocate),
        out={
            kind: (
                allocate(f"{kind} tokens", (n,), i32),
                allocate(f"{kind} log-probabilities", (n,), f32),
                allocate(f"{kind} top ids", (n, MAX_LOGPROBS), i32),
                allocate(f"{kind} top", (n, MAX_LOGPROBS), f32),
            )
            for kind in ("decode", "prefill")
        },
    )


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
    """Of a decode and of a prefill: tokens int32 [P].

    The rest is written where log-probabilities are asked for: never.
    """


def gpu_speech_workspace(plan: SpeechPlan, levers: Levers, allocate: Allocate) -> GpuSpeechWorkspace:
    """Allocates the buffers of a step; used to count them as well as to have them."""
    n, shape, n_blocks = plan.max_num_seqs, plan.shape, plan.max_step_tokens // PAGE_SIZE
    i32, f32 = torch.int32, torch.float32
    more = {"code_seed": 2, "code_temperature": 1, "code_top_p": 1, "code_top_k": 1, "n_trailing": 1}
    table, offsets, views = place_table(n, plan.max_model_len, allocate, {**more, "trailing": plan.max_model_len})
    frames = FrameParameters(
        temperature=views["code_temperature"].view(f32),
        top_p=views["code_top_p"].view(f32),
        top_k=views["code_top_k"],
        seed=views["code_seed"].view(torch.int64),
        n_prompt=views["n_prompt"],
        n_trailing=views["n_trailing"],
        trailing=views["trailing"],
    )
    return GpuSpeechWorkspace(
        table=table,
        offsets=offsets,
        places=_of(PlaceState, views),
        parameters=_of(PlaceParameters, views, masks=allocate("masks", (n, -(-shape.n_drawn // 32)), i32)),
        frames=frames,
        rows_place=views["rows_place"],
        decode=frame_buffers(shape, levers, n, plan.max_model_len, allocate),
        prefill=prompt_buffers(shape, n_blocks, min(n_blocks, MAX_SEGMENTS), allocate),
        sample=sample_scratch(n, shape.n_drawn, allocate),
        out={
            kind: (
                allocate(f"{kind} tokens", (n,), i32),
                allocate(f"{kind} log-probabilities", (n,), f32),
                allocate(f"{kind} top ids", (n, 1), i32),
                allocate(f"{kind} top", (n, 1), f32),
            )
            for kind in ("decode", "prefill")
        },
    )
