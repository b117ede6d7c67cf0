"""Models that are loaded when they are asked for: who waits, who makes way, what is told. Over engine processes with the fake runner."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message

from deltic.aliases import published
from deltic.config import ConfigError, EngineConfig, ModelConfig, ServerConfig
from deltic.engine.messages import SamplingParams
from deltic.models.checkpoint import DEMO
from deltic.server import offered, on_demand
from deltic.server.asked import EarlyStream
from deltic.server.errors import ApiError
from deltic.server.offered import ModelsOnDisk, duration
from deltic.server.on_demand import OnDemand
from deltic.server.serve import serve
from tests.fakes import expected_tokens
from tests.null.test_serve import ROOT, Server
from tests.waiting import wait_for

PROGRAM = """
import sys
from pathlib import PosixPath
import deltic.server.asked
deltic.server.asked.SIGN_S = 0.2
from deltic.config import EngineConfig, ModelConfig, ServerConfig
from deltic.server.serve import serve
program = (sys.executable, {fakes!r}, "--step-ms", "{step_ms}", "--hold", {hold!r})
models = [
    (EngineConfig(**engine), ModelConfig(served_model_name=(name,)))
    for name, engine in {models}.items()
]
sys.exit(serve(models, ServerConfig(**{server}), program=program))
"""
ONE = {"memory_gb": 1.0}
THREE = {"a": ONE, "b": ONE, "c": ONE}
"""Built-in models by name, none of which is loaded before it is asked for."""
PROMPT = [5, 6, 7]


class OnDemandServer(Server):
    """A server whose models, of --memory-gb each, come and go."""

    def __init__(self, hold: Path, models: dict[str, Any], step_ms: float, lacks: Sequence[str], **server: Any) -> None:
        """hold: as of tests/fakes.py. lacks: packages that are not installed there."""
        program = f"import sys; sys.modules.update(dict.fromkeys({lacks}))\n" + PROGRAM.format(
            fakes=str(ROOT / "tests/fakes.py"), step_ms=step_ms, hold=str(hold), models=models,
            server={"port": 0, "models_gb": 1.5} | server,
        )  # fmt: skip
        self.process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def url(self) -> str:
        wait_for(lambda: self.said(" ready on "))
        return next(line for line in self.log if " ready on " in line).split()[-1]


@contextmanager
def serving(
    folder: Path, models: dict[str, Any] = THREE, step_ms: float = 1.0, lacks: Sequence[str] = (), **server: Any
) -> Iterator[tuple[OnDemandServer, str]]:
    """While the folder has a file of the name plan, or load, no engine process does that."""
    running = OnDemandServer(folder, models, step_ms, lacks, **{"models_from": (str(folder),)} | server)
    try:
        yield running, running.url()
    finally:
        running.process.kill()
        running.process.wait()


def ask(url: str, model: str | None, n: int = 8, key: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": n, "ignore_eos": True, "seed": 1, "return_token_ids": True} | fields
    return httpx.post(f"{url}/v1/completions", json=body | ({"model": model} if model else {}), headers=key, timeout=30)


def tokens(reply: httpx.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]  # type: ignore[no-any-return]


def alone(n: int = 8) -> list[int]:
    return expected_tokens(PROMPT, SamplingParams(max_tokens=n, ignore_eos=True, seed=1))


class Later(threading.Thread):
    """A request in the background."""

    def __init__(self, url: str, model: str, **fields: Any) -> None:
        super().__init__()
        self._asked = url, model, fields
        self.reply: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        url, model, fields = self._asked
        self.reply = ask(url, model, **fields)

    def result(self) -> httpx.Response:
        self.join(30)
        assert self.reply is not None
        return self.reply


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.partition(" ")[0].partition("{")[0] == f"deltic_{name}"
    )


def states(url: str) -> dict[str, str]:
    told = httpx.get(f"{url}/health")
    assert told.status_code == 200, "it takes requests, whatever is loaded"
    return {name: model["status"] for name, model in told.json()["models"].items()}


def test_the_one_used_least_recently_makes_room(tmp_path: Path) -> None:
    with serving(tmp_path, models_gb=2.0) as (_, url):
        assert states(url) == dict.fromkeys("abc", "unloaded")
        for name in "aba":
            assert tokens(ask(url, name)) == alone()
        assert states(url) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        assert tokens(ask(url, "c")) == alone()
        assert states(url) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert tokens(ask(url, "b")) == alone()
        assert states(url) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        assert (metric(url, "model_loads_total"), metric(url, "model_unloads_total")) == (4, 2)
        assert (metric(url, "models_loaded"), metric(url, "models_offered")) == (2, 3)
        assert metric(url, "generated_tokens_total") == 5 * 8, "counters go on over loads"
        assert metric(url, "engine_restarts_total") == 0
        error = ask(url, "d")
        assert error.status_code == 404 and error.json()["error"]["code"] == "model_not_found"
        assert tokens(ask(url, None)) == alone(), "the one that was used last"
        assert states(url)["b"] == "loaded" and metric(url, "model_loads_total") == 4


def test_one_that_answers_is_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path, step_ms=3) as (server, url):
        for name in "ba":  # so that both are planned
            ask(url, name, n=1)
        long = Later(url, "a", n=400)
        wait_for(lambda: metric(url, "sequences_running"))
        other = Later(url, "b")
        wait_for(lambda: states(url) == {"a": "unloading", "b": "waiting", "c": "unloaded"})
        again = Later(url, "a", n=2)  # behind b, else b would never have its turn
        assert tokens(long.result()) == alone(400)
        assert tokens(other.result()) == alone()
        assert tokens(again.result()) == alone(2)
        assert [line.split("loading ")[1][0] for line in server.log if " loading " in line] == [*"baba"]


def test_who_waits_too_long_is_told_and_the_other_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, step_ms=3, load_timeout_s=0.7) as (_, url):
        for name in "ba":  # whose own loads may take longer
            wait_for(lambda name=name: ask(url, name, n=1).status_code == 200)
        long = Later(url, "a", n=700)
        wait_for(lambda: metric(url, "sequences_running"))
        late = ask(url, "b")
        assert late.status_code == 503 and late.headers["retry-after"] == "10"
        error = late.json()["error"]
        assert error["code"] == "model_loading" and "'b' waits for its turn" in error["message"]
        assert tokens(ask(url, "a", n=2)) == alone(2), "it makes way no more"
        assert tokens(long.result()) == alone(700)
        assert states(url)["a"] == "loaded"


def test_others_answer_while_one_loads(tmp_path: Path) -> None:
    with serving(tmp_path, models_gb=3.0) as (_, url):
        ask(url, "a")
        (tmp_path / "load").touch()
        slow = Later(url, "b")
        wait_for(lambda: states(url)["b"] == "loading")
        for _ in range(2):
            assert tokens(ask(url, "a")) == alone()
        assert states(url)["b"] == "loading"
        (tmp_path / "load").unlink()
        assert tokens(slow.result()) == alone()


def test_idle_ones_go_and_come_again(tmp_path: Path) -> None:
    with serving(tmp_path, keep_alive="300ms") as (server, url):
        assert tokens(ask(url, "a")) == alone()
        wait_for(lambda: states(url)["a"] == "unloaded")
        assert 'deltic_model_unloads_total{model="a",reason="idle"} 1.0' in httpx.get(f"{url}/metrics").text
        assert tokens(ask(url, "a")) == alone()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_an_engine_that_dies_comes_back_alone(tmp_path: Path) -> None:
    with serving(tmp_path, models_gb=3.0) as (server, url):
        ask(url, "a")
        (first,) = children(server)
        ask(url, "b")
        os.kill(first, signal.SIGKILL)
        assert tokens(ask(url, "b")) == alone()
        wait_for(lambda: ask(url, "a").status_code == 200)
        assert metric(url, "engine_restarts_total") == 1


def generate(url: str, model: str, prompt: str = "a", **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "raw": True, "options": {"num_predict": 3}, "stream": False}
    reply = httpx.post(f"{url}/api/generate", json=body | fields, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def stays(url: str) -> dict[str, float]:
    """Seconds that each loaded model stays, as Ollama's API tells it."""
    loaded = httpx.get(f"{url}/api/ps").json()["models"]
    times = {model["name"]: datetime.datetime.fromisoformat(model["expires_at"]).timestamp() for model in loaded}
    return {name.removesuffix(":latest"): at_s - time.time() for name, at_s in times.items()}


def test_ollama_says_how_long_a_model_stays(tmp_path: Path) -> None:
    with serving(tmp_path, models_gb=3.0) as (_, url):
        tags = httpx.get(f"{url}/api/tags").json()["models"]
        assert [model["name"] for model in tags] == ["a:latest", "b:latest", "c:latest"] and stays(url) == {}
        assert generate(url, "a")["done"] and 290 < stays(url)["a"] <= 300
        generate(url, "a", keep_alive="1h")
        assert 3590 < stays(url)["a"] <= 3600
        assert httpx.get(f"{url}/api/ps").json()["models"][0]["size"] == 1_000_000_000, "as it was planned"
        generate(url, "b:latest", keep_alive=-1)
        assert stays(url)["b"] > 1e9
        assert generate(url, "b", prompt="", keep_alive=0)["done_reason"] == "unload"
        wait_for(lambda: states(url)["b"] == "unloaded")
        assert generate(url, "c", prompt="", keep_alive="0s")["done_reason"] == "unload"
        assert states(url)["c"] == "unloaded", "nor was it loaded for that"
        generate(url, "a", keep_alive=0)
        wait_for(lambda: stays(url) == {})
        refused = httpx.post(f"{url}/api/chat", json={"model": "a", "messages": [], "keep_alive": "soon"}, timeout=30)
        assert refused.status_code == 400 and "keep_alive" in refused.json()["error"]
        shown = httpx.post(f"{url}/api/show", json={"model": "c"}).json()
        assert "completion" in shown["capabilities"] and states(url)["c"] == "unloaded"


def test_models_are_loaded_and_unloaded_by_hand(tmp_path: Path) -> None:
    def post(path: str, model: str) -> httpx.Response:
        return httpx.post(url + path, json={"model": model})

    def told() -> dict[str, str]:
        return {model["id"]: model["status"]["value"] for model in httpx.get(f"{url}/v1/models").json()["data"]}

    (tmp_path / "load").touch()
    with serving(tmp_path) as (_, url):
        assert told() == dict.fromkeys("abc", "unloaded")
        assert post("/models/load", "b").json() == {"success": True}
        assert told()["b"] == "loading"
        (tmp_path / "load").unlink()
        wait_for(lambda: told()["b"] == "loaded")
        card = httpx.get(f"{url}/v1/models/b").json()
        assert card["status"] == {"value": "loaded"} and card["max_model_len"] == 4096
        assert post("/v1/models/unload", "b").json() == {"success": True}
        wait_for(lambda: told()["b"] == "unloaded")
        post("/models/load", "b")
        wait_for(lambda: told()["b"] == "loaded")
        assert 290 < stays(url)["b"] <= 300, "it stays as long as any other"
        for path in ("/models/load", "/models/unload"):
            assert post(path, "nobody").status_code == 404


def test_a_stream_whose_model_loads_gives_signs_of_life(tmp_path: Path) -> None:
    def lines(path: str, **body: Any) -> list[str]:
        with httpx.stream("POST", url + path, json={"stream": True} | body, timeout=30) as reply:
            assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
            told = []
            for line in filter(None, reply.iter_lines()):
                told.append(line)
                if until in line:
                    held.unlink(missing_ok=True)
            return told

    messages = [{"role": "user", "content": "hi"}]
    with serving(tmp_path, {**THREE, "large": {"memory_gb": 9.0}}) as (_, url):
        held, until = tmp_path / "load", ": a loads (load, 0%)"
        held.touch()
        told = lines("/v1/completions", model="a", prompt=PROMPT, max_tokens=4, ignore_eos=True)
        signs = [line for line in told if line.startswith(":")]
        assert signs == told[: len(signs)] and until in signs
        assert told[len(signs)].startswith('data: {"id"') and told[-1] == "data: [DONE]"
        until = "event: ping"
        held.touch()
        told = lines("/v1/messages", model="b", messages=messages, max_tokens=4)  # whose ids the fake lacks
        assert told[:2] == [until, 'data: {"type": "ping"}'] and told[-2] == "event: error"
        assert json.loads(told[-1].removeprefix("data: "))["type"] == "error"
        held, until = tmp_path / "plan", ": large waits for its turn"
        held.touch()
        told = lines("/v1/chat/completions", model="large", messages=messages)
        assert json.loads(told[-1].removeprefix("data: "))["error"]["code"] == "load_failed"
        assert told[0].startswith(until)
        told = lines("/v1/completions", model="b", prompt=PROMPT, max_tokens=4)
        assert {line for line in told if line.startswith(":")} <= {": b is loaded"}


def test_what_fails_before_the_first_sign_has_its_status() -> None:
    async def fail(request: Request) -> ASGIApp:
        return JSONResponse({"error": "it cannot be loaded"}, 503)

    sent = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "path": "/v1/completions"}
    asyncio.run(EarlyStream(fail, Request(scope), lambda: "it loads")(scope, Request(scope).receive, send))
    assert [message.get("status") for message in sent] == [503, None]
    assert json.loads(sent[1]["body"]) == {"error": "it cannot be loaded"}


def test_models_are_fetched_for_who_may(tmp_path: Path) -> None:
    def pull(url: str, name: str, key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.post(f"{url}/api/pull", json={"model": name}, headers=headers, timeout=30)

    with serving(tmp_path) as (_, url):
        assert json.loads(pull(url, "a").text.splitlines()[-1]) == {"status": "success"}, "it is there"
        refused = pull(url, "owner/model")
        assert refused.status_code == 404 and "--allow-pull" in refused.json()["error"]
    keys = tmp_path / "keys.toml"
    keys.write_text('[x]\nkey = "xxxxxxxx"\n[y]\nkey = "yyyyyyyy"\nadmin = true\n')
    with serving(tmp_path / "cache", models_from=("cache",), allow_pull=True, api_key_file=keys) as (_, url):
        assert pull(url, "owner/model", "xxxxxxxx").status_code == 403
        assert pull(url, "not a name", "yyyyyyyy").status_code == 400
        last = json.loads(pull(url, "owner/model", "yyyyyyyy").text.splitlines()[-1])
        assert "hub" in last["error"] and "owner/model" in last["error"]


def test_an_install_without_libraries_for_audio_serves_what_writes(tmp_path: Path) -> None:
    with serving(tmp_path, lacks=("websockets", "soundfile", "soxr")) as (_, url):
        assert tokens(ask(url, "a")) == alone()


def test_models_are_deleted_for_who_may(tmp_path: Path) -> None:
    def delete(model: str, key: str = "yyyyyyyy", field: str = "model") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.request("DELETE", f"{url}/api/delete", json={field: model}, headers=headers, timeout=30)

    snapshot = tmp_path / "cache" / "models--owner--toy" / "snapshots" / ("c" * 40)
    shutil.copytree(DEMO, snapshot)
    keys = tmp_path / "keys.toml"
    keys.write_text('[x]\nkey = "xxxxxxxx"\n[y]\nkey = "yyyyyyyy"\nadmin = true\n')
    models = {"a": {**ONE, "download_dir": tmp_path / "cache"}}
    with serving(tmp_path, models, step_ms=3, models_from=("cache",), allow_pull=True, api_key_file=keys) as (
        server,
        url,
    ):
        admin = {"authorization": "Bearer yyyyyyyy"}
        for key, may in ((admin, True), ({"authorization": "Bearer xxxxxxxx"}, False)):
            told = httpx.get(f"{url}/v1/models", headers=key).json()
            deletable = {card["id"] for card in told["data"] if card["status"].get("deletable")}
            assert (told["may_pull"], deletable) == (may, {"owner/toy"} if may else set())
        long = Later(url, "owner/toy", n=300, key=admin)
        wait_for(lambda: states(url)["owner/toy"] == "loaded")
        busy = delete("owner/toy")
        assert busy.status_code == 409 and "loads or answers" in busy.json()["error"]
        assert tokens(long.result()) == alone(300)
        assert delete("owner/toy", "xxxxxxxx").status_code == 403 and states(url)["owner/toy"] == "loaded"
        assert delete("a").status_code == 400 and delete("nobody").status_code == 404
        gone = delete("owner/toy", field="name")
        assert (gone.status_code, gone.content) == (200, b"") and not snapshot.exists()
        wait_for(lambda: server.said("deleted owner/toy"))  # what it logs is read by another thread
        assert "owner/toy" not in states(url) and children(server) == []
        assert ask(url, "owner/toy", key=admin).status_code == 404, "what was opened of it is gone, too"
        assert delete("owner/toy").status_code == 404
        assert tokens(ask(url, "a", key=admin)) == alone()


def test_a_key_leaves_others_places_to_wait(tmp_path: Path) -> None:
    keys = {name: {"authorization": f"Bearer {name * 8}"} for name in "xy"}
    given = [f"{name}={name * 8}" for name in keys]
    (tmp_path / "load").touch()
    with serving(tmp_path, max_queue=2, api_key=given) as (_, url):
        asked = [Later(url, "a", key=keys["x"]) for _ in range(3)]
        wait_for(lambda: any(one.reply is not None for one in asked))
        (refused,) = [one.reply for one in asked if one.reply is not None]
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        body = {"model": "a", "prompt": PROMPT, "max_tokens": 2, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=keys["y"], timeout=30) as reply:
            told = reply.iter_lines()
            assert reply.status_code == 200 and next(told).startswith(": a "), "it waits"
            (tmp_path / "load").unlink()
            assert "data: [DONE]" in told
        assert sorted(one.result().status_code for one in asked) == [200, 200, 429]


def test_who_asks_for_names_that_are_none_shares_a_look_at_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, found = [], dict[str, Any]()

    def look(disk: ModelsOnDisk, common: EngineConfig) -> dict[str, Any]:
        looks.append(disk)
        time.sleep(0.05)
        return dict(found)

    async def main() -> None:
        models = OnDemand(ServerConfig(models_from=(str(tmp_path),)))

        async def missed(name: str) -> bool:
            with pytest.raises(ApiError, match=f"no model '{name}'") as refused:
                await models.find(name)
            return refused.value.status == 404

        for _ in range(2):
            assert all(await asyncio.gather(*(missed(f"none-{i}") for i in range(100))))
        assert len(looks) == 1
        found["new"] = EngineConfig(), ("short",)
        await missed("new")
        await asyncio.gather(models.look(now=True), missed("none"))
        assert (await models.find("SHORT")).name == "new" and len(looks) == 2, "what was fetched is found at once"
        monkeypatch.setattr(on_demand, "LOOK_S", 0.0)
        await missed("none")
        assert len(looks) == 3

    monkeypatch.setattr(ModelsOnDisk, "find", look)
    asyncio.run(main())


def test_a_short_name_is_that_of_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = next(model for model in published() if model.names[0] == "qwen3.5:4b")
    repository, _, file = small.hub.partition(":")

    def names() -> dict[str, tuple[str, ...]]:
        disk = ModelsOnDisk(("cache",))
        return {name: short for name, (_, short) in disk.find(EngineConfig(download_dir=tmp_path)).items()}

    def fetch(commit: str, main: bool) -> None:
        folder = tmp_path / f"models--{repository.replace('/', '--')}"
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / file).write_bytes(b"GGUF")
        if main:
            (folder / "refs").mkdir()
            (folder / "refs" / "main").write_text(commit)

    monkeypatch.setattr(offered, "why_not", lambda path: "")
    fetch("f" * 40, main=True)
    assert names() == {f"{repository}:Q4_K_M": ()}, "other bytes than the name stands for"
    fetch(str(small.revision), main=False)
    assert names() == {f"{repository}:Q4_K_M": (), "qwen3.5:4b": small.names}
    (tmp_path / f"models--{repository.replace('/', '--')}" / "refs" / "main").write_text(str(small.revision))
    assert names() == {f"{repository}:Q4_K_M": small.names}


def children(server: Server) -> list[int]:
    return [
        int(pid) for pid in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    ]


def test_a_load_that_fails_is_its_requests_failure(tmp_path: Path) -> None:
    with serving(tmp_path, {"good": ONE, "large": {"memory_gb": 9.0}}) as (server, url):
        ask(url, "good")
        failed = ask(url, "large")
        assert failed.status_code == 503 and failed.headers["x-should-retry"] == "false"
        message = failed.json()["error"]["message"]
        assert message.startswith("'large' cannot be loaded: it needs 9.00 GB, of which 7.50 GB lack")
        assert states(url)["good"] == "loaded", "nothing was unloaded in vain"
        assert tokens(ask(url, "good")) == alone()
        assert metric(url, "model_load_failures_total") == 1
        wait_for(lambda: server.said("large cannot be loaded"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("90", 90),
        (0, 0),
        ("0s", 0),
        ("1.5s", 1.5),
        ("-1", float("inf")),
        (-5, float("inf")),
    ],
)
def test_times_are_read_as_ollama_has_them(text: str | float, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 minutes", "5mm", "m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        duration(text)
    with pytest.raises(ConfigError, match="--keep-alive"):
        OnDemand(ServerConfig(keep_alive=text))


@pytest.mark.parametrize(
    ("engine", "server", "flag"),
    [
        ({"trace": Path("t")}, {}, "--trace"),
        ({"tensor_parallel": 2}, {}, "--tensor-parallel"),
        ({}, {"kv_events": "tcp://*:0"}, "--kv-events"),
    ],
)
def test_what_cannot_be_shared_is_refused(engine: dict[str, Any], server: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        serve([(EngineConfig(**engine), ModelConfig())], ServerConfig(models_from=("cache",), **server))
