"""What constrained sequences cost beside free ones: ms a token of a batch of N, of which none, half or all
follow a grammar.

Everything is the engine's, but for the server: prompts of 65 random tokens, temperature 1, random weights of
a shape. A round's figure is the time of the middle half of its steps, divided by the tokens that each
sequence drew in them; rounds of none, half and all take turns, the figure of each is their median, and ratios
are taken within a round. Sequences that end before their length are no measurement: the part fails then.
docs/log/2026-11.md, "Constrained sequences on a GPU", has what came of it.
`python -m bench.gpu.constrained --dummy qwen3.5-0.8b --n 16,64`
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import llguidance

from bench.gpu.experiment import parser, run
from deltic.bench.provenance import checked
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.guides import Vocabulary
from deltic.engine.messages import Constraint, Request, SamplingParams
from deltic.models.checkpoint import tokenizer_json
from deltic.runtime.build import build_runner

PLACE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["path", "line", "text"],
    "properties": {"path": {"type": "string", "minLength": 3}, "line": {"type": "integer"}, "text": {"type": "string"}},
}
FILES = {
    "type": "object",
    "additionalProperties": False,
    "required": ["files"],
    "properties": {"files": {"type": "array", "items": PLACE, "minItems": 300}},
}
"""Longer than any answer here."""
GRAMMARS: dict[str, Callable[[], str]] = {
    "json": lambda: llguidance.LLMatcher.grammar_from_json_schema(FILES),
    "letters": lambda: llguidance.LLMatcher.grammar_from_lark("start: /[a-zA-Z ,.]{1,20000}/"),
}


def ms_a_token(engine: Engine, n: int, n_constrained: int, n_output: int, grammar: str, name: str) -> float:
    """Of the whole batch, where nobody starts and nobody ends."""
    for i in range(n):
        constraint = Constraint(grammar=grammar) if i < n_constrained else None
        params = SamplingParams(max_tokens=n_output, temperature=1.0, seed=i, ignore_eos=True, constraint=constraint)
        prompt = [(7 * i + j) % 1000 for j in range(65)]
        engine.add(Request(id=f"{name}-{i}", prompt_ids=prompt, params=params))
    seconds, n_tokens = list[float](), list[int]()
    while engine.has_work():
        begin = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - begin)
        n_tokens.append(sum(len(output.token_ids) for output in checked(outputs)))
    if sum(n_tokens) != n * n_output:
        raise RuntimeError(f"{n} sequences of {n_output} tokens drew {sum(n_tokens)}")
    middle = slice(len(seconds) // 4, 3 * len(seconds) // 4)
    return sum(seconds[middle]) / sum(n_tokens[middle]) * n * 1000


def measure(row: Callable[..., None], arguments: argparse.Namespace) -> None:
    sizes = [int(n) for n in arguments.n.split(",")]
    config = EngineConfig(
        dummy=arguments.dummy,
        max_num_seqs=max(sizes),
        memory_gb=arguments.memory_gb,
        prefix_cache=False,
        max_model_len=4096,
    )
    runner = build_runner(config, lambda stage, done: None)
    engine = Engine(runner, None, Vocabulary(lambda: tokenizer_json(config)))
    engine.guides.prepare()
    grammar = GRAMMARS[arguments.grammar]()
    for n in sizes:
        times: dict[int, list[float]] = {n_constrained: [] for n_constrained in (0, n // 2 or 1, n)}
        ms_a_token(engine, n, n // 2 or 1, arguments.output, grammar, f"warm {n}")
        for r in range(arguments.rounds):
            for n_constrained, found in times.items():
                name = f"{n} {r} {n_constrained}"
                found.append(ms_a_token(engine, n, n_constrained, arguments.output, grammar, name))
        free_ms = times[0]
        for n_constrained, found in times.items():
            ms, beside = statistics.median(found), [a / b for a, b in zip(found, free_ms, strict=True)]
            row(
                n=n,
                output=arguments.output,
                constrained=n_constrained,
                ms_a_token=round(ms, 4),
                times_free=round(statistics.median(beside), 3),
                round_ms=[round(ms, 4) for ms in found],
                round_times_free=[round(times, 3) for times in beside],
            )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--dummy", default="qwen3.5-0.8b", metavar="SHAPE", help="default: qwen3.5-0.8b")
    flags.add_argument("--n", default="16,64", metavar="N,N,...", help="sequences (default: 16,64)")
    flags.add_argument("--output", type=int, default=200, metavar="TOKENS", help="default: 200")
    flags.add_argument("--rounds", type=int, default=3, metavar="R", help="default: 3")
    flags.add_argument("--grammar", choices=[*GRAMMARS], default="json", help="default: json")
    flags.add_argument("--memory-gb", type=float, default=60.0, metavar="GB", help="default: 60")
    arguments = flags.parse_args()
    run(f"constrained-{arguments.dummy}", {"constrained": lambda row: measure(row, arguments)}, arguments)


if __name__ == "__main__":
    main()
