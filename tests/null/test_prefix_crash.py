"""The prefix cache on the real tiers: threads, files, and processes that are killed, below a runner without a model.

The runner compares every page and state that a chunk builds on with the tokens it stands for, so whatever the tiers bring back
wrong, half or late is an error in the step that uses it. A word that is not its state's in all places is a torn state.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from deltic.engine.cache.tiers import Tiers
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams
from deltic.ops.geometry import PAGE_SIZE
from tests.conversations import Conversations, Turn
from tests.fakes import MASK, FakeRunner, expected_tokens
from tests.sessions import spoil_something

ROOT = Path(__file__).resolve().parents[2]
STATE_WORDS = 80
"""Of 8 bytes: two and a half pages."""

PAGE_BYTES, STATE_BYTES = 4 * PAGE_SIZE, 8 * STATE_WORDS
MAX_PROMPT, MAX_TOKENS = 700, 100


class States:
    """State slots in memory that the tiers can move: one number, in two halves, as often as fits."""

    def __init__(self, n_slots: int) -> None:
        self.words = np.full((n_slots, STATE_WORDS), -1, np.int64)

    def __getitem__(self, state_slot: int) -> int:
        words = self.words[state_slot].reshape(-1, 2).copy()
        assert (words == words[0]).all(), f"state slot {state_slot} holds parts of two states"
        return int(words[0, 0]) | int(words[0, 1]) << 61

    def __setitem__(self, state_slot: int, state: int) -> None:
        self.words[state_slot, 0::2], self.words[state_slot, 1::2] = state & MASK, state >> 61


class SolidRunner(FakeRunner):
    """A FakeRunner with bytes, and real tiers below them."""

    def __init__(
        self, directory: Path | None, *, n_pages: int = 60, n_checkpoints: int = 16, n_units: int = 0,
        disk_bytes: int = 10**9, max_num_seqs: int = 4, gpu: bool = False,
    ) -> None:  # fmt: skip
        """gpu: prefill and decode differ, and pages and states travel through staging buffers."""
        super().__init__(
            n_pages=n_pages, max_num_seqs=max_num_seqs, max_model_len=MAX_PROMPT + MAX_TOKENS,
            n_slots=max_num_seqs + n_checkpoints, gpu=gpu, n_lookahead=int(gpu),
        )  # fmt: skip
        self.states: Any = States(self.n_slots)
        self.info.page_bytes, self.info.state_bytes = PAGE_BYTES, STATE_BYTES
        pages, states = self.pages.view(np.uint8), self.states.words.view(np.uint8)
        half = STATE_BYTES // 2  # two views, as recurrent states and convolution columns are
        host = np.zeros((n_units, PAGE_BYTES), np.uint8) if n_units else None
        to_disk = directory, disk_bytes if directory else 0, "0" * 32
        if gpu:
            import torch  # a second, which the children that are killed shall not take

            from deltic.runtime.gpu.copies import DeviceCopies

            copies = DeviceCopies([torch.from_numpy(self.pages)], [torch.from_numpy(self.states.words)], None)
            self.tiers = Tiers(copies.page, copies.state, host, STATE_BYTES, *to_disk, copies)
        else:
            self.tiers = Tiers(
                lambda page: [pages[page]], lambda state_slot: [states[state_slot][:half], states[state_slot][half:]],
                host, STATE_BYTES, *to_disk,
            )  # fmt: skip


class Traffic:
    """Random conversations with an engine, and what came of them."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = Random(seed)
        self.turns = Conversations(self.rng, MAX_PROMPT)
        self.asked: dict[str, tuple[Turn, Request]] = {}
        self.answers: dict[str, list[int]] = {}
        self.n_cached = 0

    def ask(self, turn: Turn) -> None:
        params = SamplingParams(max_tokens=self.rng.choice([1, 8, 70, MAX_TOKENS]), seed=1, ignore_eos=True)
        request = Request(
            id=str(len(self.asked)), prompt_ids=turn.prompt_ids, params=params, boundaries=turn.boundaries
        )
        self.asked[request.id], self.answers[request.id] = (turn, request), []
        self.engine.add(request)

    def step(self) -> None:
        outputs = self.engine.step()
        self.take(outputs)
        self.engine.check()

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.error is None or "not finite" in output.error, output.error
            self.answers[output.id] += output.token_ids
            self.n_cached += output.cached_tokens
            turn, request = self.asked[output.id]
            expected = expected_tokens(request.prompt_ids, request.params)
            if output.finish_reason == "length":
                assert self.answers[output.id] == expected
                self.turns.answered(turn, expected)

    def trouble(self, n_requests: int) -> None:
        """Requests at any time, steps of any size, preemptions, aborts, resets."""
        rng, scheduler = self.rng, self.engine.scheduler
        n_last = len(self.asked) + n_requests
        while len(self.asked) < n_last or self.engine.has_work():
            while len(self.asked) < n_last and (not self.engine.has_work() or rng.random() < 0.2):
                self.ask(next(self.turns))
            block_size = scheduler.info.block_size
            scheduler.max_step_tokens = rng.choice([64, 100, 200, 512]) // block_size * block_size
            running = [*scheduler._decodes, *scheduler._prefills]
            if running and rng.random() < 0.05:
                scheduler._preempt(rng.choice(running))
            if rng.random() < 0.02:
                self.take(self.engine.abort(rng.choice(list(self.asked))))
            if rng.random() < 0.005:
                self.engine.reset_cache()
            if rng.random() < 0.02:
                spoil_something(self.engine, self.engine.runner, rng)  # type: ignore[arg-type]
            self.step()

    def run(self) -> None:
        while self.engine.has_work():
            self.step()

    def check_end(self) -> None:
        """Nobody holds anything but the tree, and after a reset nothing does."""
        cache, store = self.engine.cache, self.engine.cache.store
        assert cache.n_pages_used == cache.n_slots_used == 0
        self.engine.reset_cache()
        self.engine.check()
        for pool in (store.pages, store.state_slots, store.units, cache.batch_slots):
            assert pool.n_free == pool.n


def n_bytes_on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for kind in ("page", "state") for path in directory.rglob(f"*.{kind}"))


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_pressure_on_real_tiers(seed: int, gpu: bool, tmp_path: Path) -> None:
    """The mover works beside the steps, with little room in every tier, over three lives on one directory."""
    if gpu:
        pytest.importorskip("torch")
    rng = Random(seed)
    disk_bytes = rng.choice([3_000, 30_000, 10**9])
    for life in range(3):
        runner = SolidRunner(
            tmp_path, n_pages=rng.choice([14, 20, 40]), n_checkpoints=rng.choice([0, 1, 3, 8]),
            n_units=rng.choice([0, 4, 12, 60]), disk_bytes=disk_bytes, gpu=gpu,
        )  # fmt: skip
        traffic = Traffic(Engine(runner), 10 * seed + life)
        traffic.trouble(15)
        traffic.engine.close(5.0)
        assert runner.tiers.n_damaged == 0
        n_files = sum(1 for _ in tmp_path.rglob("*.page")) + sum(1 for _ in tmp_path.rglob("*.state"))
        assert n_bytes_on_disk(tmp_path) <= disk_bytes + 128 * n_files  # and their headers
    traffic.check_end()


@pytest.mark.parametrize("seed", range(3))
def test_two_engines_on_one_directory(seed: int, tmp_path: Path) -> None:
    """Each deletes what the other believes to have: a miss, never a wrong hit, never an error."""
    disk_bytes = Random(seed).choice([5_000, 40_000])
    traffics = [
        Traffic(Engine(SolidRunner(tmp_path, n_pages=14, n_checkpoints=2, disk_bytes=disk_bytes)), seed)
        for _ in range(2)
    ]  # with equal seeds they ask much the same
    for _ in range(10):
        for traffic in traffics:
            traffic.trouble(2)
    for traffic in traffics:
        assert traffic.engine.runner.tiers.n_damaged == 0  # type: ignore[union-attr]
        traffic.check_end()
        traffic.engine.close(1.0)


def ask_alone(engine: Engine, id: str, prompt: list[int]) -> int:
    """The tokens of a prompt that were found, of which what is computed is saved."""
    params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    engine.add(Request(id=id, prompt_ids=prompt, params=params))
    n_cached = 0
    while engine.has_work():
        n_cached += sum(output.cached_tokens for output in engine.step())
    until_s = time.monotonic() + 10
    while not engine.cache.store.is_idle and time.monotonic() < until_s:
        engine.cache.store.wait(0.1)
        engine.cache.store.poll()
    return n_cached


def test_a_disk_that_is_full_before_the_budget_keeps_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        if n_bytes_on_disk(tmp_path) + len(data) > 12_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    rng = Random(1)
    prompts = [[rng.randrange(20, 900) for _ in range(400)] for _ in range(12)]
    engine = Engine(SolidRunner(tmp_path, disk_bytes=10**9))
    for i, prompt in enumerate(prompts):
        ask_alone(engine, str(i), prompt)
        engine.check()
    assert n_bytes_on_disk(tmp_path) <= 12_000
    assert 5_000 < engine.cache_summary()["tiers"]["disk"]["bytes_total"] < 12_000
    engine.close(5.0)
    engine = Engine(SolidRunner(tmp_path, disk_bytes=10**9))
    assert ask_alone(engine, "newest", prompts[-1]) == 384 and ask_alone(engine, "oldest", prompts[0]) == 0
    engine.close(5.0)


def test_a_disk_that_others_have_filled_is_used_whole_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of this server's was there to make room: nothing is deleted later, either."""

    def full(file: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    rng, runner = Random(1), SolidRunner(tmp_path, disk_bytes=10**9)
    engine, prompts = Engine(runner), [[rng.randrange(20, 900) for _ in range(400)] for _ in range(2)]
    assert runner.tiers.disk is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        ask_alone(engine, "full", prompts[0])
    assert not runner.tiers.disk.can_save and not n_bytes_on_disk(tmp_path)
    runner.tiers.disk._paused_until = 0.0
    ask_alone(engine, "room", prompts[1])
    engine.check()
    assert engine.cache_summary()["tiers"]["disk"]["bytes_total"] == 10**9
    engine.close(5.0)
    assert ask_alone(Engine(SolidRunner(tmp_path, disk_bytes=10**9)), "again", prompts[1]) == 384


def serve_until_killed(directory: str, seed: int) -> None:
    """The life of a child process: the same conversations whoever runs them, as far as it gets."""
    traffic = Traffic(Engine(SolidRunner(Path(directory), n_units=20, disk_bytes=200_000)), seed)
    print("ready", flush=True)
    while True:
        traffic.ask(next(traffic.turns))
        traffic.run()


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """What a killed process left is whole: it is found at once, and nothing of it is damaged."""
    rng, n_cached = Random(0), 0
    for life in range(4):
        code = f"from tests.null.test_prefix_crash import serve_until_killed as s; s({str(tmp_path)!r}, {life // 2})"
        child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.0, 0.25))
        child.kill()
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        runner = SolidRunner(tmp_path, disk_bytes=200_000)
        traffic = Traffic(Engine(runner), life // 2)
        traffic.ask(next(traffic.turns))  # as the child began
        traffic.run()
        n_cached += traffic.n_cached
        for _ in range(5):
            traffic.ask(next(traffic.turns))
            traffic.run()
        assert runner.tiers.n_damaged == 0
        traffic.engine.close(1.0)
    assert n_cached > 0
