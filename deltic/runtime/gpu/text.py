"""A text model on a GPU: its memory, its recorded steps, masks and log-probabilities.

**Masks.** A sequence that follows a grammar draws with a mask, which the host makes from the token before. So
where one decodes, only the forward runs ahead, of all of them: masks are made meanwhile, and the next step
begins by drawing. One whose mask is late keeps its logits for a later step. With a draft head nothing runs
ahead there: it reads the hidden states behind the draw. In a thought nothing is masked, but nothing runs
ahead behind the token that ends it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from deltic.engine.messages import MAX_LOGPROBS, Request, SamplingParams, TokenLogprob
from deltic.engine.step import Chunk, HeldAdapter, Progress, Rule, Sequence, Step, StepResult
from deltic.models.qwen.gpu import Exchange, QwenGpu
from deltic.models.qwen.gpu_adapters import Targets
from deltic.models.qwen.gpu_buffers import RING, DecodeBuffers, GpuMemory, page_layout
from deltic.models.qwen.weights import Weights
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.weights import VisionWeights
from deltic.ops.arrays import Array
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.blocks import AdapterRows, PrefillInputs
from deltic.ops.gpu.launch import Levers, allocate_on
from deltic.ops.gpu.sample import Draws, prompt_logprobs
from deltic.runtime.adapters import Adapters
from deltic.runtime.gpu.adapters import GpuAdapterMemory
from deltic.runtime.gpu.ahead import Pending, Undrawn
from deltic.runtime.gpu.batch_slots import BatchSlots, adapter_groups
from deltic.runtime.gpu.buffers import GpuWorkspace, gpu_workspace
from deltic.runtime.gpu.draft_head import DraftHead
from deltic.runtime.gpu.pictures import PictureTower
from deltic.runtime.gpu.record import Body, Recording
from deltic.runtime.gpu.runner import N_PENDING, GpuRunner, Job, ends_thought
from deltic.runtime.plan import TextPlan


class GpuTextRunner(GpuRunner):
    """The hybrid decoder on a GPU, with its memory."""

    plan: TextPlan
    workspace: GpuWorkspace

    def __init__(
        self,
        plan: TextPlan,
        weights: list[Weights],
        levers: Levers,
        progress: Progress = lambda stage, done: None,
        vision: tuple[VisionWeights, PictureRules] | None = None,
        exchange: tuple[GpuWorkspace, Exchange] | None = None,
    ) -> None:
        """weights: of each part that this GPU has. vision: where the plan has a tower. exchange: where the
        model is cut, with the workspace that it is of.
        """
        shape, n, n_shards = plan.shape, plan.n_decode_rows, plan.n_shards
        allocate = allocate_on(weights[0].norm.device)
        # No sequence owns the last page: rows of padding are written there.
        page, page_type = page_layout(shape)
        state = shape.n_gdn_layers, shape.gdn_n_v_heads, shape.gdn_v_dim, shape.gdn_k_dim
        columns = shape.n_gdn_layers, RING, shape.conv_channels
        pages = allocate("pages", (plan.n_pages + 1, n_shards, *page), page_type)
        states = allocate("states", (plan.n_slots, n_shards, *state), getattr(torch, shape.state_dtype))
        inputs = allocate("columns", (plan.n_slots, n_shards, *columns), torch.bfloat16)
        self.memory = [GpuMemory(pages[:, i], states[:, i], inputs[:, i]) for i in range(n_shards)]
        w, joined = (gpu_workspace(plan, levers, allocate), None) if exchange is None else exchange
        targets = None if w.adapters is None else Targets(shape, w.adapters, plan.adapters.rank)
        self.model = QwenGpu(shape, weights, plan.max_model_len, levers, joined, targets)
        n_drafts = n - plan.max_num_seqs
        batch_slots = BatchSlots(w.table, w.offsets, w.parameters.masks, shape.eos_token_ids, plan.n_real, n_drafts)
        super().__init__(plan, levers, w, batch_slots, [pages], [states, inputs], has_head=w.guesses is not None)
        self.draft_head = (
            None if w.guesses is None else DraftHead(self.model, w, w.guesses, self.memory[0], plan, levers)
        )
        if w.adapters is not None:
            self.adapters = Adapters(shape, plan.adapters, GpuAdapterMemory(shape, w.adapters, self.stream))
        self._undrawn = Undrawn(w.decode.logits.view(-1, shape.vocab_size), n)
        self._draws: dict[int, Recording] = {}  # behind a forward
        self._late_draws: dict[int, Recording] = {}  # of what is in `_undrawn`
        self._logprobs = [
            (
                self._pinned(n, dtype=torch.float32),
                self._pinned(n, MAX_LOGPROBS),
                self._pinned(n, MAX_LOGPROBS, dtype=torch.float32),
            )
            for _ in range(N_PENDING)
        ]
        self._ran_ahead: torch.cuda.Event | None = None
        self._n_guesses = 0
        """Guesses of this step for one sequence, at most."""
        self.tower: PictureTower | None = None
        if vision is not None and w.vision is not None and w.picture_rows is not None:
            self.tower = PictureTower(plan, *vision, w.vision, w.picture_rows, levers, self.stream)
            self.pictures = self.tower
            if self.is_gpu and plan.n_gpus == 1:  # a kernel that cannot run here fails now
                with torch.cuda.stream(self.stream):
                    torch.cuda.synchronize()  # what was allocated and copied so far was on another stream
                    self.tower.walk()
        self._record_all(progress, are_replayed=plan.n_gpus > 1)
        self.info = self._make_info(None if vision is None else vision[1])

    # Recording.

    def _forward_body(self, n: int, max_len: int) -> Body:
        buffers = self.workspace.decode
        plain = replace(buffers, rows=replace(buffers.rows, drafts=None), windows=None, adapters=None)
        return self._decode_body(n, max_len, plain)

    def _draft_body(self, n: int, max_len: int) -> Body:
        return self._decode_body(n, max_len, replace(self.workspace.decode, adapters=None))

    def _adapted_body(self, n: int, max_len: int) -> Body:
        return self._decode_body(n, max_len, self.workspace.decode)

    def _decode_body(self, n: int, max_len: int, buffers: DecodeBuffers) -> Body:
        w = self.workspace
        return lambda: self.model.decode(w.rows_batch_slot[:n], w.batch_slots, buffers, self.memory, max_len)

    def _draft_jobs(self) -> list[Job]:
        n_rows = self.plan.n_decode_rows
        adapted = self._decode_jobs(self._adapted, self._adapted_body, n_rows if self.plan.adapters.n else 0)
        return adapted + self._decode_jobs(self._drafted, self._draft_body, n_rows if self.plan.max_drafts else 0)

    def _draw_jobs(self) -> list[Job]:
        jobs: list[Job] = []
        for n in reversed(self._row_sizes):
            jobs.append((self._draws, n, self._draw_body(n)))
            jobs.append((self._late_draws, n, self._late_draw_body(n)))
        if self.draft_head is not None:
            jobs += self.draft_head.jobs(self._row_sizes)
        return jobs

    def _draw_body(self, n: int) -> Body:
        return lambda: self._draw("decode", self._undrawn.logits[:n], self.workspace.decode.rows.front(n))

    def _late_draw_body(self, n: int) -> Body:
        return lambda: self._draw("decode", self._undrawn.logits, Draws(*self._undrawn.draws[:, :n]))

    def _prefill_logits(self, n_blocks: int, inputs: PrefillInputs) -> Tensor:
        w = self.workspace
        return self.model.prefill(n_blocks, inputs, w.batch_slots.page_table, w.prefill, self.memory, w.picture_rows)

    def _prefill_body(self, n_blocks: int, inputs: PrefillInputs) -> Body:
        body, head = super()._prefill_body(n_blocks, inputs), self.draft_head
        if head is None:
            return body

        def with_head() -> None:
            body()
            head.follow_prefill(n_blocks, inputs)

        return with_head

    def recordings(self) -> list[Recording]:
        of_head = () if self.draft_head is None else self.draft_head.kinds
        kinds = self._forwards, self._drafted, self._adapted, self._draws, self._late_draws
        kinds += self._prefills, self._adapted_prefills, *of_head
        return [recording for kind in kinds for recording in kind.values()]

    def walk(self) -> None:
        """Starts what is not recorded, on whatever is in the buffers: log-probabilities of prompts, for every
        number of rows, what the tower does, and copies beside the steps.
        """
        with torch.cuda.stream(self.stream):
            buffers, plan = self.workspace.prefill, self.plan
            for n in range(1, len(buffers.final) + 1):
                rows, one = (torch.zeros(size, dtype=torch.int32, device=self.device) for size in (n, 1))
                logits = self.model.logits_of(rows, plan.max_step_tokens // PAGE_SIZE, buffers)
                if plan.adapters.n:
                    who = self._adapter_rows(0, n)
                    logits = self.model.logits_of(rows, plan.max_step_tokens // PAGE_SIZE, buffers, who)
                top = torch.zeros((n, MAX_LOGPROBS), device=self.device)
                prompt_logprobs(logits, plan.n_real, rows, rows, rows, one, top[:, 0].contiguous(), top.int(), top)
            if self.tower is not None:
                self.tower.walk()
            if self.is_gpu:
                for part in (*self._pages, *self._states, self._undrawn.logits):  # as forks and late draws do
                    part[-1].copy_(part[0])
                with self.batch_slots.beside:
                    self._undrawn.send([], [], [])
                torch.cuda.current_stream().synchronize()

    # A step.

    def _step(self, step: Step) -> StepResult:
        guided = []
        for draw in step.draws:
            guide, rules = draw.sequence.guide, step.chunks[draw.chunk].rules
            if guide is not None:
                guided.append((draw.sequence, rules or [Rule.of(guide)]))
        self.batch_slots.put_guides(guided)
        self._n_guesses = max((draw.n_guesses for draw in step.draws), default=0)
        return super()._step(step)

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
        self._late_draws[self._size(len(rows))].run()
        return self._send({sequence: i for i, sequence in enumerate(rows)}, len(rows), "decode")

    def _forward(self, chunks: list[Chunk]) -> None:
        self._undrawn.keep()
        super()._forward(chunks)

    def _decode(self, chunks: list[Chunk]) -> Pending:
        self._forward(chunks)
        n = self._size(sum(chunk.length for chunk in chunks))
        self._draws[n].run()
        if self.draft_head is not None:
            self.draft_head.run(n, self._n_guesses)
        return self._send_decoded(chunks)

    def _send_tokens(self, rows: dict[Sequence, int], n: int, kind: str, turn: int) -> Pending:
        if self.draft_head is not None and kind == "decode" and self._n_guesses:
            return self.draft_head.send(rows, n, self._n_guesses)
        return super()._send_tokens(rows, n, kind, turn)

    def _start_ahead(self, chunks: list[Chunk]) -> None:
        """Starts only the forward, where one of the chunks draws with a mask that is not known yet."""
        if all(c.sequence.guide is None or c.sequence.guide.next_is_free for c in chunks):
            return super()._start_ahead(chunks)
        if self.draft_head is not None:
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
        """Returns whether the forward that runs ahead is not over."""
        return self._ran_ahead is not None and not self._ran_ahead.query()

    # Log-probabilities.

    def _send_more(self, pending: Pending, kind: str, turn: int) -> None:
        if any(s.request.params.logprobs is not None for s in pending.rows):
            n, out, pending.logprobs = len(pending.tokens), self.workspace.out[kind], self._logprobs[turn]
            for target, source in zip(pending.logprobs, (out.logprob, out.top_ids, out.top_logprobs), strict=True):
                target[:n].copy_(source[:n], non_blocking=True)

    def _read(self, step: Step, results: dict[Sequence, Pending]) -> StepResult:
        result = super()._read(step, results)
        if self.draft_head is not None:
            result.guesses, result.guess_s = self.draft_head.read(step, results, result.tokens)
        for i, (draw, tokens) in enumerate(zip(step.draws, result.tokens, strict=True)):
            pending, k = results[draw.sequence], draw.sequence.request.params.logprobs
            if ends_thought(draw.sequence, tokens[-1]):
                self._drop(draw.sequence)  # the device left it out
            if k is not None and pending.logprobs is not None:
                first = pending.rows[draw.sequence]
                parts = (part[first : first + len(tokens)].tolist() for part in pending.logprobs)
                result.logprobs[i] = [
                    TokenLogprob(token, logprob, list(zip(ids[:k], values[:k], strict=True)))
                    for token, logprob, ids, values in zip(tokens, *parts, strict=True)
                ]
        return result

    def _prefill(self, step: Step, prefills: list[int]) -> Pending:
        pending = super()._prefill(step, prefills)
        for i in prefills:
            if step.chunks[i].prompt_logprobs:
                pending.prompt_logprobs[i] = self._prompt_logprobs(step, prefills, i)
        return pending

    def _prompt_logprobs(self, step: Step, prefills: list[int], i: int) -> list[TokenLogprob]:
        """Log-probabilities of the prompt's tokens behind those of chunk i, from what the prefill left.

        Not recorded, and waits: few ask for it.
        """
        chunk = step.chunks[i]
        sequence, params = chunk.sequence, chunk.sequence.request.params
        ends, n_blocks = self._prefill_batch.layout(step, prefills)
        first = ends[i] - chunk.length + 1
        end = min(chunk.start + chunk.length + 1, sequence.n_prompt)
        targets = sequence.tokens[chunk.start + 1 : end]
        k = params.prompt_logprobs or 0
        entries: list[TokenLogprob] = []
        most = len(self.workspace.prefill.final)
        for at in range(0, len(targets), most):
            part = list(targets[at : at + most])
            n = len(part)

            def device(values: list[int]) -> Tensor:
                return torch.tensor(values, dtype=torch.int32).to(self.device)

            rows = device(list(range(first + at, first + at + n)))
            who = self._adapter_rows(sequence.adapter_slot, n) if sequence.adapter_slot >= 0 else None
            logits = self.model.logits_of(rows, n_blocks, self.workspace.prefill, who)
            logprob = torch.zeros(n, device=self.device)
            top_ids = torch.zeros((n, MAX_LOGPROBS), dtype=torch.int32, device=self.device)
            top = torch.zeros((n, MAX_LOGPROBS), device=self.device)
            prompt_logprobs(
                logits,
                self.plan.n_real,
                device(list(range(n))),
                device(part),
                device([k] * n),
                device([n]),
                logprob,
                top_ids,
                top,
            )
            for token, value, ids, values in zip(part, logprob.tolist(), top_ids.tolist(), top.tolist(), strict=True):
                entries.append(TokenLogprob(token, value, list(zip(ids[:k], values[:k], strict=True))))
        return entries

    def _adapter_rows(self, adapter_slot: int, n: int) -> AdapterRows:
        """Makes groups of n rows that all have this adapter."""
        groups, rows = (torch.tensor(words, dtype=torch.int32) for words in adapter_groups([adapter_slot] * n, n))
        return AdapterRows(groups.to(self.device), rows.view(n, -1).to(self.device))

    # For tests and benches.

    def logits(self, n_rows: int) -> Array:
        """float32 [n_rows, V]: of the first rows of the last prefill, which was of one chunk of one block."""
        found, buffers = [], self.workspace.prefill
        with torch.cuda.stream(self.stream):
            for at in range(0, n_rows, len(buffers.final)):
                rows = torch.arange(at, min(n_rows, at + len(buffers.final)), dtype=torch.int32).to(self.device)
                found.append(self.model.logits_of(rows, 1, buffers).to("cpu", copy=True))
        return np.asarray(torch.cat(found).numpy())

    def replay_ms(
        self, n_rows: int, n_keys: int, n_replays: int = 50, n_rounds: int = 5, adapters: Items[int] = ()
    ) -> float:
        """Median milliseconds of one decode of n_rows rows with n_keys keys each, replayed back to back.
        adapters: slots of the rows' adapters, if they have any.

        No sequence may be open, nor anything cached: pages and state slots are used as they come.
        """
        with torch.cuda.stream(self.stream):
            return self._replay_ms(n_rows, n_keys, n_replays, n_rounds, adapters)

    def _replay_ms(self, n_rows: int, n_keys: int, n_replays: int, n_rounds: int, adapters: Items[int]) -> float:
        n_pages = -(-(n_keys + n_replays * n_rounds + 10) // PAGE_SIZE)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1 << 20)
        request, chunks = Request(id="", prompt_ids=[], params=params), []
        for i in range(n_rows):
            pages = [(i * n_pages + j) % self.plan.n_pages for j in range(n_pages)]
            sequence = Sequence(request, 0, 0, array("i", [1]), n_keys, pages=pages, batch_slot=i, state_slot=i)
            sequence.adapter = HeldAdapter(adapters[i]) if adapters else None
            self.batch_slots.decode(sequence, 1 + i, n_keys - 1)  # in a mixture, equal ones share experts
            chunks.append(Chunk(sequence, n_keys - 1, 1))
        n = self._size(n_rows)
        self.batch_slots.rows(chunks, n)
        self.batch_slots.flush()
        forward = self.decode_of(n, n_keys + n_replays * n_rounds, has_adapters=bool(adapters))
        bodies = [forward.run, self._draws[n].run]
        if self.draft_head is not None:
            bodies.append(self.draft_head.keys[n].run)
        times = []
        for _ in range(n_rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(n_replays):
                for body in bodies:
                    body()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / n_replays)
        return float(sorted(times)[n_rounds // 2])

    def n_launches(self, n_rows: int) -> int:
        """Kernels in the recorded decode of n_rows rows."""
        n = self._size(n_rows)
        of_head = 0 if self.draft_head is None else self.draft_head.keys[n].n_launches
        return self._forwards[n, self._lengths[0]].n_launches + self._draws[n].n_launches + of_head
