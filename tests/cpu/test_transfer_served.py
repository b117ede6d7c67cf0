"""Prefill on one server, decode on another: two servers of the built-in model, with and without a disk that they share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.served import Served

CHAT = {
    "model": "built-in",
    "messages": [{"role": "user", "content": "Once upon a time there was a little fox. " * 40}],
    "temperature": 0,
    "logprobs": True,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """Each with a directory of its own."""
    began = [Served("--cache-dir", str(tmp_path_factory.mktemp(name)), "--allow-cache-transfer") for name in "ab"]
    yield began[0], began[1]
    for server in began:
        server.close()


def ask(server: Served, max_tokens: int, **fields: Any) -> tuple[int, Any]:
    """Tokens of the prompt that were computed, and the answer with its log-probabilities."""
    reply = server.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": max_tokens} | fields)
    assert reply.status_code == 200, reply.text
    usage, (choice,) = reply.json()["usage"], reply.json()["choices"]
    n_computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    return n_computed, (choice["message"]["content"], choice["logprobs"])


def test_a_prefix_moves_from_one_to_the_other(pair: tuple[Served, Served], tmp_path: Path) -> None:
    prefill, decode = pair
    gone = decode.http.post("/cache/export", json=CHAT)
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "nothing_cached"
    n_prompt, _ = ask(prefill, 1)
    _, expected = ask(prefill, 12, cache_prompt=False)
    stream = prefill.http.post("/cache/export", json=CHAT | {"max_tokens": 12})
    assert stream.status_code == 200, stream.text
    reply = decode.http.post("/cache/import", content=iter([stream.content]))
    assert reply.status_code == 200, reply.text
    assert n_prompt - 64 <= reply.json()["tokens"] < n_prompt
    n_computed, answer = ask(decode, 12)
    assert n_computed <= 64 and answer == expected, "the same bits"
    assert ask(decode, 1, cache_salt="another")[0] == n_prompt
    assert decode.metric("prefix_damaged_files_total") == 0


def test_two_servers_on_one_directory(tmp_path: Path) -> None:
    servers = [Served("--cache-dir", str(tmp_path)) for _ in range(2)]
    try:
        one, other = servers
        until_s = time.monotonic() + 20
        while one.http.get("/cache").json()["tiers"]["disk"]["servers"] < 2:
            assert time.monotonic() < until_s
            time.sleep(0.1)
        _, expected = ask(one, 12, cache_prompt=False)
        ask(one, 1)
        time.sleep(1.0)  # what the documents promise
        n_computed, answer = ask(other, 12)
        assert n_computed <= 64 and answer == expected, "the same bits"
        disks = [server.http.get("/cache").json()["tiers"]["disk"] for server in servers]
        assert [disk["evicts"] for disk in disks] == [True, False] and disks[1]["found_pages"] > 0
    finally:
        for server in servers:
            server.close()
