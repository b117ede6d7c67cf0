"""Every buffer of a step on the CPU: the same calls count it for the plan and allocate it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from deltic.engine.cache.cache import pages_for
from deltic.models.qwen.cpu_buffers import Activations, AdapterBuffers, allocate_activations, allocate_adapters
from deltic.models.tts.cpu import SpeechActivations, allocate_speech
from deltic.models.vision.cpu import TOKEN, VisionBuffers, allocate_vision
from deltic.ops.arrays import Array, bfloat16, zeros
from deltic.ops.geometry import PAGE_SIZE, Allocate
from deltic.runtime.cpu.batch import Batch
from deltic.runtime.cpu.block_drafter import BlockDrafter
from deltic.runtime.cpu.draft_head import DraftHead
from deltic.runtime.cpu.sampler import DrawnIds, Sampler
from deltic.runtime.cpu.speech_batch import SpeechBatch
from deltic.runtime.plan import SpeechPlan, TextPlan

PIECE_ROWS = 512
"""Patches of the longest piece of a picture."""

_PAGE = 4096
"""The smallest page of any system."""


class Arena:
    """Hands out zeroed arrays and counts them.

    Memory is taken from the system when `touch` is called.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        """Bytes by the name of what they are for."""
        self._arrays: list[Array] = []

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes.values())

    def allocate(self, name: str, size: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Raises MemoryError when there is not even address space for it."""
        array = zeros(size, dtype)
        self.sizes[name] = array.nbytes
        self._arrays.append(array)
        return array

    def touch(self, progress: Callable[[float], None] | None = None) -> None:
        """Writes to every page, so that the system has given all of it before the first request."""
        done = 0
        for array in self._arrays:
            flat = array.reshape(-1).view(np.uint8)
            flat[::_PAGE] = flat[-1:] = 0
            done += array.nbytes
            if progress:
                progress(done / max(1, self.n_bytes))


@dataclass(frozen=True)
class Workspace:
    """Every buffer of a language model's step but the two memories."""

    batch: Batch
    sampler: Sampler
    activations: Activations
    draft_head: DraftHead | None
    block_drafter: BlockDrafter | None
    vision: VisionBuffers | None
    picture_rows: Array | None
    """bfloat16 [blocks * PAGE_SIZE, H]: what the vision tower made of pictures, in blocks."""
    window_columns: Array
    window_gates: Array
    """Windows of Memory, columns and gates: only drafts need them, and only of sequences that run, so they
    are counted here.
    """
    window_ngrams: Array | None
    """The same of the n-grams' convolution."""
    adapters: AdapterBuffers | None
    adapter_memory: Array | None
    """uint8."""


def build_workspace(plan: TextPlan, allocate: Allocate) -> Workspace:
    """The step's buffers; used to count them as well as to have them."""
    shape, n_tokens, n_seqs, n_rows = plan.shape, plan.n_batch_tokens, plan.max_num_seqs, plan.max_logit_rows
    n_drafts = PAGE_SIZE if plan.n_draft_rows else 0
    n_windows = n_seqs if n_drafts else 1
    windows = n_windows, shape.n_gdn_layers, plan.n_sequence_rows
    vision = rows = None
    if plan.tower is not None:
        n_patches = plan.max_picture_tokens * TOKEN
        vision = allocate_vision(plan.tower, n_patches, 1, min(n_patches, PIECE_ROWS), allocate)
        size = plan.n_picture_blocks * PAGE_SIZE, shape.hidden_size
        rows = allocate("pictures", size, bfloat16)
    adapters = adapter_memory = None
    if (room := plan.adapters).n:
        adapters = allocate_adapters(shape, n_tokens, n_rows, room.n, room.rank, allocate)
        adapter_memory = allocate("adapters", (room.n_bytes,), np.uint8)
    drawn = DrawnIds(shape.vocab_size, plan.n_real, shape.eos_token_ids)
    return Workspace(
        Batch(shape, n_tokens, n_seqs, pages_for(plan.max_model_len), n_rows, allocate, adapters),
        Sampler(n_seqs, plan.max_model_len, n_rows, drawn, plan.n_threads, allocate, n_drafts=n_drafts),
        allocate_activations(shape, n_tokens, n_rows, allocate),
        DraftHead(shape, n_tokens, n_seqs, plan.n_real, allocate) if shape.has_draft_head else None,
        BlockDrafter(plan, allocate) if plan.drafter is not None else None,
        vision,
        rows,
        allocate("window columns", (*windows, shape.conv_channels), bfloat16),
        allocate("window gates", (*windows, 2 * shape.gdn_n_v_heads), np.float32),
        allocate("window n-grams", (n_windows, plan.n_sequence_rows, shape.stream_size), bfloat16)
        if shape.ngrams
        else None,
        adapters,
        adapter_memory,
    )


@dataclass(frozen=True)
class SpeechWorkspace:
    """Every buffer of a speech model's step but pages and state slots."""

    batch: SpeechBatch
    sampler: Sampler
    activations: SpeechActivations


def build_speech_workspace(plan: SpeechPlan, allocate: Allocate) -> SpeechWorkspace:
    """The step's buffers; used to count them as well as to have them."""
    shape, n = plan.shape, plan.max_num_seqs
    drawn = DrawnIds(shape.n_drawn, shape.n_drawn, (shape.end_id,))
    return SpeechWorkspace(
        SpeechBatch(shape, plan.n_rows, n, pages_for(plan.max_model_len), plan.n_threads, allocate),
        Sampler(n, plan.max_model_len, n, drawn, plan.n_threads, allocate, penalises_prompt=False),
        allocate_speech(shape, plan.n_rows, n, plan.max_model_len, allocate),
    )
