"""Drafts by what repeats itself: what is guessed, and how long."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deltic.engine.drafts import LEAST, MAX_PAUSE, N_AT_ONCE, N_INDEXED, Drafter, Repeats
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import mixed_seed
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
    assert len(repeats.before) == len(tokens) - repeats.first


def test_long_prompts_are_indexed_some_tokens_a_step() -> None:
    """And only their end is searched."""
    near, far = [1, 2, 3, 4], [5, 6, 7, 8]
    tokens = [*far, *range(10, 9 + N_INDEXED - len(near)), *near, 5, 6, 7]
    assert len(tokens) > N_INDEXED + LEAST
    repeats = Repeats()
    for _ in range(N_INDEXED // N_AT_ONCE - 1):
        assert repeats.follow([*tokens, 1, 2, 3], 4) == []
    assert repeats.follow([*tokens, 1, 2, 3], 4) == [4, 5, 6]
    assert repeats.follow([*tokens, 1, 2, 3, 9, 5, 6, 7], 4) == [1, 2, 3]  # not what is too far


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
    engine, truth, params_of = Engine(runner), dict[tuple[str, int], list[int]](), dict[str, SamplingParams]()
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
        params_of[str(i)] = params
        for index in range(params.n):
            truth[str(i), index] = expected_tokens(prompt, params, mixed_seed(i, index))

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
    for (name, index), tokens in truth.items():
        if name != gone:
            assert found[name, index] == tokens
            assert n_entries[name, index] == (0 if params_of[name].logprobs is None else len(tokens))


def test_a_request_that_waits_stops_no_drafts() -> None:
    """Only the rows of a prefill do."""
    engine = Engine(FakeRunner(max_num_seqs=1, max_drafts=8))
    for name in "ab":
        bias = {"max_tokens": 100, "seed": 1, "ignore_eos": True}
        engine.add(Request(id=name, prompt_ids=[20, 21], params=SamplingParams(**bias)))
    n_tokens = dict.fromkeys("ab", 0)
    while engine.has_work():
        truth = expected_tokens([20, 21], SamplingParams(max_tokens=100, seed=1, ignore_eos=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Drafter, "propose", lambda _, tokens, most, truth=truth: truth[len(tokens) - 2 :][: min(most, 4)]
            )
            for output in engine.step():
                n_tokens[output.id] += len(output.token_ids)
                assert len(output.token_ids) == 1, "an output of several tokens"
    assert n_tokens == {"a": 100, "b": 100} and engine.n_steps < 50
