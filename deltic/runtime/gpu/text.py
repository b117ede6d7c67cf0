"""A GPU's memory and its recorded steps.

Built once: weights, the two memories and every buffer are allocated, and the steps are recorded as CUDA graphs: a decode's forward
and its draws for each number of rows, a prefill for each number of blocks. A step is then: send what changed, replay, copy the drawn
tokens to pinned memory, and wait for an event.

**Running ahead.** A decode moves its own tokens and positions on, so the next one needs nothing of the host. It is started for
all sequences that drew a token before that token was read; the host works on one step while the device runs the next. Its
tokens are kept by sequence until the scheduler asks for just that one (sequence, position), whatever else that step holds. A
sequence that ended on the device takes no part; one that was ended by the host has run for nothing: what it wrote was its own,
and comes before whatever its memory is given to, since all of it is one stream. A preempted one leaves with its state one token
further than the scheduler knows; that token waits here until it is back.

**Masks.** A sequence that follows a grammar draws with a mask, which the host makes from the token before. So where one decodes, only
the forward runs ahead, of all of them: masks are made meanwhile, and the next step begins by drawing. One whose mask is late
keeps its logits for a later step. In a thought nothing is masked, but nothing runs ahead behind the token that ends it.

Prefills and decodes of one step are different recordings, so a long prompt beside them does not touch the decodes' bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deltic.engine.cache.tiers import Tiers
from deltic.engine.messages import MAX_LOGPROBS, EngineInfo, Request, SamplingParams, TokenLogprob
from deltic.engine.step import Sequence, Step, StepResult
from deltic.models.qwen.gpu import GpuMemory, QwenGpu
from deltic.models.qwen.weights import Weights
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.sample import prompt_logprobs, sample, sample_decode
from deltic.runtime.cpu.plan import Plan
from deltic.runtime.cpu.text import even_context
from deltic.runtime.gpu.ahead import Ahead, Pending, Undrawn
from deltic.runtime.gpu.copies import DeviceCopies
from deltic.runtime.gpu.places import Places
from deltic.runtime.gpu.plan import MAX_SEGMENTS, GpuWorkspace, gpu_workspace
from deltic.runtime.gpu.prefill import PrefillBatch
from deltic.runtime.gpu.record import Body, Recording, record_all

Progress = Callable[[str, float], None]

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Rows of the recorded decodes."""
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Blocks of the recorded prefills."""
LENGTHS = (512, 4096)
"""Keys up to which decodes have recordings of their own: with fewer splits of attention to skip."""
N_PENDING = 8
"""Results on their way to the host, at most: of this step's two kinds of draws, its prefill, and the decode that runs ahead, twice."""


class GpuRunner:
    """The model on a GPU, with its memory. Not thread-safe: one engine loop owns it.

    Without a GPU it runs in Triton's interpreter, unrecorded: for tests.
    """

    def __init__(
        self, plan: Plan, weights: Weights, levers: Levers, progress: Progress = lambda stage, done: None
    ) -> None:
        shape, device = plan.shape, weights.norm.device
        self.plan, self.levers, self.device = plan, levers, device
        self.is_gpu = device.type == "cuda"
        self.max_logit_rows = plan.max_num_seqs + PAGE_SIZE
        self.tiers: Tiers | None = None  # until open_tiers
        self.stream = torch.cuda.Stream() if self.is_gpu else None

        def allocate(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.memory = GpuMemory(
            pages=torch.zeros(
                (plan.n_pages + 1, shape.n_attn_layers, 2, shape.n_kv_heads, PAGE_SIZE, shape.head_dim),
                dtype=torch.bfloat16, device=device,
            ),
            states=torch.zeros(
                (plan.n_slots, shape.n_gdn_layers, shape.gdn_n_v_heads, shape.gdn_v_dim, shape.gdn_k_dim),
                dtype=torch.float32, device=device,
            ),
            columns=torch.zeros(
                (plan.n_slots, shape.n_gdn_layers, plan.n_columns, shape.conv_channels), dtype=torch.bfloat16, device=device
            ),
        )  # fmt: skip
        self.workspace: GpuWorkspace = gpu_workspace(plan, levers, allocate)
        self.model = QwenGpu(shape, weights, plan.max_model_len, levers)
        self.places = Places(self.workspace, shape.eos_token_ids, plan.n_real)
        self._row_sizes = [n for n in ROWS if n < plan.max_num_seqs] + [plan.max_num_seqs]
        n_blocks = plan.max_step_tokens // PAGE_SIZE
        self._block_sizes = [n for n in BLOCKS if n < n_blocks] + [n_blocks]
        self._lengths = [n for n in LENGTHS if n < plan.max_model_len] + [plan.max_model_len]
        self._prefill_batch = PrefillBatch(
            self.places, self._block_sizes, plan.max_num_seqs, plan.n_pages, device
        )
        n_rows = plan.max_num_seqs
        self._undrawn = Undrawn(self.workspace.decode.logits.view(-1, shape.vocab_size), n_rows)
        self._forwards: dict[tuple[int, int], Recording] = {}
        self._draws: dict[int, Recording] = {}  # behind a forward
        self._late_draws: dict[int, Recording] = {}  # of what is in `_undrawn`
        self._prefills: dict[int, Recording] = {}
        self._free: list[tuple[Tensor, ...]] = [self._pinned() for _ in range(N_PENDING)]
        self._turn = 0
        self._ahead: dict[Sequence, Ahead] = {}
        self._ran_ahead: torch.cuda.Event | None = None
        self._record_all(progress)
        self.info = EngineInfo(
            model_name="",
            vocab_size=plan.n_real,
            eos_token_ids=list(shape.eos_token_ids),
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_step_tokens=plan.max_step_tokens,
            n_pages=plan.n_pages,
            n_slots=plan.n_slots,
            device=torch.cuda.get_device_name() if self.is_gpu else "interpreted",
            on_gpu=self.is_gpu,
            page_bytes=shape.page_bytes(PAGE_SIZE),
            state_bytes=plan.state_bytes,
            even_context=even_context(shape),
            canonical_decode=False,
            n_lookahead=1,
            block_size=PAGE_SIZE,
            max_prefill_seqs=min(n_blocks, MAX_SEGMENTS),
        )

    def open_tiers(self, directory: Path | None, disk_bytes: int, model: str) -> None:
        """Starts the tiers below the pools, on disk too where there is a directory. Raises ConfigError if that cannot be
        used."""
        memory = self.memory
        copies = DeviceCopies([memory.pages], [memory.states, memory.columns], self.stream)
        host = (
            np.empty((self.plan.n_host_units, self.info.page_bytes), np.uint8)
            if self.plan.n_host_units
            else None
        )
        self.tiers = Tiers(
            copies.page, copies.state, host, copies.state_bytes, directory, disk_bytes, model, copies
        )
        self.info.notices += self.tiers.notices

    def _pinned(self) -> tuple[Tensor, ...]:
        n, pin = self.plan.max_num_seqs, self.is_gpu
        return (
            torch.empty(n, dtype=torch.int32, pin_memory=pin),
            torch.empty(n, dtype=torch.float32, pin_memory=pin),
            torch.empty((n, MAX_LOGPROBS), dtype=torch.int32, pin_memory=pin),
            torch.empty((n, MAX_LOGPROBS), dtype=torch.float32, pin_memory=pin),
        )

    # Recording.

    def _record_all(self, progress: Progress) -> None:
        """Every decode and every prefill."""
        jobs: list[tuple[Body, Callable[[Recording], None]]] = []
        for length in reversed(self._lengths):
            for n in reversed(self._row_sizes):
                jobs.append((self._forward_body(n, length), _setter(self._forwards, (n, length))))
        for n in reversed(self._row_sizes):
            jobs.append((self._draw_body(n), _setter(self._draws, n)))
            jobs.append((self._late_draw_body(n), _setter(self._late_draws, n)))
        for n in reversed(self._block_sizes):
            jobs.append((self._prefill_body(n), _setter(self._prefills, n)))
        self.places.flush()  # no row is in use
        bodies = [body for body, _ in jobs]
        recorded = record_all(bodies, self.stream, self.levers, lambda done: progress("record", done))
        for (_, put), recording in zip(jobs, recorded, strict=True):
            put(recording)

    def _forward_body(self, n: int, max_len: int) -> Callable[[], None]:
        def body() -> None:
            w = self.workspace
            self.model.decode(n, w.places, w.decode, self.memory, max_len)

        return body

    def _draw_body(self, n: int) -> Callable[[], None]:
        def body() -> None:
            w, b = self.workspace, self.workspace.decode
            tokens, logprobs, top_ids, top = w.out["decode"]
            sample_decode(
                self._undrawn.logits[:n], self.plan.n_real, b.row_place[:n], b.row_slot[:n], b.row_position[:n],
                places=w.parameters, scratch=w.sample, out_token=tokens[:n], out_logprob=logprobs[:n], top_ids=top_ids[:n],
                top_logprobs=top[:n], levers=self.levers,
            )  # fmt: skip

        return body

    def _late_draw_body(self, n: int) -> Callable[[], None]:
        draw_row, draw_place, draw_position = self._undrawn.draws[:, :n]

        def body() -> None:
            w = self.workspace
            tokens, logprobs, top_ids, top = w.out["decode"]
            sample(
                self._undrawn.logits, self.plan.n_real, draw_row=draw_row, draw_place=draw_place, draw_position=draw_position,
                places=w.parameters, scratch=w.sample, out_token=tokens, out_logprob=logprobs, top_ids=top_ids,
                top_logprobs=top, levers=self.levers,
            )  # fmt: skip

        return body

    def _prefill_body(self, n_blocks: int) -> Callable[[], None]:
        batch = self._prefill_batch.of(n_blocks)

        def body() -> None:
            w = self.workspace
            logits = self.model.prefill(n_blocks, batch.inputs, w.places.page_table, w.prefill, self.memory)
            tokens, logprobs, top_ids, top = w.out["prefill"]
            sample(
                logits, self.plan.n_real, draw_row=batch.draw_row, draw_place=batch.draw_place,
                draw_position=batch.draw_position, places=w.parameters, scratch=w.sample, out_token=tokens,
                out_logprob=logprobs, top_ids=top_ids, top_logprobs=top, levers=self.levers,
            )  # fmt: skip

        return body

    # A step.

    def step(self, step: Step) -> StepResult:
        """Runs one step, and starts the decode that follows it.

        A chunk starts from its sequence's `start_slot`, if any, else from its `slot`, or at 0 from the zero state, and leaves its
        final state in `slot` and those of its snapshots where they say.
        """
        with torch.cuda.stream(self.stream):
            return self._step(step)

    def _step(self, step: Step) -> StepResult:
        results: dict[Sequence, Pending] = {}
        fresh: list[Sequence] = []
        late: dict[Sequence, int] = {}
        prefills: list[int] = []
        self.places.put_guides([draw.sequence for draw in step.draws if draw.sequence.guide is not None])
        following, n_next_keys = self._following(
            step
        )  # now, so that the device need not wait for it between two replays
        for i, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            ahead, row = self._ahead.pop(sequence, None), self._undrawn.take(sequence)
            if not chunk.is_decode:
                prefills.append(i)
            elif ahead is None or ahead.position != chunk.start:
                self._feed(sequence, sequence.tokens[chunk.start], chunk.start)
                fresh.append(sequence)
            else:
                is_elsewhere = ahead.n_preempted != sequence.n_preempted
                if row is not None:
                    late[sequence] = row
                    if is_elsewhere:
                        self._move_in(sequence)
                elif ahead.pending is not None:
                    results[sequence] = ahead.pending.only(sequence) if is_elsewhere else ahead.pending
                    if is_elsewhere:
                        token = int(results[sequence].tokens[0])
                        self._feed(
                            sequence, token, chunk.start + 1, token < 0 or _ends_thought(sequence, token)
                        )
        if late:
            results |= dict.fromkeys(late, self._draw_late(late))
        if fresh:
            pending = self._decode(fresh, max(s.n_computed for s in fresh) + 1)
            results |= dict.fromkeys(fresh, pending)
        logprobs: dict[int, list[TokenLogprob]] = {}
        prefilled: Pending | None = None
        if prefills:
            prefilled = self._prefill(step, prefills)
            results |= dict.fromkeys(prefilled.rows, prefilled)
            for i in prefills:
                if step.chunks[i].prompt_logprobs:
                    logprobs[i] = self._prompt_logprobs(step, prefills, i)
        self._copy(step)
        self._run_ahead(following, n_next_keys)
        if prefilled is not None:
            prefilled.wait()  # also where nothing was drawn: a step takes as long as what it runs
        return self._read(step, results, logprobs)

    def _move_in(self, sequence: Sequence) -> None:
        """The sequence has another place and another slot than when its logits were computed."""
        place, slot = sequence.place, sequence.slot
        assert place is not None and slot is not None and sequence.start_slot is None
        self.places.take(place, sequence)
        self.places.put_pages(place, sequence)
        self.places.begin(place, slot)

    def _feed(self, sequence: Sequence, token: int, position: int, done: bool = False) -> None:
        """Has the sequence's next decode read this token; done: has the next leave the sequence out."""
        place, slot = sequence.place, sequence.slot
        assert place is not None and slot is not None and sequence.start_slot is None
        self.places.take(place, sequence)
        self.places.put_pages(place, sequence)
        self.places.feed(place, token, position, slot, done)
        # Where what was lost comes back, a decode without its mask has left another token there.
        self.places.remember(place, sequence, token, position)

    def _size(self, n: int) -> int:
        """Rows of the smallest recordings for n of them."""
        return next(size for size in self._row_sizes if size >= n)

    def _forward(self, sequences: list[Sequence], n_keys: int) -> None:
        """Starts the forward of these sequences, none of which has more than n_keys keys in it; what is undrawn is kept."""
        n = self._size(len(sequences))
        self.places.rows([s.place for s in sequences if s.place is not None], n)
        self.places.flush()
        self._undrawn.keep()
        self._forwards[n, next(length for length in self._lengths if length >= n_keys)].run()

    def _decode(self, sequences: list[Sequence], n_keys: int) -> Pending:
        """A forward, and the draws behind it."""
        self._forward(sequences, n_keys)
        self._draws[self._size(len(sequences))].run()
        return self._send(sequences, "decode")

    def _draw_late(self, rows: dict[Sequence, int]) -> Pending:
        """Starts the draws of sequences whose forwards ran ahead, from these rows of logits."""
        self.places.flush()
        places = [s.place for s in rows if s.place is not None]
        with self.places.beside:
            self._undrawn.send([*rows.values()], places, [len(s.tokens) for s in rows])
        self._late_draws[self._size(len(rows))].run()
        return self._send([*rows], "decode")

    def _send(self, sequences: list[Sequence], kind: str) -> Pending:
        """Starts the way of the drawn tokens to the host."""
        tokens, *rest = self._free[self._turn]
        self._turn = (self._turn + 1) % len(self._free)
        drawn, *more = self.workspace.out[kind]
        n = len(sequences)
        tokens[:n].copy_(drawn[:n], non_blocking=True)
        logprobs = None
        if any(s.request.params.logprobs is not None for s in sequences):
            for target, source in zip(rest, more, strict=True):
                target[:n].copy_(source[:n], non_blocking=True)
            logprobs = rest[0], rest[1], rest[2]
        event = None
        if self.is_gpu:
            event = torch.cuda.Event()
            event.record()
        return Pending({s: i for i, s in enumerate(sequences)}, tokens, logprobs, event)

    def _following(self, step: Step) -> tuple[list[Sequence], int]:
        """Those that draw in this step and whose next decode can be started: they have a page for one token more. And the most keys
        of one of them."""
        sequences, n_keys = [], 0
        for draw in step.draws if self.levers.run_ahead else []:
            sequence = draw.sequence
            position, params = len(sequence.tokens), sequence.request.params
            is_last = position + 1 - sequence.n_prompt >= params.max_tokens
            if is_last or position >= len(sequence.pages) * PAGE_SIZE:
                continue
            assert sequence.place is not None
            self.places.put_pages(sequence.place, sequence)
            sequences.append(sequence)
            n_keys = max(n_keys, position + 1)
        return sequences, n_keys

    def _run_ahead(self, sequences: list[Sequence], n_keys: int) -> None:
        """Starts their next decode; only its forward, where one of them draws with a mask that is not known yet."""
        # What nobody asked for is of sequences that have ended, or that have no chunk in this step: preempted ones, mostly.
        for sequence in [s for s in self._ahead if s.finish_reason is not None]:
            self._drop(sequence)
        self._ahead = {s: ahead.only(s) for s, ahead in self._ahead.items()}
        pending = None
        if not all(s.guide is None or s.guide.next_is_free for s in sequences):
            sequences = sequences[: self._undrawn.n_free]
            if sequences:
                self._forward(sequences, n_keys)
                self._undrawn.put(sequences)
                if self.is_gpu:
                    self._ran_ahead = torch.cuda.Event()
                    self._ran_ahead.record()
        elif sequences:
            pending = self._decode(sequences, n_keys)
        self._ahead |= {s: Ahead(len(s.tokens), pending, s.n_preempted) for s in sequences}

    def _drop(self, sequence: Sequence) -> None:
        """Forgets what ran ahead of it."""
        self._ahead.pop(sequence, None)
        self._undrawn.take(sequence)

    def _prefill(self, step: Step, prefills: list[int]) -> Pending:
        """Starts a prefill of these chunks and the draws behind them."""
        n_blocks, draws = self._prefill_batch.fill(step, prefills)
        self.places.flush()
        self._prefill_batch.send(n_blocks)
        self._prefills[n_blocks].run()
        return self._send([draw.sequence for draw in draws], "prefill")

    def _prompt_logprobs(self, step: Step, prefills: list[int], i: int) -> list[TokenLogprob]:
        """Log-probabilities of the prompt's tokens behind those of chunk i, from what the prefill left. Not recorded, and waits:
        few ask for it."""
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

            def device(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
                return torch.tensor(values, dtype=dtype).to(self.device)

            rows = device(list(range(first + at, first + at + n)))
            logits = self.model.logits_of(rows, n_blocks, self.workspace.prefill)
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
            for token, value, ids, values in zip(
                part, logprob.tolist(), top_ids.tolist(), top.tolist(), strict=True
            ):
                entries.append(TokenLogprob(token, value, list(zip(ids[:k], values[:k], strict=True))))
        return entries

    def _copy(self, step: Step) -> None:
        """States and pages of sequences that fork off a finished prompt."""
        memory = self.memory
        for source, target in step.slot_copies:
            memory.states[target].copy_(memory.states[source])
            memory.columns[target].copy_(memory.columns[source])
        for source, target in step.page_copies:
            memory.pages[target].copy_(memory.pages[source])

    def _read(
        self, step: Step, results: dict[Sequence, Pending], prompt: dict[int, list[TokenLogprob]]
    ) -> StepResult:
        """Waits for the tokens of this step; the decode that runs ahead goes on."""
        for pending in {id(p): p for p in results.values()}.values():
            pending.wait()
        arrays = {id(p): p.tokens.numpy() for p in results.values()}
        result = StepResult([], [], prompt)
        for draw in step.draws:
            pending = results[draw.sequence]
            row = pending.rows[draw.sequence]
            token, k = int(arrays[id(pending)][row]), draw.sequence.request.params.logprobs
            result.tokens.append([token])
            if _ends_thought(draw.sequence, token):
                self._drop(draw.sequence)  # the device left it out
            entries = None
            if k is not None and pending.logprobs is not None:
                logprob, ids, values = (t[row] for t in pending.logprobs)
                top = list(zip(ids[:k].tolist(), values[:k].tolist(), strict=True))
                entries = [TokenLogprob(token, float(logprob), top)]
            result.logprobs.append(entries)
        return result

    def is_busy(self) -> bool:
        """Whether the forward that runs ahead is not over."""
        return self._ran_ahead is not None and not self._ran_ahead.query()

    # For tests and benches.

    def replay_ms(self, n_rows: int, n_keys: int, n_replays: int = 50, n_rounds: int = 5) -> float:
        """Median milliseconds of one decode of n_rows rows with n_keys keys each, replayed back to back. No sequence may be open,
        nor anything cached: pages and slots are used as they come."""
        with torch.cuda.stream(self.stream):
            return self._replay_ms(n_rows, n_keys, n_replays, n_rounds)

    def _replay_ms(self, n_rows: int, n_keys: int, n_replays: int, n_rounds: int) -> float:
        n_pages = -(-(n_keys + n_replays * n_rounds + 10) // PAGE_SIZE)
        for i in range(n_rows):
            pages = [(i * n_pages + j) % self.plan.n_pages for j in range(n_pages)]
            request = Request(
                id="",
                prompt_ids=[],
                params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1 << 20),
            )
            sequence = Sequence(request, 0, 0, array("i", [1]), n_keys, pages=pages)
            self.places.take(i, sequence)
            self.places.put_pages(i, sequence)
            self.places.feed(i, 1, n_keys - 1, i)
        n = self._size(n_rows)
        self.places.rows(list(range(n_rows)), n)
        self.places.flush()
        forward = self._forwards[n, next(m for m in self._lengths if m >= n_keys + n_replays * n_rounds)].run
        draw = self._draws[n].run
        times = []
        for _ in range(n_rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(n_replays):
                forward()
                draw()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / n_replays)
        return float(sorted(times)[n_rounds // 2])

    def recordings(self) -> list[Recording]:
        """All of them: what serving will replay."""
        return [
            r
            for kind in (self._forwards, self._draws, self._late_draws, self._prefills)
            for r in kind.values()
        ]

    def n_launches(self, n_rows: int) -> int:
        """Kernels in the recorded decode of n_rows rows."""
        n = self._size(n_rows)
        return self._forwards[n, self._lengths[0]].n_launches + self._draws[n].n_launches


def _ends_thought(sequence: Sequence, token: int) -> bool:
    """Whether the token is one behind which nothing runs ahead, though the answer goes on."""
    constraint = sequence.request.params.constraint
    return constraint is not None and token == constraint.think_end_id


def _setter(where: dict, key: object) -> Callable[[Recording], None]:  # type: ignore[type-arg]
    def put(recording: Recording) -> None:
        where[key] = recording

    return put
