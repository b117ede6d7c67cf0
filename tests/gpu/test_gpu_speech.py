"""A speech model on a GPU, or on its kernels interpreted: the oracle's codes, and the same bits in any company.

What is said and how it is compared is `tests/cpu/test_speech_engine.py`'s. Interpreted, products are computed in float64 and the
vocoder is silent (`test_gpu_vocoder.py` has that).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence as Items
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")
from deltic.config import ConfigError, EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import AddText, Request, SamplingParams, Speech
from deltic.engine.stage import SpeechStage, to_pcm
from deltic.engine.step import Chunk, Sequence, Step, StepResult
from deltic.models.tts import gpu as tts_gpu
from deltic.models.tts.shape import FRAME, PUBLISHED_SPEECH, SPEAKER, SpeechShape
from deltic.models.tts.weights import load_speech_weights
from deltic.ops.gpu.frames import CodeTables, FrameParameters, FrameRows, draw_code
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.weight import DeviceStore
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.vocoder import Vocoded
from deltic.runtime.gpu import device as gpu
from deltic.runtime.gpu.batch_slots import batch_table
from deltic.runtime.gpu.speech import GpuSpeechRunner, SpeechBatchSlots
from deltic.runtime.plan import SpeechPlan
from deltic.runtime.voices import Voice
from tests.cpu.test_speech_engine import CASES, Speaking, long_request, regrets, request_of
from tests.gpu.test_gpu_engine import without_syncs
from tests.gpu.test_gpu_vocoder import exact_products  # noqa: F401
from tests.planned import planned
from tests.reference.sample import sample as oracle_sample
from tests.tiny_speech import N_CODES, tiny_speech

pytestmark = pytest.mark.usefixtures("one_thread")

HAS_GPU = torch.cuda.is_available()
IS_LONG = HAS_GPU or "DELTIC_TEST_LONG" in os.environ
long = pytest.mark.skipif(not IS_LONG, reason="needs a GPU, or DELTIC_TEST_LONG: minutes in the interpreter")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
N_FRAMES = 12 if HAS_GPU else 2 if IS_LONG else 1


class Silent:
    """A vocoder of silence."""

    def open(self, state_slot: int, state: NDArray[np.float32] | None = None) -> None:
        pass

    def begin(self, chunks: Items[tuple[int, NDArray[np.int32]]]) -> Vocoded:
        return Vocoded([np.zeros(1920 * len(codes), np.float32) for _, codes in chunks])


class SpeakingGpu(Speaking):
    def __init__(self, variant: str = "custom_voice", wide: bool = False, **settings: Any) -> None:
        self.path = tiny_speech(variant, wide=wide)
        small = {"max_num_seqs": 16, "max_step_tokens": 512} if HAS_GPU else {"max_num_seqs": 3, "max_step_tokens": 64}  # fmt: skip
        config = EngineConfig(
            model=str(self.path), **{"max_model_len": 256, "n_pages": 64, "cache_host_gb": 0.0} | small | settings
        )  # fmt: skip
        runner = build_runner(config, lambda stage, done: None, gpu.Gpu())
        self.vocoder, runner.vocoder = runner.vocoder, Silent()
        self.runner, self.shape = runner, runner.plan.shape
        self.engine = Engine(runner)
        self.codes, self.past, self.audio, self.n_prefill_tokens = {}, {}, {}, 0
        self._step = runner.step
        runner.step = self._watched  # type: ignore[method-assign]
        if runner.voices is not None:
            runner.voices.close(1.0)
        self.voices = runner.voices = {}

    def _watched(self, step: Step) -> StepResult:
        result = self._step(step)
        for i, chunk in enumerate(step.chunks):
            if not chunk.is_decode:
                self.n_prefill_tokens += chunk.length
                continue
            sequence = chunk.sequence
            frames = self.codes.setdefault((sequence.request.id, sequence.index), [])
            t, frame = chunk.start - sequence.n_prompt, result.codes[i].tolist()
            if t < len(frames):
                assert frames[t] == frame  # computed again, to the same bits
            else:
                frames.append(frame)
        return result


@cache
def said(variant: str, wide: bool) -> tuple[SpeakingGpu, list[dict[str, Any]], list[Request], dict[Any, Any]]:
    """Greedy cases, run together: the engine, the cases, their requests and the last Outputs."""
    speaking = SpeakingGpu(variant, wide)
    cases = [case for case in CASES if case["variant"] == variant and case["wide"] == wide]
    cases = cases if HAS_GPU else cases[-1:]
    requests = [request_of(speaking, case, str(i), max_tokens=N_FRAMES + 1) for i, case in enumerate(cases)]
    return speaking, cases, requests, speaking.run(*requests)


@pytest.mark.parametrize(
    ("variant", "wide"),
    [(v, w) for v in ("custom_voice", "voice_design", "base") for w in (False, True)] if IS_LONG else [("base", True)],
)
def test_greedy_codes_are_the_oracles(variant: str, wide: bool) -> None:
    """Every code is the oracle's choice behind the same codes, or one that bfloat16 cannot tell from it."""
    speaking, cases, _, last = said(variant, wide)
    n_same = n_all = 0
    for i, case in enumerate(cases):
        frames, ended = speaking.codes[str(i), 0], last[str(i), 0].finish_reason == "stop"
        assert ended or len(frames) == N_FRAMES
        found = regrets(speaking, case, frames[:7], ended=ended and len(frames) <= 7)
        assert found.max() < 0.1
        n_same, n_all = n_same + int((found[: len(frames)] == 0).sum()), n_all + 16 * min(7, len(frames))
    assert n_same > 0.95 * n_all


def test_what_was_lost_is_computed_again() -> None:
    """A prompt without a draw behind it, then a frame without one: what a preempted sequence without host memory goes through."""
    speaking, _, requests, _ = said("base", True)
    request = requests[-1]
    frame = speaking.codes[request.id, 0][0]
    n = len(request.prompt_ids)
    sequence = Sequence(
        request, 0, 1, array("i", [*request.prompt_ids, frame[0]]), n, pages=[1, 0], batch_slot=1, state_slot=2
    )
    assert request.speech is not None
    sequence.voice = speaking.voices[request.speech.voice]
    for chunk in (Chunk(sequence, 0, n), Chunk(sequence, n, 1)):
        result = speaking._step(Step(chunks=[chunk]))
        sequence.n_computed += chunk.length
    assert result.codes[0].tolist() == frame


def drawn(speaking: Speaking, n: int) -> list[Request]:
    """Requests with other texts, seeds and lengths, drawn with the published parameters."""
    cases = [
        case for case in CASES if case["variant"] == "custom_voice" and case["wide"] == speaking.shape.has_projection
    ]
    return [
        request_of(
            speaking, case, f"drawn {i}", 0.9, seed=i, max_tokens=N_FRAMES + 1 + i % 2, top_p=1.0 if i else 0.8
        )
        for i, case in enumerate(cases[:n])
    ]  # fmt: skip


@long
@pytest.mark.parametrize("wide", [False, True])
def test_a_batch_changes_nothing(wide: bool) -> None:
    speaking = SpeakingGpu(wide=wide)
    requests = drawn(speaking, 4 if HAS_GPU else 2)
    alone = [speaking.frames(request) for request in requests]
    speaking.run(*requests)
    assert [speaking.codes[request.id, 0] for request in requests] == alone
    params = msgspec.structs.replace(requests[0].params, seed=99)
    assert speaking.frames(msgspec.structs.replace(requests[0], id="other", params=params)) != alone[0]


@long
def test_cuts_and_the_cache_change_nothing() -> None:
    whole = SpeakingGpu(prefix_cache=False, max_step_tokens=192)
    request = long_request(whole, 130)
    params = msgspec.structs.replace(request.params, max_tokens=N_FRAMES + 1)
    request = msgspec.structs.replace(request, params=params)
    expected = whole.frames(request)
    cut = SpeakingGpu(max_step_tokens=64)
    assert cut.frames(request) == expected and cut.n_prefill_tokens == 130
    cut.run(request)
    assert cut.codes["long", 0] == expected and cut.n_prefill_tokens == 132


def test_a_text_that_comes_in_pieces_changes_nothing() -> None:
    """Where it stalls nothing runs ahead; what came meanwhile is on the device before the frame that needs it."""
    speaking, _, requests, _ = said("base", True)
    n, more, speech = 12 if HAS_GPU else 2, msgspec.structs.replace, requests[-1].speech
    assert speech is not None
    texts = tuple(range(20, 20 + n))
    params = more(requests[-1].params, max_tokens=n + 1, min_tokens=n + 1)
    request = more(requests[-1], params=params, speech=more(speech, trailing_ids=texts))
    expected = speaking.frames(request)
    engine = speaking.engine
    for n_first in (0, 1, 5) if HAS_GPU else (0,):
        id, opened = f"from {n_first}", more(speech, trailing_ids=texts[:n_first], is_open=True)
        engine.add(more(request, id=id, speech=opened))
        for at in range(n_first, n):
            while engine.has_work():
                engine.step()
            assert engine.scheduler.n_stalled == 1 and len(speaking.codes.get((id, 0), [])) == at
            engine.add_text(AddText(id, [texts[at]], at == n - 1))
        speaking.run()
        assert speaking.codes[id, 0] == expected


@needs_gpu
@pytest.mark.parametrize("host_gb", [0.0, 0.01])
def test_preemption_changes_nothing(host_gb: float) -> None:
    whole = SpeakingGpu()
    cramped = SpeakingGpu(n_pages=6, cache_host_gb=host_gb, prefix_cache=False)
    requests = []
    for i in range(3):
        request = long_request(whole, 100 + i, f"{i}")
        params = msgspec.structs.replace(request.params, max_tokens=60, seed=i, min_tokens=60)
        requests.append(msgspec.structs.replace(request, params=params))
    expected = [whole.frames(request) for request in requests]
    cramped.run(*requests)
    assert cramped.engine.stats().n_preemptions > 0
    assert [cramped.codes[request.id, 0] for request in requests] == expected


@needs_gpu
def test_not_running_ahead_changes_nothing() -> None:
    ahead, behind = SpeakingGpu(), SpeakingGpu(lever=("run_ahead=off",))
    for request in drawn(ahead, 3):
        assert ahead.frames(request) == behind.frames(request)


@needs_gpu
def test_audio_is_that_of_the_codes_beside_steps_and_voices() -> None:
    """Chunks run beside steps and beside a voice that is primed, and only events are waited for: the audio is that of the same codes in
    one piece, and the voice's state that of its codes."""
    check_audio(N_FRAMES, 40)


def check_audio(n_frames: int, n_primed: int) -> None:
    speaking = SpeakingGpu()
    runner, vocoder, engine = speaking.runner, speaking.vocoder, speaking.engine
    runner.vocoder, engine.stage = vocoder, SpeechStage(vocoder, runner.n_streams)
    voice = np.random.default_rng(0).integers(N_CODES, size=(n_primed + 2, 16), dtype=np.int32)
    state, n_done = None, 0
    requests = drawn(speaking, 4 if n_frames > 1 else 1)
    for request in requests:
        engine.add(
            msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, min_tokens=n_frames + 1))
        )
    audio = {request.id: b"" for request in requests}
    while engine.has_work() or n_done < n_primed:
        with without_syncs():
            for output in engine.step():
                assert output.error is None
                audio[output.id] += output.audio
        if n_done < n_primed:
            piece, n_done = voice[n_done : min(n_done + 4, n_primed)], min(n_done + 4, n_primed)
            state = runner.prime(piece, state, n_primed - n_done)
    for request in requests:
        vocoder.open(0)
        codes = np.array(speaking.codes[request.id, 0], np.int32)
        assert audio[request.id] == to_pcm(vocoder.vocode([(0, codes)])[0])
    vocoder.open(1, state)
    rest = vocoder.vocode([(1, voice[n_primed:])])[0]
    vocoder.open(1)
    assert np.array_equal(rest, vocoder.vocode([(1, voice)])[0][-len(rest) :])


def test_rows_of_a_voice_are_its_frames() -> None:
    """Whatever runs they make: alone, in order, again, backwards, with gaps in the prompt and in the voice."""
    voice = Voice(np.full(2, 9, np.float32), frames=np.arange(12, dtype=np.float32).reshape(6, 2))
    runner = GpuSpeechRunner.__new__(GpuSpeechRunner)
    runner.device, runner._voice_rows = torch.device("cpu"), {}
    runner.plan = SimpleNamespace(max_num_seqs=2)  # type: ignore[assignment]
    order = [None, None, 1, 2, None, 3, 4, 4, 0, -1, 5, None]
    sides = [SPEAKER if i == -1 else 7 if i is None else FRAME + i for i in order]
    for tokens in (sides, sides[:2]):
        rows = torch.zeros(20, 2)
        runner.workspace = SimpleNamespace(prefill=SimpleNamespace(voice=rows))  # type: ignore[assignment]
        request = Request(id="", prompt_ids=[], params=SamplingParams())
        sequence = Sequence(request, 0, 0, array("i", tokens), len(tokens), voice=voice)
        runner._fill_voice(sequence, 1, len(tokens) - 1, 3)
        assert voice.frames is not None
        for i, row in zip(order[1:], rows[3 : 3 + len(tokens) - 1], strict=False):
            assert row.tolist() == ([0, 0] if i is None else [9, 9] if i == -1 else voice.frames[i].tolist())


def test_texts_of_a_place_are_sent_once_and_become_more() -> None:
    more = {"code_seed": 2, "code_temperature": 1, "code_top_p": 1, "code_top_k": 1, "n_trailing": 1}
    table, offsets, views = batch_table(
        2, 64, lambda _, size, dtype: torch.full(size, -1, dtype=dtype), {**more, "trailing": 64}
    )
    parameters = SimpleNamespace(masks=torch.zeros((2, 4), dtype=torch.int32))
    workspace = SimpleNamespace(table=table, offsets=offsets, parameters=parameters)
    batch_slots = SpeechBatchSlots(workspace, 99, 100, 64)  # type: ignore[arg-type]

    def sequence(*texts: int) -> Sequence:
        speech = Speech(trailing_ids=texts, temperature=0.5)
        request = Request(id="", prompt_ids=[], params=SamplingParams(repetition_penalty=1.5), speech=speech)
        return Sequence(request, 0, 5, array("i", [300, 400, 8]), 2, batch_slot=1)

    def texts() -> list[int]:
        batch_slots.flush()
        return views["trailing"][1, : int(views["n_trailing"][1])].tolist()

    one = sequence(4, 5, 6)
    batch_slots.refresh(one)
    assert texts() == [4, 5, 6] and views["code_temperature"].view(torch.float32)[1] == 0.5
    assert views["history"][1, :3].tolist() == [-1, -1, 8]
    batch_slots.refresh(one)
    assert not batch_slots._keys
    one.request.speech = msgspec.structs.replace(one.request.speech, trailing_ids=(4, 5, 6, 7))
    batch_slots.refresh(one)
    assert texts() == [4, 5, 6, 7]
    batch_slots.refresh(sequence(1))
    assert texts() == [1]
    batch_slots.refresh(sequence())
    assert texts() == []


def test_memory_is_planned_and_refused() -> None:
    shape = PUBLISHED_SPEECH["qwen3-tts-1.7b"]

    def plan(free_gb: float, **settings: Any) -> SpeechPlan:
        config, kind = EngineConfig(model="", **settings), gpu.SpeechOnGpu(Levers())
        return planned(config, shape, kind, shape.n_drawn, int(free_gb * 1e9))

    roomy = plan(140)
    assert roomy.max_num_seqs == 64 and roomy.n_pages >= 64 * 64
    assert roomy.total_bytes - roomy.host_bytes <= roomy.budget_bytes
    assert 1 <= plan(9).max_num_seqs < 64
    for free_gb, settings, message in (
        (3, {}, "the model does not fit"), (140, {"n_pages": 10**6}, r"--n-pages 1000000 .* give at most \d+"),
        (140, {"n_pages": 3, "max_model_len": 4096}, "at least 64"), (140, {"memory_gb": 139.8}, "of the device are free"),
        (140, {"quantize": "int8"}, "--quantize"), (140, {"max_step_tokens": 100}, "multiple of 64"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            plan(free_gb, **settings)


def test_texts_are_projected_and_their_table_is_given_back(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The plan does not count the table; the rows are those of one product."""
    directory = tiny_speech("custom_voice", wide=True)
    shape = SpeechShape.from_directory(directory)
    weights, _ = load_speech_weights(directory, shape, store=DeviceStore(device))
    whole = tts_gpu.project_texts(weights)
    monkeypatch.setattr(tts_gpu, "TEXTS_AT_ONCE", shape.text_vocab_size // 2 - 1)
    model = tts_gpu.TtsGpu(shape, weights, 64)
    assert model.texts.shape == whole.shape and torch.allclose(model.texts, whole, atol=1e-6)
    assert weights.text_table.untyped_storage().nbytes() == 0


def test_a_code_is_drawn_by_the_rule(device: str) -> None:
    """Against reference/sample.py: greedy, filters, parts of the logits; the sum and the next row; what is not finite."""
    n, n_codes, h = 6, 2048, 64
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, n, n_codes, generator=generator) * 2
    logits[:, 5, 7] = torch.nan
    settings = [(0.0, 0, 1.0), (0.9, 50, 1.0), (0.7, 0, 0.8), (1.3, 20, 0.5), (1.0, 0, 1.0), (0.9, 50, 1.0)]
    integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    seeds = torch.tensor([3, 1 << 40, 7, 8, 9, 10], dtype=torch.int64)
    parameters = FrameParameters(
        temperature=torch.tensor([s[0] for s in settings]).to(device), top_k=torch.tensor([s[1] for s in settings], **integers),
        top_p=torch.tensor([s[2] for s in settings]).to(device), seed=seeds.to(device), n_prompt=torch.zeros(n, **integers),
        n_trailing=torch.tensor([2] * n, **integers), trailing=torch.tensor([[4, 5, 0]] * n, **integers),
    )  # fmt: skip
    frames = torch.tensor([0, 1, 2, 3, 1, 5], **integers)
    table = torch.randn(n_codes, h, generator=generator).bfloat16().to(device)
    texts = torch.randn(6, h, generator=generator).to(device)
    for step in (2, 15):
        rows = FrameRows(
            torch.arange(n, **integers), torch.zeros(n, **integers), frames, frames, torch.full((n, 16), -9, **integers),
            torch.ones(n, h, device=device),
        )  # fmt: skip
        rows.state_slot[4] = -1
        residual = torch.full((n, h), -1.0, device=device)
        inner = table if step < 15 else None
        draw_code(logits.to(device), step, parameters, rows, CodeTables(table, inner), residual, texts, 3)
        codes = rows.codes.cpu()
        for i in range(4):
            temperature, top_k, top_p = settings[i]
            expected = oracle_sample(
                logits[0, i] + logits[1, i], SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p), int(seeds[i]),
                int(frames[i]) * 16 + step,
            )  # fmt: skip
            code = int(codes[i, step])
            assert code == expected
            total = 1 + table[code].float().cpu()
            if step == 15:
                total += texts[[4, 5, 3, 3][i]].cpu()
            else:
                assert torch.equal(residual[i].cpu(), table[code].float().cpu())
            assert torch.equal(rows.sums[i].cpu(), total)
        assert codes[4].eq(-9).all() and rows.sums[4].eq(1).all()
        assert rows.sums[5].isnan().all() and 0 <= codes[5, step] < n_codes
