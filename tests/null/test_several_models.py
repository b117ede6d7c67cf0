"""Several models behind one server: whose request it is, what all share, and what each has. Over engines that are not there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from deltic.__main__ import main
from deltic.commands.endpoint import Endpoint, model_name
from deltic.config import ConfigError, EngineConfig, ModelConfig, ServerConfig
from deltic.engine.events import Loading
from deltic.server.app import create_app
from deltic.server.errors import ApiError
from deltic.server.limits import INLINE_BYTES
from deltic.server.serve import Served, _service
from deltic.server.service import Server
from deltic.server.speech.audio import encode
from deltic.server.speech.socket import PATH
from tests.fake_engine import FakeEngineClient, saying, served, service_of
from tests.fake_speech import FakeSpeechClient, speech_service_of, wave
from tests.null.test_http import HELLO
from tests.null.test_speech_socket import CLOSE, CONFIG, DONE, kinds, received, send, text

CHAT, SPEECH, VOICES = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/voices"


class Several:
    """Two models that write and two that speak, in this order: speaker, writer, other, cloner."""

    def __init__(self, **config: Any) -> None:
        self.server = Server(ServerConfig(**config))
        self.speaker, self.cloner = FakeSpeechClient(), FakeSpeechClient("base")
        self.writer, self.other = FakeEngineClient(saying("I write")), FakeEngineClient(saying("Me too"))
        self.server.add(speech_service_of(self.server, self.speaker, "speaker"))
        self.server.add(service_of(self.server, self.writer, "writer"))
        self.server.add(service_of(self.server, self.other, "org/other"))
        self.server.add(speech_service_of(self.server, self.cloner, "cloner"))
        self.url = ""

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path).json()

    def post(self, path: str, body: Any, status: int = 200) -> httpx.Response:
        reply = httpx.post(self.url + path, json=body, timeout=20)
        assert reply.status_code == status, reply.text
        return reply

    def refusal(self, path: str, body: Any, status: int) -> dict[str, Any]:
        error: dict[str, Any] = self.post(path, body, status).json()["error"]
        return error

    def asked(self) -> list[str]:
        """Which engines had requests since the last call."""
        engines = {"speaker": self.speaker, "writer": self.writer, "other": self.other, "cloner": self.cloner}
        had = [name for name, engine in engines.items() if engine.requests]
        for engine in engines.values():
            engine.requests.clear()
        return had


@pytest.fixture
def several() -> Iterator[Several]:
    models = Several()
    with served(create_app(models.server), ws="websockets-sansio") as models.url:
        yield models


def test_the_official_client_finds_them_all(several: Several) -> None:
    client = openai.OpenAI(base_url=f"{several.url}/v1", api_key="none", max_retries=0)
    names = [model.id for model in client.models.list()]
    assert names == ["speaker", "writer", "org/other", "cloner"]
    assert client.models.retrieve("org/other").id == "org/other"
    for name, said in (("writer", "I write"), ("org/other", "Me too")):
        answer = client.chat.completions.create(model=name, messages=HELLO)
        assert (answer.model, answer.choices[0].message.content) == (name, said)
    stream = client.chat.completions.create(model="org/other", messages=HELLO, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Me too"
    assert {chunk.model for chunk in chunks} == {"org/other"}
    spoken = client.audio.speech.create(model="speaker", input="Hi.", voice="vivian", response_format="pcm")
    assert spoken.content == wave(4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 20}),
        ("/v1/responses", {"input": "hello"}),
        (SPEECH, {"input": "Hi.", "voice": "vivian"}),
        (SPEECH + "/batch", {"items": [{"input": "Hi."}], "voice": "vivian"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_names_its_model(several: Several, path: str, body: dict[str, Any]) -> None:
    speaks = path.startswith(SPEECH)
    default, named, wrong = ("speaker", "speaker", "writer") if speaks else ("writer", "org/other", "speaker")
    for more in ({}, {"model": None}) if path != "/v1/messages" else ():
        several.post(path, body | more)
        assert several.asked() == [default], "the first of its kind"
    several.post(path, {"model": named} | body)
    assert several.asked() == [named.removeprefix("org/")]
    error = several.refusal(path, body | {"model": "nobody"}, 404)
    assert "no model 'nobody'. This server has 'speaker', 'writer', 'org/other', 'cloner'" in error["message"]
    error = several.refusal(path, body | {"model": wrong}, 404)
    assert repr(wrong) in error["message"] and ("does not" in error["message"])
    several.refusal(path, body | {"model": 5}, 400)
    assert several.asked() == []


def test_a_body_is_read_once_however_long(several: Several) -> None:
    long = [{"role": "user", "content": "x" * 900}]
    body = {
        "messages": long,
        "metadata": {"a": "b" * (INLINE_BYTES // 2), "c": "d" * INLINE_BYTES},
        "model": "org/other",
    }
    several.post(CHAT, body | {"metadata": None})
    assert several.asked() == ["other"]
    for broken in (
        b"",
        b"{",
        b"[]",
        b'{"model": "org/other", "messages": ' + b"[" * 100_000,
        b'{"model": "\\ud800"}',
        b"\xff",
    ):
        reply = httpx.post(several.url + CHAT, content=broken, headers={"content-type": "application/json"})
        assert reply.status_code == 400, reply.text
    assert several.asked() == []
    limited = Several(max_body_mb=0.001)
    with served(create_app(limited.server)) as limited.url:
        limited.refusal(CHAT, {"messages": long * 2}, 413)


def test_what_has_no_body_names_it_in_the_query(several: Several) -> None:
    assert "vivian" in several.get(VOICES)["voices"]
    assert several.get(f"{VOICES}?model=cloner")["voices"] == []
    assert several.get(f"{VOICES}?model=writer")["error"]["code"] == "unsupported_model"
    assert several.get(f"{VOICES}?model=nobody")["error"]["code"] == "model_not_found"
    several.other.cache = {"enabled": True, "checkpoints": [{"tokens": 7, "kind": "end"}]}
    assert several.get("/cache?model=org/other")["checkpoints"][0]["tokens"] == 7
    several.post("/cache/reset?model=org/other", {})
    assert several.other.cache["checkpoints"] == [] and several.writer.cache["checkpoints"]
    several.post("/cache/reset", {})
    assert several.writer.cache["checkpoints"] == [], "of the first that writes"
    assert several.get("/live")["model"] == "writer"
    assert several.get("/live?model=speaker")["model"] == "speaker"
    several.post("/tokenize", {"prompt": "x", "model": "speaker"})
    several.refusal("/detokenize", {"tokens": [1], "model": "nobody"}, 404)


def test_a_form_names_its_model(several: Several) -> None:
    files = {"audio_sample": encode(wave(20), "wav", 24000)}

    def upload(**fields: str) -> httpx.Response:
        data = {"name": "anna", "consent": "anna, 2026"} | fields
        return httpx.post(several.url + VOICES, data=data, files=files, timeout=20)

    assert upload().status_code == 400, "the first that speaks has its own voices"
    assert upload(model="nobody").json()["error"]["code"] == "model_not_found"
    assert upload(model="writer").json()["error"]["code"] == "unsupported_model"
    several.speaker.state = "restarting"
    assert upload().status_code == 503
    assert upload(model="cloner").json()["voice"]["name"] == "anna", "it is not the first that is asked"
    several.speaker.state = "ready"
    assert several.get(f"{VOICES}?model=cloner")["voices"] == ["anna"]
    several.post(SPEECH, {"input": "Hi.", "voice": "anna", "model": "cloner"})
    assert several.asked() == ["cloner"]
    assert httpx.delete(f"{several.url}{VOICES}/anna").status_code == 404
    assert httpx.delete(f"{several.url}{VOICES}/anna?model=cloner").status_code == 200


def test_our_own_commands_take_the_first_that_fits(several: Several) -> None:
    async def names() -> list[str]:
        endpoint = Endpoint(several.url)
        return [await model_name(endpoint), await model_name(endpoint, speaks=True)]

    assert asyncio.run(names()) == ["writer", "speaker"]


def test_a_batch_has_one_model(several: Several) -> None:
    items = [{"input": "Hi."}, {"input": "Hi.", "model": "cloner"}, {"input": "Hi.", "model": "nobody"}]
    body = {"items": items, "voice": "vivian"}
    results = several.post(SPEECH + "/batch", body).json()["results"]
    assert [result.get("status_code") for result in results] == [None, 400, 404]
    assert "Send that by itself" in results[1]["error"]["message"]


def test_a_socket_names_its_model_in_its_first_message(several: Several) -> None:
    clone = {"type": "session.config", "model": "cloner", "stream_audio": True, "speaker_embedding": [0.1] * 1024}

    async def go() -> None:
        async with connect(several.url.replace("http", "ws") + PATH) as socket:
            await send(socket, clone, text("One."), DONE)
            assert kinds(await received(socket, "session.done"))[:2] == ["audio.start", "audio"]
            assert several.asked() == ["cloner"]
            await send(socket, CONFIG, text("Two."), DONE, CLOSE)
            assert "audio" in kinds(await received(socket))
            assert several.asked() == ["speaker"], "the first that speaks"
        for wrong, code in (("nobody", "model_not_found"), ("writer", "unsupported_model")):
            async with connect(several.url.replace("http", "ws") + PATH) as socket:
                await send(socket, CONFIG | {"model": wrong})
                (error,) = await received(socket)
                assert error["code"] == code
        info, several.cloner.info = several.cloner.info, None
        async with connect(several.url.replace("http", "ws") + PATH) as socket:
            await send(socket, clone)
            (error,) = await received(socket)
            assert error["code"] == "engine_unavailable"
        several.cloner.info, several.speaker.state = info, "restarting"
        async with connect(several.url.replace("http", "ws") + PATH) as socket:
            await send(socket, CLOSE)
        several.cloner.state = "restarting"
        with pytest.raises(InvalidStatus, match="503"):
            await connect(several.url.replace("http", "ws") + PATH)

    asyncio.run(go())


def test_a_response_is_found_and_continued_whichever_model_made_it(several: Several) -> None:
    first = several.post("/v1/responses", {"input": "hello", "model": "org/other"}).json()
    assert several.get(f"/v1/responses/{first['id']}")["model"] == "org/other"
    several.asked()
    again = {"input": "and you?", "previous_response_id": first["id"]}
    second = several.post("/v1/responses", again | {"model": "writer"}).json()
    (request,) = several.writer.requests
    prompt = bytes(i for i in request.prompt_ids if i < 256).decode()
    assert all(said in prompt for said in ("hello", "Me too", "and you?"))
    assert second["output"][0]["content"][0]["text"] == "I write"
    assert httpx.delete(f"{several.url}/v1/responses/{first['id']}").status_code == 200


def test_ready_when_all_are(several: Several) -> None:
    assert several.get("/health")["status"] == "ready"
    told = several.get("/ready")
    assert (told["status"], told["model"], told["kind"]) == ("ready", "writer", "text")
    assert {name: one["kind"] for name, one in told["models"].items()} == {
        "speaker": "speech", "writer": "text", "org/other": "text", "cloner": "speech",
    }  # fmt: skip
    several.other.state, several.other.loading = "starting", Loading("weights", 0.5)
    reply = httpx.get(f"{several.url}/ready")
    told = reply.json()
    assert reply.status_code == 503 and httpx.get(f"{several.url}/health").status_code == 503
    assert (told["status"], told["loading"]["stage"]) == ("starting", "weights")
    assert told["message"].startswith("org/other: ")
    assert told["models"]["org/other"]["loading"]["done"] == 0.5 and told["models"]["writer"]["status"] == "ready"
    several.refusal(CHAT, {"messages": HELLO, "model": "org/other"}, 503)
    several.post(CHAT, {"messages": HELLO})  # the others go on
    several.cloner.state, several.cloner.loading = "starting", Loading("plan", 0.1)
    assert several.get("/ready")["loading"]["stage"] == "plan", "of the last that has begun"
    several.speaker.state = "failed"
    assert several.get("/health")["status"] == "failed", "the worst"


def test_the_numbers_of_each_are_its_own(several: Several) -> None:
    several.post(CHAT, {"messages": HELLO, "model": "org/other"})
    several.post(SPEECH, {"input": "Hi.", "voice": "vivian"})
    samples = [
        sample
        for family in text_string_to_metric_families(httpx.get(f"{several.url}/metrics").text)
        for sample in family.samples
    ]
    finished = {s.labels["model"]: s.value for s in samples if s.name == "deltic_sequences_finished_total"}
    assert finished == {"org/other": 1, "speaker": 1}
    infos = [s.labels["model"] for s in samples if s.name == "deltic_build_info"]
    assert infos == ["speaker", "writer", "org/other", "cloner"]
    assert [s.labels["model"] for s in samples if s.name == "deltic_speech_samples_total"] == ["speaker", "cloner"]


def test_keys_are_the_server_s() -> None:
    models = Several(api_key=("anna=1",), max_concurrent_per_key=1)
    with served(create_app(models.server)) as models.url, httpx.Client(base_url=models.url) as http:
        assert http.post(CHAT, json={"messages": HELLO, "model": "nobody"}).status_code == 401, "not even names"
        models.writer.hold = True

        async def go() -> list[int]:
            headers = {"authorization": "Bearer 1"}
            async with httpx.AsyncClient(base_url=models.url, headers=headers, timeout=10) as client:
                first = asyncio.create_task(client.post(CHAT, json={"messages": HELLO}))
                while not models.writer.requests:
                    await asyncio.sleep(0.01)
                second = await client.post(SPEECH, json={"input": "Hi.", "voice": "vivian"})
                models.writer.hold = False
                return [second.status_code, (await first).status_code]

        assert asyncio.run(go()) == [429, 200]


# The command line.


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve` is called with."""
    from deltic.server import serve

    calls: list[Any] = []
    monkeypatch.setattr(serve, "serve", lambda *given: calls.extend(given))
    return calls


def test_each_model_has_its_own_flags(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTIC_MAX_NUM_SEQS", "3")
    line = (
        "serve a --quantize int8 --port 9 --and b --served-model-name two --max-num-seqs 5 "
        "--and --dummy qwen3-tts-0.6b --threads 1"
    )
    assert main(line.split()) == 0
    models, config = started
    assert config == ServerConfig(port=9)
    assert models == [
        (EngineConfig(model="a", quantize="int8", max_num_seqs=3), ModelConfig()),
        (EngineConfig(model="b", max_num_seqs=5), ModelConfig(served_model_name=("two",))),
        (EngineConfig(dummy="qwen3-tts-0.6b", threads=1, max_num_seqs=3), ModelConfig()),
    ]


def test_a_model_may_have_several_names(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTIC_SERVED_MODEL_NAME", "x,y*")
    line = "serve a --and b --served-model-name two 2 --threads 1 --served-model-name gpt-*"
    assert main(line.split()) == 0
    (_, first), (_, second) = started[0]
    assert (first.names("a"), first.patterns) == (("x",), ("y*",))
    assert (second.names("b"), second.patterns) == (("two", "2"), ("gpt-*",))
    assert ModelConfig(served_model_name=("*",)).names("own") == ("own",)


def test_a_model_answers_to_all_its_names() -> None:
    server = Server(ServerConfig())
    one, two = FakeEngineClient(saying("one")), FakeEngineClient(saying("two"))
    server.add(service_of(server, one, "one", aliases=("gpt-4", "first"), patterns=("claude-*", "*")))
    server.add(service_of(server, two, "two", aliases=("claude-2",), patterns=("claude-*", "*-mini")))
    with served(create_app(server)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["one", "gpt-4", "first", "two", "claude-2"]
        for name, shown in (
            ("gpt-4", "one"),
            ("two", "two"),
            ("claude-2", "two"),
            ("claude-3", "one"),
            ("gpt-5-mini", "one"),
        ):
            answer = client.chat.completions.create(model=name, messages=HELLO)
            assert (answer.model, answer.choices[0].message.content) == (shown, shown)
            card = client.models.retrieve(name)
            assert (card.id, card.root) == (name, shown)  # type: ignore[attr-defined]
        reply = httpx.post(f"{url}/v1/messages", json={"model": "claude-opus", "messages": HELLO, "max_tokens": 9})
        assert reply.json()["model"] == "one"
        assert httpx.get(f"{url}/load").json() == {"server_load": 0}
        assert httpx.get(f"{url}/ping").status_code == 200
        two.state = "restarting"
        assert httpx.get(f"{url}/ping").status_code == 503
    server.models.pop("one")
    server.add(replace(server.models["two"], patterns=("claude-*",)))
    with pytest.raises(ApiError, match=re.escape("no model 'x'. This server has 'two', 'claude-2', 'claude-*'")):
        server.find("x")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("serve a --served-model-name x * --and b --served-model-name *", "two models are called '*'"),
        ("serve --served-model-name x Qwen/Y", "--served-model-name takes every word behind it, 'Qwen/Y' too"),
        ("serve a --and", "--and needs a MODEL behind it"),
        ("serve a --and --threads 1", "--and needs a MODEL behind it"),
        ("serve a --and --and b", "--and needs a MODEL behind it"),
        ("serve a --and b --port 9", "--port is the whole server's. Give it before the first --and"),
        ("serve a --and=b --port 9", "--port is the whole server's"),
        ("serve a --and b --and c --api-key k", "--api-key is the whole server's"),
        ("serve a --and b --threads 0", "--threads 0: must be from 1"),
        ("serve a --and b --tensor-parallel 3", "--tensor-parallel 3: give 1, 2, 4 or 8"),
        ("serve a --tensor-parallel 4 --tp-invariant 2", "with --tensor-parallel 4 give one of 4, 8"),
        ("serve --port 0 --and built-in", "two models are called 'built-in'. Give --served-model-name"),
        ("serve a --port 0 --and b --served-model-name a", "two models are called 'a'"),
    ],
)
def test_a_wrong_line_is_told(line: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_two_models_cannot_keep_their_voices_in_one_place(tmp_path: Path) -> None:
    """One would overwrite what the other has under a name."""
    server, client = Server(ServerConfig()), FakeSpeechClient("base")
    client.config = EngineConfig(dummy="qwen3-tts-0.6b-base", voices_dir=tmp_path)
    about = ModelConfig()
    server.add(_service(server, Served(("a",), about, client)))
    with pytest.raises(ConfigError, match="Give one of them its own --voices-dir"):
        _service(server, Served(("b",), about, client))
    client.config = EngineConfig(dummy="qwen3-tts-0.6b-base")
    server.add(_service(server, Served(("b",), about, client)))
    server.add(_service(server, Served(("c",), about, client)))


def test_help_explains_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "[--and MODEL [flags]]" in " ".join(capsys.readouterr().out.split())


def test_json_of_ready_is_as_before_for_one() -> None:
    server = Server(ServerConfig())
    server.add(service_of(server, FakeEngineClient(), "fake"))
    with served(create_app(server)) as url:
        assert httpx.get(f"{url}/health").json() == {"status": "ready"}
        told = json.loads(httpx.get(f"{url}/ready").content)
        assert told.keys() == {"status", "model", "kind", "start_s"}
        assert httpx.get(f"{url}/live?model=other").status_code == 404
