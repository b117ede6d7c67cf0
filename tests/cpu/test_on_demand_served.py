"""Three tiny models, and memory for one and a half: `deltic serve --models-from` answers as a server of each alone does."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fake_hub import hub_with
from tests.served import Served
from tests.tiny import tiny_checkpoint
from tests.waiting import wait_for

KINDS = {"dense": "owner/dense", "moe": "mixture", "next": "owner/next"}
"""Models' places below the directory, which are their names."""
PROMPTS = ("once upon a time", "the", "a longer prompt, which has more tokens than the others have")
FLAGS = ("--threads", "1", "--max-num-seqs", "4", "--max-model-len", "1024")


def complete(served: Served, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "seed": 1, "temperature": 0.8, "ignore_eos": True}
    return str(served.complete(**body)["choices"][0]["text"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, (kind, name) in enumerate(KINDS.items()):
        shutil.copytree(tiny_checkpoint(kind, seed=seed), root / name)
    return root


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[tuple[str, str], str]:
    """What a server with that model alone answers."""
    answers: dict[tuple[str, str], str] = {}
    for name in KINDS.values():
        served = Served(str(directory / name), "--served-model-name", name, *FLAGS)
        answers |= {(name, prompt): complete(served, name, prompt) for prompt in PROMPTS}
        served.close()
    return answers


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    # Each is planned to need 0.04 to 0.07 GB.
    running = Served("--models-from", str(directory), "--models-gb", "0.09", *FLAGS)
    yield running
    running.close()


def test_answers_are_those_of_each_alone_however_often_they_swap(
    served: Served, alone: dict[tuple[str, str], str]
) -> None:
    assert [model.id for model in served.openai.models.list()] == [*sorted(KINDS.values()), "built-in"]
    asked = random.Random(5).choices(list(alone), k=40)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda one: complete(served, *one), asked))
    assert answers == [alone[one] for one in asked]
    n_loads = served.metric("model_loads_total")
    assert n_loads >= 4 and served.metric("model_unloads_total") >= n_loads - 2
    assert served.metric("model_load_failures_total") == 0 and served.metric("models_loaded") <= 2
    wait_for(served.is_empty)


def test_one_that_comes_to_the_disk_is_found(
    served: Served, directory: Path, alone: dict[tuple[str, str], str]
) -> None:
    shutil.copytree(directory / "mixture", directory / "copied")
    assert complete(served, "copied", PROMPTS[0]) == alone["mixture", PROMPTS[0]]
    shutil.rmtree(directory / "mixture")
    (directory / "copied").rename(directory / "mixture")
    assert complete(served, "mixture", PROMPTS[0]) == alone["mixture", PROMPTS[0]]


def test_a_damaged_one_takes_no_other_with_it(
    served: Served, directory: Path, alone: dict[tuple[str, str], str]
) -> None:
    shutil.copytree(directory / "owner/dense", broken := directory / "broken")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-1000])
    body = {"model": "broken", "prompt": "x"}
    reply = served.http.post("/v1/completions", json=body)
    assert reply.status_code == 503 and "cannot be loaded" in reply.json()["error"]["message"], reply.text
    assert complete(served, "owner/dense", PROMPTS[1]) == alone["owner/dense", PROMPTS[1]]


def test_a_model_of_the_hub_is_pulled_and_answers(
    directory: Path, alone: dict[tuple[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {file.name: file.read_bytes() for file in (directory / "owner/next").iterdir()}
    with hub_with(files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        hub.rate = len(files["model.safetensors"]) / 3
        served = Served("--models-from", "cache", "--allow-pull", *FLAGS)
        try:
            reply = served.http.post("/api/pull", json={"model": "owner/model"})
            lines = [json.loads(line) for line in reply.text.splitlines()]
            assert lines[0] == {"status": "pulling manifest"} and lines[-1] == {"status": "success"}, lines
            under_way = [line["completed"] / line["total"] for line in lines if "total" in line]
            assert under_way == sorted(under_way) and 0 < under_way[0] < 1
            assert complete(served, "owner/model", PROMPTS[2]) == alone["owner/next", PROMPTS[2]]
        finally:
            served.close()
        served = Served(*FLAGS)  # without a MODEL it serves what was fetched
        try:
            assert [model.id for model in served.openai.models.list()] == ["owner/model", "built-in"]
            assert complete(served, "owner/model", PROMPTS[2]) == alone["owner/next", PROMPTS[2]]
            assert served.http.post("/api/pull", json={"model": "owner/other"}).status_code == 404
        finally:
            served.close()
