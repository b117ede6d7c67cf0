"""What the experiments share: timing by recorded graphs, and a report that survives a part that fails."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from deltic.__main__ import finished
from deltic.bench.provenance import code, machine, now
from deltic.commands import settings
from deltic.config import EngineConfig

DEVICE = "cuda"


def graph_us(step: Callable[[], None], n: int = 1, n_replays: int = 15) -> float:
    """Median microseconds of one n-th of `step`, recorded once as a CUDA graph and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles, and lets the libraries allocate
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    times = []
    for i in range(n_replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times)) / n


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype agree in every bit (NaNs included)."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def parser(text: str | None = None) -> argparse.ArgumentParser:
    """With the flag that all experiments have."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, metavar="DIR", help="write the result into this directory, as JSON")
    return made


def run(
    name: str, parts: Mapping[str, Callable[[Callable[..., None]], None]], arguments: argparse.Namespace | None = None
) -> None:
    """Runs each part with a `row(**cells)` function that prints a line and keeps it; --out DIR gets
    NAME.json. arguments: of a `parser` with flags of its own.
    """
    arguments = arguments or parser().parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "experiment": name,
        "date": now().isoformat(),
        "machine": machine(),
        "code": code(),
        "torch": torch.__version__,
        "rows": [],
        "failed": {},
    }
    result["flags"] = {flag: str(value) for flag, value in vars(arguments).items() if flag != "out"}
    if torch.cuda.is_available():
        result["device"] = torch.cuda.get_device_name()
    for part, body in parts.items():

        def row(part: str = part, **cells: Any) -> None:
            result["rows"].append({"part": part, **cells})
            shown = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in cells.items())
            print(f"{name} {part}: " + "  ".join(shown), flush=True)

        begin = time.perf_counter()
        try:
            body(row)
        except Exception as error:
            last = traceback.format_exception_only(error)[-1].strip().splitlines()
            result["failed"][part] = last[0] if last else repr(error)
            print(f"{name} {part}: FAILED {result['failed'][part]}", flush=True)
        print(f"{name} {part}: {time.perf_counter() - begin:.1f} s", flush=True)
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            cut = {"incomplete": True} if part != [*parts][-1] else {}
            (arguments.out / f"{name}.json").write_text(json.dumps(result | cut, indent=1) + "\n")


def run_model(parser: argparse.ArgumentParser, bench: Callable[[argparse.Namespace, EngineConfig], int]) -> None:
    """Runs the bench of a model as a command of `deltic` runs; ends the process."""
    arguments = parser.parse_args()
    sys.exit(finished(lambda: bench(arguments, settings.engine(arguments))))
