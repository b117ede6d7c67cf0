"""Drafts: what is guessed where text repeats itself, which proposer is trusted, and how long drafts are."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from deltic.engine.drafts import (
    LEAST,
    MAX_FIRST_PAUSE,
    MAX_PAUSE,
    N_AT_ONCE,
    N_INDEXED,
    N_VALID,
    OWN,
    Drafter,
    Drafting,
    Record,
    Repeats,
    Times,
)
from deltic.engine.engine import Engine
from deltic.engine.guides import Guides
from deltic.engine.messages import Constraint, Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Sequence, Step, mixed_seed
from deltic.ops.geometry import PAGE_SIZE
from tests.fakes import EOS, VOCAB_SIZE, FakeRunner, expected_tokens


def follow(tokens: list[int], most: int = 8) -> list[int]:
    return Repeats().follow(tokens, most)


@pytest.mark.parametrize(
    ("drawn", "counts"),
    [([7, 8, 9], [7, 8, 9]), ([7, 6, 9], [7, 6]), ([6, 8, 9], [6]), ([7, -1, -1], [7]), ([7, 8, -1], [7, 8])],
)
def test_what_counts_ends_where_a_draw_differs_or_there_is_none(drawn: list[int], counts: list[int]) -> None:
    sequence = Sequence(Request(id="a", prompt_ids=[], params=SamplingParams()), 0, 1, array("i", [1] * 6), 5)
    assert Chunk(sequence, 5, 3, drafts=[7, 8]).accepted(drawn) == counts


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
    for _ in range(40):
        record.observe(4, 4)
    assert record.chance > 0.99
    for _ in range(4):
        record.observe(4, 0)  # a line of bad luck is no reason to pause
    assert 0.85 < record.chance < 0.95 and record.n_misses == 0
    for _ in range(60):
        record.observe(1, 0)
    assert record.chance < 0.1


def due(record: Record, n: int = 2 * MAX_PAUSE) -> list[int]:
    """The steps from 1 on in which it proposes."""
    return [step for step in range(1, n + 1) if record.is_due(step, step - 1)]


def test_a_draft_that_is_not_worth_its_rows_is_tried_again_less_and_less_often() -> None:
    record = Record(1.0, 10.0)
    assert due(record, 4) == [1, 2, 3, 4]
    record.miss()
    assert due(record, 8) == [2, 4, 6, 8] and record.chance == 0.5  # a try
    record.miss()
    assert due(record, 8) == [4, 8]
    for _ in range(20):
        record.miss()
    assert due(record) == [MAX_PAUSE, 2 * MAX_PAUSE]
    record.observe(1, 1)
    assert record.n_misses == 0 and record.chance < 0.25
    record.miss()
    record.observe(1, 0)  # the try was in vain
    assert due(record, 8) == [4, 8]


def test_the_better_proposer_is_taken() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    drafter = Drafter(guesses=[7, 8, 9, 10])
    assert drafter.propose(tokens, 8, 1) == [7, 8, 9, 10] and drafter.used is drafter.of_head  # the longer one
    assert drafter.propose([1, 2], 0, 1) == [] and drafter.used is drafter.of_head
    drafter.guesses = [7, 8]
    assert drafter.propose(tokens, 8, 1) == [4, 5, 6] and drafter.used is drafter.of_repeats
    for _ in range(3):
        drafter.of_repeats.observe(3, 1)
    assert drafter.propose(tokens, 8, 1) == [7, 8]
    assert drafter.propose(tokens, 1, 1) == [7]
    drafter.guesses = []
    for _ in range(2):
        drafter.of_repeats.miss()
    for step in (1, 2, 3):
        assert drafter.propose(tokens, 8, step) == [] and drafter.used is drafter.of_head
    assert drafter.propose(tokens, 8, 4) == [4, 5, 6]
    assert drafter.propose(tokens, 8, 3, forced=[1, 1]) == [1, 1] and drafter.used is drafter.of_grammar


def test_a_sequence_begins_with_what_is_known_of_others() -> None:
    known = Drafter()
    one = known.begun(0)
    for _ in range(30):
        one.propose([1, 2], 4, 1)  # nothing: the head's turn
        one.observe(4, 0, known)
    assert one.of_repeats.chance == known.of_repeats.chance == 0.75
    one.of_head.miss()
    another = known.begun(0)
    assert another.of_head.chance == known.of_head.chance < 0.1 and another.of_head.is_due(1, 0)
    for n_misses in range(1, 9):  # tries in vain: those of other sequences begin later
        one.propose([1, 2], 4, 1)
        one.observe(1, 0, known)
        first = min(MAX_FIRST_PAUSE, 2 ** (1 + n_misses))
        assert due(known.begun(0).of_head, 64) == list(range(first, 65, first)) and known.begun(0).of_head.chance == 0.5
    another.propose([1, 2], 4, 1)
    another.observe(4, 4, known)
    assert another.of_head.chance > 0.6, "what is its own counts more"
    assert known.begun(0).of_head.is_due(1, 0)


def test_times_are_those_of_as_many_tokens_or_on_a_line_through_all() -> None:
    times = Times(4.0)

    def at(n: int, *counts: int) -> list[float]:
        return [times.seconds(n, 20)[count] for count in counts]

    assert times.seconds(2, 4) == []
    times.observe(2, 0, 8.0)
    assert at(2, 0, 4) == pytest.approx([8.0, 12.0])  # as is believed: a quarter a row
    for n_tokens in (0, 2, 4, 8) * 20:
        times.observe(2, n_tokens, 8.0 + 0.1 * n_tokens)
    assert at(2, 0, 3, 16) == pytest.approx([8.0, 8.3, 9.6], rel=0.02)
    for _ in range(10):
        times.observe(2, 16, 30.0)  # a line does not know
    assert at(2, 16)[0] > 20.0 and at(2, 0, 4) == pytest.approx([8.0, 8.4], rel=0.1)
    for n_tokens in (0, 2, 4, 8) * 40:
        times.observe(2, n_tokens, 4.0 + n_tokens)  # what was is forgotten
    assert at(2, 0, 3, 16) == pytest.approx([4.0, 7.0, 20.0], rel=0.05)
    times.observe(2, 4, 100.0)  # another program had the processor
    assert at(2, 4)[0] < 10.0
    for n_tokens in (0, 8) * 40:
        times.observe(2, n_tokens, 4.0 - 0.1 * n_tokens)
    assert at(2, 20)[0] > 3.0  # no row makes a step shorter


def test_times_of_guesses_are_nothing_without_any() -> None:
    times = Times(0.0)
    times.observe(3, 2, 2.0)
    assert times.seconds(3, 4) == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])
    assert times.seconds(4, 4) == []


def decode(sequence: Sequence, i: int) -> tuple[Chunk, Draw]:
    """Its next decode, as chunk i."""
    return Chunk(sequence, len(sequence.tokens) - 1, 1), Draw(i, sequence)


def decoding(n: int = 1, **params: Any) -> list[Sequence]:
    """Sequences with a prompt of one token, and one that was drawn."""
    request = Request(id="1", prompt_ids=[1], params=SamplingParams(max_tokens=100_000, **params))
    return [Sequence(request, i, 0, array("i", [5, 6]), 1, n_computed=1) for i in range(n)]


def planned(good: Record, bad: Record, row_s: float, guess_s: float = 0.0, has_head: bool = True) -> Step:
    """The step of two sequences, with guesses of the head and such records, if rows and guesses cost so much."""
    engine = Engine(FakeRunner(max_num_seqs=2, max_drafts=8))
    for name in "ab":
        engine.add(Request(id=name, prompt_ids=[20, 21], params=SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.step()
    step = engine.scheduler.plan()
    assert step is not None and not any(chunk.drafts for chunk in step.chunks)
    for chunk, record, guesses in zip(step.chunks, (good, bad), ([30, 31, 32, 33, 34], [40, 41, 42, 43]), strict=True):
        chunk.sequence.drafter = Drafter(guesses=guesses, of_head=record)
    drafting = Drafting(8, has_head=has_head, guides=None)
    drafting._n_steps = 3  # those that were missed once or twice are tried in this step
    for n in range(17):
        drafting.steps.observe(2, n, 1.0 + row_s * n)
        drafting.guesses.observe(2, 1 + n, guess_s * (1 + n))
    drafting.plan(step)
    assert [chunk.length for chunk in step.chunks] == [1 + len(chunk.drafts) for chunk in step.chunks]
    return step


@pytest.mark.parametrize(("row_s", "n_taken"), [(0.0, [5, 4]), (0.1, [5, 1]), (0.3, [3, 0]), (0.7, [0, 0])])
def test_the_rows_that_make_tokens_cheapest_run(row_s: float, n_taken: list[int]) -> None:
    """Of a sequence whose drafts were right, more than of one whose were wrong."""
    good, bad = Record(9.0, 10.0), Record(5.0, 10.0)
    step = planned(good, bad, row_s)
    assert [len(chunk.drafts) for chunk in step.chunks] == n_taken
    assert bad.n_misses >= (n_taken[1] == 0)  # not worth a row: soon it pauses


def test_a_miss_counts_once() -> None:
    """Where a step runs ahead, the next is drafted for before it, and, if a draft is in sight, when it is planned."""
    drafting = Drafting(8, has_head=True, guides=None, runs_ahead=True)
    good, bad = sequences = decoding(2)
    good.drafter, bad.drafter = Drafter(of_head=Record(9.0, 10.0)), Drafter(of_head=Record(0.1, 10.0))
    drafting._ahead_s[2] = 1.0, 0
    for n in range(17):
        drafting.steps.observe(2, n, 1.0 + 0.1 * n)
        drafting.guesses.observe(2, 1 + n, 0.1 * (1 + n))
    drafting._n_steps = 6
    good.runs_ahead = bad.runs_ahead = True
    for n_misses in (0, 1):
        chunks, draws = zip(*(decode(one, i) for i, one in enumerate(sequences)), strict=True)
        drafting.plan(step := Step([*chunks], [*draws]))
        assert not step.runs_ahead and bad.drafter.of_head.n_misses == n_misses
    assert draws[0].n_guesses > 0 == draws[1].n_guesses


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_who_sits_out_the_steps_of_tries_tries_later(runs_ahead: bool) -> None:
    """A sequence may draw in every other step, as its masks are late; or each other step may have a prefill."""
    for sits_out in (True, False):
        drafting = Drafting(8, has_head=True, guides=None, runs_ahead=runs_ahead)
        drafting._ahead_s = dict.fromkeys((1, 2), (1.0, 0))
        one, other, new = decoding(3)
        one.drafter = Drafter(of_head=Record(1.0, 10.0, n_misses=3))
        n_tries = 0
        for i in range(1, 200):
            chunks, draws = map(list, zip(*(decode(s, i) for i, s in enumerate((one, other))), strict=True))
            if i % 2 == 0 and sits_out:
                chunks, draws = map(list, zip(decode(other, 0), strict=True))
            elif i % 2 == 0:
                chunks.append(Chunk(new, 0, 1))
            drafting.plan(Step(chunks, draws))
            n_tries += sum(draw.n_guesses for draw in draws if draw.sequence is one)
            for s in {draw.sequence for draw in draws}:
                s.tokens.append(1000 + len(s.tokens))
        assert n_tries >= 15, f"{n_tries} tries in 200 steps"


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("has_head", [False, True])
def test_no_try_is_lost_at_the_end_of_a_page(has_head: bool, runs_ahead: bool) -> None:
    """Those of a long pause are so many steps apart as a page has tokens, or twice as many."""
    for start in range(PAGE_SIZE):
        drafting = Drafting(8, has_head, guides=None, runs_ahead=runs_ahead)
        drafting._ahead_s[1] = 1.0, 0
        (one,) = decoding()
        one.tokens.extend([8] * (PAGE_SIZE + start - 1 - len(one.tokens)))
        one.drafter = Drafter(of_repeats=Record(1.0, 10.0, n_misses=6), of_head=Record(1.0, 10.0, n_misses=6))
        n_tries = 0
        for _ in range(3 * PAGE_SIZE):
            chunk, draw = decode(one, 0)
            drafting.plan(Step([chunk], [draw]))
            n_tries += draw.n_guesses > 0 if has_head else len(chunk.drafts) > 0
            one.tokens.append(1000 + len(one.tokens) if has_head else 8)
        assert 2 <= n_tries <= 6, f"{n_tries} tries from {start} on"


def test_guesses_that_are_not_worth_their_time_are_not_made() -> None:
    def asked(chance: float, row_s: float, guess_s: float) -> list[int]:
        records = [Record(10 * chance, 10.0) for _ in range(2)]
        step = planned(*records, row_s, guess_s)
        assert all(
            (record.n_misses > 0) == (draw.n_guesses == 0) for record, draw in zip(records, step.draws, strict=True)
        )
        return [draw.n_guesses for draw in step.draws]

    assert asked(0.9, 0.02, 0.02) == [8, 8]
    assert asked(0.9, 0.1, 0.1) == [5, 5]
    assert asked(0.5, 0.02, 0.02) == [3, 3]
    assert asked(0.9, 0.02, 1.0) == asked(0.9, 0.5, 0.0) == asked(0.1, 0.05, 0.05) == [0, 0]
    wrong = Record(0.1, 10.0)
    step = planned(Record(9.0, 10.0), wrong, 0.5, 0.5)  # neither its guesses in hand nor more of them
    assert step.draws[1].n_guesses == len(step.chunks[1].drafts) == 0 and wrong.n_misses == 1, "missed once"
    tried = Record(1.0, 10.0, n_misses=2)
    step = planned(Record(9.0, 10.0), tried, 0.02, 0.02)
    assert [draw.n_guesses for draw in step.draws] == [8, 0] and step.chunks[1].drafts, (
        "first it is seen what comes of it"
    )
    step = planned(Record(9.0, 10.0), Record(9.0, 10.0), 0.02, has_head=False)
    assert [draw.n_guesses for draw in step.draws] == [0, 0]


COSTS = {
    "bf16": (30.0, 1.2, 8, 4.2, 3.5, 0.0),
    "int4": (13.0, 1.2, 5, 2.2, 1.2, 0.0),
    "gpu": (1.1, 0.04, 64, 0.04, 0.1, 0.25),
}
"""Milliseconds of a step of 0.8B on two cores, roughly, and on a GPU: without rows, of each up to a number of them, of each row
more; of a guess; and what a step takes less that runs ahead."""


def step_ms(cost: str, n_rows: int) -> float:
    begin, each, knee, more, _, _ = COSTS[cost]
    return begin + each * min(n_rows, knee) + more * max(0, n_rows - knee)


def gained(cost: str, chance: float, n: int, held_up: float = 0.0) -> float:
    """How many times as fast n sequences are with drafts, of which each token is right with this chance. held_up: how many of
    the steps seem to take ten times as long: another program has the processor, with drafts and without."""
    *_, guess_cost, saved = COSTS[cost]
    rng, others = random.Random(1), random.Random(2)
    drafting = Drafting(8, has_head=True, guides=None, runs_ahead=saved > 0)
    spent, n_drawn = 0.0, 0
    for answer in range(3):
        request = Request(id=str(answer), prompt_ids=[1], params=SamplingParams(max_tokens=10_000))
        sequences = [Sequence(request, i, 0, array("i", [5, 6]), 1, n_computed=1) for i in range(n)]
        for _ in range(150):
            step = Step(
                [Chunk(one, len(one.tokens) - 1, 1) for one in sequences],
                [Draw(i, one) for i, one in enumerate(sequences)],
            )
            ran_ahead = sequences[0].runs_ahead
            drafting.plan(step)
            for draw, chunk in zip(step.draws, step.chunks, strict=True):
                n_right = 0
                while n_right < len(chunk.drafts) and rng.random() < chance:
                    n_right += 1
                if chunk.drafts:
                    drafting.count(draw.sequence, len(chunk.drafts), n_right)
                draw.sequence.tokens.extend(rng.choices(range(9999), k=1 + n_right))
                if draw.sequence.drafter is not None:
                    draw.sequence.drafter.guesses = [0] * draw.n_guesses
                n_drawn += 1 + n_right
            guess_ms = guess_cost * max(draw.n_guesses for draw in step.draws)
            took = (step_ms(cost, step.n_tokens) - saved * ran_ahead) * rng.lognormvariate(0, 0.03) + guess_ms
            drafting.observe(step, took / 1000 * (10 if others.random() < held_up else 1), guess_ms / 1000)
            spent += took
    return n_drawn / n * (step_ms(cost, n) - saved) / spent


@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("cost", COSTS)
def test_the_depth_is_nearly_the_best(cost: str, chance: float, n: int) -> None:
    """It learns what steps take and how often guesses are right; drafts of which nothing is right cost nearly nothing."""
    *_, guess, saved = COSTS[cost]
    best = max(
        sum(chance**i for i in range(depth + 1))
        * (step_ms(cost, n) - saved)
        / (step_ms(cost, n + depth * n) + depth * guess - (0 if depth else saved))
        for depth in range(9)
    )
    assert best >= 1.0 and gained(cost, chance, n) > best * (0.85 if chance else 0.98 - 0.03 * (saved > 0))


@pytest.mark.parametrize(("chance", "n"), [(0.8, 1), (0.9, 1), (0.8, 4), (0.9, 4)])
def test_what_holds_up_some_steps_does_not_stop_drafts(chance: float, n: int) -> None:
    """Steps that run ahead are held up as often."""
    assert gained("gpu", chance, n, held_up=0.1) > 0.9 * gained("gpu", chance, n)


def test_where_a_draft_may_come_nothing_runs_ahead() -> None:
    """It comes a step later than where nothing runs ahead; where none is in sight, all steps do."""
    drafting = Drafting(8, has_head=True, guides=None, runs_ahead=True)
    request = Request(id="1", prompt_ids=[1], params=SamplingParams(max_tokens=10_000))
    one = Sequence(request, 0, 0, array("i", [5, 6]), 1, n_computed=1)

    def stepped(seconds: float = 1.0) -> Step:
        step = Step([Chunk(one, len(one.tokens) - 1, 1)], [Draw(0, one)])
        ran_ahead = one.runs_ahead
        drafting.plan(step)
        (chunk,), (draw,) = step.chunks, step.draws
        assert not (ran_ahead and (chunk.drafts or draw.n_guesses)), "what ran ahead has no draft"
        assert not (step.runs_ahead and (chunk.drafts or draw.n_guesses)), "and runs behind none"
        if chunk.drafts:
            drafting.count(one, len(chunk.drafts), n_right := min(len(chunk.drafts), right))
            one.tokens.extend(range(n_right))
        one.tokens.append(len(one.tokens) + 1000)
        if draw.n_guesses:
            one.drafter.guesses = [7] * draw.n_guesses
        drafting.observe(step, seconds + 0.01 * len(chunk.drafts) + 0.02 * draw.n_guesses, 0.02 * draw.n_guesses)
        return step

    right = 8
    probes = [stepped() for _ in range(3)]  # what a step takes that runs ahead is seen first
    assert all(step.runs_ahead for step in probes)
    assert not stepped().runs_ahead and stepped().draws[0].n_guesses > 0
    steps = [stepped(1.3) for _ in range(40)]
    assert sum(len(step.chunks[0].drafts) > 2 for step in steps) > 32, "but for ends of pages"
    right = 0
    steps = [stepped(1.3 if not one.runs_ahead else 1.0) for _ in range(1200)]
    assert sum(not step.runs_ahead for step in steps[600:]) < 15, "a try takes three steps"
    right = 8
    steps = [stepped(1.3 if not one.runs_ahead else 1.0) for _ in range(600)]
    assert sum(not step.runs_ahead for step in steps[300:]) > 290, "but for what a plain step takes now"
    steps = [stepped(9.0 if not one.runs_ahead else 0.5) for _ in range(N_VALID + 100)]
    assert sum(step.runs_ahead for step in steps[-100:]) > 80, "plain steps are cheaper now"


def test_who_computes_again_what_was_lost_stops_no_drafts() -> None:
    """Such a decode draws nothing, and is one of the step's sequences: what is known of times is of as many."""
    drafting = Drafting(8, has_head=True, guides=None, runs_ahead=True)
    one, lost = decoding(2)
    lost.tokens.extend([7] * 100)
    n_guessed, times = 0, {True: 1.0, False: 1.1}
    for n_known in range(1, 40):
        chunk, draw = decode(one, 0)
        step = Step([chunk, Chunk(lost, n_known, 1)], [draw])
        ran_ahead = one.runs_ahead
        drafting.plan(step)
        if chunk.drafts:
            drafting.count(one, len(chunk.drafts), len(chunk.drafts))
            one.tokens.extend(chunk.drafts)
        one.tokens.append(len(one.tokens) + 1000)
        one.drafter = one.drafter or Drafter()
        one.drafter.guesses = [7] * draw.n_guesses
        n_guessed += draw.n_guesses > 0
        guess_s = 0.02 * draw.n_guesses
        drafting.observe(step, times[ran_ahead] + 0.01 * len(chunk.drafts) + guess_s, guess_s)
    assert n_guessed > 25 and drafting.accepted["2"] > 20


def test_one_slow_step_does_not_make_drafts_look_good() -> None:
    """The first of a kind may take long: what it runs is put in place. As soon as another takes less, that counts."""
    drafting = Drafting(1, has_head=False, guides=None, runs_ahead=True)
    (one,) = decoding()
    one.tokens.extend([8] * 20)  # it repeats itself, and half of what is guessed is right
    n_ahead, n_draws = 0, 0
    for i in range(3 * N_VALID):
        chunk, draw = decode(one, 0)
        step = Step([chunk], [draw])
        ran_ahead = one.runs_ahead
        drafting.plan(step)
        if chunk.drafts:
            n_draws += 1
            drafting.count(one, 1, n_draws % 2)
            one.tokens.extend([8] * (n_draws % 2))
        one.tokens.append(8)
        drafting.observe(step, (1.0 if i > 1 else 50.0) if ran_ahead else 2.0, 0.0)
        n_ahead += ran_ahead and i >= 50
    assert n_ahead > 0.9 * (3 * N_VALID - 50), "drafts do not pay here"


@pytest.mark.parametrize("max_drafts", [1, 3, 8])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_what_would_pass_the_end_of_a_page_is_not_proposed(
    max_drafts: int, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window ends before its page does. Nor does the head guess what cannot be drafted; and behind the end it goes on."""
    drafting = Drafting(max_drafts, has_head=True, guides=None, runs_ahead=runs_ahead)
    drafting._ahead_s[1] = 1.0, 0
    for n in range(9):
        drafting.steps.observe(1, n, 1.1 + 0.01 * n)
        drafting.guesses.observe(1, 1 + n, 0.01 * (1 + n))
    (one,) = decoding()
    proposed, plain = [], set()
    propose = Drafter.propose

    def proposing(self: Drafter, *given: Any) -> list[int]:
        proposed.append(propose(self, *given))
        return proposed[-1]

    monkeypatch.setattr(Drafter, "propose", proposing)
    for i in range(150):
        proposed.clear()
        chunk, draw = decode(one, 0)
        drafting.plan(Step([chunk], [draw]))
        at = chunk.start % PAGE_SIZE
        assert at + chunk.length < PAGE_SIZE or not chunk.drafts
        assert runs_ahead or proposed in ([], [chunk.drafts]), "a draft was proposed, and cut"
        assert not draw.n_guesses or draw.n_guesses <= PAGE_SIZE - 2 - (at + 1) % PAGE_SIZE, "these have no room"
        if i and not chunk.drafts:
            plain.add(at)
        if chunk.drafts:
            drafting.count(one, len(chunk.drafts), len(chunk.drafts))
        one.tokens.extend(range(len(one.tokens) + 1000, len(one.tokens) + 1001 + len(chunk.drafts)))
        one.drafter.guesses = [7] * draw.n_guesses
    assert plain <= {PAGE_SIZE - 2, PAGE_SIZE - 1}


@pytest.mark.parametrize("n_forced", [1, 2, 4])
def test_one_forced_token_does_not_stop_running_ahead(n_forced: int) -> None:
    """It is drawn before a draft could come: only the tokens behind it are in sight, and they are the next step's draft."""
    guides = Guides(VOCAB_SIZE, [EOS], None)
    drafting = Drafting(8, has_head=False, guides=guides, runs_ahead=True)
    drafting._ahead_s[1] = 1.0, 0
    closing = (30, 31, 32, 33)[:n_forced]
    (one,) = decoding(constraint=Constraint(think_end_id=30, think_budget=0, close_ids=closing))
    guides.open([one])
    one.runs_ahead = True
    chunk, draw = decode(one, 0)
    drafting.plan(step := Step([chunk], [draw]))
    assert step.runs_ahead == one.runs_ahead == (n_forced == 1) and not chunk.drafts
    one.tokens.append(30)
    guides.advance(one, 30)
    chunk, draw = decode(one, 0)
    drafting.plan(Step([chunk], [draw]))
    assert list(chunk.drafts) == list(closing[1:]) and len(chunk.rules) == (n_forced if n_forced > 1 else 0)


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
        n_lookahead=int(seed % 3 == 0),
    )
    monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)
    # By no clock: now and then all run ahead.
    monkeypatch.setattr(Drafting, "_is_probe", lambda self, n: self.runs_ahead and rng.random() < 0.3)
    monkeypatch.setattr(Drafting, "_weigh", lambda self, spent_s, plain_s: None)
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

    def propose(_: Drafter, tokens: Any, most: int, step: int, forced: Any = ()) -> list[int]:
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
    assert 0 < stats.n_accepted < stats.n_drafted and (runner.n_ran_ahead > 0 or not runner.gpu)
    for (name, index), tokens in truth.items():
        if name != gone:
            assert found[name, index] == tokens
            assert n_entries[name, index] == (0 if params_of[name].logprobs is None else len(tokens))


def test_behind_a_window_too_a_page_comes_one_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing could run ahead of the step that fills the page."""
    params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
    truth = expected_tokens([20, 21, 22], params)
    monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)
    monkeypatch.setattr(Drafting, "_is_probe", lambda self, n: False)
    monkeypatch.setattr(
        Drafter, "propose", lambda _, tokens, most, step, forced=(): truth[len(tokens) - 3 :][: min(most, 4)]
    )
    engine = Engine(FakeRunner(max_num_seqs=1, max_drafts=8, gpu=True, n_lookahead=1))
    engine.add(Request(id="a", prompt_ids=[20, 21, 22], params=params))
    engine.step()
    (sequence,) = engine.scheduler.sequences()
    while sequence.n_computed + sequence.n_window < PAGE_SIZE - 1:
        engine.step()
    assert sequence.n_window > 0 and len(sequence.tokens) == PAGE_SIZE
    step = engine.scheduler.plan()
    assert step is not None and not step.chunks[0].drafts and len(sequence.pages) == 2


def test_a_request_that_waits_stops_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rows of a prefill do."""
    monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)
    engine = Engine(FakeRunner(max_num_seqs=1, max_drafts=8))
    for name in "ab":
        bias = {"max_tokens": 100, "seed": 1, "ignore_eos": True}
        engine.add(Request(id=name, prompt_ids=[20, 21], params=SamplingParams(**bias)))
    n_tokens = dict.fromkeys("ab", 0)
    while engine.has_work():
        truth = expected_tokens([20, 21], SamplingParams(max_tokens=100, seed=1, ignore_eos=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Drafter, "propose", lambda _, tokens, most, step, truth=truth: truth[len(tokens) - 2 :][: min(most, 4)]
            )
            for output in engine.step():
                n_tokens[output.id] += len(output.token_ids)
                assert len(output.token_ids) == 1, "an output of several tokens"
    assert n_tokens == {"a": 100, "b": 100} and engine.n_steps < 50


def test_no_step_is_believed_to_take_no_time() -> None:
    """A few samples, the longer ones held up by another program: the line through them went below nothing without a draft, and what
    was seen of such steps then counted as nothing, too.
    """
    times = Times(OWN)
    for n_tokens, seconds in ((2, 0.001), (3, 0.0010), (6, 0.1), (6, 0.1)):
        times.observe(1, n_tokens, seconds)
    first = times.seconds(1, 8)
    times.observe(1, 0, 0.001)
    for found in (first, times.seconds(1, 8)):
        assert min(found) > 0
