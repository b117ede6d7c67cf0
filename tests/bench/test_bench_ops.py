"""`python -m bench.ops` runs every operator of the table, for the built-in shape and a small MoE."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench import ops, ops_workload
from bench.ops import Roofs, find_shape, main, measure, towers
from bench.ops_workload import Workload
from deltic.models.qwen.published import PUBLISHED
from deltic.models.vision.shape import VisionShape
from deltic.ops.contract import KernelError

pytestmark = pytest.mark.long

PEAKS = {"bf16": 1e11, "int8": 2e11, "int4": 3e11}
SMALL = {"vocab_size": 512, "hidden_size": 64, "n_experts": 16, "moe_intermediate_size": 32, "n_experts_per_tok": 2}
TOWER = {"depth": 1, "hidden_size": 128, "n_heads": 2, "intermediate_size": 96, "out_hidden_size": 64}
MIXTURE = dataclasses.replace(PUBLISHED["qwen3.5-35b-a3b"], shared_intermediate_size=32, **SMALL)


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch):
    """Nothing here depends on a weight being outside of the caches."""
    monkeypatch.setattr(ops_workload, "MAX_COPIES", 2)


def test_every_dense_operator_is_timed_and_written(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(ops, "read_bandwidth", lambda n_threads: 1e10)
    monkeypatch.setattr(ops, "multiply_peak", lambda n_threads, format: PEAKS[format])
    asked = ["--rows", "1,65", "--seconds", "0", "--out", str(tmp_path), "--quantize", "int4", "--threads", "1"]
    assert main(asked) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = json.loads(Path(line["file"]).read_text())["rows"]
    dense = {"embed", "linear", "rms_norm", "silu_mul", "gdn", "attn_prepare", "attention", "sample", "logprobs"}
    assert {row["operator"] for row in rows} == dense
    assert all(row["us"] > 0 and row["bytes"] > 0 for row in rows)
    assert {row["rows"] for row in rows if row["operator"] == "sample"} == {1}, "a chunk draws one token"
    assert line["read_gb_s"] == 10.0 and line["quantize"] == "int4" and line["threads"] == 1
    assert line["multiply_gflop_s"] == {name: peak / 1e9 for name, peak in PEAKS.items()}
    formats = {row["size"].split(" ")[0]: row["format"] for row in rows if row["operator"] == "linear"}
    assert formats.pop("head") == "int8" and set(formats.values()) == {"int4"}


def test_a_tower_is_timed_beside_its_roof() -> None:
    shape = VisionShape(**TOWER)
    roofs = Roofs(1e10, PEAKS)
    (row,) = towers(shape, [64], 1, 0.0, roofs)
    assert (row["rows"], row["size"], row["per_step"]) == (16, "64 x 64", 0)
    ideal = max(row["bytes"] / roofs.read, shape.n_operations(16) / PEAKS["bf16"])
    assert row["roof_share"] == pytest.approx(ideal / (row["us"] * 1e-6), abs=2e-3)
    assert find_shape("qwen3.5-0.8b")[2] == VisionShape.published("qwen3.5-0.8b", 1024)
    assert find_shape(None)[2] is None


def test_missing_kernels_are_one_line(capsys, monkeypatch):
    def none(n_threads: int) -> float:
        raise KernelError("no compiled kernels for this machine")

    monkeypatch.setattr(ops, "read_bandwidth", none)
    assert main([]) == 2
    assert "deltic: no compiled kernels for this machine\n" in capsys.readouterr().err


@pytest.mark.parametrize(("quantize", "bits"), [(None, 16), ("int8", 8.25), ("int4", 4.5)])
def test_experts_count_the_packed_bytes_of_those_used(quantize: str | None, bits: float):
    shape = dataclasses.replace(MIXTURE, hidden_size=256, moe_intermediate_size=128)
    rows = measure(Workload(shape, 64, 1, quantize), [1, 64], 0.0, Roofs(1e10, PEAKS))
    one, many = (row for row in rows if row["operator"] == "moe")
    weights = 3 * 128 * 256 * bits / 8
    assert 2 * weights <= one["bytes"] < 2.2 * weights
    assert 10 * weights < many["bytes"]
    (router,) = (row for row in rows if row["size"].startswith("router") and row["rows"] == 1)
    assert router["format"] == "bf16"


def test_a_row_is_held_to_the_roof_of_its_format():
    rows = measure(Workload(MIXTURE, 1, 1, "int8"), [1], 0.0, Roofs(1e20, {"bf16": 1e20, "int8": 1.0}))
    beyond = {(row["operator"], row["format"]) for row in rows if row["roof_share"] > 1.0}
    assert beyond == {("linear", "int8"), ("moe", "int8")}
