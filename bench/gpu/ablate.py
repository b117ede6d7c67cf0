"""What each lever of a GPU brings: `python -m bench.gpu.ablate [MODEL | --dummy SHAPE] [--format NAME]
[--max-drafts N] [--levers NAME,...] [--rounds N]`.

The time of a step with each lever off, one at a time, its launches, and whether the tokens stay the same;
with --max-drafts also of drafts, of which random weights guess hardly any right. --levers: these alone;
--rounds: all of it so often, in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.flags import add_gpu_model
from bench.gpu.experiment import run_model
from deltic.bench.gpu import GpuModel, decode, n_launches, need_gpu, runner_of
from deltic.bench.provenance import writer
from deltic.config import ConfigError, EngineConfig
from deltic.ops.gpu.launch import Levers


def variants(max_drafts: int, only: str = "") -> list[tuple[str, Levers, int]]:
    """Name, levers and most tokens of a draft: the base, one lever off at a time, and drafts, where
    there are any. only: names of levers, else all. Raises ConfigError for one that is not there.
    """
    base = Levers()
    names = [field.name for field in dataclasses.fields(Levers)]
    if unknown := set(filter(None, only.split(","))) - set(names):
        raise ConfigError(f"--levers {only}: no lever {', '.join(unknown)}; there are {', '.join(names)}")
    found = [("as served", base, 0)]
    found += [
        (f"{name}=off", replace(base, **{name: False}), 0) for name in names if not only or name in only.split(",")
    ]
    return found + ([(f"max_drafts={max_drafts}", base, max_drafts)] if max_drafts else [])


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Measures each lever; prints a table and writes a JSON file. Raises ConfigError."""
    need_gpu(arguments.as_chip)
    rows = [int(n) for n in arguments.n.split(",")]
    max_drafts, shape_name = config.max_drafts or 0, config.dummy or config.model
    model = GpuModel.load(config, arguments.format)
    found: list[dict[str, Any]] = []
    write = writer("ablate", shape_name, torch.cuda.get_device_name(), arguments.out)
    base: dict[int, tuple[float, list[list[int]]]] = {}
    table = Table(
        "lever",
        *(f"N={n}: ms, x" for n in rows),
        "launches",
        "same tokens",
        "says",
        "what it does",
        title=f"{shape_name}: one lever changed at a time",
    )
    console = Console(stderr=True)
    for name, levers, n_drafts in arguments.rounds * variants(max_drafts, arguments.levers):
        with console.status(name):
            engine = model.engine(levers, max(rows), max_drafts=n_drafts)
            row: dict[str, Any] = {"lever": name}
            cells, exact = [], True
            for n in rows:
                decode(engine, n, 128, 8, seed=1)
                times, tokens = decode(engine, n, 128, arguments.output, seed=2)
                # a step with drafts gives several tokens: of all those steps, the time of one token
                ms = 1000 * (sum(times) / (arguments.output - 3) if n_drafts else statistics.median(times))
                base.setdefault(n, (ms, tokens))
                exact = exact and tokens == base[n][1]
                cells.append(f"{ms:.3f}, {ms / base[n][0]:.3f}")
                row[f"ms_{n}"] = round(ms, 4)
            launches = n_launches(runner_of(engine), rows[0])
            field = Levers.__dataclass_fields__.get(name.partition("=")[0])
            says, text = ("exact", "tokens that are guessed ahead, by --max-drafts") if n_drafts else ("", "")
            if field is not None:
                says, text = "exact" if field.metadata["exact"] else "other bits", field.metadata["text"]
            table.add_row(name, *cells, f"{launches}", "yes" if exact else "no", says, text)
            found.append(row | {"launches": launches, "same_tokens": exact, "exact": says})
            write(rows=found)
            del engine
    Console(width=170).print(table)
    write(is_whole=True, rows=found)
    return 0


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_gpu_model(flags, "max_drafts")
    flags.add_argument("--levers", default="", metavar="NAME,...", help="default: all")
    flags.add_argument("--rounds", type=int, default=1, metavar="N", help="default: 1")
    flags.add_argument("--output", type=int, default=64, metavar="TOKENS", help="default: 64")
    run_model(flags, bench)


if __name__ == "__main__":
    main()
