"""Microseconds of each kernel of a recorded decode: `python -m bench.gpu.profile --dummy SHAPE --n 1,128`.

Kernels of one name and one grid are one row: their number in a step, and the mean of what they take. With
programmatic launch a kernel's time has its wait for the one in front in it: `--lever pdl=off` shows what it
takes alone. Its roof, and what the step takes as it is served, are `deltic bench gpu`'s.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.flags import add_gpu_model
from bench.gpu.experiment import run_model
from deltic.bench.gpu import GpuModel, need_gpu, replay_ms, runner_of, shape_name
from deltic.bench.provenance import writer
from deltic.bench.sweep import numbers
from deltic.config import EngineConfig
from deltic.ops.gpu.launch import parse_levers
from deltic.runtime.gpu.text import GpuTextRunner

REPLAYS = 8


def kernels(runner: GpuTextRunner, n: int, n_keys: int) -> list[dict[str, Any]]:
    """The kernels of a step of n rows, those that take most in front. us: microseconds a step, of all."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            replay_ms(runner, n, n_keys, REPLAYS, 1)
            torch.cuda.synchronize()
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            grid = "x".join(str(size) for size in event["args"].get("grid", []))
            times[event["name"].split("(")[0][:48], grid].append(event["dur"])
    rows = [
        {
            "kernel": name,
            "grid": grid,
            "launches": round(len(each) / REPLAYS, 2),
            "us_each": round(sum(each) / len(each), 3),
            "us": round(sum(each) / REPLAYS, 2),
        }
        for (name, grid), each in times.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Profiles a step of each number of rows; prints a table and writes a JSON file. Raises ConfigError."""
    need_gpu(arguments.as_chip)
    sizes, levers = numbers(arguments.n, "--n", int), parse_levers(config.lever)
    model = GpuModel.load(config, arguments.format)
    engine = model.engine(levers, max(sizes))
    runner, results = runner_of(engine), []
    assert isinstance(runner, GpuTextRunner), "one GPU is profiled"
    name = shape_name(arguments, config)
    head = {"levers": arguments.lever or [], "keys": arguments.keys}
    write = writer("gpu-profile", name, engine.info.device, arguments.out, **head)
    for n in sizes:
        alone_ms = replay_ms(runner, n, arguments.keys)
        rows = kernels(runner, n, arguments.keys)
        results.append({"n": n, "alone_ms": round(alone_ms, 4), "kernels": rows})
        write(rows=results)
        total = sum(row["us"] for row in rows)
        title = f"{name}, N = {n}: {alone_ms:.3f} ms, of kernels {total / 1000:.3f} ms"
        table = Table("us a step", "launches", "us each", "grid", "kernel", title=title, title_justify="left")
        for row in rows[: arguments.rows]:
            table.add_row(
                f"{row['us']:.1f}", f"{row['launches']:g}", f"{row['us_each']:.2f}", row["grid"], row["kernel"]
            )
        Console(width=120).print(table)
    write(is_whole=True, rows=results)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=256, metavar="TOKENS", help="context of each (default: 256)")
    parser.add_argument("--rows", type=int, default=24, metavar="R", help="kernels to print (default: 24)")
    add_gpu_model(parser)
    run_model(parser, bench)


if __name__ == "__main__":
    main()
