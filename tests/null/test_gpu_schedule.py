"""The scheduler and the cache where prefill and decode differ in bits, and the device runs ahead.

The fake runner marks what decode wrote, and so notices prompt tokens that were decoded, generated ones that were prefilled, a
decode's page or state that another sequence is given, and chunks off the grid. The random schedules are repeatable:
`python tests/null/test_gpu_schedule.py FIRST LAST` runs those seeds.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest

from deltic.engine.cache.cache import Cache
from deltic.engine.cache.tree import DEVICE
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.scheduler import Scheduler
from deltic.engine.step import Chunk, Sequence
from deltic.ops.geometry import PAGE_SIZE
from tests.conversations import Conversations, Turn, chat, follow_up, some_ids
from tests.fakes import DECODED, MASK, FakeRunner, FakeTiers
from tests.null.test_prefix import check_what_is_left, run_life
from tests.sessions import Disk, Session


def gpu_session(n_units: int | None = None, disk: Disk | None = None, **sizes: Any) -> Session:
    """A session with state slots for many checkpoints, on a device that runs ahead; with tiers if n_units or disk is given."""
    runner = FakeRunner(**{"n_slots": 40, "gpu": True, "n_lookahead": 1} | sizes)
    if n_units is not None or disk is not None:
        runner.tiers = FakeTiers(runner, n_units or 0, disk)
    return Session(runner)


def check_tree(session: Session, disk: Disk | None = None) -> None:
    """Nothing that decode wrote is in any tier."""
    runner = session.runner
    for node in session.store.tree.nodes.values():
        if (page := node.page[DEVICE]) is not None:
            assert (runner.pages[page] < DECODED).all()
        if (state_slot := node.state[DEVICE]) is not None:
            assert runner.states[state_slot] <= MASK
    for (kind, _), saved in (disk or {}).items():
        assert max(saved.content) < DECODED if kind == "page" else saved.content <= MASK


# Random schedules.


def random_runner(rng: Random, disk: Disk | None) -> FakeRunner:
    max_num_seqs, n_pages = rng.choice([1, 2, 4, 8]), rng.choice([8, 12, 20, 40, 100])
    runner = FakeRunner(
        gpu=True,
        n_lookahead=rng.choice([0, 1, 1, 1]),
        max_prefill_seqs=rng.choice([0, 1, 2, 4]),
        rng=rng,
        n_pages=n_pages,
        max_num_seqs=max_num_seqs,
        n_slots=max_num_seqs + rng.choice([0, 0, 1, 2, 5, 20]),
        max_step_tokens=rng.choice([64, 128, 512]),
        max_model_len=min(n_pages, 20) * PAGE_SIZE,
        prefix_cache=rng.random() < 0.93,
    )
    if disk is not None or rng.random() < 0.7:
        n_units, n_bytes = rng.choice([0, 2, 6, 30]), rng.choice([30, 300, 10_000])
        runner.tiers = FakeTiers(runner, n_units, disk, n_bytes, rng, rng.choice([0.0, 0.05]))
    return runner


def run_schedule(seed: int) -> Counter[str]:
    """One random schedule over one or more lives of an engine; how often what happened."""
    rng = Random(seed)
    disk: Disk | None = {} if rng.random() < 0.5 else None
    conversations = Conversations(rng, PAGE_SIZE)
    known: Counter[tuple[str, bytes]] = Counter()
    happened: Counter[str] = Counter()
    for _ in range(rng.choice([1, 2, 3]) if disk is not None else 1):
        runner = random_runner(rng, disk)
        session = Session(runner)
        run_life(session, rng, conversations, rng.choice([10, 30]))
        session.check_answers(known)
        check_tree(session, disk)
        happened["asked"] += sum(len(request.prompt_ids) for request in session.requests.values())
        happened["found"] += sum(outputs[0].cached_tokens for outputs in session.outputs.values())
        happened["ran ahead"] += runner.n_ran_ahead
        happened["replayed"] += runner.n_replayed
        happened["dropped"] += runner.n_dropped
        happened["preempted"] += session.engine.stats().n_preemptions
        if rng.random() < 0.7:
            check_what_is_left(session, disk, runner.tiers.disk_bytes if runner.tiers else 0)
    return happened


@pytest.mark.parametrize("seed", range(14))
def test_random_schedules(seed: int) -> None:
    run_schedule(seed)


# What is kept.


@pytest.mark.parametrize("n_answer", [1, 2, 60, 64, 65, 200])
@pytest.mark.parametrize("n_prompt", [64, 65, 127, 128, 200])
def test_the_next_turn_starts_behind_the_last_prompt(n_prompt: int, n_answer: int) -> None:
    """And prefills the answer, as part of its own."""
    rng, session = Random(1), gpu_session()
    prompt = some_ids(rng, n_prompt)
    answer, n_cached, n_run = session.complete(prompt, max_tokens=n_answer)
    assert (n_cached, n_run) == (0, n_prompt + n_answer - 1)
    n_known = (n_prompt - 1) // PAGE_SIZE * PAGE_SIZE
    assert session.checkpoints() == ({n_known: "end"} if n_known else {})
    assert session.n_kept([*prompt, *answer]) == n_prompt // PAGE_SIZE
    again = [*prompt, *answer, *some_ids(rng, 70)]
    assert session.complete(again)[1:] == (n_known, len(again) - n_known)
    assert session.complete(again)[1] == (len(again) - 1) // PAGE_SIZE * PAGE_SIZE
    check_tree(session)


def test_conversations_go_on_across_restarts() -> None:
    rng = Random(2)
    disk: Disk = {}
    session = gpu_session(disk=disk)
    turn, n_known = chat(rng, 200), 0
    for _ in range(4):
        answer, n_cached, _ = session.complete(turn, max_tokens=150)
        assert n_cached == n_known
        n_known = (len(turn.prompt_ids) - 1) // PAGE_SIZE * PAGE_SIZE
        turn = follow_up(turn, answer, rng, 50)
        session.settle()
        check_tree(session, disk)
        session.engine.close(1.0)
        session = gpu_session(disk=disk)


def test_pages_of_a_longer_prompt_are_not_for_who_generated_the_same_tokens() -> None:
    """Where a sequence that lost its memory starts over, the tree has its generated tokens, as another's prompt."""
    rng, session = Random(3), gpu_session()
    prompt = some_ids(rng, 130)
    answer, *_ = session.complete(prompt, max_tokens=200)
    id = session.ask(prompt, max_tokens=200)
    for _ in range(150):
        session.step()
    other = session.ask([*prompt, *answer[:190]])
    session.step()
    assert session.outputs[other, 0][0].cached_tokens == 128 and session.n_kept([*prompt, *answer]) == 5
    (sequence,) = session.engine.scheduler._decodes
    session.engine.scheduler._preempt(sequence)
    session.step()
    assert sequence.n_computed == 130
    session.run()
    session.check_answers()
    assert session.answer(id) == answer and session.runner.n_replayed == 150 and session.runner.n_dropped == 1


# Preemption.


@pytest.mark.parametrize("n_steps", [1, 2, 4, 5, 6, 68, 69, 70])  # 4 decodes fill the first page
@pytest.mark.parametrize("use_cache", [True, False])
def test_what_was_parked_goes_on_with_the_token_that_ran_ahead(n_steps: int, use_cache: bool) -> None:
    rng, session = Random(4), gpu_session(n_units=16)
    session.ask(some_ids(rng, 60), max_tokens=100, use_cache=use_cache)
    for _ in range(n_steps):
        session.step()
    (sequence,) = session.engine.scheduler._decodes
    session.engine.scheduler._preempt(sequence)
    # Others take the memory meanwhile.
    session.ask(some_ids(rng, 500), max_tokens=5, priority=-1)
    session.run()
    session.check_answers()
    assert session.runner.n_tokens_run == 60 + 99 + 500 + 4, "every token is computed once"
    assert session.runner.n_dropped == session.runner.n_replayed == 0


def test_what_was_lost_is_prefilled_and_decoded_again() -> None:
    """Beside others, which go on; nothing is drawn twice."""
    rng, session = Random(5), gpu_session(max_num_seqs=4, max_step_tokens=128)
    lost, other = (session.ask(some_ids(rng, 200), max_tokens=90), session.ask(some_ids(rng, 90), max_tokens=90))
    for _ in range(50):
        session.step()
    scheduler, steps = session.engine.scheduler, []
    sequence = next(s for s in scheduler._decodes if s.request.id == lost)
    n_drawn, n_others = sequence.n_generated, len(session.outputs[other, 0])
    scheduler._preempt(sequence)
    session.store.reset()
    sequence.prefix = None  # as if its prompt was evicted
    while session.engine.has_work():
        session.step()
        steps.append(sequence.n_computed)
        assert len(session.outputs[other, 0]) >= min(90, n_others + len(steps))
    assert steps[: n_drawn + 1] == [128, 200, *range(201, 200 + n_drawn)]
    assert len(session.outputs[lost, 0]) == 90 and session.runner.n_replayed == n_drawn - 1
    session.check_answers()


def test_preempted_again_on_its_way_back() -> None:
    """What was decoded again is parked as well."""
    rng, session = Random(6), gpu_session(n_units=20)
    session.ask(some_ids(rng, 100), max_tokens=100, use_cache=False)
    for _ in range(80):
        session.step()
    scheduler, cache = session.engine.scheduler, session.engine.cache
    (sequence,) = scheduler._decodes
    scheduler._preempt(sequence)
    cache._forget_parked(sequence)
    for _ in range(40):
        session.step()
    n_computed, n_run = sequence.n_computed, session.runner.n_tokens_run
    assert 100 < n_computed < 150
    scheduler._preempt(sequence)
    session.run()
    session.check_answers()
    assert session.runner.n_tokens_run - n_run == 199 - n_computed


def test_a_decode_never_starts_from_a_checkpoint() -> None:
    """Where another's message ended with this one's prompt, there is one; its last page is computed all the same."""
    rng, session = Random(13), gpu_session()
    prompt = some_ids(rng, 128)
    session.ask(prompt, max_tokens=50)
    for _ in range(10):
        session.step()
    session.ask(Turn([*prompt, *some_ids(rng, 100)], [128]))
    session.step()
    assert session.checkpoints()[128] == "message"
    (sequence,) = session.engine.scheduler._decodes
    session.engine.scheduler._preempt(sequence)
    n_run = session.runner.n_tokens_run
    session.step()
    assert sequence.n_computed == 128 and session.runner.n_tokens_run - n_run == 64
    session.run()
    session.check_answers()


def test_who_comes_back_decodes_beside_a_prefill_that_goes_first() -> None:
    rng, session = Random(14), gpu_session(n_units=16, max_step_tokens=256)
    session.ask(some_ids(rng, 60), max_tokens=40)
    for _ in range(5):
        session.step()
    (sequence,) = session.engine.scheduler._decodes
    session.engine.scheduler._preempt(sequence)
    session.ask(some_ids(rng, 100), max_tokens=5, priority=-1)
    step = session.engine.scheduler.plan()
    assert step is not None
    assert [(c.sequence is sequence, c.start, c.length) for c in step.chunks] == [(True, 64, 1), (False, 0, 100)]
    assert [step.chunks[draw.chunk].sequence for draw in step.draws] == [draw.sequence for draw in step.draws]
    session.take(session.engine.scheduler.commit(step, session.runner.step(step)))
    session.run()
    session.check_answers()


@pytest.mark.parametrize(("n_prompt", "fits"), [(400, True), (500, False)])
def test_what_is_decoded_again_waits_for_no_prefill_and_keeps_its_room(n_prompt: int, fits: bool) -> None:
    """It is a decode like any other, and the pages that it will need are not promised to who comes next."""
    rng = Random(15)
    session = gpu_session(n_pages=12, max_model_len=768, max_step_tokens=64, prefix_cache=False)
    session.ask(some_ids(rng, 60), max_tokens=260)
    for _ in range(250):
        session.step()
    (sequence,) = session.engine.scheduler._decodes
    session.engine.scheduler._preempt(sequence)
    session.step()
    session.ask(some_ids(rng, n_prompt), max_tokens=1, priority=-1)  # 7 or 8 pages; it has 1, and comes to need 5
    for i in range(7):
        session.step()
        assert sequence.n_computed == 61 + i
        assert session.engine.stats().n_waiting == (not fits) or i == 6
    session.run()
    session.check_answers()
    assert session.engine.stats().n_preemptions == 1


# Pages ahead.


@pytest.mark.parametrize(("max_tokens", "n_pages"), [(1, 1), (4, 1), (5, 1), (6, 2), (68, 2), (69, 2), (70, 3)])
def test_pages_are_there_one_token_ahead_but_never_beyond_the_end(max_tokens: int, n_pages: int) -> None:
    session = gpu_session(max_num_seqs=1)
    session.ask(some_ids(Random(7), 60), max_tokens=max_tokens)
    held = []
    while session.engine.has_work():
        step = session.engine.scheduler.plan()
        assert step is not None
        (chunk,) = step.chunks
        n_next = min(chunk.start + chunk.length + 1, 60 + max_tokens - 1)
        held.append(len(chunk.sequence.pages))
        assert held[-1] == -(-n_next // PAGE_SIZE)
        session.take(session.engine.scheduler.commit(step, session.runner.step(step)))
    assert held[-1] == n_pages and session.runner.n_ran_ahead >= max_tokens - 1
    session.check_answers()


def test_nobody_makes_way_for_a_page_ahead() -> None:
    session = gpu_session(n_pages=2, max_num_seqs=2, n_slots=2, prefix_cache=False)
    rng = Random(8)
    session.ask(some_ids(rng, 60), max_tokens=40)
    session.ask(some_ids(rng, 60), max_tokens=5)  # ends with the step before the first one needs its page
    session.run()
    session.check_answers()
    assert session.engine.stats().n_preemptions == 0
    assert session.runner.n_ran_ahead == 39 + 4  # after all draws but one, and the one behind which nothing comes


# Blocks.


def test_prefills_are_counted_in_blocks_and_decodes_not_at_all() -> None:
    rng, session = Random(9), gpu_session(max_step_tokens=256, max_num_seqs=8)
    for _ in range(3):
        session.ask(some_ids(rng, 3), max_tokens=20)
    session.step()
    for n in (65, 1, 65, 65, 300):
        session.ask(some_ids(rng, n), max_tokens=2)
    lengths = []
    for _ in range(3):
        step = session.engine.scheduler.plan()
        assert step is not None
        lengths.append([c.length for c in step.chunks if not c.is_decode])
        session.take(session.engine.scheduler.commit(step, session.runner.step(step)))
    assert lengths == [[65, 1, 64], [1, 65, 64], [236]]


def test_prefills_in_a_step_are_limited() -> None:
    rng, session = Random(10), gpu_session(max_prefill_seqs=2)
    for _ in range(5):
        session.ask(some_ids(rng, 10), max_tokens=4)
    assert [len(session.step()) for _ in range(3)] == [2, 4, 5]


def test_one_token_behind_a_hit_is_a_prefill() -> None:
    session, prompt = gpu_session(), some_ids(Random(11), 65)
    session.complete(prompt)
    session.ask(prompt, max_tokens=2)
    step = session.engine.scheduler.plan()
    assert step is not None
    (chunk,) = step.chunks
    assert (chunk.start, chunk.length, chunk.is_decode) == (64, 1, False)
    session.take(session.engine.scheduler.commit(step, session.runner.step(step)))
    session.run()


@pytest.mark.parametrize("n_prompt", [64, 100, 128])
def test_siblings_and_prompt_logprobs_stay_on_the_grid(n_prompt: int) -> None:
    """Those that find no page start over; the rows of logits cut a prompt."""
    rng, session = (Random(12), gpu_session(n_pages=6, max_model_len=384, max_num_seqs=4, max_logit_rows=68 + 32))
    session.ask(some_ids(rng, n_prompt), n=4, max_tokens=30, prompt_logprobs=1)
    session.ask(some_ids(rng, 300), max_tokens=3, prompt_logprobs=0)
    session.run()
    session.check_answers()


def test_steps_of_part_of_a_block_are_refused() -> None:
    info = FakeRunner(n_pages=4, max_num_seqs=2, max_model_len=64, max_step_tokens=100, gpu=True).info
    with pytest.raises(ValueError, match="whole blocks of 64"):
        Scheduler(Cache(info), info, 100)


def test_a_decode_is_one_generated_token() -> None:
    sequence = Sequence(Request(id="", prompt_ids=[], params=SamplingParams()), 0, 0, array("i", range(80)), 65)
    cases = {(64, 1): False, (65, 1): True, (70, 1): True, (0, 64): False, (65, 5): False}
    assert {at: Chunk(sequence, *at).is_decode for at in cases} == cases


if __name__ == "__main__":
    import logging

    logging.disable()
    total: Counter[str] = Counter()
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            total += run_schedule(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
    print(dict(total))
