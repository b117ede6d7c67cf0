"""NVIDIA Dynamo's indexer, as published, reads the cache events of a server and says what of a prompt it has.

Needs `pip install '.[test,routers]'`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deltic.bench.load import WORDS
from deltic.commands.endpoint import free_port
from tests.served import Served
from tests.waiting import wait_for

pytest.importorskip("dynamo.llm")


class Indexed:
    """A server, and the indexer that listens to it."""

    def __init__(self) -> None:
        events, port = free_port(), free_port()
        self.served = Served("--kv-events", f"tcp://127.0.0.1:{events}", "--kv-events-topic", "")
        command = [sys.executable, "-m", "dynamo.indexer", "--block-size", "64", "--threads", "1", "--port", str(port)]
        workers = ["--workers", f"1=tcp://127.0.0.1:{events}", "--model-name", self.served.model]
        self.indexer = subprocess.Popen([*command, *workers], stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{port}"
        wait_for(lambda: self._listens())

    def _listens(self) -> bool:
        try:
            (worker,) = httpx.get(f"{self.url}/workers").json()
        except httpx.TransportError:
            return False
        return all(one["status"] == "active" for one in worker["listeners"].values())

    def close(self) -> None:
        self.indexer.kill()
        self.indexer.wait()
        self.served.close()

    def ask(self, prompt: list[int], **fields: Any) -> int:
        """The tokens of a prompt that came from the cache."""
        answer = self.served.complete(model=self.served.model, prompt=prompt, max_tokens=1, **fields)
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    def predicted(self, prompt: list[int]) -> int:
        """The tokens of it that the indexer counts."""
        asked = {"model_name": self.served.model, "token_ids": prompt}
        instances = httpx.post(f"{self.url}/query", json=asked).json()["instances"]
        return int(instances["1"]["gpu"]) if "1" in instances else 0


@pytest.fixture(scope="module")
def indexed() -> Iterator[Indexed]:
    running = Indexed()
    yield running
    running.close()


def tokens_of(indexed: Indexed, text: str) -> list[int]:
    reply = indexed.served.http.post("/tokenize", json={"model": indexed.served.model, "prompt": text})
    ids: list[int] = reply.json()["tokens"]
    return ids


def test_the_indexer_counts_what_a_prompt_will_find(indexed: Indexed) -> None:
    """Conversations that go on: never more than is there, and never less."""
    rng = random.Random(0)
    prompts = [tokens_of(indexed, " ".join(rng.choices(WORDS, k=60))) for _ in range(4)]
    for prompt in prompts:
        assert indexed.predicted(prompt) == 0 == indexed.ask(prompt)
    for turn in range(5):
        for prompt in prompts:
            known = len(prompt) // 64 * 64
            wait_for(lambda prompt=prompt, known=known: indexed.predicted(prompt) == known, 5)
            prompt += tokens_of(indexed, " " + " ".join(rng.choices(WORDS, k=30 + 20 * turn)))
            assert indexed.predicted(prompt) == indexed.ask(prompt) == known > 0


def test_it_forgets_when_the_cache_does(indexed: Indexed) -> None:
    prompt = tokens_of(indexed, "forget " * 100)
    indexed.ask(prompt)
    wait_for(lambda: indexed.predicted(prompt), 5)
    indexed.served.http.post("/cache/reset", json={})
    wait_for(lambda: not indexed.predicted(prompt), 5)


def test_it_forgets_a_server_whose_engine_died(indexed: Indexed) -> None:
    prompt = tokens_of(indexed, "remember " * 100)
    indexed.ask(prompt)
    wait_for(lambda: indexed.predicted(prompt), 5)
    os.kill(indexed.served.engine_pid(), signal.SIGKILL)
    wait_for(lambda: not indexed.predicted(prompt), 20)
    wait_for(lambda: indexed.served.http.get("/ready").status_code == 200, 60)
    indexed.ask(prompt)
    wait_for(lambda: indexed.predicted(prompt), 20)
