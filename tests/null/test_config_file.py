"""--config: the same settings as the flags, from TOML or YAML, below the command line and the environment."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from deltic.__main__ import main
from deltic.config import EngineConfig, ModelConfig, ServerConfig

TOML = """
model = "a"
port = 8080
max_num_seqs = 4
memory-gb = 12
prefix-cache = false
served-model-name = ["chat", "gpt-*"]
api-key = "one"
cache-dir = "/var/cache/deltic"

[[and]]
dummy = "qwen3-tts-0.6b"
served-model-name = "voice"
threads = 1

[[and]]
model = "c"
"""
YAML = """
model: a
port: "8080"
max_num_seqs: 4
memory-gb: 12
prefix-cache: off
served-model-name: [chat, gpt-*]
api-key: one
cache-dir: /var/cache/deltic
and:
- {dummy: qwen3-tts-0.6b, served-model-name: voice, threads: 1}
- model: c
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve` is called with."""
    from deltic.server import serve

    calls: list[Any] = []
    monkeypatch.setattr(serve, "serve", lambda *given: calls.extend(given))
    return calls


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML)])
def test_flags_over_variables_over_the_file(
    name: str, text: str, tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    file.write_text(text)
    monkeypatch.setenv("DELTIC_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("DELTIC_PORT", "81")
    assert main(["serve", "--config", str(file), "--port", "82", "--quantize", "int8"]) == 0
    models, config = started
    assert config == ServerConfig(port=82, api_key=("one",))
    engine = EngineConfig(
        model="a", quantize="int8", memory_gb=12.0, prefix_cache=False, max_num_seqs=5, cache_dir=Path("/var/cache/deltic")
    )  # fmt: skip
    assert models == [
        (engine, ModelConfig(served_model_name=("chat", "gpt-*"))),
        (EngineConfig(dummy="qwen3-tts-0.6b", threads=1, max_num_seqs=5), ModelConfig(served_model_name=("voice",))),
        (EngineConfig(model="c", max_num_seqs=5), ModelConfig()),
    ]  # fmt: skip


def test_a_variable_names_the_file_and_the_line_another_model(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.toml"
    file.write_text('model = "a"\nthreads = 2')
    monkeypatch.setenv("DELTIC_CONFIG", str(file))
    assert main(["serve", "b", "--and", "c"]) == 0
    assert [engine for engine, _ in started[0]] == [EngineConfig(model="b", threads=2), EngineConfig(model="c")]


@pytest.mark.parametrize(
    ("text", "words", "complaint"),
    [
        ("prot = 80", "", "prot is not a setting of Deltic; did you mean port?"),
        ("gpu-memory = 80", "", "gpu-memory is not a setting of Deltic; "),
        ("tensor_parallel_size = 2", "", "tensor_parallel_size is not a setting of Deltic; give --tensor-parallel N"),
        ("zzzz = 80", "", "deltic serve --help lists them"),
        ("port = true", "", "port = True: expected int"),
        ('port = "abc"', "", "a.toml: port = 'abc': expected int"),
        ("port = 80.5", "", "port = 80.5: expected int"),
        ("port = 70000", "", "a.toml: port 70000: must be from 0 to 65535"),
        ("port = [80]", "", "port = [80]: expected int"),
        ('prefix-cache = "maybe"', "", "prefix-cache = 'maybe': expected on or off"),
        ("prefix-cache = 1", "", "prefix-cache = 1: expected on or off"),
        ("cache-dir = 5", "", "cache-dir = 5: expected a path"),
        ('api-key = [""]', "", "has an empty value"),
        ("max_n = 1\nmax-n = 2", "", "max-n is there twice"),
        ("[[and]]\nthreads = 1", "", "each table of 'and' needs a model"),
        ('[[and]]\nmodel = "b"\nport = 80', "", "port is the whole server's. Put it at the top"),
        ('and = "b"', "", "'and' must be a list of tables"),
        ('[[and]]\nmodel = "b"', "--and c", "Give them in one place"),
        ('config = "b"', "", "config is not a setting"),
        ("model", "", "--config"),
        ("threads = 1", "--and b --config {file}", "--config is the whole server's"),
    ],
)
def test_a_wrong_file_is_told(
    text: str, words: str, complaint: str, tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    file = tmp_path / "a.toml"
    file.write_text(text)
    assert main(["serve", "--config", str(file), *words.format(file=file).split()]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert not started


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.yaml", "- a", "expected settings, each a name with its value"),
        ("a.yaml", "a: [", "--config"),
        ("a.yaml", "port: 80\nport: 81", "port is there twice"),
        ("a.yaml", "and:\n- {model: a, threads: 1, threads: 2}", "threads is there twice"),
        ("a.yaml", "threads:", "threads = None: expected int"),
        ("a.yaml", "5: 5", "5 is not a setting"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a.json", "{}", "expected a file called .toml, .yaml or .yml"),
        ("a.toml", None, "cannot be read (No such file"),
        ("a.toml", b"\xff", "utf-8"),
    ],
)
def test_a_file_that_is_none(
    name: str, text: str | bytes | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["plan", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_plan_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fit = types.ModuleType("deltic.commands.plan")
    fit.report = lambda config, *_: f"{config.max_num_seqs} sequences"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deltic.commands.plan", fit)
    file = tmp_path / "a.toml"
    file.write_text('max-num-seqs = 3\nport = 80\nserved-model-name = "x"')
    assert main(["plan", "--config", str(file)]) == 0
    assert "3 sequences" in capsys.readouterr().out
    file.write_text('[[and]]\nmodel = "b"')
    assert main(["plan", "--config", str(file)]) == 2
    assert "about one model" in capsys.readouterr().err


def test_an_empty_file_says_nothing(tmp_path: Path, started: list[Any]) -> None:
    for name in ("a.yaml", "a.toml"):
        (tmp_path / name).write_text("# nothing\n")
        assert main(["serve", "--config", str(tmp_path / name)]) == 0
