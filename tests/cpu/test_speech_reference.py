"""The oracle of speech against what the published package gave (tests/golden/speech), and against itself in pieces."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cpu.grid import grid
from tests.golden.make_speech import COLUMNS, DIRECTORY, STRIDE, VOCODER_STRIDE
from tests.reference import speech
from tests.reference.vocoder import State, decode
from tests.tiny_speech import FRAME_SAMPLES, N_CODES, tiny_speech

pytestmark = pytest.mark.usefixtures("one_thread")

KEPT = json.loads((DIRECTORY / "cases.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = KEPT["cases"]


@functools.cache
def goldens() -> dict[str, Tensor]:
    return load_file(DIRECTORY / "tensors.safetensors")


@functools.cache
def checkpoint(path: Path) -> speech.Checkpoint:
    config = json.loads((path / "config.json").read_text())
    weights = {name: value.float() for name, value in load_file(path / "model.safetensors").items()}
    return speech.Checkpoint(config, weights)


def golden(name: str) -> Tensor:
    """A waveform is kept as int16."""
    value = goldens()[name]
    return value.float() / 32767 if name.endswith("wave") else value


def name_of(i: int) -> str:
    case = CASES[i]
    return f"{case['variant']}-{'wide' if case['wide'] else 'even'}-{'stream' if case['is_streaming'] else 'whole'}-{i}"


@torch.no_grad()
@pytest.mark.parametrize("i", grid(range(len(CASES)), range(2, len(CASES), 5), pytest.mark.long), ids=name_of)
def test_rows_codes_and_waveform_equal_the_published_package(i: int) -> None:
    case = CASES[i]
    path = tiny_speech(case["variant"], wide=case["wide"])
    model = checkpoint(path)
    speaker, reference = case.get("speaker"), None
    if "voice" in case:
        voice = f"{case['voice']}.{'wide' if case['wide'] else 'even'}"
        speaker = golden(f"{voice}.speaker")
        if "ref_text" in case:
            reference = speech.Reference(case["ref_ids"], golden(f"{voice}.codes").long())
    rows, trailing = speech.prompt(
        model,
        case["input_ids"],
        is_streaming=case["is_streaming"],
        language=case.get("language"),
        speaker=speaker,
        instruct_ids=case["instruct_ids"] or (),
        reference=reference,
    )
    torch.testing.assert_close(rows[:, :COLUMNS], golden(f"{i}.rows"), atol=1e-5, rtol=0)
    torch.testing.assert_close(trailing[:, :COLUMNS], golden(f"{i}.trailing"), atol=1e-5, rtol=0)

    codes = speech.generate(model, rows, trailing, KEPT["max_new_tokens"])
    assert codes.tolist() == case["codes"]
    assert len(codes) <= KEPT["max_new_tokens"] - 1

    state: State = {}
    vocoder = checkpoint(path / "speech_tokenizer")
    if reference is not None:
        decode(vocoder, reference.codes, state)
    wave = decode(vocoder, codes, state)
    torch.testing.assert_close(wave[::STRIDE], golden(f"{i}.wave"), atol=1e-4, rtol=0)


def test_the_cases_cover_what_a_prompt_depends_on() -> None:
    n = {(case["variant"], case["wide"], case["is_streaming"]) for case in CASES}
    assert len(n) == 3 * 2 * 2
    assert any(len(case["codes"]) < KEPT["max_new_tokens"] - 1 for case in CASES), "none ended by itself"
    clones = [case for case in CASES if "ref_text" in case and case["is_streaming"]]
    lengths = [(len(case["ref_ids"]) + len(case["input_ids"]) - 12, case["voice"]) for case in clones]
    assert {voice for _, voice in lengths} == {"short", "long"}
    assert all((n_text > 4) if voice == "short" else (n_text < 29) for n_text, voice in lengths)


def test_a_pass_longer_than_the_window_whole_and_in_pieces() -> None:
    vocoder, codes = checkpoint(tiny_speech("base") / "speech_tokenizer"), golden("vocoder.codes")
    whole = decode(vocoder, codes)
    assert len(whole) == len(codes) * FRAME_SAMPLES
    torch.testing.assert_close(whole[::VOCODER_STRIDE], golden("vocoder.wave"), atol=1e-4, rtol=0)
    for cuts in ([1, 4, 25, 1, 7, 2], [39, 1]):
        state: State = {}
        pieces = torch.cat([decode(vocoder, piece, state) for piece in codes.split(cuts)])
        torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=0)


@torch.no_grad()
def test_bfloat16_stays_near_and_choices_are_asked_for_once_each() -> None:
    case = CASES[0]
    model = checkpoint(tiny_speech(case["variant"], wide=case["wide"]))
    options: dict[str, Any] = {"is_streaming": True, "speaker": case["speaker"]}
    rows, trailing = speech.prompt(model, case["input_ids"], **options)
    exact: list[Tensor] = []
    near: list[Tensor] = []
    speech.generate(model, rows, trailing, 2, trace=exact)
    speech.generate(model, rows, trailing, 2, trace=near, precision="bfloat16")
    assert 0 < (exact[0] - near[0]).abs().max() < 0.05 * exact[0].abs().max()

    asked: list[tuple[int, int, int]] = []

    def choose(logits: Tensor, frame: int, code: int) -> int:
        asked.append((frame, code, len(logits)))
        return N_CODES if frame == 3 and code == 0 else frame

    codes = speech.generate(model, rows, trailing, 9, choose=choose)
    assert codes.tolist() == [[frame] * 16 for frame in range(3)]
    expected = [(frame, code, N_CODES + (code == 0)) for frame in range(3) for code in range(16)]
    assert asked == [*expected, (3, 0, N_CODES + 1)]
