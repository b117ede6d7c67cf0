"""Each operator at a model's shapes, beside what the machine can do at best:
`python -m bench.ops qwen3.5-0.8b`.

Up to 64 rows are that many decodes, each with 1,024 tokens behind it; more rows are one prefill chunk of
one sequence with as much behind it. Weights are copied until they fit into the caches no better than
the whole model's; a time is the best of many. Bytes are those that must move at least once: the
weights, the state or pages, and each activation in and out. The roof of a row is the larger of its bytes
over the read bandwidth and its operations over the multiply peak of its weights' format. "x" is how often
a step runs the operator. A model's vision tower, in bfloat16, encodes square pictures; its rows are patches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.flags import add_some
from bench.ops_workload import MAX_DECODES, Workload, allocate
from deltic.__main__ import finished
from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.bench.sweep import numbers
from deltic.commands import settings
from deltic.config import BUILT_IN, EngineConfig
from deltic.machine import n_usable_cpus
from deltic.models.checkpoint import locate, model_name
from deltic.models.loading import format_of
from deltic.models.qwen.published import PUBLISHED
from deltic.models.qwen.shape import ModelShape
from deltic.models.vision.cpu import VisionForward, VisionTower, allocate_vision
from deltic.models.vision.shape import PATCH_SIZE, PATCH_WIDTH, VisionShape
from deltic.models.vision.weights import VisionWeights, dummy_vision, stored_vision_shape
from deltic.ops.arrays import Array
from deltic.ops.cpu.program import instruction_set
from deltic.roofs import multiply_peak, read_bandwidth


@dataclass(frozen=True)
class Roofs:
    """What the machine can do at best: bytes a second, and operations a second by format."""

    read: float
    multiply: dict[str, float]

    @classmethod
    def measured(cls, n_threads: int, quantize: str | None) -> Roofs:
        """In bfloat16, and in what a model so quantised has besides."""
        formats = ["bf16", format_of("plain", quantize).name, format_of("sensitive", quantize).name]
        read = read_bandwidth(n_threads)
        return cls(read, {name: multiply_peak(n_threads, name) for name in dict.fromkeys(formats)})


def best_s(run: Callable[[], object], seconds: float) -> float:
    """The shortest of as many runs as fit into `seconds`, at least three, after one that does not count."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def cpu_tower(
    shape: VisionShape, weights: VisionWeights, rows: int, patches: Array, n_threads: int
) -> Callable[[], None]:
    """What encodes a picture of rows x rows patches, float32 [rows * rows, PATCH_WIDTH]."""
    n = len(patches)
    buffers = allocate_vision(shape, n, 1, min(n, 512), allocate)
    forward = VisionForward(VisionTower(shape, weights, buffers), n_threads)

    def run() -> None:
        for _ in forward.run([patches], [(1, rows, rows)]):
            pass

    return run


def towers(shape: VisionShape, sides: list[int], n_threads: int, seconds: float, roofs: Roofs) -> list[dict[str, Any]]:
    """A row for each side of a square picture, in pixels: the vision tower with random weights. Bytes are
    those of its weights.
    """
    weights, found, draw = dummy_vision(shape), [], np.random.default_rng(0)
    for side in sides:
        rows = side // PATCH_SIZE
        patches = draw.uniform(-1, 1, (rows * rows, PATCH_WIDTH)).astype(np.float32)
        took = best_s(cpu_tower(shape, weights, rows, patches, n_threads), seconds)
        n_operations, n_bytes = shape.n_operations(rows * rows), weights.n_bytes
        found.append(
            _row(
                operator="vision tower",
                size=f"{side} x {side}",
                format="bf16",
                per_step=0,
                rows=rows * rows,
                took=took,
                n_bytes=n_bytes,
                n_operations=n_operations,
                roof=max(n_bytes / roofs.read, n_operations / roofs.multiply["bf16"]),
            )
        )
    return found


def _row(*, took: float, n_bytes: float, n_operations: float, roof: float, **what: Any) -> dict[str, Any]:
    """took, roof: seconds."""
    return what | {
        "us": round(took * 1e6, 2),
        "bytes": int(n_bytes),
        "gb_s": round(n_bytes / took / 1e9, 2),
        "gflop_s": round(n_operations / took / 1e9, 2),
        "roof_share": round(roof / took, 3),
    }


def measure(workload: Workload, rows: list[int], seconds: float, roofs: Roofs) -> list[dict[str, Any]]:
    """A row for each operator and row count."""
    found = []
    for case in workload.cases():
        for m in rows:
            if case.decodes_only and m > MAX_DECODES:
                continue
            workload.fill(m)
            took = best_s(case.program.run, seconds) / case.n_calls
            n_bytes, n_operations = case.n_bytes(m), case.n_operations(m)
            roof = max(n_bytes / roofs.read, n_operations / roofs.multiply[case.format])
            found.append(
                _row(
                    operator=case.name,
                    size=case.size,
                    format=case.format,
                    per_step=case.n_per_step,
                    rows=m,
                    took=took,
                    n_bytes=n_bytes,
                    n_operations=n_operations,
                    roof=roof,
                )
            )
    return found


def table(results: list[dict[str, Any]], title: str) -> Table:
    """The rows for people."""
    out = Table(title=title, title_justify="left")
    out.add_column("operator")
    out.add_column("size")
    for name in ("x", "rows", "us", "GB/s", "Gop/s", "of roof"):
        out.add_column(name, justify="right")
    last: tuple[str, str] | None = None
    for row in results:
        key = (row["operator"], row["size"])
        if last is not None and key != last:
            out.add_section()
        head = ("", "", "") if key == last else (*key, str(row["per_step"]))
        flops = f"{row['gflop_s']:.1f}" if row["gflop_s"] else "-"
        shown = (str(row["rows"]), f"{row['us']:.1f}", f"{row['gb_s']:.1f}", flops, f"{row['roof_share']:.0%}")
        out.add_row(*head, *shown)
        last = key
    return out


def find_shape(name: str | None) -> tuple[str, ModelShape, VisionShape | None]:
    """The name, shape and tower of a published model, a checkpoint, or the built-in model. Raises the
    loader's ValueErrors.
    """
    is_published = name is not None and name.lower() in PUBLISHED
    config = EngineConfig(dummy=name) if is_published else EngineConfig(model=name or BUILT_IN)
    directory, shape = locate(config)
    tower = VisionShape.published(config.dummy, shape.hidden_size) if config.dummy else stored_vision_shape(directory)
    return model_name(config), shape, None if tower is None else replace(tower, formats={})


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Measures, prints a table and a last line of JSON, and writes a JSON file; 0. config: its threads and
    quantize count.
    """
    n_threads, quantize = config.threads or n_usable_cpus(), config.quantize
    rows = sorted(numbers(arguments.rows, "--rows", int))
    name, shape, tower = find_shape(arguments.shape)
    console = Console(stderr=True)
    with console.status("measuring the machine"):
        roofs = Roofs.measured(n_threads, quantize)
    with console.status(f"measuring the operators of {name}"):
        workload = Workload(shape, max(rows), n_threads, quantize)
        results = measure(workload, rows, arguments.seconds, roofs)
        if tower is not None:
            sides = numbers(arguments.pictures, "--pictures", int)
            results += towers(tower, sides, n_threads, arguments.seconds, roofs)
    step_ms = {
        m: round(sum(r["us"] * r["per_step"] for r in results if r["rows"] == m) / 1e3, 3)
        for m in rows
        if m <= MAX_DECODES
    }
    head = {
        "bench": "ops",
        "shape": name,
        "date": now().isoformat(),
        "machine": machine(),
        "code": code(),
        "threads": n_threads,
        "instructions": instruction_set(),
        "quantize": quantize,
        "read_gb_s": round(roofs.read / 1e9, 1),
        "multiply_gflop_s": {name: round(peak / 1e9, 1) for name, peak in roofs.multiply.items()},
        "decode_step_ms": step_ms,
    }
    directory = runs_directory(arguments.out)
    path: Path = directory / f"ops-{name}-{quantize or 'bf16'}-{now():%H%M%S}.json"
    path.write_text(json.dumps(head | {"rows": results}, indent=1) + "\n")
    title = (
        f"{name} in {quantize or 'bf16'} on {n_threads} threads, {instruction_set()}: memory reads {roofs.read / 1e9:.1f} "
        f"GB/s, multiplies {', '.join(f'{peak / 1e9:.0f} Gop/s in {name}' for name, peak in roofs.multiply.items())}"
    )
    Console(width=None if sys.stdout.isatty() else 120).print(table(results, title))
    for m, took in step_ms.items():
        print(f"a step of {m} decodes, from the table: {took:.2f} ms, {1e3 * m / took:.0f} tok/s")
    print(json.dumps(head | {"file": str(path)}))
    return 0


def main(given: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        "python -m bench.ops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    text = "published shape or checkpoint (default: the built-in model)"
    add("shape", nargs="?", metavar="SHAPE", help=text)
    add("--rows", default="1,4,16,64,512", help="row counts (default: 1,4,16,64,512)")
    add("--pictures", default="256,512", help="sides of pictures, where there is a tower (default: 256,512)")
    add("--seconds", type=float, default=0.3, help="time spent on each measurement (default: 0.3)")
    add("--out", metavar="DIR", help="write the JSON result into this directory")
    add_some(parser, "quantize", "threads")
    arguments = parser.parse_args(given)
    return finished(lambda: bench(arguments, settings.engine(arguments)))


if __name__ == "__main__":
    sys.exit(main())
