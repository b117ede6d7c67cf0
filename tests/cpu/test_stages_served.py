"""A model on several machines as a user has it: `deltic serve --stages`, and `deltic stage` on each further machine. Machines that die or
hang are processes that are killed or stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.served import Served
from tests.staged import Stage
from tests.tiny import tiny_checkpoint
from tests.waiting import wait_for

PROMPT = "A long time ago, in a village by the sea, there lived an old woman with a grey cat. " * 6
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "n",
        "schema": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2, 3]}, "is": {"enum": ["red", "blue"]}},
            "required": ["n", "is"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    found = Stage()
    yield found
    found.close()


@pytest.fixture(scope="module")
def staged(stage: Stage) -> Iterator[Served]:
    served = Served("--stages", stage.address, "--stages-timeout-s", "1")
    yield served
    assert served.close() == 0


def ask(served: Served) -> list[Any]:
    """Answers of several kinds, with log-probabilities, of which the last has the prompt's beginning in the cache."""
    found = []
    for fields in (
        {"prompt": PROMPT, "temperature": 0},
        {"prompt": "Once", "temperature": 1.0, "seed": 3, "n": 3},
        {"prompt": PROMPT + "Every morning", "temperature": 0, "frequency_penalty": 0.5},
    ):
        (*choices,) = served.complete(max_tokens=24, logprobs=3, **fields)["choices"]
        found += [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in choices]
    answer = served.chat(temperature=0, max_tokens=40, response_format=FORM).choices[0]
    return [*found, (answer.message.content, answer.finish_reason)]


def loses(staged: Served, fault: Callable[[], None]) -> tuple[int, str]:
    """What a request is told that runs while there is a fault."""
    replies: list[tuple[int, str]] = []

    def ask_for_long() -> None:
        reply = staged.http.post("/v1/completions", json=ENDLESS)
        replies.append((reply.status_code, reply.text))

    asking = threading.Thread(target=ask_for_long)
    asking.start()
    wait_for(lambda: staged.metric("sequences_running"))
    fault()
    asking.join(30)
    (reply,) = replies
    return reply


def is_ready(served: Served) -> bool:
    return served.http.get("/health").status_code == 200


def test_answers_are_one_machines(staged: Served, served: Served) -> None:
    assert ask(staged) == (expected := ask(served))
    assert set(json.loads(expected[-1][0])) == {"n", "is"}  # masks of a grammar are told, too
    assert ask(staged) == ask(served)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_dies_or_hangs(staged: Served, served: Served, stage: Stage, by: signal.Signals) -> None:
    """Requests that run are told so, and all stages are built again."""
    wait_for(lambda: is_ready(staged))
    before = staged.engine_pid()
    status, said = loses(staged, lambda: stage.kill_worker(by))
    assert status == 503 and "the engine process ended" in said and "Send the request again" in said
    wait_for(lambda: is_ready(staged))
    assert staged.engine_pid() != before
    assert ask(staged) == ask(served)


def test_a_machine_that_goes_and_comes_back(served: Served) -> None:
    """It is missed before anybody asks. The engine waits for it."""
    stage = Stage()
    staged = Served("--stages", stage.address)
    try:
        expected = ask(served)
        assert ask(staged) == expected
        stage.close()
        wait_for(lambda: not is_ready(staged))
        assert f"a machine is lost: {stage.address} closed the connection" in staged.process.log_tail()
        again = Stage(listen=stage.address)
        try:
            wait_for(lambda: is_ready(staged))
            assert ask(staged) == expected
        finally:
            assert staged.close() == 0
            wait_for(lambda: not again.worker())
            again.close()
    finally:
        stage.close()


def refusal(*arguments: str) -> str:
    """Why a server does not start, which it says at once."""
    command = [sys.executable, "-m", "deltic", "serve", "--port", "0", "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2), done.stderr
    return done.stderr


def test_who_is_not_let_in(tmp_path: Path) -> None:
    secret, other = tmp_path / "secret", tmp_path / "other"
    secret.write_text("0123456789abcdef\n")
    other.write_text("fedcba9876543210\n")
    stage = Stage("--stages-secret", str(secret))
    try:
        flags = ("--stages", stage.address)
        assert "the secret is another one" in refusal(*flags)
        assert "the secret is another one" in refusal(*flags, "--stages-secret", str(other))
        assert "another model" in refusal(
            str(tiny_checkpoint("dense", n_layers=8)), *flags, "--stages-secret", str(secret)
        )
        assert "has none yet" in refusal(*flags, "--weights-cache", str(tmp_path))
        flags = (*flags, "--stages-secret", str(secret))
        assert "without one; give one to all machines, or to none" in refusal(
            *flags, "--cache-dir", str(tmp_path / "c")
        )
    finally:
        stage.close()


@pytest.fixture
def network() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Another machine: an address that is reached over a link between two network namespaces, and the command that is there."""
    name, link = f"deltic-{os.getpid()}", f"dl{os.getpid() % 100000}"
    # of this process alone: a run that was killed leaves its link
    own = os.getpid() % 50_000
    here, there = (f"10.213.{own // 200}.{own % 200 // 4 * 4 + i}" for i in (1, 2))
    commands = (
        f"netns add {name}",
        f"link add {link} type veth peer name {link}b netns {name}",
        f"addr add {here}/30 dev {link}",
        f"link set {link} up",
        f"-n {name} addr add {there}/30 dev {link}b",
        f"-n {name} link set {link}b up",
    )
    try:
        for command in commands:
            try:
                subprocess.run(["ip", *command.split()], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces here: ip {command}: {error}")
        yield there, ("ip", "netns", "exec", name)
    finally:
        for command in (f"link del {link}", f"netns del {name}"):
            subprocess.run(["ip", *command.split()], check=False, capture_output=True)


def test_another_network(served: Served, tmp_path: Path, network: tuple[str, tuple[str, ...]]) -> None:
    """The link goes down in a request, and comes back: nothing is said when it does."""
    there, inside = network
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    assert "reached by other machines" in refusal("--stages", f"{there}:21100")
    stage = Stage("--stages-secret", str(secret), listen=f"{there}:21100", inside=inside)
    try:
        staged = Served("--stages", stage.address, "--stages-secret", str(secret), "--stages-timeout-s", "1")
        try:
            expected = ask(served)
            assert ask(staged) == expected
            link = [*inside, "ip", "link", "set", f"dl{os.getpid() % 100000}b"]
            status, said = loses(staged, lambda: subprocess.run([*link, "down"], check=True))
            assert status == 503 and "Send the request again" in said
            subprocess.run([*link, "up"], check=True)
            wait_for(lambda: is_ready(staged), 90)
            assert ask(staged) == expected
        finally:
            assert staged.close() == 0
    finally:
        stage.close()
