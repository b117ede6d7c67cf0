"""The prefix cache on tiny models: what a request finds there changes no bit of its logits, nor any token.

Conversations branch, are edited, cut and repeated, while pages, state slots and host memory run short, sequences are preempted,
requests aborted, steps fail, files are damaged and processes killed. Afterwards every request runs again without a cache: all
rows of logits that a token was drawn from are compared. Memory that nobody owns is kept full of NaN, so that a page, state slot or
unit which is read after it was freed, or before it was written, shows.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.soak.spoil import spoil
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams, TokenLogprob
from deltic.engine.step import Step, StepResult
from deltic.ops.arrays import Array
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from tests.cpu.grid import grid
from tests.tiny import tiny_checkpoint

MAX_PROMPT, MAX_TOKENS = 600, 100
EVERY_MODEL = (("dense", None), ("moe", None), ("next", None), ("dense", "int8"), ("flash", None))
KV = {("next", None): "int8", ("dense", "int8"): "k8v4"}
"""Formats of keys and values, by model; of the others bf16."""
every_model = pytest.mark.parametrize(
    ("kind", "quantize"), grid(EVERY_MODEL, [("next", None), ("dense", "int8"), ("flash", None)], pytest.mark.long)
)
other_models = pytest.mark.parametrize(
    ("kind", "quantize"), grid(EVERY_MODEL, [("dense", None), ("moe", None)], pytest.mark.long)
)


@dataclass(frozen=True)
class Setup:
    """What of the engine's settings matters here. A page is 0.13 MB, a state 0.8 to 1.2 MB."""

    kind: str = "dense"
    quantize: str | None = None
    n_pages: int = 120
    max_num_seqs: int = 4
    n_checkpoints: int = 24
    host_mb: float = 0.0
    directory: Path | None = None
    disk_mb: float = 1000.0
    prefix_cache: bool = True
    model: str | None = None
    """None: the tiny checkpoint of its kind."""

    def build(self) -> Runner:
        model = self.model or str(tiny_checkpoint(self.kind))
        config = EngineConfig(
            model=model,
            quantize=self.quantize,
            kv_cache_dtype=KV.get((self.kind, self.quantize), "auto"),
            weights_cache=Path(model).with_name("packed"),
            threads=1,
            max_num_seqs=self.max_num_seqs,
            max_model_len=MAX_PROMPT + MAX_TOKENS,
            max_step_tokens=320,
            n_pages=self.n_pages,
            prefix_cache=self.prefix_cache,
            n_checkpoints=self.n_checkpoints,
            cache_host_gb=self.host_mb / 1000,
            cache_dir=self.directory,
            cache_disk_gb=self.disk_mb / 1000,
        )
        return build_runner(config, lambda stage, done: None, Cpu())


@dataclass
class Answer:
    """What came of one of a request's n sequences."""

    tokens: list[int] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None


class Watched:
    """A runner that keeps every row of logits a token was drawn from, and fills with NaN what nobody owns."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.info, self.max_logit_rows, self.tiers = inner.info, inner.max_logit_rows, inner.tiers
        self.pictures, self.adapters, self.replays = inner.pictures, inner.adapters, inner.replays
        self.experts = inner.experts
        self.answers: defaultdict[tuple[str, int], Answer] = defaultdict(Answer)
        self.engine = Engine(self)
        self.fails_next = False
        self.spoilt: defaultdict[str, set[int]] = defaultdict(set)

    def is_busy(self) -> bool:
        return self.inner.is_busy()

    def step(self, step: Step) -> StepResult:
        self._spoil_what_was_freed()
        result = self.inner.step(step)
        if self.fails_next:
            self._fail(step)
        row = 0
        drawn = {draw.chunk for draw in step.draws}
        rows = {}
        for i, chunk in enumerate(step.chunks):
            row += chunk.length if chunk.prompt_logprobs else int(i in drawn)
            rows[i] = row - 1
        logits = self.inner.logits(row).copy()
        for draw, tokens in zip(step.draws, result.tokens, strict=True):
            if tokens[0] < 0:
                continue  # it is computed once more
            self.answers[draw.sequence.request.id, draw.sequence.index].rows.append(logits[rows[draw.chunk]])
        return result

    def _spoil_what_was_freed(self) -> None:
        store, memory = self.engine.cache.store, self.inner.memory
        for pool in (store.pages, store.state_slots, store.units):
            free = set(pool._free)
            new = list(free - self.spoilt[pool.name])
            self.spoilt[pool.name] = free
            if not new:
                continue
            if pool is store.pages:
                memory.pages.view(np.uint8)[new] = 0xFF
            elif pool is store.state_slots:
                self._spoil_state_slots(new)
            else:
                self.inner.host[new] = 0xFF

    def _spoil_state_slots(self, state_slots: list[int]) -> None:
        self.inner.memory.states[state_slots] = np.nan
        self.inner.memory.columns[state_slots] = np.nan

    def _fail(self, step: Step) -> None:
        """As a forward that stops half way: all it may have written is worthless."""
        self.fails_next = False
        for chunk in step.chunks:
            self.inner.memory.pages[chunk.sequence.pages[chunk.start // PAGE_SIZE :]] = np.nan
            self._spoil_state_slots([chunk.sequence.state_slot, *(state_slot for _, state_slot in chunk.snapshots)])
        raise RuntimeError("this step was to fail")


@contextmanager
def serving(setup: Setup) -> Iterator[Watched]:
    watched = Watched(setup.build())
    try:
        yield watched
    finally:
        watched.engine.close(5.0)


@dataclass(frozen=True)
class Message:
    ids: tuple[int, ...]
    n_thinking: int = 0
    """So many of the first ids are dropped by the template in later turns."""


@dataclass
class Asked:
    request: Request
    messages: list[Message]
    answers: dict[int, Answer]
    cached_tokens: int = 0

    @property
    def continued(self) -> list[Message]:
        tokens = self.answers[0].tokens
        return [*self.messages, Message(tuple(tokens), len(tokens) // 2)]

    @property
    def is_done(self) -> bool:
        return bool(self.answers) and all(answer.finish_reason for answer in self.answers.values())


class Users:
    """Random conversations: each request goes on from one that was answered, or begins anew."""

    def __init__(self, seed: int, plain: bool = False) -> None:
        """plain: every request is one sequence that uses the cache."""
        self.random = random.Random(seed)
        self.plain = plain
        self.systems = [self._message(448), self._message(150), Message(())]
        self.asked: list[Asked] = []
        self.name = f"{seed}-{plain}"

    def _message(self, n_most: int = 140) -> Message:
        n = self.random.choice([self.random.randint(1, n_most), n_most // PAGE_SIZE * PAGE_SIZE])
        return Message(tuple(self.random.randrange(256) for _ in range(n)))

    def ask(self) -> Asked:
        messages = self._messages()
        while sum(len(message.ids) for message in messages) > MAX_PROMPT:
            messages = [self.random.choice(self.systems), self._message()]
        ids = [i for message in messages for i in message.ids]
        r = self.random
        boundaries = list(itertools.accumulate(len(message.ids) for message in messages))
        greedy = SamplingParams(max_tokens=r.choice([1, 9, 30, MAX_TOKENS]), temperature=0.0, ignore_eos=True)
        request = Request(id=f"{self.name}-{len(self.asked)}", prompt_ids=ids, params=greedy, boundaries=boundaries)
        if not self.plain:
            params = msgspec.structs.replace(
                greedy,
                temperature=r.choice([0.0, 1.0]),
                seed=r.getrandbits(63),
                n=r.choice([1, 1, 1, 2, 3]),
                max_tokens=r.choice([0, greedy.max_tokens, greedy.max_tokens]),
                ignore_eos=r.random() < 0.8,
                prompt_logprobs=2 if r.random() < 0.06 else None,
                repetition_penalty=r.choice([1.0, 1.0, 1.3]),
            )
            request = msgspec.structs.replace(
                request,
                params=params,
                priority=r.choice([0, 0, 0, 1]),
                boundaries=boundaries if r.random() < 0.8 else [],
                cache_salt=r.choice(["", "", "", "pepper"]),
                use_cache=r.random() < 0.95,
            )
        asked = Asked(request, messages, {})
        self.asked.append(asked)
        return asked

    def _messages(self) -> list[Message]:
        r = self.random
        past = [asked for asked in self.asked if asked.is_done]
        if not past or r.random() < 0.15:
            return [r.choice(self.systems), self._message()]
        before = r.choice([r.choice(past), past[-1]])
        messages = [*before.continued, self._message()]
        what = r.randrange(10)
        if what < 2:
            return before.messages
        if what == 2:
            messages[r.randrange(len(messages))] = self._message()
        elif what == 3:
            messages = messages[: r.randint(1, len(messages))]
            messages[-1] = Message(messages[-1].ids[: r.randint(1, max(1, len(messages[-1].ids)))] or (0,))
        elif what < 6:
            messages = [Message(message.ids[message.n_thinking :]) for message in messages]
        return messages

    def next_turns(self) -> list[Asked]:
        """A request more in each conversation that did not go on."""
        texts = {tuple(i for m in asked.continued for i in m.ids): asked for asked in self.asked}
        ends = [
            asked for text, asked in texts.items()
            if not any(other[: len(text)] == text for other in texts if other != text)
            and len(text) + 20 < MAX_PROMPT
        ]  # fmt: skip
        turns = []
        for asked in ends:
            ids = [i for message in asked.continued for i in message.ids] + [7] * 20
            request = msgspec.structs.replace(asked.request, id=f"{asked.request.id}-next", prompt_ids=ids)
            turns.append(Asked(request, [], {}))
        return turns


def send(watched: Watched, asked: Asked) -> None:
    request = asked.request
    asked.answers = {index: watched.answers[request.id, index] for index in range(request.params.n)}
    watched.engine.add(request)


def note(outputs: list[Output], asked: dict[str, Asked]) -> None:
    for output in outputs:
        answer = asked[output.id].answers[output.index]
        answer.tokens += output.token_ids
        answer.finish_reason = output.finish_reason or answer.finish_reason
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = list(output.prompt_logprobs)
        asked[output.id].cached_tokens = max(asked[output.id].cached_tokens, output.cached_tokens)


def serve(watched: Watched, all_asked: list[Asked], at_once: int = 4) -> int:
    """Serves requests, so many at a time; how many prompt tokens they found in the cache."""
    open_asked = {asked.request.id: asked for asked in all_asked}
    for i in range(0, len(all_asked), at_once):
        for asked in all_asked[i : i + at_once]:
            send(watched, asked)
        while watched.engine.has_work():
            note(watched.engine.step(), open_asked)
            watched.engine.check()
    return sum(asked.cached_tokens for asked in all_asked)


def converse(watched: Watched, users: Users, n_requests: int, at_once: int = 3) -> int:
    """As `serve`, with requests that go on from the answers before; the same ones every time."""
    return sum(serve(watched, [users.ask() for _ in range(at_once)]) for _ in range(n_requests // at_once))


def trouble(
    watched: Watched, users: Users, n_requests: int, seed: int, *, preempts: float = 0.0, mishaps: float = 0.0
) -> None:
    """As `converse`, but requests come at any time. Before a step, somebody is preempted, or something else happens, so often:
    0 to 1."""
    r, engine = random.Random(seed), watched.engine
    asked: dict[str, Asked] = {}
    while len(asked) < n_requests or engine.has_work():
        while len(asked) < n_requests and (not engine.has_work() or r.random() < 0.15):
            new = users.ask()
            asked[new.request.id] = new
            send(watched, new)
        engine.scheduler.max_step_tokens = r.choice([64, 100, 128, 200, 320])
        running = [*engine.scheduler._decodes, *engine.scheduler._prefills]
        something = False
        if running and r.random() < preempts:
            something = True
            engine.scheduler._preempt(r.choice(running))
        if r.random() < mishaps:
            something = True
            victim = r.choice(list(asked))
            note(engine.abort(victim, r.choice([None, 0])), asked)
        if r.random() < mishaps / 2:
            something = True
            engine.reset_cache()
        watched.fails_next = r.random() < mishaps / 2
        if something:
            engine.check()
        note(engine.step(), asked)
        engine.check()


@cache
def cold_runner(kind: str, quantize: str | None) -> Runner:
    return Setup(kind, quantize, n_pages=200, max_num_seqs=16, prefix_cache=False).build()


def assert_as_cold(setup: Setup, all_asked: list[Asked]) -> None:
    """All requests again, without a cache: the same bits in every row of logits, and the same tokens."""
    cold = Watched(cold_runner(setup.kind, setup.quantize))
    expected = [Asked(asked.request, asked.messages, {}) for asked in all_asked]
    assert serve(cold, expected, at_once=len(expected)) == 0
    for warm_asked, cold_asked in zip(all_asked, expected, strict=True):
        request = warm_asked.request
        n_prompt, n_cached = len(request.prompt_ids), warm_asked.cached_tokens
        what = f"request {request.id} of {n_prompt} tokens, {n_cached} of them found: {request.params}"
        assert n_cached % PAGE_SIZE == 0 and n_cached < n_prompt, what
        # The log-probabilities of a prompt are computed by the first of its sequences; others may start later by themselves.
        may_start_behind = request.params.prompt_logprobs is None or request.params.n > 1
        assert not n_cached or (request.use_cache and may_start_behind), what
        for index, answer in warm_asked.answers.items():
            reference = cold_asked.answers[index]
            n_rows = len(answer.rows)
            if answer.finish_reason in ("stop", "length"):
                assert n_rows == len(reference.rows) and len(answer.tokens) == len(reference.tokens), what
            for i, (warm_row, cold_row) in enumerate(zip(answer.rows, reference.rows, strict=False)):
                same = np.array_equal(warm_row.view(np.int32), cold_row.view(np.int32))
                assert same, f"row {i} of sequence {index}, {what}"
            assert answer.tokens == reference.tokens[: len(answer.tokens)], what
            if n_rows:
                assert answer.prompt_logprobs == reference.prompt_logprobs, what


@every_model
def test_conversations(kind: str, quantize: str | None) -> None:
    """Room for everything; requests that come one after another, and beside each other."""
    setup, users = Setup(kind, quantize), Users(1)
    with serving(setup) as watched:
        trouble(watched, users, 20, 1)
        assert watched.engine.stats().cache.n_hit_tokens > 1000
    assert_as_cold(setup, users.asked)


def pressed(seed: int) -> Setup:
    """A setup where something or everything is short."""
    r = random.Random(seed)
    return Setup(
        *EVERY_MODEL[seed % len(EVERY_MODEL)], n_pages=r.choice([11, 14, 20, 30]), max_num_seqs=r.randint(3, 4),
        n_checkpoints=r.choice([0, 1, 2, 5]), host_mb=r.choice([0.0, 1.5, 3.0, 8.0]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_pressure(seed: int) -> None:
    """Few pages, checkpoints and units; preemption and aborts at any step, failed steps, resets."""
    setup, users = pressed(seed), Users(seed)
    with serving(setup) as watched:
        trouble(watched, users, 16, seed, preempts=0.08, mishaps=0.02)
    assert_as_cold(setup, users.asked)


@other_models
def test_preemption(kind: str, quantize: str | None) -> None:
    """Whoever is preempted comes back from host memory, again and again."""
    setup, users = Setup(kind, quantize, n_pages=40, n_checkpoints=4, host_mb=30), Users(2)
    with serving(setup) as watched:
        trouble(watched, users, 12, 2, preempts=0.15)
        stats = watched.engine.stats()
    assert stats.n_preemptions > 10 and stats.cache.read_bytes["host"] > 10e6
    assert_as_cold(setup, users.asked)


def test_one_request_for_all_slots() -> None:
    """There is no state slot beside those that n sequences write, and the checkpoint they could start from has one."""
    users, setup = Users(3, plain=True), Setup(max_num_seqs=3, n_checkpoints=0)
    first, again = users.ask(), users.ask()
    params = msgspec.structs.replace(first.request.params, n=3)
    again.request = msgspec.structs.replace(first.request, id="again", params=params)
    with serving(setup) as watched:
        serve(watched, [first, again], at_once=1)
    assert_as_cold(setup, [first, again])


@every_model
def test_restart(kind: str, quantize: str | None, tmp_path: Path) -> None:
    """A second engine on the same directory finds at once what the first would have found."""
    setup = Setup(kind, quantize, directory=tmp_path)
    stays, leaves = Users(1, plain=True), Users(1, plain=True)
    with serving(replace(setup, directory=None)) as watched:
        converse(watched, stays, 15)
        n_expected = serve(watched, stays.next_turns())
    with serving(setup) as watched:
        converse(watched, leaves, 15)
    with serving(setup) as watched:
        turns = leaves.next_turns()
        n_hit = serve(watched, turns)
        stats = watched.engine.stats().cache
    assert turns[0].cached_tokens > 0 and n_hit >= 0.95 * n_expected > 1000
    assert stats.read_bytes["disk"] > 0 and stats.n_damaged == 0
    assert_as_cold(setup, [*leaves.asked, *turns])


@pytest.mark.parametrize("seed", range(4))
def test_pressure_on_all_tiers(seed: int, tmp_path: Path) -> None:
    """Restart after restart, with little room anywhere, and a second engine on the directory that deletes there too."""
    setup = replace(pressed(seed), directory=tmp_path, disk_mb=random.Random(seed).choice([4, 20]))
    users = Users(seed)
    for life in range(3):
        with serving(setup) as watched, serving(setup) as beside:
            trouble(watched, users, 7, 10 * seed + life, preempts=0.05, mishaps=0.01)
            trouble(beside, users, 4, 10 * seed + life)
    assert_as_cold(setup, users.asked)


def damage(directory: Path, seed: int) -> None:
    """Does to a third of the files what disks, transfers and people do."""
    r = random.Random(seed)
    files = sorted(path for path in directory.rglob("*") if path.suffix in (".page", ".state"))
    for path in r.sample(files, len(files) // 3):
        content = bytearray(path.read_bytes())
        match r.randrange(4):
            case 0:
                content[r.randrange(len(content))] ^= 1 << r.randrange(8)
            case 1:
                content[r.randrange(128)] ^= 1 << r.randrange(8)
            case 2:
                del content[r.randrange(len(content)) :]
            case 3:  # whole and right, but another page's or state's
                content = bytearray(r.choice([f for f in files if f.suffix == path.suffix]).read_bytes())
        path.write_bytes(content)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files that are not what they were are never used: fewer hits, a warning, the same bits."""
    kind, quantize = EVERY_MODEL[seed]
    setup, users = Setup(kind, quantize, directory=tmp_path), Users(seed, plain=True)
    with serving(setup) as watched:
        converse(watched, users, 12)
    turns = users.next_turns()
    with serving(setup) as watched:
        n_expected = serve(watched, turns)
    damage(tmp_path, seed)
    again = [Asked(asked.request, [], {}) for asked in turns]
    with serving(setup) as watched, caplog.at_level(logging.WARNING, "deltic.engine.cache.tiers"):
        n_hit = serve(watched, again)
        assert watched.engine.stats().cache.n_damaged > 0
        assert any("damaged" in text for text in [*watched.info.notices, *caplog.messages])
    assert n_hit < n_expected
    assert_as_cold(setup, [*users.asked, *again])


@other_models
def test_two_servers_on_one_directory(kind: str, quantize: str | None, tmp_path: Path) -> None:
    """What one has computed the other finds, with the same bits."""
    setup, users = Setup(kind, quantize, directory=tmp_path), Users(3, plain=True)
    with serving(setup) as one, serving(setup) as other:
        stores = [watched.engine.cache.store for watched in (one, other)]
        one.engine.runner.tiers.takes_imports = True  # type: ignore[union-attr] # as if it had noticed the other already
        for watched in (one, other, one):
            converse(watched, users, 4)
            store = watched.engine.cache.store
            while store._to_save or store.n_moving:
                store.wait(0.1)
                store.poll()
        assert all(store.shared is not None and store.shared.n_found for store in stores)
        assert not sum(watched.engine.stats().cache.n_damaged for watched in (one, other))
    assert_as_cold(setup, users.asked)


def outputs_of(engine: Engine, requests: list[Request], spoil_at: int = -1) -> dict[tuple[str, int], list[Any]]:
    """What came of each sequence: tokens, log-probabilities, cached tokens. Before step spoil_at all memory is spoilt."""
    for request in requests:
        engine.add(request)
    found: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
    n_steps = 0
    while engine.has_work():
        if n_steps == spoil_at:
            memory = engine.runner.memory  # type: ignore[attr-defined]
            for part in (memory.pages, memory.states, memory.columns):
                part.view(np.uint8).fill(0xFF)
        for output in engine.step():
            assert output.error is None, output.error
            told = output.token_ids, output.logprobs, list(output.prompt_logprobs or ())
            found[output.id, output.index].append(msgspec.to_builtins(told))
        engine.check()
        n_steps += 1
    return found


@pytest.mark.parametrize("kind", ["dense", "next"])
def test_memory_that_is_not_finite(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever runs when all of the memory is spoilt is computed once more: the same bits, nothing twice."""
    rng = random.Random(1)
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True, logprobs=2)
    prompts = [[rng.randrange(200) for _ in range(n)] for n in (300, 70, 20, 500)]
    requests = [Request(id=str(i), prompt_ids=ids, params=params) for i, ids in enumerate(prompts)]
    requests[1].params = msgspec.structs.replace(params, n=2, repetition_penalty=1.2)
    requests[2].params = msgspec.structs.replace(params, prompt_logprobs=1, max_tokens=3)
    with serving(Setup(kind)) as watched:
        expected = outputs_of(Engine(watched.inner), requests)
        for at, n_running in ((1, 1), (6, 3)):
            engine = Engine(watched.inner)
            assert outputs_of(engine, requests, at) == expected
            assert engine.stats().n_recomputed >= n_running
        assert "were not finite" in caplog.text


def test_files_that_are_not_finite(tmp_path: Path) -> None:
    """Whole, with the right checksum, and full of what is no number: nobody gets it twice."""
    setup, users = Setup(directory=tmp_path), Users(5, plain=True)
    with serving(setup) as watched:
        converse(watched, users, 12)
    turns = users.next_turns()
    assert spoil(tmp_path) > 10
    with serving(setup) as watched:
        serve(watched, turns)
        stats = watched.engine.stats()
        assert stats.n_recomputed > 0 == stats.cache.n_damaged
        again = [Asked(msgspec.structs.replace(asked.request, id=f"{i}"), [], {}) for i, asked in enumerate(turns)]
        serve(watched, again)
        assert watched.engine.stats().n_recomputed == stats.n_recomputed
    assert_as_cold(setup, [*turns, *again])


def serve_until_killed(model: str, directory: Path, seed: int, ready: Connection) -> None:
    """The life of a child process."""
    watched = Watched(Setup(model=model, directory=directory, disk_mb=60).build())
    ready.send(True)
    for i in itertools.count():
        converse(watched, Users(1000 * seed + i, plain=True), 15)


def test_killed_while_writing(tmp_path: Path) -> None:
    """SIGKILL at any moment, of two processes that write to one directory: what is found afterwards is whole."""
    setup, r, model = Setup(directory=tmp_path, disk_mb=60), random.Random(0), str(tiny_checkpoint("dense"))
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["deltic.runtime.build", "pytest", "tests.tiny"])  # else each takes seconds
    all_asked, n_hit = [], 0
    for seeds in ((0, 1), (2, 3), (4, 5), (6, 7)):
        children = []
        for seed in seeds:
            here, there = fork.Pipe(duplex=False)
            child = fork.Process(target=serve_until_killed, args=(model, tmp_path, seed, there), daemon=True)
            child.start()
            there.close()
            children.append((child, here))
        for child, ready in children:
            assert ready.recv()
            time.sleep(r.uniform(0.02, 0.6))
            child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL
        with serving(setup) as watched:
            for seed in seeds:
                users = Users(1000 * seed, plain=True)  # the first of whom the child served
                n_hit += serve(watched, [users.ask()])
                converse(watched, users, 3)
                all_asked += users.asked
            assert watched.engine.stats().cache.n_damaged == 0
    assert n_hit > 0
    assert_as_cold(setup, all_asked)
