"""An engine that hangs, as a user meets it: the built-in model, whose process is stopped, or whose disk gives nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served import Served
from tests.waiting import wait_for

PROMPT = "A long time ago, in a village by the sea, there lived an old woman with a grey cat. " * 12
TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def served(cache_dir: Path) -> Iterator[Served]:
    served = Served("--cache-dir", str(cache_dir), "--engine-timeout-s", str(TIMEOUT_S))
    yield served
    assert served.close() == 0


def ask(served: Served) -> tuple[int, str]:
    reply = served.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    return reply.status_code, reply.json()["choices"][0]["text"] if reply.status_code == 200 else reply.text


def files(directory: Path, kind: str) -> list[Path]:
    return list(directory.rglob(f"*.{kind}"))


def test_an_engine_that_hangs_is_started_again(served: Served, cache_dir: Path) -> None:
    expected, pid = ask(served), served.engine_pid()
    wait_for(lambda: files(cache_dir, "state") and files(cache_dir, "page"))

    os.kill(pid, signal.SIGSTOP)
    answers: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(served)))
    asking.start()
    wait_for(lambda: served.http.get("/health").status_code == 503)
    assert "has not answered for 1 s" in served.http.get("/health").json()["message"]
    asking.join(20)
    ((status, said),) = answers
    assert status in (500, 503) and "has not answered for 1 s (--engine-timeout-s) and was ended" in said
    assert "has not answered for 1 s" in served.process.log_tail()
    wait_for(lambda: served.http.get("/health").status_code == 200)
    assert served.engine_pid() != pid

    # What it computed is on disk only now; who opens a pipe to read waits until somebody writes.
    kept = {file: file.read_bytes() for file in files(cache_dir, "page")}
    for file in kept:
        file.unlink()
        os.mkfifo(file)
    status, said = ask(served)
    assert status in (500, 503) and "has got nothing from --cache-dir for 1 s" in said
    for file, content in kept.items():
        file.unlink()
        file.write_bytes(content)
    wait_for(lambda: served.http.get("/health").status_code == 200)
    assert ask(served) == expected
