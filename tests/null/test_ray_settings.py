"""What of Deltic on Ray needs no Ray: where a request goes, and what a replica may be told."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from deltic import logs
from deltic.config import ConfigError, EngineConfig, ModelConfig
from deltic.ray import replica
from deltic.ray.affinity import key_of, ranked
from deltic.ray.replica import Ask, Hosted
from deltic.ray.settings import placed, settings
from deltic.server.serve import Served
from tests.fake_engine import FakeEngineClient, make_app, saying


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_turns_of_a_conversation_have_one_key() -> None:
    first = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hi"}]
    later = [*first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
    key = key_of([], body(model="m", messages=first))
    assert key and key_of([], body(messages=later, model="m", temperature=0)) == key
    assert key_of([], body(model="other", messages=first)) != key
    assert key_of([], body(model="m", messages=[first[0], {"role": "user", "content": "Ho"}])) != key


def test_marks_of_a_cache_move_without_moving_the_key() -> None:
    part = {"type": "text", "text": "Read this"}
    marked = part | {"cache_control": {"type": "ephemeral"}}
    picture = {"type": "image", "source": {"data": "x"}}
    keys = {
        key_of([], body(system=[one], messages=[{"role": "user", "content": [picture | more, one]}]))
        for one, more in ((part, {}), (marked, {}), (part, {"cache_control": {}}))
    }
    assert len(keys) == 1
    other = picture | {"source": {"data": "y"}}
    assert key_of([], body(system=[part], messages=[{"role": "user", "content": [other, part]}])) not in keys


@pytest.mark.parametrize(
    "name", [b"x-session-id", b"x-session-affinity", b"x-claude-code-session-id", b"x-smg-routing-key"]
)
def test_a_session_counts_more_than_the_body(name: bytes) -> None:
    headers = [(name, b"7")]
    assert key_of(headers, body(prompt="a")) == key_of(headers, b"no JSON") != key_of([(name, b"8")], b"")


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff",
        b'"text"',
        body(model="m"),
        body(messages=[]),
        b"[" * 100_000,
        body(prompt=""),
        body(prompt="\ud800"),
    ],
)
def test_what_begins_nothing_has_no_key(given: bytes) -> None:
    assert key_of([], given) == b""


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "text"}, {"messages": [1, None]}, {"messages": [{"role": 3, "content": 4}]}, {"prompt": [1, 2]},
        {"input": "a"}, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
    ],
)  # fmt: skip
def test_whatever_a_body_holds_has_a_key(fields: dict[str, Any]) -> None:
    assert key_of([], body(**fields)) == key_of([], body(**fields)) != b""


def test_a_replica_that_goes_moves_its_own_share_only() -> None:
    loads = dict.fromkeys("abcd", 0)
    keys = [f"key {i}".encode() for i in range(400)]
    before = {key: ranked(key, loads)[0] for key in keys}
    assert all(70 < n < 130 for n in Counter(before.values()).values())
    del loads["b"]
    assert all(ranked(key, loads)[0] == name for key, name in before.items() if name != "b")


def test_a_hot_key_does_not_starve() -> None:
    first, second = ranked(b"hot", {"a": 0, "b": 0})
    assert ranked(b"hot", {first: 8, second: 0}, imbalance=8) == [first, second]
    assert ranked(b"hot", {first: 9, second: 0}, imbalance=8) == [second, first]
    assert ranked(b"hot", {first: 90, second: 85}, imbalance=8) == [first, second]
    assert ranked(b"", {"a": 1, "b": 0})[0] == "b"
    assert ranked(b"hot", {}) == []


def test_settings_are_those_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PORT": "1234",
        "METRICS_NAMES": "both",
        "ALLOW_CACHE_TRANSFER": "1",
        "CACHE_DIR": "/tmp",
        "STAGES": "10.0.0.2:7000",
    }.items():
        monkeypatch.setenv(f"DELTIC_{name}", value)  # for servers beside Ray
    given = settings("here", {"dummy": "qwen3.5-0.8b", "max-num-seqs": "4", "api-key": ["k"]})
    assert given.models[0][0].max_num_seqs == 4 and given.server.api_key == ("k",)
    assert given.server.port != 1234 and given.server.metrics_names == "deltic"
    assert not given.models[0][0].allow_cache_transfer and not given.models[0][0].stages


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"modle": "x"}, "here: modle is not a setting of Deltic; did you mean model?"),
        ({"max_num_seqs": 0}, "max-num-seqs 0: must be at least 1"),
        ({"port": 80}, "here: port: Ray Serve listens"),
        ({"batch_dir": "/tmp"}, "here: batch-dir: a replica would keep files that the others do not know"),
        ({"kv-events": "tcp://*:5557"}, "here: kv-events is for routers in front of servers, and here Ray routes"),
        ({"metrics_names": "both"}, "here: metrics-names is for routers in front of servers, and here Ray routes"),
        ({"allow-cache-transfer": True, "cache-dir": "/tmp"}, "here: allow-cache-transfer: a replica has no address"),
        ({"stages": ["10.0.0.2:7000"]}, "here: stages: machines with further layers serve one engine"),
        ({"and": [{"model": "m", "allow_cache_transfer": False}]}, "here: allow-cache-transfer: a replica has no"),
    ],
)
def test_bad_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings("here", given)
    assert said in str(refused.value)


def test_an_engine_takes_what_its_replica_has() -> None:
    assert placed(EngineConfig(), 3, 0).threads == 3
    assert placed(EngineConfig(threads=2), 3, 0).threads == 2
    assert placed(EngineConfig(), 1, 0).device == "cpu"
    on_gpus = placed(EngineConfig(), 1, 4)
    assert (on_gpus.device, on_gpus.tensor_parallel, on_gpus.threads) == ("cuda", 4, None)
    assert placed(EngineConfig(), 1, 0.5).tensor_parallel == 1


@pytest.mark.parametrize(
    ("engine", "n_cpus", "n_gpus"),
    [
        (EngineConfig(threads=4), 2, 0),
        (EngineConfig(), 0.5, 0),
        (EngineConfig(device="cuda"), 1, 0),
        (EngineConfig(tensor_parallel=2), 1, 0),
        (EngineConfig(tensor_parallel=2), 1, 4),
        (EngineConfig(), 1, 3),
        (EngineConfig(device="cpu"), 1, 1),
    ],
)
def test_what_a_replica_has_not_is_refused(engine: EngineConfig, n_cpus: float, n_gpus: float) -> None:
    with pytest.raises(ConfigError, match=r"num_[cg]pus="):
        placed(engine, n_cpus, n_gpus)


def hosted(client: FakeEngineClient) -> Hosted:
    """A server without a socket, over a fake engine."""
    server = Hosted(settings("here", {}))
    server._app, server._clients = make_app(client), [client]  # type: ignore[list-item]
    server._is_started = True
    return server


def test_a_server_that_is_told_twice_to_start_has_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says that an actor is unavailable when the network fails, and the actor goes on."""
    hosts = []

    class Host:
        def __init__(self, clients: Any, config: Any) -> None:
            hosts.append(self)

        async def start(self) -> None:
            await asyncio.sleep(0.01)

    client = FakeEngineClient(saying(""))
    served = [Served(("fake",), ModelConfig(), client)]  # type: ignore[arg-type]
    monkeypatch.setattr(replica, "EngineHost", Host)
    monkeypatch.setattr(replica, "prepared", lambda *_: served)
    monkeypatch.setattr(logs, "set_up", lambda *_: None)

    async def started() -> None:
        server = Hosted(settings("here", {}))
        await asyncio.gather(server.start(), server.start())
        await server.start()
        assert server.failure is None

    asyncio.run(started())
    assert len(hosts) == 1


def chat(**fields: Any) -> Ask:
    asked = body(messages=[{"role": "user", "content": "Hi"}], **fields)
    return Ask("POST", "/v1/chat/completions", asked, [(b"content-type", b"application/json")])


def test_a_server_without_a_socket_answers_in_pieces() -> None:
    async def asked() -> None:
        client = FakeEngineClient(saying("one two three"))
        client.token_s = 0.005
        server = hosted(client)
        pieces = [piece async for piece in server.stream(chat(stream=True))]
        assert isinstance(pieces[0], tuple) and pieces[0][0] == 200
        assert len(pieces) > 3 and isinstance(pieces[-1], bytes) and pieces[-1].endswith(b"data: [DONE]\n\n")
        status, headers, whole = await server.answer(chat())
        assert status == 200 and json.loads(whole)["choices"][0]["message"]["content"] == "one two three"
        assert dict(headers)[b"content-length"] == b"%d" % len(whole)
        status, _, whole = await server.answer(chat(max_tokens=-1))
        assert status == 400 and json.loads(whole)["error"]["param"] == "max_tokens"
        assert server.n_sequences == 0 and server.failure is None
        client.state, client.failure = "failed", "no memory"
        assert server.failure == "no memory"

    asyncio.run(asked())


def test_a_request_before_the_start_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts an actor that died once more, and gives it requests that were sent to the dead one."""

    async def start(self: Hosted) -> None:
        self._app = make_app(FakeEngineClient(saying("late")))

    monkeypatch.setattr(Hosted, "_start", start)
    status, _, whole = asyncio.run(Hosted(settings("here", {})).answer(chat()))
    assert status == 200 and json.loads(whole)["choices"][0]["message"]["content"] == "late"


def test_a_slow_reader_gets_all_of_a_stream() -> None:
    """The application has ended long before its last pieces are taken."""

    async def asked() -> None:
        parts = [b"a", b"b", b"c"]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0.01)
            await send({"type": "http.response.body", "body": b"end"})

        server = hosted(FakeEngineClient(saying("")))
        server._app = app
        found = []
        async for piece in server.stream(chat(stream=True)):
            found.append(piece)
            await asyncio.sleep(0.1 if piece == b"a" else 0)
        assert found[0] == (200, []) and b"".join(found[1:]) == b"abcend"

    asyncio.run(asked())


def test_who_leaves_a_stream_frees_its_sequence() -> None:
    async def asked() -> None:
        client = FakeEngineClient(saying("a" * 500))
        client.token_s = 0.005
        server = hosted(client)
        stream = server.stream(chat(stream=True))
        assert (await anext(stream))[0] == 200 and await anext(stream)
        assert server.n_sequences == 1
        await stream.aclose()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not server.n_sequences:
                break
        assert client.aborts and server.n_sequences == 0 and not server._running

    asyncio.run(asked())
