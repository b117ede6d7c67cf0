"""`python -m bench.stalls` with the built-in model, and the trace of its server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import stalls

pytestmark = pytest.mark.long


def test_gaps_beside_prompts_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "ALONE_S", 0.3)
    trace = tmp_path / "trace.json"
    load = f"--n 3 --prompts 2 --prompt-tokens 700 --out {tmp_path}".split()
    server = f"--device cpu --max-model-len 1024 --trace {trace}".split()
    assert stalls.main(["--targets", "1", *load, *server]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = last["rows"]
    assert row["fit_s"] > 0 and 0 <= row["alone_ms"]["p50"] <= row["beside_ms"]["max"]
    (whole,) = json.loads(Path(last["file"]).read_text())["rows"]
    events = json.loads(trace.read_text()[:-2] + "]")
    mixed = [
        e["args"] for e in events if e["name"] == "step" and e["args"]["decodes"] and e["args"]["prefill_tokens"]
    ]  # fmt: skip
    assert max(step["prefill_tokens"] for step in mixed) == 64, "a target that cannot be met: the floor"
    assert len(whole["gaps"]) >= 2 * 700 // 64 and Path(last["plot"]).stat().st_size > 10_000
