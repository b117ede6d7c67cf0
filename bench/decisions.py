"""What questions about one long input cost beside it: the time of many, over that of one and of their own
tokens.

    python -m bench.decisions --out bench/runs/decisions.json

Each round takes, one after the other: one question, and all of them, without a cache; a longer input, whose
further tokens stand for those of the questions in the largest chunks there are (`least`); and a question
whose input is found whole in the cache, which is its own tokens' time (`own`, the median of five, times all).
`ratio` is all of them over one and `own`, by the clock and by the processors' time.
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
from deltic.ops.geometry import PAGE_SIZE
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
    rounds: list[JsonObject] = []
    with LLM(given.model, progress=False, **settings) as llm:

        def ids(n: int) -> list[int]:
            return [rng.randrange(200) for _ in range(n)]

        def seconds(state: list[int], n_questions: int) -> tuple[float, float, int]:
            """Time, a processor's time, and tokens computed, of some questions behind an input."""
            asked = [AskedIds(ids(n_own), [(1,), (2,)]) for _ in range(n_questions)]
            before = llm._engine.stats().n_prompt_tokens
            begin, cpu = time.perf_counter(), time.process_time()
            scores, prepared = llm.prepare_asked([AskedPrompt(state, asked)], {})
            scores.taken(llm._complete(prepared, False))
            took = time.perf_counter() - begin, time.process_time() - cpu
            return *took, llm._engine.stats().n_prompt_tokens - before

        def cold(n_state: int, n_questions: int) -> tuple[float, float, int]:
            llm.reset_cache()
            return seconds(ids(n_state), n_questions)

        cold(512, 1)
        for _ in range(given.rounds):
            one, whole, more = (cold(given.state, 1), cold(given.state, given.questions), cold(given.state + n_more, 1))
            state = ids(given.state // PAGE_SIZE * PAGE_SIZE + 1)  # all but its last token is found
            seconds(state, 1)
            alone = sorted(seconds(state, 1) for _ in range(5))[2]
            found: JsonObject = {"n_tokens": whole[2], "n_alone": alone[2]}
            for i, clock in enumerate(("s", "cpu_s")):
                own = alone[i] * given.questions
                least = max(0.0, more[i] - one[i]) * given.questions * n_own / n_more
                found[clock] = {"one": one[i], "all": whole[i], "own": own, "least": least}
                found[clock] |= {"ratio": whole[i] / (one[i] + own), "ratio_of_least": whole[i] / (one[i] + least)}
            rounds.append(found)
    n_least = given.state + given.questions * n_own
    ratio = statistics.median(each["s"]["ratio"] for each in rounds)
    report: JsonObject = {"model": given.model, "n_state": given.state, "n_questions": given.questions, "n_own": n_own}
    report |= {"ratio": ratio, "tokens_ratio": rounds[0]["n_tokens"] / n_least, "rounds": rounds}
    text = json.dumps(report | {"machine": machine(), "code": code(), "time": now()}, indent=1, default=str)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
