"""What the host costs a step: `python -m bench.host`, on the built-in model, where nothing else costs much.

engine    schedule, fill the buffers, read the tokens, commit: a step less its program, in this process
recorded  the program as one call from Python, against a call for each operator, against recording it anew in
          each step
server    CPU time of the HTTP process a token: detokenise, render, send; from /proc, while N streams run
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench.served import MODEL, stream
from deltic.bench.provenance import checked, code, machine, now, runs_directory
from deltic.commands.endpoint import LocalServer
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.ops.cpu.program import Program
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner

N_STEPS = 200


class Calls:
    """A program whose every kernel call is a crossing of its own."""

    def __init__(self, program: Program) -> None:
        self.one = Program(program.n_threads)
        self.codes, words, at = [], program._words, 0
        while at < len(words):
            end = at + 2 + words[at + 1]
            self.codes.append(np.array(words[at:end], np.int64))
            at = end

    def run(self) -> None:
        for kernel in self.codes:
            self.one._words, self.one._code = kernel, kernel  # type: ignore[assignment]
            self.one.run()


class Anew:
    """The operators' functions called for every step, as without recording."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def run(self) -> None:
        runner, workspace = self.runner, self.runner.workspace
        program = Program(runner.plan.n_threads)
        runner.model.record(program, workspace.batch.inputs, runner.memory, workspace.activations)
        workspace.sampler.record(program, workspace.activations.logits)
        program.run()


def steps_us(runner: Runner, n: int, program: Any) -> tuple[float, float]:
    """Median microseconds of a step of n decodes, and of its program alone."""
    engine, rng = Engine(runner), random.Random(0)
    spent: list[float] = []

    class Timed:
        @staticmethod
        def run() -> None:
            begin = time.perf_counter()
            program.run()
            spent.append(time.perf_counter() - begin)

    kept, runner.program = runner.program, Timed()  # type: ignore[assignment]
    params = SamplingParams(max_tokens=N_STEPS + 80, temperature=1.0, seed=1, ignore_eos=True)
    for i in range(n):
        prompt = [rng.randrange(1000) for _ in range(64)]
        engine.add(Request(id=str(i), prompt_ids=prompt, params=params))
    waiting = {str(i) for i in range(n)}
    while waiting:
        waiting -= {output.id for output in checked(engine.step()) if output.token_ids}
    spent.clear()
    times = []
    for _ in range(N_STEPS):
        begin = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - begin)
        checked(outputs, n)
    for i in range(n):
        engine.abort(str(i))
    runner.program = kept
    host = [whole - native for whole, native in zip(times, spent, strict=True)]
    return statistics.median(host) * 1e6, statistics.median(times) * 1e6


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def server_us(n: int, seconds: float) -> tuple[float, float]:
    """CPU microseconds of the HTTP process a token, and tokens a second, with n streams."""
    server, rng = LocalServer(["--served-model-name", MODEL, "--max-num-seqs", "64"]), random.Random(0)
    try:
        endpoint = await server.wait_ready()
        end = time.perf_counter() + seconds
        n_tokens = 0

        async def client() -> None:
            nonlocal n_tokens
            while time.perf_counter() < end:
                times = await stream(endpoint, [rng.randrange(1000) for _ in range(64)], 256)
                n_tokens += len(times) - 1

        before, begin = cpu_s(server.process.pid), time.perf_counter()
        await asyncio.gather(*(client() for _ in range(n)))
        took = time.perf_counter() - begin
        return (cpu_s(server.process.pid) - before) / n_tokens * 1e6, n_tokens / took
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    config = EngineConfig(max_num_seqs=64, max_model_len=1024)
    runner = cast(Runner, build_runner(config, lambda stage, done: None, Cpu()))
    rows = []
    for n in (1, 16, 64):
        host, step = steps_us(runner, n, runner.program)
        _, calls = steps_us(runner, n, Calls(runner.program))
        _, anew = steps_us(runner, n, Anew(runner))
        http, tok_s = asyncio.run(server_us(n, 5.0))
        rows.append(
            {
                "n": n,
                "engine_host_us": host,
                "step_us": step,
                "step_call_each_us": calls,
                "step_anew_us": anew,
                "server_us_a_token": http,
                "served_tok_s": tok_s,
                "host_us_a_sequence": host / n + http,
            }
        )
        print(json.dumps({name: round(value, 1) for name, value in rows[-1].items()}), flush=True)
    path = runs_directory(arguments.out) / f"host-{now():%H%M%S}.json"
    head = {"bench": "host", "date": now().isoformat(), "machine": machine(), "code": code()}
    path.write_text(json.dumps(head | {"rows": rows}, indent=1))
    print(path)


if __name__ == "__main__":
    main()
