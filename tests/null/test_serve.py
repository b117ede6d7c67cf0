"""The server as a process, over an engine process with the fake runner: its start, its signals, its engine's death."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltic import logs
from deltic.__main__ import main
from deltic.config import ConfigError, EngineConfig, ModelConfig, ServerConfig, exit_status
from deltic.models.fields import CheckpointError
from deltic.models.hub import DownloadFailed
from deltic.server.address import listen, listening
from deltic.server.batch.file_store import FileStore
from deltic.server.serve import serve
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
{before}
from deltic.config import EngineConfig, ModelConfig, ServerConfig
from deltic.server.serve import serve
program = (sys.executable, {fakes!r}, "--step-ms", "{step_ms}", *{hold})
models = [(EngineConfig(**{engine}), ModelConfig(served_model_name=(name,) if name else ())) for name in {names}]
sys.exit(serve(models, ServerConfig(**{server}), program=program))
"""
LONG = {"prompt": [5, 6, 7], "max_tokens": 3000, "ignore_eos": True}


class Server:
    """A server process; `log` is what it wrote."""

    def __init__(
        self,
        step_ms: float,
        engine: dict[str, Any],
        server: dict[str, Any],
        names: tuple[str | None, ...],
        hold: Path | None,
        before: str,
    ) -> None:
        """hold: as of tests/fakes.py. before: statements that the process runs first."""
        program = PROGRAM.format(
            before=before,
            hold=() if hold is None else ("--hold", str(hold)),
            fakes=str(ROOT / "tests/fakes.py"),
            step_ms=step_ms,
            engine=engine,
            names=names,
            server={"port": 0} | server,
        )
        self.process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        self.log.extend(self.process.stderr)

    def url(self) -> str:
        """Once it is ready."""
        wait_for(lambda: self.said(" ready on "))
        found = re.search(r"http://\S+", "".join(self.log))
        assert found
        return found.group()

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def said(self, text: str) -> bool:
        return any(text in line for line in list(self.log))

    def end(self) -> int:
        status = self.process.wait(20)
        self._reader.join(5)
        return status


@contextmanager
def server_of(
    step_ms: float = 1.0,
    engine: dict[str, Any] | None = None,
    names: tuple[str | None, ...] = (None,),
    hold: Path | None = None,
    before: str = "",
    **server: Any,
) -> Iterator[Server]:
    running = Server(step_ms, engine or {}, server, names, hold, before)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def n_running(url: str) -> int:
    found = re.search(r"^deltic_sequences_running{.*} (\S+)", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found
    return int(float(found.group(1)))


class Ask(threading.Thread):
    """A completion asked for in the background."""

    def __init__(self, url: str, **fields: Any) -> None:
        super().__init__()
        self._url, self._body = url, LONG | fields
        self.status, self.text = 0, ""
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=20) as response:
            self.status = response.status_code
            for text in response.iter_text():
                self.text += text


def test_drain_lets_requests_finish() -> None:
    with server_of(step_ms=5, drain_s=20) as server:
        url = server.url()
        stream = Ask(url, max_tokens=250, stream=True)
        whole = Ask(url, max_tokens=250)
        wait_for(lambda: stream.text and n_running(url) == 2)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 503
        assert server.end() == 0
        assert any("2 requests open, with 20 s to finish" in line for line in server.log)
        assert server.log[-1].endswith(" stopped\n")
        stream.join()
        whole.join()
    assert stream.text.endswith("data: [DONE]\n\n")
    assert json.loads(whole.text)["usage"]["completion_tokens"] == 250
    assert not any("Traceback" in line for line in server.log), server.log


def test_notice_is_given_before_the_drain() -> None:
    with server_of(step_ms=2, drain_s=20, drain_notice_s=1.0) as server:
        url = server.url()
        server.process.send_signal(signal.SIGTERM)
        sent_s = time.monotonic()
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
        assert httpx.get(f"{url}/health").json()["status"] == "draining"
        taken = httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 5})
        assert (taken.status_code, taken.headers["connection"]) == (200, "close")
        late = Ask(url, max_tokens=600, stream=True)
        wait_for(lambda: late.text)
        wait_for(lambda: httpx.get(f"{url}/health").json()["status"] == "stopping")
        assert time.monotonic() - sent_s > 0.9
        refused = httpx.post(f"{url}/v1/completions", json=LONG)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert server.end() == 0
        late.join()
    assert late.text.endswith("data: [DONE]\n\n")


def test_a_second_signal_ends_the_notice_too() -> None:
    with server_of(drain_notice_s=600) as server:
        url = server.url()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_several_models_start_answer_and_drain_together() -> None:
    with server_of(step_ms=2, drain_s=20, names=("a", "b")) as server:
        url = server.url()
        assert any(f"a and b are ready on {url}" in line for line in server.log)
        asked = [Ask(url, model=name, max_tokens=200, stream=True) for name in ("a", "b")]
        wait_for(lambda: all(one.text for one in asked))
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        for one in asked:
            one.join()
            assert one.text.endswith("data: [DONE]\n\n")
    said = "".join(server.log)
    assert "2 requests open, with 20 s to finish" in said
    assert all(re.search(rf"POST /v1/completions 200 .* model={name} ", said) for name in ("a", "b"))


def test_an_engine_process_that_cannot_be_started_is_an_error_of_one_line() -> None:
    models = [(EngineConfig(), ModelConfig())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "set_up", lambda *_: None)
        assert serve(models, ServerConfig(port=0), program=("/no/such/program",)) == 1


def test_one_of_several_that_cannot_be_served_is_named() -> None:
    with server_of(engine={"model": "/no/such/model"}, names=("a", "b")) as server:
        assert server.end() == 2
    assert "ERROR a cannot be served: /no/such/model: no such directory" in "".join(server.log)


def test_who_waits_too_long_for_a_place_is_told_to_come_again() -> None:
    with server_of(step_ms=5, queue_timeout_s=0.5, engine={"max_num_seqs": 1}) as server:
        url = server.url()
        first = Ask(url, max_tokens=400, stream=True)
        wait_for(lambda: first.text)
        late = httpx.post(f"{url}/v1/completions", json=LONG, timeout=10)
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert late.json()["error"]["code"] == "queue_timeout"
        first.join()
        assert first.text.endswith("data: [DONE]\n\n")
        counted = 'deltic_sequences_finished_total{finish_reason="queue_timeout",model="built-in"} 1.0'
        assert counted in httpx.get(f"{url}/metrics").text


def test_drain_ends_what_takes_too_long_and_cleans_up() -> None:
    with server_of(step_ms=5, drain_s=0.3) as server:
        url, pid = server.url(), server.engine_pid()
        stream, whole = Ask(url, stream=True), Ask(url)
        wait_for(lambda: stream.text and n_running(url) == 2)
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
        stream.join()
        whole.join()
    last = stream.text.strip().split("\n\n")[-1]
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert whole.status == 503 and "shutting down" in whole.text
    assert not Path(f"/proc/{pid}").exists()
    assert not any("Traceback" in line for line in server.log), server.log


def tell_twice(server: Server) -> None:
    """Two signals, the second where the first would not end it for ten minutes."""
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: server.said("stopping; "))
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


def test_a_second_signal_ends_at_once() -> None:
    with server_of(step_ms=5, drain_s=600) as server:
        stream = Ask(server.url(), stream=True)
        wait_for(lambda: stream.text)
        tell_twice(server)
        stream.join()
    assert '"error"' in stream.text
    assert not any("Traceback" in line for line in server.log), server.log


HALF_HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
HALF_BODY = b"POST /cache/import HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n\r\n"


@contextmanager
def asking(server: Server, half: bytes) -> Iterator[socket.socket]:
    """A client that has sent half a request and sends no more, on a server that does not mind."""
    url = httpx.URL(server.url())
    with socket.create_connection((url.host, url.port or 0), timeout=20) as client:
        client.sendall(half)
        assert httpx.get(url.join("/health")).status_code == 200, "and so it has read the half"
        yield client


@pytest.mark.parametrize("half", [HALF_HEAD, HALF_BODY], ids=["head", "body"])
def test_half_a_request_holds_up_no_stop(half: bytes, tmp_path: Path) -> None:
    engine = {"allow_cache_transfer": True, "cache_dir": str(tmp_path), "cache_disk_gb": 1.0}
    with server_of(engine=engine, drain_s=0.1, client_timeout_s=0) as server, asking(server, half) as client:
        server.process.send_signal(signal.SIGTERM)
        assert client.recv(65_536).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert server.end() == 0
    assert not any("Traceback" in line or "ERROR" in line for line in server.log), server.log


def test_a_second_signal_ends_the_wait_for_connections_too() -> None:
    before = "from deltic.server import connections, serve as it; connections.ENDING_S = it.LAST_WORDS_S = 600"
    with server_of(client_timeout_s=0, before=before) as server, asking(server, HALF_HEAD):
        tell_twice(server)


SLOW_END = """
from deltic.host import supervisor
supervisor.EngineClient.send_shutdown, supervisor.SHUTDOWN_S = lambda self: None, 600
"""


def test_a_second_signal_does_not_wait_for_a_long_step() -> None:
    """The engine does not take the word to stop."""
    with server_of(before=SLOW_END) as server:
        server.url()
        tell_twice(server)
    assert not any("Traceback" in line for line in server.log), server.log


def test_the_engine_dies_under_load_and_comes_back() -> None:
    with server_of(step_ms=5) as server:
        url, pid = server.url(), server.engine_pid()
        stream, whole = Ask(url, stream=True), Ask(url)
        wait_for(lambda: stream.text and n_running(url) == 2)
        os.kill(pid, signal.SIGKILL)
        stream.join()
        whole.join()
        assert '"error"' in stream.text and whole.status in (500, 503) and "SIGKILL" in whole.text
        assert httpx.get(f"{url}/health").status_code in (503, 200)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
        again = httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 3})
        assert again.status_code == 200
        assert 'deltic_engine_restarts_total{model="built-in"} 1.0' in httpx.get(f"{url}/metrics").text
        assert 'deltic_pages_used{model="built-in"} 0.0' in httpx.get(f"{url}/metrics").text


def test_sighup_reads_keys_again_and_cuts_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "old"')

    def status(key: str) -> int:
        return httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    with server_of(step_ms=5.0, before="from pathlib import PosixPath", api_key_file=keys) as server:
        url = server.url()
        body, key = LONG | {"stream": True, "max_tokens": 100}, {"authorization": "Bearer old"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=key, timeout=20) as open_:
            for path, said in (("[alice", "ERROR"), ('[alice]\nkey = "new"', "INFO")):
                keys.write_text(path)
                server.process.send_signal(signal.SIGHUP)
                wait_for(lambda said=said: any("SIGHUP" in line and said in line for line in list(server.log)))
                assert (status("old"), status("new")) == ((200, 401) if said == "ERROR" else (401, 200))
            assert "".join(open_.iter_text()).endswith("data: [DONE]\n\n")
        server.process.terminate()
        assert server.end() == 0


def test_sighup_without_files_is_a_stop_that_says_so() -> None:
    with server_of(step_ms=5.0) as server:
        asked = Ask(server.url(), max_tokens=60)
        wait_for(lambda: n_running(server.url()) == 1)
        server.process.send_signal(signal.SIGHUP)
        asked.join()
        assert asked.status == 200 and json.loads(asked.text)["usage"]["completion_tokens"] == 60
        assert server.end() == 0
    said = "".join(server.log)
    assert "SIGHUP: there are no keys and no certificates in files to read again; stopping" in said


def test_a_model_that_cannot_be_served() -> None:
    with server_of(engine={"model": "/no/such/model"}) as server:
        assert server.end() == 2
    assert "/no/such/model: no such directory" in "".join(server.log) and "Traceback" not in "".join(server.log)


def test_ready_tells_the_stage_while_loading() -> None:
    with server_of() as server:
        wait_for(lambda: server.said("listening on"))
        found = re.search(r"http://\S+", "".join(server.log))
        assert found
        assert httpx.get(f"{found.group()}/ready").json()["status"] in ("starting", "ready")


def test_the_server_process_does_not_import_torch() -> None:
    program = "import sys, deltic.server.serve, deltic.server.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_engines_start_before_http_is_imported() -> None:
    program = "import sys, deltic.server.serve; sys.exit('starlette' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_an_address_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"{port}.*--port"):
            listen(ServerConfig(port=port))


def test_of_two_servers_on_one_port_the_second_fails() -> None:
    """As soon as the first has its socket, not only once it accepts."""
    with listen(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        with server_of(port=port) as second:
            assert second.end() == 1
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use). Choose another" in "".join(second.log)
    assert "ready on" not in "".join(second.log)


FAILING = """
import uvicorn
async def main_loop(self):
    raise OSError("no more of anything")
uvicorn.Server.main_loop = main_loop
"""


def test_an_http_server_that_fails_ends_the_process_with_its_error() -> None:
    with server_of(before=FAILING) as server:
        assert server.end() == 1
    assert "the HTTP server ended: OSError('no more of anything')" in "".join(server.log)
    assert not any("Traceback" in line for line in server.log), server.log


def test_ctrl_c_while_a_model_loads_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "load").touch()
    with server_of(hold=tmp_path) as server:
        wait_for(lambda: server.said("listening on"))
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
    assert server.log[-1].endswith(" stopped\n")
    assert not any("Traceback" in line or "never retrieved" in line for line in server.log), server.log
    assert any("stopping; 0 requests open\n" in line for line in server.log)


BLOCKING = """
import asyncio, deltic.server.serve as module, time
module.BLOCKED_S, module.BLOCKED_AGAIN_S = {patience}, 0.1
drained = module._tell_ready
def block(*arguments):
    drained(*arguments)
    {block}
module._tell_ready = block
"""


@pytest.mark.parametrize(
    ("block", "patience", "n_signals"), [("while True: pass", 0.2, 1), ("while True: pass", 60.0, 2)]
)
def test_a_signal_ends_a_process_whose_event_loop_is_blocked(block: str, patience: float, n_signals: int) -> None:
    with server_of(before=BLOCKING.format(block=block, patience=patience)) as server:
        server.url()
        engine = server.engine_pid()
        for _ in range(n_signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert server.end() == 1
        assert "the event loop is blocked; the process ends as it is" in server.log[-1]
        wait_for(lambda: not Path(f"/proc/{engine}").exists())


def test_a_batch_outlives_its_server(tmp_path: Path) -> None:
    """Killed once and stopped once in the middle of it; each line has one answer in the end."""
    body = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(60)]
    settings: dict[str, Any] = {"before": "from pathlib import PosixPath", "batch_dir": tmp_path / "d"}
    settings |= {"batch_in_flight": 2}

    def counts(url: str) -> dict[str, Any]:
        (told,) = httpx.get(f"{url}/v1/batches").json()["data"]
        return dict(told)

    with server_of(step_ms=3, **settings) as server:
        url = server.url()
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = httpx.post(f"{url}/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert httpx.post(f"{url}/v1/batches", json=asked).status_code == 200
        wait_for(lambda: counts(url)["request_counts"]["completed"] >= 5)
        server.process.kill()
    with server_of(step_ms=3, **settings) as server:
        url = server.url()
        wait_for(lambda: counts(url)["request_counts"]["completed"] >= 12)
        server.process.terminate()
        assert server.end() == 0
    with server_of(**settings) as server:
        url = server.url()
        wait_for(lambda: counts(url)["status"] == "completed", 20)
        done = counts(url)
        assert done["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        text = httpx.get(f"{url}/v1/files/{done['output_file_id']}/content").text
        assert sorted(json.loads(line)["custom_id"] for line in text.splitlines()) == sorted(
            line["custom_id"] for line in lines
        )
        assert done["usage"]["output_tokens"] == 60 * 20


@pytest.mark.parametrize(
    ("engine", "server", "complaint"),
    [
        ({"model": "/nonexistent"}, {}, "/nonexistent"),
        ({}, {"api_key_file": "/nonexistent"}, "cannot be read"),
        ({}, {"api_key": ("a b=c",)}, "--api-key number 1"),
        ({}, {"batch_dir": "/tmp"}, "--batch-dir /tmp"),
    ],
)
def test_a_wrong_setting_found_late_is_status_2(engine: dict[str, Any], server: dict[str, Any], complaint: str) -> None:
    given = {name: Path(value) if isinstance(value, str) else value for name, value in server.items()}
    with server_of(engine=engine, before="from pathlib import PosixPath", **given) as running:
        assert running.end() == 2
        assert complaint in "".join(running.log)


def test_what_a_later_start_may_find_mended_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listening(ServerConfig(port=0)) as taken, listening(ServerConfig(uds=tmp_path / "s")):
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
        assert main(["serve", "--uds", str(tmp_path / "s")]) == 1
    store = FileStore(tmp_path / "batches", 1.0)
    try:
        with pytest.raises(ConfigError, match="another server's") as refused:
            FileStore(tmp_path / "batches", 1.0)
        assert exit_status(refused.value) == 1
    finally:
        store.close()
    assert exit_status(DownloadFailed("no hub")) == 1 and exit_status(CheckpointError("no such model")) == 2
    capsys.readouterr()
    assert main(["serve", "--dummy", "qwen9", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "qwen9" in said and "listening" not in said and said.count("\n") == 1
