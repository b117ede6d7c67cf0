"""One model on two machines beside one: `python -m bench.stages --quantize int8`, as root.

The machines are network namespaces with a link between them, each with one thread; the model alone has one,
too, so both compute as much and what is more is handing over. Both run the same prompts in turns: ms of a
step that draws a token of each sequence, ms of a prompt, and the bytes that the first machine sent.

With --device cuda the machines are two GPUs of one, and what they hand over goes through its loopback. The
first GPU has the model alone, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from deltic.bench.provenance import checked, code, machine, now, runs_directory
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import silent
from deltic.runtime.build import build_runner
from deltic.runtime.stages import Stages
from tests.staged import Stage

PROMPT, ANSWER, LONG = 64, 24, 512
HERE, THERE = "10.213.8.1", "10.213.8.2"


@contextmanager
def another_gpu() -> Iterator[tuple[tuple[str, ...], str]]:
    """The second GPU that may be seen here: as of `another_network`."""
    second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    yield ("env", f"CUDA_VISIBLE_DEVICES={second}"), "127.0.0.1:0"


@contextmanager
def another_network() -> Iterator[tuple[tuple[str, ...], str]]:
    """A network namespace that is reached at THERE. Yields the command that runs what is behind it inside,
    and where that may listen.
    """
    name, link = f"deltic-bench-{os.getpid()}", f"db{os.getpid() % 100000}"
    commands = (
        f"netns add {name}",
        f"link add {link} type veth peer name {link}b netns {name}",
        f"addr add {HERE}/30 dev {link}",
        f"link set {link} up",
        f"-n {name} addr add {THERE}/30 dev {link}b",
        f"-n {name} link set {link}b up",
    )
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        yield ("ip", "netns", "exec", name), f"{THERE}:21200"
    finally:
        for command in (f"link del {link}", f"netns del {name}"):
            subprocess.run(["ip", *command.split()], check=False)


class Side:
    """An engine, and what it has sent to another machine."""

    def __init__(self, **settings: Any) -> None:
        self.runner: Any = build_runner(EngineConfig(**settings), silent)
        self.engine = Engine(self.runner)

    @property
    def n_sent(self) -> int:
        stages = self.runner.neighbours
        return stages.behind.n_sent if isinstance(stages, Stages) and stages.behind is not None else 0

    def run(self, prompts: list[list[int]], n_answer: int) -> dict[str, Any]:
        """Milliseconds of the median step in which all draw, and of all steps before; bytes that were sent in
        each; and what was drawn.
        """
        params = SamplingParams(max_tokens=n_answer, temperature=0.0, ignore_eos=True)
        for i, ids in enumerate(prompts):
            self.engine.add(Request(id=str(i), prompt_ids=ids, params=params, use_cache=False))
        steps: list[tuple[float, int]] = []
        drawn: list[list[int]] = [[] for _ in prompts]
        begun, sent, first_ms, first_bytes = time.perf_counter(), self.n_sent, 0.0, 0
        while self.engine.has_work():
            before, was_sent = time.perf_counter(), self.n_sent
            outputs = checked(self.engine.step())
            for output in outputs:
                drawn[int(output.id)] += output.token_ids
            if len(outputs) == len(prompts) and min(map(len, drawn)) > 1:
                steps.append(((time.perf_counter() - before) * 1e3, self.n_sent - was_sent))
            elif not steps:
                first_ms, first_bytes = (time.perf_counter() - begun) * 1e3, self.n_sent - sent
        return {
            "step_ms": median(ms for ms, _ in steps) if steps else 0.0,
            "step_bytes": median(n for _, n in steps) if steps else 0,
            "prompt_ms": first_ms,
            "prompt_bytes": first_bytes,
            "drawn": drawn,
        }


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dummy", metavar="SHAPE", default="qwen3.5-0.8b", help="random weights at a published shape")
    add("--quantize", choices=("fp8", "int8", "int4", "int4-symmetric"))
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--memory-gb", type=float, help="for each of the two sides on the first GPU, and for the second GPU")
    add("--rounds", type=int, default=7)
    add("--out", metavar="DIR", help="for the JSON (default: bench/runs/<date>-<machine>)")
    arguments = parser.parse_args(given)
    on_gpu = arguments.device == "cuda"
    settings: dict[str, Any] = {"dummy": arguments.dummy, "quantize": arguments.quantize, "device": arguments.device}
    settings |= {"max_num_seqs": 8, "max_model_len": 1024, "max_drafts": 0, "cache_host_gb": 0.0}
    settings |= {"memory_gb": arguments.memory_gb} if on_gpu else {"threads": 1}
    rng, rows, of_code = random.Random(0), [], code()
    with (
        tempfile.TemporaryDirectory() as directory,
        another_gpu() if on_gpu else another_network() as (inside, address),
    ):
        secret = Path(directory) / "secret"
        secret.write_text("0123456789abcdef")
        own = ("--memory-gb", str(arguments.memory_gb)) if on_gpu and arguments.memory_gb else ()
        own = own if on_gpu else ("--threads", "1")
        local = ("--dummy", arguments.dummy, *own, "--stages-secret", str(secret))
        stage = Stage(*local, listen=address, inside=inside)
        try:
            alone = Side(**settings)
            staged = Side(**settings, stages=(stage.address,), stages_secret=secret)
            for n, length, n_answer in ((1, PROMPT, ANSWER), (8, PROMPT, ANSWER), (1, LONG, 1)):
                for i in range(arguments.rounds + 1):
                    prompts = [[rng.randrange(10, 500) for _ in range(length)] for _ in range(n)]
                    order = [alone, staged] if i % 2 else [staged, alone]
                    found = {id(side): side.run(prompts, n_answer) for side in order}
                    one, two = found[id(alone)], found[id(staged)]
                    is_equal = one.pop("drawn") == two.pop("drawn")
                    assert is_equal, "two machines drew other tokens than one"
                    if i:  # the first is to warm up
                        rows.append({"n": n, "prompt": length, "answer": n_answer, "alone": one, "staged": two})
        finally:
            stage.close()
    result: dict[str, object] = {"bench": "stages", "date": now().isoformat(), "machine": machine(), "code": of_code}
    result |= {"shape": arguments.dummy, "quantize": arguments.quantize, "device": arguments.device}
    result |= {"load": os.getloadavg()[0], "rows": rows}
    kind = "gpu-stages" if on_gpu else "stages"
    path = runs_directory(arguments.out) / f"{kind}-{arguments.dummy}-{now():%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1))
    for row in rows:
        print(json.dumps(row))
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
