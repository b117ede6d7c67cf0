"""Drafts that are right as often as one says: steps of a runner are real, what is drawn and guessed is not.

For benches: a model without trained weights guesses nothing right.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltic.bench.provenance import checked
from deltic.engine.drafts import n_guessable
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Step, StepResult


@dataclass
class Planted:
    """A runner that draws what it is told to."""

    runner: Any
    answers: Mapping[str, list[int]]
    """By the request's id."""
    accept: float
    """The probability of a guess to be right, if those before are."""
    head: Any = None
    """The draft head or block drafter, if it guesses."""
    is_free: bool = False
    """Whether there are guesses without a head, which cost nothing."""

    def __post_init__(self) -> None:
        self.rng = random.Random(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def step(self, step: Step) -> StepResult:
        setattr(self.runner, head_of(self.runner), self.head)
        result: StepResult = self.runner.step(step)
        if self.is_free:
            result.guesses = [[] for _ in step.draws]
        for i, draw in enumerate(step.draws):
            answer, drafts = self.answers[draw.sequence.request.id], step.chunks[draw.chunk].drafts
            at, n = draw.sequence.n_generated, 1
            while n <= len(drafts) and drafts[n - 1] == answer[at + n - 1]:
                n += 1
            result.tokens[i] = answer[at : at + n]
            if result.guesses:
                n_guesses = len(result.guesses[i])
                if self.is_free:
                    n_guesses = min(draw.n_guesses, n_guessable(draw.sequence, n))
                truth = answer[at + n : at + n + n_guesses]
                result.guesses[i] = [id if self.rng.random() < self.accept else id + 1 for id in truth]
        return result


def head_of(runner: Any) -> str:
    """The attribute of a runner that guesses: one of the two, by its plan."""
    return "draft_head" if runner.plan.drafter is None else "block_drafter"


def decode(engine: Engine, prompts: Mapping[str, list[int]], answers: Mapping[str, list[int]]) -> tuple[float, float]:
    """Milliseconds a token of each sequence, and tokens of each a step, while all of them decode.

    prompts, answers: by the request's id.
    """
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=len(answers[name]), temperature=1.0, seed=1, ignore_eos=True)
        engine.add(Request(id=name, prompt_ids=prompt, params=params))
    n_drawn, n_first, n_steps, begin = dict.fromkeys(prompts, 0), 0, 0, 0.0
    is_over = False
    while not is_over:
        for output in checked(engine.step()):
            n_drawn[output.id] += len(output.token_ids)
            is_over |= output.finish_reason is not None
        if begin:
            n_steps += 1
        elif all(n_drawn.values()):
            begin, n_first = time.perf_counter(), sum(n_drawn.values())
    seconds, n = time.perf_counter() - begin, (sum(n_drawn.values()) - n_first) / len(n_drawn)
    for name in n_drawn:
        engine.abort(name)
    return 1000 * seconds / n, n / n_steps
