"""A language model and a speech model behind one `deltic serve`, tiny ones, through the official client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltic.__main__ import main
from tests.served import Served
from tests.tiny import tiny_checkpoint
from tests.tiny_speech import tiny_speech
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    text, speech = tiny_checkpoint("dense"), tiny_speech("custom_voice")
    model = ["--served-model-name", "writer", "--and", str(speech), "--served-model-name", "speaker"]
    running = Served(str(text), *model, "--threads", "1", "--max-num-seqs", "4")
    yield running
    running.close()


def write(served: Served) -> str:
    answer = served.openai.completions.create(
        model="writer", prompt="once upon", max_tokens=60, seed=1, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text


def speak(served: Served) -> bytes:
    spoken = served.openai.audio.speech.create(
        model="speaker", input="hello world", voice="vivian", response_format="pcm",
        extra_body={"seed": 7, "max_new_tokens": 12},
    )  # fmt: skip
    return spoken.content


def test_both_at_once_as_each_alone(served: Served) -> None:
    assert [model.id for model in served.openai.models.list()] == ["writer", "speaker"]
    alone = write(served), speak(served)
    assert alone[0] and alone[1]
    with ThreadPoolExecutor(6) as pool:
        asked = [(pool.submit(write, served), pool.submit(speak, served)) for _ in range(3)]
        assert all((text.result(), audio.result()) == alone for text, audio in asked)
    assert served.metric("generated_tokens_total", model="writer") >= 4 * 60
    assert served.metric("speech_frames_total", model="speaker") >= 4
    wait_for(served.is_empty)


def test_commands_find_the_model_that_fits(served: Served, tmp_path: object) -> None:
    url, key, out = served.process.url, served.process.api_key, f"{tmp_path}/said.pcm"
    line = ["say", "hello", "--url", url, f"--api-key={key}", "--out", out, "--max-new-tokens", "5"]
    assert main(line) == 0
    assert os.path.getsize(out)


def test_they_die_together_and_come_back(served: Served) -> None:
    before = write(served), speak(served)
    os.kill(served.engine_pid(), signal.SIGKILL)
    wait_for(lambda: served.http.get("/ready").status_code == 503)
    wait_for(lambda: served.http.get("/ready").status_code == 200)
    assert (write(served), speak(served)) == before
    assert {served.metric("engine_restarts_total", model=name) for name in ("writer", "speaker")} == {1.0}
