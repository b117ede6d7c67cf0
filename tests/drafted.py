"""Random schedules with drafts, to be compared with a plain run: requests that share prefixes, forks, penalties, seeds, stop tokens,
aborts, preemption. A plain run says what comes; the run with drafts is given drafts that are right up to a random place.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from deltic.engine.drafts import Drafter, Drafting
from deltic.engine.engine import Engine
from deltic.engine.messages import Constraint, Request, SamplingParams, TokenLogprob
from deltic.engine.step import Sequence

Answers = dict[tuple[str, int], tuple[list[int], list[TokenLogprob], str | None]]


@dataclass(frozen=True)
class Sizes:
    """Of a schedule."""

    n_requests: int = 10
    n_tokens: int = 40
    shared: tuple[int, ...] = (0, 64, 130, 150)
    """Tokens with which a prompt begins as others do."""
    n_own: int = 70
    abort_at: int = 25
    """The step."""
    preempts: float = 0.05
    """How likely a step begins with a preemption."""


def requests(seed: int, sizes: Sizes = Sizes()) -> list[Request]:
    """With prompts that begin alike, and every setting that a draw can have."""
    draw, found = random.Random(seed), []
    shared = [draw.randrange(256) for _ in range(max(sizes.shared))]
    for i in range(sizes.n_requests):
        own = [draw.randrange(256) for _ in range(draw.randrange(1, sizes.n_own))]
        prompt = shared[: draw.choice(sizes.shared)] + own
        params = SamplingParams(
            max_tokens=draw.randrange(1, sizes.n_tokens),
            temperature=draw.choice((0.0, 0.7, 1.5)),
            top_k=draw.choice((0, 5)),
            seed=draw.randrange(1000),
            n=draw.choice((1, 1, 1, 2)),
            logprobs=draw.choice((None, 0, 3)),
            min_tokens=draw.choice((0, 0, 6)),
            stop_token_ids=tuple(draw.sample(range(256), 3)),
            ignore_eos=draw.random() < 0.5,
            frequency_penalty=draw.choice((0.0, 0.0, 0.8)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.3)),
            logit_bias=draw.choice(({}, {}, {7: 4.0, 9: -50.0})),
            constraint=Constraint(bad_ids=((11, 12),)) if draw.random() < 0.15 else None,
        )
        found.append(Request(id=str(i), prompt_ids=prompt, params=params))
    return found


@dataclass
class Schedule:
    """When requests come, and what happens to them meanwhile."""

    seed: int
    aborted: tuple[str, ...] = ("3",)
    truth: Answers | None = None
    """What a plain run gave: of it the drafts are made."""
    sizes: Sizes = Sizes()
    draw: random.Random = field(init=False)

    def run(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Answers, Engine]:
        self.draw = random.Random(self.seed)
        monkeypatch.setattr(Drafter, "propose", self.propose)
        monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)  # every row is worth it
        monkeypatch.setattr(Drafting, "_is_probe", lambda self, n: False)
        engine, waiting, answers = Engine(runner), requests(self.seed, self.sizes), dict[Any, Any]()
        n_steps = 0
        while waiting or engine.has_work():
            while waiting and self.draw.random() < 0.3:
                engine.add(waiting.pop(0))
            is_due = self.draw.random() < self.sizes.preempts or (self.sizes.preempts > 0 and n_steps in (12, 24))
            if is_due and (running := engine.scheduler._decodes):
                engine.scheduler._preempt(self.draw.choice(running))
            if n_steps == self.sizes.abort_at:
                for name in self.aborted:
                    engine.abort(name)
            self.sequences = {id(s.tokens): s for s in engine.scheduler.sequences()}
            for output in engine.step():
                tokens, logprobs, _ = answers.setdefault((output.id, output.index), ([], [], None))
                tokens += output.token_ids
                logprobs += output.logprobs or []
                answers[output.id, output.index] = tokens, logprobs, output.finish_reason
                assert output.error is None, output.error
            engine.check()
            n_steps += 1
        return {key: answer for key, answer in answers.items() if key[0] not in self.aborted}, engine

    def propose(self, tokens: Any, most: int, forced: Any = ()) -> list[int]:
        """What a plain run drew next, up to a random place, then something else."""
        sequence: Sequence | None = self.sequences.get(id(tokens))
        if sequence is None:  # just forked
            return []
        if self.truth is None or sequence.request.id in self.aborted:
            return [self.draw.randrange(256) for _ in range(min(most, self.draw.randrange(3)))]
        known = self.truth[sequence.request.id, sequence.index][0]
        draft = known[sequence.n_generated : sequence.n_generated + min(most, self.draw.randrange(9))]
        wrong = self.draw.randrange(12)
        if wrong < len(draft):
            draft[wrong] = (draft[wrong] + 1) % 256
        return draft
