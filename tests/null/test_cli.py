"""The command line: quick, made of config.py's fields, one line for what is wrong."""

from __future__ import annotations

import ast
import asyncio
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import deltic
from deltic import __version__
from deltic.__main__ import BENCHES, COMMANDS, main, parsed, parser
from deltic.commands.endpoint import LocalServer, ServerFailed, flags, own_environment
from deltic.commands.flags import FOREIGN, SETTINGS, advice
from deltic.commands.settings import server_arguments
from deltic.config import FOR_A_CHILD, ConfigError, EngineConfig, ModelConfig, ServerConfig
from tests.fake_engine import FakeEngineClient, make_app, served

NAMES = [*COMMANDS, *(f"bench {name}" for name in BENCHES)]
"""What stands behind `deltic`."""
NEEDS = {
    "run": "run in out",
    "pack": "pack --out x",
    "say": "say hello",
    "completion": "completion bash",
    "pull": "pull a/b",
    "launch": "launch claude",
}
NEEDS |= {"show": "show a/b", "rm": "rm a/b"}
"""Commands with what they need at least."""


def test_importing_deltic_and_help_load_nothing_heavy():
    heavy = "{'torch', 'numpy', 'rich', 'asyncio', 'msgspec', 'fastapi', 'httptools'}"
    code = f"import sys, deltic, deltic.__main__ as m; m.parser(); print(sorted({heavy} & set(sys.modules)))"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout == "[]\n"


def test_a_plan_loads_nothing_of_the_server() -> None:
    """Which takes longer than the rest of it."""
    code = "import sys, deltic.commands.plan; print([name for name in sys.modules if name.startswith('deltic.server')])"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout == "[]\n"


def test_every_table_of_flags_is_a_commands_or_included() -> None:
    tables = tomllib.loads((Path(deltic.__file__).parent / "commands/flags.toml").read_text())
    included = {row[1:] for table in tables.values() for row in table if row.startswith("*")}
    assert tables.keys() - NAMES == included - SETTINGS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([*name.split(), "--help"])
    assert left.value.code == 0
    assert "usage: deltic " + name in capsys.readouterr().out


def test_the_program_alone_says_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 100
    named = {line.split()[1] for line in lines if line.startswith("  deltic ")}
    assert named <= COMMANDS.keys()


@pytest.mark.parametrize("command", [*COMMANDS.values(), *BENCHES.values()], ids=NAMES)
def test_every_command_is_where_the_table_says(command):
    """By the source: some modules import torch."""
    module, _, name = command.function.partition(":")
    source = (Path(deltic.__file__).parent / (module.replace(".", "/") + ".py")).read_text()
    assert name in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("se", {"serve"}),
        ("bench q", {"quality"}),
        ("serve --quantize ", {"fp8", "int8", "int4", "int4-symmetric"}),
        ("serve --max-model", {"--max-model-len"}),
        ("serve a-dir", {"a-directory"}),
        ("run in", {"in.jsonl"}),
    ],
)
def test_a_shell_completes_commands_flags_values_and_files(words: str, offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "a-directory").mkdir()
    (tmp_path / "in.jsonl").touch()
    script = subprocess.run([sys.executable, "-m", "deltic", "completion", "bash"], capture_output=True, check=True)
    typed = shlex.join(["deltic", *words.split(" ")])
    ask = f"COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_deltic; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", f"{script.stdout.decode()}\n{ask}"], capture_output=True, text=True, cwd=tmp_path, timeout=30
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize(("shell", "check"), [("zsh", "zsh -n"), ("fish", "fish --no-execute")])
def test_other_shells_read_their_scripts(
    shell: str, check: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    (script := tmp_path / "script").write_text(capsys.readouterr().out)
    assert "--max-model-len" in script.read_text()
    if shutil.which(shell):
        assert subprocess.run([*check.split(), str(script)], capture_output=True, timeout=30).stderr == b""


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("serv", "did you mean serve?"),
        ("dctor", "did you mean doctor?"),
        ("xyz", "deltic alone says"),
        ("ls", "deltic list lists the models"),
    ],
)
def test_a_command_that_there_is_not_is_told_what_is_near(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([word])
    assert left.value.code == 2
    assert f"there is no command '{word}'; {hint}" in capsys.readouterr().err


def test_what_is_said_of_commands_of_others_names_ours() -> None:
    lines = [line.split(" | ") for line in FOREIGN.read_text().splitlines() if not line.startswith(("#", "-"))]
    assert len(lines) >= 9 and not {word for words, _, _ in lines for word in words.split(", ")} & {*COMMANDS, "bench"}
    for _, _, said in lines:
        assert {words[1] for words in map(str.split, re.findall(r"deltic \w+", said))} <= COMMANDS.keys()


def test_the_run_of_others_is_told_to_chat(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "qwen3.5:4b", "Why is the sky blue?"])
    assert left.value.code == 2 and "To chat, give deltic chat qwen3.5:4b" in capsys.readouterr().err
    (odd := tmp_path / "in:1.jsonl").touch()
    assert parsed(["run", str(odd), "out.jsonl", "--ray=10.0.0.1:6379"]).input == str(odd)


def test_version(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"deltic {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("serve --threads 0", "--threads 0: must be from 1 to 256"),
        ("serve some-model --dummy qwen3.5-0.8b", "not both"),
        ("chat --url http://x --threads 2", "threads cannot be set"),
        ("chat --url http://x --cacert ca.pem", "--cacert ca.pem is for an https:// URL, not http://x"),
        (
            "say hello --url https://x --cacert no/such.pem",
            "--cacert no/such.pem cannot be used (No such file or directory)",
        ),
        ("run in out --cacert ca.pem", "--cacert is for a running server. Name it with --url https://..."),
        ("serve --served-model-name gpt-[x", "--served-model-name 'gpt-[x': the '[' needs a ']'"),
        ("plan --max-model-len -3", "--max-model-len -3"),
        ("bench serve --n 0", "--n '0'"),
        ("bench gpu --memory-gb 0", "--memory-gb 0.0: must be at least 0.01"),
        ("chat --url ftp://x", "'ftp://x' is not a URL of a server"),
        ("run in out --url http://h:99999", "'http://h:99999' is not a URL of a server"),
        ("bench serve --url http://[::1", "is not a URL of a server"),
        ("chat --url http://x --api-key schl\u00fcssel", "--api-key"),
        ("bench serve --shared-prefix-tokens 128", "--shared-prefix-tokens"),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(arguments, complaint, capsys):
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", [NEEDS.get(name, name) for name in NAMES])
def test_a_mistyped_variable_is_refused(name, monkeypatch, capsys):
    monkeypatch.setenv("DELTIC_THREAD", "2")
    assert main(name.split()) == 2
    assert "DELTIC_THREAD is not a setting of Deltic; did you mean DELTIC_THREADS?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "run in out", "say hello", "bench serve", "bench speech"])
def test_a_server_child_is_told_of_a_model_only_when_one_was_given(command, monkeypatch):
    """Else the child finds DELTIC_MODEL, or the built-in model, as `deltic serve` does."""
    monkeypatch.setenv("DELTIC_MODEL", "from/environment")
    assert server_arguments(parser().parse_args([*command.split(), "--threads", "2"])) == ["--threads", "2"]
    assert server_arguments(parser().parse_args([*command.split(), "--model", "m"])) == ["m"]
    monkeypatch.setenv("DELTIC_DUMMY", "qwen3.5-0.8b")
    with pytest.raises(ConfigError, match="not both"):
        server_arguments(parser().parse_args(command.split()))


@pytest.mark.parametrize(
    ("arguments", "usage", "hint"),
    [
        ("serve --prot 80", "usage: deltic serve", "--prot; did you mean --port?"),
        ("serve a --and b --tread=2", "usage: deltic serve", "--tread=2; did you mean --threads?"),
        ("bench quality --text 5 --zzzz", "usage: deltic bench quality", "arguments: --zzzz\n"),
        ("version x", "usage: deltic version", "arguments: x\n"),
        ("bench ablate --dummy x", "usage: deltic", "python -m bench.gpu.ablate, in a copy of the repository"),
        ("bench allreduce", "usage: deltic", "python -m bench.gpu.allreduce, in a copy of the repository"),
    ],
)
def test_a_mistyped_flag_is_told_with_the_nearest(arguments, usage, hint, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments.split())
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.startswith(usage) and hint in error


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("serve m --tp 2", "there is no --tp here: give --tensor-parallel N"),
        ("serve m --tensor-parallel-size=2", "give --tensor-parallel N"),
        ("serve m --enable-prefix-caching", "not needed: it is on"),
        ("serve m --dtype auto", "not needed: weights run as they are stored"),
        ("serve -hf owner/model:Q4_K_M", "give the model without a flag"),
        ("serve --model owner/model", "give the model without a flag"),
        ("serve m --ctx-size 4096", "give --max-model-len TOKENS"),
        ("serve m -c 4096", "give --max-model-len TOKENS"),
        ("serve m --cpu", "give --device cpu"),
        ("serve m --parallel 4", "give --max-num-seqs N"),
        ("serve m -ngl 99", "stays outside the GPU by itself"),
        ("serve m --n-cpu-moe 20", "--expert-memory GB says how much of them is there"),
        ("serve a --and b --trust-remote-code", "no code of a checkpoint is ever run"),
        ("serve m --ep 2", "--tensor-parallel shares the experts out"),
        ("serve m --schedule-policy lpm", "keys take turns"),
        ("plan m --gpu-memory-utilization 0.9", "give --memory-gb GB"),
        ("bench serve --context-length 9", "give --max-model-len TOKENS"),
    ],
)
def test_flags_of_other_servers_are_told_what_to_do_here(arguments, hint, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments.split())
    assert left.value.code == 2 and hint in capsys.readouterr().err


def test_advice_for_foreign_flags_names_flags_that_there_are():
    top = parser()
    (commands,) = (action.choices for action in top._actions if action.dest == "==SUPPRESS==" or action.choices)
    own = set(commands["serve"]._option_string_actions)
    lines = [line.split(" | ") for line in FOREIGN.read_text().splitlines() if not line.startswith("#")]
    foreign = [flag for flags, _, _ in lines for flag in flags.split(", ")]
    assert len(lines) >= 60 and len(foreign) == len(set(foreign)) and not own & set(foreign)
    known = own | set(commands["chat"]._option_string_actions)
    for named, whose, said in lines:
        assert set(whose.split(", ")) <= {"vLLM", "SGLang", "llama.cpp", "Ollama", "LM Studio"}, named
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", said)) <= known, said
        assert advice(named.split(", ")[-1]) == said
    assert advice("--no-such-flag") == ""


def test_a_part_of_a_flag_is_not_the_flag(capsys):
    """Else `--tp` would be `--tp-invariant`, and a new flag could change what an old command line means."""
    for words in ("serve --max-model 8", "bench serve --requests-per 3", "bench --hel"):
        with pytest.raises(SystemExit) as left:
            main(words.split())
        assert left.value.code == 2
    assert "did you mean --max-model-len?" in capsys.readouterr().err


def test_a_server_with_keys_asks_for_one(capsys, tmp_path):
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    with served(make_app(FakeEngineClient(), api_key=("secret",))) as url:
        assert main(["run", str(tmp_path / "in"), str(tmp_path / "out"), "--url", url]) == 1
    error = capsys.readouterr().err
    assert "--api-key" in error and "--model" not in error


def test_flags_of_a_child_are_the_flags_given():
    given = vars(parser().parse_args(["chat", "m", "--threads", "2", "--memory-gb", "1.5"]))
    assert flags(EngineConfig, {"threads": 2, "memory_gb": 1.5}) == ["--threads", "2", "--memory-gb", "1.5"]
    assert (given["model"], given["threads"], given["memory_gb"]) == ("m", 2, 1.5)
    assert flags(ServerConfig, {"api_key": ("a", "b")}) == ["--api-key", "a", "--api-key", "b"]


def test_a_child_keeps_what_shapes_answers_and_nothing_that_is_the_main_servers(monkeypatch):
    names = {field.name.upper() for cls in (EngineConfig, ModelConfig, ServerConfig) for field in fields(cls)}
    for name in names | {"CONFIG"}:
        monkeypatch.setenv(f"DELTIC_{name}", "x")
    monkeypatch.setenv("DELTIC_THREAD", "a typo, which the child will tell of")
    kept = {name.removeprefix("DELTIC_") for name in own_environment() if name.startswith("DELTIC_")}
    assert kept >= {"MODEL", "THREADS", "CACHE_DIR", "VOICE_ALIAS", "MAX_QUEUE", "DEFAULT_MAX_TOKENS", "THREAD"}
    assert names - kept == {
        "ALLOW_PULL", "API_KEY", "API_KEY_FILE", "BATCH_DIR", "BATCH_DISK_GB", "BATCH_IN_FLIGHT", "CORS_ORIGIN", "HOST",
        "KEEP_ALIVE", "KV_EVENTS", "KV_EVENTS_REPLAY", "KV_EVENTS_TOPIC", "LOAD_TIMEOUT_S", "MAX_CONCURRENT_PER_KEY",
        "METRICS_NAMES", "MODELS_FROM", "MODELS_GB", "PORT", "ROOT_PATH", "SHARE_CACHE", "SSL_CA_CERTS", "SSL_CERTFILE", "SSL_KEYFILE", "SSL_KEYFILE_PASSWORD", "TOKENS_PER_MINUTE_PER_KEY", "TRACE", "UDS",
    }  # fmt: skip
    assert "CONFIG" not in kept and not FOR_A_CHILD - {field.name for field in fields(ServerConfig)}


def test_a_server_that_cannot_start_says_why():
    server = LocalServer(["--threads", "0"])
    assert server.api_key not in " ".join(server.process.args), "every user may read a command line"
    with pytest.raises(ServerFailed, match="must be from 1 to 256"):
        asyncio.run(server.wait_ready(timeout_s=20))
    assert server.stop() == 2
