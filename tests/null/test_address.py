"""Where the server listens: ports, Unix sockets, TLS with and without clients' certificates, and the prefix of a proxy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import deltic
from deltic.batch_lines import BatchLine
from deltic.commands import run
from deltic.commands.endpoint import Endpoint, EndpointError
from deltic.config import ConfigError, ServerConfig
from deltic.config_sources import resolve
from deltic.server.address import listen, listening, tls, url_of
from deltic.server.app import create_app
from deltic.server.service import Server
from deltic.server.speech.socket import PATH
from tests.fake_engine import FakeEngineClient, make_app, saying, served, service_of
from tests.fake_speech import FakeSpeechClient, speech_service_of
from tests.null.test_http import HELLO
from tests.null.test_serve import server_of
from tests.waiting import wait_for

CHAT = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True}


class Pki:
    """An authority with a server's and a client's certificate, and another's that it does not know."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._make("ca", "-addext", "basicConstraints=critical,CA:TRUE")
        self._make("stranger")
        self._make("server", "-CA", self["ca.pem"], "-CAkey", self["ca.key"], "-addext", "subjectAltName=IP:127.0.0.1")
        self._make("client", "-CA", self["ca.pem"], "-CAkey", self["ca.key"])
        self._run("ec", "-in", self["server.key"], "-out", self["locked.key"], "-aes256", "-passout", "pass:open")

    def __getitem__(self, name: str) -> str:
        return str(self.directory / name)

    def _make(self, name: str, *more: str) -> None:
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", self[f"{name}.key"])
        self._run("req", "-x509", *key, "-out", self[f"{name}.pem"], "-subj", f"/CN={name}", "-days", "2", *more)

    def _run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pki]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    yield Pki(tmp_path_factory.mktemp("pki"))


def test_https_lets_in_who_has_a_certificate(pki: Pki) -> None:
    settings = {
        "ssl_certfile": pki["server.pem"], "ssl_keyfile": pki["locked.key"], "ssl_keyfile_password": "open",
        "ssl_ca_certs": pki["ca.pem"], "root_path": "/llm",
    }  # fmt: skip
    with server_of(**settings) as server:
        wait_for(lambda: any(" ready on https://" in line for line in list(server.log)))
        url = "https://" + "".join(server.log).partition("https://")[2].split()[0]
        assert url.endswith("/llm")
        trust = ssl.create_default_context(cafile=pki["ca.pem"])
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=trust)
        trust.load_cert_chain(pki["client.pem"], pki["client.key"])
        with httpx.Client(verify=trust, timeout=20) as client:
            assert client.get(f"{url}/health").json()["status"] == "ready"
            reply = client.post(f"{url}/v1/completions", json=CHAT | {"stream": True})
            assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
            assert len(reply.text.split("\n\n")) > 20
        stranger = ssl.create_default_context(cafile=pki["ca.pem"])
        stranger.load_cert_chain(pki["stranger.pem"], pki["stranger.key"])
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=stranger)
        server.process.terminate()
        assert server.end() == 0


def test_clients_of_ours_are_told_whom_to_trust(pki: Pki) -> None:
    async def models(trusted: str | None) -> Any:
        return await Endpoint(url, None, trusted).json("GET", "/v1/models")

    with server_of(ssl_certfile=pki["server.pem"], ssl_keyfile=pki["server.key"]) as server:
        wait_for(lambda: any(" ready on https://" in line for line in list(server.log)))
        url = "https://" + "".join(server.log).partition("https://")[2].split()[0]
        for trusted in ("ca.pem", "server.pem"):
            status, _ = asyncio.run(models(pki[trusted]))
            assert status == 200, trusted
        for wrong in (None, pki["stranger.pem"]):
            with pytest.raises(
                EndpointError, match=r"certificate is not trusted \(.+\)\. Give what vouches .* --cacert FILE"
            ):
                asyncio.run(models(wrong))
    with pytest.raises(ConfigError, match=r"--cacert .*ca\.key cannot be used"):
        Endpoint(url, None, pki["ca.key"])


def test_sighup_reads_certificates_again(pki: Pki, tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"

    def install(name: str) -> None:
        shutil.copy(pki[f"{name}.pem"], certificate)
        shutil.copy(pki[f"{name}.key"], key)

    def subject() -> str:
        found = ssl.get_server_certificate(("127.0.0.1", port))
        return next(
            name for name in ("server", "stranger") if found.strip() == Path(pki[f"{name}.pem"]).read_text().strip()
        )

    install("server")
    with server_of(ssl_certfile=str(certificate), ssl_keyfile=str(key)) as server:
        wait_for(lambda: any(" ready on https://" in line for line in list(server.log)))
        port = int(re.findall(r"127\.0\.0\.1:(\d+)", "".join(server.log))[0])
        assert subject() == "server"
        shutil.copy(pki["client.pem"], certificate)  # of another key: nothing of it may be used
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: any("SIGHUP: what was read before holds. --ssl-certfile" in line for line in list(server.log)))
        assert subject() == "server"
        install("stranger")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: any("SIGHUP: read" in line for line in list(server.log)))
        assert subject() == "stranger"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"ssl_keyfile": "server.key"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_ca_certs": "ca.pem"}, "--ssl-ca-certs needs --ssl-certfile"),
        ({"ssl_certfile": "absent.pem"}, "No such file"),
        ({"ssl_certfile": "server.pem"}, "with the key in .*server.pem cannot be used"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "client.key"}, "files that belong together"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "locked.key"}, "--ssl-keyfile-password"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", "ssl_ca_certs": "ca.key"}, "--ssl-ca-certs .* cannot"),
    ],
)  # fmt: skip
def test_certificates_that_cannot_be_used_are_told(pki: Pki, settings: dict[str, str], complaint: str) -> None:
    given = {name: Path(pki[file]) for name, file in settings.items()}
    with pytest.raises(ConfigError, match=complaint):
        tls(ServerConfig(**given))  # type: ignore[arg-type]


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "deltic.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # as a server leaves it that was killed
    with server_of(before="from pathlib import PosixPath", uds=path) as server:
        wait_for(lambda: any(f" ready on unix:{path} " in line for line in list(server.log)))
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=20) as client:
            assert client.get("http://a-name/health").status_code == 200
            reply = client.post("http://a-name/v1/completions", json=CHAT | {"stream": True})
            assert reply.text.endswith("data: [DONE]\n\n")
        with pytest.raises(ConfigError, match="another server listens there"):
            listen(ServerConfig(uds=path))
        server.process.terminate()
        assert server.end() == 0
    assert not path.exists()


def test_a_unix_socket_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is no socket"):
        listen(ServerConfig(uds=file))
    assert file.read_text() == "mine"
    for path in (tmp_path / "no" / "directory", tmp_path / ("x" * 120)):
        with pytest.raises(ConfigError, match=r"cannot listen on --uds .*\. Choose another path"):
            listen(ServerConfig(uds=path))
    mask = os.umask(0o022)
    os.umask(mask)
    with listening(ServerConfig(uds=tmp_path / "s")) as listener:
        assert url_of(listener, ServerConfig(uds=tmp_path / "s")) == f"unix:{tmp_path / 's'}"
        (tmp_path / "s").unlink()
        (tmp_path / "s").write_text("another's")
    assert (tmp_path / "s").read_text() == "another's"
    assert os.umask(mask) == mask


@pytest.fixture(scope="module")
def prefixed() -> Iterator[str]:
    with served(make_app(FakeEngineClient(saying("Hi")), root_path="/llm/one")) as url:
        yield url


@pytest.mark.parametrize("prefix", ["", "/llm/one"], ids=["taken away", "left"])
def test_a_proxys_prefix_may_be_there_or_not(prefixed: str, prefix: str) -> None:
    url = prefixed + prefix
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "fake"
    assert httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO}).status_code == 200
    assert httpx.get(f"{url}/openapi.json").json()["servers"] == [{"url": "/llm/one"}]
    assert httpx.get(f"{url}/").headers["content-type"].startswith("text/html")
    assert httpx.get(f"{url}/metrics/").status_code == 200
    error = httpx.post(f"{url}/v1/messages", json={}).json()
    assert error["type"] == "error", "Anthropic's form"
    assert isinstance(httpx.post(f"{url}/api/chat", json={"model": "x"}).json()["error"], str), "Ollama's"
    assert "makes no embeddings" in httpx.post(f"{url}/v1/embeddings", json={}).text
    assert "no such path: GET /nowhere" in httpx.get(f"{url}/nowhere").text


def test_a_prefix_is_a_path_of_its_own(prefixed: str) -> None:
    reply = httpx.get(f"{prefixed}/llm/one")
    assert reply.status_code == 307 and reply.headers["location"].endswith("/llm/one/"), "the page's links are relative"
    assert httpx.get(f"{prefixed}/llm/one2/health").status_code == 404
    for wrong in ("llm", "/llm/", "/a b", "/"):
        with pytest.raises(ConfigError, match="--root-path"):
            resolve(ServerConfig, {"root_path": wrong}, {})
    assert "servers" not in httpx.get(f"{prefixed}/openapi.json").json()["info"]


def test_the_page_asks_below_its_own_address() -> None:
    files = sorted((Path(deltic.__file__).parent / "server/page").glob("*.*"))
    page = "".join(path.read_text() for path in files if path.suffix in (".html", ".js"))
    assert not re.search(r"(?:src|href)=\"/", page)
    for call in ('fetch("', 'call("', "fetch('", "call('", "call(`", "fetch(`"):
        assert f"{call}/" not in page


def test_a_websocket_under_a_prefix() -> None:
    server = Server(ServerConfig(root_path="/tts"))
    server.add(service_of(server, FakeEngineClient(), "writes"))
    server.add(speech_service_of(server, FakeSpeechClient(), "speaks"))
    with served(create_app(server), ws="websockets-sansio") as url:
        for prefix in ("", "/tts"):
            with connect(f"ws{url.removeprefix('http')}{prefix}{PATH}") as ws:
                ws.send(json.dumps({"type": "nonsense"}))
                assert "error" in str(ws.recv())
        with pytest.raises(InvalidStatus):
            connect(f"ws{url.removeprefix('http')}/stt{PATH}")


def test_nobody_there_is_told_in_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "N_TRIES", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = Endpoint(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(run.Stopped, match=r"^after 1 tries: http://.*\. Start a server with deltic serve\.$"):
            asyncio.run(run.send(endpoint, "m", BatchLine(1, None, "/v1/completions", b"{}")))


def test_where_it_listens_is_told() -> None:
    with listen(ServerConfig(port=0)) as listener:
        port: Any = listener.getsockname()[1]
        assert url_of(listener, ServerConfig(port=0)) == f"http://127.0.0.1:{port}"
