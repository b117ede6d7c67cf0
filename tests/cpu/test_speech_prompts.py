"""A request of the HTTP API becomes the prompt that the published package makes: the ids of its tokenizer, and its rows."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from deltic.models.tts.shape import FRAME, SPEAKER, SpeechShape, split_row
from deltic.server.speech.prompt import Prompter
from deltic.server.speech.protocol import SpeechRequest, manner
from deltic.text import Tokenizer
from tests.tiny_speech import tiny_speech

GOLDEN = Path(__file__).parents[1] / "golden" / "speech"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())["cases"]


@functools.cache
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "tensors.safetensors")


@functools.cache
def weights(path: Path) -> dict[str, Tensor]:
    return {name: value.float() for name, value in load_file(path / "model.safetensors").items()}


def text_vector(w: dict[str, Tensor], i: int) -> Tensor:
    p = "talker.text_projection.linear_fc"
    x = w["talker.model.text_embedding.weight"][i]
    x = silu(w[f"{p}1.weight"] @ x + w[f"{p}1.bias"])
    return w[f"{p}2.weight"] @ x + w[f"{p}2.bias"]


def side_vector(w: dict[str, Tensor], side: int, voice: str | None) -> Tensor:
    codes = "talker.model.codec_embedding.weight"
    if side < SPEAKER:
        return w[codes][side - 1]
    if side == SPEAKER:
        return golden()[f"{voice}.speaker"]
    frame = golden()[f"{voice}.codes"][side - FRAME].long()
    rest = (w[f"talker.code_predictor.model.codec_embedding.{i}.weight"][frame[i + 1]] for i in range(15))
    return w[codes][frame[0]] + sum(rest)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_rows_of_the_published_package(number: int) -> None:
    case = CASES[number]
    path = tiny_speech(case["variant"], wide=case["wide"])
    shape, w = SpeechShape.from_directory(path), weights(path)
    voice = f"{case['voice']}.{'wide' if case['wide'] else 'even'}" if case.get("voice") else None
    fields = {
        "input": case["text"], "voice": case.get("speaker"), "language": case.get("language"), "instructions": case.get("instruct"),
        "ref_text": case.get("ref_text"), "non_streaming_mode": not case["is_streaming"],
    }  # fmt: skip
    if not shape.takes_instructions:
        fields["instructions"] = None  # the package drops them; here they are a 400
    if voice:
        fields |= {"ref_audio": "data:", "x_vector_only_mode": not case.get("ref_text")}
    asked = msgspec.convert({key: value for key, value in fields.items() if value is not None}, SpeechRequest)
    how = manner(asked, shape, None, streamed=False, model="m")
    prompter = Prompter(shape, Tokenizer.load(path))
    words = prompter.words(asked.input, how.instructions, asked.ref_text or "", 1000)
    assert words.body == case["input_ids"][3:-5]
    assert words.instructions == (case["instruct_ids"] or [])
    assert words.reference == (case["ref_ids"] or [])[3:-2]
    found = prompter.rows(
        words,
        language_id=how.language_id,
        speaker=how.speaker,
        has_voice=voice is not None,
        n_frames=len(golden()[f"{voice}.codes"]) if case.get("ref_text") else 0,
        streams_text=how.streams_text,
    )
    expected = golden()[f"{number}.rows"]
    rows = torch.stack([_row(w, *split_row(row), voice) for row in found.prompt])
    torch.testing.assert_close(rows[:, : expected.shape[1]], expected, atol=1e-4, rtol=1e-4)
    trailing = [text_vector(w, i) for i in found.trailing] or [text_vector(w, shape.ids.tts_pad)]
    expected = golden()[f"{number}.trailing"]
    torch.testing.assert_close(torch.stack(trailing)[:, : expected.shape[1]], expected, atol=1e-4, rtol=1e-4)


def _row(w: dict[str, Tensor], text: int, side: int, voice: str | None) -> Tensor:
    row = text_vector(w, text)
    return row + side_vector(w, side, voice) if side else row
