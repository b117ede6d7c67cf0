"""Log-probabilities of a prompt's tokens on a GPU, from the rows that its prefill left.

Not recorded, and waited for: few ask for them.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from deltic.engine.messages import MAX_LOGPROBS, TokenLogprob
from deltic.engine.step import Chunk
from deltic.models.qwen.gpu import QwenGpu
from deltic.models.qwen.gpu_buffers import PrefillBuffers
from deltic.ops.geometry import LogprobEntries
from deltic.ops.gpu.blocks import AdapterRows
from deltic.ops.gpu.launch import bound_levers
from deltic.ops.gpu.sample import prompt_logprobs
from deltic.runtime.gpu.batch_slots import adapter_groups


class PromptScorer:
    """Log-probabilities behind the last prefill, of as many rows at once as the buffers have."""

    def __init__(self, model: QwenGpu, buffers: PrefillBuffers, n_real: int) -> None:
        """n_real: ids that can be drawn."""
        self._model, self._buffers, self._n_real = model, buffers, n_real
        self._device, self._levers = buffers.final.device, bound_levers()

    def of(self, chunk: Chunk, first: int, n_blocks: int) -> list[TokenLogprob]:
        """Returns the log-probabilities of `Chunk.scored`, of a chunk whose rows begin with `first` in a
        prefill of n_blocks blocks.
        """
        sequence, scored = chunk.sequence, chunk.scored
        k = sequence.request.params.prompt_logprobs or 0
        entries: list[TokenLogprob] = []
        offsets, most = sorted({offset for offset, _ in scored}), len(self._buffers.final)
        for at in range(0, len(offsets), most):
            row_of = {offset: row for row, offset in enumerate(offsets[at : at + most])}
            part = [(row_of[offset], id) for offset, id in scored if offset in row_of]
            logits = self.logits([first + offset for offset in row_of], n_blocks, sequence.adapter_slot)
            # Each has memory of its own: kernels are compiled for pointers that 16 divides.
            rows, targets = (torch.tensor(each, dtype=torch.int32).to(self._device) for each in zip(*part, strict=True))
            found = self._start(logits, rows, targets, k)
            for (_, token), value, ids, values in zip(part, *(tensor.tolist() for tensor in found), strict=True):
                entries.append(TokenLogprob(token, value, list(zip(ids[:k], values[:k], strict=True))))
        return entries

    def logits(self, of: Rows[int], n_blocks: int, adapter_slot: int = -1) -> Tensor:
        """Starts the head for some rows of a prefill of n_blocks blocks. Returns float32 [len(of), V], in a
        buffer of the prefill.
        """
        n, rows, adapters = len(of), torch.tensor(list(of), dtype=torch.int32).to(self._device), None
        if adapter_slot >= 0:
            groups, group_of = (
                torch.tensor(words, dtype=torch.int32) for words in adapter_groups([adapter_slot] * n, n)
            )
            adapters = AdapterRows(groups.to(self._device), group_of.view(n, -1).to(self._device))
        with self._levers.bound():
            return self._model.logits_of(rows, n_blocks, self._buffers, adapters)

    def _start(self, logits: Tensor, rows: Tensor, targets: Tensor, n_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Starts the log-probabilities of a token in each of these rows, and of n_top others with ids."""
        n, device = len(targets), self._device
        counts, n_rows = torch.full_like(rows, n_top), torch.full_like(rows[:1], n)
        logprob, top = torch.zeros(n, device=device), torch.zeros((n, MAX_LOGPROBS), device=device)
        ids = torch.zeros((n, MAX_LOGPROBS), dtype=torch.int32, device=device)
        entries = LogprobEntries(n_rows, rows, targets, counts, logprob, ids, top)
        prompt_logprobs(logits, self._n_real, entries)
        return logprob, ids, top

    def walk(self, n_blocks: int, has_adapters: bool) -> None:
        """Starts every kernel that a prompt may start, on whatever is in the buffers."""
        for n in range(1, len(self._buffers.final) + 1):
            logits = self.logits(range(n), n_blocks)
            if has_adapters:
                logits = self.logits(range(n), n_blocks, adapter_slot=0)
            zeros = torch.zeros(n, dtype=torch.int32, device=self._device)
            self._start(logits, zeros, zeros, 0)
