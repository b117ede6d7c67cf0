"""A text model on a GPU: its memory, its recorded steps, masks and log-probabilities.

**Masks.** A sequence that follows a grammar draws with a mask, which the host makes from the token before. So
where one decodes, only the forward runs ahead, of all of them: masks are made meanwhile, and the next step
begins by drawing. One whose mask is late keeps its logits for a later step. With a draft head nothing runs
ahead there: it reads the hidden states behind the draw. Nor does it with a block drafter, whose blocks follow
draws. In a thought nothing is masked, but nothing runs
ahead behind the token that ends it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from deltic.engine.messages import TokenLogprob
from deltic.engine.step import Chunk, Progress, Rule, Sequence, Step, StepResult, silent
from deltic.models.dflash.gpu import DFlashGpu
from deltic.models.dflash.weights import DrafterWeights
from deltic.models.qwen.gpu import QwenGpu
from deltic.models.qwen.gpu_adapters import Targets
from deltic.models.qwen.gpu_buffers import RING, DecodeBuffers, GpuMemory, page_layout
from deltic.models.qwen.gpu_experts import outside_experts
from deltic.models.qwen.gpu_shards import Exchange, place_of
from deltic.models.qwen.gpu_streams import NGRAM_RING
from deltic.models.qwen.weights import Weights
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.weights import VisionWeights
from deltic.ops.arrays import Array, bfloat16
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.blocks import PrefillInputs
from deltic.ops.gpu.launch import allocate_on
from deltic.ops.gpu.sample import Draws
from deltic.runtime.gpu.adapters import GpuAdapterMemory, open_adapters
from deltic.runtime.gpu.ahead import Pending, ResultBuffers, Undrawn
from deltic.runtime.gpu.batch_slots import BatchSlots
from deltic.runtime.gpu.block_drafter import GpuBlockDrafter
from deltic.runtime.gpu.buffers import GpuWorkspace, gpu_workspace
from deltic.runtime.gpu.copies import StageRows
from deltic.runtime.gpu.draft_head import DraftHead
from deltic.runtime.gpu.pictures import PictureTower
from deltic.runtime.gpu.prompt_logprobs import PromptScorer
from deltic.runtime.gpu.record import Body, Recording, Recordings
from deltic.runtime.gpu.runner import Bodies, GpuRunner, ends_thought, rows_of
from deltic.runtime.plan import Plan, TextPlan
from deltic.runtime.pools import Pools
from deltic.runtime.stages import Neighbours


class TextBodies(Bodies):
    """Steps of a text model, for its recordings. Draws are recorded apart from the forwards, which may run
    ahead of them.
    """

    _workspace: GpuWorkspace

    def __init__(
        self,
        model: QwenGpu,
        workspace: GpuWorkspace,
        memory: list[GpuMemory],
        undrawn: Undrawn,
        head: DraftHead | GpuBlockDrafter | None,
        n_real: int,
    ) -> None:
        super().__init__(workspace, n_real)
        self._model, self._memory, self._undrawn, self._head = model, memory, undrawn, head

    def decode(self, n: int, max_len: int) -> Body:
        buffers = self._workspace.decode
        plain = replace(buffers, rows=replace(buffers.rows, drafts=None), windows=None, adapters=None)
        return self._decode(n, max_len, plain)

    def _drafted(self, n: int, max_len: int) -> Body:
        return self._decode(n, max_len, replace(self._workspace.decode, adapters=None))

    def _adapted(self, n: int, max_len: int) -> Body:
        return self._decode(n, max_len, self._workspace.decode)

    def _decode(self, n: int, max_len: int, buffers: DecodeBuffers) -> Body:
        w = self._workspace

        def body() -> None:
            self._model.decode(w.rows_batch_slot[:n], w.batch_slots, buffers, self._memory, max_len)
            if isinstance(self._head, GpuBlockDrafter):
                self._head.follow_decode(n)

        return body

    def add_decodes(self, recordings: Recordings, plan: Plan[Any]) -> None:
        if plan.adapters.n:
            recordings.add_decodes("adapted decode", plan.n_decode_rows, self._adapted)
        if plan.n_draft_rows:
            recordings.add_decodes("drafted decode", plan.n_decode_rows, self._drafted)
        super().add_decodes(recordings, plan)
        for n in reversed(recordings.row_sizes if self._model.shape.draws else ()):
            recordings.add("draw", n, self._draw_body(n))
            recordings.add("late draw", n, self._late_draw_body(n))
        if self._head is not None:
            self._head.add_bodies()

    def _draw_body(self, n: int) -> Body:
        return lambda: self.draw("decode", self._undrawn.logits[:n], self._workspace.decode.rows.front(n))

    def _late_draw_body(self, n: int) -> Body:
        return lambda: self.draw("decode", self._undrawn.logits, Draws(*self._undrawn.draws[:, :n]))

    def prefill_logits(self, n_blocks: int, inputs: PrefillInputs) -> Tensor:
        w = self._workspace
        return self._model.prefill(n_blocks, inputs, w.batch_slots.page_table, w.prefill, self._memory, w.picture_rows)

    def prefill(self, n_blocks: int, inputs: PrefillInputs, draws: Draws) -> Body:
        body, head = super().prefill(n_blocks, inputs, draws), self._head
        if not self._model.shape.draws:
            return lambda: self.prefill_logits(n_blocks, inputs)
        if head is None:
            return body

        def with_head() -> None:
            body()
            head.follow_prefill(n_blocks, inputs)

        return with_head


class GpuTextRunner(GpuRunner):
    """The hybrid decoder on a GPU, with its memory."""

    plan: TextPlan
    workspace: GpuWorkspace
    neighbours: Neighbours | None = None
    """Neighbours of a stage, once it is ready."""

    def __init__(
        self,
        plan: TextPlan,
        weights: list[Weights],
        progress: Progress = silent,
        vision: tuple[VisionWeights, PictureRules] | None = None,
        exchange: tuple[GpuWorkspace, Exchange] | None = None,
        drafter: DrafterWeights | None = None,
    ) -> None:
        """weights: of each part that this GPU has. vision, drafter: where the plan has them. exchange: where
        the model is cut, with the workspace that it is of.
        """
        shape, n, n_shards = plan.shape, plan.n_decode_rows, plan.n_shards
        allocate = allocate_on(place_of(weights[0]))
        # No sequence owns the last page: rows of padding are written there.
        page, page_type = page_layout(shape)
        state = shape.n_gdn_layers, shape.gdn_n_v_heads, shape.gdn_v_dim, shape.gdn_k_dim
        columns = shape.n_gdn_layers, RING, shape.conv_channels
        pages = allocate("pages", (plan.n_pages + 1, n_shards, *page), page_type)
        states = allocate("states", (plan.n_slots, n_shards, *state), getattr(torch, shape.state_dtype))
        inputs = allocate("columns", (plan.n_slots, n_shards, *columns), torch.bfloat16)
        index = ngrams = None
        if shape.index is not None:
            size = shape.n_kv_layers, shape.index.page_rows, shape.index.dim
            index = allocate("index pages", (plan.n_pages + 1, n_shards, *size), torch.bfloat16)
        if shape.ngrams is not None:  # of all shards, which have the same
            n_rows = shape.ngrams.window + NGRAM_RING
            ngrams = allocate("n-gram columns", (plan.n_slots, n_rows, shape.stream_size), torch.bfloat16)
        self.memory = [
            GpuMemory(pages[:, i], states[:, i], inputs[:, i], None if index is None else index[:, i], ngrams)
            for i in range(n_shards)
        ]
        w, joined = (gpu_workspace(plan, allocate), None) if exchange is None else exchange
        heads = [replace(shape, head_rows=part.lm_head.n) for part in weights]
        adapted = [*zip(heads, w.adapters, strict=False)]  # none, where there is no room for any
        targets = [Targets(*of, plan.adapters.rank) for of in adapted]
        self.outside = outside_experts(weights, plan.n_expert_slots, allocate) if plan.n_expert_slots else None
        self.model = QwenGpu(shape, weights, plan.max_model_len, joined, targets, self.outside)
        ratio = 0 if shape.index is None else shape.index.ratio
        told = shape.eos_token_ids, plan.n_real, plan.n_draft_rows
        batch_slots = BatchSlots(w.table, w.offsets, w.parameters.masks, *told, ngrams=shape.ngrams, ratio=ratio)
        super().__init__(
            plan,
            w,
            batch_slots,
            [pages] if index is None else [pages, index],
            [states, inputs] if ngrams is None else [states, inputs, ngrams],
            ResultBuffers(w.out, n),
            has_head=w.guesses is not None,
        )
        self.draft_head: DraftHead | None = None
        if w.guesses is not None:
            self.draft_head = DraftHead(self.model, w, w.guesses, self.memory, plan, recordings=self.recordings)
        self.block_drafter: GpuBlockDrafter | None = None
        if plan.drafter is not None and drafter is not None and w.blocks is not None:
            own = DFlashGpu(plan.drafter, drafter, self.model)
            self.block_drafter = GpuBlockDrafter(own, w, w.blocks, allocate, plan, recordings=self.recordings)
            self._pages.append(self.block_drafter.pages)
        self.adapter_memory = [GpuAdapterMemory(*of, self.stream) for of in adapted]
        """Memory for adapters of each shard."""
        if adapted and plan.n_gpus == 1:
            self.adapters = open_adapters(plan, self.adapter_memory)
        self._undrawn = Undrawn(w.decode.logits.view(-1, shape.vocab_size), n)
        self._prompt_logprobs = PromptScorer(self.model, w.prefill, plan.n_real)
        self.pools = Pools() if shape.keeps_hidden else None
        self._ran_ahead: torch.cuda.Event | None = None
        self._stage = StageRows(shape, (w.decode.residual, w.prefill.residual)) if shape.model_layer_types else None
        self._n_guesses: dict[Sequence, int] = {}
        """Guesses of this step that are wanted for each sequence."""
        self.tower: PictureTower | None = None
        if vision is not None and w.vision is not None and w.picture_rows is not None:
            self.tower = PictureTower(plan, *vision, w.vision, w.picture_rows, self.stream)
            self.pictures = self.tower
            if self.is_gpu and plan.n_gpus == 1:  # a kernel that cannot run here fails now
                with torch.cuda.stream(self.stream):
                    torch.cuda.synchronize()  # what was allocated and copied so far was on another stream
                    self.tower.walk()
        head = self.draft_head or self.block_drafter
        bodies = TextBodies(self.model, w, self.memory, self._undrawn, head, plan.n_real)
        self._record(bodies, progress, are_replayed=plan.n_gpus > 1)
        self.info = self._make_info(None if vision is None else vision[1])
        if shape.model_layer_types:  # nothing runs ahead, since other machines compute in between
            self.info = msgspec.structs.replace(self.info, n_lookahead=0)

    def walk(self) -> None:
        """Starts what is not recorded, on whatever is in the buffers: log-probabilities of prompts, for every
        number of rows, what the tower does, and copies beside the steps.
        """
        with torch.cuda.stream(self.stream):
            if self.plan.shape.draws:
                self._prompt_logprobs.walk(self.plan.max_step_tokens // PAGE_SIZE, self.plan.adapters.n > 0)
            if self.tower is not None:
                self.tower.walk()
            if self.is_gpu:
                for part in (*self._pages, *self._states, self._undrawn.logits):  # as forks and late draws do
                    part[-1:].copy_(part[:1])
                with self.batch_slots.beside:
                    self._undrawn.send([], [], [])
                torch.cuda.current_stream().synchronize()

    # A step.

    def _step(self, step: Step) -> StepResult:
        if self.neighbours is not None:
            self.neighbours.begin(step)
        guided = []
        for draw in step.draws if self.plan.shape.draws else ():
            guide = draw.sequence.guide
            if guide is not None:
                guided.append((draw.sequence, step.chunks[draw.chunk].rules or [Rule.of(guide)]))
        self.batch_slots.put_guides(guided)
        self._n_guesses = {draw.sequence: draw.n_guesses for draw in step.draws if draw.n_guesses}
        result = super()._step(step)
        if self.neighbours is not None:
            self.neighbours.end()
        return result

    def _following(self, step: Step) -> list[Chunk]:
        """Finds what to start ahead, as for any model; of a stage nothing, since other machines draw."""
        return [] if self.plan.shape.model_layer_types else super()._following(step)

    def _run(self, recording: Recording, chunks: list[Chunk], n: int) -> None:
        if self._stage is None or self.neighbours is None:
            super()._run(recording, chunks, n)
        else:
            self._stage.run(recording, chunks, n, self.neighbours)

    def _send(self, rows: dict[Sequence, int], n: int, kind: str, guesses: Pending | None = None) -> Pending:
        if not self.plan.shape.draws:
            return Pending({}, self._undrawn.draws[:0])
        return super()._send(rows, n, kind, guesses)

    def _take_over(self, sequences: list[Sequence]) -> dict[Sequence, Pending]:
        late: dict[Sequence, int] = {}
        for sequence in sequences:
            if self._ahead[sequence].pending is None:
                row = self._undrawn.take(sequence)
                assert row is not None
                late[sequence] = row
                if self._ahead.pop(sequence).n_preempted != sequence.n_preempted:
                    self.batch_slots.move_in(sequence)
        results = super()._take_over([s for s in sequences if s not in late])
        if late:
            results |= dict.fromkeys(late, self._draw_late(late))
        return results

    def _draw_late(self, rows: dict[Sequence, int]) -> Pending:
        """Starts the draws of sequences whose forwards ran ahead, from these rows of logits."""
        self.batch_slots.flush()
        batch_slots = [s.batch_slot for s in rows if s.batch_slot is not None]
        with self.batch_slots.beside:
            self._undrawn.send([*rows.values()], batch_slots, [len(s.tokens) for s in rows])
        self.recordings.of("late draw", self.recordings.size(len(rows))).run()
        return self._results.send({sequence: i for i, sequence in enumerate(rows)}, len(rows), "decode")

    def _forward(self, chunks: list[Chunk]) -> int:
        self._undrawn.keep()
        return super()._forward(chunks)

    def _decode(self, chunks: list[Chunk]) -> Pending:
        if self.block_drafter is not None:
            self.block_drafter.ask(chunks, self._n_guesses, self.batch_slots)
        n = self._forward(chunks)
        rows, n_rows = rows_of(chunks)
        guesses = None
        if self.plan.shape.draws:
            self.recordings.of("draw", n).run()
        if self.draft_head is not None:
            n_guesses = max(self._n_guesses.values(), default=0)
            self.draft_head.run(n, n_guesses)
            if n_guesses:
                guesses = self.draft_head.send(rows, n_rows, n_guesses)
        elif self.block_drafter is not None:
            guesses = self.block_drafter.run(rows, n_rows)
        return self._send(rows, n_rows, "decode", guesses)

    def _start_ahead(self, chunks: list[Chunk]) -> None:
        """Starts only the forward, where one of the chunks draws with a mask that is not known yet."""
        if all(c.sequence.guide is None or c.sequence.guide.next_is_free for c in chunks):
            return super()._start_ahead(chunks)
        if self.draft_head is not None or self.block_drafter is not None:
            return None  # it needs the hidden states behind the draw, which the next forward overwrites
        chunks = chunks[: self._undrawn.n_free]
        if chunks:
            self._forward(chunks)
            self._undrawn.put([chunk.sequence for chunk in chunks])
            if self.is_gpu:
                self._ran_ahead = torch.cuda.Event()
                self._ran_ahead.record()
            self._put_ahead(chunks, None)

    def _drop(self, sequence: Sequence) -> None:
        super()._drop(sequence)
        self._undrawn.take(sequence)

    def is_busy(self) -> bool:
        """Returns whether the forward that runs ahead is not over. Raises RunnerLostError where a machine
        that has some of the layers is gone.
        """
        if self.neighbours is not None:
            self.neighbours.hear()
        return self._ran_ahead is not None and not self._ran_ahead.query()

    # Log-probabilities.

    def _read(self, step: Step, results: dict[Sequence, Pending]) -> StepResult:
        if self._stage is not None and self.neighbours is not None and not self.plan.shape.draws:
            self._stage.pass_on(self.neighbours)
            return self.neighbours.result()
        result = super()._read(step, results)
        head = self.draft_head or self.block_drafter
        if head is not None:
            result.guesses, result.guess_s = head.read(step, results, result.tokens)
        for i, (draw, tokens) in enumerate(zip(step.draws, result.tokens, strict=True)):
            params = draw.sequence.request.params
            if params.constraint is not None and ends_thought(draw.sequence, tokens[-1]):
                self._drop(draw.sequence)  # the device left it out
            k = params.logprobs
            if k is not None and (pending := results[draw.sequence]).logprobs is not None:
                first = pending.rows[draw.sequence]
                parts = (part[first : first + len(tokens)].tolist() for part in pending.logprobs)
                result.logprobs[i] = [
                    TokenLogprob(token, logprob, list(zip(ids[:k], values[:k], strict=True)))
                    for token, logprob, ids, values in zip(tokens, *parts, strict=True)
                ]
        return result

    def _prefill(self, step: Step, prefills: list[int]) -> Pending:
        pending = super()._prefill(step, prefills)
        if self.pools is not None:
            pending.vectors = self.pools.follow(step, partial(self._hidden_of, step, prefills))
        for i in prefills:
            if step.chunks[i].prompt_logprobs and self.plan.shape.draws:
                ends, n_blocks = self._prefill_batch.layout(step, prefills)
                chunk = step.chunks[i]
                pending.prompt_logprobs[i] = self._prompt_logprobs.of(chunk, ends[i] - chunk.length + 1, n_blocks)
        return pending

    def _hidden_of(self, step: Step, prefills: list[int], c: int, part: slice) -> Array:
        """Hidden states of a chunk's tokens that a prefill has left, bfloat16. It is waited for."""
        h, end = self.plan.shape.hidden_size, self._prefill_batch.layout(step, prefills)[0][c] + 1
        begin, hidden = end - step.chunks[c].length, self.workspace.prefill.hidden
        assert hidden is not None
        rows = hidden[(begin + part.start) * h : (begin + part.stop) * h].view(-1, h)
        return np.asarray(rows.view(torch.int16).cpu().numpy()).view(bfloat16)

    # For tests, benches and checks of a model.

    def logits(self, n_rows: int) -> Array:
        """float32 [n_rows, V]: of the first rows of the last prefill, which was of one chunk of one block."""
        found, most = [], len(self.workspace.prefill.final)
        with torch.cuda.stream(self.stream):
            for at in range(0, n_rows, most):
                logits = self._prompt_logprobs.logits(range(at, min(at + most, n_rows)), n_blocks=1)
                found.append(logits.to("cpu", copy=True))
        return np.asarray(torch.cat(found).numpy())

    def residuals(self, n_rows: int) -> list[Array]:
        """float32 [n_rows, H] each: the residual stream behind the embedding, each mixer and each
        feed-forward, of the first rows of the last prefill, which was of one chunk of one block and is run
        once more.
        """
        found: list[Array] = []
        self.model.watch = lambda residual: found.append(residual[:n_rows].to("cpu", copy=True).numpy())
        w, inputs = self.workspace, self._prefill_batch.of(1).inputs
        try:
            with torch.cuda.stream(self.stream), self.levers.bound():
                self.model.prefill(1, inputs, w.batch_slots.page_table, w.prefill, self.memory, w.picture_rows)
        finally:
            self.model.watch = None
        return found
