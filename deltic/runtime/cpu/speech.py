"""A speech model on the CPU: its memory, and the recorded step from row ids to drawn codes.

A step is one program (`models/tts/cpu.py`): fill the buffers, run it, read the tokens and the frames' codes. The vocoder is beside it:
what is made of the codes, and when, is `speech.py`'s to say.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.cache.tiers import Bytes, Tiers
from deltic.engine.messages import MAX_FIRST_FRAMES, EngineInfo, Request, SamplingParams, Speech
from deltic.engine.scheduler import RequestError
from deltic.engine.step import Chunk, Draw, Sequence, Step, StepResult
from deltic.engine.stopwatch import stopwatch
from deltic.machine import free_memory_bytes
from deltic.models.checkpoint import locate_speech, model_name
from deltic.models.packed import map_parts, through_cache
from deltic.models.tts.cpu import PAD_ROW, SpeechMemory, Tts
from deltic.models.tts.shape import FRAME, N_SIDE, SPEAKER, codec_side
from deltic.models.tts.weights import (
    SpeechWeights,
    dummy_speech_weights,
    empty_speech_weights,
    load_speech_weights,
)
from deltic.models.vocoder.cpu import SEEN_FRAMES
from deltic.models.vocoder.weights import dummy_vocoder, load_vocoder
from deltic.ops.cpu.program import Program, chosen, instruction_set, load_library
from deltic.ops.cpu.vocoder import multiplies_half
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.cpu.plan import Arena
from deltic.runtime.cpu.speech_plan import SpeechPlan, build_speech_workspace, make_speech_plan
from deltic.runtime.cpu.vocoder import VocoderStreams
from deltic.runtime.voices import Voices, open_voices

Progress = Callable[[str, float], None]


class SpeechRunner:
    """Talker, predictor and vocoder on the CPU, with their memory. Not thread-safe: one engine loop owns it."""

    def __init__(
        self, plan: SpeechPlan, weights: SpeechWeights, vocoder: dict[str, Tensor],
        progress: Progress = lambda stage, done: None,
    ) -> None:  # fmt: skip
        """vocoder: of load_vocoder; it is used up."""
        shape = plan.shape
        self.plan = plan
        self.max_logit_rows = plan.max_num_seqs + PAGE_SIZE
        self.voices: Voices | None = None
        """Of a Base model, once they are opened."""
        arena = Arena()
        d = shape.talker
        self.memory = SpeechMemory(
            pages=arena.allocate(
                "pages", (plan.n_pages, d.n_layers, 2, d.n_kv_heads, PAGE_SIZE, d.head_dim), torch.bfloat16
            ),
            past=arena.allocate("past", (plan.max_num_seqs, d.hidden_size), torch.bfloat16),
        )
        host = arena.allocate("host tier", (plan.n_host_units, plan.page_bytes), torch.uint8)
        self.workspace = build_speech_workspace(plan, arena)
        self.vocoder = VocoderStreams(
            shape.vocoder, vocoder, n_streams=plan.n_streams + 1, n_threads=plan.n_threads, cpus=plan.cpus,
            allocate=arena.allocate, half=self.has_half_vocoder,
        )  # fmt: skip
        arena.touch(lambda done: progress("memory", done))
        self.tiers: Tiers | None = self._open_tiers(host.numpy()) if plan.n_host_units else None
        self.model = Tts(shape, weights, plan.max_model_len)
        self._project_pad()
        self.program = Program(plan.n_threads, cpus=plan.cpus)
        batch, activations = self.workspace.batch, self.workspace.activations
        self.model.record(self.program, batch.inputs, self.memory, batch.draws, activations)
        self.workspace.sampler.record(self.program, activations.logits)
        self._warm_up()
        self.info = EngineInfo(
            model_name="",
            vocab_size=shape.n_drawn,
            eos_token_ids=[shape.end_id],
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_step_tokens=plan.max_step_tokens,
            n_pages=plan.n_pages,
            n_slots=plan.max_num_seqs,
            device="cpu",
            canonical_decode=False,
            page_bytes=plan.page_bytes,
            state_bytes=shape.state_bytes,
            even_context=d.layer_params / (2 * d.n_layers * d.q_rows),
            operators=chosen()
            | {"vocoder": f"cpu {instruction_set()}{', bfloat16' * self.has_half_vocoder}"},
            n_prompt_ids=shape.n_prompt_ids,
            is_speech=True,
            has_state=False,
        )

    @property
    def has_half_vocoder(self) -> bool:
        """Whoever quantises the talker takes bfloat16 in the vocoder's decoder, too, where that is faster."""
        return self.plan.quantize is not None and multiplies_half(instruction_set())

    @property
    def n_streams(self) -> int:
        """Streams that the vocoder has slots for; the one behind them is `prime`'s."""
        return self.plan.n_streams

    def _open_tiers(self, host: Bytes) -> Tiers:
        """Host memory, for preempted sequences alone."""
        pages, past = (
            tensor.view(torch.uint8).view(len(tensor), -1).numpy()
            for tensor in (self.memory.pages, self.memory.past)
        )
        tiers = Tiers(
            lambda page: [pages[page]], lambda slot: [past[slot]], host, self.plan.shape.state_bytes, None, 0, ""
        )  # fmt: skip
        tiers.takes_evicted = False
        return tiers

    def _project_pad(self) -> None:
        """The pad text's row, by the kernels that a step would compute it with."""
        inputs, activations = self.workspace.batch.inputs, self.workspace.activations
        program = Program(self.plan.n_threads, cpus=self.plan.cpus)
        self.model.record_texts(program, inputs, activations, activations.text_rows[PAD_ROW : PAD_ROW + 1])
        inputs.text_ids[0] = self.plan.shape.ids.tts_pad
        inputs.n_texts.fill_(1)
        program.run()

    def _warm_up(self) -> None:
        """A prompt of one empty row and a frame, through everything; they leave their mark in page 0 and slot 0 only."""
        request = Request(id="warm-up", prompt_ids=[], params=SamplingParams(temperature=0.0))
        sequence = Sequence(request, 0, 0, array("i", [0, 0]), n_prompt=1, pages=[0], place=0, slot=0)
        for start in (0, 1):
            self.step(Step(chunks=[Chunk(sequence, start, 1)], draws=[Draw(0, sequence)]))

    def check_speech(self, request: Request) -> Any:
        """The encoded voice that the request names, None without one. Raises RequestError for what this model cannot speak."""
        shape, params, speech = self.plan.shape, request.params, request.speech or Speech()
        for name, given in (
            ("a constraint", params.constraint), ("prompt_logprobs", params.prompt_logprobs is not None),
            ("ignore_eos", params.ignore_eos),
        ):  # fmt: skip
            if given:
                raise RequestError(f"{name} means nothing to a speech model; leave it out")
        for field, value, least, most in (
            ("temperature", speech.temperature, 0.0, 1e6), ("top_k", speech.top_k, 0, 2**31 - 1), ("top_p", speech.top_p, 0.0, 1.0),
            ("first_chunk_frames", speech.first_chunk_frames, 0, MAX_FIRST_FRAMES),
        ):  # fmt: skip
            if not least <= value <= most:  # false for NaN too
                raise RequestError(f"speech.{field} = {value}: must be from {least} to {most}")
        self.check_texts(speech.trailing_ids)
        sides = {row % N_SIDE for row in request.prompt_ids}
        voice = None
        if speech.voice:
            voice = self.voices.get(speech.voice) if self.voices is not None else None
            if voice is None:
                raise RequestError(f"voice {speech.voice!r} is not encoded here (any more); encode it again")
        n_frames = 0 if voice is None or voice.frames is None else len(voice.frames)
        for side in sides:
            if side < codec_side(shape.talker.vocab_size):
                continue
            if side < SPEAKER:
                raise RequestError(f"prompt has a row with a codec side {side} that does not exist")
            if voice is None or side - FRAME >= n_frames:
                raise RequestError(
                    "prompt has a row of a voice, or of a reference frame, that the request does not name"
                )
        if speech.is_primed and (voice is None or voice.codes is None):
            raise RequestError("speech.is_primed needs a voice with reference codes")
        return voice

    def check_texts(self, text_ids: Iterable[int]) -> None:
        """Raises RequestError for an id that is none of a text."""
        n = self.plan.shape.text_vocab_size
        if not all(0 <= i < n for i in text_ids):
            raise RequestError(f"speech.trailing_ids has an id outside the text vocabulary (0 to {n - 1})")

    def step(self, step: Step) -> StepResult:
        """Runs one forward and the draws. Row i of the logits is chunk i's; each chunk leaves the talker's last output in its slot."""
        batch, sampler = self.workspace.batch, self.workspace.sampler
        batch.fill(step)
        sampler.fill(step, list(range(len(step.chunks))))
        self.program.run()
        memory = self.memory
        for source, target in step.slot_copies:
            memory.past[target].copy_(memory.past[source])
        for source, target in step.page_copies:
            memory.pages[target].copy_(memory.pages[source])
        result = sampler.read(step)
        result.codes = batch.read_codes(step)
        return result

    def logits(self, n_rows: int) -> Tensor:
        """float32 [n_rows, n_drawn]: the logits of the last step, one row a chunk. For tests and benches."""
        return self.workspace.activations.logits[:n_rows]

    def frame_embeddings(self, codes: Tensor) -> Tensor:
        """float32 [R, h]: what the prompt's rows of reference frames are, of their codes [R, 16]."""
        return self.model.frame_embeddings(codes)

    def prime(self, codes: Tensor, state: Tensor | None, n_after: int = 0) -> Tensor:
        """The vocoder's state behind codes, int32 [n, 16], from a state or from the begin. n_after: frames that it will be primed
        with behind these; where there are enough, most of the work is left out."""
        slot, frames = self.n_streams, codes.to(torch.int32).numpy()
        self.vocoder.open(slot, state)
        if n_after >= SEEN_FRAMES:
            self.vocoder.skim(slot, frames)
        else:
            self.vocoder.vocode([(slot, frames)])
        return self.vocoder.state_of(slot)


def build_speech_runner(config: EngineConfig, progress: Progress) -> SpeechRunner:
    """Locates, plans, loads and records. Raises ValueError subclasses (bad checkpoint, plan that does not fit)."""
    lap, spent = stopwatch()

    def on_bytes(done: int, total: int) -> None:
        progress("weights", done / max(1, total))

    progress("plan", 0.0)
    directory, shape = locate_speech(config)
    plan = make_speech_plan(config, shape, free_memory_bytes())
    lap("plan")
    is_dummy, n_threads = config.dummy is not None, plan.n_threads

    def map_file(file: Path) -> tuple[SpeechWeights, list[str]]:
        return map_parts(
            file,
            lambda quantize, _: empty_speech_weights(shape, quantize, device="meta"),
            n_threads,
            on_bytes,
        )

    def load() -> tuple[SpeechWeights, list[str]]:
        if is_dummy:
            weights = dummy_speech_weights(
                shape, config.seed, on_bytes, quantize=config.quantize, n_threads=n_threads
            )
            return weights, []
        return load_speech_weights(directory, shape, on_bytes, quantize=config.quantize, n_threads=n_threads)

    weights, notices = through_cache(config, directory, map_file, load)
    vocoder = (
        dummy_vocoder(shape.vocoder, config.seed) if is_dummy else load_vocoder(directory, shape.vocoder)
    )
    lap("weights")
    runner = SpeechRunner(plan, weights, vocoder, progress)
    lap("memory")
    if shape.variant == "base":
        library = Path(load_library(runner.program.instruction_set)._name)
        runner.voices = open_voices(config, directory, shape.talker.hidden_size, runner, library)
    runner.info.model_name = model_name(config)
    if config.cache_dir is not None and config.prefix_cache:
        notices = [*notices, "--cache-dir keeps voices only: prefixes of a speech model stay in memory"]
    runner.info.notices = notices
    runner.info.prefix_cache = config.prefix_cache
    runner.info.start_s = spent
    return runner
