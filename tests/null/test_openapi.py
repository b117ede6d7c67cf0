"""The document at /openapi.json: it has every route, and the server answers whatever fits it, and what does not, as it says."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import jsonschema
import jsonschema_rs
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from deltic.server.api import decode
from deltic.server.app import ROUTES
from deltic.server.errors import ApiError
from deltic.server.openapi import answers, document, examples
from tests import wire
from tests.fake_engine import END, FakeEngineClient, make_app, saying, served
from tests.fake_speech import FakeSpeechClient, make_speech_app

N_EXAMPLES = int(os.environ.get("DELTIC_TEST_EXAMPLES", "2"))
"""For each operation; a run by hand takes more."""

LONGEST_S = 30.0
"""That a request may take here, on a busy machine, too."""

SCHEMA = schemathesis.openapi.from_dict(document(ROUTES))
SCHEMA.config.generation.update(modes=list(schemathesis.GenerationMode))


def answer_conformance(context: Any, response: Any, case: Any) -> bool | None:
    """Streams have a test of their own: the schema is that of an event's data, as OpenAI's document has it."""
    is_stream = "event-stream" in response.headers.get("content-type", [""])[0]
    return None if is_stream else response_schema_conformance(context, response, case)


CHECKS = [schemathesis.checks.not_a_server_error, status_code_conformance, content_type_conformance, answer_conformance]


SESSION = requests.Session()
SESSION.trust_env = False  # the environment is searched for proxies at every request: a quarter of all the time


def send(case: schemathesis.Case, url: str) -> None:
    case.call_and_validate(base_url=url, session=SESSION, checks=CHECKS, timeout=LONGEST_S)


@pytest.fixture(scope="module")
def engine() -> FakeEngineClient:
    client = FakeEngineClient(lambda request, index: [*b"Hello", END])
    client.batch = 10
    return client


@pytest.fixture(scope="module")
def live(engine: FakeEngineClient) -> Iterator[str]:
    with served(make_app(engine)) as url:
        yield url


def test_it_has_every_route_with_a_summary(live: str) -> None:
    told = httpx.get(f"{live}/openapi.json").json()
    assert told["openapi"] == "3.1.0"
    operations = {(method.upper(), path) for path, row in told["paths"].items() for method in row}
    assert operations == {(route.method, route.path.replace(":path", "")) for route in ROUTES}
    for row in told["paths"].values():
        for operation in row.values():
            assert operation["summary"] and not operation["summary"].startswith("/")
            assert {"200", "403", "500"} <= operation["responses"].keys()
    assert len({str(route.body) for route in ROUTES if route.body}) >= 4
    for schema in told["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_the_application_has_no_other_route(live: str) -> None:
    app = make_app(FakeEngineClient())
    assert {(r.path, *r.methods - {"HEAD"}) for r in app.routes} == {(r.path, r.method) for r in ROUTES}


DOCUMENT = document(ROUTES)
OPERATIONS = [(method, path, operation) for path, row in DOCUMENT["paths"].items() for method, operation in row.items()]


def test_it_is_what_the_standard_asks_for() -> None:
    SCHEMA.validate()
    names = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(names)) == len(names)
    assert all("." not in name for name in DOCUMENT["components"]["schemas"]), "two structs of one name"
    assert {tag for _, _, operation in OPERATIONS for tag in operation["tags"]} <= {
        tag["name"] for tag in DOCUMENT["tags"]
    }


def test_every_route_says_what_it_answers() -> None:
    """But for binary files, pages, and one that only refuses."""
    silent = {r.path for r in ROUTES if "application/json" in r.gives and r.answer is None}
    assert silent == {"/v1/responses/{response_id}/cancel", "/openapi.json"}


def test_every_schema_of_an_answer_is_used() -> None:
    """Its name stands in a row of the routes, or in a schema that is used."""
    text = json.dumps(DOCUMENT)
    assert [name for name in answers()["types"] if f'"#/components/schemas/{name}"' not in text] == []
    assert answers()["alternatives"].keys() <= {name for r in ROUTES for name in (r.answer, r.event)}


def test_every_body_has_an_example_that_is_one() -> None:
    bodies = [(r.path, r.body, examples().get(r.path)) for r in ROUTES if r.body and not r.form]
    assert examples().keys() <= {path for path, _, _ in bodies}, "routes that there are not"
    assert {path for path, _, example in bodies if example is None} == {"/cache/reset"}
    for _, body, example in bodies:
        decode.parse(json.dumps(example or {}).encode(), body)


def test_every_field_has_a_text() -> None:
    """In its struct, or by its name in fields.toml."""
    schemas = DOCUMENT["components"]["schemas"]
    bare = [f"{name}.{field}" for name, one in schemas.items() for field, schema in one.get("properties", {}).items()
            if not schema.get("description")]  # fmt: skip
    assert not bare
    parameters = [each for _, _, operation in OPERATIONS for each in operation.get("parameters", ())]
    assert all(parameter["description"] for parameter in parameters)


def closed(schema: Any) -> Any:
    """A schema that refuses fields which it does not have."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: closed(each) for name, each in schema.items()} | (
        {"additionalProperties": False} if "properties" in schema else {}
    )


COMPONENTS = closed(DOCUMENT["components"])


@cache
def validator(path: str, kind: str, method: str = "post") -> jsonschema_rs.Draft202012Validator:
    content = DOCUMENT["paths"][path][method]["responses"]["200"]["content"]
    return jsonschema_rs.Draft202012Validator(content[kind]["schema"] | {"components": COMPONENTS})


@pytest.mark.parametrize("name", wire.SAID)
def test_answers_are_as_it_says(name: str) -> None:
    """All that every API sends in each conversation of tests/wire.py: whole, and each event or line; no field is without a place."""
    asyncio.run(check_answers(wire.SAID[name]))


def test_what_the_server_tells_of_itself_is_as_it_says(live: str) -> None:
    """No field is without a place."""
    read = [r for r in ROUTES if r.method == "GET" and r.answer is not None and "{" not in r.path]
    replies = {route.path: httpx.get(live + route.path) for route in read}
    told = {path: reply for path, reply in replies.items() if reply.status_code == 200}
    assert len(told) >= 10
    for path, reply in told.items():
        validator(path, "application/json", "get").validate(reply.json())


async def check_answers(said: wire.Said) -> None:
    engine = FakeEngineClient(saying(said.text, said.ends))
    transport = httpx.ASGITransport(make_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10) as client:
        for api, path, body in wire.bodies(said):
            for stream in (False, True):
                engine.batch, engine.die_after, engine.state, engine.cached_tokens = 3, said.die_after, "ready", 8
                reply = await client.post(path, json=body | said.more.get(api, {}) | {"stream": stream})
                kind = reply.headers["content-type"].partition(";")[0]
                lines = (
                    [reply.text] if not stream else [line.removeprefix("data: ") for line in reply.text.splitlines()]
                )
                data = [line for line in lines if line and not line.startswith("event: ") and line != "[DONE]"]
                assert data
                if reply.status_code == 200:
                    for line in data:
                        validator(path, kind).validate(json.loads(line))


BODIES = sorted({route.body for route in ROUTES if route.body}, key=lambda body: body.__name__)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("body", BODIES)
@settings(max_examples=40 * N_EXAMPLES, deadline=None)
@given(data=st.data())
def test_any_json_is_parsed_or_refused(body: type[msgspec.Struct], data: st.DataObject) -> None:
    names = st.sampled_from([*body.__struct_encode_fields__, "else"])
    value = data.draw(st.dictionaries(names, VALUES, max_size=4) | VALUES)
    text = data.draw(st.just(json.dumps(value).encode()) | st.binary(max_size=20))
    try:
        assert isinstance(decode.parse(text, body), body)
    except ApiError as error:
        assert error.status == 400 and error.message and "msgspec" not in error.message
        msgspec.json.decode(error.body())


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "text",
    [
        b"[" * 500_000,
        b'{"a":' * 500_000,
        b'"' + b"x" * 5_000_000,
        b"1" * 1_000_000,
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
    ],
    ids=range(6),
)
def test_hostile_json_is_refused_soon(body: type[msgspec.Struct], text: bytes) -> None:
    seconds = []
    for _ in range(3):  # A full collection of a large heap may fall into one of them.
        before_s = time.thread_time()  # Servers of other tests run on other threads.
        with pytest.raises(ApiError):
            decode.parse(text, body)
        seconds.append(time.thread_time() - before_s)
    assert min(seconds) < 1


@SCHEMA.parametrize()
@settings(max_examples=N_EXAMPLES, deadline=None, derandomize=N_EXAMPLES < 10, suppress_health_check=list(HealthCheck))
def test_nothing_that_is_sent_breaks_the_server(case: schemathesis.Case, live: str) -> None:
    send(case, live)


@pytest.fixture(scope="module")
def speaks() -> Iterator[str]:
    with served(make_speech_app(FakeSpeechClient("base"))) as url:
        yield url


@SCHEMA.include(path_regex="^/v1/audio/").parametrize()
@settings(max_examples=N_EXAMPLES, deadline=None, derandomize=N_EXAMPLES < 10, suppress_health_check=list(HealthCheck))
def test_nothing_that_is_sent_breaks_speech(case: schemathesis.Case, speaks: str) -> None:
    send(case, speaks)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(make_app(FakeEngineClient(), batch_dir=tmp_path_factory.mktemp("batches"))) as url:
        yield url


@SCHEMA.include(path_regex="^/v1/(files|batches)").parametrize()
@settings(max_examples=N_EXAMPLES, deadline=None, derandomize=N_EXAMPLES < 10, suppress_health_check=list(HealthCheck))
def test_nothing_that_is_sent_breaks_batches(case: schemathesis.Case, batches: str) -> None:
    send(case, batches)


def test_nothing_is_left_open(engine: FakeEngineClient, live: str) -> None:
    """Behind all of the above."""
    assert engine.n_open == 0
    assert httpx.get(f"{live}/health").status_code == 200
