"""Numbers and token ids of any size, in each field of each door that has one: answered, or refused in words; and the engine takes what
comes to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import inspect

from deltic.engine.checks import check_request
from deltic.server.app import ROUTES, Route
from tests.fake_engine import END, FakeEngineClient, make_app, served
from tests.fake_speech import FakeSpeechClient, make_speech_app

HELLO = [{"role": "user", "content": "hello"}]
SAY = {"input": "hello", "voice": "vivian", "response_format": "wav"}
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions/render": {"messages": HELLO},
    "/v1/completions/render": {"prompt": "hello"},
    "/v1/messages": {"model": "fake", "messages": HELLO, "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "fake", "messages": HELLO},
    "/v1/responses": {"input": "hello"},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/api/chat": {"model": "fake", "messages": HELLO, "stream": False},
    "/api/generate": {"model": "fake", "prompt": "hello", "stream": False},
    "/api/show": {"model": "fake"},
    "/v1/embeddings": {"input": "hello"},
    "/api/embed": {"model": "fake", "input": "hello"},
    "/api/embeddings": {"model": "fake", "prompt": "hello"},
    "/v1/score": {"text_1": "hello", "text_2": "hello"},
    "/v1/rerank": {"query": "hello", "documents": ["hello"]},
    "/v2/rerank": {"query": "hello", "documents": ["hello"]},
    "/v1/decisions": {"input": "hello", "questions": [{"id": "a", "question": "b"}]},
    "/v1/systemone": {"state": "hello", "questions": {"a": {"question": "b"}}},
    "/infill": {"input_prefix": "a(", "input_suffix": ")"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [97]},
    "/cache/export": {"prompt": "hello"},
    "/cache/reset": {},
    "/v1/batches": {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/x"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/v1/audio/speech": SAY,
    "/v1/audio/speech/batch": {"items": [SAY]},
}
"""Of each route that takes JSON a body that asks for little."""
UGLY = ["-1", "2147483648", "-2147483649", "9223372036854775808", "1e308", "NaN", "1e999", "1" * 400]
IDS = [-1, 320, 2**31, 2**63]
"""Of tokens, none of which there is."""
FIELDS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias", "context", "options")

CLIENT = httpx.Client(timeout=30, trust_env=False)


@pytest.fixture(scope="module")
def text() -> Iterator[tuple[str, FakeEngineClient]]:
    engine = FakeEngineClient(lambda request, index: [*b"Hello", END])
    engine.batch = 10
    with served(make_app(engine)) as url:
        yield url, engine


@pytest.fixture(scope="module")
def speech() -> Iterator[tuple[str, FakeEngineClient]]:
    engine = FakeSpeechClient()
    with served(make_speech_app(engine)) as url:
        yield url, engine


def numbers_of(kind: inspect.Type, depth: int = 0) -> Iterator[Any]:
    """Values of a type in which one number is "NUMBER"."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        yield "NUMBER"
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from numbers_of(one, depth)
    elif depth > 3:
        return
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        for inner in numbers_of(kind.item_type, depth + 1):
            yield [inner]
    elif isinstance(kind, inspect.DictType):
        for inner in numbers_of(kind.value_type, depth + 1):
            yield {"97": inner}
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            for inner in numbers_of(field.type, depth + 1):
                yield {field.encode_name: inner}


def check_answered(to: tuple[str, FakeEngineClient], path: str, body: str) -> httpx.Response:
    """Answers a body, or refuses it; and what comes to the engine, that takes."""
    url, engine = to
    engine.requests.clear()
    said = CLIENT.post(url + path, content=body.encode(), headers={"content-type": "application/json"})
    assert said.status_code in (200, 400, 404, 409, 413), (path, body[:300], said.text[:300])
    assert engine.info is not None
    for asked in engine.requests:
        check_request(msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=type(asked)), engine.info)
    return said


@pytest.mark.parametrize("route", [r for r in ROUTES if r.body and not r.form], ids=lambda route: route.path)
def test_numbers_of_any_size(
    route: Route, text: tuple[str, FakeEngineClient], speech: tuple[str, FakeEngineClient]
) -> None:
    to, path = speech if route.path.startswith("/v1/audio") else text, route.path
    places = {json.dumps(place) for place in numbers_of(inspect.type_info(route.body))} - {'{"n": "NUMBER"}'}
    # A number of answers costs as many; what bounds it is in test_protocol.py.
    for place in sorted(places):
        body = json.dumps(PLAIN[path] | json.loads(place))
        for ugly in UGLY:
            check_answered(to, path, body.replace('"NUMBER"', ugly))


@pytest.mark.parametrize(
    "path", [path for path in PLAIN if not path.startswith(("/v1/audio", "/v1/batches", "/v1/load", "/cache"))]
)
def test_ids_of_no_token(path: str, text: tuple[str, FakeEngineClient]) -> None:
    """The engine indexes with them."""
    for token_id in IDS:
        given: dict[str, Any] = {field: [97, token_id] for field in FIELDS[:3]} | {"logit_bias": {str(token_id): 1}}
        given |= {"context": [97, token_id], "options": {"stop_token_ids": [token_id], "num_ctx": token_id}}
        for field, value in given.items():
            check_answered(text, path, json.dumps(PLAIN[path] | {field: value}))
        for prompt in ([97, token_id], [[97], [token_id]]):
            for field in PLAIN[path].keys() & {"prompt", "tokens", "input"}:
                said = check_answered(text, path, json.dumps(PLAIN[path] | {field: prompt}))
                assert said.status_code == (404 if "embed" in path else 400), (path, field, said.text)  # it writes
