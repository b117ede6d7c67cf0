"""A speech model on a GPU: its memory and its recorded steps; the vocoder beside it is `gpu_vocoder.py`.

As in `gpu_runner.py`: what the device must know of a sequence lies in a table by place, a decode moves its own tokens and positions
on, and the next decode of every sequence that draws is started before the token was read. A decode also makes the codes of the frame
whose code 0 it was fed; they come with the token. What it leaves for the next one is the talker's last output, in the state slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from deltic.engine.cache.tiers import Tiers
from deltic.engine.messages import EngineInfo, Request
from deltic.engine.scheduler import RequestError
from deltic.engine.step import Sequence, Step, StepResult
from deltic.models.tts.cpu import SpeechMemory
from deltic.models.tts.gpu import TtsGpu
from deltic.models.tts.shape import FRAME, N_SIDE, SPEAKER
from deltic.models.tts.weights import SpeechWeights
from deltic.ops.geometry import N_CODES, PAGE_SIZE
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.sample import sample, sample_decode
from deltic.runtime.cpu.speech import SpeechRunner
from deltic.runtime.cpu.speech_batch import DEFAULT_SPEECH, PREDICTOR_KEY
from deltic.runtime.cpu.speech_plan import SpeechPlan
from deltic.runtime.gpu.ahead import Ahead, Pending
from deltic.runtime.gpu.copies import DeviceCopies
from deltic.runtime.gpu.places import Places
from deltic.runtime.gpu.plan import MAX_SEGMENTS, GpuWorkspace
from deltic.runtime.gpu.prefill import PrefillBatch
from deltic.runtime.gpu.record import Body, Recording, record_all
from deltic.runtime.gpu.speech_plan import GpuSpeechWorkspace, gpu_speech_workspace
from deltic.runtime.gpu.text import BLOCKS, LENGTHS, ROWS
from deltic.runtime.gpu.vocoder import GpuVocoder

Progress = Callable[[str, float], None]

N_RESULTS = 6
"""On their way to the host, at most: of this step's decode, its prefill, and the decode that runs ahead, twice."""


class SpeechPlaces(Places):
    """The table of places with what the predictor's draws need, and the texts still to be said."""

    def __init__(self, workspace: GpuSpeechWorkspace, end_id: int, n_drawn: int, max_len: int) -> None:
        super().__init__(cast(GpuWorkspace, workspace), (end_id,), n_drawn)
        self._max_len = max_len
        self._n_texts = [0] * len(self._owner)

    def take(self, place: int, sequence: Sequence) -> None:
        if self._owner[place] is sequence:
            return
        super().take(place, sequence)
        speech = sequence.request.speech or DEFAULT_SPEECH
        for part, value in (
            ("code_temperature", float(speech.temperature)), ("code_top_p", float(speech.top_p)), ("code_top_k", speech.top_k),
        ):  # fmt: skip
            self._write(part, place, value)
        seed = np.array([(sequence.seed ^ PREDICTOR_KEY) & (2**64 - 1)], np.uint64).view(np.int32)
        self._write("code_seed", place, seed)
        self._n_texts[place] = 0
        self._write("n_trailing", place, 0)
        if sequence.request.params.repetition_penalty != 1:  # rows of the prompt are no codes
            self._write("history", place, np.full(sequence.n_prompt, -1, np.int32))

    def put_texts(self, place: int, sequence: Sequence) -> None:
        """Brings the place's texts up to date: those of an utterance that is spoken while it is written become more."""
        texts = (sequence.request.speech or DEFAULT_SPEECH).trailing_ids
        known, n = self._n_texts[place], min(len(texts), self._max_len)
        if known < n:
            self._write("trailing", place, np.array(texts[known:n], np.int32), known)
            self._write("n_trailing", place, n)
            self._n_texts[place] = n


class GpuSpeechRunner(SpeechRunner):
    """Talker, predictor and vocoder on a GPU, with their memory. Not thread-safe: one engine loop owns it.

    What is the same on a CPU, checks of requests and the priming of voices, is inherited. Without a GPU it runs in Triton's
    interpreter, unrecorded: for tests.
    """

    def __init__(
        self, plan: SpeechPlan, weights: SpeechWeights, codec: dict[str, Tensor], levers: Levers,
        progress: Progress = lambda stage, done: None,
    ) -> None:  # fmt: skip
        shape, d, device = plan.shape, plan.shape.talker, weights.codec_table.device
        self.plan, self.levers, self.device = plan, levers, device
        self.is_gpu = device.type == "cuda"
        self.max_logit_rows = plan.max_num_seqs + PAGE_SIZE
        self.voices: Any = None
        self.tiers: Tiers | None = None
        self.stream = torch.cuda.Stream() if self.is_gpu else None

        def allocate(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        # the last page is nobody's: rows of padding are written there
        size = (plan.n_pages + 1, d.n_layers, 2, d.n_kv_heads, PAGE_SIZE, d.head_dim)
        self.memory = SpeechMemory(
            pages=allocate("pages", size, torch.bfloat16),
            past=allocate("past", (plan.max_num_seqs, d.hidden_size), torch.bfloat16),
        )
        self.buffers = gpu_speech_workspace(plan, levers, allocate)
        self.buffers.decode.numbers.copy_(torch.arange(2 * plan.max_num_seqs, dtype=torch.int32))
        self.tts = TtsGpu(shape, weights, plan.max_model_len, levers)
        self.vocoder: Any = GpuVocoder(
            shape.vocoder, codec, n_streams=plan.n_streams + 1, levers=levers, device=device, progress=progress
        )  # fmt: skip
        self.places = SpeechPlaces(self.buffers, shape.end_id, shape.n_drawn, plan.max_model_len)
        n_blocks = plan.max_step_tokens // PAGE_SIZE
        self._row_sizes = [n for n in ROWS if n < plan.max_num_seqs] + [plan.max_num_seqs]
        self._block_sizes = [n for n in BLOCKS if n < n_blocks] + [n_blocks]
        self._lengths = [n for n in LENGTHS if n < plan.max_model_len] + [plan.max_model_len]
        self._prompts = PrefillBatch(self.places, self._block_sizes, plan.max_num_seqs, plan.n_pages, device)
        n, pin = plan.max_num_seqs, self.is_gpu
        self._results = [
            (torch.empty(n, dtype=torch.int32, pin_memory=pin), torch.empty((n, N_CODES), dtype=torch.int32, pin_memory=pin))
            for _ in range(N_RESULTS)
        ]  # fmt: skip
        self._turn = 0
        self._ahead: dict[Sequence, Ahead] = {}
        self._voice_rows: dict[int, tuple[Any, Tensor, Tensor | None]] = {}
        self._record_all(progress)
        self.info = EngineInfo(
            model_name="",
            vocab_size=shape.n_drawn,
            eos_token_ids=[shape.end_id],
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_step_tokens=plan.max_step_tokens,
            n_pages=plan.n_pages,
            n_slots=plan.max_num_seqs,
            device=torch.cuda.get_device_name() if self.is_gpu else "interpreted",
            on_gpu=self.is_gpu,
            canonical_decode=False,
            n_lookahead=1,
            block_size=PAGE_SIZE,
            max_prefill_seqs=min(n_blocks, MAX_SEGMENTS),
            page_bytes=plan.page_bytes,
            state_bytes=shape.state_bytes,
            even_context=d.layer_params / (2 * d.n_layers * d.q_rows),
            n_prompt_ids=shape.n_prompt_ids,
            is_speech=True,
            has_state=False,
        )
        if plan.n_host_units:
            copies = DeviceCopies([self.memory.pages], [self.memory.past], self.stream)
            host = np.empty((plan.n_host_units, plan.page_bytes), np.uint8)
            self.tiers = Tiers(copies.page, copies.state, host, copies.state_bytes, None, 0, "", copies)
            self.tiers.takes_evicted = False

    # Recording.

    def _record_all(self, progress: Progress) -> None:
        """Every decode and every prefill."""
        self.places.flush()  # no row is in use
        decodes = [(n, length) for length in self._lengths[::-1] for n in self._row_sizes[::-1]]
        prefills = self._block_sizes[::-1]
        bodies = [self._decode_body(n, length) for n, length in decodes]
        bodies += [self._prefill_body(n) for n in prefills]
        recorded = record_all(bodies, self.stream, self.levers, lambda done: progress("record", done))
        self._decodes = dict(zip(decodes, recorded, strict=False))
        self._prefills = dict(zip(prefills, recorded[len(decodes) :], strict=True))

    def _decode_body(self, n: int, max_len: int) -> Body:
        def body() -> None:
            w, r = self.buffers, self.buffers.decode.rows
            logits = self.tts.decode(n, w.rows_place[:n], w.places, w.frames, w.decode, self.memory, max_len)
            tokens, logprobs, top_ids, top = w.out["decode"]
            sample_decode(
                logits, self.plan.shape.n_drawn, r.place[:n], r.slot[:n], r.position[:n], places=w.parameters, scratch=w.sample,
                out_token=tokens, out_logprob=logprobs, top_ids=top_ids, top_logprobs=top, levers=self.levers,
            )  # fmt: skip

        return body

    def _prefill_body(self, n_blocks: int) -> Body:
        batch = self._prompts.of(n_blocks)

        def body() -> None:
            w = self.buffers
            logits = self.tts.prefill(
                n_blocks, batch.inputs.token_ids, batch.inputs.blocks, batch.inputs.logit_row, w.places.page_table, w.prefill,
                self.memory,
            )  # fmt: skip
            tokens, logprobs, top_ids, top = w.out["prefill"]
            sample(
                logits, self.plan.shape.n_drawn, draw_row=batch.draw_row, draw_place=batch.draw_place,
                draw_position=batch.draw_position, places=w.parameters, scratch=w.sample, out_token=tokens, out_logprob=logprobs,
                top_ids=top_ids, top_logprobs=top, levers=self.levers,
            )  # fmt: skip

        return body

    # A step.

    def check_speech(self, request: Request) -> Any:
        if request.params.logprobs is not None:
            raise RequestError("logprobs are not there for a speech model on a GPU; leave them out")
        return super().check_speech(request)

    def step(self, step: Step) -> StepResult:
        """Runs one step, and starts the decode that follows it. Each chunk leaves the talker's last output in its slot."""
        with torch.cuda.stream(self.stream):
            return self._step(step)

    def _step(self, step: Step) -> StepResult:
        results: dict[Sequence, Pending] = {}
        fresh: list[Sequence] = []
        prefills: list[int] = []
        for i, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            ahead = self._ahead.pop(sequence, None)
            if not chunk.is_decode:
                prefills.append(i)
            elif ahead is None or ahead.position != chunk.start:
                self._feed(sequence, sequence.tokens[chunk.start], chunk.start)
                fresh.append(sequence)
            elif ahead.n_preempted == sequence.n_preempted:
                results[sequence] = _drawn(ahead)
            else:  # it may be elsewhere now
                results[sequence] = _drawn(ahead).only(sequence)
                token = int(results[sequence].tokens[0])
                self._feed(sequence, token, chunk.start + 1, token < 0)
        if fresh:
            results |= dict.fromkeys(fresh, self._decode(fresh, max(s.n_computed for s in fresh) + 1))
        prefilled = self._prefill(step, prefills) if prefills else None
        if prefilled is not None:
            results |= dict.fromkeys(prefilled.rows, prefilled)
        memory = self.memory
        for source, target in step.slot_copies:
            memory.past[target].copy_(memory.past[source])
        for source, target in step.page_copies:
            memory.pages[target].copy_(memory.pages[source])
        self._run_ahead(step)
        if prefilled is not None:
            prefilled.wait()  # also where nothing was drawn: a step takes as long as what it runs
        return self._read(step, results)

    def _feed(self, sequence: Sequence, token: int, position: int, done: bool = False) -> None:
        """Has the sequence's next decode read this token; done: has the next leave the sequence out."""
        place, slot = sequence.place, sequence.slot
        assert place is not None and slot is not None
        self.places.take(place, sequence)
        self.places.put_pages(place, sequence)
        self.places.put_texts(place, sequence)
        self.places.feed(place, token, position, slot, done)
        self.places.remember(place, sequence, token, position)

    def _decode(self, sequences: list[Sequence], n_keys: int) -> Pending:
        """Starts a decode of these sequences, none of which has more than n_keys keys in it."""
        n = next(size for size in self._row_sizes if size >= len(sequences))
        self.places.rows([s.place for s in sequences if s.place is not None], n)
        self.places.flush()
        self.decode_of(n, n_keys).run()
        return self._send(sequences, "decode")

    def decode_of(self, n_rows: int, n_keys: int) -> Recording:
        """The smallest recorded decode of so many rows, none with more than n_keys keys."""
        n = next(size for size in self._row_sizes if size >= n_rows)
        return self._decodes[n, next(length for length in self._lengths if length >= n_keys)]

    def _send(self, sequences: list[Sequence], kind: str) -> Pending:
        """Starts the way of the drawn tokens, and of a decode's codes, to the host."""
        tokens, codes = self._results[self._turn]
        self._turn = (self._turn + 1) % N_RESULTS
        n = len(sequences)
        tokens[:n].copy_(self.buffers.out[kind][0][:n], non_blocking=True)
        if kind == "decode":
            codes[:n].copy_(self.buffers.decode.rows.codes[:n], non_blocking=True)
        event = None
        if self.is_gpu:
            event = torch.cuda.Event()
            event.record()
        return Pending({s: i for i, s in enumerate(sequences)}, tokens, None, event, codes)

    def _prefill(self, step: Step, prefills: list[int]) -> Pending:
        """Starts a prefill of these chunks and the draws behind them."""
        n_blocks, draws = self._prompts.fill(step, prefills)
        self.places.flush()
        ends, _ = self._prompts.layout(step, prefills)
        for i in prefills:
            chunk = step.chunks[i]
            self._fill_voice(chunk.sequence, chunk.start, chunk.length, ends[i] - chunk.length + 1)
        self._prompts.send(n_blocks)
        self._prefills[n_blocks].run()
        return self._send([draw.sequence for draw in draws], "prefill")

    def _fill_voice(self, sequence: Sequence, start: int, length: int, row: int) -> None:
        """Puts rows that are the voice's where the prefill reads them: its tokens start .. start + length from row `row` on."""
        voice = sequence.voice
        if voice is None:
            return
        sides = np.array(sequence.tokens[start : start + length], np.int64) % N_SIDE
        speaker, frames = self._on_device(voice)
        rows = self.buffers.prefill.voice[row : row + length]
        for i in np.flatnonzero(sides == SPEAKER).tolist():
            rows[i].copy_(speaker)
        at = np.flatnonzero(sides >= FRAME)
        while len(at) and frames is not None:  # runs of frames that follow each other
            n = (
                int(np.argmin(np.append(np.diff(at) == 1, False) & np.append(np.diff(sides[at]) == 1, False)))
                + 1
            )
            first = int(sides[at[0]]) - FRAME
            rows[int(at[0]) : int(at[0]) + n].copy_(frames[first : first + n])
            at = at[n:]

    def _on_device(self, voice: Any) -> tuple[Tensor, Tensor | None]:
        """A voice's speaker vector and frames on the device, kept for the voices used last."""
        held = self._voice_rows.pop(id(voice), None)
        if held is None or held[0] is not voice:
            speaker, frames = voice.speaker.float(), voice.frames
            if frames is not None:
                frames = frames.float().to(self.device, non_blocking=True)
            held = (voice, speaker.to(self.device, non_blocking=True), frames)
        self._voice_rows[id(voice)] = held
        while len(self._voice_rows) > self.plan.max_num_seqs:
            self._voice_rows.pop(next(iter(self._voice_rows)))
        return held[1], held[2]

    def _run_ahead(self, step: Step) -> None:
        """Starts the next decode of every sequence that draws in this step, where it has a page for one token more, and a text."""
        sequences, n_keys = [], 0
        for draw in step.draws if self.levers.run_ahead else []:
            sequence = draw.sequence
            position = len(sequence.tokens)
            frame, speech = position - sequence.n_prompt, sequence.request.speech or DEFAULT_SPEECH
            is_last = frame + 1 >= sequence.request.params.max_tokens
            if is_last or not speech.knows_text(frame) or position >= len(sequence.pages) * PAGE_SIZE:
                continue
            assert sequence.place is not None
            self.places.put_pages(sequence.place, sequence)
            self.places.put_texts(sequence.place, sequence)
            sequences.append(sequence)
            n_keys = max(n_keys, position + 1)
        # What nobody asked for is of sequences that have ended, or that have no chunk in this step: preempted ones, mostly.
        self._ahead = {s: ahead.only(s) for s, ahead in self._ahead.items() if s.finish_reason is None}
        if sequences:
            pending = self._decode(sequences, n_keys)
            self._ahead |= {s: Ahead(len(s.tokens), pending, s.n_preempted) for s in sequences}

    def _read(self, step: Step, results: dict[Sequence, Pending]) -> StepResult:
        """Waits for the tokens and codes of this step; the decode that runs ahead goes on."""
        for pending in {id(p): p for p in results.values()}.values():
            pending.wait()
        tokens = []
        for draw in step.draws:
            pending = results[draw.sequence]
            tokens.append([int(pending.tokens[pending.rows[draw.sequence]])])
        result = StepResult(tokens, [None] * len(tokens), {})
        decodes = [chunk.sequence for chunk in step.chunks if chunk.is_decode]
        result.codes = np.empty((len(decodes), N_CODES), np.int32)
        for i, sequence in enumerate(decodes):
            pending = results[sequence]
            assert pending.codes is not None
            result.codes[i] = pending.codes[pending.rows[sequence]].numpy()
        return result

    def frame_embeddings(self, codes: Tensor) -> Tensor:
        return self.tts.frame_embeddings(codes)

    def recordings(self) -> list[Recording]:
        """All of them, the vocoder's, too: what serving will replay."""
        return [*self._decodes.values(), *self._prefills.values(), *self.vocoder.recordings()]

    def logits(self, n_rows: int) -> Tensor:
        """float32 [n_rows, n_drawn]: of the last decode. For tests and benches."""
        return self.buffers.decode.logits.view(-1, self.plan.shape.n_drawn)[:n_rows]


def _drawn(ahead: Ahead) -> Pending:
    """What a decode drew that ran ahead: a speech model draws without masks, so never later."""
    assert ahead.pending is not None
    return ahead.pending
