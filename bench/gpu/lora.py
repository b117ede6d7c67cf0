"""What LoRA adapters cost on a GPU: `python -m bench.gpu.lora --dummy SHAPE --lora 16 --lora-rank 16`.

Decodes whose sequences have these adapters in turn, and prompts with one, beside the same without, in turns
on one server. Adapters have random values for all linear modules.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.gpu.experiment import run_model
from bench.lora import random_adapter
from deltic.bench.gpu import GpuModel, decode, need_gpu, prefill_ms, replay_ms, shape_name
from deltic.bench.provenance import writer
from deltic.bench.sweep import numbers
from deltic.commands.flags import add_table
from deltic.config import ConfigError, EngineConfig
from deltic.ops.gpu.launch import parse_levers
from deltic.runtime.adapters import AdapterRoom
from deltic.runtime.gpu.adapters import adapter_bytes


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Measures adapters; prints a table and writes a JSON file. Raises ConfigError."""
    need_gpu(arguments.as_chip)
    sizes, prompts = numbers(arguments.n, "--n", int), numbers(arguments.prefill, "--prefill", int)
    model, name = GpuModel.load(config, arguments.format), shape_name(arguments, config)
    if model.run.cuts:
        raise ConfigError("adapters are measured on one GPU: leave --tensor-parallel and --tp-invariant out")
    levers, one = parse_levers(config.lever), random_adapter(model.run.shape, arguments.lora_rank, seed=1)
    linears = {name: deltas for name, deltas in one.deltas.items() if len(deltas[0].down) == 1}
    n_bytes = adapter_bytes(replace(one, deltas=linears))
    room = AdapterRoom(arguments.n_loras, arguments.lora_rank, arguments.n_loras * n_bytes)
    engine = model.engine(levers, max(sizes), adapters=room)
    runner: Any = engine.runner
    keys = [i.to_bytes(16, "little") for i in range(1, 1 + arguments.n_loras)]
    for key in keys:
        runner.adapters.load_now(replace(one, key=key, deltas=linears))
    kinds: dict[str, Sequence[bytes]] = {"plain": [b""], "lora": keys}
    decodes = {n: {kind: list[float]() for kind in kinds} for n in sizes}
    prefills = {n: {kind: list[float]() for kind in kinds} for n in prompts}
    for i in range(1 + arguments.rounds):  # the first does not count
        for kind, own in kinds.items():
            for n, found in decodes.items():
                times = decode(engine, n, arguments.prompt, arguments.output if i else 8, seed=1 + i, adapters=own)[0]
                found[kind] += [statistics.median(times) * 1000] if i else []
            for n, found in prefills.items():
                found[kind] += [statistics.median(prefill_ms(engine, n, adapter=own[0]))] if i else []
    context, rows = arguments.prompt + arguments.output // 2, list[dict[str, Any]]()
    for what, measured in (("decode", decodes), ("prefill", prefills)):
        for n, found in measured.items():
            rows.append(
                {"what": what, "n": n} | {f"{kind}_ms": [round(ms, 4) for ms in of] for kind, of in found.items()}
            )
            if what == "decode":
                slots = [i % len(keys) for i in range(n)]
                rows[-1] |= {"alone_ms": round(replay_ms(runner, n, context), 4)}
                rows[-1] |= {"lora_alone_ms": round(replay_ms(runner, n, context, adapters=slots), 4)}
    title = f"{name} on {engine.info.device}: {arguments.n_loras} adapters of rank {arguments.lora_rank}"
    Console(width=120).print(_table(title, rows))
    given = {"adapters": arguments.n_loras, "rank": arguments.lora_rank, "adapter_bytes": n_bytes}
    writer("gpu-lora", name, engine.info.device, arguments.out, **given)(is_whole=True, rows=rows)
    return 0


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The figures for people."""
    table = Table("what", "N", "plain: ms", "adapters: ms", "x", "alone: x", title=title, title_justify="left")
    for row in rows:
        plain, own = (statistics.median(row[f"{kind}_ms"]) for kind in ("plain", "lora"))
        alone = f"{row['lora_alone_ms'] / row['alone_ms']:.3f}" if "alone_ms" in row else ""
        table.add_row(row["what"], f"{row['n']}", f"{plain:.3f}", f"{own:.3f}", f"{own / plain:.3f}", alone)
    return table


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_table(flags, "bench gpu")
    flags.add_argument("--lora", dest="n_loras", type=int, default=16, metavar="N", help="adapters (default: 16)")
    flags.add_argument("--lora-rank", type=int, default=16, metavar="R", help="of these (default: 16)")
    run_model(flags, bench)


if __name__ == "__main__":
    main()
