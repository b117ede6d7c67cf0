"""/v1/embeddings, /api/embed and /api/embeddings over a fake engine, whose vector of a prompt has its length and its first id."""

from __future__ import annotations

import asyncio
import base64
from array import array
from typing import Any

import httpx
import pytest

from deltic.engine.messages import EmbedderInfo
from deltic.text import Tokenizer
from tests.fake_engine import FakeEngineClient, make_app
from tests.null.test_http import client_of, post


@pytest.fixture
def embedder() -> FakeEngineClient:
    prompts = {"query": "find: ", "document": ""}
    info = EmbedderInfo(size=8, mode="last", is_normalised=True, max_tokens=100, prompts=prompts, default_prompt="")
    return FakeEngineClient(embedder=info)


def embed(client: FakeEngineClient, given: Any, **fields: Any) -> httpx.Response:
    return post(client, "/v1/embeddings", {"input": given} | fields)


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def test_texts_and_ids_become_vectors_in_their_order(embedder: FakeEngineClient) -> None:
    answer = embed(embedder, ["abc", "b", [7, 8]]).json()
    assert answer["object"] == "list" and answer["model"] == "fake"
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert [(each["object"], each["index"], each["embedding"]) for each in answer["data"]] == [
        ("embedding", 0, [3.0, 97.0] * 4), ("embedding", 1, [1.0, 98.0] * 4), ("embedding", 2, [2.0, 7.0] * 4),
    ]  # fmt: skip
    for given, vector in (("abc", [3.0, 97.0]), ([5, 6, 7], [3.0, 5.0]), ("<|im_end|>", [1.0, 258.0])):
        assert embed(embedder, given).json()["data"][0]["embedding"] == vector * 4
    sent = embedder.requests[-1]
    assert sent.params.max_tokens == 0 and sent.pooling is not None and sent.pooling.n_dimensions == 8


def test_what_is_asked_of_a_vector_holds(embedder: FakeEngineClient) -> None:
    assert len(embed(embedder, "abc", dimensions=3).json()["data"][0]["embedding"]) == 3
    packed = embed(embedder, "abc", encoding_format="base64").json()["data"][0]["embedding"]
    assert array("f", base64.b64decode(packed)).tolist() == [3.0, 97.0] * 4
    assert embed(embedder, "abc", prompt_name="query").json()["data"][0]["embedding"][:2] == [9.0, ord("f")]


def test_more_texts_than_run_at_once_are_answered(embedder: FakeEngineClient) -> None:
    """Those that run at once are 16 here, and 272 that may be open: langchain sends 1,000."""
    n_open: list[int] = []
    submit = embedder.submit

    def watched(request: Any, deliver: Any) -> None:
        n_open.append(embedder.n_open)
        submit(request, deliver)

    embedder.submit = watched  # type: ignore[method-assign]
    answer = embed(embedder, ["a" * (1 + i % 50) for i in range(1000)]).json()
    assert n_open == [*range(16)] + [15] * 984, "the next one follows as soon as one has ended"
    assert [each["embedding"][0] for each in answer["data"]] == [1 + i % 50 for i in range(1000)]
    assert "Send at most 2048" in refused(embed(embedder, ["a"] * 2049))


def test_what_cannot_be_done_is_refused(embedder: FakeEngineClient) -> None:
    for given, fields, said in (
        ([], {}, "is an empty list"),
        ("", {}, "is empty"),
        (["a", ""], {}, "input[1]: is empty"),
        ([[]], {}, "is empty"),
        ([["a"]], {}, "input[0]: expected"),
        ([True], {}, "expected"),
        ([1, "a"], {}, "expected"),
        ([-1], {}, "outside the vocabulary"),
        ([272], {}, "outside the vocabulary"),
        ({"a": 1}, {}, "input"),
        ("a" * 101, {}, "has 101 tokens, and this model reads 100"),
        (["a", "ab " * 5000], {}, "input[1]: has at least"),
        ([[1] * 101], {}, "has 101 tokens"),
        ("a", {"dimensions": 9}, "dimensions: 9 is not from 1 to 8"),
        ("a", {"dimensions": 0}, "dimensions"),
        ("a", {"encoding_format": "int8"}, "encoding_format"),
        ("a", {"prompt_name": "no"}, "prompt_name: 'no' is not known"),
        ("a", {"stream": True}, "stream"),
    ):
        assert said in refused(embed(embedder, given, **fields)), (given, fields)
    assert not embedder.requests
    assert "no model" in refused(embed(embedder, "a", model="other"), 404)
    embedder.max_open = 0
    assert "queue is full" in refused(embed(embedder, "a"), 429)
    embedder.state = "starting"
    refused(embed(embedder, "a"), 503)


def test_an_embedder_does_not_write_and_others_do_not_embed(embedder: FakeEngineClient) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        answer = post(embedder, path, {"messages": [], "prompt": "a", "input": "a", "max_tokens": 1})
        assert answer.status_code == 404 and "makes embeddings and does not write" in answer.text
    assert "writes and makes no embeddings" in refused(embed(FakeEngineClient(), "a"), 404)


def test_ollamas_forms(embedder: FakeEngineClient) -> None:
    answer = post(embedder, "/api/embed", {"model": "fake", "input": ["abc", "b"]}).json()
    assert answer["embeddings"] == [[3.0, 97.0] * 4, [1.0, 98.0] * 4] and answer["model"] == "fake"
    assert answer["prompt_eval_count"] == 4 and answer["total_duration"] > 0
    one = {"model": "fake", "input": "abc", "dimensions": 2, "keep_alive": "5m", "options": {"num_ctx": 512}}
    assert post(embedder, "/api/embed", one).json()["embeddings"] == [[3.0, 97.0]]
    assert post(embedder, "/api/embed", {"model": "fake", "input": []}).json()["embeddings"] == []
    assert post(embedder, "/api/embeddings", {"model": "fake", "prompt": "abc"}).json() == {
        "embedding": [3.0, 97.0] * 4
    }
    long = {"model": "fake", "input": "a" * 500}
    assert post(embedder, "/api/embed", long).json()["embeddings"][0][0] == 100.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltic.text.PIECE_CHARACTERS", 50)
        patch.setattr(Tokenizer, "_encode_piece", lambda self, text: n_read.append(len(text)) or [*text.encode()])
        n_read: list[int] = []
        cut = post(embedder, "/api/embed", long | {"input": "one two " * 1000})
    assert cut.json()["embeddings"][0] == [100.0, ord("o")] * 4
    assert sum(n_read) < 200, "no more than is kept is read"
    assert "has 500 tokens" in post(embedder, "/api/embed", long | {"truncate": False}).json()["error"]
    for body in (
        {"model": "fake", "input": [1, 2]},
        {"model": "fake"},
        {"model": "fake", "input": "a", "stream": True},
    ):
        answer = post(embedder, "/api/embed", body)
        assert answer.status_code == 400 and answer.json().keys() == {"error"}
    shown = post(embedder, "/api/show", {"model": "fake"}).json()
    assert "embedding" in shown["capabilities"] and "completion" not in shown["capabilities"]


def test_what_an_engine_that_fails_took_is_what_the_key_paid(embedder: FakeEngineClient) -> None:
    """It fails at the 20th of 40 texts."""
    submit = embedder.submit

    def fail() -> None:
        embedder.state = "restarting"
        embedder.streams[embedder.requests[19].id].end("error", "the engine process ended")

    def failing(request: Any, deliver: Any) -> None:
        submit(request, deliver)
        if len(embedder.requests) == 20:
            asyncio.get_running_loop().call_soon(fail)

    embedder.submit = failing  # type: ignore[method-assign]
    app = make_app(embedder, api_key=("alice=a",))
    account = app.state.server.accounts.named("alice")
    paid: list[int] = []
    account.take = paid.append

    async def go() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"authorization": "Bearer a"}
            assert (
                await client.post("/v1/embeddings", json={"input": ["abc"] * 40}, headers=headers)
            ).status_code == 503

    asyncio.run(go())
    assert account.numbers.n_prompt_tokens == sum(paid) == 120


def test_the_tokens_of_texts_are_the_keys(embedder: FakeEngineClient) -> None:
    keys: Any = {"api_key": ("alice=a", "bob=b"), "tokens_per_minute_per_key": 50}

    async def go() -> None:
        async with client_of(embedder, **keys) as client:
            alice, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
            body = {"input": ["abc"] * 40}
            assert (await client.post("/v1/embeddings", json=body)).status_code == 401
            assert (await client.post("/v1/embeddings", json=body, headers=alice)).status_code == 200
            assert (await client.post("/v1/embeddings", json=body, headers=alice)).status_code == 429, (
                "120 tokens of 50"
            )
            assert (await client.post("/v1/embeddings", json=body, headers=bob)).status_code == 200

    asyncio.run(go())
