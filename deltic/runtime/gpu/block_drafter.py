"""A block drafter on a GPU: recordings within the steps and behind their draws, and how its guesses come to
the host.

Its keys and values of a step's tokens are part of the step's recording, so decodes may run ahead. They stand
in the pages beside those of the model's layers. A rejected draft's are overwritten with those of the token in
its place, as the model's are.

Blocks run behind the draws of a decode: one recording, by the number of their rows, of the forward and the
draws of all guesses. Where a guess depends on the one before, another draws the next of each block, and is
replayed as often as guesses are wanted. The host says before the step which rows follow which sequence; what
a block begins with, the device finds (ops/gpu/block.py). A guess is drawn as the model's own token will be,
with the same parameters, seed and position, but without a mask. Where all are drawn at once, penalties count
no token of their block.
"""

from __future__ import annotations

import torch

from deltic.engine.drafts import n_guessable
from deltic.engine.step import Chunk, Sequence, Step
from deltic.models.dflash.gpu import DFlashGpu, GpuDrafterBuffers
from deltic.ops.geometry import PAGE_SIZE, Allocate
from deltic.ops.gpu.block import begin_block
from deltic.ops.gpu.blocks import PrefillInputs
from deltic.ops.gpu.sample import sample
from deltic.runtime.gpu.ahead import Pending
from deltic.runtime.gpu.batch_slots import BatchSlots
from deltic.runtime.gpu.buffers import GpuWorkspace, Guesses
from deltic.runtime.gpu.record import Body, Recordings, Watch
from deltic.runtime.plan import TextPlan


class GpuBlockDrafter:
    """The drafter's pages and recordings. Not thread-safe."""

    def __init__(
        self,
        drafter: DFlashGpu,
        workspace: GpuWorkspace,
        guesses: Guesses[GpuDrafterBuffers],
        allocate: Allocate,
        plan: TextPlan,
        recordings: Recordings,
    ) -> None:
        """recordings: the model's, to which blocks are added."""
        self._drafter, self._workspace, self._guesses, shape = drafter, workspace, guesses, drafter.shape
        size = plan.n_pages + 1, shape.n_layers, 2, shape.n_kv_heads, PAGE_SIZE, shape.head_dim
        self.pages: torch.Tensor = allocate("drafter pages", size, torch.bfloat16)
        self._recordings, self._n_ids = recordings, plan.n_real
        self._n_beside = int(not shape.guesses_at_anchor)
        rows = guesses.head.rows
        guesses.none.fill_(-1)
        self._n_rows = len(rows.first)
        rows.draws.row.copy_(torch.arange(self._n_rows, dtype=torch.int32))
        is_gpu = self.pages.is_cuda
        # Nothing runs ahead behind guesses: what was sent is read before more is.
        self._host = torch.empty((2, self._n_rows), dtype=torch.int32, pin_memory=is_gpu)
        self._watch = Watch(is_gpu)
        self._blocks: dict[Sequence, tuple[int, int]] = {}
        """First row and guesses of each block that was asked for."""

    def add_bodies(self) -> None:
        """Adds what is to be recorded for each number of rows."""
        for n in reversed(self._recordings.row_sizes):
            self._recordings.add("block", n, self._block_body(n))
            if self._drafter.shape.is_walked:
                self._recordings.add("next guess", n, self._next_body(n))

    def _block_body(self, n: int) -> Body:
        w, g, shape = self._workspace, self._guesses, self._drafter.shape
        rows, drawn, history = g.head.rows.front(n), w.out["decode"].token, g.parameters.history

        def body() -> None:
            begin_block(w.decode.rows, drawn, rows, history, shape.mask_token_id, at_anchor=shape.guesses_at_anchor)
            logits = self._drafter.block(n, w.batch_slots.page_table, w.decode, g.head, self.pages, self._n_ids)
            if not shape.is_walked:
                sample(logits, self._n_ids, rows.draws, g.parameters, w.sample, g.out)

        return body

    def _next_body(self, n: int) -> Body:
        w, g = self._workspace, self._guesses

        def body() -> None:
            logits = self._drafter.next_guess(n, w.decode, g.head, g.out.token, self._n_ids)
            draws = g.head.rows.front(n).draws  # written by the kernel that may be in front
            sample(logits, self._n_ids, draws, g.parameters, w.sample, g.out, early=False)

        return body

    def follow_decode(self, n: int) -> None:
        """Starts the keys and values of a decode of n rows, behind its forward."""
        w = self._workspace
        self._drafter.keys(w.decode.rows.front(n), w.batch_slots.page_table, w.decode, self._guesses.head, self.pages)

    def follow_prefill(self, n_blocks: int, inputs: PrefillInputs) -> None:
        """Starts the same of a prefill, behind its draws."""
        self._drafter.keys_many(n_blocks, inputs, self._workspace.prefill, self._guesses.head, self.pages)

    # A step.

    def ask(self, chunks: list[Chunk], wanted: dict[Sequence, int], batch_slots: BatchSlots) -> None:
        """Says which blocks follow a decode of these chunks, before it is started: of each sequence as many
        guesses as are wanted, as far as a block, its pages and its answer go and there are rows.
        """
        self._blocks.clear()
        rows: list[tuple[int, int, int, int]] = []
        first = 0
        for chunk in chunks:
            of, params = chunk.sequence, chunk.sequence.request.params
            n = min(wanted.get(of, 0), self._drafter.shape.most_guesses, n_guessable(of, 1, self._n_beside))
            n = min(n, self._n_rows - len(rows) - self._n_beside)
            if n > 0:
                # A token is drawn behind the last guess.
                room = of.n_prompt + params.max_tokens - 2 + self._n_beside
                room = min(room, len(of.pages) * PAGE_SIZE)
                self._blocks[of] = len(rows), n
                length = n + self._n_beside
                rows += [(first, i, length, room) for i in range(length)]
            first += chunk.length
        if rows:
            rows += [(-1, 0, 0, 0)] * (self._recordings.size(len(rows)) - len(rows))
            batch_slots.blocks(rows)

    def run(self, rows: dict[Sequence, int], n: int) -> Pending | None:
        """Starts the blocks behind the draws of n rows, and the way of both to the host. None: there are
        none.
        """
        if not self._blocks:
            return None
        self._watch.begin()
        n_block_rows = self._recordings.size(max(map(sum, self._blocks.values())) + self._n_beside)
        self._recordings.of("block", n_block_rows).run()
        if self._drafter.shape.is_walked:
            for _ in range(max(n_guesses for _, n_guesses in self._blocks.values())):
                self._recordings.of("next guess", n_block_rows).run()
        tokens, guesses = self._host[0, :n], self._host[1]
        tokens.copy_(self._workspace.out["decode"].token[:n], non_blocking=True)
        guesses.copy_(self._guesses.out.token, non_blocking=True)
        self._watch.end()
        return Pending(rows, tokens, guesses=guesses)

    def read(
        self, step: Step, results: dict[Sequence, Pending], drawn: list[list[int]]
    ) -> tuple[list[list[int]], float]:
        """Reads what was guessed behind each draw of a step whose tokens are there, and the seconds it
        took.
        """
        guesses: list[list[int]] = []
        seconds = 0.0
        for draw, tokens in zip(step.draws, drawn, strict=True):
            pending, guessed = results[draw.sequence], list[int]()
            if pending.guesses is not None and draw.sequence in self._blocks and tokens[0] >= 0:
                first, n = self._blocks[draw.sequence]
                n = min(n, n_guessable(draw.sequence, len(tokens), self._n_beside))
                guessed = pending.guesses[first + self._n_beside :][:n].tolist()
                if -1 in guessed:  # nothing can be drawn, or it is not worth a row
                    guessed = guessed[: guessed.index(-1)]
                seconds = self._watch.seconds()
            guesses.append(guessed)
        return guesses, seconds
