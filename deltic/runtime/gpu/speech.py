"""A speech model on a GPU: its memory and its recorded steps. The vocoder is beside it (vocoder.py).

A decode also makes the codes of the frame whose code 0 it was fed. They come with the token. What it leaves
for the next one is the talker's last output, in the state slot.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.engine.step import Progress, Sequence, Step, StepResult, Voice, silent
from deltic.models.tts.cpu import SpeechMemory
from deltic.models.tts.gpu import TtsGpu
from deltic.models.tts.shape import FRAME, SPEAKER, split_row
from deltic.models.tts.weights import SpeechWeights
from deltic.ops.arrays import Array
from deltic.ops.geometry import N_CODES, PAGE_SIZE
from deltic.ops.gpu.blocks import PrefillInputs
from deltic.ops.gpu.launch import allocate_on
from deltic.ops.gpu.weight import to_device
from deltic.runtime.gpu.ahead import Pending, ResultBuffers
from deltic.runtime.gpu.batch_slots import BatchSlots
from deltic.runtime.gpu.buffers import GpuSpeechWorkspace, gpu_speech_workspace
from deltic.runtime.gpu.record import Body
from deltic.runtime.gpu.runner import Bodies, GpuRunner
from deltic.runtime.gpu.vocoder import GpuVocoderStreams
from deltic.runtime.plan import SpeechPlan
from deltic.runtime.speaking import DEFAULT_SPEECH, PREDICTOR_KEY, Speaker


class SpeechBatchSlots(BatchSlots):
    """The table of batch slots with what the predictor's draws need, and the texts still to be said."""

    def __init__(self, workspace: GpuSpeechWorkspace, end_id: int, n_drawn: int, max_len: int) -> None:
        super().__init__(workspace.table, workspace.offsets, workspace.parameters.masks, (end_id,), n_drawn)
        self._max_len = max_len
        self._n_texts = [0] * len(self._owner)

    def refresh(self, sequence: Sequence) -> int:
        """Brings the batch slot's texts up to date, too: those of an utterance that is spoken while it is
        written become more.
        """
        is_new = sequence.batch_slot is None or self._owner[sequence.batch_slot] is not sequence
        batch_slot = super().refresh(sequence)
        if is_new:
            self._put_speech(batch_slot, sequence)
        texts = (sequence.request.speech or DEFAULT_SPEECH).trailing_ids
        known, n = self._n_texts[batch_slot], min(len(texts), self._max_len)
        if known < n:
            self._write("trailing", batch_slot, np.array(texts[known:n], np.int32), known)
            self._write("n_trailing", batch_slot, n)
            self._n_texts[batch_slot] = n
        return batch_slot

    def _put_speech(self, batch_slot: int, sequence: Sequence) -> None:
        """Says what the predictor's draws need of a sequence that is new at this batch slot."""
        speech = sequence.request.speech or DEFAULT_SPEECH
        for part, value in (
            ("code_temperature", float(speech.temperature)),
            ("code_top_p", float(speech.top_p)),
            ("code_top_k", speech.top_k),
        ):
            self._write(part, batch_slot, value)
        seed = np.array([(sequence.seed ^ PREDICTOR_KEY) & (2**64 - 1)], np.uint64).view(np.int32)
        self._write("code_seed", batch_slot, seed)
        self._n_texts[batch_slot] = 0
        self._write("n_trailing", batch_slot, 0)
        if sequence.request.params.repetition_penalty != 1:  # rows of the prompt are no codes
            self._write("history", batch_slot, np.full(sequence.n_prompt, -1, np.int32))


class SpeechBodies(Bodies):
    """Steps of a speech model, for its recordings. A decode has its draws behind it."""

    _workspace: GpuSpeechWorkspace

    def __init__(self, model: TtsGpu, workspace: GpuSpeechWorkspace, memory: SpeechMemory, n_drawn: int) -> None:
        super().__init__(workspace, n_drawn)
        self._model, self._memory = model, memory

    def decode(self, n: int, max_len: int) -> Body:
        def body() -> None:
            w = self._workspace
            rows = w.rows_batch_slot[:n]
            logits = self._model.decode(rows, w.batch_slots, w.frames, w.decode, self._memory, max_len)
            self.draw("decode", logits, w.decode.rows.front(n))

        return body

    def prefill_logits(self, n_blocks: int, inputs: PrefillInputs) -> Tensor:
        w = self._workspace
        return self._model.prefill(n_blocks, inputs, w.batch_slots.page_table, w.prefill, self._memory)


class GpuSpeechRunner(GpuRunner, Speaker):
    """Talker, predictor and vocoder on a GPU, with their memory."""

    plan: SpeechPlan
    workspace: GpuSpeechWorkspace
    gives_logprobs = False

    def __init__(
        self, plan: SpeechPlan, weights: SpeechWeights, vocoder: dict[str, Array], progress: Progress = silent
    ) -> None:
        self.shape, self.n_streams = plan.shape, plan.n_streams
        shape, d, n = plan.shape, plan.shape.talker, plan.max_num_seqs
        device = weights.codec_table.device
        allocate = allocate_on(device)
        # No sequence owns the last page: rows of padding are written there.
        size = (plan.n_pages + 1, d.n_layers, 2, d.n_kv_heads, PAGE_SIZE, d.head_dim)
        self.memory = SpeechMemory(
            pages=allocate("pages", size, torch.bfloat16), past=allocate("past", (n, d.hidden_size), torch.bfloat16)
        )
        w = gpu_speech_workspace(plan, allocate)
        w.decode.numbers.copy_(torch.arange(2 * n, dtype=torch.int32))
        self.model = TtsGpu(shape, weights, plan.max_model_len)
        self.vocoder: GpuVocoderStreams = GpuVocoderStreams(
            shape.vocoder, vocoder, n_streams=plan.n_vocoder_slots, device=device, progress=progress
        )
        batch_slots = SpeechBatchSlots(w, shape.end_id, shape.n_drawn, plan.max_model_len)
        results = ResultBuffers(w.out, n, w.decode.rows.codes)
        super().__init__(plan, w, batch_slots, [self.memory.pages], [self.memory.past], results)
        self._voice_rows: dict[int, tuple[Voice, Tensor, Tensor | None]] = {}
        self.replays = self.vocoder.replays
        self._record(SpeechBodies(self.model, w, self.memory, shape.n_drawn), progress)
        self.info = self._make_info()
        if plan.n_host_units:
            self.open_tiers(None, 0, "").takes_evicted = False

    # A step.

    def _prefill(self, step: Step, prefills: list[int]) -> Pending:
        ends, _ = self._prefill_batch.layout(step, prefills)
        for i in prefills:
            chunk = step.chunks[i]
            self._fill_voice(chunk.sequence, chunk.start, chunk.length, ends[i] - chunk.length + 1)
        return super()._prefill(step, prefills)

    def _fill_voice(self, sequence: Sequence, start: int, length: int, row: int) -> None:
        """Puts rows that are the voice's where the prefill reads them: its tokens start .. start + length
        from row `row` on.
        """
        voice = sequence.voice
        if voice is None:
            return
        _, sides = split_row(np.array(sequence.tokens[start : start + length], np.int64))
        speaker, frames = self._on_device(voice)
        rows = self.workspace.prefill.voice[row : row + length]
        for i in np.flatnonzero(sides == SPEAKER).tolist():
            rows[i].copy_(speaker)
        if frames is None:
            return
        at = np.flatnonzero(sides >= FRAME)
        breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(sides[at]) != 1)) + 1
        for run in np.split(at, breaks):  # of frames that follow each other in the prompt and in the voice
            if n := len(run):
                begin, first = int(run[0]), int(sides[run[0]]) - FRAME
                rows[begin : begin + n].copy_(frames[first : first + n])

    def _on_device(self, voice: Voice) -> tuple[Tensor, Tensor | None]:
        """A voice's speaker vector and frames on the device, kept for the voices used last."""
        held = self._voice_rows.pop(id(voice), None)
        if held is None or held[0] is not voice:
            frames = None if voice.frames is None else to_device(voice.frames, self.device)
            held = (voice, to_device(voice.speaker, self.device), frames)
        self._voice_rows[id(voice)] = held
        while len(self._voice_rows) > self.plan.max_num_seqs:
            self._voice_rows.pop(next(iter(self._voice_rows)))
        return held[1], held[2]

    def _read(self, step: Step, results: dict[Sequence, Pending]) -> StepResult:
        result = super()._read(step, results)
        decodes = [chunk.sequence for chunk in step.chunks if chunk.is_decode]
        result.codes = codes = np.empty((len(decodes), N_CODES), np.int32)
        for i, sequence in enumerate(decodes):
            pending = results[sequence]
            assert pending.codes is not None
            codes[i] = pending.codes[pending.rows[sequence]].numpy()
        return result

    def frame_embeddings(self, codes: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 [R, h]: what the prompt's rows of reference frames are, of their codes [R, 16]."""
        return self.model.frame_embeddings(codes)

    def logits(self, n_rows: int) -> Tensor:
        """float32 [n_rows, n_drawn]: of the last decode. For tests and benches."""
        return self.workspace.decode.logits.view(-1, self.shape.n_drawn)[:n_rows]
