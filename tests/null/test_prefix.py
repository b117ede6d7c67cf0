"""The prefix cache under the scheduler: whatever it keeps, moves and drops, nobody gets another's tokens.

The fake runner and its tiers compare every page and state with the tokens it stands for. The random schedules are repeatable:
`python tests/null/test_prefix.py FIRST LAST` runs those seeds.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import pytest

from deltic.engine.cache.tree import DEVICE
from deltic.engine.messages import Output
from deltic.engine.scheduler import NOT_FINITE
from deltic.ops.geometry import PAGE_SIZE
from tests.conversations import Conversations, Message, Turn, chat, follow_up, render, some_ids
from tests.fakes import NAN, POISON, UNITS_PER_STATE, FakeRunner, FakeTiers
from tests.sessions import Disk, Session, session_with, spoil_something

# Random schedules.


def random_runner(rng: Random, disk: Disk | None) -> FakeRunner:
    max_num_seqs, n_pages = rng.choice([1, 2, 4, 8]), rng.choice([8, 12, 20, 40, 100])
    runner = FakeRunner(
        n_pages=n_pages,
        max_num_seqs=max_num_seqs,
        n_slots=max_num_seqs + rng.choice([0, 0, 1, 2, 5, 20]),
        max_step_tokens=rng.choice([64, 128, 512]),
        max_model_len=min(n_pages, 20) * PAGE_SIZE,
        prefix_cache=rng.random() < 0.93,
    )
    if disk is not None or rng.random() < 0.7:
        runner.tiers = FakeTiers(
            runner, rng.choice([0, 2, 6, 30]), disk, rng.choice([30, 300, 10_000]), rng, rng.choice([0.0, 0.05])
        )
    return runner


def ask_something(session: Session, rng: Random, turn: Turn) -> str:
    runner = session.runner
    n_most = runner.max_model_len - len(turn.prompt_ids)
    if rng.random() < 0.02:
        turn = Turn([*turn.prompt_ids[:-1], POISON], turn.boundaries, turn.messages)
    return session.ask(
        turn,
        salt=rng.choice(["", "", "another"]),
        use_cache=rng.random() < 0.9,
        priority=rng.choice([0, 0, 0, 1]),
        max_tokens=min(n_most, rng.choice([0, 1, 3, 40, 70, 130])),
        n=rng.choice([1, 1, 1, 1, 2, 3]) if runner.max_num_seqs >= 3 else 1,
        seed=rng.randrange(5),
        ignore_eos=rng.random() < 0.5,
        prompt_logprobs=rng.choice([None] * 8 + [0]),
    )


def run_life(session: Session, rng: Random, conversations: Conversations, n_rounds: int) -> None:
    """Requests that come and go, with everything that can come between them."""
    engine = session.engine
    conversations.max_tokens = session.runner.max_model_len
    turns: dict[str, Turn] = {}
    for _ in range(n_rounds):
        for _ in range(rng.randrange(4)):
            turn = next(conversations)
            turns[ask_something(session, rng, turn)] = turn
        if rng.random() < 0.1 and turns:
            session.abort(rng.choice(list(turns)))
        if rng.random() < 0.02:
            engine.reset_cache()
            engine.check()
        running = [*engine.scheduler._decodes, *engine.scheduler._prefills]
        if rng.random() < 0.05 and running:
            engine.scheduler._preempt(rng.choice(running))  # as if pages were short
            engine.check()
        if rng.random() < 0.1:
            spoil_something(engine, session.runner, rng)
        for _ in range(rng.randrange(1, 12)):
            for output in session.step():
                if output.finish_reason in ("stop", "length") and output.index == 0:
                    conversations.answered(turns[output.id], session.answer(output.id))
    session.run()


def check_what_is_left(session: Session, disk: Disk | None, n_disk: int) -> None:
    """The summary says what the tiers hold, and all of it comes back."""
    engine, store = session.engine, session.store
    session.settle()
    tiers = engine.cache_summary()["tiers"]
    assert tiers["device"]["pages_in_use"] == tiers["device"]["slots_in_use"] == 0
    assert tiers["device"]["pages"] == store.pages.n - store.pages.n_free
    assert tiers["device"]["checkpoints"] == store.state_slots.n - store.state_slots.n_free
    held = tiers["host"]["pages"] + UNITS_PER_STATE * tiers["host"]["checkpoints"]
    assert tiers["host"]["bytes_used"] == held == store.units.n - store.units.n_free
    if disk is not None and engine.info.prefix_cache:
        kinds = [kind for kind, _ in disk]
        assert kinds.count("page") == tiers["disk"]["pages"]
        assert kinds.count("state") == tiers["disk"]["checkpoints"]
        n_bytes = kinds.count("page") + UNITS_PER_STATE * kinds.count("state")
        assert n_bytes == tiers["disk"]["bytes_used"] <= n_disk
    if disk is None:
        engine.reset_cache()
        engine.check()
        assert store.pages.n_free == store.pages.n and store.state_slots.n_free == store.state_slots.n
        assert store.units.n_free == store.units.n and not store.tree.nodes


def run_schedule(seed: int) -> tuple[int, int]:
    """One random schedule over one or more lives of an engine; prompt tokens, and those that were found."""
    rng = Random(seed)
    disk: Disk | None = {} if rng.random() < 0.5 else None
    conversations = Conversations(rng, PAGE_SIZE)
    known: Counter[tuple[str, bytes]] = Counter()
    n_tokens = n_found = 0
    for _ in range(rng.choice([1, 2, 3]) if disk is not None else 1):
        runner = random_runner(rng, disk)
        session = Session(runner)
        run_life(session, rng, conversations, rng.choice([10, 30]))
        session.check_answers(known)
        n_tokens += sum(len(request.prompt_ids) for request in session.requests.values())
        n_found += sum(outputs[0].cached_tokens for outputs in session.outputs.values())
        if rng.random() < 0.7:
            check_what_is_left(session, disk, runner.tiers.disk_bytes if runner.tiers else 0)
        if disk:  # somebody tidied up
            for entry in rng.sample(list(disk), rng.choice([0, 0, min(3, len(disk))])):
                del disk[entry]
    return n_tokens, n_found


@pytest.mark.parametrize("seed", range(16))
def test_random_schedules(seed: int) -> None:
    run_schedule(seed)


# What is found.


@pytest.mark.parametrize("n", [1, 63, 64, 65, 128, 129, 1000, 1024, 1025])
def test_the_same_prompt_again_computes_the_rest_of_its_last_page(n: int) -> None:
    session, prompt = session_with(), some_ids(Random(n), n)
    answer, n_cached, n_run = session.complete(prompt, max_tokens=3)
    assert (n_cached, n_run) == (0, n + 2)
    n_known = (n - 1) // PAGE_SIZE * PAGE_SIZE  # the last token is computed in any case: its logits are wanted
    assert session.complete(prompt, max_tokens=3) == (answer, n_known, n - n_known + 2)


def test_another_message_starts_where_the_one_before_ended() -> None:
    rng, session = Random(1), session_with()
    first = chat(rng, 200)
    session.complete(first)
    assert first.boundaries[0] == 302 and session.checkpoints() == {256: "message", 448: "end"}
    other = render((first.messages[0], Message("user", tuple(some_ids(rng, 100)))))
    assert session.complete(other)[1:] == (256, len(other.prompt_ids) - 256)
    edited = render((replace(first.messages[0], content=first.messages[0].content[1:]), first.messages[1]))
    assert session.complete(edited)[1] == 0


def test_a_long_prompt_without_messages_leaves_a_ladder() -> None:
    rng, session = Random(2), session_with(max_model_len=20_480, n_pages=512)
    prompt = some_ids(rng, 9000)
    session.complete(prompt)
    ladder = dict.fromkeys([1024, 2048, 4096, 8192], "ladder")
    assert session.checkpoints() == {**ladder, 8960: "end"}
    assert session.complete([*prompt[:5000], *some_ids(rng, 10)])[1] == 4096
    session.engine.reset_cache()
    session.complete(some_ids(rng, 17_000))
    assert session.checkpoints() == {**ladder, 16_384: "ladder", 16_960: "end"}


def test_the_third_to_branch_off_at_a_place_starts_there() -> None:
    rng, session = Random(3), session_with()
    base = some_ids(rng, 500)
    cached = [session.complete([*base, *some_ids(rng, 300)])[1] for _ in range(4)]
    assert cached == [0, 0, 448, 448] and session.checkpoints()[448] == "junction"


@pytest.mark.parametrize("n_answer", [1, 7, 64, 150])
def test_the_next_turn_starts_behind_the_answer(n_answer: int) -> None:
    rng, session = Random(4), session_with()
    turn, n_known = chat(rng, 200), 0
    for _ in range(4):
        answer, n_cached, n_run = session.complete(turn, max_tokens=n_answer)
        assert n_cached == n_known and n_run == len(turn.prompt_ids) - n_known + n_answer - 1
        n_known = (len(turn.prompt_ids) + n_answer - 1) // PAGE_SIZE * PAGE_SIZE
        turn = follow_up(turn, answer, rng, 50)
    n_tails = sum(c["kind"] == "tail" for c in session.engine.cache_summary()["checkpoints"])
    assert n_tails <= 4  # one a turn, however long the answer: it moves on


def test_thinking_that_later_turns_drop_is_not_in_the_way() -> None:
    rng, session = Random(5), session_with()
    turn = chat(rng, 200)
    answer, *_ = session.complete(turn, max_tokens=150)
    later = follow_up(turn, answer, rng, 50, n_thinking=100)
    assert session.complete(later)[1] == (len(turn.prompt_ids) - 1) // PAGE_SIZE * PAGE_SIZE


@pytest.mark.parametrize("max_step_tokens", [64, 512, 4096])
def test_what_requests_that_come_together_share_is_computed_once(max_step_tokens: int) -> None:
    rng, session = Random(6), session_with(max_step_tokens=max_step_tokens)
    base = some_ids(rng, 500)
    ids = [session.ask([*base, *some_ids(rng, 100 + i)]) for i in range(6)]
    n_run = session.run()
    assert [session.outputs[id, 0][0].cached_tokens for id in ids] == [0, 448, 448, 448, 448, 448]
    assert n_run == sum(600 + i for i in range(6)) - 5 * 448


def test_who_waits_for_another_goes_on_without_it() -> None:
    rng, session = Random(7), session_with(max_step_tokens=64)
    base = some_ids(rng, 500)
    first, second = (session.ask([*base, *some_ids(rng, 100)], max_tokens=5) for _ in range(2))
    session.step()
    session.step()
    assert session.engine.stats().n_waiting == 1
    session.abort(first)
    session.run()
    session.check_answers()
    assert session.outputs[second, 0][-1].finish_reason == "length"


def test_nothing_is_shared_between_salts() -> None:
    session, prompt = session_with(), some_ids(Random(8), 300)
    cached = [session.complete(prompt, salt=salt)[1] for salt in ("", "a", "b", "a", "")]
    assert cached == [0, 0, 0, 256, 256]


def test_a_request_that_opts_out_neither_reads_nor_writes() -> None:
    rng, session = Random(9), session_with()
    prompt, other = some_ids(rng, 300), some_ids(rng, 300)
    session.complete(prompt, use_cache=False, max_tokens=100)
    assert not session.store.tree.nodes and session.complete(prompt)[1] == 0
    n_nodes = len(session.store.tree.nodes)
    assert session.complete(prompt, use_cache=False)[1] == 0
    session.complete(other, use_cache=False)
    assert len(session.store.tree.nodes) == n_nodes
    stats = session.engine.stats().cache
    assert (stats.n_lookups, stats.n_lookup_tokens) == (1, 300)


def test_without_the_cache_nothing_is_kept() -> None:
    session, prompt = session_with(prefix_cache=False, n_units=8), some_ids(Random(10), 300)
    for _ in range(2):
        assert session.complete(prompt, max_tokens=70)[1:] == (0, 369)
    assert session.store.pages.n_free == session.store.pages.n
    assert session.engine.cache_summary()["enabled"] is False


def test_prompt_logprobs_are_computed_and_what_they_leave_is_found() -> None:
    session, prompt = session_with(), some_ids(Random(11), 300)
    session.complete(prompt)
    assert session.complete(prompt, prompt_logprobs=0)[1:] == (0, 300)
    assert session.complete(prompt)[1] == 256
    session.check_answers()


# What is not finite.


def spoil_all(session: Session, disk: Disk) -> None:
    """Nothing that the tree holds is finite any more, wherever it is."""
    runner = session.runner
    for node in session.store.tree.nodes.values():
        if node.page[DEVICE] is not None:
            runner.pages[node.page[DEVICE]] = NAN
        if node.state[DEVICE] is not None:
            runner.states[node.state[DEVICE]] = NAN
    for (kind, _), saved in disk.items():
        saved.content = [NAN] * PAGE_SIZE if kind == "page" else NAN


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_prefix_that_is_not_finite_leaves_every_tier(is_restarted: bool, caplog: pytest.LogCaptureFixture) -> None:
    rng = Random(14)
    disk: Disk = {}
    session = session_with(n_units=8, disk=disk)
    prompt, other = some_ids(rng, 618), some_ids(rng, 300)
    answer, *_ = session.complete(prompt, max_tokens=5)
    session.complete(other)
    session.settle()
    kept = {key: saved.content for key, saved in disk.items() if saved.depth <= 256}
    spoil_all(session, disk)
    if is_restarted:
        session = session_with(n_units=8, disk=disk)
    # It is found and read, and nothing can be drawn; then all of it goes, and the answer comes from the tokens alone.
    assert session.complete(prompt, max_tokens=5)[:2] == (answer, 0)
    assert session.engine.stats().n_recomputed == 1
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    assert "logits of 1 sequence were not finite" in record.message and "9 pages" in record.message
    left = [node.depth for node in session.store.tree.nodes.values()]
    assert max(left) == 256 and {saved.depth for saved in disk.values()} <= set(range(64, 257, 64)), (
        "what others began with stays"
    )
    assert len(disk) < len(kept)
    assert session.complete(prompt, max_tokens=5)[:2] == (answer, 0)
    assert session.complete(prompt, max_tokens=5)[:2] == (answer, 576)
    assert session.engine.stats().n_recomputed == 1


def test_what_is_not_finite_goes_once_a_slow_disk_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile it is neither used nor waited for."""
    rng = Random(18)
    disk: Disk = {}
    session = session_with(n_units=64, disk=disk)
    tiers = session.runner.tiers
    assert isinstance(tiers, FakeTiers)
    begin, other = some_ids(rng, 60), some_ids(rng, 100)
    prompt = [*begin, *session.complete(begin, max_tokens=10, use_cache=False)[0], *some_ids(rng, 330)]
    answer, *_ = session.complete(prompt, max_tokens=2)
    session.store.poll()
    for ticket in tiers._pending.values():  # the disk hangs, in the middle of saving it
        ticket.n_polls = 10**9
    assert session.store.n_moving and not any(saved.depth == 64 for saved in disk.values())
    with monkeypatch.context() as patch:
        patch.setattr(tiers, "wait", lambda timeout_s: pytest.fail("the engine's thread waits for the disk"))
        spoilt = next(n for n in session.store.tree.nodes.values() if n.depth == 64)
        assert spoilt.busy
        content = session.runner.pages[spoilt.page[DEVICE]].copy()
        session.runner.pages[spoilt.page[DEVICE]] = NAN
        for _ in range(3):
            assert session.complete(prompt, max_tokens=2)[:2] == (answer, 0)
        session.complete(begin, max_tokens=10)  # its first page is the same, once it is full
        assert session.complete(other)[1] == 0 and session.complete(other)[1] == 64
        assert session.engine.stats().n_recomputed == 1
    session.runner.pages[spoilt.page[DEVICE]] = content  # the fake disk looks whether it was changed
    tiers.wait(0.0)
    session.settle()
    assert {n.depth for n in session.store.tree.nodes.values()} == {64}, "the other prompt's is all there is"
    assert {saved.depth for saved in disk.values()} <= {64}
    assert session.complete(prompt, max_tokens=2)[:2] == (answer, 0)
    assert session.complete(prompt, max_tokens=2)[:2] == (answer, 384)
    assert session.engine.stats().n_recomputed == 1
    session.check_answers()


@pytest.mark.parametrize("use_cache", [False, True])
def test_an_answer_whose_memory_is_spoilt_goes_on(use_cache: bool) -> None:
    """Nothing comes twice, nothing is left out, and who shares the prefix goes on, too."""
    rng, session = Random(15), session_with()
    base = some_ids(rng, 200)
    ids = [session.ask([*base, i], max_tokens=90, n=n, use_cache=use_cache, logprobs=1) for i, n in ((20, 3), (30, 1))]
    scored = session.ask([*base, 40], max_tokens=90, prompt_logprobs=1, use_cache=use_cache)
    for _ in range(30):
        session.step()
    running = [s for s in session.engine.scheduler._decodes if s.request.id in ids]
    for sequence in running:
        assert sequence.state_slot is not None
        session.runner.states[sequence.state_slot] = NAN
    session.run()
    session.check_answers()
    assert session.engine.stats().n_recomputed == len(running) == 4
    assert all(outputs[-1].finish_reason == "length" for outputs in session.outputs.values())
    for id in ids:
        assert sum(len(output.logprobs or []) for output in session.outputs[id, 0]) == 90
    assert len(session.answer(scored)) == 90


def test_prompt_logprobs_come_once_when_their_prompt_was_spoilt() -> None:
    rng, session = Random(16), session_with(max_step_tokens=64)
    id = session.ask(some_ids(rng, 200), prompt_logprobs=1, max_tokens=3)
    session.step()
    (sequence,) = session.engine.scheduler._prefills
    session.runner.pages[sequence.pages[0]] = NAN
    session.run()
    session.check_answers()
    assert session.engine.stats().n_recomputed == 1
    assert [len(output.prompt_logprobs or []) for output in session.outputs[id, 0]] == [200, 0, 0]


def test_who_is_spoilt_twice_fails_alone() -> None:
    rng, session = Random(17), session_with(max_step_tokens=64)
    bad, good = (session.ask(some_ids(rng, 100), max_tokens=20) for _ in range(2))
    while session.engine.has_work():
        for sequence in session.engine.scheduler._decodes:
            if sequence.request.id == bad and sequence.n_generated >= 4:
                session.runner.states[sequence.state_slot or 0] = NAN
        session.step()
    session.check_answers()
    assert session.outputs[bad, 0][-1].error == NOT_FINITE and len(session.answer(bad)) == 5
    assert session.outputs[good, 0][-1].finish_reason == "length"
    assert session.engine.stats().n_recomputed == 1


# What stays.


def test_pages_beyond_the_last_checkpoint_go_first() -> None:
    """Prompts in a full pool; another takes state slots of their checkpoints, and then pages: of those that lost theirs."""
    rng, session = Random(12), session_with(max_num_seqs=1, n_slots=4, n_pages=36, max_model_len=2304)
    prompts = {depth: some_ids(rng, depth + 10) for depth in (640, 704, 768)}
    for prompt in prompts.values():
        session.complete(prompt)
    assert set(session.checkpoints()) == set(prompts)
    session.complete(some_ids(rng, 600))
    whole = {depth for depth, prompt in prompts.items() if session.n_kept(prompt) == depth // PAGE_SIZE}
    assert whole and whole == set(prompts) & set(session.checkpoints())
    for depth in whole:
        assert session.complete(prompts[depth])[1] == depth


def test_what_runs_loses_nothing_to_others() -> None:
    """One long sequence beside many that fill the rest of the pool again and again: none is computed twice."""
    rng, session = Random(13), session_with(n_units=0, n_pages=14, max_model_len=896, max_num_seqs=2)
    long = session.ask(some_ids(rng, 100), max_tokens=300)
    session.step()
    n_run = 0
    for _ in range(20):
        id = session.ask(some_ids(rng, 300), max_tokens=10)
        while session.outputs.get((id, 0), [Output("")])[-1].finish_reason is None:
            session.step()
        n_run += 309
    assert session.engine.stats().n_preemptions == 0 and session.engine.stats().cache.n_pages_evicted > 50
    session.run()
    assert session.runner.n_tokens_run == n_run + 399
    assert len(session.answer(long)) == 300


@pytest.mark.parametrize("use_cache", [True, False])
def test_preemption_brings_everything_back(use_cache: bool) -> None:
    """Two that do not fit together, and host memory for one: every token is computed once."""
    rng, session = (Random(14), session_with(n_units=16, n_pages=8, max_model_len=512, max_num_seqs=2, n_slots=4))
    for n in (200, 190):
        session.ask(some_ids(rng, n), max_tokens=150, use_cache=use_cache)
    n_run = session.run()
    assert session.engine.stats().n_preemptions > 0 and n_run == 200 + 190 + 2 * 149
    session.check_answers()


def test_preemption_without_host_memory_computes_again() -> None:
    rng, session = Random(14), session_with(n_pages=8, max_model_len=512, max_num_seqs=2, n_slots=4)
    for n in (200, 190):
        session.ask(some_ids(rng, n), max_tokens=150)
    assert session.run() > 200 + 190 + 2 * 149 and session.engine.stats().n_preemptions > 0
    session.check_answers()


def test_a_shared_system_prompt_outlives_one_off_prompts() -> None:
    """Between its uses others fill the pool more than once."""
    rng, session = Random(15), session_with(n_pages=40, n_slots=12, max_model_len=2048)
    system = Message("system", tuple(some_ids(rng, 640)))
    cached = [session.complete(chat(rng, 50, system=system))[1] for _ in range(3)]
    for _ in range(10):
        for _ in range(8):
            session.complete(some_ids(rng, 400), max_tokens=30)
        cached.append(session.complete(chat(rng, 50, system=system))[1])
    assert cached == [0] + [640] * 12


def test_what_is_not_used_any_more_leaves() -> None:
    rng, session = Random(16), session_with(n_pages=40, n_slots=12, max_model_len=2048)
    system = Message("system", tuple(some_ids(rng, 640)))
    for _ in range(20):
        session.complete(chat(rng, 50, system=system))
    for _ in range(200):
        session.complete(some_ids(rng, 400))
    assert session.complete(chat(rng, 50, system=system))[1] == 0


def test_host_memory_gives_back_what_the_pools_could_not_hold() -> None:
    rng, session = (Random(17), session_with(n_units=200, n_pages=20, n_slots=4, max_num_seqs=2, max_model_len=1280))
    prompts = [some_ids(rng, 600) for _ in range(8)]
    first = [session.complete(prompt) for prompt in prompts]
    again = [session.complete(prompt) for prompt in prompts]
    assert [answer for answer, *_ in again] == [answer for answer, *_ in first]
    assert [n_cached for _, n_cached, _ in again] == [576] * 8
    assert session.engine.stats().cache.read_bytes["host"] > 0


# Across restarts.


def test_a_restart_finds_what_was_found_before() -> None:
    rng = Random(18)
    disk: Disk = {}
    session = session_with(disk=disk, rng=rng)
    system = Message("system", tuple(some_ids(rng, 640)))
    following = []
    for _ in range(3):
        turn = chat(rng, 100, system=system)
        answer, *_ = session.complete(turn, max_tokens=80)
        following.append(follow_up(turn, answer, rng, 40))
        session.settle()
    session.engine.close(1.0)
    restarted = session_with(disk=disk, rng=rng)
    assert restarted.engine.stats().cache.n_pages == 0  # nothing is read before it is wanted
    assert restarted.complete(chat(rng, 70, system=system))[1] == 640
    assert [restarted.complete(turn)[1] for turn in following] == [768] * 3
    assert restarted.engine.stats().cache.read_bytes["disk"] > 0


def test_a_disk_that_lost_a_page_serves_what_does_not_need_it() -> None:
    rng = Random(19)
    disk: Disk = {}
    session = session_with(disk=disk, rng=rng)
    base = some_ids(rng, 500)
    turns = [[*base, *some_ids(rng, 300)] for _ in range(3)]
    for turn in turns:
        session.complete(turn)
    session.settle()
    pages = {key: saved.depth for (kind, key), saved in disk.items() if kind == "page"}
    assert sorted(pages.values()) == sorted([*range(64, 449, 64), *(d for d in range(512, 769, 64) for _ in turns)])
    del disk["page", next(key for key, depth in pages.items() if depth == 704)]
    restarted = session_with(disk=disk, rng=rng)
    assert len([kind for kind, _ in disk if kind == "page"]) == len(pages) - 2  # the one behind it is of no use
    assert sorted(restarted.complete(turn)[1] for turn in turns) == [448, 768, 768]


def test_a_disk_that_is_full_keeps_what_is_used() -> None:
    rng = Random(20)
    disk: Disk = {}
    session = session_with(disk=disk, rng=rng, n_pages=40, n_slots=6, max_num_seqs=2, max_model_len=2048)
    session.runner.tiers.disk_bytes = session.store.saves.disk_bytes = 60
    used = some_ids(rng, 650)
    for _ in range(20):
        session.complete(used)
        session.complete(some_ids(rng, 650))
        session.settle()
        assert sum(1 if kind == "page" else UNITS_PER_STATE for kind, _ in disk) <= 60
    assert session_with(disk=disk, rng=rng).complete(used)[1] == 640


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    """Its state slots and pages may hold anything; what was there before it is still good."""
    rng, session = Random(24), session_with(max_step_tokens=64)
    prompt = some_ids(rng, 300)
    failed = session.ask([*prompt[:190], POISON, *prompt[190:]])
    session.run()
    assert session.outputs[failed, 0][-1].finish_reason == "error"
    assert session.complete(prompt)[1] in (0, 64)  # the state at 128 was in the state slot that the failed chunk wrote
    session.check_answers()


def test_reset_forgets_everything_everywhere() -> None:
    rng, disk = Random(21), {}
    session = session_with(n_units=30, disk=disk, rng=rng, n_pages=40, max_model_len=2560)
    prompts = [some_ids(rng, 600) for _ in range(6)]
    for prompt in prompts:
        session.complete(prompt)
    running = session.ask(prompts[0], max_tokens=100)
    session.step()
    assert disk and session.store.tree.nodes
    session.engine.reset_cache()
    session.engine.check()
    assert not disk and not session.store.tree.nodes
    session.run()
    session.check_answers()
    assert len(session.answer(running)) == 100
    assert session.complete(prompts[1])[1] == 0


# What is said about it.


def test_the_summary_adds_up() -> None:
    rng, session = (Random(22), session_with(n_units=40, n_pages=20, n_slots=6, max_num_seqs=2, max_model_len=1280))
    for _ in range(12):
        session.complete(chat(rng, 250), max_tokens=70)
    turn = chat(rng, 250)
    session.complete(turn)
    session.complete(turn)
    summary = msgspec.json.decode(msgspec.json.encode(session.engine.cache_summary()))
    tiers, checkpoints = summary["tiers"], summary["checkpoints"]
    assert summary["enabled"] and summary["page_tokens"] == PAGE_SIZE
    assert tiers["device"]["pages_in_use"] == 0 and tiers["device"]["pages"] <= tiers["device"]["pages_total"] == 20
    for name, tier in tiers.items():
        assert tier["checkpoints"] == sum(name in c["tiers"] for c in checkpoints)
    assert tiers["host"]["bytes_used"] == tiers["host"]["pages"] + 2 * tiers["host"]["checkpoints"] <= 40
    for i, checkpoint in enumerate(checkpoints):
        above = checkpoint["above"]
        assert checkpoint["id"] == i and (above is None or checkpoints[above]["tokens"] < checkpoint["tokens"])
    check_what_is_left(session, None, 0)


if __name__ == "__main__":
    import logging

    logging.disable()
    n_tokens = n_found = 0
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            asked, found = run_schedule(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
        n_tokens, n_found = n_tokens + asked, n_found + found
    print(f"{n_found} of {n_tokens} prompt tokens were found")
