"""The common part of the GPU's runners for text and speech: recorded steps, and decodes that run ahead.

Built once: weights, memory and every buffer are allocated, and the steps are recorded as CUDA graphs: a
decode for each number of rows, a prefill for each number of blocks. A step then sends the changes, replays,
copies the drawn tokens to pinned memory and waits for an event.

**Drafts.** A decode may have several rows of a sequence, its last token and tokens that may follow. A row is
a row, and a recording is by their number. Where no sequence has more than one row, nor a window to redo, the
recordings are those of a server without drafts, which are faster with many rows. What counts of their draws,
the host knows once it has read them, and sends it with the next decode. So nothing runs ahead behind a draft,
nor before one (Step.runs_ahead).

**Adapters.** Where a server has room for some, there are recordings in which rows may have adapters. They are
replayed where one does, so that other steps are those of a server without adapters.

**Running ahead.** A decode moves its own tokens and positions on, so the next one needs nothing of the host.
It is started for all sequences that drew a token before that token was read. The host works on one step while
the device runs the next. Its tokens are kept by sequence until the scheduler asks for just that one
(sequence, position), whatever else that step holds. A sequence that ended on the device takes no part; one
that was ended by the host has run for nothing: what it wrote was its own, and comes before whatever its
memory is given to, since all of it is one stream. A preempted one leaves with its state one token further
than the scheduler knows. That token waits here until it is back.

Prefills and decodes of one step are different recordings, so a long prompt beside them does not touch the
decodes' bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from deltic.engine.cache.tiers import Tiers
from deltic.engine.engine import LoadedAdapters
from deltic.engine.messages import EngineInfo, ReplayStats
from deltic.engine.pictures import PictureEncoder
from deltic.engine.step import Chunk, Progress, Sequence, Step, StepResult
from deltic.models.vision.pixels import PictureRules
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.blocks import PrefillInputs, Rows
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.sample import Draws, sample
from deltic.runtime.gpu.ahead import Ahead, Pending
from deltic.runtime.gpu.batch_slots import BatchSlots
from deltic.runtime.gpu.buffers import MAX_SEGMENTS, Workspace
from deltic.runtime.gpu.copies import DeviceCopies, open_tiers
from deltic.runtime.gpu.prefill import PrefillBatch
from deltic.runtime.gpu.record import Body, Recording, record_all
from deltic.runtime.info import engine_info
from deltic.runtime.plan import Plan

Job = tuple[dict[Any, Recording], object, Body]
"""Recording to be made: where it goes, under which key, and what it starts."""

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512, 640, 768, 896)
"""Rows of the recorded decodes. Products take many rows by 128, and other kernels leave rows that are not in
use at once, so that finer steps there would only take time at a start.
"""
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Blocks of the recorded prefills."""
LENGTHS = (512, 4096)
"""Keys up to which decodes have recordings of their own: with fewer splits of attention to skip."""
N_PENDING = 8
"""Results on their way to the host, at most: of this step's two kinds of draws, its prefill, and the decode
that runs ahead, twice.
"""


class GpuRunner(ABC):
    """A model on a GPU, with its memory. Not thread-safe: one engine loop owns it.

    Without a GPU it runs in Triton's interpreter, unrecorded: for tests. A kind of model (text.py, speech.py)
    allocates memory and buffers, says what a decode and a prefill start, and calls `_record_all` when it is
    complete.
    """

    info: EngineInfo
    pictures: PictureEncoder | None = None
    """Encoder of pictures. None: prompts have no pictures."""
    adapters: LoadedAdapters | None = None
    """Adapters that are loaded. None: there is no room for any."""

    def __init__(
        self,
        plan: Plan[Any],
        levers: Levers,
        workspace: Workspace,
        batch_slots: BatchSlots,
        pages: list[Tensor],
        states: list[Tensor],
        has_head: bool = False,
    ) -> None:
        """pages, states: what makes up a page and a state, with the page or the state slot as first
        dimension. has_head: whether a draft head runs behind prefills.
        """
        self.plan, self.levers, self.workspace, self.batch_slots = plan, levers, workspace, batch_slots
        self.device = pages[0].device
        self.is_gpu = self.device.type == "cuda"
        self.max_logit_rows = plan.max_num_seqs + PAGE_SIZE
        self.tiers: Tiers | None = None  # until open_tiers
        self.stream = torch.cuda.Stream() if self.is_gpu else None
        self._pages, self._states = pages, states
        self._row_sizes = _up_to(plan.n_decode_rows, ROWS)
        self._block_sizes = _up_to(plan.max_step_tokens // PAGE_SIZE, BLOCKS)
        self._lengths = _up_to(plan.max_model_len, LENGTHS)
        self._prefill_batch = PrefillBatch(
            batch_slots,
            self._block_sizes,
            plan.max_num_seqs,
            plan.n_pages,
            self.device,
            has_head,
            plan.max_picture_tokens > 0,
            plan.adapters.n > 0,
        )
        self._forwards: dict[tuple[int, int], Recording] = {}  # of decodes, by rows and length
        self._drafted: dict[tuple[int, int], Recording] = {}  # the same, where some may be drafts
        self._adapted: dict[tuple[int, int], Recording] = {}  # where some have adapters, and may be drafts
        self._prefills: dict[int, Recording] = {}
        self._adapted_prefills: dict[int, Recording] = {}
        self._tokens = [self._pinned(plan.n_decode_rows) for _ in range(N_PENDING)]
        self._turn = 0
        self._ahead: dict[Sequence, Ahead] = {}
        self.replays = ReplayStats()

    def _pinned(self, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Memory of the host for results."""
        return torch.empty(size, dtype=dtype, pin_memory=self.is_gpu)

    def _make_info(self, rules: PictureRules | None = None) -> EngineInfo:
        return engine_info(
            self.plan,
            torch.cuda.get_device_name() if self.is_gpu else "interpreted",
            rules,
            on_gpu=self.is_gpu,
            kernels=f"Triton {triton.__version__}",
            canonical_decode=False,
            n_lookahead=1,
            block_size=PAGE_SIZE,
            max_prefill_seqs=min(self._block_sizes[-1], MAX_SEGMENTS),
        )

    def open_tiers(self, directory: Path | None, disk_bytes: int, model: str) -> Tiers:
        """Starts the tiers below the pools, on disk too where there is a directory.

        Raises ConfigError if that cannot be used.
        """
        self.tiers = open_tiers(self.copies(), self.plan, directory, disk_bytes, model)
        return self.tiers

    def copies(self) -> DeviceCopies:
        """Makes copies of the runner's pages and states."""
        return DeviceCopies(self._pages, self._states, self.stream)

    # Recording.

    def _record_all(self, progress: Progress, are_replayed: bool = False) -> None:
        """Every decode and every prefill, the largest first. are_replayed: see `record_all`."""
        forwards = self._decode_jobs(self._forwards, self._forward_body, self._size(self.plan.max_num_seqs))
        jobs = self._draft_jobs() + forwards + self._draw_jobs()
        for n in reversed(self._block_sizes):
            inputs = self._prefill_batch.of(n).inputs
            if inputs.adapters is not None:
                jobs.append((self._adapted_prefills, n, self._prefill_body(n, inputs)))
            jobs.append((self._prefills, n, self._prefill_body(n, replace(inputs, adapters=None, logit_adapters=None))))
        self.batch_slots.flush()  # no row is in use
        bodies = [body for _, _, body in jobs]
        recorded = record_all(
            bodies, self.stream, self.levers, lambda done: progress("record", done), self.replays, are_replayed
        )
        for (where, key, _), recording in zip(jobs, recorded, strict=True):
            where[key] = recording

    @abstractmethod
    def _forward_body(self, n: int, max_len: int) -> Body:
        """Makes the body of a decode of n rows, none with more than max_len keys.

        With its draws, unless `_draw_jobs` has them.
        """

    def _decode_jobs(
        self, where: dict[tuple[int, int], Recording], body: Callable[[int, int], Body], most: int
    ) -> list[Job]:
        """Forwards of decodes of up to `most` rows, by rows and length."""
        return [
            (where, (n, length), body(n, length))
            for length in reversed(self._lengths)
            for n in reversed(self._row_sizes)
            if n <= most
        ]

    def _draft_jobs(self) -> list[Job]:
        """Forwards of decodes of which some rows may be drafts."""
        return []

    def _draw_jobs(self) -> list[Job]:
        """Draws of decodes that are recorded apart from their forwards."""
        return []

    def _prefill_body(self, n_blocks: int, inputs: PrefillInputs) -> Body:
        """Makes the body of a prefill of n_blocks blocks and the draws behind it."""
        draws = self._prefill_batch.of(n_blocks).draws

        def body() -> None:
            self._draw("prefill", self._prefill_logits(n_blocks, inputs), draws)

        return body

    @abstractmethod
    def _prefill_logits(self, n_blocks: int, inputs: PrefillInputs) -> Tensor:
        """Starts a prefill. Returns the logits of the rows asked for, float32 [G, V]."""

    def _draw(self, kind: str, logits: Tensor, draws: Draws | Rows) -> None:
        """Starts the draws of a decode, or of a prefill."""
        w = self.workspace
        sample(logits, self.batch_slots.n_real, draws, w.parameters, w.sample, w.out[kind], levers=self.levers)

    def recordings(self) -> list[Recording]:
        """Recordings that serving will replay, all of them."""
        return [*self._forwards.values(), *self._prefills.values()]

    # A step.

    def step(self, step: Step) -> StepResult:
        """Runs one step, and starts the decode that follows it.

        A chunk starts from its sequence's `start_slot`, if any, else from its `state_slot`, or at 0 from the
        zero state, and leaves its final state in `state_slot` and those of its snapshots where they say.
        """
        with torch.cuda.stream(self.stream):
            return self._step(step)

    def _step(self, step: Step) -> StepResult:
        following = self._following(step)  # now: the device need not wait for it between two replays
        ran: list[Sequence] = []
        fresh: list[Chunk] = []
        prefills: list[int] = []
        for i, chunk in enumerate(step.chunks):
            sequence, ahead = chunk.sequence, self._ahead.get(chunk.sequence)
            if chunk.is_decode and ahead is not None and ahead.position == chunk.start:
                ran.append(sequence)
                continue
            self._drop(sequence)
            if chunk.is_decode:
                self.batch_slots.decode(sequence, sequence.tokens[chunk.start], chunk.start, drafts=chunk.drafts)
                fresh.append(chunk)
            else:
                prefills.append(i)
        results = self._take_over(ran)
        if fresh:
            results |= dict.fromkeys((chunk.sequence for chunk in fresh), self._decode(fresh))
        prefilled = self._prefill(step, prefills) if prefills else None
        if prefilled is not None:
            results |= dict.fromkeys(prefilled.rows, prefilled)
        self._copy(step)
        self._run_ahead(following)
        if prefilled is not None:
            prefilled.wait()  # also where nothing was drawn: a step takes as long as what it runs
        result = self._read(step, results)
        if prefilled is not None:
            result.prompt_logprobs = prefilled.prompt_logprobs
        return result

    def _take_over(self, sequences: list[Sequence]) -> dict[Sequence, Pending]:
        """Takes over what was drawn ahead of these sequences.

        One that was preempted since then is elsewhere now, and goes on there.
        """
        results: dict[Sequence, Pending] = {}
        for sequence in sequences:
            ahead = self._ahead.pop(sequence)
            assert ahead.pending is not None
            results[sequence] = ahead.pending
            if ahead.n_preempted != sequence.n_preempted:
                results[sequence] = own = ahead.pending.only(sequence)
                token = int(own.tokens[0])
                is_left_out = token < 0 or ends_thought(sequence, token)
                self.batch_slots.decode(sequence, token, ahead.position + 1, is_left_out)
        return results

    def _size(self, n: int) -> int:
        """Rows of the smallest recordings for n of them."""
        return next(size for size in self._row_sizes if size >= n)

    def decode_of(self, n_rows: int, n_keys: int, has_drafts: bool = False, has_adapters: bool = False) -> Recording:
        """The smallest recorded forward of so many rows, none with more than n_keys keys."""
        length = next(length for length in self._lengths if length >= n_keys)
        recorded = self._adapted if has_adapters else self._drafted if has_drafts else self._forwards
        return recorded[self._size(n_rows), length]

    def _forward(self, chunks: list[Chunk]) -> None:
        """Starts the forward of these decodes."""
        n_rows = sum(chunk.length for chunk in chunks)
        self.batch_slots.rows(chunks, self._size(n_rows))
        self.batch_slots.flush()
        has_drafts = any(chunk.length > 1 or chunk.n_redo for chunk in chunks)
        has_adapters = any(chunk.sequence.adapter_slot >= 0 for chunk in chunks)
        n_keys = max(chunk.start + chunk.length for chunk in chunks)
        self.decode_of(n_rows, n_keys, has_drafts, has_adapters).run()

    def _decode(self, chunks: list[Chunk]) -> Pending:
        """A forward, and the draws behind it."""
        self._forward(chunks)
        return self._send_decoded(chunks)

    def _prefill(self, step: Step, prefills: list[int]) -> Pending:
        """Starts a prefill of these chunks and the draws behind them."""
        n_blocks, draws = self._prefill_batch.fill(step, prefills)
        self.batch_slots.flush()
        self._prefill_batch.send(n_blocks)
        has_adapters = any(step.chunks[i].sequence.adapter_slot >= 0 for i in prefills)
        (self._adapted_prefills if has_adapters else self._prefills)[n_blocks].run()
        return self._send({draw.sequence: i for i, draw in enumerate(draws)}, len(draws), "prefill")

    def _send_decoded(self, chunks: list[Chunk]) -> Pending:
        """Sends results as `_send` does, behind a decode of these chunks."""
        rows, n = dict[Sequence, int](), 0
        for chunk in chunks:
            rows[chunk.sequence] = n
            n += chunk.length
        return self._send(rows, n, "decode")

    def _send(self, rows: dict[Sequence, int], n: int, kind: str) -> Pending:
        """Starts the way of n draws to the host: those of each sequence begin in its row. The buffers are
        used in turn.
        """
        turn = self._turn
        self._turn = (turn + 1) % N_PENDING
        pending = self._send_tokens(rows, n, kind, turn)
        self._send_more(pending, kind, turn)
        if self.is_gpu:
            pending.event = torch.cuda.Event()
            pending.event.record()
        return pending

    def _send_tokens(self, rows: dict[Sequence, int], n: int, kind: str, turn: int) -> Pending:
        """Starts the way of the tokens, in this turn's buffer."""
        pending = Pending(rows, self._tokens[turn][:n])
        pending.tokens.copy_(self.workspace.out[kind].token[:n], non_blocking=True)
        return pending

    @abstractmethod
    def _send_more(self, pending: Pending, kind: str, turn: int) -> None:
        """Starts the way of what comes with the tokens, in this turn's buffers."""

    def _copy(self, step: Step) -> None:
        """States and pages of sequences that fork off a finished prompt."""
        for source, target in step.slot_copies:
            for states in self._states:
                states[target].copy_(states[source])
        for source, target in step.page_copies:
            for pages in self._pages:
                pages[target].copy_(pages[source])

    # Running ahead.

    def _following(self, step: Step) -> list[Chunk]:
        """The next decodes of those that draw in this step, where they can be started: there is a page for
        one token more and, for one that speaks, a text.
        """
        following = []
        for draw in step.draws if self.levers.run_ahead and step.runs_ahead else []:
            sequence, request = draw.sequence, draw.sequence.request
            position = len(sequence.tokens)
            is_last = sequence.n_generated + 1 >= request.params.max_tokens
            lacks_text = request.speech is not None and not request.speech.knows_text(sequence.n_generated)
            if is_last or lacks_text or position >= len(sequence.pages) * PAGE_SIZE:
                continue
            self.batch_slots.refresh(sequence)
            following.append(Chunk(sequence, position, 1))
        return following

    def _run_ahead(self, chunks: list[Chunk]) -> None:
        """Starts these, the next decodes."""
        # What nobody asked for is of sequences that have ended, or that have no chunk in this step: preempted
        # ones, mostly.
        for sequence in [s for s in self._ahead if s.finish_reason is not None]:
            self._drop(sequence)
        self._ahead = {s: ahead.only(s) for s, ahead in self._ahead.items()}
        if chunks:
            self._start_ahead(chunks)

    def _start_ahead(self, chunks: list[Chunk]) -> None:
        self._put_ahead(chunks, self._decode(chunks))

    def _put_ahead(self, chunks: list[Chunk], pending: Pending | None) -> None:
        """Notes that these run ahead; pending: None where nothing is drawn from them yet."""
        self._ahead |= {c.sequence: Ahead(c.start, pending, c.sequence.n_preempted) for c in chunks}

    def _drop(self, sequence: Sequence) -> None:
        """Forgets what ran ahead of it."""
        self._ahead.pop(sequence, None)

    def is_busy(self) -> bool:
        """Returns whether a forward whose draws wait for masks is still running. Here nothing waits for
        masks.
        """
        return False

    # Reading.

    def _read(self, step: Step, results: dict[Sequence, Pending]) -> StepResult:
        """Waits for the tokens of this step. The decode that runs ahead goes on."""
        for pending in {id(p): p for p in results.values()}.values():
            pending.wait()
        tokens = []
        for draw in step.draws:
            pending, chunk = results[draw.sequence], step.chunks[draw.chunk]
            first = pending.rows[draw.sequence]
            tokens.append(chunk.accepted(pending.tokens[first : first + 1 + len(chunk.drafts)].tolist()))
        return StepResult(tokens, [None] * len(tokens), {})


def ends_thought(sequence: Sequence, token: int) -> bool:
    """Returns whether the token is one behind which nothing runs ahead, though the answer goes on."""
    constraint = sequence.request.params.constraint
    return constraint is not None and token == constraint.think_end_id


def _up_to(most: int, sizes: Items[int]) -> list[int]:
    """Returns the sizes below the most, and the most."""
    return [n for n in sizes if n < most] + [most]
