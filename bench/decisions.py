"""What questions about one long input cost beside it: the time of many, over that of one and of their own tokens.

    python -m bench.decisions --out bench/runs/decisions.json

Each round takes, one after the other and without a warm cache: one question; all of them; and the same number of
tokens as theirs as a longer input, in the largest chunks there are, at the same depth, which is the least that
they can take. The ratio of a round is all of them over one and their own tokens' time; beside other work the
median of the rounds is what to read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from random import Random

from deltic import LLM
from deltic.bench.provenance import code, machine, now
from deltic.json_types import JsonObject
from deltic.server.chat.decisions import AskedIds, AskedPrompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="built-in")
    parser.add_argument("--state", type=int, default=8192, help="tokens of the input")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--own", type=int, default=60, help="tokens of each question")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rng, n_own = Random(0), given.own
    n_more = 32 * n_own  # so many tokens behind the input stand for all: its depth is theirs, nearly
    settings: JsonObject = {"max_model_len": given.state + n_more + 64}
    if given.threads:
        settings["threads"] = given.threads
    if given.model == "built-in":  # it was made for 4,096 positions: times are those of any others
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
        settings["rope_scaling"] = yarn
    rounds = []
    with LLM(given.model, progress=False, **settings) as llm:

        def ids(n: int) -> list[int]:
            return [rng.randrange(200) for _ in range(n)]

        def seconds(n_state: int, n_questions: int) -> tuple[float, int]:
            """Time of some questions behind an input of so many tokens, and the tokens that were computed for them."""
            llm.reset_cache()
            asked = [AskedIds(ids(n_own), [(1,), (2,)]) for _ in range(n_questions)]
            before = llm._engine.stats().n_prompt_tokens
            begin = time.perf_counter()
            scores, prepared = llm.prepare_asked([AskedPrompt(ids(n_state), asked)], {})
            scores.taken(llm._complete(prepared, False))
            return time.perf_counter() - begin, llm._engine.stats().n_prompt_tokens - before

        seconds(given.state, 1)
        for _ in range(given.rounds):
            one_s, _ = seconds(given.state, 1)
            all_s, n_tokens = seconds(given.state, given.questions)
            more_s, _ = seconds(given.state + n_more, 1)
            own_s = max(0.0, more_s - one_s) * given.questions * n_own / n_more
            rounds.append(
                {"one_s": one_s, "all_s": all_s, "own_s": own_s, "n_tokens": n_tokens, "ratio": all_s / (one_s + own_s)}
            )
    n_least = given.state + given.questions * n_own
    ratio = statistics.median(each["ratio"] for each in rounds)
    found = {"model": given.model, "n_state": given.state, "n_questions": given.questions, "n_own": n_own}
    found |= {"ratio": ratio, "tokens_ratio": rounds[0]["n_tokens"] / n_least, "rounds": rounds}
    text = json.dumps(found | {"machine": machine(), "code": code(), "time": now()}, indent=1, default=str)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
