"""`deltic bench ops` runs every operator of the table, for the built-in shape and a small MoE."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from deltic.__main__ import main
from deltic.bench import ops
from deltic.bench.ops import Workload, measure
from deltic.models.shapes import PUBLISHED
from deltic.ops.table import OPERATORS, KernelError

ROOFS = (1e10, 1e11)


def test_every_dense_operator_is_timed_and_written(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(ops, "read_bandwidth", lambda n_threads: ROOFS[0])
    monkeypatch.setattr(ops, "multiply_peak", lambda n_threads: ROOFS[1])
    assert main(["bench", "ops", "--rows", "1,65", "--seconds", "0", "--out", str(tmp_path)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = json.loads(Path(line["file"]).read_text())["rows"]
    assert {row["operator"] for row in rows} == set(OPERATORS) - {"moe"}
    assert all(row["us"] > 0 and row["bytes"] > 0 for row in rows)
    assert {row["rows"] for row in rows if row["operator"] == "sample"} == {1}, "a chunk draws one token"
    assert line["read_gb_s"] == 10.0


def test_missing_kernels_are_one_line(capsys, monkeypatch):
    def none(n_threads: int) -> float:
        raise KernelError("no compiled kernels for this machine")

    monkeypatch.setattr(ops, "read_bandwidth", none)
    assert main(["bench", "ops"]) == 2
    assert "deltic: no compiled kernels for this machine\n" in capsys.readouterr().err


def test_experts_count_the_bytes_of_those_used():
    small = {
        "vocab_size": 512,
        "hidden_size": 64,
        "n_experts": 16,
        "moe_intermediate_size": 32,
        "n_experts_per_tok": 2,
    }
    shape = dataclasses.replace(PUBLISHED["qwen3.5-35b-a3b"], shared_intermediate_size=32, **small)
    rows = measure(Workload(shape, 64, 1), [1, 64], 0.0, ROOFS)
    one, many = (row for row in rows if row["operator"] == "moe")
    weights = 6 * 32 * 64
    assert 2 * weights <= one["bytes"] < 3 * weights
    assert 10 * weights < many["bytes"]
