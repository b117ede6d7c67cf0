"""Models of the hub: what is downloaded, how one sees it, how it ends, and whose tokenizer is used."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from deltic.commands.endpoint import LocalServer, ServerFailed
from deltic.config import BUILT_IN, ConfigError, EngineConfig, ModelConfig, ServerConfig, resolve
from deltic.models.checkpoint import DEMO, model_name, n_real_ids, resolve_model, text_directory, tokenizer_directory
from deltic.models.fields import CheckpointError
from deltic.models.qwen.shape import ModelShape
from deltic.server import fetch
from deltic.server.fetch import fetched
from deltic.server.serve import Served, _service
from deltic.server.service import Server
from tests.fake_engine import FakeEngineClient, served
from tests.fake_hub import COMMITS, hub_with
from tests.fake_speech import FakeSpeechClient
from tests.null.test_serve import server_of, wait_for

SMALL = {
    "config.json": b"{}",
    "tokenizer.json": b"t" * 5000,
    "model.safetensors": b"w" * 400_000,
    "README.md": b"x" * 100,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def go(config: EngineConfig, when: Callable[[], bool] | None = None) -> EngineConfig | None:
    """What `fetched` gives; told to stop when `when` is true."""

    async def run() -> EngineConfig | None:
        stop = asyncio.Event()
        task = asyncio.create_task(fetched(config, stop))
        while when is not None and not task.done() and not stop.is_set():
            if when():
                stop.set()
            await asyncio.sleep(0.02)
        return await task

    return asyncio.run(run())


def test_a_model_is_downloaded_once_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetch, "LINE_EVERY_S", 0.3)
    config = EngineConfig(model="owner/model", download_dir=tmp_path / "cache", revision="old")
    with hub_with(SMALL, old={"config.json": b'{"old": 1}'}, rate=200_000, n_breaks=1) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with caplog.at_level(logging.INFO, "deltic.server"):
            found = go(config)
        assert found is not None
        directory = Path(found.model)
        assert (directory / "config.json").read_bytes() == b'{"old": 1}'
        assert (directory / "model.safetensors").read_bytes() == SMALL["model.safetensors"], "though it was cut off"
        assert not (directory / "README.md").exists()
        assert directory.is_relative_to(tmp_path / "cache") and directory.name == COMMITS["old"]
        assert found == dataclasses.replace(config, model=str(directory), revision=None)
        assert model_name(found) == "owner/model", "not the commit"
        said = [record.message for record in caplog.records]
        assert said and all(" of 0.41 MB, " in line for line in said)
        hub.asked.clear()
        assert go(config) == found
        assert not any("resolve" in line for line in hub.asked), "no file is asked for again"
    assert go(config) == found, "the hub has gone"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert go(config) == found
    with pytest.raises(CheckpointError, match=r"owner/model at main: not a directory, not .*the hub cannot be reached"):
        go(dataclasses.replace(config, revision="main"))


@pytest.mark.parametrize(
    ("settings", "revision", "complaint"),
    [
        ({}, "nowhere", "owner/model: has no revision 'nowhere' on the hub"),
        ({"gated": True}, None, "owner/model: gated on the hub; accept its terms"),
        ({"down": True}, None, "the hub cannot be reached"),
        ({"n_breaks": 100}, None, "owner/model: the download failed .*; start again"),
    ],
    ids=["revision", "gated", "down", "broken"],
)
def test_a_download_that_fails_says_why(
    settings: dict[str, int], revision: str | None, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_with(SMALL, **settings) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(CheckpointError, match=complaint):
            go(EngineConfig(model="owner/model", revision=revision))


def test_there_is_no_such_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_with(SMALL) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(CheckpointError, match="owner/other: neither a directory here nor a model on the hub"):
            go(EngineConfig(model="owner/other"))


def test_a_download_ends_at_once_and_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_with(SMALL, rate=4_000) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        cache = tmp_path / "cache"
        told_s = 0.0

        def big_one_comes() -> bool:
            nonlocal told_s
            told_s = time.monotonic()
            return any(cache.rglob("*.incomplete"))

        assert go(EngineConfig(model="owner/model", download_dir=cache), big_one_comes) is None
        assert time.monotonic() - told_s < fetch.ENDING_S
        assert not list(cache.rglob("*.incomplete"))


def test_what_is_here_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PROGRAM", ("/no/such/program",))
    for config in (EngineConfig(), EngineConfig(dummy="qwen3.5-0.8b"), EngineConfig(model=str(tmp_path))):
        assert go(config) == config
    with pytest.raises(CheckpointError, match=r"--revision is of a name on the hub, and this is a path"):
        resolve_model(tmp_path, revision="main")
    with pytest.raises(ConfigError, match="--revision is of a name on the hub: give a model"):
        resolve(EngineConfig, {"revision": "main"}, {})
    with pytest.raises(OSError):
        go(EngineConfig(model="owner/model"))


def demo_files() -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in DEMO.iterdir()
        if file.suffix in (".json", ".jinja") and file.stat().st_size < 10_000_000
    }


def test_a_server_of_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_with(demo_files()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with server_of(engine={"model": "owner/model"}) as server:
            url = server.url()
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "owner/model"
            n_asked = len(hub.asked)
            server.process.terminate()
            assert server.end() == 0
        assert len(hub.asked) == n_asked


def test_a_server_that_downloads_tells_and_obeys_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with hub_with(SMALL, rate=4_000) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with server_of(engine={"model": "owner/model"}, port=port, root_path="/api") as server:
            wait_for(lambda: any("downloading owner/model" in line for line in list(server.log)))
            told = httpx.get(f"http://127.0.0.1:{port}/api/ready")
            assert (told.status_code, told.json()["loading"]["stage"]) == (503, "downloading owner/model")
            other = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={})
            assert other.status_code == 503 and other.headers["retry-after"]
            assert "downloading owner/model: 0 %" in other.json()["error"]["message"]
            assert httpx.post(f"http://127.0.0.1:{port}/v1/completions").status_code == 415, "it may be a page"
            server.process.send_signal(signal.SIGINT)
            assert server.end(5) == 0
        said = "".join(server.log)
        assert said.endswith("stopped\n") and "Traceback" not in said


def test_a_tokenizer_of_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, other / name)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}, said the other")
    config = EngineConfig(tokenizer=str(other))
    assert (text_directory(config), tokenizer_directory(config)) == (DEMO, other)
    engine = FakeEngineClient()
    engine.config = config  # type: ignore[attr-defined]
    service = _service(Server(ServerConfig()), Served(("a",), ModelConfig(), engine))  # type: ignore[arg-type]
    assert service.template is not None
    ids = service.template.render([{"role": "user", "content": "Hi"}]).ids
    assert service.tokenizer.decode(ids) == "Hi, said the other"
    shape = ModelShape.from_directory(DEMO)
    plain = n_real_ids(EngineConfig(), DEMO, shape)
    assert n_real_ids(config, DEMO, shape) == plain
    with pytest.raises(CheckpointError, match=f"has ids up to {plain - 1}, but the model's vocabulary has 1000"):
        n_real_ids(config, DEMO, dataclasses.replace(shape, vocab_size=1000))
    (other / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        tokenizer_directory(config)
    client = FakeSpeechClient()
    client.config = EngineConfig(dummy="qwen3-tts-0.6b", tokenizer=str(DEMO))
    with pytest.raises(ConfigError, match="--tokenizer is for models that write"):
        _service(Server(ServerConfig()), Served(("a",), ModelConfig(), client))  # type: ignore[arg-type]


def test_a_tokenizer_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_with(SMALL) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found = go(EngineConfig(tokenizer="owner/model", download_dir=tmp_path))
        assert found is not None and found.tokenizer is not None and found.model == BUILT_IN
        assert sorted(file.name for file in Path(found.tokenizer).iterdir()) == ["config.json", "tokenizer.json"]


def test_the_lines_of_a_download_are_json() -> None:
    assert json.loads(fetch.msgspec.json.encode(fetch.Progress(1, 2))) == {
        "type": "progress",
        "done_bytes": 1,
        "total_bytes": 2,
    }


def test_what_a_library_prints_is_no_word_of_a_download() -> None:
    async def go() -> Path:
        lines = asyncio.StreamReader()
        lines.feed_data(b"a notice of some library\n{}\n")
        for said in (fetch.Progress(1, 2), fetch.Outcome(directory="/models/x")):
            lines.feed_data(msgspec.json.encode(said) + b"\n")
        lines.feed_eof()
        return await fetch._read(lines, "x", shown.append)

    shown: list[fetch.Progress] = []
    assert asyncio.run(go()) == Path("/models/x") and len(shown) == 1


@pytest.mark.parametrize("moves", [True, False])
def test_who_waits_for_a_server_waits_as_long_as_it_gets_on(moves: bool) -> None:
    """A download may take hours; one that stands still is given up."""
    began_s = time.monotonic()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        done = time.monotonic() - began_s if moves else 0.0
        body = {"status": "starting", "loading": {"stage": "downloading", "done": done}}
        await JSONResponse(body, 200 if done > 2 else 503)(scope, receive, send)

    with served(app) as url, (DEMO / "README.md").open() as log:
        server = LocalServer.__new__(LocalServer)
        server.url, server.api_key = url, "k"
        server.process = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
        server.log = log  # type: ignore[assignment]
        if moves:
            asyncio.run(server.wait_ready(timeout_s=1.0))
            assert time.monotonic() - began_s > 2
        else:
            with pytest.raises(ServerFailed, match="got no further for 1 s"):
                asyncio.run(server.wait_ready(timeout_s=1.0))
