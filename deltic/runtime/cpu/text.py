"""Device memory and the recorded step.

Built once: weights, the two memories and the step's buffers are allocated and touched, and the whole step,
token ids to drawn tokens, is recorded as one program. A step is then: fill the buffers, run the program, read
the tokens.
"""

from __future__ import annotations

import math
from array import array
from itertools import accumulate
from pathlib import Path

import numpy as np

from deltic.engine.cache.tiers import Bytes, Tiers
from deltic.engine.events import ExpertStats, ReplayStats
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Progress, Sequence, Step, StepResult, silent
from deltic.models.dflash.cpu import DFlash
from deltic.models.dflash.weights import DrafterWeights
from deltic.models.qwen.cpu import Qwen
from deltic.models.qwen.cpu_buffers import Memory
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import Weights
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.weights import VisionWeights
from deltic.ops.arrays import Array, bfloat16, copy
from deltic.ops.cpu.attention import kv_pages
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import AttentionHeads
from deltic.ops.kv_formats import BF16, KvFormat
from deltic.runtime.adapters import Adapters
from deltic.runtime.cpu.adapters import CpuAdapterMemory
from deltic.runtime.cpu.buffers import Arena, build_workspace
from deltic.runtime.cpu.pictures import PictureTower
from deltic.runtime.info import engine_info
from deltic.runtime.plan import TextPlan
from deltic.runtime.pools import Pools, RowsOf
from deltic.runtime.stages import Neighbours


def _layers_of(pages: Array, first: int, n_layers: int, heads: AttentionHeads, kv: KvFormat) -> Array:
    """Layers of all pages, uint8 [n_pages, page_bytes], from a byte on: as `kv_pages` says."""
    size, dtype = kv_pages(len(pages), n_layers, heads, kv)
    n_bytes = n_layers * kv.layer_bytes(heads.n_kv, heads.dim)
    return pages[:, first : first + n_bytes].view(dtype).reshape(size)


def _index_of(pages: Array, shape: ModelShape) -> Array | None:
    """The index in all pages, bfloat16 [n_pages, n_kv_layers, page_rows, d], behind keys and values."""
    if (heads := shape.index) is None:
        return None
    first = shape.n_kv_layers * shape.kv_format.layer_bytes(shape.n_kv_heads, shape.head_dim)
    size = shape.n_kv_layers, heads.page_rows, heads.dim
    index: Array = pages[:, first : first + math.prod(size) * 2].view(bfloat16)
    return index.reshape(len(pages), *size)


class Runner:
    """The model on the CPU, or a stage's layers of it, with its memory. Not thread-safe: one engine loop owns
    it.
    """

    def __init__(
        self,
        plan: TextPlan,
        weights: Weights,
        progress: Progress = silent,
        vision: tuple[VisionWeights, PictureRules] | None = None,
        drafter: DrafterWeights | None = None,
    ) -> None:
        """vision, drafter: where the plan has them."""
        shape = plan.shape
        self.plan = plan
        self.max_logit_rows = plan.max_logit_rows
        arena = Arena()
        self.workspace = build_workspace(plan, arena.allocate)
        self.pages = arena.allocate("pages", (plan.n_pages, plan.page_bytes), np.uint8)
        self.memory = Memory(
            pages=_layers_of(self.pages, 0, shape.n_kv_layers, shape.heads, shape.kv_format),
            states=arena.allocate(
                "states",
                (plan.n_slots, shape.n_gdn_layers, shape.gdn_n_v_heads, shape.gdn_k_dim, shape.gdn_v_dim),
                np.float32 if shape.state_dtype == "float32" else bfloat16,
            ),
            columns=arena.allocate("columns", (plan.n_slots, shape.n_gdn_layers, 3, shape.conv_channels), bfloat16),
            window_columns=self.workspace.window_columns,
            window_gates=self.workspace.window_gates,
            index_pages=_index_of(self.pages, shape),
            ngram_columns=None
            if (ngrams := shape.ngrams) is None
            else arena.allocate("n-gram columns", (plan.n_slots, ngrams.window, shape.stream_size), bfloat16),
            window_ngrams=self.workspace.window_ngrams,
        )
        host = arena.allocate("host tier", (plan.n_host_units, plan.page_bytes), np.uint8)
        self.host: Bytes | None = host if plan.n_host_units else None
        self.tiers: Tiers | None = None  # until open_tiers
        arena.touch(lambda done: progress("memory", done))
        self.model = Qwen(shape, weights, plan.max_model_len, plan.n_made_angles, on_disk=plan.outside_bytes > 0)
        self.program = Program(plan.n_threads, cpus=plan.cpus)
        activations = self.workspace.activations
        batch, rows = self.workspace.batch, self.workspace.picture_rows
        adapters = self.workspace.adapters
        self.adapters: Adapters | None = None
        self.replays: ReplayStats | None = None
        self.experts: ExpertStats | None = None
        if adapters is not None and self.workspace.adapter_memory is not None:
            memory = CpuAdapterMemory(adapters, self.workspace.adapter_memory)
            self.adapters = Adapters(shape, plan.adapters, memory)
        self.model.record(self.program, batch.inputs, self.memory, activations, rows, adapters)
        sampler = self.workspace.sampler
        self.draft_head = self.workspace.draft_head
        self.block_drafter = self.workspace.block_drafter
        if self.block_drafter is not None and drafter is not None and plan.drafter is not None:
            own = DFlash(plan.drafter, drafter, plan.max_model_len)
            pages = _layers_of(self.pages, shape.page_bytes(), own.shape.n_layers, own.heads, BF16)
            features, step = activations.features, self.program
            assert features is not None
            self.block_drafter.record(self.model, own, batch, pages, sampler, step, features, plan.cpus)
        self.neighbours: Neighbours | None = None
        """Neighbours of a stage, once it has warmed up."""
        if shape.draws:
            sampler.record(self.program, activations.logits)
        self.pools = Pools() if shape.keeps_hidden else None
        if self.draft_head is not None:
            self.draft_head.record(self.model, batch, self.memory, activations, sampler, plan.n_threads, plan.cpus)
        self.pictures: PictureTower | None = None
        if vision is not None and rows is not None and self.workspace.vision is not None:
            self.pictures = PictureTower(plan, *vision, self.workspace.vision, rows)
        if plan.n_made_angles:
            batch.angles = self.model.angles(0)
            if self.draft_head is not None:
                self.draft_head.angles = self.model.angles(plan.n_made_angles // 2)
        self._warm_up()
        self.info = engine_info(
            plan, "cpu", vision[1] if vision is not None else None, kernels=self.program.instruction_set
        )

    def _warm_up(self) -> None:
        """Runs one token through everything.

        That starts the threads and pages in the code, and a kernel that cannot run here fails now. It writes
        only to page 0 and state slot 0, whose first owner overwrites them.
        """
        request = Request(id="warm-up", prompt_ids=[], params=SamplingParams(temperature=0.0))
        sequence = Sequence(request, 0, 0, array("i", [0]), n_prompt=1, pages=[0], batch_slot=0, state_slot=0)
        self.step(Step(chunks=[Chunk(sequence, 0, 1)], draws=[Draw(0, sequence, n_guesses=2)]))

    def open_tiers(self, directory: Path | None, disk_bytes: int, fingerprint: str) -> None:
        """Starts the tiers below the pools, on disk too where there is a directory.

        Raises ConfigError if that cannot be used.
        """
        of_state = [memory.view(np.uint8).reshape(len(memory), -1) for memory in self.memory.of_slots()]
        self.tiers = Tiers(
            lambda page: [self.pages[page]],
            lambda state_slot: [memory[state_slot] for memory in of_state],
            self.host,
            self.plan.shape.state_bytes,
            directory,
            disk_bytes,
            fingerprint,
        )

    def step(self, step: Step) -> StepResult:
        """Runs one forward and the draws.

        A chunk starts from its sequence's `start_slot`, if any, else from its `state_slot`, or at 0 from the
        zero state, and leaves its final state in `state_slot` and those of its snapshots where they say.
        """
        if self.neighbours is not None:
            self.neighbours.begin(step)
        batch, sampler, shape = self.workspace.batch, self.workspace.sampler, self.plan.shape
        first_row = batch.fill(step)
        if shape.draws:
            sampler.fill(step, first_row)
        self.model.gather(batch.inputs, self.workspace.activations)
        rows = self.workspace.activations.residual[: batch.inputs.n_tokens]
        if not shape.embeds and self.neighbours is not None:
            self.neighbours.receive(rows)
        self.program.run()
        result = StepResult([], [], {})
        if shape.draws:
            result = sampler.read(step)
        elif self.neighbours is not None:
            self.neighbours.pass_on(rows)
            result = self.neighbours.result()
        if (head := self.draft_head or self.block_drafter) is not None:
            result.guesses, result.guess_s = head.follow(step, result.tokens)
        if self.pools is not None:
            result.vectors = self.pools.follow(step, self._hidden_of(step))
        for copies, arrays in ((step.slot_copies, self.memory.of_slots()), (step.page_copies, [self.pages])):
            for source, target in copies:
                for memory in arrays:
                    copy(memory[target], memory[source])
        if self.neighbours is not None:
            self.neighbours.end()
        return result

    def _hidden_of(self, step: Step) -> RowsOf:
        """Gives the hidden states that a step has left."""
        hidden, ends = self.workspace.activations.hidden, [*accumulate(chunk.length for chunk in step.chunks)]
        assert hidden is not None
        return lambda c, part: hidden[ends[c] - step.chunks[c].length : ends[c]][part]

    def is_busy(self) -> bool:
        """Returns False: a step is over when `step` returns. Raises RunnerLostError where a machine that has
        some of the layers is gone.
        """
        if self.neighbours is not None:
            self.neighbours.hear()
        return False

    def logits(self, n_rows: int) -> Array:
        """float32 [n_rows, V]: the logits of the last step, in the order of its rows.

        For tests and benches.
        """
        return self.workspace.activations.logits[:n_rows]
