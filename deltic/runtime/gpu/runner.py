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
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from deltic.engine.cache.tiers import Tiers
from deltic.engine.engine import LoadedAdapters
from deltic.engine.events import ExpertStats, ReplayStats
from deltic.engine.messages import EngineInfo
from deltic.engine.pictures import PictureEncoder
from deltic.engine.step import Chunk, Progress, Sequence, Step, StepResult
from deltic.models.qwen.gpu_experts import OutsideExperts
from deltic.models.vision.pixels import PictureRules
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.blocks import PrefillInputs, Rows
from deltic.ops.gpu.chip import device_name
from deltic.ops.gpu.launch import bound_levers
from deltic.ops.gpu.sample import Draws, sample
from deltic.runtime.gpu.ahead import Ahead, Pending, ResultBuffers
from deltic.runtime.gpu.batch_slots import BatchSlots
from deltic.runtime.gpu.buffers import MAX_SEGMENTS, Workspace
from deltic.runtime.gpu.copies import DeviceCopies, open_tiers
from deltic.runtime.gpu.prefill import PrefillBatch
from deltic.runtime.gpu.record import Body, Recording, Recordings, Variant
from deltic.runtime.info import engine_info
from deltic.runtime.plan import Plan

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512, 640, 768, 896)
"""Rows of the recorded decodes. Products take many rows by 128, and other kernels leave rows that are not in
use at once, so that finer steps there would only take time at a start.
"""
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Blocks of the recorded prefills."""
LENGTHS = (512, 4096)
"""Keys up to which decodes have recordings of their own: with fewer splits of attention to skip."""


class Bodies(ABC):
    """Forwards that recordings of a model start, and the draws behind them. A kind of model
    (text.py, speech.py) says what a decode and a prefill are.
    """

    def __init__(self, workspace: Workspace, n_real: int) -> None:
        """n_real: ids that can be drawn."""
        self._workspace, self._n_real = workspace, n_real

    @abstractmethod
    def decode(self, n: int, max_len: int) -> Body:
        """Makes the body of a decode of n rows, none with more than max_len keys, and of its draws, unless
        `add_decodes` adds them apart.
        """

    @abstractmethod
    def prefill_logits(self, n_blocks: int, inputs: PrefillInputs) -> Tensor:
        """Starts a prefill. Returns the logits of the rows asked for, float32 [G, V]."""

    def prefill(self, n_blocks: int, inputs: PrefillInputs, draws: Draws) -> Body:
        """Makes the body of a prefill of n_blocks blocks and the draws behind it."""
        return lambda: self.draw("prefill", self.prefill_logits(n_blocks, inputs), draws)

    def draw(self, kind: str, logits: Tensor, draws: Draws | Rows) -> None:
        """Starts the draws of a decode, or of a prefill."""
        w = self._workspace
        sample(logits, self._n_real, draws, w.parameters, w.sample, w.out[kind])

    def add_decodes(self, recordings: Recordings, plan: Plan[Any]) -> None:
        """Adds every decode, and draws that are recorded apart from it."""
        recordings.add_decodes("decode", recordings.size(plan.max_num_seqs), self.decode)

    def add_prefills(self, recordings: Recordings, batch: PrefillBatch) -> None:
        """Adds every prefill."""
        for n in reversed(recordings.block_sizes):
            inputs, draws = batch.of(n).inputs, batch.of(n).draws
            if inputs.adapters is not None:
                recordings.add("adapted prefill", n, self.prefill(n, inputs, draws))
            plain = replace(inputs, adapters=None, logit_adapters=None)
            recordings.add("prefill", n, self.prefill(n, plain, draws))


class GpuRunner:
    """A model on a GPU, with its memory. Not thread-safe: one engine loop owns it.

    Without a GPU it runs in Triton's interpreter, unrecorded: for tests. A kind of model (text.py, speech.py)
    allocates memory and buffers, and calls `_record` when it is complete.
    """

    info: EngineInfo
    pictures: PictureEncoder | None = None
    """Encoder of pictures. None: prompts have no pictures."""
    adapters: LoadedAdapters | None = None
    """Adapters that are loaded. None: there is no room for any."""
    outside: OutsideExperts | None = None
    """Experts that are outside the GPU. None: none are."""

    def __init__(
        self,
        plan: Plan[Any],
        workspace: Workspace,
        batch_slots: BatchSlots,
        pages: list[Tensor],
        states: list[Tensor],
        results: ResultBuffers,
        has_head: bool = False,
    ) -> None:
        """pages, states: what makes up a page and a state, with the page or the state slot as first
        dimension. has_head: whether a draft head runs behind prefills.
        """
        self.plan, self.workspace, self.batch_slots = plan, workspace, batch_slots
        self.device = pages[0].device
        self.is_gpu = self.device.type == "cuda"
        self.max_logit_rows = plan.max_num_seqs + PAGE_SIZE
        self.tiers: Tiers | None = None  # until open_tiers
        self.stream = torch.cuda.Stream() if self.is_gpu else None
        self._on_stream = torch.cuda.stream(self.stream)  # of a step, which is never within another
        self._pages, self._states = pages, states
        self.recordings = Recordings(
            _up_to(plan.n_decode_rows, ROWS),
            _up_to(plan.max_step_tokens // PAGE_SIZE, BLOCKS),
            _up_to(plan.max_model_len, LENGTHS),
        )
        self._prefill_batch = PrefillBatch(
            batch_slots,
            self.recordings.block_sizes,
            plan.max_num_seqs,
            plan.n_pages,
            self.device,
            has_head,
            plan.tower is not None,
            plan.adapters.n > 0,
        )
        self._results = results
        self.levers = bound_levers()
        self._ahead: dict[Sequence, Ahead] = {}
        self.replays = ReplayStats()

    @property
    def experts(self) -> ExpertStats | None:
        return None if self.outside is None else ExpertStats(*self.outside.seen)

    def _make_info(self, rules: PictureRules | None = None) -> EngineInfo:
        return engine_info(
            self.plan,
            device_name() if self.is_gpu else "interpreted",
            rules,
            on_gpu=self.is_gpu,
            kernels=f"Triton {triton.__version__}",
            canonical_decode=False,
            n_lookahead=1,
            block_size=PAGE_SIZE,
            max_prefill_seqs=min(self.recordings.block_sizes[-1], MAX_SEGMENTS),
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

    def _record(self, bodies: Bodies, progress: Progress, are_replayed: bool = False) -> None:
        """Records every decode and every prefill. are_replayed: see `record_all`."""
        bodies.add_decodes(self.recordings, self.plan)
        bodies.add_prefills(self.recordings, self._prefill_batch)
        self.batch_slots.flush()  # no row is in use
        self.recordings.record(self.stream, lambda done: progress("record", done), self.replays, are_replayed)

    # A step.

    def step(self, step: Step) -> StepResult:
        """Runs one step, and starts the decode that follows it.

        A chunk starts from its sequence's `start_slot`, if any, else from its `state_slot`, or at 0 from the
        zero state, and leaves its final state in `state_slot` and those of its snapshots where they say.
        """
        with self._on_stream:
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
            result.prompt_logprobs |= prefilled.prompt_logprobs
            result.vectors |= prefilled.vectors
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

    def _forward(self, chunks: list[Chunk]) -> int:
        """Starts the forward of these decodes. Returns the rows of its recording."""
        n = self.recordings.size(sum([chunk.length for chunk in chunks]))
        self.batch_slots.rows(chunks, n)
        self.batch_slots.flush()
        variant: Variant = "decode"
        if self.plan.adapters.n and any(chunk.sequence.adapter_slot >= 0 for chunk in chunks):
            variant = "adapted decode"
        elif self.plan.n_draft_rows and any(chunk.length > 1 or chunk.n_redo for chunk in chunks):
            variant = "drafted decode"
        self._run(self.recordings.decode(n, max([chunk.start + chunk.length for chunk in chunks]), variant), chunks, n)
        return n

    def _run(self, recording: Recording, chunks: list[Chunk], n: int) -> None:
        """Starts a forward of n rows, some of which are these chunks'."""
        recording.run()

    def _decode(self, chunks: list[Chunk]) -> Pending:
        """A forward, and the draws behind it."""
        self._forward(chunks)
        return self._send(*rows_of(chunks), "decode")

    def _prefill(self, step: Step, prefills: list[int]) -> Pending:
        """Starts a prefill of these chunks and the draws behind them."""
        n_blocks, draws = self._prefill_batch.fill(step, prefills)
        self.batch_slots.flush()
        self._prefill_batch.send(n_blocks)
        has_adapters = any(step.chunks[i].sequence.adapter_slot >= 0 for i in prefills)
        recording = self.recordings.of("adapted prefill" if has_adapters else "prefill", n_blocks)
        self._run(recording, [step.chunks[i] for i in prefills], n_blocks * PAGE_SIZE)
        return self._send({draw.sequence: i for i, draw in enumerate(draws)}, len(draws), "prefill")

    def _send(self, rows: dict[Sequence, int], n: int, kind: str, guesses: Pending | None = None) -> Pending:
        """Starts the way of n draws to the host (`ResultBuffers.send`)."""
        return self._results.send(rows, n, kind, guesses)

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
            is_last = position - sequence.n_prompt + 1 >= request.params.max_tokens
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
        drawn: dict[int, list[int]] = {}
        for pending in {id(p): p for p in results.values()}.values():
            pending.wait()
            drawn[id(pending)] = pending.tokens.tolist()  # all at once: a list of one takes as long
        tokens = []
        for draw in step.draws:
            pending, drafts = results[draw.sequence], step.chunks[draw.chunk].drafts
            first, rows = pending.rows[draw.sequence], drawn[id(pending)]
            if drafts:
                tokens.append(step.chunks[draw.chunk].accepted(rows[first : first + 1 + len(drafts)]))
            else:
                tokens.append([rows[first]])
        return StepResult(tokens, [None] * len(tokens), {})


def ends_thought(sequence: Sequence, token: int) -> bool:
    """Returns whether the token is one behind which nothing runs ahead, though the answer goes on."""
    constraint = sequence.request.params.constraint
    return constraint is not None and token == constraint.think_end_id


def rows_of(chunks: list[Chunk]) -> tuple[dict[Sequence, int], int]:
    """Returns the first row of each chunk of a decode, by sequence, and the number of rows."""
    rows, n = dict[Sequence, int](), 0
    for chunk in chunks:
        rows[chunk.sequence] = n
        n += chunk.length
    return rows, n


def _up_to(most: int, sizes: Items[int]) -> list[int]:
    """Returns the sizes below the most, and the most."""
    return [n for n in sizes if n < most] + [most]
