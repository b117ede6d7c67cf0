"""Times of drafts in modelled steps: `python -m bench.drafts_simulated [--only TEXT] [--held-up P]`.

The engine's `Drafting` decides how long drafts are. What is drawn is fixed for each workload, whatever is
drafted, and steps take what COSTS says, with noise. A figure is how many times as fast tokens come as in
plain steps, the mean over the seeds. Two commits see the same draws and costs, so their figures compare.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance

from deltic.bench.provenance import code, machine, now
from deltic.engine.drafts import Drafting
from deltic.engine.guides import Guide, Vocabulary
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Rule, Sequence, Step
from deltic.text import Tokenizer

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "deltic" / "demo"
COSTS = {
    "bf16": (30.0, 1.2, 8, 4.2, 3.5, 0.0),
    "int4": (13.0, 1.2, 5, 2.2, 1.2, 0.0),
    "demo": (1.0, 0.35, 64, 0.35, 0.2, 0.0),
    "gpu": (1.1, 0.04, 64, 0.04, 0.1, 0.25),
    "gpu-27b": (8.1, 0.12, 64, 0.11, 0.3, 0.3),
    "gpu-35b": (1.9, 0.3, 8, 0.14, 0.12, 0.25),
}
"""Milliseconds of a step without rows, of each row up to a number of them, of each row beyond that, of a
guess of the head, and of what a step takes less that runs ahead. Roughly those of 0.8B in two formats on two
cores, of the built-in model there, and of 0.8B, 27B and 35B in FP8 on an H200.
"""
MAX_DRAFTS = 8


@dataclass
class Workload:
    """Tokens of a prompt and of answers, one after the other, and how often the head is right about them."""

    prompt: list[int]
    answer: list[int]
    accept: tuple[float, ...] = ()
    """Chance of a guess of the head, if those before are right, by turns of 100 tokens; empty: no head."""
    forced: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that a grammar leaves as the only text, by the number of tokens of the answer before them."""


class Forced(Guide):
    """A guide that knows the answer's forced text."""

    def __init__(self, sequence: Sequence, forced: dict[int, list[int]]) -> None:
        self.sequence, self._by_place = sequence, forced

    def forced(self, most: int) -> list[int]:
        return self._by_place.get(self.sequence.n_generated, [])[: max(0, most)]


class Allowing:
    """Guides that allow every draft."""

    def ahead(self, guide: Guide, draft: list[int]) -> tuple[list[int], list[Rule]]:
        return draft, [Rule()] * (1 + len(draft))


def record_of(i: int, rng: random.Random, words: list[str]) -> str:
    """One object of JSON, with the keys of SCHEMA."""
    name, note = " ".join(rng.sample(words, 2)), " ".join(rng.sample(words, 6))
    return json.dumps({"identifier": i, "customer_name": name, "is_active": rng.random() < 0.5, "description": note})


SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "identifier": {"type": "integer"},
            "customer_name": {"type": "string"},
            "is_active": {"type": "boolean"},
            "description": {"type": "string"},
        },
        "required": ["identifier", "customer_name", "is_active", "description"],
        "additionalProperties": False,
    },
}


def forced_in(ids: list[int], n_ids: int, eos: int) -> dict[int, list[int]]:
    """Tokens that the grammar of SCHEMA forces, by place."""
    vocabulary = Vocabulary((DEMO / "tokenizer.json").read_text)
    matcher = llguidance.LLMatcher(
        vocabulary.view(n_ids, [eos]).tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    )
    found = dict[int, list[int]]()
    for place, id in enumerate(ids):
        if forced := matcher.compute_ff_tokens():
            found[place] = list(forced)
        if not matcher.consume_token(id):
            raise ValueError(matcher.get_error())
    return found


def misleading_turns(prompt: list[int], n: int, rng: random.Random) -> list[int]:
    """Text that goes on as the prompt does for 60 tokens; then for 60 its runs end otherwise."""
    found = list[int]()
    while len(found) < n:
        at = rng.randrange(len(prompt) - 60)
        found += prompt[at : at + 60]
        for _ in range(12):
            at = rng.randrange(len(prompt) - 5)
            found += [*prompt[at : at + 4], rng.randrange(9000)]
    return found[:n]


def workloads(seed: int) -> dict[str, list[Workload]]:
    rng, tokenizer = random.Random(seed), Tokenizer.load(DEMO)
    (eos,) = tokenizer.encode("<|im_end|>", "parse")
    edit = [tokenizer.encode((ROOT / f"bench/traces/edit-{part}.txt").read_text()) for part in ("prompt", "answer")]
    prose = tokenizer.encode((ROOT / "docs/design/purity.md").read_text())
    python = tokenizer.encode((ROOT / "deltic/engine/scheduler.py").read_text())
    words = (ROOT / "docs/design/cache.md").read_text().replace("|", " ").replace('"', " ").replace("\\", " ").split()
    paragraph, again = rng.choices(range(9000), k=120), list[int]()
    for _ in range(7):  # each time other words here and there
        again += [id if rng.random() < 0.95 else rng.randrange(9000) for id in paragraph]
    at = rng.randrange(len(prose) // 4)
    objects = tokenizer.encode("[" + ", ".join(record_of(i, rng, words) for i in range(14)) + "]")
    forced = forced_in(objects, tokenizer.n_tokens, eos)

    def anything(n: int = 800, k: int = 9000) -> list[int]:
        return rng.choices(range(k), k=n)

    lines, near = rng.randrange(len(python) // 2), anything(300)
    found = {
        "edit": Workload(edit[0], edit[1]),
        "code": Workload(python[lines : lines + 600], python[lines + 600 : lines + 1400]),
        "misleading turns": Workload(near, misleading_turns(near, 800, rng)),
        "text that repeats": Workload([1] * 8, again),
        "nothing repeats": Workload(anything(40), anything()),
        "prose": Workload(prose[at : at + 300], prose[at + 300 : at + 1100]),
        "misleading runs": Workload(anything(300, 6), anything(k=6)),
        "JSON, grammar": Workload(anything(40), objects, forced=forced),
        "JSON, head 0.6": Workload(anything(40), objects, (0.6,), forced),
        "edit, head 0.6": Workload(edit[0], edit[1], (0.6,)),
        **{f"head {p:g}": Workload(anything(40), anything(), (p,)) for p in (0, 0.3, 0.6, 0.8, 0.9)},
        "head 0.9 or 0": Workload(anything(40), anything(), (0.9, 0.0)),
        "edit or nothing, head 0.6 or 0": Workload(
            near, [*near[:100], *anything(100), *near[100:], *anything(100), *near], (0.6, 0.0, 0.0)
        ),
    }
    company = [found[name] for name in ("edit", "head 0.9", "nothing repeats", "misleading turns")]
    hostile = [found[name] for name in ("misleading turns", "misleading runs", "head 0.3", "head 0.9 or 0")]
    return {name: [load] for name, load in found.items()} | {"mixed company": company, "hostile company": hostile}


def step_ms(cost: str, n_rows: int) -> float:
    begin, each, knee, more, _, _ = COSTS[cost]
    return begin + each * min(n_rows, knee) + more * max(0, n_rows - knee)


def gained(loads: list[Workload], cost: str, n: int, seed: int, held_up: float) -> tuple[float, float]:
    """Returns how many times as fast n sequences are, and microseconds of `plan` a sequence and step.

    loads: of the sequences, in turn. held_up: part of the steps that seem to take ten times as long, as
    another program has the processor.
    """
    *_, guess_cost, saved = COSTS[cost]
    rng, draws = random.Random(seed), random.Random(seed + 1)
    guides: Any = Allowing() if any(load.forced for load in loads) else None
    drafting = Drafting(MAX_DRAFTS, any(load.accept for load in loads), guides, saved > 0)
    spent, plain, planned_s, n_planned = 0.0, 0.0, 0.0, 0
    for answer in range(2):
        by, running = dict[Sequence, Workload](), list[Sequence]()
        for i in range(n):
            load = loads[i % len(loads)]
            request = Request(id=str(answer), prompt_ids=[], params=SamplingParams(max_tokens=len(load.answer) + 1))
            n_prompt = len(load.prompt)
            one = Sequence(request, i, 0, array("i", [*load.prompt, load.answer[0]]), n_prompt, n_computed=n_prompt)
            if load.forced:
                one.guide = Forced(one, load.forced)
            running.append(one)
            by[one] = load
        while all(one.n_generated < len(by[one].answer) - 1 for one in running):
            step = Step([Chunk(s, len(s.tokens) - 1, 1) for s in running], [Draw(i, s) for i, s in enumerate(running)])
            ran_ahead = running[0].runs_ahead
            begun_s = time.perf_counter()
            drafting.plan(step)
            planned_s, n_planned = planned_s + time.perf_counter() - begun_s, n_planned + n
            n_drawn = 0
            for draw, chunk in zip(step.draws, step.chunks, strict=True):
                one, n_right = draw.sequence, 0
                load = by[one]
                rest = load.answer[one.n_generated : one.n_generated + 2 * MAX_DRAFTS + 2]
                while n_right < min(len(chunk.drafts), len(rest) - 1) and chunk.drafts[n_right] == rest[n_right]:
                    n_right += 1
                one.tokens.extend(rest[: 1 + n_right])
                chance = load.accept[one.n_generated // 100 % len(load.accept)] if load.accept else 0.0
                behind = rest[1 + n_right :][: draw.n_guesses]
                guesses = [id if draws.random() < chance else id + 1 for id in behind]
                if chunk.drafts:
                    drafting.count(len(chunk.drafts), n_right)
                if one.drafter is not None:
                    one.drafter.guesses = guesses
                n_drawn += 1 + n_right
            guess_ms = guess_cost * max(draw.n_guesses for draw in step.draws)
            took = (step_ms(cost, step.n_tokens) - saved * ran_ahead) * rng.lognormvariate(0, 0.03) + guess_ms
            drafting.observe(step, took / 1000 * (10 if rng.random() < held_up else 1), guess_ms / 1000)
            spent += took
            plain += n_drawn / n * (step_ms(cost, n) - saved)
    return plain / spent, planned_s / n_planned * 1e6


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures each workload with each cost and number of sequences."""
    loads = [workloads(seed) for seed in range(given.seeds)]
    for name in loads[0]:
        for cost in given.costs.split(",") if given.only in name else ():
            for n in map(int, given.n.split(",")):
                found = [gained(by_name[name], cost, n, i, given.held_up) for i, by_name in enumerate(loads)]
                yield {
                    "what": name, "cost": cost, "n": n, "times": round(statistics.mean(one for one, _ in found), 4),
                    "least": round(min(one for one, _ in found), 4), "most": round(max(one for one, _ in found), 4),
                    "plan_us": round(statistics.median(us for _, us in found), 1),
                }  # fmt: skip


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--costs", default=",".join(COSTS), metavar="NAME,...")
    flags.add_argument("--n", default="1,4,16", metavar="N,N,...", help="sequences")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument(
        "--held-up", type=float, default=0.0, metavar="P", help="part of steps that seem ten times as long"
    )
    flags.add_argument("--only", default="", metavar="TEXT", help="workloads whose name has this text")
    flags.add_argument("--out", type=Path, metavar="DIR", help="keep the result in this directory, as JSON")
    given = flags.parse_args()
    rows = []
    for row in measured(given):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        found = {"bench": "drafts-simulated", "date": now().isoformat(), "machine": machine(), "code": code()}
        text = json.dumps(found | {"seeds": given.seeds, "held_up": given.held_up, "rows": rows}, indent=1)
        (given.out / "drafts-simulated.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
