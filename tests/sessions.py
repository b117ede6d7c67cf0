"""An engine with a fake runner, what it was asked and what it answered: the prefix cache seen from outside."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from random import Random
from typing import Any

from deltic.engine.cache.tree import DEVICE, Kind, next_key, root_key
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams
from deltic.ops.geometry import PAGE_SIZE
from tests.conversations import Turn
from tests.fakes import NAN, FakeRunner, FakeTiers, Saved, expected_tokens

Disk = dict[tuple[Kind, bytes], Saved]


def prefixes(ids: list[int]) -> Iterator[bytes]:
    """A digest for each full page and all before it."""
    digest = blake2b(digest_size=16)
    for i in range(0, len(ids) - PAGE_SIZE + 1, PAGE_SIZE):
        digest.update(array("i", ids[i : i + PAGE_SIZE]).tobytes())
        yield digest.digest()


def spoil_something(engine: Engine, runner: FakeRunner, rng: Random) -> None:
    """A page or a state in device memory, of the tree or of a sequence that runs, is not finite from now on."""
    nodes = [n for n in engine.cache.store.tree.nodes.values() if not n.busy]
    running = [*engine.scheduler._decodes, *engine.scheduler._prefills]
    pages = [n.page[DEVICE] for n in nodes if n.page[DEVICE] is not None]
    state_slots = [n.state[DEVICE] for n in nodes if n.state[DEVICE] is not None]
    state_slots += [s.state_slot for s in running if s.state_slot is not None and s.start_slot is None]
    if pages and rng.random() < 0.5:
        runner.pages[rng.choice(pages)] = NAN
    elif state_slots:
        runner.states[rng.choice(state_slots)] = NAN


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
        self, prompt: Turn | list[int], *, salt: str = "", use_cache: bool = True, priority: int = 0, **params: Any
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
            known = ("could not run this step (RuntimeError;", "not finite")
            assert output.error is None or any(word in output.error for word in known), output.error
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
        while not self.store.is_idle:
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

    def n_kept(self, ids: list[int]) -> int:
        """Pages of a prompt that device memory has."""
        key, n = root_key(Request(id="", prompt_ids=[], params=SamplingParams())), 0
        for i in range(0, len(ids) - PAGE_SIZE + 1, PAGE_SIZE):
            key = next_key(key, array("i", ids[i : i + PAGE_SIZE]))
            node = self.store.tree.nodes.get(key)
            n += node is not None and node.page[DEVICE] is not None
        return n

    def check_answers(self, known: Counter[tuple[str, bytes]] | None = None) -> None:
        """Everything ended, with the tokens of a run alone; what was found in the cache is another's of the same salt.

        known: how many sequences had each prefix, by salt, in earlier sessions with this disk; those of this one are added.
        """
        known = Counter() if known is None else known
        for id, index in self.seeds:
            request = self.requests[id]
            if request.use_cache:
                tokens = request.prompt_ids + self.answer(id, index)
                known.update((request.cache_salt, prefix) for prefix in prefixes(tokens))
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
                assert request.use_cache and known[request.cache_salt, last] > 1, "nobody else had this prefix"
            if request.params.prompt_logprobs is not None and index == 0:
                entries = outputs[0].prompt_logprobs
                assert entries is not None
                assert [entry and entry.token_id for entry in entries] == [None, *request.prompt_ids[1:]]


def session_with(
    n_units: int | None = None, disk: Disk | None = None, rng: Random | None = None, **sizes: Any
) -> Session:
    """A session with state slots for many checkpoints; with tiers if n_units or disk is given."""
    runner = FakeRunner(**{"n_slots": 40} | sizes)
    if n_units is not None or disk is not None:
        runner.tiers = FakeTiers(runner, n_units or 0, disk, rng=rng)
    return Session(runner)
