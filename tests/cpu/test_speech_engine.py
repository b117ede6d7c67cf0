"""The talker and its predictor in the engine: the reference's codes, and the same bits in any company."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deltic.config import ConfigError, EngineConfig
from deltic.engine.checks import RequestError
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams, Speech
from deltic.engine.step import Step, StepResult
from deltic.models.fields import CheckpointError
from deltic.models.loading import COUNTED, Declaration
from deltic.models.tts.shape import FRAME, PUBLISHED_SPEECH, SPEAKER, SpeechShape, codec_side, row_id
from deltic.models.tts.weights import declare_speech, load_speech_weights
from deltic.ops.arrays import Array
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.speech import SpeechRunner
from tests.planned import planned
from tests.reference import speech as oracle
from tests.reference.vocoder import decode
from tests.spoilt import every_byte, spoil, spoil_before_each_run
from tests.tensors import array_of, tensor_of
from tests.tiny_speech import tiny_speech

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = Path(__file__).parents[1] / "golden" / "speech"
GOLDENS = json.loads((GOLDEN / "cases.json").read_text())
CASES: list[dict[str, Any]] = GOLDENS["cases"]
FORMATS = (None, "int8", "int4")


@dataclass
class Voice:
    speaker: Array
    codes: Array | None
    frames: Array | None
    state: Array | None = None


class Speaking:
    """An engine of a tiny checkpoint, which remembers each sequence's frames."""

    def __init__(self, variant: str = "custom_voice", wide: bool = False, **settings: Any) -> None:
        self.path = tiny_speech(variant, wide=wide)
        config = EngineConfig(
            model=str(self.path), device="cpu", **{"threads": 2, "max_model_len": 512, "memory_gb": 1} | settings
        )
        runner = build_runner(config, lambda stage, done: None)
        assert isinstance(runner, SpeechRunner)
        self.runner, self.shape = runner, runner.plan.shape
        self.engine = Engine(runner)
        self.codes: dict[tuple[str, int], list[list[int]]] = {}
        self.past: dict[tuple[str, int], bytes] = {}
        self.audio: dict[tuple[str, int], bytes] = {}
        self.n_prefill_tokens = 0
        self._step = runner.step
        runner.step = self._watched  # type: ignore[method-assign]
        if runner.voices is not None:
            runner.voices.close(1.0)
        self.voices: dict[str, Voice] = {}
        runner.voices = self.voices  # type: ignore[assignment]

    def _watched(self, step: Step) -> StepResult:
        result = self._step(step)
        assert result.codes.shape == (sum(c.is_decode for c in step.chunks), 16)
        for i, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            key = sequence.request.id, sequence.index
            if chunk.is_decode:
                frames, t = self.codes.setdefault(key, []), chunk.start - sequence.n_prompt
                frame = result.codes[i].tolist()
                if t < len(frames) and not sequence.request.id.startswith("fit"):
                    assert frames[t] == frame  # computed again, to the same bits
                else:
                    frames.append(frame)
                self.past[key] = self.runner.memory.past[sequence.state_slot].tobytes()
            else:
                self.n_prefill_tokens += chunk.length
        return result

    def run(self, *requests: Request) -> dict[tuple[str, int], Output]:
        """The last Output of each sequence."""
        for request in requests:
            self.engine.add(request)
        last = {}
        while self.engine.has_work():
            for output in self.engine.step():
                self.audio[output.id, output.index] = self.audio.get((output.id, output.index), b"") + output.audio
                if output.finish_reason is not None:
                    last[output.id, output.index] = output
        self.engine.check()
        assert self.engine.cache.n_pages_used == 0 == self.engine.cache.n_slots_used
        return last

    def frames(self, request: Request) -> list[list[int]]:
        """What the request says alone, in this engine."""
        key = f"{request.id} alone"
        self.run(msgspec.structs.replace(request, id=key))
        return self.codes[key, 0]


def rows_of(shape: SpeechShape, case: dict[str, Any], n_frames: int = 0) -> tuple[list[int], tuple[int, ...]]:
    """Row ids of a prompt, and the text ids still to come."""
    ids = shape.ids
    body = case["input_ids"][3:-5]
    language = shape.language_id(case.get("language"), case.get("speaker"))
    control = [ids.codec_nothink, ids.codec_think_bos, ids.codec_think_eos]
    if language is not None:
        control = [ids.codec_think, ids.codec_think_bos, language, ids.codec_think_eos]
    sides = [codec_side(i) for i in control]
    if "speaker" in case:
        sides.append(codec_side(shape.speakers[case["speaker"].lower()]))
    elif "voice" in case:
        sides.append(SPEAKER)
    rows = [row_id(i) for i in (*(case["instruct_ids"] or ()), *case["input_ids"][:3])]
    rows += [row_id(ids.tts_pad, side) for side in sides] + [row_id(ids.tts_bos, codec_side(ids.codec_pad))]
    texts = [*(case["ref_ids"] or ())[3:-2], *body, ids.tts_eos]
    codes = [codec_side(ids.codec_bos)] + [FRAME + r for r in range(n_frames)]
    if case["is_streaming"]:
        beside = texts[: len(codes)] + [ids.tts_pad] * (len(codes) - len(texts))
        return rows + [row_id(i, side) for i, side in zip(beside, codes, strict=True)], tuple(texts[len(codes) :])
    rows += [row_id(i, codec_side(ids.codec_pad)) for i in texts]
    return rows + [row_id(ids.tts_pad, side) for side in codes], ()


def request_of(
    speaking: Speaking, case: dict[str, Any], id: str = "a", temperature: float = 0.0, **params: Any
) -> Request:
    """The request that a golden case is, greedy or with the published parameters."""
    key, n_frames = "", 0
    if "voice" in case:
        tensors = array_of(load_file(GOLDEN / "tensors.safetensors"))
        name = next(n for n in tensors if case["voice"] in n and n.endswith("speaker") and fits(speaking, tensors[n]))
        codes = tensors[name.removesuffix("speaker") + "codes"].astype(np.int32)
        key = f"{case['voice']}-{bool(case['ref_ids'])}"
        frames = speaking.runner.frame_embeddings(codes)
        speaking.voices[key] = Voice(tensors[name], codes, frames if case["ref_ids"] else None)
        n_frames = len(codes) if case["ref_ids"] else 0
    prompt, trailing = rows_of(speaking.shape, case, n_frames)
    given: dict[str, Any] = {
        "max_tokens": GOLDENS["max_new_tokens"], "temperature": temperature, "top_k": 50 if temperature else 0,
        "repetition_penalty": 1.05, "min_tokens": 2, "seed": 1,
    }  # fmt: skip
    return Request(
        id=id, prompt_ids=prompt, params=SamplingParams(**given | params),
        speech=Speech(trailing_ids=trailing, voice=key, temperature=temperature),
    )  # fmt: skip


def fits(speaking: Speaking, speaker: Array) -> bool:
    return speaker.shape == (speaking.shape.talker.hidden_size,)


def regrets(speaking: Speaking, case: dict[str, Any], frames: list[list[int]], *, ended: bool) -> Tensor:
    """How far below the largest logit of the oracle each code of the frames is, [T, 16], in units of their spread."""
    config = json.loads((speaking.path / "config.json").read_text())
    model = oracle.Checkpoint(config, load_file(speaking.path / "model.safetensors"))
    found = torch.zeros(len(frames) + 1, 16)

    def choose(logits: Tensor, frame: int, code: int) -> int:
        chosen = frames[frame][code] if frame < len(frames) else speaking.shape.end_id
        if frame < len(frames) or (ended and code == 0):
            spread = logits[logits.isfinite()].std()
            found[frame, code] = (logits.max() - logits[chosen]) / spread
        return chosen

    voice = speaking.voices.get(f"{case.get('voice')}-{bool(case['ref_ids'])}")
    reference = None
    if case["ref_ids"]:
        assert voice is not None and voice.codes is not None
        reference = oracle.Reference(case["ref_ids"], tensor_of(voice.codes))
    rows, trailing = oracle.prompt(
        model, case["input_ids"], is_streaming=case["is_streaming"], language=case.get("language"),
        speaker=case.get("speaker") or (tensor_of(voice.speaker) if voice else None), instruct_ids=case["instruct_ids"] or (),
        reference=reference, precision="bfloat16",
    )  # fmt: skip
    oracle.generate(model, rows, trailing, len(frames) + 1, choose=choose, precision="bfloat16")
    return found


@pytest.mark.parametrize("variant", ["custom_voice", "voice_design", "base"])
@pytest.mark.parametrize("wide", [False, True])
def test_greedy_codes_are_the_oracles(variant: str, wide: bool) -> None:
    """Every code is the oracle's choice behind the same codes, or one that bfloat16 cannot tell from it."""
    speaking = Speaking(variant, wide)
    cases = [case for case in CASES if case["variant"] == variant and case["wide"] == wide][-4:]
    requests = [request_of(speaking, case, str(i)) for i, case in enumerate(cases)]
    last = speaking.run(*requests)
    n_same = 0
    for i, case in enumerate(cases):
        frames, ended = speaking.codes[str(i), 0], last[str(i), 0].finish_reason == "stop"
        assert ended or len(frames) == GOLDENS["max_new_tokens"] - 1  # the last code 0 has no frame
        found = regrets(speaking, case, frames[:7], ended=ended and len(frames) <= 7)
        assert found.max() < 0.05
        n_same += int((found == 0).sum())
    assert n_same > 0.97 * sum(min(7, len(speaking.codes[str(i), 0])) * 16 for i in range(len(cases)))


def drawn(speaking: Speaking) -> list[Request]:
    """Four requests with other texts, lengths and seeds, drawn with the published parameters."""
    cases = [
        case for case in CASES if case["variant"] == "custom_voice" and case["wide"] == speaking.shape.has_projection
    ]
    return [
        request_of(speaking, case, f"drawn {i}", 0.9, seed=i, max_tokens=5 + 2 * i, top_p=1.0 if i else 0.8)
        for i, case in enumerate(cases[:4])
    ]  # fmt: skip


@pytest.mark.parametrize("quantize", FORMATS)
@pytest.mark.parametrize("wide", [False, True])
def test_a_batch_changes_nothing(quantize: str | None, wide: bool) -> None:
    speaking = Speaking(wide=wide, quantize=quantize)
    requests = drawn(speaking)
    alone = [speaking.frames(request) for request in requests]
    speaking.run(*requests)
    assert [speaking.codes[request.id, 0] for request in requests] == alone
    for request in requests:
        assert speaking.past[request.id, 0] == speaking.past[f"{request.id} alone", 0]
    assert Speaking(wide=wide, quantize=quantize, threads=1).frames(requests[3]) == alone[3]
    params = msgspec.structs.replace(requests[0].params, seed=99)
    other = msgspec.structs.replace(requests[0], id="other", params=params)
    assert speaking.frames(other) != alone[0]


def long_request(speaking: Speaking, n_rows: int, id: str = "long") -> Request:
    """A prompt of n_rows rows, of all kinds."""
    request = request_of(speaking, CASES[0], id, 0.9, max_tokens=6)
    ids = speaking.shape.ids
    middle = [row_id(5 + i % 200, codec_side(ids.codec_pad + i % 7)) for i in range(n_rows - len(request.prompt_ids))]
    return msgspec.structs.replace(request, prompt_ids=request.prompt_ids[:3] + middle + request.prompt_ids[3:])  # fmt: skip


@pytest.mark.parametrize("quantize", FORMATS)
def test_cuts_and_the_cache_change_nothing(quantize: str | None) -> None:
    whole = Speaking(quantize=quantize, prefix_cache=False)
    request = long_request(whole, 170)
    expected = whole.frames(request)
    cut = Speaking(quantize=quantize, max_step_tokens=64)
    assert cut.frames(request) == expected
    assert cut.past["long alone", 0] == whole.past["long alone", 0]
    assert cut.n_prefill_tokens == 170
    # No checkpoint is needed: every full page will do, but for the row that is drawn from.
    last = cut.run(request)
    assert last["long", 0].cached_tokens == 0 and cut.codes["long", 0] == expected  # told with the first token
    assert cut.n_prefill_tokens == 170 + 170 - 128
    for n_rows, n_new in ((128, 64), (129, 1), (192, 64)):
        prompt = (request.prompt_ids + request.prompt_ids)[:n_rows]
        shorter = msgspec.structs.replace(request, id=f"{n_rows}", prompt_ids=prompt)
        before = cut.n_prefill_tokens
        cut.run(shorter)
        assert cut.n_prefill_tokens == before + n_new, n_rows
        assert cut.codes[f"{n_rows}", 0] == whole.frames(shorter)
    salted = msgspec.structs.replace(request, id="salted", cache_salt="another voice")
    before = cut.n_prefill_tokens
    cut.run(salted)
    assert cut.n_prefill_tokens == before + 170 and cut.codes["salted", 0] == expected
    assert cut.engine.cache.store.count().n_checkpoints == 0


@pytest.mark.parametrize("quantize", FORMATS)
def test_cached_weights_say_the_same(tmp_path: Path, quantize: str | None) -> None:
    fresh = Speaking(wide=True, quantize=quantize, weights_cache=tmp_path)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    mapped = Speaking(wide=True, quantize=quantize, weights_cache=tmp_path)
    assert file.stat().st_mtime_ns == written and not mapped.runner.info.notices
    request = drawn(fresh)[2]
    assert mapped.frames(request) == fresh.frames(request)
    file.write_bytes(b"damaged")
    again = Speaking(wide=True, quantize=quantize, weights_cache=tmp_path)
    assert any("packed again" in notice for notice in again.runner.info.notices)


@pytest.mark.parametrize("host_gb", [0.0, 0.01])
def test_preemption_changes_nothing(host_gb: float) -> None:
    """With host memory what was computed comes back; without, the frames are computed again, to the same bits."""
    whole = Speaking()
    cramped = Speaking(n_pages=6, max_model_len=256, cache_host_gb=host_gb, prefix_cache=False)
    requests = []
    for i in range(3):
        request = long_request(whole, 100 + i, f"{i}")
        params = msgspec.structs.replace(request.params, max_tokens=60, ignore_eos=False, seed=i, min_tokens=60)
        requests.append(msgspec.structs.replace(request, params=params))
    expected = [whole.frames(request) for request in requests]
    last = cramped.run(*requests)
    assert cramped.engine.stats().n_preemptions > 0
    assert [cramped.codes[request.id, 0] for request in requests] == expected
    assert [len(frames) for frames in expected] == [59] * 3
    assert all(output.finish_reason == "length" for output in last.values())


@pytest.mark.parametrize("part", ["pages", "past"])
def test_memory_that_is_not_finite_is_not_heard(part: str) -> None:
    """The utterance is computed once more, and goes on: the same codes, the same samples, none of them twice."""
    speaking = Speaking()
    request = long_request(speaking, 100)
    speaking.run(msgspec.structs.replace(request, id="expected"))
    was, n_steps = speaking.runner.step, 0

    def step(step: Step) -> StepResult:
        nonlocal n_steps
        n_steps += 1
        if n_steps == 4:
            getattr(speaking.runner.memory, part).fill(np.nan)
            return speaking._step(step)  # what this one draws is nobody's
        return was(step)

    speaking.runner.step = step  # type: ignore[method-assign]
    last = speaking.run(request)
    assert last["long", 0].finish_reason == "length" and speaking.engine.stats().n_recomputed == 1
    assert speaking.audio["long", 0] == speaking.audio["expected", 0]


@every_byte
def test_what_nobody_has_written_is_not_heard(byte: int, caplog: pytest.LogCaptureFixture) -> None:
    """Pages and past before their first owner; before each step, what it has between its inputs and its draws but the pad's row."""
    speaking, spoilt = Speaking(), Speaking()
    requests = drawn(speaking)
    speaking.run(*requests)
    spoil(spoilt.runner.memory, byte)
    spoil_before_each_run(spoilt.runner.program, spoilt.runner.workspace.activations, byte, but=("text_rows",))
    spoilt.run(*requests)
    assert spoilt.codes == speaking.codes and spoilt.audio == speaking.audio
    assert "not finite" not in caplog.text, "an answer was computed anew"


def test_what_was_timed_at_start_changes_nothing() -> None:
    """The cost model's made-up steps write to pages and state slots that whoever comes next overwrites."""
    speaking = Speaking(max_model_len=256)
    request = long_request(speaking, 100)
    expected = speaking.frames(request)
    fresh = Speaking(max_model_len=256)
    fresh.engine = Engine(fresh.runner, max_itl_ms=250)
    fresh.engine.fit_cost()
    assert fresh.engine.scheduler.cost is not None and fresh.engine.scheduler.cost.curve
    fresh.codes.clear()
    fresh.run(request)
    assert fresh.codes["long", 0] == expected


def waveform(speaking: Speaking, frames: list[list[int]], before: Array | None = None) -> Tensor:
    """The oracle's samples of frames, behind those of a reference."""
    directory = speaking.path / "speech_tokenizer"
    config = json.loads((directory / "config.json").read_text())
    model = oracle.Checkpoint(config, load_file(directory / "model.safetensors"))
    codes = torch.tensor(frames)
    n_before = 0 if before is None else len(before)
    if before is not None:
        codes = torch.cat([tensor_of(before).long(), codes])
    return decode(model, codes, {})[1920 * n_before :]


def test_audio_is_the_oracles_and_the_same_bits_in_any_company() -> None:
    """Codes to samples through the stage: streams beside one another, a primed one and a whole answer among them."""
    speaking = Speaking("base")
    cases = [case for case in CASES if case["variant"] == "base" and not case["wide"]]
    requests = [request_of(speaking, case, str(i), 0.9, seed=i) for i, case in enumerate(cases[:4])]
    voice = speaking.voices["short-True"]
    assert voice.codes is not None and requests[3].speech is not None
    voice.state = speaking.runner.prime(voice.codes, None)
    primed = msgspec.structs.replace(requests[3].speech, is_primed=True, is_streamed=False)
    requests[3] = msgspec.structs.replace(requests[3], speech=primed)
    for request in requests:
        speaking.frames(request)
    speaking.run(*requests)
    for request in requests:
        alone, audio = (speaking.audio[id, 0] for id in (f"{request.id} alone", request.id))
        frames = speaking.codes[request.id, 0]
        samples = torch.frombuffer(bytearray(audio), dtype=torch.int16).float() / 32767
        assert audio == alone and len(samples) == 1920 * len(frames)
        expected = waveform(speaking, frames, voice.codes if request is requests[3] else None)
        assert (samples - expected).abs().max() < 2e-4


def test_siblings_share_the_prompt() -> None:
    speaking = Speaking()
    request = long_request(speaking, 100)
    alone = speaking.frames(request)
    before = speaking.n_prefill_tokens
    both = msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, n=2), use_cache=False)
    speaking.run(both)
    assert speaking.n_prefill_tokens == before + 100
    assert speaking.codes["long", 0] == alone != speaking.codes["long", 1]


def test_a_voice_that_is_not_finite_harms_its_own_request_only() -> None:
    speaking = Speaking("base")
    cases = [case for case in CASES if case["variant"] == "base" and not case["wide"]]
    good, bad = request_of(speaking, cases[0], "good"), request_of(speaking, cases[4], "bad")
    expected = speaking.frames(good)
    voice = speaking.voices["long-True"]
    voice.speaker = np.full_like(voice.speaker, np.nan)
    last = speaking.run(good, bad)
    assert last["bad", 0].finish_reason == "error" and "not finite" in str(last["bad", 0].error)
    assert speaking.codes["good", 0] == expected


def test_what_cannot_be_spoken_is_refused() -> None:
    speaking = Speaking("base")
    shape = speaking.shape
    good = request_of(speaking, next(c for c in CASES if c["variant"] == "base" and c["ref_ids"] and not c["wide"]))
    key = good.speech.voice if good.speech else ""
    speech = msgspec.structs.replace

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(RequestError, match=message):
            speaking.engine.add(msgspec.structs.replace(good, **changes))
        assert not speaking.engine.has_work()

    assert good.speech is not None
    refused("ignore_eos", params=speech(good.params, ignore_eos=True))
    refused("prompt_logprobs", params=speech(good.params, prompt_logprobs=1))
    refused("top_p", speech=speech(good.speech, top_p=1.5))
    refused("temperature", speech=speech(good.speech, temperature=float("nan")))
    refused("first_chunk_frames", speech=speech(good.speech, first_chunk_frames=33))
    refused("trailing_ids", speech=speech(good.speech, trailing_ids=(shape.text_vocab_size,)))
    refused("not encoded", speech=speech(good.speech, voice="unknown"))
    refused("does not name", speech=speech(good.speech, voice=""))
    refused("does not name", prompt_ids=[*good.prompt_ids, row_id(5, FRAME + 400)])
    refused("does not exist", prompt_ids=[row_id(5, codec_side(shape.talker.vocab_size))])
    refused("outside the vocabulary", prompt_ids=[shape.n_prompt_ids])
    speaking.voices[key].codes = None
    refused("reference codes", speech=speech(good.speech, is_primed=True))
    speaking.run(good)


@pytest.mark.parametrize(
    ("name", "n_tensors", "n_params"), [("qwen3-tts-0.6b", 402, 905_788_672), ("qwen3-tts-1.7b", 404, 1_916_676_352)]
)  # fmt: skip
def test_published_checkpoints_are_read_whole(name: str, n_tensors: int, n_params: int) -> None:
    """As many tensors and parameters as the published files have."""
    shape = PUBLISHED_SPEECH[name]
    parts = Declaration(None, COUNTED)
    declare_speech(parts, shape)
    stored = {one.name: one.shape for part in parts.plan for one in part.stored}
    assert len(stored) == n_tensors and sum(map(math.prod, stored.values())) == n_params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"tensor 'talker.code_predictor.lm_head.3.weight' is missing"),
        ("extra", r"unexpected tensors: 'talker.model.layers.9.input_layernorm.weight'"),
        ("shape", r"tensor 'talker.text_projection.linear_fc2.bias' has the wrong shape: expected \[64\].*\[63\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_checkpoint_is_named(tmp_path: Path, change: str, message: str) -> None:
    from safetensors.torch import save_file

    source = tiny_speech("base")
    tensors = load_file(source / "model.safetensors")
    if change == "missing":
        del tensors["talker.code_predictor.lm_head.3.weight"]
    elif change == "extra":
        tensors["talker.model.layers.9.input_layernorm.weight"] = torch.ones(64)
    else:
        tensors["talker.text_projection.linear_fc2.bias"] = torch.zeros(63)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_speech_weights(tmp_path, SpeechShape.from_directory(source))


def test_a_speaker_encoder_that_was_left_in_is_passed_over(tmp_path: Path) -> None:
    """As in what was trained from a Base model."""
    from safetensors.torch import save_file

    source = tiny_speech("custom_voice")
    left = {"speaker_encoder.fc.bias": torch.zeros(64)}
    save_file(load_file(source / "model.safetensors") | left, tmp_path / "model.safetensors")
    assert load_speech_weights(tmp_path, SpeechShape.from_directory(source))[1] == []


@pytest.mark.parametrize(("quantize", "least"), [(None, 0.9999), ("int8", 0.995), ("int4", 0.9)])
def test_formats_are_near_the_oracle(quantize: str | None, least: float) -> None:
    """Cosine of the first logits of end and code 0 with the oracle's."""
    speaking = Speaking(wide=True, quantize=quantize)
    case = next(case for case in CASES if case["variant"] == "custom_voice" and case["wide"])
    speaking.run(request_of(speaking, case, max_tokens=1))
    config = json.loads((speaking.path / "config.json").read_text())
    model = oracle.Checkpoint(config, load_file(speaking.path / "model.safetensors"))
    rows, _ = oracle.prompt(
        model, case["input_ids"], is_streaming=True, language=case["language"], speaker=case["speaker"]
    )
    past = oracle.transformer(model.weights, "talker.model", config["talker_config"], rows, {})[-1]
    expected = oracle.first_logits(model, past)
    found = tensor_of(speaking.runner.logits(1)[0])
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > least


def plan_of(free_bytes: float, name: str = "qwen3-tts-0.6b", **settings: Any) -> Any:
    config = EngineConfig(dummy=name, device="cpu", **settings)
    shape = PUBLISHED_SPEECH[name]
    return planned(config, shape, Cpu.speech, shape.n_drawn, int(free_bytes))


def test_memory_is_planned_and_refused() -> None:
    plan = plan_of(32e9)
    assert (plan.max_num_seqs, plan.max_model_len) == (8, 4096)
    assert plan.total_bytes < 5.5e9 and plan.n_pages * 64 >= 4096 + 2048
    assert plan_of(32e9, memory_gb=24.0).n_pages == 8 * 64  # all of them at full length
    assert plan_of(2.6e9, quantize="int8").max_num_seqs < 8  # made to fit
    with pytest.raises(ConfigError, match="does not fit"):
        plan_of(2e9)
    with pytest.raises(ConfigError, match=r"--n-pages 4000 does not fit into .* give at most"):
        plan_of(8e9, n_pages=4000)
    with pytest.raises(ConfigError, match="--n-pages 8 cannot hold one sequence"):
        plan_of(32e9, n_pages=8, max_model_len=1024)
    assert plan_of(32e9, n_pages=8).max_model_len == 512  # as long as they allow
    with pytest.raises(ConfigError, match="made for 32768 positions"):
        plan_of(32e9, max_model_len=40000)
    with pytest.raises(ConfigError, match=r"--max-model-len 32768 does not fit .* give at most"):
        plan_of(6e9, max_model_len=32768)
    with pytest.raises(ConfigError, match="--n-checkpoints"):
        plan_of(32e9, n_checkpoints=4)
