"""What drafts bring on a CPU, at a stated acceptance: `python -m bench.drafts [--dummy SHAPE]`.

One sequence, and several, of a random model at a published shape. A plain run gives the tokens; then drafts
are made of them, so many right ones a step as --accept says and the next one wrong. Plain runs and runs with
drafts take turns. The time of a step holds everything: scheduler, forward, draws. Every run must give the
same tokens. The first steps of a run, in which prompts are prefilled, do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

from deltic.bench.provenance import code, machine, now
from deltic.config import EngineConfig
from deltic.engine.drafts import Drafter, StepTimes
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu

N_PROMPT = 32


def decode(engine: Engine, n: int, n_tokens: int) -> tuple[float, dict[str, list[int]]]:
    """Seconds a token of each of n sequences, once all of them decode, and what was drawn."""
    tokens: dict[str, list[int]] = {}
    for i in range(n):
        params = SamplingParams(max_tokens=n_tokens, temperature=1.0, seed=i, ignore_eos=True)
        engine.add(Request(id=str(i), prompt_ids=[(7 * i + j) % 1000 for j in range(N_PROMPT)], params=params))
        tokens[str(i)] = []
    begin, first = 0.0, 0
    while engine.has_work():
        for output in engine.step():
            tokens[output.id] += output.token_ids
        if not begin and all(tokens.values()):
            begin, first = time.perf_counter(), sum(map(len, tokens.values()))
    return (time.perf_counter() - begin) / (sum(map(len, tokens.values())) - first) * n, tokens


def drafts_of(truth: dict[str, list[int]], engine: Engine, n_right: int) -> Any:
    """A `Drafter.propose` that is right n_right times, and then wrong."""

    def propose(_: Drafter, tokens: Any, most: int, forced: Any = ()) -> list[int]:
        sequence = next(s for s in engine.scheduler.sequences() if s.tokens is tokens)
        known = truth[sequence.request.id][sequence.n_generated :][: n_right + 1]
        return [*known[:n_right], *((token + 1) % 1000 for token in known[n_right:])][: max(0, most)]

    return propose


def measure(runner: Any, n: int, n_tokens: int, n_right: int, rounds: int) -> dict[str, Any]:
    truth = decode(Engine(runner), n, n_tokens)[1]
    given, seconds = Drafter.propose, StepTimes.seconds
    StepTimes.seconds = lambda self, n, n_drafted: 1.0  # type: ignore[method-assign]
    plain: list[float] = []
    drafted: list[float] = []
    steps: list[float] = []
    for _ in range(rounds):
        for times in (plain, drafted):
            engine = Engine(runner)
            Drafter.propose = drafts_of(truth, engine, n_right if times is drafted else -1)  # type: ignore[method-assign]
            seconds, tokens = decode(engine, n, n_tokens)
            times.append(1000 * seconds)
            assert tokens == truth, "a draft changed a token"
        stats = engine.stats()
        steps.append((stats.n_generated_tokens - n) / (engine.n_steps - 1) / n)
    Drafter.propose, StepTimes.seconds = given, seconds  # type: ignore[method-assign]
    ratios = [a / b for a, b in zip(plain, drafted, strict=True)]
    return {
        "quantize": runner.plan.quantize or "bf16", "n": n, "right": n_right, "tokens_a_step": round(statistics.median(steps), 3),
        "plain_ms": [round(ms, 3) for ms in plain], "drafts_ms": [round(ms, 3) for ms in drafted],
        "times": round(statistics.median(ratios), 3),
    }  # fmt: skip


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--dummy", default="qwen3.5-0.8b", metavar="SHAPE")
    flags.add_argument("--quantize", default="bf16,int8,int4", metavar="Q,Q,...")
    flags.add_argument("--n", default="1,4", metavar="N,N,...")
    flags.add_argument("--accept", default="0,1,2,4", metavar="A,A,...", help="tokens of a draft that are right")
    flags.add_argument("--tokens", type=int, default=64)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--out", type=Path, metavar="DIR", help="keep the result in this directory, as JSON")
    given = flags.parse_args()
    rows, sizes = [], [int(n) for n in given.n.split(",")]
    for quantize in given.quantize.split(","):
        config = EngineConfig(
            dummy=given.dummy,
            quantize=None if quantize == "bf16" else quantize,
            max_num_seqs=max(sizes),
            max_model_len=512,
            max_drafts=8,
        )
        runner = build_runner(config, lambda stage, done: None, Cpu())
        for n, n_right in product(sizes, map(int, given.accept.split(","))):
            rows.append(measure(runner, n, given.tokens, n_right, given.rounds))
            print(json.dumps(rows[-1]), flush=True)
        del runner
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        found = {
            "bench": "drafts",
            "date": now().isoformat(),
            "shape": given.dummy,
            "machine": machine(),
            "code": code(),
        }
        (given.out / f"drafts-{given.dummy}.json").write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
