"""What drafts bring on a CPU: `python -m bench.drafts [--dummy SHAPE] [--accept 0,0.6,0.8] [--trace edit]`.

One sequence, and several, of a random model at a published shape. Its steps are real, with the draft head and
the depth that the engine chooses. But what is drawn is planted: with --accept, any tokens, and the head's
guesses are right with this probability each; with --trace, the answer of bench/traces, without a draft head,
so that drafts come of text that repeats. An engine without drafts and one with them take turns. The first
round, in which the engine learns what rows cost, does not count, nor do the steps of a round in which prompts
are prefilled.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.planted import Planted, decode
from deltic.bench.provenance import code, machine, now
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.text import Tokenizer

TRACES = Path(__file__).parent / "traces"
DEMO = Path(__file__).parents[1] / "deltic" / "demo"
N_PROMPT = 32


@dataclass
class Case:
    """What is asked, and what is answered."""

    prompts: dict[str, list[int]]
    answers: dict[str, list[int]]
    accept: float
    name: str
    has_head: bool
    """Whether the engine with drafts has its draft head."""


def cases(given: argparse.Namespace) -> list[Case]:
    """What is measured."""
    found, rng = [], random.Random(1)
    for n in given.n:
        for accept in map(float, given.accept.split(",") if given.accept else ()):
            prompts = {str(i): rng.choices(range(1000), k=N_PROMPT) for i in range(n)}
            answers = {str(i): rng.choices(range(1000), k=given.tokens) for i in range(n)}
            found.append(Case(prompts, answers, accept, f"accept {accept:g}", has_head=True))
        for trace in given.trace.split(",") if given.trace and n == given.n[0] else ():  # prompts are long
            tokenizer = Tokenizer.load(DEMO)
            texts = ((TRACES / f"{trace}-{part}.txt").read_text() for part in ("prompt", "answer"))
            prompt, answer = (tokenizer.encode(text) for text in texts)
            names = [str(i) for i in range(n)]
            prompts, answers = dict.fromkeys(names, prompt), dict.fromkeys(names, answer[: given.trace_tokens])
            found.append(Case(prompts, answers, 0.0, f"trace {trace}", has_head=False))
    return found


def measure(runner: Any, case: Case, max_drafts: int, rounds: int) -> dict[str, Any]:
    ms: dict[str, list[float]] = {"plain": [], "drafts": []}
    tokens: list[float] = []
    engines = {}
    for name in ms:  # the same memory, so that its place makes no difference
        head = runner.own_head if name == "drafts" and case.has_head else None
        runner.info.max_drafts, runner.info.has_draft_head = max_drafts * (name == "drafts"), head is not None
        engines[name] = Engine(Planted(runner, case.answers, case.accept, head))
    for i in range(1 + rounds):
        for name, engine in engines.items():
            one, a_step = decode(engine, case.prompts, case.answers)
            if i:
                ms[name].append(one)
            if i and name == "drafts":
                tokens.append(a_step)
    stats = engines["drafts"].stats()
    ratios = [plain / drafted for plain, drafted in zip(ms["plain"], ms["drafts"], strict=True)]
    return {
        "n": len(case.prompts), "what": case.name, "tokens_a_step": round(statistics.median(tokens), 3),
        "drafted": stats.n_drafted, "accepted": stats.n_accepted,
        "plain_ms": [round(one, 3) for one in ms["plain"]], "drafts_ms": [round(one, 3) for one in ms["drafts"]],
        "times": round(statistics.median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3),
    }  # fmt: skip


def build(given: argparse.Namespace, quantize: str) -> Any:
    n = max(given.n)
    config = EngineConfig(
        dummy=given.dummy,
        quantize=None if quantize == "bf16" else quantize,
        max_num_seqs=n,
        max_model_len=8192,
        n_pages=128 * n,
        max_drafts=given.max_drafts,
        prefix_cache=False,
    )
    runner: Any = build_runner(config, lambda stage, done: None, Cpu())
    runner.own_head = runner.draft_head
    return runner


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--dummy", default="qwen3.5-0.8b", metavar="SHAPE")
    flags.add_argument("--quantize", default="bf16,int8,int4", metavar="Q,Q,...")
    flags.add_argument("--n", default="1,4", metavar="N,N,...")
    flags.add_argument("--accept", default="0,0.6,0.8,0.9", metavar="P,P,...", help="that a guess of the head is right")
    flags.add_argument("--trace", default="edit", metavar="NAME,...", help="of bench/traces, with the first N")
    flags.add_argument("--tokens", type=int, default=200)
    flags.add_argument("--trace-tokens", type=int, default=600, help="of a trace's answer, from its beginning")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--max-drafts", type=int, default=8)
    flags.add_argument("--out", type=Path, metavar="DIR", help="keep the result in this directory, as JSON")
    given = flags.parse_args()
    given.n = [int(n) for n in given.n.split(",")]
    made_by = {"date": now().isoformat(), "shape": given.dummy, "machine": machine(), "code": code()}
    rows = []
    for quantize in given.quantize.split(","):
        runner = build(given, quantize)
        for case in cases(given):
            rows.append({"quantize": quantize} | measure(runner, case, given.max_drafts, given.rounds))
            print(json.dumps(rows[-1]), flush=True)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        found = {"bench": "drafts", **made_by, "max_drafts": given.max_drafts, "rows": rows}
        (given.out / f"drafts-{given.dummy}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
