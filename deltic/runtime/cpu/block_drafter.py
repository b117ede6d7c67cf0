"""A block drafter at work: it follows what steps compute, and guesses several tokens at once (models/dflash).

Its keys and values of a step's tokens are part of the step's program. They stand in the pages beside those of
the model's layers, so whoever shares, saves or moves a page brings them along. A rejected draft's are
overwritten with those of the token in its place, as the model's are.

Guesses come from one forward of all blocks, then token by token from the left, each by the draw that the
model's own token will come by: the same parameters, seed and position. Where a block would reach beyond the
pages that its sequence has, it is shorter; nothing is guessed for a token that begins a page which is not
there yet. DSpark says how likely each guess is right: a block ends before the first that is not worth a row.
With the selector of DFlash 2 it ends where none of the candidates may be drawn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deltic.engine.drafts import n_guessable
from deltic.engine.step import Step
from deltic.models.dflash.cpu import BlockInputs, DFlash, allocate_drafter
from deltic.models.dflash.shape import LEAST_CHANCE
from deltic.models.qwen.cpu import Qwen
from deltic.ops.arrays import Array
from deltic.ops.cpu.attention import AttentionInputs
from deltic.ops.cpu.draft import RULED_OUT, BlockRows
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import PAGE_SIZE, Allocate
from deltic.runtime.cpu.batch import Batch
from deltic.runtime.cpu.sampler import Draws, Guess, Sampler
from deltic.runtime.plan import TextPlan


@dataclass(eq=False)
class _BlockGuess(Guess):
    """A block of them."""

    @property
    def anchor(self) -> int:
        """The position of the last token, with which the block begins."""
        return len(self.sequence.tokens) + len(self.drawn) - 1


class BlockDrafter:
    """The drafter's programs and buffers. Not thread-safe."""

    def __init__(self, plan: TextPlan, allocate: Allocate) -> None:
        assert plan.drafter is not None
        self.shape = shape = plan.drafter
        self._n_beside = int(not shape.guesses_at_anchor)
        self.n_rows = n_rows = max(PAGE_SIZE, shape.block_size)
        self.n_blocks = n_blocks = min(plan.max_num_seqs, n_rows)
        self._n_real = plan.n_real
        self.buffers = allocate_drafter(
            shape, plan.n_batch_tokens, n_rows, n_blocks, plan.max_model_len + PAGE_SIZE, allocate
        )

        def buffer(name: str, *size: int) -> Array:
            return np.asarray(allocate(f"drafter {name}", size, np.int32))

        self._counts = buffer("counts", 4)
        self._of_rows = {name: buffer(name, n_rows) for name in ("token ids", "positions", "batch slots", "nth")}
        self._of_blocks = {name: buffer(name, n_blocks) for name in ("context", "batch slot", "row", "before")}
        self._starts, self._logit_rows = buffer("starts", n_blocks + 1), buffer("logit rows", n_rows)
        self._draws = Draws(n_blocks, plan.n_real, plan.shape.eos_token_ids, allocate, "guess")
        self._guessed = buffer("guesses", n_blocks)

    def record(
        self,
        model: Qwen,
        drafter: DFlash,
        batch: Batch,
        pages: Array,
        sampler: Sampler,
        step: Program,
        features: Array,
        cpus: tuple[int, ...],
    ) -> None:
        """Records the drafter over its pages, of all its layers, and adds its keys and values to the model's
        step, which leaves features, bfloat16 [T, n H].
        """
        plain, counts, rows, blocks = batch.inputs, self._counts, self._of_rows, self._of_blocks
        of_step = AttentionInputs(
            n_tokens=plain.n_tokens,
            n_seqs=plain.n_seqs,
            positions=plain.positions,
            token_batch_slot=plain.token_batch_slot,
            seq_start=plain.seq_start,
            seq_context=plain.seq_context,
            batch_slot=plain.batch_slot,
            page_table=plain.page_table,
        )
        drafter.record_context(step, features, of_step, pages, self.buffers)
        own = AttentionInputs(
            n_tokens=counts[0, ...],
            n_seqs=counts[1, ...],
            positions=rows["positions"],
            token_batch_slot=rows["batch slots"],
            seq_start=self._starts,
            seq_context=blocks["context"],
            batch_slot=blocks["batch slot"],
            page_table=plain.page_table,
        )
        inputs = BlockInputs(own, rows["token ids"], rows["nth"], counts[2, ...], self._logit_rows)
        self._forward, self._next = (Program(step.n_threads, cpus=cpus) for _ in range(2))
        weights = model.weights
        drafter.record_block(self._forward, inputs, weights.embed, weights.lm_head, pages, self.buffers)
        next_rows = BlockRows(blocks["row"], blocks["before"], counts[3, ...])
        drafter.record_scores(self._next, next_rows, self._n_real, self.buffers)
        self._sampler = sampler
        sampler.record_guesses(self._next, self.buffers.scores, self._draws, self._guessed)

    def follow(self, step: Step, drawn: list[list[int]]) -> tuple[list[list[int]], float]:
        """Guesses behind a step's draws as many tokens as they want, at most a block. Gives these, and the
        seconds that they took.

        drawn: of each draw. Before the step's sequences have them, and before its pages are copied.
        """
        begin = time.perf_counter()
        guesses: list[list[int]] = [[] for _ in step.draws]
        blocks: list[_BlockGuess] = []
        for draw, tokens, found in zip(step.draws, drawn, guesses, strict=True):
            is_own = draw.sequence is step.chunks[draw.chunk].sequence
            if not is_own or not draw.n_guesses or tokens[0] < 0:
                continue
            block = _BlockGuess(draw.sequence, tokens, 0, found)
            most = n_guessable(draw.sequence, len(tokens), self._n_beside)
            block.n_wanted = min(draw.n_guesses, self.shape.most_guesses, most)
            if block.n_wanted > 0:
                blocks.append(block)
        if not blocks:
            return guesses, 0.0
        blocks.sort(key=lambda block: -block.n_wanted)
        for group in self._grouped(blocks):
            self._run(group)
        return guesses, time.perf_counter() - begin

    def _grouped(self, blocks: list[_BlockGuess]) -> Iterator[list[_BlockGuess]]:
        """Yields groups of blocks whose rows fit at once."""
        group: list[_BlockGuess] = []
        n = 0
        for block in blocks:
            if n + block.n_wanted + self._n_beside > self.n_rows or len(group) == self.n_blocks:
                yield group
                group, n = [], 0
            group.append(block)
            n += block.n_wanted + self._n_beside
        yield group

    def _run(self, blocks: list[_BlockGuess]) -> None:
        """Runs blocks, those first of which most tokens are wanted."""
        self._fill(blocks)
        self._forward.run()
        alive = list(zip(blocks, np.cumsum([0, *(block.n_wanted for block in blocks[:-1])]), strict=True))
        for i in range(blocks[0].n_wanted):
            alive = [(block, first) for block, first in alive if block.n_wanted > i]
            if not alive:
                return
            n = self._counts[3] = len(alive)
            asked = [(block.sequence, [*block.drawn, *block.tokens]) for block, _ in alive]
            self._of_blocks["row"][:n] = [first + i for _, first in alive]
            self._of_blocks["before"][:n] = [tokens[-1] for _, tokens in asked]
            if i == 0:
                self._sampler.fill_guesses(self._draws, asked)
            else:
                self._sampler.go_on(self._draws, asked)
            self._next.run()
            guessed, chances = self._guessed[:n], self.buffers.chance[:n] if self.shape.has_confidence else np.ones(n)
            is_over = (chances < LEAST_CHANCE) | (self.buffers.scores[np.arange(n), guessed] < RULED_OUT)
            for (block, _), token, ends in zip(alive, guessed.tolist(), is_over.tolist(), strict=True):
                if token < 0 or ends:
                    block.n_wanted = i
                else:
                    block.tokens.append(token)

    def _fill(self, blocks: list[_BlockGuess]) -> None:
        """Writes what is run: a row of each block's last token, and masks behind it."""
        lengths = [block.n_wanted + self._n_beside for block in blocks]
        ends = np.cumsum(lengths)
        n, n_blocks = int(ends[-1]), len(blocks)
        nth = np.concatenate([np.arange(length) for length in lengths])
        first = np.repeat([block.anchor for block in blocks], lengths)
        batch_slots = [block.sequence.batch_slot for block in blocks]
        ids = self._of_rows["token ids"][:n]
        ids[:] = self.shape.mask_token_id
        ids[ends - lengths] = [block.drawn[-1] for block in blocks]
        self._of_rows["nth"][:n], self._of_rows["positions"][:n] = nth, first + nth
        self._of_rows["batch slots"][:n] = np.repeat(np.array(batch_slots, np.int32), lengths)
        self._starts[1 : n_blocks + 1] = ends
        self._of_blocks["context"][:n_blocks] = [block.anchor for block in blocks]
        self._of_blocks["batch slot"][:n_blocks] = batch_slots
        guessing = np.flatnonzero(nth >= self._n_beside)
        self._logit_rows[: len(guessing)] = guessing
        self._counts[:3] = n, n_blocks, len(guessing)
