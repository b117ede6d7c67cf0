"""How good a model's heads guess, if every guess is run: `python -m bench.drafts_right [MODEL] [--out DIR]`.

Engines of a model, without drafts, with its draft head (MTP), and with --draft-model with a block drafter,
answer what bench/drafts_served.py asks, greedy and at temperature 1. Of those that guess each step has a
draft of up to --max-drafts tokens, whether it pays or not, and nobody else guesses. So tokens a step tell
heads apart. Time is that of the processor, prompts included, which other programs change less than a
clock's. Answers must be the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from typing import Any

from bench.drafts_served import BLOCK, MTP, PLAIN, TEMPERATURES, WORK, keep, parser
from deltic import LLM
from deltic.engine.drafts import HEAD, Drafter, Drafting


def run_every_guess() -> None:
    """Has every guess of a head run, and no other proposer's, in engines of this process."""

    def propose(self: Drafter, tokens: object, most: int, forced: object = ()) -> list[int]:
        self.used = HEAD
        return self.guesses[:most]

    def all_asked(self: Drafting, asked: Any, s: object, n: object) -> Counter[int]:
        return Counter({i: wish.n_guessable for i, wish in asked})

    Drafter.propose = propose  # type: ignore[method-assign]
    Drafting._n_asked = all_asked  # type: ignore[method-assign, assignment]
    Drafting._step_s = lambda self, n: [1.0] * 65  # type: ignore[method-assign]


def drafts_of(llm: LLM) -> tuple[Counter[str], Counter[str]]:
    """Guesses that were run, and that were right, by their place."""
    drafting = llm._engine.scheduler.drafting
    return (Counter(), Counter()) if drafting is None else (Counter(drafting.drafted), Counter(drafting.accepted))


def measure(llm: LLM, kind: str, temperature: float, n_answers: int) -> tuple[list[list[int]], dict[str, Any]]:
    """The answers' ids, and what became of the drafts."""
    said, before, begin = list[list[int]](), drafts_of(llm), time.process_time()
    for i in range(n_answers):
        asked = {"enable_thinking": False} | WORK[kind](i)
        messages = [{"role": "user", "content": asked.pop("content")}]
        settings: dict[str, Any] = {"max_tokens": 600, "temperature": temperature, "seed": i}
        (answer,) = llm.chat(messages, progress=False, **settings, **asked)
        said.append(list(answer.token_ids))
    n, right = (after - first for after, first in zip(drafts_of(llm), before, strict=True))
    n_tokens, n_right = sum(map(len, said)), sum(right.values())
    return said, {
        "tokens": n_tokens,
        "cpu_ms_a_token": round(1e3 * (time.process_time() - begin) / n_tokens, 3),
        "tokens_a_step": round(n_tokens / (n_tokens - n_right), 2),
        "right": {place: round(right[place] / n[place], 3) for place in sorted(n, key=int)},
    }


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    flags: dict[str, dict[str, Any]] = {PLAIN: {"max_drafts": 0}, MTP: {"max_drafts": given.max_drafts}}
    if given.draft_model:
        flags[BLOCK] = {"max_drafts": given.max_drafts, "draft_model": given.draft_model}
    model = [given.model] if given.model else []
    llms = {name: LLM(*model, threads=given.threads, max_num_seqs=1, **own) for name, own in flags.items()}
    run_every_guess()
    rows = []
    for kind, temperature in itertools.product(WORK, TEMPERATURES):
        truth, plain = measure(llms[PLAIN], kind, temperature, given.requests)
        for name in [*llms][1:]:
            said, found = measure(llms[name], kind, temperature, given.requests)
            assert said == truth, f"guesses of {name} changed an answer: {kind} at temperature {temperature}"
            found["plain_cpu_ms_a_token"] = plain["cpu_ms_a_token"]
            rows.append({"what": kind, "temperature": temperature, "guesses": name, "answers": len(said)} | found)
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    flags = parser(__doc__, 12, 5)
    flags.add_argument("--threads", type=int, default=1)
    keep("drafts-right", flags.parse_args(), run)


if __name__ == "__main__":
    main()
