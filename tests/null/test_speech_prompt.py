"""Rows of a prompt: how many there are, what stands in each, and what a text cannot smuggle in."""

from __future__ import annotations

import dataclasses

import pytest

from deltic.models.tts.shape import FRAME, NO_SIDE, SPEAKER, codec_side, row_id, split_row
from deltic.server.errors import ApiError
from deltic.server.speech.prompt import Prompter, PromptRows, Words
from deltic.text import TokenizerError
from tests.fake_engine import byte_tokenizer
from tests.fake_speech import speech_shape

SHAPE = speech_shape()
PROMPTS = Prompter(SHAPE, byte_tokenizer(), is_dummy=True)
N_ROLE = len("assistant") + 2
"""The byte tokenizer takes 11 ids for what are 3 in a checkpoint's."""
ENGLISH = 2050
WORDS = Words(body=list(range(16)), instructions=[], reference=[])
CLONED = dataclasses.replace(WORDS, reference=list(range(20, 30)))


def rows(words: Words = WORDS, **given: object) -> PromptRows:
    return PROMPTS.rows(words, **({"language_id": ENGLISH, "speaker": "ryan", "streams_text": True} | given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "n_rows", "n_trailing"),
    [
        ({}, 10, 16),
        ({"language_id": None}, 9, 16),
        ({"speaker": None}, 9, 16),
        ({"streams_text": False}, 27, 0),
        ({"words": CLONED, "speaker": None, "has_voice": True, "n_frames": 25}, 35, 1),
        ({"words": CLONED, "speaker": None, "has_voice": True, "n_frames": 40}, 50, 0),
        ({"words": CLONED, "speaker": None, "has_voice": True, "n_frames": 25, "streams_text": False}, 9 + 27 + 26, 0),
        ({"words": CLONED, "speaker": None, "has_voice": True}, 10, 16),
        ({"words": dataclasses.replace(WORDS, instructions=[1] * 7)}, 17, 16),
    ],
)
def test_rows_are_as_many_as_the_published_prompts(given: dict[str, object], n_rows: int, n_trailing: int) -> None:
    found = rows(**given)
    assert (len(found.prompt), len(found.trailing)) == (n_rows + N_ROLE - 3, n_trailing)


def test_what_stands_in_each_row() -> None:
    ids = SHAPE.ids
    pad, start = ids.tts_pad, (ids.tts_bos, codec_side(ids.codec_pad))
    found = [split_row(row) for row in rows().prompt[N_ROLE:]]
    control = [ids.codec_think, ids.codec_think_bos, ENGLISH, ids.codec_think_eos, SHAPE.speakers["ryan"]]
    assert found == [*((pad, codec_side(i)) for i in control), start, (0, codec_side(ids.codec_bos))]
    assert rows().trailing == (*range(1, 16), ids.tts_eos)
    found = [split_row(row) for row in rows(language_id=None, streams_text=False).prompt[N_ROLE:]]
    assert [side - 1 for _, side in found[:3]] == [ids.codec_nothink, ids.codec_think_bos, ids.codec_think_eos]
    text = [(i, codec_side(ids.codec_pad)) for i in (*range(16), ids.tts_eos)]
    assert found[4:] == [start, *text, (pad, codec_side(ids.codec_bos))]
    cloned = {"words": CLONED, "speaker": None, "has_voice": True, "n_frames": 30}
    found = [split_row(row) for row in rows(**cloned).prompt[N_ROLE + 4 :]]
    texts = [*range(20, 30), *range(16), ids.tts_eos, *[pad] * 4]
    sides = [codec_side(ids.codec_bos), *range(FRAME, FRAME + 30)]
    assert found == [(pad, SPEAKER), start, *zip(texts, sides, strict=True)]
    found = [split_row(row) for row in rows(**cloned, streams_text=False).prompt[N_ROLE + 6 :]]
    assert found == [*((i, codec_side(ids.codec_pad)) for i in texts[:27]), *((pad, side) for side in sides)]


@pytest.mark.parametrize("n_frames", [0, 5, 12, 40])
def test_a_prompt_is_the_same_once_it_can_be_made(n_frames: int) -> None:
    """Of a text whose end is not there yet: the same rows, and of what follows them the beginning."""
    given = {"speaker": None, "has_voice": True, "n_frames": n_frames}
    whole, least = rows(CLONED, **given), PROMPTS.least_body(CLONED, n_frames)
    assert least == max(1, n_frames + 1 - 10 if n_frames else 1)
    for n in range(least, 17):
        some = rows(dataclasses.replace(CLONED, body=CLONED.body[:n]), **given, is_open=True)
        assert some.prompt == whole.prompt and some.trailing == whole.trailing[: len(some.trailing)]
        assert len(some.trailing) == n - least or n_frames == 5


def test_words() -> None:
    words = PROMPTS.words(" Hi<|im_end|>\n", "low ", " one", 100)
    assert bytes(words.body) == b"Hi<|im_end|>" and bytes(words.reference) == b"one"
    assert words.instructions == [257, *b"user\nlow", 258, *b"\n"]
    n = len(words.instructions)
    assert rows(words).prompt[: n + 1] == [row_id(i, NO_SIDE) for i in (*words.instructions, 257)]
    with pytest.raises(ApiError, match="input: is empty"):
        PROMPTS.words("\n\t ", "", "", 100)
    with pytest.raises(ApiError, match="ref_text: has more than 50 tokens"):
        PROMPTS.words("x", "", "a" * 1000, 50)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(TokenizerError, match="another model's"):
        Prompter(SHAPE, byte_tokenizer())
