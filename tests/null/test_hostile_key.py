"""What a key with few requests waits for in the engine beside one that sends all it can: seconds that a formula gives a step."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deltic.engine.engine import Engine
from deltic.engine.messages import Picture, PictureInfo, Request, SamplingParams
from deltic.engine.step import Step, StepResult
from tests.fakes import FakeRunner
from tests.null.test_picture_schedule import FakeTower

Parts = list[int | tuple[int, int]]
"""Tokens of text, or rows and columns of a picture that is new."""

QUIET: dict[str, tuple[Parts, int]] = {
    "16 tokens": ([31], 16),
    "a long prompt": ([900], 4),
    "200 tokens": ([31], 200),
    "a picture": ([20, (2, 3), 9], 4),
}
HOSTILE: list[tuple[Any, int, int]] = [
    *[([360], 64, 8)] * 5,
    *[([12, (32, 32), 5], 1, 1)] * 14,
    *[([19], 1, 1)] * 6,
    *[([900], 8, 1)] * 2,
]
"""Prompt, tokens and sequences of each request that is open at once, and sent again when it has ended."""


class Clock:
    now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    return clock


class TimedRunner(FakeRunner):
    """Steps that take as long as those of a tiny model on two cores, and give any tokens. A picture of 1,024 takes 0.26 s."""

    def __init__(self, n_blocks: int = 80) -> None:
        super().__init__(n_pages=2000)
        self.pictures = FakeTower(n_blocks, 0.004)  # type: ignore[assignment]
        self.info.pictures = PictureInfo(1024, 10**6, 1024)

    def step(self, step: Step) -> StepResult:
        n_decodes = sum(chunk.is_decode for chunk in step.chunks)
        time.sleep(0.00045 + 0.00017 * n_decodes + 0.0001 * (step.n_tokens - n_decodes))
        return StepResult([[20] for _ in step.draws], [None] * len(step.draws), {})


class Company:
    """Keys on one engine."""

    def __init__(self, seed: int = 1, n_blocks: int = 80) -> None:
        self.rng = random.Random(seed)
        self.engine = Engine(TimedRunner(n_blocks), max_itl_ms=250.0)
        self.engine.fit_cost()
        self.open: dict[str, int] = {}
        """Sequences of each request."""
        self._n = 0

    def ask(self, tenant: str, parts: Parts, max_tokens: int, n: int = 1) -> str:
        self._n += 1
        ids, pictures = list[int](), list[Picture]()
        for part in parts:
            if isinstance(part, int):
                ids += self.rng.choices(range(20, 70), k=part)
                continue
            pixels = bytes(part[0] * part[1] * 3072)
            key = self.rng.randbytes(16)
            pictures.append(Picture(key=key, rows=part[0], columns=part[1], pixels=pixels, first=len(ids)))
            ids += [999] * pictures[-1].n_tokens
        name, params = f"{tenant}-{self._n}", SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
        self.engine.add(
            Request(id=name, prompt_ids=ids, pictures=pictures, params=params, tenant=tenant, cache_salt=name)
        )
        self.open[name] = n
        return name

    def step(self) -> None:
        for output in self.engine.step():
            if output.finish_reason:
                assert output.finish_reason == "length", output.error
                self.open[output.id] -= 1
                if not self.open[output.id]:
                    del self.open[output.id]

    def attack(self) -> Iterator[None]:
        """A step beside the hostile key, again and again."""
        names = [""] * len(HOSTILE)
        while True:
            names = [
                name if name in self.open else self.ask("hostile", *asked)
                for name, asked in zip(names, HOSTILE, strict=True)
            ]
            self.step()
            yield


def test_a_key_s_answers_beside_a_hostile_one_take_twice_as_long_as_alone_and_a_third_of_a_second(clock: Clock) -> None:
    """`bench.hostile` allows half a second: the rest is for the server."""
    company = Company()
    hostile = company.attack()

    def took_s(kind: str, is_alone: bool) -> float:
        begin_s, name = clock.now_s, company.ask("quiet", *QUIET[kind])
        while name in company.open:
            company.step() if is_alone else next(hostile)
        return clock.now_s - begin_s

    alone_s = {kind: took_s(kind, is_alone=True) for kind in QUIET}
    for _ in range(20):
        next(hostile)
    for kind in [*QUIET] * 12:
        assert took_s(kind, is_alone=False) <= 2 * alone_s[kind] + 0.33, kind
        for _ in range(company.rng.randrange(4)):
            next(hostile)


@pytest.mark.parametrize("seed", range(4))
def test_who_owes_time_does_not_wait_for_ever(seed: int, clock: Clock) -> None:
    """Three keys with as many requests each, whose pictures have room for one at a time."""
    company = Company(seed, n_blocks=16)
    rng = company.rng
    for _ in range(40):
        for tenant in "abc":
            asked: list[Parts] = [[rng.randrange(1, 300)], [5, (rng.randrange(2, 32), 32), rng.randrange(1, 90)]]
            if rng.random() < 0.3:
                company.ask(tenant, rng.choice(asked), rng.randrange(1, 12), n=rng.choice([1, 1, 3]))
        for _ in range(rng.randrange(8)):
            company.step()
    for _ in range(5000):
        if not company.open:
            break
        company.step()
    assert not company.open
    company.engine.check()
