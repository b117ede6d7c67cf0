"""The short form of the soak, against the built-in model: `make soak` runs the same for half an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_speech import tiny_speech


def test_seconds_of_random_traffic_break_no_promise(tmp_path: Path):
    command = [sys.executable, "-m", "bench.soak", "--minutes", "0.1", "--kill-engine", "0.05"]
    command += ["--serve-args", "--max-drafts 8", "--against", "--max-drafts 0"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=400)
    assert done.stdout, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    assert line["violations"] == 0
    assert line["requests"] > 100
    kinds = json.loads(Path(line["file"]).read_text())["kinds"]
    assert kinds["compared with the other server"] > 5 and kinds["answered with the help of drafts"] > 5
    assert line["kills"] >= 1


@pytest.mark.long
def test_seconds_of_everything_at_once_break_no_promise(tmp_path: Path):
    command = [sys.executable, "-m", "bench.soak", "--with", "drafts,pictures,adapters,formats,grammars"]
    command += ["--against", "--max-drafts 0", "--minutes", "0.5", "--clients", "6", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.stdout, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and line["violations"] == 0, done.stdout
    kinds = json.loads(Path(line["file"]).read_text())["kinds"]
    for what in (
        "with pictures",
        "with an adapter",
        "with a grammar",
        "answered with the help of drafts",
        "compared with the other server",
    ):
        assert kinds[what] > 0, what


@pytest.mark.long
def test_seconds_of_random_speech_break_no_promise(tmp_path: Path):
    """`make soak-speech` runs the same for twenty minutes."""
    command = [sys.executable, "-m", "bench.soak", str(tiny_speech("custom_voice")), "--speech"]
    options = ["--minutes", "0.15", "--clients", "16", "--out", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200)
    assert done.stdout, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    assert line["violations"] == 0
    assert line["requests"] > 30
