"""Drafts: what is guessed where text repeats itself, which proposer is trusted, and how long drafts are."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from deltic.engine.drafts import (
    GRAMMAR,
    HEAD,
    KEPT,
    LEAST,
    MAX_PAUSE,
    N_AT_ONCE,
    N_INDEXED,
    N_VALID,
    OWN,
    REPEATS,
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
        record.observe(4, False)
    assert record.chance > 0.98
    for _ in range(4):
        record.observe(0, True)
    assert 0.85 < record.chance < 0.95
    for _ in range(130):
        record.observe(0, True)
    assert record.chance < 0.1
    for _ in range(8):
        record.doubt()  # what was seen before a pause counts less: one that is right then counts much
    record.observe(1, False)
    assert record.chance > 0.3
    record = Record(1.0, 2.0)
    record.doubt()
    assert record == record and (record.n_right, record.n_seen) == (1.0, 2.0), "no less than of a new sequence"


def drafter(head: Record | None = None, repeats: Record | None = None, guesses: list[int] | None = None) -> Drafter:
    """With these records, where they are given."""
    made = Drafter(guesses=guesses or [])
    made.records |= {name: record for name, record in ((HEAD, head), (REPEATS[0], repeats)) if record is not None}
    return made


def test_the_better_proposer_is_taken() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    one = drafter(guesses=[7, 8, 9, 10])
    assert one.propose(tokens, 8) == [7, 8, 9, 10] and one.used == HEAD  # the longer one
    assert one.propose([1, 2], 0) == [] and one.used == HEAD
    one.guesses = [7, 8]
    assert one.propose(tokens, 8) == [4, 5, 6] and one.used == REPEATS[0]
    for _ in range(3):
        one.records[REPEATS[0]].observe(1, True)
    assert one.propose(tokens, 8) == [7, 8] and one.used == HEAD
    assert one.propose(tokens, 1) == [7]
    assert one.propose(tokens, 8, [1, 1]) == [1, 1] and one.used == GRAMMAR


def test_what_was_proposed_counts_whether_it_ran_or_not() -> None:
    """So text that repeats is never tried, and is there as soon as it is the better guess."""
    tokens, known = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3], Drafter()
    one = drafter(guesses=[7, 8])
    one.propose(tokens, 8)
    one.learn(tokens, known)  # nothing came
    assert one.records[REPEATS[0]].chance == one.records[HEAD].chance == 0.75 and not one.proposed
    one.propose(tokens, 8)
    one.learn([*tokens, 4], known)
    assert one.records[REPEATS[0]].n_seen == pytest.approx(KEPT * 2 + 1) and one.records[REPEATS[0]].chance > 0.8
    assert one.records[HEAD].chance < 0.5 and known.records[HEAD].chance == one.records[HEAD].chance
    before = one.records[REPEATS[0]].chance
    one.learn([*tokens, 4, 5], known)
    assert one.records[REPEATS[0]].chance == before, "it counts once"
    one.propose(tokens, 8)
    one.learn([*tokens, 4, 5, 7, 6], known)
    assert one.records[REPEATS[0]].n_seen == pytest.approx(KEPT**3 * (KEPT * 2 + 1) + 3)


def test_a_sequence_begins_with_what_is_known_of_others() -> None:
    known = Drafter()
    one = known.begun()
    for _ in range(130):
        one.guesses = [8]
        one.propose([1, 2], 4)
        one.learn([1, 2, 9], known)
    assert one.records[REPEATS[0]].chance == known.records[REPEATS[0]].chance == 0.75
    another = known.begun()
    assert another.records[HEAD].chance == known.records[HEAD].chance < 0.1
    another.guesses = [8, 9, 10, 11]
    another.propose([1, 2], 4)
    another.learn([1, 2, 8, 9, 10, 11], known)
    assert another.records[HEAD].chance > 0.6, "what is its own counts more"


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
    assert times.seconds(4, 4) == times.seconds(3, 4), "of those that differ least"
    assert times.seconds(7, 4) == []


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
        chunk.sequence.drafter = drafter(record, guesses=guesses)
    drafting = Drafting(8, has_head=has_head, guides=None)
    for n in range(17):
        drafting.steps.observe(2, n, 1.0 + row_s * n)
        drafting.guesses.observe(2, 1 + n, guess_s * (1 + n))
    drafting.plan(step)
    assert [chunk.length for chunk in step.chunks] == [1 + len(chunk.drafts) for chunk in step.chunks]
    return step


@pytest.mark.parametrize(("row_s", "n_taken"), [(0.0, [5, 4]), (0.1, [5, 1]), (0.3, [3, 0]), (0.7, [0, 0])])
def test_the_rows_that_make_tokens_cheapest_run(row_s: float, n_taken: list[int]) -> None:
    """Of a sequence whose drafts were right, more than of one whose were wrong."""
    step = planned(Record(9.0, 10.0), Record(5.0, 10.0), row_s)
    assert [len(chunk.drafts) for chunk in step.chunks] == n_taken


def test_guesses_that_are_not_worth_their_time_are_not_made() -> None:
    """Where none is, all sequences have one as a try."""

    def asked(chance: float, row_s: float, guess_s: float) -> list[int]:
        return [
            draw.n_guesses
            for draw in planned(Record(10 * chance, 10.0), Record(10 * chance, 10.0), row_s, guess_s).draws
        ]

    assert asked(0.9, 0.02, 0.02) == [8, 8]
    assert asked(0.9, 0.1, 0.1) == [5, 5]
    assert asked(0.5, 0.02, 0.02) == [3, 3]
    assert asked(0.9, 0.02, 1.0) == asked(0.9, 0.5, 0.0) == asked(0.1, 0.05, 0.05) == [1, 1]
    step = planned(Record(9.0, 10.0), Record(0.1, 10.0), 0.1, 0.1)
    assert step.draws[0].n_guesses > 0 == step.draws[1].n_guesses
    step = planned(Record(9.0, 10.0), Record(9.0, 10.0), 0.02, has_head=False)
    assert [draw.n_guesses for draw in step.draws] == [0, 0]


@dataclass
class Played:
    """Steps of sequences whose head is right where `is_right` says so, in which a draft is worth its row where more than
    a third are. Text is counted upwards, so nothing repeats itself.
    """

    drafting: Drafting
    sequences: list[Sequence]
    is_right: Callable[[Sequence, int], bool]
    tries: dict[int, set[int]] = field(default_factory=dict)
    """Sequences for which the head guessed, by the number of the step."""

    def step(self, draws: Callable[[int], bool] = lambda i: True, beside: Chunk | None = None) -> Step:
        drawing = [one for i, one in enumerate(self.sequences) if draws(i)]
        chunks, found = map(list, zip(*(decode(one, i) for i, one in enumerate(drawing)), strict=True))
        step = Step([*chunks, beside] if beside else chunks, found)
        self.drafting.plan(step)
        n = self.drafting._n_steps
        for draw in step.draws:
            follow_draft(step, draw, lambda id, one=draw.sequence: id if self.is_right(one, n) else 7)  # type: ignore[misc]
            if draw.n_guesses:
                self.tries.setdefault(n, set()).add(draw.sequence.index)
        return step


def played(n: int, is_right: Callable[[Sequence, int], bool], runs_ahead: bool = False) -> Played:
    drafting = Drafting(8, has_head=True, guides=None, runs_ahead=runs_ahead)
    drafting._ahead_s = {i: (1.0, 1 << 30) for i in range(1, n + 1)}
    for i in range(1, n + 1):
        for rows in range(9 * i):
            drafting.steps.observe(i, rows, 1.0 + 0.3 * rows / i)
            drafting.guesses.observe(i, 1 + rows, 0.02 * (1 + rows))
    sequences = decoding(n)
    for i, one in enumerate(sequences):
        one.tokens = array("i", [100_000 * (1 + i), 100_000 * (1 + i) + 1])
    return Played(drafting, sequences, is_right)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_head_that_is_wrong_is_tried_by_all_at_once_and_ever_less(runs_ahead: bool) -> None:
    game = played(3, lambda one, n: False, runs_ahead)
    for _ in range(3000):
        game.step()
    assert len(game.tries) < 14 + 3000 / MAX_PAUSE, "tries are rare"
    assert [*game.tries][-1] > 3000 - 2 * MAX_PAUSE, "and do not end"
    assert all(len(which) >= 2 for which in game.tries.values()), "all but who is at the end of a page"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_head_that_becomes_right_is_used_again(runs_ahead: bool) -> None:
    game = played(1, lambda one, n: n > 1500, runs_ahead)
    steps = [game.step() for _ in range(1500 + 4 * MAX_PAUSE)]
    assert sum(len(step.chunks[0].drafts) for step in steps[1000:1500]) < 5
    assert sum(len(step.chunks[0].drafts) > 1 for step in steps[-200:]) > 150
    game.is_right = lambda one, n: False
    wrong = [game.step() for _ in range(400)]
    assert sum(len(step.chunks[0].drafts) > 0 for step in wrong) < 80, "it is given up again"


def test_who_has_a_bad_head_beside_a_good_one_finds_out_when_that_ends() -> None:
    """A guess for all takes as long as one for some, so it is tried while others use the head."""
    game = played(2, lambda one, n: one.index == 0 or n > 400)
    steps = [game.step() for _ in range(600)]
    assert sum(len(step.chunks[1].drafts) for step in steps[200:400]) < 20
    assert sum(len(step.chunks[1].drafts) > 1 for step in steps[-100:]) > 75


def test_repeats_are_used_beside_a_head_as_soon_as_they_are_better() -> None:
    """They were wrong for long, and the head was used meanwhile: what they propose counts also where it does not run."""
    rng, one = random.Random(1), drafter()
    known, text = Drafter(), [rng.randrange(1000) for _ in range(200)]
    tokens, used = [*text], list[bool]()
    for i in range(260):
        right = rng.randrange(1000) if i < 60 else text[(i - 60) % 200]
        if i < 60:  # a run of the text, and then something else
            at = rng.randrange(190)
            tokens += text[at : at + 3]
        one.learn(tokens, known)
        one.guesses = [right if rng.random() < 0.7 else 1001, 1002]
        one.propose(tokens, 2)
        used.append(one.used in REPEATS)
        tokens.append(right)
    assert sum(used[30:60]) <= 3 and sum(used[120:]) > 100


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_who_sits_out_the_steps_of_tries_tries_later(runs_ahead: bool) -> None:
    """A sequence may draw in every other step, as its masks are late; or each other step may have a prefill."""
    for sits_out in (True, False):
        game, (new,) = played(2, lambda one, n: False, runs_ahead), decoding()
        for i in range(1, 2000):
            is_odd = i % 2 == 0
            game.step(
                (lambda j: j != 0) if is_odd and sits_out else (lambda j: True),
                Chunk(new, 0, 1) if is_odd and not sits_out else None,
            )
        n_tries = sum(0 in which for which in game.tries.values())
        assert n_tries >= 5, f"{n_tries} tries in 2000 steps"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_no_try_is_lost_at_the_end_of_a_page(runs_ahead: bool) -> None:
    """Those of a long pause are so many steps apart as a page has tokens, or twice as many."""
    for start in range(PAGE_SIZE):
        game = played(1, lambda one, n: False, runs_ahead)
        (one,) = game.sequences
        one.tokens.extend(range(one.tokens[-1] + 1, one.tokens[-1] + PAGE_SIZE + start - 1))
        one.drafter = drafter(Record(0.1, 10.0))
        game.drafting._tries[1] = PAGE_SIZE, PAGE_SIZE
        for _ in range(4 * PAGE_SIZE):
            game.step()
        assert 2 <= len(game.tries) <= 3, f"{len(game.tries)} tries from {start} on"


def test_a_block_is_guessed_at_once() -> None:
    """Its first token costs what all do, so it is seen as deep as it goes, and no deeper."""
    drafting = Drafting(8, has_head=True, guides=None, block=5)
    (one,) = decoding()
    one.drafter = drafter(Record(9.0, 10.0))
    for n in range(9):
        drafting.steps.observe(1, n, 1.0 + 0.05 * n)
    for n in range(1, 6):
        drafting.guesses.observe(1, n, 0.9)
    chunk, draw = decode(one, 0)
    drafting.plan(Step([chunk], [draw]))
    assert draw.n_guesses == 5, "one alone would not be worth it"


def test_a_block_is_no_longer_than_a_draft_may_be() -> None:
    """Also where another sequence leaves it rows."""
    drafting, (sure, unsure) = Drafting(3, has_head=True, guides=None, block=8), decoding(2)
    sure.drafter, unsure.drafter = drafter(Record(99.0, 100.0)), drafter(Record(1.0, 10.0))
    for n in range(7):
        drafting.steps.observe(2, n, 1.0)
        drafting.guesses.observe(2, n, 0.1)
    (first, draw), (second, other) = decode(sure, 0), decode(unsure, 1)
    drafting.plan(Step([first, second], [draw, other]))
    assert draw.n_guesses == 3 >= other.n_guesses


def follow_draft(step: Step, draw: Draw, guess: Callable[[int], int]) -> int:
    """Draws the next ids, each one more than that before it, as many as the draft has right. Returns how many those
    are. guess: what the head guesses of an id.
    """
    one, drafts, n_right = draw.sequence, step.chunks[draw.chunk].drafts, 0
    next_id = one.tokens[-1] + 1
    while n_right < len(drafts) and drafts[n_right] == next_id + n_right:
        n_right += 1
    one.tokens.extend(range(next_id, next_id + n_right + 1))
    if one.drafter is not None:
        one.drafter.guesses = [guess(one.tokens[-1] + 1 + i) for i in range(draw.n_guesses)]
    return n_right


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
        sequences = [
            Sequence(request, i, 0, array("i", [10_000 * i, 10_000 * i + 1]), 1, n_computed=1) for i in range(n)
        ]
        for _ in range(150):
            step = Step(
                [Chunk(one, len(one.tokens) - 1, 1) for one in sequences],
                [Draw(i, one) for i, one in enumerate(sequences)],
            )
            ran_ahead = sequences[0].runs_ahead
            drafting.plan(step)
            for draw in step.draws:
                n_drawn += 1 + follow_draft(step, draw, lambda id: id if rng.random() < chance else 7)
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
    assert gained("gpu", chance, n, held_up=0.1) > 0.85 * gained("gpu", chance, n)


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
        follow_draft(step, draw, lambda id: id if is_right else 7)
        drafting.observe(step, seconds + 0.01 * len(chunk.drafts) + 0.02 * draw.n_guesses, 0.02 * draw.n_guesses)
        return step

    is_right = True
    probes = [stepped() for _ in range(3)]  # what a step takes that runs ahead is seen first
    assert all(step.runs_ahead for step in probes)
    assert not stepped().runs_ahead and stepped().draws[0].n_guesses > 0
    steps = [stepped(1.3) for _ in range(40)]
    assert sum(len(step.chunks[0].drafts) > 2 for step in steps) > 32, "but for ends of pages"
    is_right = False
    steps = [stepped(1.3 if not one.runs_ahead else 1.0) for _ in range(1200)]
    assert sum(not step.runs_ahead for step in steps[600:]) < 15, "a try takes three steps"
    is_right = True
    steps = [stepped(1.3 if not one.runs_ahead else 1.0) for _ in range(300 + 2 * MAX_PAUSE)]
    assert sum(not step.runs_ahead for step in steps[-300:]) > 285, "but for what a plain step takes now"
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
            drafting.count(len(chunk.drafts), len(chunk.drafts))
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
            drafting.count(1, n_draws % 2)
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
            drafting.count(len(chunk.drafts), len(chunk.drafts))
        one.tokens.extend(range(len(one.tokens) + 1000, len(one.tokens) + 1001 + len(chunk.drafts)))
        one.drafter.guesses = [len(one.tokens) + 1000 + i for i in range(draw.n_guesses)]
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


def test_no_mask_is_made_for_a_draft_that_is_not_worth_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ahead = list[int](), Guides.ahead

    def counted(self: Guides, guide: Any, draft: list[int]) -> Any:
        asked.append(len(draft))
        return ahead(self, guide, draft)

    monkeypatch.setattr(Guides, "ahead", counted)
    for row_s in (9.0, 0.0):
        guides = Guides(VOCAB_SIZE, [EOS], None)
        drafting = Drafting(2, has_head=True, guides=guides)
        monkeypatch.setattr(drafting, "_step_s", lambda n, row_s=row_s: [1.0 + row_s * i for i in range(9)])
        (one,) = decoding(constraint=Constraint(bad_ids=((9,),)))
        guides.open([one])
        one.drafter = drafter(Record(9.0, 10.0), guesses=[7, 8, 9])
        chunk, draw = decode(one, 0)
        drafting.plan(Step([chunk], [draw]))
        assert asked == ([] if row_s else [2]) and len(chunk.drafts) == len(asked) * 2


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
    monkeypatch.setattr(Drafter, "propose", lambda _, tokens, most, forced=(): truth[len(tokens) - 3 :][: min(most, 4)])
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
                Drafter, "propose", lambda _, tokens, most, truth=truth: truth[len(tokens) - 2 :][: min(most, 4)]
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
