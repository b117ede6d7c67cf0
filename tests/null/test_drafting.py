"""Drafts by what repeats itself: what is guessed, and how long."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deltic.engine.drafts import LEAST, MAX_PAUSE, N_INDEXED, Drafter, Repeats
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from tests.fakes import FakeRunner, expected_tokens


def follow(tokens: list[int], most: int = 8) -> list[int]:
    return Repeats().follow(tokens, most)


def test_what_followed_the_same_run_is_guessed() -> None:
    assert follow([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6]  # as many as the run has
    assert follow([1, 2, 3, 4, 5, 6, 9, 2, 3]) == []  # too short a run
    assert follow([1, 2, 3]) == follow([]) == follow([7, 7]) == []
    assert follow([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], most=1) == [4]


def test_the_longest_run_wins_then_the_latest() -> None:
    long, short = [5, 6, 1, 2, 3, 10, 11, 12, 13], [8, 1, 2, 3, 20, 21]
    assert follow([*long, *short, 5, 6, 1, 2, 3]) == [10, 11, 12, 13, 8]
    assert follow([1, 2, 3, 30, 9, 1, 2, 3, 40, 8, 1, 2, 3]) == [40, 8, 1]


def test_a_run_that_goes_on_into_itself() -> None:
    assert follow([7] * 12) == [7] * 8
    assert follow([1, 2] * 8) == [1, 2] * 4


def test_growing_texts_are_indexed_once() -> None:
    """A guess for a text that grew is that for the same text at once, but for places that are too old."""
    draw = random.Random(0)
    repeats, tokens = Repeats(), [draw.randrange(4) for _ in range(50)]
    for _ in range(200):
        tokens.append(draw.randrange(4))
        assert repeats.follow(tokens, 5) == follow(tokens, 5)
    assert repeats.n_known == len(tokens)


def test_only_the_end_of_a_long_prompt_is_searched() -> None:
    tokens = [1, 2, 3, 4, *range(10, 10 + N_INDEXED), 1, 2, 3]
    assert follow(tokens) == [] and len(tokens) > N_INDEXED + LEAST


def test_the_depth_follows_what_became_of_drafts() -> None:
    drafter = Drafter()
    tokens = [*range(20), *range(10)]
    assert len(drafter.propose(tokens, 8)) == 2
    for depth in (4, 8, 8):
        drafter.observe(drafter.depth, drafter.depth, 8)
        assert drafter.depth == depth
    drafter.observe(8, 3, 8)
    assert drafter.depth == 3
    pauses = []
    for _ in range(9):
        drafter.observe(1, 0, 8)
        pauses.append(drafter.pause)
    assert pauses[:4] == [0, 4, 8, 16] and pauses[-1] == MAX_PAUSE and drafter.depth == 1
    for _ in range(MAX_PAUSE):
        assert drafter.propose(tokens, 8) == []
    assert drafter.propose(tokens, 8) != []
    drafter.observe(1, 1, 8)
    assert (drafter.n_misses, drafter.pause) == (0, 0)


@pytest.mark.parametrize("seed", range(30))
def test_schedules_with_drafts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong drafts of any length, with prefixes, forks, few pages, preemption, aborts: the fake runner compares
    pages and states with the tokens at every step."""
    rng = random.Random(seed)
    runner = FakeRunner(
        n_pages=rng.choice((12, 40)), max_num_seqs=4, max_step_tokens=128, max_drafts=rng.choice((1, 5, 31))
    )
    engine, truth = Engine(runner), dict[tuple[str, int], list[int]]()
    waiting = []
    for i in range(8):
        prompt = [
            *range(20, 20 + rng.choice((0, 64, 100))),
            *(rng.randrange(20, 900) for _ in range(rng.randrange(1, 90))),
        ]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 150), seed=i, ignore_eos=rng.random() < 0.5, min_tokens=rng.choice((0, 9)),
            n=rng.choice((1, 1, 2)), logprobs=rng.choice((None, 1)),
        )  # fmt: skip
        waiting.append(Request(id=str(i), prompt_ids=prompt, params=params))
        truth[str(i), 0] = expected_tokens(prompt, params)

    def propose(_: Drafter, tokens: Any, most: int) -> list[int]:
        sequence = next(s for s in engine.scheduler.sequences() if s.tokens is tokens)
        known = truth.get((sequence.request.id, sequence.index), [])
        draft = known[sequence.n_generated :][: min(most, rng.randrange(40))]
        return [token if rng.random() < 0.9 else token + 1 for token in draft]

    monkeypatch.setattr(Drafter, "propose", propose)
    found, n_entries = dict[tuple[str, int], list[int]](), dict[tuple[str, int], int]()
    gone = str(rng.randrange(8))
    while waiting or engine.has_work():
        while waiting and rng.random() < 0.4:
            engine.add(waiting.pop())
        if rng.random() < 0.1 and (running := engine.scheduler._decodes):
            engine.scheduler._preempt(rng.choice(running))
        if rng.random() < 0.01:
            engine.abort(gone)
        for output in engine.step():
            key = output.id, output.index
            found.setdefault(key, []).extend(output.token_ids)
            n_entries[key] = n_entries.get(key, 0) + len(output.logprobs or [])
            assert output.error is None
        engine.check()
    stats = engine.stats()
    assert 0 < stats.n_accepted < stats.n_drafted
    for (name, index), tokens in found.items():
        if index == 0 and name != gone:
            assert tokens == truth[name, 0]
            assert n_entries[name, 0] in (0, len(tokens))
