"""What drafts bring on a GPU, by how often they are right: `python -m bench.gpu.drafts --accept 0,0.75`.

Decodes whose drafts are right with these probabilities, beside decodes of a server without drafts. The steps
are real, and so is the depth that the engine chooses; what is drawn is planted (planted.py). With the guesses
of the head, or of a block drafter (`--draft-model`), and with guesses that come from nowhere: what rows cost,
and what the head.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import planted
from bench.flags import add_gpu_model
from bench.gpu.experiment import run_model
from deltic.bench.gpu import GpuModel, decode, need_gpu, shape_name
from deltic.bench.provenance import writer
from deltic.bench.sweep import numbers
from deltic.config import ConfigError, EngineConfig
from deltic.engine.engine import Engine
from deltic.json_types import JsonObject
from deltic.models.qwen.published import published_shape
from deltic.models.qwen.shape import ModelShape
from deltic.ops.gpu.launch import parse_levers

MOST_DRAFTED = 8
"""Tokens of a draft where --max-drafts does not say: as on a CPU."""


def accept_rows(
    runner: Any,
    n: int,
    accepts: Sequence[float],
    prompts: dict[str, list[int]],
    answers: dict[str, list[int]],
    rounds: int,
) -> list[dict[str, Any]]:
    """What drafts of n sequences come to, for each probability of a guess to be right: milliseconds a token
    of each sequence and tokens a step, with the runner's draft head and with guesses that cost nothing.

    The first round, in which the engine learns what rows cost, does not count.
    """
    name_of_head = planted.head_of(runner)
    head, found = getattr(runner, name_of_head), []
    for accept in accepts:
        row: dict[str, Any] = {"n": n, "accept": accept}
        for name, own in (("head", head), ("free", None)):
            if name == "head" and head is None:
                continue
            runner.info.has_draft_head = True  # without one, too, guesses are asked for
            engine = Engine(planted.Planted(runner, answers, accept, own, is_free=own is None))
            measured = [planted.decode(engine, prompts, answers) for _ in range(1 + rounds)][1:]
            row[f"{name}_ms"] = [round(ms, 4) for ms, _ in measured]
            row[f"{name}_tokens_a_step"] = round(statistics.median(tokens for _, tokens in measured), 3)
        found.append(row)
    setattr(runner, name_of_head, head)
    runner.info.has_draft_head = head is not None
    return found


HEADS = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}


def dummy_head(kind: str, shape: ModelShape, folder: Path) -> Path:
    """Writes the config.json of a block drafter for models of this shape; its directory. kind: one of HEADS.

    Sizes are those of the published heads of 27B (five layers) and of 35B (eight); weights beside random
    ones are random.
    """
    n_layers, ffn = (8, 3 * shape.hidden_size) if shape.is_moe else (5, shape.intermediate_size)
    layers = [1 + round(i * (shape.n_layers - 4) / 4) for i in range(5)]
    own: JsonObject = {"mask_token_id": shape.vocab_size - 250, "target_layer_ids": layers}
    if kind == "dflash2":
        own |= {"conv_kernel_size": 2, "conv_group_size": 64, "selector_rank": 256, "selector_top_k": 8}
    config: JsonObject = {"architectures": [HEADS[kind]], "dflash_config": own, "block_size": 16}
    config |= {"hidden_size": shape.hidden_size, "intermediate_size": ffn, "num_hidden_layers": n_layers}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 4 if shape.is_moe else 8, "head_dim": 128}
    config |= {"vocab_size": shape.vocab_size, "max_position_embeddings": 262144, "rope_theta": 1e7}
    if kind == "dspark":
        config |= {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
    path = folder / f"{kind}-dummy"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config) + "\n")
    return path


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Measures drafts; prints a table and writes a JSON file. Raises ConfigError."""
    need_gpu(arguments.as_chip)
    with tempfile.TemporaryDirectory(prefix="deltic-head-") as folder:
        return _bench(arguments, with_head(arguments, config, Path(folder)))


def with_head(arguments: argparse.Namespace, config: EngineConfig, folder: Path) -> EngineConfig:
    """The settings with the block drafter that --dummy-head asks for. Raises ConfigError beside another."""
    if arguments.dummy_head is None:
        return config
    if config.dummy is None or config.draft_model is not None:
        raise ConfigError("--dummy-head: with --dummy, and without --draft-model")
    shape = published_shape(config.dummy)
    return replace(config, draft_model=str(dummy_head(arguments.dummy_head, shape, folder)))


def _bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    sizes, accepts = numbers(arguments.n, "--n", int), [float(p) for p in arguments.accept.split(",")]
    max_drafts, levers = config.max_drafts or MOST_DRAFTED, parse_levers(config.lever)
    config = replace(config, max_drafts=max_drafts)
    model, name = GpuModel.load(config, arguments.format), shape_name(arguments, config)
    engine = model.engine(levers, max(sizes), max_drafts=0, draft_model=None)
    plain: dict[int, list[float]] = {}
    for n in sizes:
        decode(engine, n, arguments.prompt, 8, seed=1)
        times = [decode(engine, n, arguments.prompt, arguments.output, seed=2 + i)[0] for i in range(arguments.rounds)]
        plain[n] = [round(statistics.median(found) * 1000, 4) for found in times]
    del engine
    runner: Any = model.engine(levers, max(sizes), max_drafts=max_drafts).runner
    drafter = None if config.draft_model is None else Path(config.draft_model).name
    kept = "gpu-accept" if drafter is None else "gpu-accept-block"
    what = {"max_drafts": max_drafts, "draft_model": drafter}
    write = writer(kept, name, runner.info.device, arguments.out, **what)
    rng, rows = random.Random(1), list[dict[str, Any]]()
    for n in sizes:
        prompts, answers = (
            {str(i): rng.choices(range(1000), k=k) for i in range(n)} for k in (arguments.prompt, arguments.output)
        )
        for row in accept_rows(runner, n, accepts, prompts, answers, arguments.rounds):
            rows.append(row | {"plain_ms": plain[n]})
        write(rows=rows)
    title = f"{name} on {runner.info.device}: drafts of up to {max_drafts} tokens, right as often as planted"
    Console(width=120).print(_table(title, rows))
    write(is_whole=True, rows=rows)
    return 0


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The drafts for people."""
    heads = ("N", "right", "plain: ms a token", "head: tokens a step", "ms a token", "x", "free: tokens a step")
    table = Table(*heads, "ms a token", "x", title=title, title_justify="left")
    for row in rows:
        ms, cells = statistics.median(row["plain_ms"]), list[str]()
        for name in ("head", "free"):
            if f"{name}_ms" not in row:
                cells += ["no head", "", ""]
                continue
            own = statistics.median(row[f"{name}_ms"])
            cells += [f"{row[f'{name}_tokens_a_step']:.2f}", f"{own:.3f}", f"{ms / own:.2f}"]
        table.add_row(f"{row['n']}", f"{row['accept']:g}", f"{ms:.3f}", *cells)
    return table


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_gpu_model(flags, "max_drafts", "draft_model")
    text = "that a guess is right, if those before it are (default: 0,0.75)"
    flags.add_argument("--accept", default="0,0.75", metavar="P,P,...", help=text)
    text = "of --dummy: guess by a block drafter with random weights, as large as published ones"
    flags.add_argument("--dummy-head", choices=[*HEADS], help=text)
    flags.add_argument("--prompt", type=int, default=128, metavar="TOKENS", help="default: 128")
    flags.add_argument("--output", type=int, default=256, metavar="TOKENS", help="default: 256")
    flags.add_argument("--rounds", type=int, default=1, metavar="R", help="default: 1")
    run_model(flags, bench)


if __name__ == "__main__":
    main()
