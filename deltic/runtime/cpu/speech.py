"""A speech model on the CPU: its memory, and the recorded step from row ids to drawn codes.

A step is one program (`models/tts/cpu.py`): fill the buffers, run it, read the tokens and the frames' codes.
The vocoder is separate: engine/stage.py decides when it turns codes into audio.
"""

from __future__ import annotations

from array import array
from functools import partial

import numpy as np

from deltic.engine.cache.tiers import Bytes, Tiers
from deltic.engine.events import ExpertStats, ReplayStats
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Progress, Sequence, Step, StepResult, silent
from deltic.models.tts.cpu import PAD_ROW, SpeechMemory, Tts
from deltic.models.tts.weights import SpeechWeights
from deltic.ops.arrays import Array, bfloat16
from deltic.ops.cpu.program import Program, instruction_set
from deltic.ops.cpu.vocoder import multiplies_half
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.cpu.buffers import Arena, build_speech_workspace
from deltic.runtime.cpu.vocoder import VocoderStreams
from deltic.runtime.info import engine_info
from deltic.runtime.plan import SpeechPlan
from deltic.runtime.speaking import Speaker


class SpeechRunner(Speaker):
    """Talker, predictor and vocoder on the CPU, with their memory.

    Not thread-safe: one engine loop owns it.
    """

    replays: ReplayStats | None = None
    experts: ExpertStats | None = None

    def __init__(
        self, plan: SpeechPlan, weights: SpeechWeights, vocoder: dict[str, Array], progress: Progress = silent
    ) -> None:
        """vocoder: of load_vocoder. It is used up."""
        self.shape, self.n_streams = plan.shape, plan.n_streams
        shape = plan.shape
        self.plan = plan
        self.max_logit_rows = plan.max_num_seqs + PAGE_SIZE
        arena = Arena()
        d = shape.talker
        self.memory = SpeechMemory(
            pages=arena.allocate("pages", (plan.n_pages, d.n_layers, 2, d.n_kv_heads, PAGE_SIZE, d.head_dim), bfloat16),
            past=arena.allocate("past", (plan.max_num_seqs, d.hidden_size), bfloat16),
        )
        host = arena.allocate("host tier", (plan.n_host_units, plan.page_bytes), np.uint8)
        self.workspace = build_speech_workspace(plan, arena.allocate)
        self.vocoder: VocoderStreams = VocoderStreams(
            shape.vocoder,
            vocoder,
            n_streams=plan.n_vocoder_slots,
            program=partial(Program, plan.n_threads, cpus=plan.cpus),
            allocate=arena.allocate,
            half=self.has_half_vocoder,
        )
        arena.touch(lambda done: progress("memory", done))
        self.tiers: Tiers | None = self._open_tiers(host) if plan.n_host_units else None
        self.model = Tts(shape, weights, plan.max_model_len)
        self._project_pad()
        self.program = Program(plan.n_threads, cpus=plan.cpus)
        batch, activations = self.workspace.batch, self.workspace.activations
        self.model.record(self.program, batch.inputs, self.memory, batch.draws, activations)
        self.workspace.sampler.record(self.program, activations.logits)
        self._warm_up()
        self.info = engine_info(plan, "cpu", canonical_decode=False, kernels=self.program.instruction_set)

    @property
    def has_half_vocoder(self) -> bool:
        """True if the vocoder's decoder uses bfloat16: if the talker is quantised and that is faster."""
        return self.plan.quantize is not None and multiplies_half(instruction_set())

    def _open_tiers(self, host: Bytes) -> Tiers:
        """Host memory, for preempted sequences alone."""
        pages, past = (array.view(np.uint8).reshape(len(array), -1) for array in (self.memory.pages, self.memory.past))
        tiers = Tiers(lambda page: [pages[page]], lambda i: [past[i]], host, self.plan.shape.state_bytes, None, 0, "")
        tiers.takes_evicted = False
        return tiers

    def _project_pad(self) -> None:
        """The pad text's row, by the kernels that a step would compute it with."""
        inputs, activations = self.workspace.batch.inputs, self.workspace.activations
        program = Program(self.plan.n_threads, cpus=self.plan.cpus)
        self.model.record_texts(program, inputs, activations, activations.text_rows[PAD_ROW : PAD_ROW + 1])
        inputs.text_ids[0] = self.plan.shape.ids.tts_pad
        inputs.n_texts.fill(1)
        program.run()

    def _warm_up(self) -> None:
        """A prompt of one empty row and a frame, through everything.

        They leave their mark in page 0 and state slot 0 only.
        """
        request = Request(id="warm-up", prompt_ids=[], params=SamplingParams(temperature=0.0))
        sequence = Sequence(request, 0, 0, array("i", [0, 0]), n_prompt=1, pages=[0], batch_slot=0, state_slot=0)
        for start in (0, 1):
            self.step(Step(chunks=[Chunk(sequence, start, 1)], draws=[Draw(0, sequence)]))

    def step(self, step: Step) -> StepResult:
        """Runs one forward and the draws.

        Row i of the logits is chunk i's. Each chunk leaves the talker's last output in its state slot.
        """
        batch, sampler = self.workspace.batch, self.workspace.sampler
        batch.fill(step)
        sampler.fill(step, list(range(len(step.chunks))))
        self.program.run()
        memory = self.memory
        for source, target in step.slot_copies:
            memory.past[target] = memory.past[source]
        for source, target in step.page_copies:
            memory.pages[target] = memory.pages[source]
        result = sampler.read(step)
        result.codes = batch.read_codes()
        return result

    def is_busy(self) -> bool:
        """Returns False: a step is over when `step` returns."""
        return False

    def logits(self, n_rows: int) -> Array:
        """float32 [n_rows, n_drawn]: the logits of the last step, one row a chunk. For tests and benches."""
        return self.workspace.activations.logits[:n_rows]

    def frame_embeddings(self, codes: Array) -> Array:
        """float32 [R, h]: what the prompt's rows of reference frames are, of their codes [R, 16]."""
        return self.model.frame_embeddings(codes)
