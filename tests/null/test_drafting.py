"""Drafts: what is guessed where text repeats itself, which proposer is trusted, and how long drafts are."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deltic.engine.drafts import LEAST, MAX_PAUSE, N_AT_ONCE, N_INDEXED, Drafter, Drafting, Record, Repeats, StepTimes
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


def test_a_record_follows_what_became_of_drafts() -> None:
    record = Record()
    assert record.chance == 0.75
    for _ in range(20):
        record.observe(4, 4)
    assert record.chance > 0.99
    record.observe(4, 0)
    assert 0.9 < record.chance < 0.97 and (record.n_misses, record.pause) == (1, 0)
    pauses = []
    for _ in range(9):
        record.observe(1, 0)
        pauses.append(record.pause)
    assert pauses[:4] == [4, 8, 16, 32] and pauses[-1] == MAX_PAUSE
    assert record.n_right / record.n_seen < 0.5 and record.chance == 0.5  # a try
    record.observe(1, 1)
    assert (record.n_misses, record.pause) == (0, 0)


def test_the_better_proposer_is_taken() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    drafter = Drafter(guesses=[7, 8, 9, 10])
    assert drafter.propose(tokens, 8) == [7, 8, 9, 10] and drafter.used is drafter.of_head  # the longer one
    drafter.guesses = [7, 8]
    assert drafter.propose(tokens, 8) == [4, 5, 6] and drafter.used is drafter.of_repeats
    for _ in range(3):
        drafter.of_repeats.observe(3, 1)
    assert drafter.propose(tokens, 8) == [7, 8]
    assert drafter.propose(tokens, 1) == [7]
    for _ in range(3):
        drafter.of_head.observe(2, 0)
    assert drafter.of_head.pause == 8
    for _ in range(8):
        assert drafter.propose(tokens, 8) == [4, 5, 6]
    for _ in range(2):
        drafter.of_repeats.observe(3, 0)
    for _ in range(4):
        assert drafter.propose(tokens, 8)[:2] == [7, 8]


def test_guesses_that_are_not_worth_their_row_are_not_made() -> None:
    drafter = Drafter()
    assert [drafter.n_guesses(8, least) for least in (0.9, 0.75, 0.5, 0.05)] == [1, 1, 2, 8]
    for _ in range(3):
        drafter.of_head.observe(2, 0)
    assert drafter.n_guesses(8, 0.05) == 0
    drafter.of_head.pause = 1  # in the next step one is tried
    assert drafter.n_guesses(8, 0.5) == 1
    drafter = Drafter(guesses=[1])
    drafter.used = drafter.of_repeats
    for _ in range(5):
        drafter.of_repeats.observe(8, 8)
    assert drafter.n_guesses(8, 0.05) == 0


def test_times_are_known_hoped_for_or_in_between() -> None:
    times = StepTimes()
    assert times.seconds(1, 0) < times.seconds(1, 4) < 4 * times.seconds(1, 0)
    times.observe(1, 0, 2.0)
    assert times.seconds(1, 0) == 2.0 and times.seconds(1, 4) == 4.0 and times.seconds(1, 1) == 2.5
    times.observe(1, 4, 8.0)
    assert [times.seconds(1, n) for n in (1, 2, 4)] == [3.5, 5.0, 8.0]
    for _ in range(5):
        times.observe(1, 4, 3.0)  # one that was slow is forgotten
    assert times.seconds(1, 4) == 3.0 and times.seconds(1, 8) == 4.5
    times.observe(3, 2, 6.0)
    assert times.seconds(3, 0) < times.seconds(3, 2) == 6.0


@pytest.mark.parametrize(("row_s", "n_taken"), [(0.0, [5, 4]), (0.1, [5, 1]), (0.3, [3, 0]), (0.7, [0, 0])])
def test_the_rows_that_make_tokens_cheapest_run(row_s: float, n_taken: list[int]) -> None:
    """Of a sequence whose drafts were right, more than of one whose were wrong."""
    engine = Engine(FakeRunner(max_num_seqs=2, max_drafts=8))
    scheduler = engine.scheduler
    for name in "ab":
        engine.add(Request(id=name, prompt_ids=[20, 21], params=SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.step()
    good, bad = scheduler.sequences()
    good.drafter, bad.drafter = Drafter(guesses=[30, 31, 32, 33, 34]), Drafter(guesses=[40, 41, 42, 43])
    good.drafter.of_head, bad.drafter.of_head = Record(9.0, 10.0), Record(5.0, 10.0)
    drafting = Drafting(8, has_head=True, guides=None)
    for n in range(10):
        drafting.times.observe(2, n, 1.0 + row_s * n)
    step = scheduler.plan()
    assert step is not None
    for chunk in step.chunks:
        chunk.drafts, chunk.length = [], 1
    good.drafter.of_repeats.pause = bad.drafter.of_repeats.pause = 9
    drafting.plan(step, has_prefills=False)
    assert [len(chunk.drafts) for chunk in step.chunks] == n_taken
    assert [chunk.length for chunk in step.chunks] == [1 + n for n in n_taken]
    assert step.draws[0].n_guesses >= step.draws[1].n_guesses >= 1


@pytest.mark.parametrize("seed", range(30))
def test_schedules_with_drafts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong drafts of any length, with prefixes, forks, few pages, preemption, aborts: the fake runner compares
    pages and states with the tokens at every step. Every third as on a GPU, where decodes are no prefills."""
    rng = random.Random(seed)
    runner = FakeRunner(
        n_pages=rng.choice((12, 40)),
        max_num_seqs=4,
        max_step_tokens=128,
        max_drafts=rng.choice((1, 5, 31)),
        head=random.Random(seed) if seed % 2 else None,
        gpu=seed % 3 == 0,
    )
    monkeypatch.setattr(StepTimes, "seconds", lambda self, n, n_drafted: 1.0)
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

    def propose(_: Drafter, tokens: Any, most: int, forced: Any = ()) -> list[int]:
        sequence = next(s for s in engine.scheduler.sequences() if s.tokens is tokens)
        known = truth.get((sequence.request.id, sequence.index), [])
        draft = known[sequence.n_generated :][: min(most, rng.randrange(40))]
        return [token if rng.random() < 0.9 else token + 1 for token in draft]

    if not runner.info.has_draft_head:
        monkeypatch.setattr(Drafter, "propose", propose)
    found, n_entries = dict[tuple[str, int], list[int]](), dict[tuple[str, int], int]()
    gone = str(rng.randrange(8))
    while waiting or engine.has_work():
        while waiting and rng.random() < 0.4:
            engine.add(waiting.pop())
        # on a GPU what is lost comes back token by token, and must not be lost again before it is there
        if rng.random() < (0.01 if runner.gpu else 0.1) and (running := engine.scheduler._decodes):
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


def test_a_request_that_waits_stops_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rows of a prefill do."""
    monkeypatch.setattr(StepTimes, "seconds", lambda self, n, n_drafted: 1.0)
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
