"""`deltic launch` and `deltic agents`, with programs that say what they were started with in the place of agents."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltic.__main__ import main
from deltic.commands import agents, endpoint
from deltic.commands.endpoint import free_port
from tests.fake_engine import FakeEngineClient, make_app, served

TARGET = agents.ServerFacts("http://127.0.0.1:1", "a-key", 'a"model', 65_536)


@pytest.fixture
def url() -> Iterator[str]:
    with served(make_app(FakeEngineClient(max_model_len=131_072, n_pages=2048))) as url:
        yield url


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs named as agents, which write down their words and variables, and end with status 7."""
    for agent in agents.known().values():
        program = tmp_path / agent.command[0]
        program.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"json.dump([sys.argv[1:], dict(os.environ)], open({str(tmp_path / 'seen')!r}, 'w'))\nsys.exit(7)\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def seen(programs: Path) -> tuple[list[str], dict[str, str]]:
    words, variables = json.loads((programs / "seen").read_text())
    return words, variables


@pytest.mark.parametrize("name", agents.known())
def test_a_table_says_all_and_keeps_the_key_off_the_command_line(name: str) -> None:
    agent = agents.known()[name]
    assert agent.needs >= 16_384 > 0 <= agent.first < agent.needs and agent.api.startswith("/v1/") and agent.install
    words, variables = agents.words(agent, TARGET, []), agents.settings(agent, TARGET)
    assert "a-key" not in " ".join(words) and "a-key" in variables.values() and "$" not in " ".join(variables.values())
    assert any(TARGET.url in text for text in (*words, *variables.values()))
    for word, given in itertools.pairwise(words):
        if word == "-c":
            assert tomllib.loads(given)
    for text in variables.values():
        if text.startswith("{"):
            (model,) = json.loads(text)["provider"]["deltic"]["models"].values()
            assert model == {"name": 'a"model', "limit": {"context": 65_536, "output": 16_384}}


def test_an_agent_is_started_with_what_it_needs(
    url: str, programs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of somebody else")
    assert main(["launch", "claude", "--url", url, "--", "-p", "--max-turns", "2"]) == 7
    words, variables = seen(programs)
    assert words == ["-p", "--max-turns", "2"] and "ANTHROPIC_API_KEY" not in variables
    assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_MODEL"]) == (url, "fake")
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    said = capfd.readouterr().err
    assert said.startswith(f"Claude Code with fake at {url}, context 131,072 tokens")
    assert f"ANTHROPIC_BASE_URL={url}" in said and "claude -p --max-turns 2" in said
    assert main(["launch", "goose", "--url", url]) == 7
    assert seen(programs)[0] == ["session"]


def test_a_server_that_runs_is_found(
    url: str, programs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DELTIC_PORT", url.rpartition(":")[2])
    assert main(["launch", "mini"]) == 7
    assert seen(programs)[1]["OPENAI_API_BASE"] == f"{url}/v1"
    monkeypatch.setenv("DELTIC_PORT", str(free_port()))
    assert main(["launch", "mini"]) == 1
    assert "no server is ready at http://127.0.0.1:" in capfd.readouterr().err


def test_one_is_started_with_room_and_stopped(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import http.server, json, os, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        card = {'id': 'm', 'context_length': int(sys.argv[sys.argv.index('--max-model-len') + 1])}\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "        self.wfile.write(json.dumps({'data': [card]}).encode())\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), Handler).serve_forever()\n"
    )
    monkeypatch.setattr(endpoint, "PROGRAM", (sys.executable, "-c", program))
    assert main(["launch", "claude", "--dummy", "qwen3.5-0.8b"]) == 7
    variables = seen(programs)[1]
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536" and len(variables["ANTHROPIC_AUTH_TOKEN"]) > 16
    with pytest.raises(ConnectionRefusedError):
        _connect(variables["ANTHROPIC_BASE_URL"])
    assert main(["launch", "aider", "--dummy", "qwen3.5-0.8b", "--max-model-len", "20000"]) == 7
    assert main(["launch", "claude", "--dummy", "qwen3.5-0.8b", "--max-model-len", "20000"]) == 1
    assert main(["launch", "claude", "--dummy", "qwen3.5-0.8b", "--max-model-len", "32768"]) == 7  # with a warning


def _connect(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    socket.create_connection((host, int(port))).close()


def test_what_stands_in_the_way_is_said(
    programs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(make_app(FakeEngineClient())) as url:
        assert main(["launch", "claude", "--url", url]) == 1
        said = capfd.readouterr().err
        assert "Claude Code needs a context of 65,536 tokens (its first prompt alone has about " in said
        assert "and the server has 1,024. Start it with --max-model-len 65536" in said
        assert main(["agents", "claude", "--url", url]) == 0
        assert "\n# Claude Code needs a context of 65,536 tokens" in capfd.readouterr().out
    assert main(["launch", "clade", "--url", url]) == 2
    assert "'clade' is no agent of deltic launch; did you mean claude?" in capfd.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "claude", "--url", url]) == 1
    assert "claude is not installed. Install it: npm install -g @anthropic-ai/claude-code" in capfd.readouterr().err


def test_the_lines_that_are_printed_start_it(url: str, programs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in agents.known():
        assert main(["agents", name, "--url", url, "--api-key", "a key's"]) == 0
        lines = capfd.readouterr().out
        assert subprocess.run(["sh"], input=lines, text=True, check=False).returncode == 7, lines
        words, variables = seen(programs)
        target = agents.ServerFacts(url, "a key's", "fake", 131_072)
        assert words == agents.words(agents.known()[name], target, [])[1:]
        assert agents.settings(agents.known()[name], target).items() <= variables.items()


def test_a_message_of_the_server_is_no_line_of_the_shell(
    programs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object) -> agents.ServerFacts:
        raise endpoint.EndpointError("no\nmodel\rhere\x1b[1m")

    monkeypatch.setattr(agents, "target_of", refused)
    assert main(["agents", "claude"]) == 0
    assert "\n# no model here[1m Below," in capfd.readouterr().out


def test_the_list(capfd: pytest.CaptureFixture[str], programs: Path) -> None:
    assert main(["agents"]) == 0
    said = capfd.readouterr().out
    for name, agent in agents.known().items():
        assert re.search(rf"^{name} +{agent.name} +{agent.needs:,}  installed$", said, re.MULTILINE), said
    assert main(["agents", "codex", "--url", f"http://127.0.0.1:{free_port()}"]) == 0
    assert "cannot connect" in capfd.readouterr().out
