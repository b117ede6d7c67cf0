"""What can be known of a plan without running it: `python -m bench.figures PLAN --check`.

Each command is run up to its arguments, and the model of a bench on a GPU is planned as it would be there, in
a card's memory: a wrong flag, a shape that does not fit or cannot be cut is told here, in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import runpy
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from bench.steps import ALL, Step, worded
from deltic import __main__ as deltic
from deltic.commands import settings
from deltic.config import EngineConfig
from deltic.models.qwen.published import PUBLISHED

CARD_BYTES = 149_000_000_000
"""Free memory of an H200 that runs nothing."""


class Reached(BaseException):
    """The arguments of a command: it is stopped behind them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raises what a parser says before it ends the process as a ValueError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit:
        raise ValueError(said.getvalue().strip().rpartition("\n")[2]) from None


def parsed(command: Sequence[str]) -> argparse.Namespace | None:
    """The arguments that `python -m MODULE ...` reads; None: it is no such command. Raises ValueError."""
    with_python = [i for i, part in enumerate(command) if part == sys.executable]
    if not with_python or command[with_python[0] + 1] != "-m":
        return None
    module, *given = command[with_python[0] + 2 :]
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        raise Reached(parse(parser, args, namespace))

    patches = mock.patch.object(argparse.ArgumentParser, "parse_args", stop), mock.patch("sys.argv", [module, *given])
    try:
        with patches[0], patches[1], refusing(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # it may be imported already
            if module == "deltic":  # it reads them by another method
                return deltic.parsed(given)
            runpy.run_module(module, run_name="__main__")
    except Reached as reached:
        return reached.arguments
    raise ValueError(f"{module} parses no arguments")


def configs(arguments: argparse.Namespace, folder: Path) -> Iterator[EngineConfig]:
    """The settings of each engine that a bench of a model on a GPU makes. folder: for a dummy's drafter."""
    given, config = vars(arguments), settings.engine(arguments)
    sizes = [int(n) for n in str(given["n"]).split(",")]
    config = replace(config, device="cuda", prefix_cache=False, allow_cache_transfer=False)
    config = replace(config, max_num_seqs=max(*sizes, 8))
    if "context" in given:
        config = replace(config, max_model_len=config.max_model_len or max(map(int, given["context"].split(","))))
    if "accept" in given:
        from bench.gpu.drafts import with_head

        yield with_head(arguments, config, folder)
    yield replace(config, max_drafts=0, draft_model=None)
    for gb in filter(None, str(given.get("gb", "")).split(",")):
        yield replace(config, expert_memory=float(gb))
    for n in filter(None, str(given.get("on", "")).split(",")):
        yield replace(config, tensor_parallel=int(n))


def planned(arguments: argparse.Namespace) -> str:
    """What the plans of a bench of a model on a GPU need; "" of another. Raises ValueError subclasses."""
    given = vars(arguments)
    if given.get("serve_args"):
        with refusing():
            arguments = deltic.parsed(["serve", *shlex.split(given["serve_args"]), "--device", "cuda"])
        given = vars(arguments) | {"n": "8", "format": None, "as_chip": None}
    is_planned = {"n", "format", "as_chip"} <= given.keys() and given.get("dummy") in PUBLISHED
    if not is_planned or given["as_chip"]:
        return ""
    from deltic.ops.gpu.launch import parse_levers  # with what has Triton: a plan of a CPU is checked without
    from deltic.runtime.build import settle_text
    from deltic.runtime.fit import make_plan
    from deltic.runtime.gpu.device import Gpu, TextOnGpu

    found = []
    with tempfile.TemporaryDirectory(prefix="deltic-check-") as folder:
        for config in configs(argparse.Namespace(**given), Path(folder)):
            levers = parse_levers(config.lever)
            device = Gpu(config.lever, config.tensor_parallel, config.tp_invariant)
            model = replace(settle_text(config, device, given["format"], given.get("layers")), tower=None)
            plan = make_plan(TextOnGpu(levers), model, CARD_BYTES)
            found.append(f"{plan.weight_bytes / 1e9:.1f} GB of weights, {plan.total_bytes / 1e9:.1f} in all")
    return "; ".join(dict.fromkeys(found))


def check(steps: Sequence[Step], n_gpus: Sequence[int] = (2, 4, 8)) -> bool:
    """Prints what each command would do. False if one would not even begin. n_gpus: of machines that are
    thought of, for steps that take all GPUs.
    """
    words = dict.fromkeys(("out", "scratch", "peers", "published"), "bench")
    is_good = True
    for step in steps:
        for command in step.commands:
            for n in n_gpus if step.gpus == ALL else (step.gpus,):
                parts = worded(command, words | {"threads": 2, "four": "0", "minutes": 1, "gpus": n})
                try:
                    arguments = parsed(parts)
                    told = "no command of this repository" if arguments is None else planned(arguments) or "parsed"
                except ValueError as error:
                    told, is_good = f"WRONG: {error}", False
                print(f"{step.name}, {n} GPUs: {told}\n  {command}", flush=True)
    return is_good
