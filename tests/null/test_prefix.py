"""The prefix cache under the scheduler: whatever it keeps, moves and drops, nobody gets another's tokens.

The fake runner and its tiers compare every page and state with the tokens it stands for. The random schedules are repeatable:
`python tests/null/test_prefix.py FIRST LAST` runs those seeds.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest

from deltic.engine.loop import Engine
from deltic.engine.request import PAGE_SIZE, Output, Request, SamplingParams
from tests.conversations import Conversations, Turn
from tests.fakes import POISON, UNITS_PER_STATE, FakeRunner, FakeTiers, Saved, expected_tokens

Disk = dict[tuple[str, bytes], Saved]


def prefixes(ids: list[int]) -> Iterator[bytes]:
    """A digest for each full page and all before it."""
    digest = blake2b(digest_size=16)
    for i in range(0, len(ids) - PAGE_SIZE + 1, PAGE_SIZE):
        digest.update(array("i", ids[i : i + PAGE_SIZE]).tobytes())
        yield digest.digest()


class Session:
    """An engine, what it was asked, and what it answered."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.engine = Engine(runner)
        self.store = self.engine.cache.store
        self.requests: dict[str, Request] = {}
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        self.seeds: dict[tuple[str, int], int] = {}
        self.aborted: set[str] = set()

    def ask(
        self,
        prompt: Turn | list[int],
        *,
        salt: str = "",
        use_cache: bool = True,
        priority: int = 0,
        **params: Any,
    ) -> str:
        """Queues a request; its id."""
        turn = prompt if isinstance(prompt, Turn) else Turn(prompt, [])
        request = Request(
            id=str(len(self.requests)), prompt_ids=turn.prompt_ids, boundaries=turn.boundaries, priority=priority,
            params=SamplingParams(**{"max_tokens": 1, "seed": 1, "ignore_eos": True} | params), cache_salt=salt, use_cache=use_cache,
        )  # fmt: skip
        self.engine.add(request)
        self.requests[request.id] = request
        for sequence in self.engine.scheduler.sequences():
            if sequence.request.id == request.id:
                self.seeds[request.id, sequence.index] = sequence.seed
        return request.id

    def abort(self, id: str) -> None:
        self.aborted.add(id)
        self.take(self.engine.abort(id))

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.error is None or "poisoned" in output.error, output.error
            history = self.outputs.setdefault((output.id, output.index), [])
            assert not history or history[-1].finish_reason is None, "an output after the last"
            history.append(output)
        self.engine.check()

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        self.take(outputs)
        return outputs

    def run(self) -> int:
        """Until nothing is open; the tokens that were computed for it."""
        n_before = self.runner.n_tokens_run
        for _ in range(20_000):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work(), "not done after 20000 steps"
        assert self.engine.cache.n_pages_used == self.engine.cache.n_slots_used == 0
        return self.runner.n_tokens_run - n_before

    def settle(self) -> None:
        """Until everything is saved that was to be."""
        while self.store.n_moving or self.store._to_save:
            self.store.poll()
            self.store.wait(0.0)
        self.engine.check()

    def complete(self, prompt: Turn | list[int], **options: Any) -> tuple[list[int], int, int]:
        """Asks and runs: the answer, the tokens that the cache had, and those that were computed."""
        id = self.ask(prompt, **options)
        n_run = self.run()
        return self.answer(id), self.outputs[id, 0][0].cached_tokens, n_run

    def answer(self, id: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs.get((id, index), []) for token in output.token_ids]

    def checkpoints(self) -> dict[int, str]:
        """Depth and kind of every checkpoint; of those at one depth, the last."""
        return {c["tokens"]: c["kind"] for c in self.engine.cache_summary()["checkpoints"]}

    def check_answers(self, known: set[tuple[str, bytes]]) -> None:
        """Everything ended, with the tokens of a run alone; what was found in the cache could be there.

        known: prefixes, by salt, of everything that ever was asked; those of this session are added.
        """
        for id, request in self.requests.items():
            if request.use_cache:
                for index in range(request.params.n):
                    tokens = request.prompt_ids + self.answer(id, index)
                    known |= {(request.cache_salt, prefix) for prefix in prefixes(tokens)}
        for (id, index), seed in self.seeds.items():
            request, outputs = self.requests[id], self.outputs[id, index]
            reason, answer = outputs[-1].finish_reason, self.answer(id, index)
            assert reason is not None, f"request {id}/{index} did not end"
            expected = expected_tokens(request.prompt_ids, request.params, seed)
            if reason in ("abort", "error"):
                assert reason == "error" or id in self.aborted
                assert answer == expected[: len(answer)]
                continue
            assert answer == expected
            n_cached = outputs[0].cached_tokens
            assert n_cached % PAGE_SIZE == 0 and n_cached < len(request.prompt_ids)
            if n_cached:
                *_, last = prefixes(request.prompt_ids[:n_cached])
                assert request.use_cache and (request.cache_salt, last) in known
            if request.params.prompt_logprobs is not None and index == 0:
                entries = outputs[0].prompt_logprobs
                assert entries is not None
                assert [entry and entry.token_id for entry in entries] == [None, *request.prompt_ids[1:]]


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
            runner,
            rng.choice([0, 2, 6, 30]),
            disk,
            rng.choice([30, 300, 10_000]),
            rng,
            rng.choice([0.0, 0.05]),
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


def run_life(session: Session, rng: Random, n_rounds: int) -> None:
    """Requests that come and go, with everything that can come between them."""
    engine = session.engine
    conversations = Conversations(rng, session.runner.max_model_len)
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
    assert tiers["device"]["checkpoints"] == store.slots.n - store.slots.n_free
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
        assert store.pages.n_free == store.pages.n and store.slots.n_free == store.slots.n
        assert store.units.n_free == store.units.n and not store.tree.nodes


def run_schedule(seed: int) -> tuple[int, int]:
    """One random schedule over one or more lives of an engine; prompt tokens, and those that were found."""
    rng = Random(seed)
    disk: Disk | None = {} if rng.random() < 0.5 else None
    known: set[tuple[str, bytes]] = set()
    n_tokens = n_found = 0
    for _ in range(rng.choice([1, 2, 3]) if disk is not None else 1):
        runner = random_runner(rng, disk)
        session = Session(runner)
        run_life(session, rng, rng.choice([10, 30]))
        session.check_answers(known)
        n_tokens += sum(len(request.prompt_ids) for request in session.requests.values())
        n_found += sum(outputs[0].cached_tokens for outputs in session.outputs.values())
        if rng.random() < 0.7:
            check_what_is_left(session, disk, runner.tiers.disk_bytes if runner.tiers else 0)
        if disk:  # somebody tidied up
            for entry in rng.sample(list(disk), rng.choice([0, 0, min(3, len(disk))])):
                del disk[entry]
    return n_tokens, n_found


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules(seed: int) -> None:
    run_schedule(seed)


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
