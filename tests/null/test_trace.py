"""--trace: what the engine did, as a file that loads whenever it is looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deltic.config import ConfigError
from deltic.engine import trace as tracing
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.trace import Trace
from tests.fakes import POISON, FakeRunner


def load(path: Path) -> list[dict[str, Any]]:
    """The events, as a viewer reads them: a list may end without its bracket."""
    text = path.read_text()
    assert text.startswith("[\n") and text.endswith(",\n")
    return json.loads(text[:-2] + "]")


def traced(path: Path, **runner: Any) -> Engine:
    engine = Engine(FakeRunner(**runner))
    engine.trace = Trace(path)
    return engine


def request(id: str, n_prompt: int, **params: Any) -> Request:
    return Request(
        id=id,
        prompt_ids=[20 + (len(id) + i) % 900 for i in range(n_prompt)],
        params=SamplingParams(**{"seed": 1, "ignore_eos": True} | params),
    )


def spans(events: list[dict[str, Any]], id: str) -> list[str]:
    """The phases of a sequence, in order; each ends when or before the next begins."""
    mine = sorted((e for e in events if e.get("id") == id), key=lambda e: e["ts"])  # sorted() is stable
    begun = [e["name"] for e in mine if e["ph"] == "b"]
    ended = [e["name"] for e in mine if e["ph"] == "e"]
    assert begun == ended
    return begun


def test_steps_and_requests_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = traced(path, max_step_tokens=128, max_num_seqs=3)
    engine.add(request("a", 300, max_tokens=5))
    engine.add(request("bb", 10, max_tokens=4, n=2))
    engine.add(request("ccc", 10, max_tokens=4))
    engine.add(request("dddd", 10))
    engine.abort("dddd")
    n_tokens = 0
    while engine.has_work():
        n_tokens += sum(len(output.token_ids) for output in engine.step())
    engine.close(0.0)
    events = load(path)
    steps = [e for e in events if e["name"] == "step"]
    assert len(steps) == engine.n_steps
    assert sum(s["args"]["prefill_tokens"] for s in steps) == 320
    assert steps[0]["args"] == {"decodes": 0, "prefill_tokens": 128, "prefills": ["a:0 [0, 128)"], "copies": 0}
    for name in ("plan", "run", "commit"):
        for whole, part in zip(steps, (e for e in events if e["name"] == name), strict=True):
            assert whole["ts"] - 1 <= part["ts"] <= part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 1
    assert spans(events, "a:0") == spans(events, "ccc:0") == ["queue", "prefill", "decode"]
    assert spans(events, "bb:1") == ["queue", "decode"], "it had no prefill of its own"
    assert spans(events, "dddd:0") == ["queue"]
    assert {e["args"]["running"] for e in events if e["name"] == "sequences"} >= {0, 3}
    assert all(0 <= steps[0]["ts"] - e["ts"] < 60e6 for e in events if e["ph"] == "M"), "they began just before"


def test_what_the_client_calls_a_request_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = traced(path, max_step_tokens=128, max_num_seqs=3)
    engine.add(msgspec.structs.replace(request("a", 30, max_tokens=3), labels={"request_id": "mine", "session": "s"}))
    engine.add(request("bb", 30, max_tokens=3))
    while engine.has_work():
        engine.step()
    engine.close(0.0)
    told = {(e["id"], e["name"]): e["args"] for e in load(path) if e["ph"] == "b" and "args" in e}
    assert told == {("a:0", "queue"): {"request_id": "mine", "session": "s"}}


def test_preemptions_and_failures_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = traced(path, n_pages=4, max_num_seqs=3, max_model_len=250)
    engine.add(request("a", 100, max_tokens=80))
    engine.add(request("bb", 60, max_tokens=80))
    while engine.has_work():
        engine.step()
    engine.add(Request(id="bad", prompt_ids=[POISON], params=SamplingParams()))
    engine.step()
    engine.close(0.0)
    events = load(path)
    assert (
        engine.stats().n_preemptions
        == sum(e["args"]["n"] for e in events if e["name"] == "preempted" and "args" in e)
        > 0
    )
    assert "preempted" in spans(events, "bb:0") and spans(events, "bb:0")[-1] == "decode"
    assert spans(events, "bad:0") == ["queue"]


def test_a_file_without_its_end_loads_and_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was killed, and the one that was started after it."""
    path = tmp_path / "trace.json"
    monkeypatch.setattr(tracing, "FLUSH_S", 0.0)
    for _ in range(2):
        engine = traced(path)
        engine.add(request("a", 100, max_tokens=9))
        for _ in range(4):
            engine.step()
        assert sum(e["name"] == "step" for e in load(path)) % 4 == 0
    assert sum(e["name"] == "step" for e in load(path)) == 8


def test_the_file_is_bounded_and_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_BYTES", 5000)
    monkeypatch.setattr(tracing, "FLUSH_S", 0.0)
    path = tmp_path / "trace.json"
    for where in (path, Path("/dev/full")):
        engine = traced(where)
        engine.add(request("a", 100, max_tokens=60))
        while engine.has_work():
            engine.step()
        assert engine.n_steps == 60 and not engine.trace.is_open  # type: ignore[union-attr]
        engine.close(0.0)
    assert len(load(path)) > 0 and path.stat().st_size <= 5000


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace .*nowhere"):
        Trace(tmp_path / "nowhere" / "trace.json")
