"""The prefix cache of a model without a recurrent state, as one that speaks: any page will do to start behind.

The fake runner's state stands for the one row that a decode needs: a prefill chunk makes it from its pages alone.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from deltic.engine.step import Chunk
from deltic.ops.geometry import PAGE_SIZE
from tests.conversations import Conversations, some_ids
from tests.fakes import FakeRunner, FakeTiers
from tests.null.test_prefix import check_what_is_left, run_life
from tests.sessions import Session


class StatelessRunner(FakeRunner):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{"gpu": True} | sizes, n_slots=sizes.get("max_num_seqs", 8))
        self.info.has_state = False

    def _check_start(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        assert sequence.start_slot is None and not chunk.snapshots
        if 0 < chunk.start < sequence.n_prompt:
            assert sequence.state_slot is not None
            self.states[sequence.state_slot] = self._state_after(sequence, chunk.start)
        super()._check_start(chunk)


def stateless(n_units: int = 0, **sizes: Any) -> Session:
    runner = StatelessRunner(**sizes)
    if n_units:
        runner.tiers = FakeTiers(runner, n_units, None)
        runner.tiers.takes_evicted = False
    return Session(runner)


def ids(n: int, seed: int = 0) -> list[int]:
    return some_ids(Random(seed), n)


def test_every_page_is_a_hit() -> None:
    session = stateless()
    prompt = ids(5 * PAGE_SIZE + 10)
    assert session.complete(prompt)[1] == 0
    for n_shared in (10, 63, 64, 65, 128, 200, 320, 330):
        other = prompt[:n_shared] + ids(70, seed=n_shared)
        assert session.complete(other)[1] == n_shared // PAGE_SIZE * PAGE_SIZE, n_shared
    assert session.complete(prompt)[1:] == (5 * PAGE_SIZE, 10)
    assert session.complete(prompt[: 2 * PAGE_SIZE])[1:] == (PAGE_SIZE, PAGE_SIZE)  # somebody must be drawn from it
    session.check_answers()
    assert not session.checkpoints() and session.store.state_slots.n_free == 8


def test_answers_are_computed_again() -> None:
    session = stateless()
    prompt = ids(100)
    answer, _, _ = session.complete(prompt, max_tokens=100)
    _, n_cached, _ = session.complete([*prompt, *answer, 5])
    assert n_cached == PAGE_SIZE


def test_what_was_used_last_goes_last() -> None:
    session = stateless(n_pages=12, max_model_len=6 * PAGE_SIZE)
    first, second = ids(4 * PAGE_SIZE + 1, 1), ids(4 * PAGE_SIZE + 1, 2)
    session.complete(first)
    session.complete(second)
    assert session.complete(first)[1] == 4 * PAGE_SIZE
    session.complete(ids(4 * PAGE_SIZE + 1, 3))
    assert session.n_kept(first) == 4 > session.n_kept(second)


def test_siblings_and_preempted_go_on() -> None:
    for n_units in (0, 64):
        session = stateless(n_units, n_pages=14, max_model_len=8 * PAGE_SIZE)
        for i in range(3):
            session.ask(ids(100 + i, seed=i), max_tokens=200, n=2, seed=i)
        session.run()
        assert session.engine.stats().n_preemptions > 0
        session.check_answers()


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules(seed: int) -> None:
    rng = Random(seed)
    session = stateless(
        rng.choice([0, 12, 60]), max_num_seqs=rng.choice([1, 2, 4, 8]), n_pages=rng.choice([12, 20, 40]),
        max_model_len=8 * PAGE_SIZE, max_step_tokens=PAGE_SIZE * rng.choice([1, 2, 8]),
    )  # fmt: skip
    run_life(session, rng, Conversations(rng, PAGE_SIZE), 20)
    session.check_answers()
    check_what_is_left(session, None, 0)
