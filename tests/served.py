"""`deltic serve` in processes of its own, with clients connected to it: what tests over HTTP start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltic.commands.endpoint import LocalServer
from tests.golden import make

MAX_NUM_SEQS, MAX_QUEUE, N_PAGES = 8, 32, 96
ENGINE = ["--threads", "2", "--max-num-seqs", str(MAX_NUM_SEQS), "--n-pages", str(N_PAGES)]
MAX_MODEL_LEN = 4096
"""The built-in model's."""

STORY = make.CASES["story"].messages


class Served:
    """The built-in model, the official client connected to it, and a plain HTTP client."""

    def __init__(self, *arguments: str) -> None:
        self.process = LocalServer([*ENGINE, "--max-queue", str(MAX_QUEUE), *arguments])
        try:
            asyncio.run(self.process.wait_ready(timeout_s=60))
        except BaseException:
            self.process.stop()
            raise
        key = self.process.api_key
        self.openai = openai.OpenAI(base_url=f"{self.process.url}/v1", api_key=key, max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=self.process.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        self.model = self.openai.models.list().data[0].id

    def close(self) -> int:
        self.openai.close()
        self.http.close()
        return self.process.stop()

    def engine_pid(self) -> int:
        pid = self.process.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def chat(self, messages: list[dict[str, Any]] = STORY, **fields: Any) -> Any:
        """A chat completion; fields that OpenAI's API lacks go in `extra_body`."""
        return self.openai.chat.completions.create(model=self.model, messages=messages, **fields)  # type: ignore[arg-type]

    def complete(self, **fields: Any) -> dict[str, Any]:
        reply = self.http.post("/v1/completions", json=fields)
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body

    def metric(self, name: str, **labels: str) -> float:
        """A metric with these labels, summed over others; 0 when it has never counted."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return sum(
            sample.value
            for sample in samples
            if sample.name == f"deltic_{name}" and labels.items() <= sample.labels.items()
        )

    def is_empty(self) -> bool:
        """No sequence, page or slot in use."""
        used = ("sequences_running", "sequences_waiting", "pages_used", "state_slots_used")
        return not any(self.metric(name) for name in used)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The built-in model."""
    running = Served()
    yield running
    running.close()
