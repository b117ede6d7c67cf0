"""Branches behind a prompt: one computation of the prompt, one sequence a branch, and everything adds up at every step.

The fake runner follows each sequence's tokens through pages and states, so it notices a branch that started from another's.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

import msgspec
import pytest

from deltic.engine.checks import RequestError, check_request
from deltic.engine.messages import MAX_SCORED, Branch, Request, SamplingParams
from deltic.ops.geometry import PAGE_SIZE
from tests.conversations import some_ids
from tests.fakes import POISON, FakeRunner
from tests.sessions import Session, session_with, spoil_something

NOTHING_DRAWN = SamplingParams(max_tokens=0, temperature=0.0)


def branch(rng: Random, most: int = 90) -> Branch:
    ids = some_ids(rng, rng.randrange(most))
    places = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.choice((1, 2, 26, MAX_SCORED))))
    return Branch(ids, [(n, rng.randrange(200)) for n in places])


def ask(session: Session, prompt: list[int], branches: list[Branch], **more: Any) -> str:
    id = f"s{len(session.requests)}"
    params = msgspec.structs.replace(NOTHING_DRAWN, n=len(branches))
    request = Request(id=id, prompt_ids=prompt, params=params, branches=branches, **more)
    session.engine.add(msgspec.structs.replace(request))
    session.requests[id] = request
    return id


def check(session: Session, id: str) -> None:
    """Each branch brought what it wanted, once and with its last output, unless the request was ended."""
    for index, wanted in enumerate(session.requests[id].branches):
        outputs = session.outputs[id, index]
        *before, last = [output for output in outputs if output.n_read is None]
        assert not before, "a branch says one thing"
        if last.finish_reason != "length":
            assert id in session.aborted or last.finish_reason == "error"
            continue
        assert last.token_ids == [] and last.prompt_logprobs is not None
        assert [entry.token_id for entry in last.prompt_logprobs if entry] == [id for _, id in wanted.scored]


def made(rng: Random, kind: str, **sizes: Any) -> Session:
    gpu = {"gpu": True, "n_lookahead": 1, "max_prefill_seqs": rng.choice((0, 2))} if kind == "gpu" else {}
    return session_with(**gpu, **sizes)


kinds = pytest.mark.parametrize("kind", ["cpu", "gpu"])


@kinds
def test_the_prompt_is_computed_once(kind: str) -> None:
    """Beside the prompt, each branch costs its own tokens: on a CPU one more, the prompt's last; on a GPU its last block."""
    rng = Random(1)
    session = made(rng, kind, max_num_seqs=8)
    prompt, branches = some_ids(rng, 1000), [Branch(some_ids(rng, 20), [(20, 5)]) for _ in range(8)]
    check_all = [ask(session, prompt, branches)]
    n_own = 1 if kind == "cpu" else 1000 % PAGE_SIZE
    assert session.run() == 1000 - n_own + 8 * (20 + n_own)
    # The next of this prompt begin behind its last full page.
    check_all.append(ask(session, prompt, branches[:4]))
    assert session.run() == 1000 % PAGE_SIZE - n_own + 4 * (20 + n_own)
    for id in check_all:
        check(session, id)
        reused = [session.outputs[id, i][0].cached_tokens for i in range(len(session.requests[id].branches))]
        assert reused[1:] == [1000 - n_own] * (len(reused) - 1)


@kinds
@pytest.mark.parametrize("n_prompt", [1, 2, 63, 64, 65, 128, 129, 500])
def test_any_length_of_prompt(kind: str, n_prompt: int) -> None:
    rng = Random(n_prompt)
    session = made(rng, kind, max_num_seqs=4)
    prompt = some_ids(rng, n_prompt)
    for branches in ([Branch([], [(0, 1)])], [Branch([], [(0, i)]) for i in range(4)], [branch(rng) for _ in range(4)]):
        for _ in range(2):
            id = ask(session, prompt, branches)
            session.run()
            check(session, id)


@kinds
@pytest.mark.parametrize("seed", range(12))
def test_random_schedules(kind: str, seed: int) -> None:
    """Branches among chats, of several tenants, with few pages: preempted, aborted, failed, spoilt, and found again."""
    rng = Random(seed)
    max_num_seqs, n_pages = rng.choice([1, 2, 4, 8]), rng.choice([14, 24, 60])
    # Every other schedule lacks state slots: whoever finds a checkpoint may have to go on in its own.
    sizes = {"n_slots": max_num_seqs} if seed % 2 else {}
    session = made(
        rng, kind, max_num_seqs=max_num_seqs, n_pages=n_pages, max_step_tokens=rng.choice([64, 128, 320]), **sizes
    )
    prompts = [some_ids(rng, rng.randrange(1, 500)) for _ in range(3)]
    scored = []
    for _ in range(25):
        if rng.random() < 0.6:
            branches = [branch(rng) for _ in range(rng.randint(1, max_num_seqs))]
            if rng.random() < 0.05:
                branches[-1] = Branch([POISON], [(0, 1)])
            scored.append(
                ask(session, rng.choice(prompts), branches, tenant=rng.choice("ab"), use_cache=rng.random() < 0.9)
            )
        else:
            session.ask(rng.choice(prompts), max_tokens=rng.randrange(1, 40))
        for _ in range(rng.randrange(6)):
            if session.engine.has_work():
                session.step()
        if rng.random() < 0.1 and scored:
            session.abort(rng.choice(scored))
        if rng.random() < 0.05:
            running = [*session.engine.scheduler._decodes, *session.engine.scheduler._prefills]
            if running:
                session.engine.scheduler._preempt(rng.choice(running))
                session.engine.check()
        if rng.random() < 0.05:
            spoil_something(session.engine, session.runner, rng)
        if rng.random() < 0.03:
            session.engine.reset_cache()
    session.run()
    for id in scored:
        check(session, id)


@kinds
@pytest.mark.parametrize("n_prompt", [129, 961, 1000])
def test_the_others_start_over_where_the_first_goes_on_in_the_checkpoint_s_state_slot(kind: str, n_prompt: int) -> None:
    """No state slot is free for it. On a CPU, and behind a prompt of 64 n + 1 tokens, all fork where the first begins."""
    rng = Random(1)
    session = made(rng, kind, max_num_seqs=4, n_slots=4)
    prompt = some_ids(rng, n_prompt)
    ids = []
    for n in (1, 4):
        ids.append(ask(session, prompt, [Branch(some_ids(rng, 20), [(20, 5)]) for _ in range(n)]))
        session.run()
    for id in ids:
        check(session, id)


def preempt_at(session: Session, n_computed: int) -> int:
    """Runs all, and preempts once who has that many tokens computed. Returns how often that was."""
    n = 0
    while session.engine.has_work():
        session.step()
        for sequence in session.engine.scheduler._prefills[:] if not n else []:
            if sequence.n_computed == n_computed:
                session.engine.scheduler._preempt(sequence)
                n += 1
    return n


@kinds
def test_who_is_preempted_before_the_last_token_brings_all_scores(kind: str) -> None:
    """One token is left: a sequence that scores nothing is parked there in host memory."""
    rng = Random(1)
    session = made(rng, kind, max_num_seqs=4, max_step_tokens=PAGE_SIZE, n_units=200)
    id = ask(session, some_ids(rng, 100), [Branch(some_ids(rng, 93), [(0, 5), (93, 6)])])
    assert preempt_at(session, 192) == 1
    check(session, id)
    for use_cache in (False, True):
        plain = session.ask(some_ids(rng, 193), use_cache=use_cache, prompt_logprobs=1)
        assert preempt_at(session, 192) == 1
        scores = session.outputs[plain, 0][0].prompt_logprobs
        assert scores is not None and len(list(scores)) == 193


def test_rows_of_logits_behind_many_scores() -> None:
    """Of a branch's rows one is that behind its last token, where nothing need be scored."""
    rng = Random(2)
    session = session_with(max_num_seqs=8, max_logit_rows=8 + PAGE_SIZE)
    ids = [
        ask(session, some_ids(rng, 20), [Branch(some_ids(rng, n + 1), [(i, 5) for i in range(n)])])
        for n in (8, MAX_SCORED)
    ]
    session.run()
    for id in ids:
        check(session, id)


def test_one_of_several_branches_ends() -> None:
    """The others go on, also where the one that computes the prompt is the one that ends."""
    rng = Random(4)
    session = session_with(max_num_seqs=4, max_step_tokens=64)
    id = ask(session, some_ids(rng, 300), [branch(rng) for _ in range(4)])
    session.step()
    session.aborted.add(id)
    session.take(session.engine.abort(id, 0))
    session.run()
    check(session, id)
    assert [session.outputs[id, i][-1].finish_reason for i in range(4)] == ["abort", "length", "length", "length"]


def test_a_branch_that_does_not_fit_now_starts_over_by_itself() -> None:
    rng = Random(5)
    session = session_with(n_pages=8, max_num_seqs=4)
    id = ask(session, some_ids(rng, 200), [Branch(some_ids(rng, 100), [(100, 1)]) for _ in range(4)])
    session.run()
    check(session, id)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"branches": [Branch([1], [(1, 2)])] * 2}, "need n of their number"),
        ({"params": SamplingParams(max_tokens=1)}, "need n of their number"),
        ({"params": SamplingParams(max_tokens=0, prompt_logprobs=1)}, "neither logprobs"),
        ({"branches": [Branch([1], [])]}, "scores 0 ids"),
        ({"branches": [Branch([1], [(1, 2)] * (MAX_SCORED + 1))]}, "scores 64 ids"),
        ({"branches": [Branch([1], [(1, 2), (0, 2)])]}, "in their order"),
        ({"branches": [Branch([1], [(2, 2)])]}, "not behind its tokens"),
        ({"branches": [Branch([1], [(-1, 2)])]}, "not behind its tokens"),
        ({"branches": [Branch([-1], [(0, 2)])]}, "outside the vocabulary"),
        ({"branches": [Branch([1], [(0, 1 << 40)])]}, "outside the vocabulary"),
    ],
)
def test_what_branches_cannot_be(changed: dict[str, Any], why: str) -> None:
    info = FakeRunner().info
    request = Request(id="a", prompt_ids=[1], params=NOTHING_DRAWN, branches=[Branch([1], [(1, 2)])])
    check_request(request, info)
    with pytest.raises(RequestError, match=re.escape(why)):
        check_request(msgspec.structs.replace(request, **changed), info)
    assert "too long" not in why


def test_a_branch_may_be_too_long() -> None:
    session = session_with(max_model_len=256)
    with pytest.raises(RequestError, match="max_model_len is 256"):
        ask(session, [1] * 200, [Branch([1], [(1, 2)]), Branch([1] * 57, [(0, 2)])])
