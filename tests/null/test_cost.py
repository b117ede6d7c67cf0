"""The estimate of a step's time: its fit at start, and what it makes of a machine that changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import pytest

from deltic.engine.cost import StepCost, StepLoad
from deltic.engine.step import Step
from deltic.ops.geometry import PAGE_SIZE
from tests.fakes import FakeRunner

Machine = Callable[[StepLoad], float]

MOST = 4096
"""Tokens of a step."""


def machine(load: StepLoad) -> float:
    """Seconds of a step: bound by reading weights up to some 32 rows, then by multiplying; attention beside it."""
    n_rows = load.n_rows + load.n_decodes
    return max(0.030, 0.0011 * n_rows) + 0.002 * load.n_decodes + 1e-7 * load.n_keys + 1e-7 * load.n_pairs


def fitted(target_s: float, machine: Machine, monkeypatch: pytest.MonkeyPatch, **info: int) -> StepCost:
    """A model that was fitted to steps which take what `machine` says."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def run(step: Step) -> None:
        assert len({c.sequence.batch_slot for c in step.chunks}) == len(step.chunks)
        pages = [page for chunk in step.chunks for page in chunk.sequence.pages]
        assert len(set(pages)) == len(pages) and max(pages) < runner.info.n_pages
        clock[0] += machine(StepLoad.of(step.chunks, 1))

    runner = FakeRunner(max_model_len=16384, **{"n_pages": 400, **info})
    cost = StepCost(target_s)
    cost.fit(run, runner.info)
    monkeypatch.undo()
    cost.fit_s = clock[0]  # type: ignore[attr-defined]
    return cost


def prefill(
    cost: StepCost, machine: Machine, n_prompt: int, n_decodes: int = 8, noise: Callable[[], float] = lambda: 1.0
) -> list[float]:  # fmt: skip
    """Runs a prompt beside decodes, as the scheduler cuts it: seconds of each step."""
    at, times = 0, []
    while at < n_prompt:
        load = StepLoad(n_decodes, 500 * n_decodes)
        length = min(n_prompt - at, max(PAGE_SIZE, cost.room(load, at, MOST)))
        load.add_prefill(length, at)
        times.append(machine(load) * noise())
        cost.observe(load, times[-1])
        at += length
    return times


@pytest.mark.parametrize("target_s", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("speed", [0.01, 0.3, 1.0, 10.0])
def test_a_fitted_model_keeps_to_the_target_from_the_first_step(
    target_s: float, speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine a hundred times as fast, and one so slow that nothing but a decode is measured: there 64 tokens a step."""

    def this(load: StepLoad) -> float:
        return machine(load) * speed

    cost = fitted(target_s, this, monkeypatch)
    assert cost.fit_s < 0.3 + 2 * this(StepLoad(1, 0, 64, 64 * 32))  # type: ignore[attr-defined]
    floor = max(target_s, this(StepLoad(8, 4000, PAGE_SIZE, PAGE_SIZE * 8192)))
    times = prefill(cost, this, 8192)
    assert max(times) <= floor * 1.02
    if floor == target_s and speed > 0.1:
        assert sorted(times)[len(times) // 2] > target_s / 2, "the target is made use of"


def test_without_a_fit_it_begins_with_64_tokens_and_learns() -> None:
    cost = StepCost(0.5)
    times = prefill(cost, machine, 16384)
    assert times[0] == machine(StepLoad(8, 4000, PAGE_SIZE, PAGE_SIZE * PAGE_SIZE / 2))
    assert max(times) <= 0.5 * 1.02 and times[-2] > 0.3


def test_noise_leaves_the_target_and_accidents_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(0)
    cost = fitted(0.3, machine, monkeypatch)
    times = [t for _ in range(12) for t in prefill(cost, machine, 8192, noise=lambda: rng.uniform(0.9, 1.1))]
    assert sorted(times)[len(times) * 99 // 100] <= 0.3 * 1.1
    before = cost.room(StepLoad(8), 0, 512)
    slow = iter([10.0, *[1.0] * 15] * 1000)  # somebody else has the machine for one step of sixteen
    prefill(cost, machine, 20_000, noise=lambda: next(slow))
    assert cost.room(StepLoad(8), 0, 512) >= before


def test_it_follows_a_machine_that_gets_slower_and_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = fitted(0.5, machine, monkeypatch)
    prefill(cost, machine, 8192)
    usual = cost.room(StepLoad(8), 0, 512)
    slow = prefill(cost, machine, 16384, noise=lambda: 2.0)
    assert sum(t > 0.5 * 1.02 for t in slow) <= 3 and cost.room(StepLoad(8), 0, 512) < usual
    prefill(cost, machine, 16384)
    assert cost.room(StepLoad(8), 0, 512) == usual


def test_context_and_decodes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = fitted(0.3, machine, monkeypatch)
    assert cost.room(StepLoad(1), 0, 512) > cost.room(StepLoad(1), 12_000, 512) > 0
    assert cost.room(StepLoad(1), 0, 512) > cost.room(StepLoad(64), 0, 512)
    assert cost.room(StepLoad(1), 0, 200) == 200, "what fits as a whole is not cut to the grid"
    more = StepLoad(1)
    more.add_prefill(cost.room(more, 0, 512), 0)
    assert cost.room(more, 0, 512) == 0


def test_a_pool_too_small_for_a_far_context_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for n_pages in (3, 4, 6, 12):
        for n_seqs in (1, 2, 5):
            fitted(0.3, machine, monkeypatch, n_pages=n_pages, max_num_seqs=n_seqs)
