"""Every buffer of a step on the CPU: the same calls count it for the plan and allocate it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from deltic.engine.cache.cache import pages_for
from deltic.models.qwen.cpu import Activations, allocate_activations
from deltic.models.tts.cpu import SpeechActivations, allocate_speech
from deltic.runtime.cpu.batch import Batch
from deltic.runtime.cpu.sampler import Sampler
from deltic.runtime.cpu.speech_batch import SpeechBatch
from deltic.runtime.plan import SpeechPlan, TextPlan


class Arena:
    """Hands out zeroed CPU tensors and counts them.

    Memory is taken from the system when `touch` is called.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        """Bytes by the name of what they are for."""
        self._tensors: list[torch.Tensor] = []

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes.values())

    def allocate(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Raises MemoryError when there is not even address space for it."""
        n_bytes = math.prod(size) * torch.empty(0, dtype=dtype).element_size()
        raw = np.zeros(max(8, n_bytes), np.uint8)  # calloc: untouched pages cost nothing yet
        tensor = torch.from_numpy(raw)[:n_bytes].view(dtype).view(size)
        self.sizes[name] = n_bytes
        self._tensors.append(tensor)
        return tensor

    def touch(self, progress: Callable[[float], None] | None = None) -> None:
        """Writes every byte once, so that the system has given all of it before the first request."""
        done = 0
        for tensor in self._tensors:
            tensor.zero_()
            done += tensor.nbytes
            if progress:
                progress(done / max(1, self.n_bytes))


@dataclass(frozen=True)
class Workspace:
    """Every buffer of a language model's step but the two memories."""

    batch: Batch
    sampler: Sampler
    activations: Activations


def build_workspace(plan: TextPlan, arena: Arena) -> Workspace:
    """Allocates the step's buffers in `arena`; used to count them as well as to have them."""
    return Workspace(
        Batch(
            plan.n_batch_tokens, plan.max_num_seqs, pages_for(plan.max_model_len), plan.max_logit_rows, arena.allocate
        ),
        Sampler(
            plan.max_num_seqs,
            plan.max_model_len,
            plan.max_logit_rows,
            plan.shape.vocab_size,
            plan.n_real,
            plan.shape.eos_token_ids,
            plan.n_threads,
            arena.allocate,
        ),
        allocate_activations(plan.shape, plan.n_batch_tokens, plan.max_logit_rows, arena.allocate),
    )


@dataclass(frozen=True)
class SpeechWorkspace:
    """Every buffer of a speech model's step but pages and slots."""

    batch: SpeechBatch
    sampler: Sampler
    activations: SpeechActivations


def build_speech_workspace(plan: SpeechPlan, arena: Arena) -> SpeechWorkspace:
    """Allocates the step's buffers in `arena`; used to count them as well as to have them."""
    shape, n = plan.shape, plan.max_num_seqs
    return SpeechWorkspace(
        SpeechBatch(shape, plan.n_rows, n, pages_for(plan.max_model_len), plan.n_threads, arena.allocate),
        Sampler(
            n,
            plan.max_model_len,
            n,
            shape.n_drawn,
            shape.n_drawn,
            (shape.end_id,),
            plan.n_threads,
            arena.allocate,
            penalises_prompt=False,
        ),
        allocate_speech(shape, plan.n_rows, n, plan.max_model_len, arena.allocate),
    )
