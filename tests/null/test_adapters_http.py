"""LoRA adapters over HTTP: a request names one as its model, in every API; clients load and unload them. Over a fake engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltic.commands.endpoint import Endpoint, asked_model
from deltic.config import ConfigError, EngineConfig, ModelConfig, ServerConfig
from deltic.server.app import create_app
from deltic.server.serve import serve
from deltic.server.service import Server
from tests.fake_engine import FakeEngineClient, make_app, served, service_of
from tests.fake_speech import FakeSpeechClient, speech_service_of
from tests.null.test_batches import Site, line
from tests.null.test_http import HELLO

CHAT, LOAD, UNLOAD = "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL, POEM, OTHER = b"s" * 16, b"p" * 16, b"o" * 16
"""Keys of adapters."""


class Adapted(FakeEngineClient):
    """An engine with the adapter `sql`, and more on its disk: /poem and /other."""

    def __init__(self, *, max_loras: int = 3, loading: bool = True, **more: Any) -> None:
        super().__init__(adapters={"sql": SQL}, max_loras=max_loras, **more)
        self.config = EngineConfig(lora=("sql=/sql",), allow_lora_loading=loading)
        self.contents = {"/sql": SQL, "/poem": POEM, "/other": OTHER}

    def asked(self) -> list[bytes]:
        """The adapters of the requests since the last call."""
        keys = [request.adapter for request in self.requests]
        self.requests.clear()
        return keys


@pytest.fixture
def engine() -> Adapted:
    return Adapted()


Post = Callable[..., Coroutine[Any, Any, httpx.Response]]


def over(app: Any, test: Callable[[Post, httpx.AsyncClient], Coroutine[Any, Any, None]], **headers: str) -> None:
    """Runs a test in the application's own event loop."""

    async def go() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:

            async def post(path: str, status: int = 200, **body: Any) -> httpx.Response:
                reply = await client.post(path, json=body)
                assert reply.status_code == status, reply.text
                return reply

            await asyncio.wait_for(test(post, client), 30)

    asyncio.run(go())


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 20},
    "/v1/responses": {"input": "hello"},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "x"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_request_names_an_adapter_as_its_model(engine: Adapted, path: str, stream: bool) -> None:
    async def test(post: Post, client: httpx.AsyncClient) -> None:
        for name, key in (("sql", SQL), ("fake", b"")):
            reply = await post(path, model=name, stream=stream, **BODIES[path])
            assert engine.asked() == [key]
            names = {
                event[at]["model"] if at else event["model"]
                for event in events(reply.text)
                for at in ("", "message", "response")
                if "model" in (event.get(at) or {} if at else event)
            }
            assert names == {name}, "answers have the name that was asked for"
        if "messages" in path:  # a name is needed there
            return
        await post(path, status=404, model="nobody", **BODIES[path])
        assert engine.asked() == []

    over(make_app(engine), test)


def events(text: str) -> list[dict[str, Any]]:
    """What a body holds: one JSON object, lines of such, or server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [65]}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/api/show", {}),
    ],
)
def test_what_runs_nothing_knows_the_names_too(engine: Adapted, path: str, body: dict[str, Any]) -> None:
    async def test(post: Post, client: httpx.AsyncClient) -> None:
        own, adapted = [(await post(path, model=name, **body)).json() for name in ("fake", "sql")]
        assert path == "/api/show" or own == adapted
        await post(path, status=404, model="nobody", **body)

    over(make_app(engine), test)


def test_the_lists_have_them_beside_their_model(engine: Adapted) -> None:
    with served(make_app(engine)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        base, sql = client.models.list().data
        assert (base.id, sql.id, base.root, sql.root, sql.parent) == ("fake", "sql", "fake", "/sql", "fake")  # type: ignore[attr-defined]
        assert client.models.retrieve("sql") == sql
        with pytest.raises(openai.NotFoundError, match="This server has 'fake', 'sql'"):
            client.models.retrieve("poem")
        theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        assert [model.id for model in theirs.models.list()] == ["fake", "sql"]
        tags = httpx.get(f"{url}/api/tags").json()["models"]
        assert [(card["name"], card["details"]["parent_model"]) for card in tags] == [
            ("fake:latest", ""),
            ("sql:latest", "fake:latest"),
        ]
        assert [card["name"] for card in httpx.get(f"{url}/api/ps").json()["models"]] == ["fake:latest", "sql:latest"]
        shown = httpx.post(f"{url}/api/show", json={"model": "sql:latest"}).json()
        assert shown["modelfile"].endswith("FROM fake:latest\nADAPTER /sql\n")
        said = client.chat.completions.create(model="sql:latest", messages=HELLO)  # type: ignore[arg-type]
        assert said.model == "sql" and engine.asked() == [SQL]


def test_they_come_and_go() -> None:
    async def test(post: Post, client: httpx.AsyncClient) -> None:
        reply = await post(LOAD, lora_name="poem", lora_path="/poem")
        assert reply.text == "Success: LoRA adapter 'poem' added successfully."
        assert reply.headers["content-type"].startswith("text/plain")
        await post(CHAT, model="poem", messages=HELLO)
        assert engine.asked() == [POEM]
        again = (await post(LOAD, status=400, lora_name="poem", lora_path="/other")).json()["error"]
        assert "'poem' has already been loaded. Set load_inplace" in again["message"]
        await post(LOAD, lora_name="twin", lora_path="/poem")
        assert engine.adapters == {SQL: 1, POEM: 2}
        full = (await post(LOAD, status=400, lora_name="other", lora_path="/other")).json()["error"]
        assert "2 adapters are loaded; start with more --max-loras" in full["message"]
        for name in ("poem", "sql"):
            reply = await post(UNLOAD, lora_name=name)
            assert reply.text == f"Success: LoRA adapter '{name}' removed successfully."
        assert engine.adapters == {POEM: 1}
        gone = (await post(UNLOAD, status=404, lora_name="poem")).json()["error"]
        assert gone["message"] == "no adapter 'poem'. 'fake' has 'twin'." and gone["param"] == "lora_name"
        error = (await post(CHAT, status=404, model="sql", messages=HELLO)).json()["error"]
        assert error["message"] == "no model 'sql'. This server has 'fake', 'twin'."
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["fake", "twin"]

    over(make_app(engine := Adapted(max_loras=2)), test)


def test_in_place_new_requests_have_the_new_one(engine: Adapted) -> None:
    async def test(post: Post, client: httpx.AsyncClient) -> None:
        await post(LOAD, lora_name="poem", lora_path="/poem", load_inplace=True)  # there was none
        engine.token_s = 0.005
        running = asyncio.create_task(post(CHAT, model="poem", messages=HELLO))
        while not engine.requests:
            await asyncio.sleep(0.001)
        engine.contents["/poem"] = OTHER
        await post(LOAD, lora_name="poem", lora_path="/poem", load_inplace=True)
        assert engine.adapters == {SQL: 1, OTHER: 1}
        await post(CHAT, model="poem", messages=HELLO)
        assert (await running).json()["model"] == "poem" and engine.asked() == [POEM, OTHER]
        await post(LOAD, status=400, lora_name="poem", lora_path="/missing", load_inplace=True)
        await post(CHAT, model="poem", messages=HELLO)
        assert engine.asked() == [OTHER], "the old one stays until there is a new one"
        assert {card["root"] for card in (await client.get("/v1/models")).json()["data"]} == {"fake", "/sql", "/poem"}

    over(make_app(engine), test)


def test_while_one_is_loaded_others_are_answered(engine: Adapted) -> None:
    async def test(post: Post, client: httpx.AsyncClient) -> None:
        engine.hold = True
        loads = [
            asyncio.create_task(client.post(LOAD, json={"lora_name": "poem", "lora_path": path}))
            for path in ("/poem", "/other")
        ]
        await asyncio.sleep(0.01)
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["fake", "sql"]
        engine.hold = False
        assert [reply.status_code for reply in await asyncio.gather(*loads)] == [200, 400]
        assert engine.adapters == {SQL: 1, POEM: 1}

    over(make_app(engine), test)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"lora_name": "x", "lora_path": "/none"}, "/none: no such adapter"),
        ({"lora_name": "fake", "lora_path": "/poem"}, "'fake' is a model's name. Give the adapter another name"),
        ({"lora_name": "x", "lora_path": "~nobody-here/x"}, "~nobody-here/x: "),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_path": "/poem"}, "lora_name"),
        ({"lora_name": "", "lora_path": "/poem"}, "lora_name"),
        ({"lora_name": "a b", "lora_path": "/poem"}, "lora_name"),
        ({"lora_name": "a\n", "lora_path": "/poem"}, "lora_name"),
        ({"lora_name": "x", "lora_path": ""}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/poem", "load_inplace": 1}, "load_inplace"),
        ({"lora_name": "x", "lora_path": "/poem", "rank": 1}, "rank"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_refused(engine: Adapted, body: dict[str, Any], said: str) -> None:
    async def test(post: Post, client: httpx.AsyncClient) -> None:
        error = (await post(LOAD, status=400, **body)).json()["error"]
        assert said in error["message"] and engine.adapters == {SQL: 1}

    over(make_app(engine), test)


def test_a_path_is_the_servers(engine: Adapted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home")
    engine.contents |= {str(tmp_path / "near"): POEM, "/home/far": OTHER}

    async def test(post: Post, client: httpx.AsyncClient) -> None:
        await post(LOAD, lora_name="near", lora_path="near")
        await post(LOAD, lora_name="far", lora_path="~/far")

    over(make_app(engine), test)


def test_the_name_of_an_adapter_is_no_path(engine: Adapted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    async def load(post: Post, client: httpx.AsyncClient) -> None:
        for name in ("../up", "/etc/hostname", "a/../../b", "..", "c\\..\\d"):
            await post(LOAD, lora_name=name, lora_path="/poem")
            reply = await post(CHAT, model=name, messages=HELLO)
            assert reply.json()["model"] == name and engine.asked() == [POEM]
            await post(UNLOAD, lora_name=name)

    over(make_app(engine), load)
    assert not list(tmp_path.iterdir()) and not list(tmp_path.parent.glob("up*"))


def test_loading_is_for_who_allowed_it() -> None:
    async def test(post: Post, client: httpx.AsyncClient) -> None:
        for path in (LOAD, UNLOAD):
            reply = await post(path, status=403, lora_name="sql", **({"lora_path": "/sql"} if path == LOAD else {}))
            assert "--allow-lora-loading" in reply.json()["error"]["message"]
        await post(CHAT, model="sql", messages=HELLO)

    over(make_app(Adapted(loading=False)), test)


def test_loading_is_for_administrators(engine: Adapted) -> None:
    app = make_app(engine, api_key=("alice=a", "bob=b", "operator"))

    async def refused(post: Post, client: httpx.AsyncClient) -> None:
        for path, body in ((LOAD, {"lora_name": "x", "lora_path": "/poem"}), (UNLOAD, {"lora_name": "sql"})):
            assert (await post(path, status=403, **body)).json()["error"]["code"] == "not_an_admin"
        await post(CHAT, model="sql", messages=HELLO)

    async def allowed(post: Post, client: httpx.AsyncClient) -> None:
        await post(LOAD, lora_name="x", lora_path="/poem")
        await post(UNLOAD, lora_name="sql")

    over(app, refused, authorization="Bearer a")
    over(app, allowed, authorization="Bearer operator")

    async def page(post: Post, client: httpx.AsyncClient) -> None:
        reply = await client.post(LOAD, content=json.dumps({"lora_name": "y", "lora_path": "/other"}))
        assert reply.status_code == 415

    over(make_app(Adapted()), page)


def test_an_engine_that_is_started_again_gets_them_again(engine: Adapted, caplog: pytest.LogCaptureFixture) -> None:
    async def test(post: Post, client: httpx.AsyncClient) -> None:
        await post(LOAD, lora_name="poem", lora_path="/poem")
        await post(LOAD, lora_name="other", lora_path="/other")
        engine.state = "restarting"
        reply = await post(LOAD, status=503, lora_name="x", lora_path="/poem")
        assert reply.headers["retry-after"]
        del engine.contents["/other"]
        engine.hold = True
        engine.restart()
        await post(CHAT, status=503, model="poem", messages=HELLO)
        for stream in (False, True):
            reply = await post(CHAT, status=503, model="other", messages=HELLO, stream=stream)
            assert reply.headers["retry-after"] and "'other' is being loaded" in reply.text
        engine.hold = False
        for name, key in (("sql", SQL), ("poem", POEM)):
            while (reply := await client.post(CHAT, json={"model": name, "messages": HELLO})).status_code == 503:
                await asyncio.sleep(0.002)
            assert reply.status_code == 200 and engine.asked() == [key]
        while (await client.get("/v1/models/other")).status_code == 200:
            await asyncio.sleep(0.002)
        assert "adapter other of fake is not there any more: /other: no such adapter" in caplog.text
        assert engine.adapters == {SQL: 1, POEM: 1}

    over(make_app(engine), test)


def test_what_was_changed_stays_changed_in_the_next_engine(engine: Adapted, caplog: pytest.LogCaptureFixture) -> None:
    """An engine comes with the adapters of --lora, whatever became of their names."""

    async def test(post: Post, client: httpx.AsyncClient) -> None:
        await post(LOAD, lora_name="sql", lora_path="/poem", load_inplace=True)
        engine.restart()
        while (await client.post(CHAT, json={"model": "sql", "messages": HELLO})).status_code == 503:
            await asyncio.sleep(0.002)
        assert engine.asked() == [POEM] and engine.adapters == {POEM: 1}
        await post(UNLOAD, lora_name="sql")
        engine.restart()
        await post(CHAT, status=404, model="sql", messages=HELLO)
        assert not engine.adapters
        await post(LOAD, lora_name="sql", lora_path="/sql")
        assert engine.info
        engine.info.adapters["sql"] = OTHER
        engine.restart()
        await post(CHAT, model="sql", messages=HELLO)
        assert engine.asked() == [OTHER] and "adapter sql of fake has changed on disk: /sql" in caplog.text

    over(make_app(engine), test)


def test_one_that_goes_before_its_request_does(engine: Adapted) -> None:
    """Between a body that was read and the engine an adapter may be replaced, or go."""
    app = make_app(engine)
    service = app.state.server.find("sql")

    async def test(post: Post, client: httpx.AsyncClient) -> None:
        service.adapter.is_unloaded = True
        error = (await post(CHAT, status=404, model="sql", messages=HELLO)).json()["error"]
        assert error["message"] == "the adapter 'sql' was unloaded" and engine.asked() == []

    over(app, test)


def several() -> tuple[Server, Adapted, Adapted]:
    """Two models that write, and one that speaks, in this order: speaker, first, second."""
    server, first, second = Server(ServerConfig()), Adapted(), Adapted()
    second.config = EngineConfig(allow_lora_loading=True)
    second.adapters.clear()
    assert second.info
    second.info.adapters.clear()
    server.add(speech_service_of(server, FakeSpeechClient(), "speaker"))
    server.add(service_of(server, first, "first"))
    server.add(service_of(server, second, "second", patterns=("s*",)))
    return server, first, second


def test_under_an_adapter_a_model_is_the_same_but_for_its_names(engine: Adapted) -> None:
    service = service_of(Server(ServerConfig()), engine, "fake", aliases=("other",), patterns=("f*",))
    (adapter,) = service.adapters.all()
    under = service.under(adapter)
    apart = {field.name for field in fields(service) if getattr(under, field.name) is not getattr(service, field.name)}
    assert apart == {"model_name", "adapter", "aliases", "patterns"} and under.names == ("sql",)
    with pytest.raises(FrozenInstanceError):  # what one of them kept, the other would not have
        under.metrics = None  # type: ignore[assignment, misc]


def test_of_several_models_each_has_its_own() -> None:
    server, first, second = several()

    async def test(post: Post, client: httpx.AsyncClient) -> None:
        await post(f"{LOAD}?model=second", lora_name="sentences", lora_path="/poem")
        await post(LOAD, lora_name="other", lora_path="/other")
        for name, keys in (("sql", [SQL]), ("other", [OTHER]), ("first", [b""])):
            await post(CHAT, model=name, messages=HELLO)
            assert (first.asked(), second.asked()) == (keys, [])
        for name, keys in (("sentences", [POEM]), ("second", [b""]), ("some", [b""])):
            await post(CHAT, model=name, messages=HELLO)
            assert (first.asked(), second.asked()) == ([], keys), "names go before patterns"
        for name in ("sql", "speaker", "sentences"):
            path = f"{LOAD}?model={'first' if name == 'sentences' else 'second'}"
            error = (await post(path, status=400, lora_name=name, lora_path="/other", load_inplace=True)).json()[
                "error"
            ]
            assert f"{name!r} is " in error["message"]
        error = (await post(f"{LOAD}?model=speaker", status=403, lora_name="x", lora_path="/other")).json()["error"]
        assert "'speaker'" in error["message"]
        await post(UNLOAD, lora_name="sentences")
        assert not second.adapters
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card.get("parent")) for card in listed[3:]] == [("sql", "first"), ("other", "first")]

    over(create_app(server), test)


@pytest.mark.parametrize(
    ("lora", "other", "said"),
    [
        (("small=/a",), (), "a model is called 'small'"),
        (("second=/a",), (), "a model is called 'second'"),
        (("a=/a",), ("a=/b",), "another adapter is called 'a'"),
    ],
)
def test_names_that_collide_end_the_start(lora: tuple[str, ...], other: tuple[str, ...], said: str) -> None:
    models = [
        (EngineConfig(model="/a", lora=lora), ModelConfig(served_model_name=("tiny", "small"))),
        (EngineConfig(model="/b", lora=other), ModelConfig(served_model_name=("second",))),
    ]
    with pytest.raises(ConfigError, match=f"--lora .*{said}"):
        serve(models, ServerConfig())


def test_a_batch_is_for_an_adapter(tmp_path: Path) -> None:
    with Site(tmp_path / "d", Adapted()) as site:
        batch = site.ended(site.run([line(f"r{i}", model="sql") for i in range(3)]))
        assert (batch.status, batch.model) == ("completed", "sql")
        answers = site.content(batch.output_file_id)
        assert {row["response"]["body"]["model"] for row in answers.values()} == {"sql"}
        assert site.engine.requests and {(r.adapter, r.adapter_name) for r in site.engine.requests} == {(SQL, "sql")}
        mixed = site.ended(site.run([line("a", model="sql"), line("b", model="fake")]))
        assert mixed.status == "failed" and "its lines name 'sql' and 'fake'" in mixed.errors.data[0].message


def test_the_log_and_the_numbers_name_them(engine: Adapted, caplog: pytest.LogCaptureFixture) -> None:
    async def test(post: Post, client: httpx.AsyncClient) -> None:
        with caplog.at_level(logging.INFO, "deltic.server"):
            await post(CHAT, model="sql", messages=HELLO)
            await post(CHAT, messages=HELLO)
        lines = [record.getMessage() for record in caplog.records if CHAT in record.getMessage()]
        assert ["model=sql" in line for line in lines] == [True, False]
        await post(LOAD, lora_name="poem", lora_path="/poem")
        assert engine.asked() == [SQL, b""]
        engine.hold = True
        waiting = asyncio.create_task(post(CHAT, model="poem", messages=HELLO))
        while not engine.asked():
            await asyncio.sleep(0.001)
        found = numbers((await client.get("/metrics")).text)
        assert found["deltic_adapters"] == {(): 3.0} and found["deltic_adapters_used"] == {(): 2.0}
        assert found["deltic_adapter_requests"] == {("sql",): 1.0, ("poem",): 1.0}
        assert list(found["vllm:lora_requests_info"]) == [("3", "", "poem")]
        engine.hold, engine.token_s = False, 0.01
        while list(found["vllm:lora_requests_info"]) != [("3", "poem", "")]:
            await asyncio.sleep(0.001)
            found = numbers((await client.get("/metrics")).text)
        await waiting
        found = numbers((await client.get("/metrics")).text)
        assert list(found["vllm:lora_requests_info"]) == [("3", "", "")]
        assert min(found["vllm:lora_requests_info"].values()) > 1e9

    over(make_app(engine, metrics_names="both"), test)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"lora": ["sql=/sql"]}, "sql"),
        ({"lora": ["sql=/sql", "poem=/poem"]}, "fake"),
        ({}, "fake"),
        ({"url": "http://localhost", "model": "poem"}, "poem"),
    ],
)
def test_a_command_with_one_adapter_uses_it(engine: Adapted, given: dict[str, Any], name: str) -> None:
    with served(make_app(engine)) as url:
        arguments = argparse.Namespace(**{"url": None} | given)
        assert asyncio.run(asked_model(arguments, Endpoint(url, None))) == name


def numbers(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Of each family of adapters the values by the labels beside the model's."""
    return {
        family.name: {
            tuple(value for name, value in sample.labels.items() if not name.startswith("model")): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
        if "lora" in family.name or "adapter" in family.name
    }
