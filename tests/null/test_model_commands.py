"""deltic pull, list, show, rm and ps, beside a hub and a server on loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from deltic import aliases
from deltic.__main__ import main
from deltic.aliases import Published, published
from deltic.commands import models
from deltic.config import EngineConfig
from deltic.config_sources import resolve
from deltic.models.checkpoint import ALL_FILES, DEMO, resolve_model
from deltic.models.fields import CheckpointError
from deltic.models.hub import wanted_of
from deltic.runtime.cpu.device import Cpu
from deltic.server import local_models as local_models_
from deltic.server.downloads import Expected, expected
from deltic.server.local_models import local_models
from tests.fake_hub import COMMITS, FakeHub, Long, blob_name, hub_with
from tests.null.test_local_models import GGUF
from tests.waiting import wait_for

FILES = {path.name: path.read_bytes() for path in DEMO.iterdir()}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def demo_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_with(FILES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def told(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    """What a command prints, on one line."""
    assert main(words) == status
    printed = capsys.readouterr()
    return " ".join((printed.err if status else printed.out).split())


def test_a_model_comes_is_listed_shown_and_goes(demo_hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no models on this disk" in told(capsys, "list")
    said = told(capsys, "pull", "owner/model")
    assert "model.safetensors" in said and "README.md" not in said, "only what is needed"
    assert "to come; the disk has" in said and said.endswith("Next: deltic serve owner/model")
    (model,) = local_models()
    assert "0.00 MB to come; the disk has" in told(capsys, "pull", "hf.co/owner/model")
    assert demo_hub.sent["model.safetensors"] == len(FILES["model.safetensors"]), "once"

    row = told(capsys, "list")
    assert "owner/model" in row and "bfloat16" in row and row.endswith("fits")
    (as_json,) = json.loads(told(capsys, "list", "--json"))
    assert as_json["name"] == "owner/model" and as_json["bytes"] == model.n_bytes
    assert as_json["path"] == str(model.path) and as_json["missing"] is None is as_json["why_not"]

    about = told(capsys, "show", "owner/model")
    for part in (model.revision, str(model.path), "DeltaNet", "chats", "context", "tokens", "not in its files"):
        assert part in about
    assert told(capsys, "show", str(model.path)).startswith("name owner/model"), "by its path, too"

    data = (weights := model.path / "model.safetensors").read_bytes()
    weights.write_bytes(data[:5_000_000])
    assert told(capsys, "list").partition("not served: ")[2].startswith("model.safetensors: damaged or unreadable")
    weights.write_bytes(data)
    assert "Give --yes" in told(capsys, "rm", "owner/model", status=2)
    assert told(capsys, "rm", "--yes", "owner/model").startswith("deleted owner/model: ")
    assert not local_models()
    assert "deltic pull owner/model gets it" in told(capsys, "show", "owner/model", status=2)


def test_deleting_asks(demo_hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told(capsys, "pull", "owner/model")

    class Terminal:
        def __init__(self, answer: str) -> None:
            self.answer = answer

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self.answer

    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    assert told(capsys, "rm", "owner/model").endswith("[y/N] kept") and local_models()
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    engine = [
        sys.executable,
        "-c",
        "input()",
        "deltic.host.process",
        json.dumps({"model": str(local_models()[0].path)}),
    ]
    with subprocess.Popen(engine, stdin=subprocess.PIPE) as serving:
        assert main(["rm", "owner/model"]) == 0
        assert f"process {serving.pid} serves it" in capsys.readouterr().err
        serving.communicate(b"\n")
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    for error in (PermissionError("not yours"), OSError("the disk is read-only")):
        with monkeypatch.context() as others:
            others.setattr(shutil, "rmtree", Mock(side_effect=error))
            assert "not all of it could be deleted" in told(capsys, "rm", "owner/model", status=2) and local_models()
    said = told(capsys, "rm", "owner/model")
    assert said.startswith("Delete owner/model, which frees ") and "are free again" in said and not local_models()


def test_it_goes_on_from_what_has_come(demo_hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    data = FILES["model.safetensors"]
    blobs = Path(constants.HF_HUB_CACHE) / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{blob_name('model.safetensors', data)}.incomplete").write_bytes(data[:1_000_000])
    assert "deltic pull goes on with it" in told(capsys, "list")
    assert "model.safetensors 1.00 MB of it here" in told(capsys, "pull", "owner/model")
    assert demo_hub.sent["model.safetensors"] == len(data) - 1_000_000
    assert told(capsys, "list").endswith("fits")


@pytest.mark.usefixtures("interruptible")
def test_an_end_by_hand_loses_nothing(demo_hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    size = len(FILES["model.safetensors"])
    demo_hub.rate = 4e6
    pulling = subprocess.Popen(
        [sys.executable, "-m", "deltic", "pull", "owner/model"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    wait_for(lambda: demo_hub.sent.get("model.safetensors", 0) > size / 4, 30)
    pulling.send_signal(signal.SIGINT)
    _, said = pulling.communicate(timeout=30)
    assert pulling.returncode == 130 and b"deltic pull owner/model goes on from what has come" in said
    came = demo_hub.sent["model.safetensors"]
    assert came < size and "deltic pull goes on with it" in told(capsys, "list")
    demo_hub.rate, demo_hub.sent = 0.0, {}
    told(capsys, "pull", "owner/model")
    assert 0 < demo_hub.sent["model.safetensors"] <= size - came + 2_000_000, "what was under way may come again"
    assert told(capsys, "list").endswith("fits")


def test_of_a_repository_of_gguf_files_one_model_comes(tmp_path: Path) -> None:
    with hub_with(GGUF):
        small = expected(wanted_of("owner/model:UD-Q4_K_M", ALL_FILES, None, tmp_path))
        assert small == [Expected("model-UD-Q4_K_M.gguf", 404, 0), Expected("mmproj-F16.gguf", 74, 0)]
        assert expected(wanted_of("owner/model", ALL_FILES, None, tmp_path))[0].name == "model-Q4_K_M.gguf"
        assert len(expected(wanted_of("owner/model:BF16", ALL_FILES, None, tmp_path))) == 2
        with pytest.raises(CheckpointError, match="has no GGUF file of Q2_K; there are"):
            expected(wanted_of("owner/model:Q2_K", ALL_FILES, None, tmp_path))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3.5:5b", "no short name of a model. Did you mean qwen3.5:"),
        ("a-name", "no model here, no short name, and not a hub name of the form owner/model"),
        ("owner/other", "neither a directory here nor a model on the hub"),
    ],
)
def test_what_cannot_come_is_said(name: str, said: str, demo_hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in told(capsys, "pull", name, status=2)


def test_a_disk_that_is_too_small_is_said_before_anything_comes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_with({"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": Long(b"w", 10**15)}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        said = told(capsys, "pull", "owner/model", status=1)
        assert "1000000.00 GB are to come, but the disk of" in said and "--download-dir" in said
        assert not hub.sent


def test_a_model_of_another_family_does_not_come(demo_hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    demo_hub.more = {"config": {"architectures": ["LlamaForCausalLM"]}}
    assert "this is a Llama" in told(capsys, "pull", "owner/model", status=2)
    assert not demo_hub.sent


def test_short_names_are_listed_with_their_files(capsys: pytest.CaptureFixture[str]) -> None:
    listed = told(capsys, "list", "--published")
    for model in published():
        assert all(name in listed for name in model.names) and model.hub in listed
    assert "2.74 GB Q4_K_M unsloth/Qwen3.5-4B-GGUF" in listed


def test_a_model_on_this_disk_has_its_short_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = next(model for model in published() if model.names[0] == "qwen3.5:4b")
    repository, _, file = small.hub.partition(":")
    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "snapshots"
    (snapshots / str(small.revision)).mkdir(parents=True)
    (snapshots / str(small.revision) / file).write_bytes(b"GGUF")
    (model,) = local_models()
    assert model.name == f"{repository}:Q4_K_M" and models.found("qwen3.5:4b-q4", None) == model
    assert told(capsys, "list").split()[6] == "qwen3.5:4b"
    assert told(capsys, "rm", "-y", "qwen3.5:4b").startswith(f"deleted {repository}:Q4_K_M")


def test_a_short_name_brings_the_commit_that_it_stands_for(
    demo_hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Published(("toy:6m",), "owner/model", COMMITS["old"], 13_000_000, "bfloat16", "qwen3.5-0.8b")
    monkeypatch.setattr(aliases, "published", lambda: (toy,))
    monkeypatch.setattr(local_models_, "published", lambda: (toy,))
    assert f"owner/model at {COMMITS['old']}" in told(capsys, "pull", "toy:6m")
    (model,) = local_models()
    assert model.revision == COMMITS["old"]
    assert told(capsys, "list").split()[6] == "toy:6m"
    assert told(capsys, "show", "toy:6m").startswith("name owner/model (toy:6m)")
    config = resolve(EngineConfig, {"model": "toy:6m"})
    demo_hub.down = True
    assert resolve_model(config.model, ALL_FILES, config.revision) == model.path, "without the hub, too"
    demo_hub.down = False
    told(capsys, "pull", "owner/model")
    assert "owner/model" in (listed := told(capsys, "list").split()) and "toy:6m" in listed, (
        "each is there under its name"
    )
    assert told(capsys, "show", "toy:6m").startswith("name toy:6m from https://huggingface.co/owner/model at bbbb")
    assert told(capsys, "show", "owner/model").startswith(
        "name owner/model from https://huggingface.co/owner/model at aaaa"
    )
    assert told(capsys, "rm", "-y", "toy:6m").startswith("deleted toy:6m")
    assert [(model.name, model.revision) for model in local_models()] == [("owner/model", COMMITS["main"])]
    assert told(capsys, "rm", "-y", "owner/model").startswith("deleted owner/model") and not local_models()


def test_models_of_directories_are_listed_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    os.symlink(DEMO, tmp_path / "mine" / "demo")
    assert str(tmp_path / "mine" / "demo") in told(capsys, "list", str(tmp_path / "mine"))
    assert "no such directory" in told(capsys, "list", str(tmp_path / "nowhere"), status=2)
    assert "Delete its files yourself" in told(capsys, "rm", "-y", str(DEMO), status=2)


def test_names_of_others_reach_a_terminal_as_letters(
    demo_hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("[red]a", "b[", "c\x1b]0;owned\x07"):
        (tmp_path / name / "x]").mkdir(parents=True)
        os.symlink(DEMO, tmp_path / name / "x]" / "demo")
    said = told(capsys, "list", str(tmp_path))
    for name in ("[red]a", "b[", "c]0;owned"):
        assert f"{tmp_path}/{name}/x]/demo" in said
    shutil.copytree(DEMO, tmp_path / "[red]m")
    said += told(capsys, "plan", str(tmp_path / "[red]m"))
    assert "[red]m: " in said
    said += told(capsys, "show", str(tmp_path / "b[" / "x]" / "demo")) + told(capsys, "show", "a/b\x1b[1m", status=2)
    demo_hub.files["a\x1b[1m.json"] = b"{}" * 500_000
    assert main(["pull", "owner/model"]) == 1, "which the hub of tests cannot send"
    said += "".join(capsys.readouterr())
    assert "a[1m.json" in said and "\x1b" not in said


def test_whether_it_fits_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DEMO, tmp_path / "demo")
    assert told(capsys, "list", str(tmp_path)).endswith(" fits")
    monkeypatch.setattr(Cpu, "free_bytes", lambda self: 10_000_000)
    assert "does not fit: weights 0.0 GB and workspace" in told(capsys, "list", str(tmp_path))
    (tmp_path / "demo" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    assert told(capsys, "list", str(tmp_path)).endswith(
        "not served: this is a Llama, or made like one (LlamaForCausalLM)"
    )
    assert "not served this is a Llama" in told(capsys, "show", str(tmp_path / "demo"))


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server that answers /api/ps with these models."""

    class Answer(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            body = json.dumps({"models": request.param}).encode()
            self.send_response(200 if self.path == "/api/ps" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


LOADED = {
    "name": "owner/model:latest",
    "size": 2_740_937_888,
    "details": {"format": "gguf", "quantization_level": "Q4_K_M"},
    "context_length": 32768,
}


@pytest.mark.parametrize(
    ("running", "said"),
    [
        ([], "has no model loaded"),
        (
            [LOADED | {"expires_at": "2286-11-20T17:46:40Z"}],
            "owner/model 2.74 GB gguf Q4_K_M 32768 until the server ends",
        ),
        ([LOADED | {"expires_at": "2026-12-01T10:00:00Z"}], "32768 until 2026-12-01 10:00:00"),
    ],
    indirect=["running"],
)
def test_what_a_server_has_loaded(running: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in told(capsys, "ps", "--url", running)


def test_a_hub_that_accepts_and_is_silent_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        quick = "import sys; from deltic.models import hub; hub.TELLING_S = 0.5;"
        code = (
            f"{quick} from deltic.server import downloads; downloads.PROGRAM = (sys.executable, '-c', '{quick} hub.main()');"
            "from deltic.__main__ import main; sys.exit(main(['pull', 'owner/model']))"
        )
        there = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        pulled = subprocess.run([sys.executable, "-c", code], env=os.environ | there, capture_output=True, timeout=60)
        assert b"cannot be reached (it has not answered for 0.5 s)" in pulled.stderr and pulled.returncode == 1


def test_no_server_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot connect" in told(capsys, "ps", "--url", "http://127.0.0.1:9", status=1)
