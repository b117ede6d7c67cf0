"""LoRA adapters from a directory to an answer: `deltic serve` in processes of its own, `deltic run`, and the offline API."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from deltic import LLM, SamplingParams
from deltic.__main__ import main
from tests.served import Served

PROMPT = "Once upon a time"
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}


def write_adapter(path: Path, seed: int, rank: int = 4) -> str:
    """A directory as PEFT writes it, for the built-in model: terms of all its MLPs."""
    generator = torch.Generator().manual_seed(seed)
    terms = {}
    for i in range(8):
        for name, n, k in (("gate_proj", 448, 256), ("up_proj", 448, 256), ("down_proj", 256, 448)):
            module = f"base_model.model.model.layers.{i}.mlp.{name}"
            terms[f"{module}.lora_A.weight"] = (0.1 * torch.randn(rank, k, generator=generator)).bfloat16()
            terms[f"{module}.lora_B.weight"] = (0.1 * torch.randn(n, rank, generator=generator)).bfloat16()
    path.mkdir(exist_ok=True)
    save_file(terms, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return str(path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(directory / name, seed) for seed, name in enumerate(("a", "b", "c"))}


@pytest.fixture(scope="module")
def alone(paths: dict[str, str]) -> dict[str | None, str]:
    """What the offline API says with each adapter, and without."""
    llm = LLM(lora=paths, threads=2, max_num_seqs=4)
    params = SamplingParams(max_tokens=ASKED["max_tokens"], temperature=0.0)
    said = {name: llm.generate(PROMPT, params, lora=name)[0].text for name in (None, *paths)}
    assert len({*said.values()}) == 4, "each changes the answer"
    assert llm.generate(PROMPT, params, lora="a")[0].text == said["a"], "from the cache"
    with pytest.raises(ValueError, match="no adapter 'x'; this LLM has 'a', 'b', 'c'"):
        llm.generate(PROMPT, lora="x")
    llm.close()
    return said


@pytest.fixture(scope="module")
def server(paths: dict[str, str]) -> Iterator[Served]:
    running = Served("--lora", f"a={paths['a']}", "--allow-lora-loading", "--max-loras", "3")
    yield running
    running.close()


def load(server: Served, name: str, path: str, status: int = 200, **fields: Any) -> httpx.Response:
    reply = server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path} | fields)
    assert reply.status_code == status, reply.text
    return reply


def unload(server: Served, name: str) -> None:
    assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200


def test_answers_are_those_of_the_adapter(server: Served, paths: dict[str, str], alone: dict[str | None, str]) -> None:
    load(server, "b", paths["b"])
    assert [model.id for model in server.openai.models.list()] == ["built-in", "a", "b"]
    for _ in range(2):  # and from the cache
        for name, key in (("built-in", None), ("a", "a"), ("b", "b")):
            body = server.complete(model=name, **ASKED)
            assert (body["model"], body["choices"][0]["text"]) == (name, alone[key])
    load(server, "b", paths["c"], load_inplace=True)
    assert server.complete(model="b", **ASKED)["choices"][0]["text"] == alone["c"]
    unload(server, "b")
    assert server.metric("adapters_used") == 1


def test_what_cannot_be_applied_says_why(server: Served, paths: dict[str, str], tmp_path: Path) -> None:
    error = load(server, "x", str(tmp_path / "none"), 400).json()["error"]
    assert "no such adapter" in error["message"]
    error = load(server, "x", write_adapter(tmp_path / "wide", 5, rank=65), 400).json()["error"]
    assert "--max-lora-rank" in error["message"]
    for name in ("b", "c"):
        load(server, name, paths[name])
    load(server, "twin", paths["c"])  # has its place already
    error = load(server, "d", write_adapter(tmp_path / "d", 6), 400).json()["error"]
    assert "--max-loras" in error["message"]
    for name in ("b", "c", "twin"):
        unload(server, name)
    load(server, "d", str(tmp_path / "d"))
    unload(server, "d")


def test_they_are_back_after_the_engine_died(
    server: Served, paths: dict[str, str], alone: dict[str | None, str], tmp_path: Path
) -> None:
    load(server, "c", paths["c"])
    lost = Path(write_adapter(tmp_path / "lost", 7))
    load(server, "lost", str(lost))
    (lost / "adapter_model.safetensors").unlink()
    os.kill(server.engine_pid(), signal.SIGKILL)
    seen = set()
    deadline_s = time.monotonic() + 60
    for name in ("c", "a"):
        while (reply := server.http.post("/v1/completions", json={"model": name, **ASKED})).status_code != 200:
            seen.add(reply.status_code)
            assert reply.status_code in (500, 503) and time.monotonic() < deadline_s
            time.sleep(0.05)
        assert reply.json()["choices"][0]["text"] == alone[name]
    assert 503 in seen
    assert server.http.post("/v1/completions", json={"model": "lost", **ASKED}).status_code == 404
    assert "adapter lost of built-in is not there any more" in server.process.log_tail(100)
    unload(server, "c")


def test_a_file_of_requests_has_the_only_adapter(
    paths: dict[str, str], alone: dict[str | None, str], tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(ASKED) + "\n" + json.dumps(ASKED | {"model": "built-in"}) + "\n")
    assert main(["run", str(source), str(target), "--lora", f"a={paths['a']}", "--threads", "2"]) == 0
    lines = [json.loads(line)["response"]["body"] for line in target.read_text().splitlines()]
    said = {body["model"]: body["choices"][0]["text"] for body in lines}
    assert said == {"a": alone["a"], "built-in": alone[None]}


def test_a_start_says_what_is_wrong_with_one(paths: dict[str, str], tmp_path: Path) -> None:
    from deltic.commands.endpoint import ServerFailed

    with pytest.raises(ServerFailed, match=r"--lora x=.*no such adapter"):
        Served("--lora", f"x={tmp_path / 'none'}")
    with pytest.raises(ServerFailed, match="a model is called 'built-in'"):
        Served("--lora", f"built-in={paths['a']}")
